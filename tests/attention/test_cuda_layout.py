# SPDX-License-Identifier: Apache-2.0
"""Fragment order, tables and shapes of the CUDA kernels; none of it needs a GPU."""

import itertools
import shutil
import subprocess

import pytest
import torch

from sphkv.attention.cuda import compiler
from sphkv.attention.cuda.fragments import (
    pack_gains,
    pack_keys,
    pack_values,
    to_fragment_order,
    unpack_gains,
    unpack_keys,
    unpack_values,
)
from sphkv.attention.cuda.geometry import PAGE_SIZES, KernelShape, lane_coordinates
from sphkv.attention.cuda.synthetic import (
    Oracle,
    random_pages,
    set_bases,
    synthetic_codebook,
    tier_layout,
)
from sphkv.attention.cuda.tables import build_tables, turn_rows
from sphkv.attention.request import AttentionOptions
from sphkv.codec.keys import SphericalCode, angle_logits_reference
from sphkv.core.rope import RopeSpec
from sphkv.store.layout import POSITION_BASE_OFFSET, PageView
from sphkv.store.paging import PositionMode


def _rope(head_dim: int) -> RopeSpec:
    return RopeSpec(
        head_dim, head_dim, tuple(5e5 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    )


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("slots", [16, 32, 48, 64, 96, 112, 128])
def test_key_codes_round_trip(slots, tokens):
    codes = torch.randint(0, 16, (3, slots, tokens), dtype=torch.uint8)
    packed = pack_keys(codes)
    assert packed.shape == (3, tokens // 2 * slots)
    assert torch.equal(unpack_keys(packed, tokens=tokens), codes)


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_value_codes_round_trip(bits, head_dim, tokens):
    codes = torch.randint(0, 1 << bits, (3, tokens, head_dim), dtype=torch.uint8)
    packed = pack_values(codes, bits=bits)
    assert packed.shape == (3, tokens * head_dim * bits // 8)
    unpacked = unpack_values(packed, bits=bits, head_dim=head_dim, tokens=tokens)
    assert torch.equal(unpacked, codes)


def test_bfloat_values_round_trip():
    values = torch.randn(2, 128, 64).bfloat16()
    packed = pack_values(values, bits=16)
    assert torch.equal(unpack_values(packed, bits=16, head_dim=64), values)


def test_gains_round_trip():
    codes = torch.randint(0, 256, (2, 3, 128), dtype=torch.uint8)
    unpacked = unpack_gains(pack_gains(codes[0], codes[1]))
    assert torch.equal(unpacked[:, 0], codes[0])
    assert torch.equal(unpacked[:, 1], codes[1])
    assert torch.equal(unpack_gains(pack_gains(codes[0], None))[:, 0], codes[0])


def test_key_byte_belongs_to_its_lane():
    codes = torch.zeros(1, 64, 128, dtype=torch.uint8)
    tile, g, t, word, byte = 5, 3, 2, 1, 3
    codes[0, 16 * word + 4 * byte + t, 16 * tile + g + 8] = 9
    packed = pack_keys(codes)[0]
    lane = 4 * g + t
    # four words of a lane are adjacent: one 16-byte load
    at = tile * 512 + lane * 16 + word * 4 + byte
    assert packed[at] == 9 << 4
    assert packed.count_nonzero() == 1


def test_three_bit_fields_are_masked_in_place():
    codes = torch.zeros(1, 128, 128, dtype=torch.uint8)
    codes[0, 2, 8 * 6 + 4] = 5  # key 2: t = 1, feature 6, g = 4
    packed = pack_values(codes, bits=3)[0]
    word = int(packed[(4 * 4 + 1) * 16 :][:4].view(torch.int32).item())
    assert word & 0x0038 == 5 << 3


@pytest.mark.parametrize("mode", list(PositionMode))
@pytest.mark.parametrize("value_bits", [2, 3, 4, 8])
def test_fragment_order_keeps_header_and_codes(mode, value_bits):
    layout = tier_layout(64, 32, value_bits, mode)
    pages = random_pages(layout, 3, device="cpu")
    words = max(1, layout.num_position_words)
    bases = torch.arange(3 * words).view(3, words) * (128 // words)
    set_bases(pages, layout, bases if mode else bases[:, 0])
    view = PageView(layout, pages)
    moved = to_fragment_order(view)
    assert torch.equal(moved[:, :64], pages[:, :64])
    assert torch.equal(moved[:, layout.position_offset :], pages[:, layout.position_offset :])
    keys = unpack_keys(moved[:, layout.key_offset : layout.radius_offset])
    assert torch.equal(keys, view.key_codes())
    values = moved[:, layout.value_offset : layout.position_offset]
    assert torch.equal(unpack_values(values, bits=value_bits, head_dim=64), view.value_codes())


def test_fragment_order_refuses_other_slot_counts():
    layout = tier_layout(64, 24, 4)
    with pytest.raises(ValueError, match="multiple of 16"):
        to_fragment_order(PageView(layout, random_pages(layout, 1, device="cpu")))


@pytest.mark.parametrize("spread", [False, True])
def test_table_look_ups_give_the_reference_logits(spread):
    """Walk the tables as the kernel does, in float, and compare with the reference."""
    head_dim, slots, position = 128, 64, 37
    rope, book = _rope(head_dim), synthetic_codebook(2, 64, slots, seed=3, device="cpu")
    shape = KernelShape(128, slots, 1, 1, 4, 4, spread=spread)
    words = build_tables(book, rope, shape).view(torch.int32)
    codes = torch.randint(0, 16, (2, slots, 16), dtype=torch.uint8)
    query = torch.randn(2, 1, head_dim)
    phase = rope.phases(position + torch.arange(16)).T[None]
    planes = rope.to_planes(query)
    expected = angle_logits_reference(
        planes, SphericalCode(codes, torch.ones(2, 16)), (phase.cos(), phase.sin()), book
    )[:, 0]
    base = rope.phases(torch.tensor(position)).double()
    q = torch.view_as_complex(planes[:, 0].double().contiguous()) * torch.polar(
        torch.ones_like(base), -base
    )
    got = torch.zeros(2, 16, dtype=torch.float64)
    g, t = lane_coordinates("cpu")
    lane = torch.arange(32)
    for head in range(2):
        plane_of = _entry_planes(words[head], shape)
        for slot in range(2 * shape.lookup_steps):
            entry = 4 * slot + t
            stored = torch.where(entry < slots, entry, entry - 8 * shape.double_steps)
            for half in range(2):
                key = g + 8 * half
                code = codes[head, stored, key].long()
                word = words[head, _point_word(shape, slot, code, half)]
                got[head].index_add_(0, key, _dot(word, q[head, plane_of[entry]]))
        for register in range(4):
            entry = 8 * shape.lookup_steps + 4 * (register // 2) + t
            word = words[head, shape.constant_offset // 4 + 4 * lane + register]
            got[head].index_add_(0, g + 8 * (register % 2), _dot(word, q[head, plane_of[entry]]))
    torch.testing.assert_close(got, expected.double(), atol=2e-3, rtol=2e-3)


def _point_word(shape, slot, code, half):
    """Word of the table that lane ``0 ... 31`` reads, as the kernel addresses it."""
    lane = torch.arange(32)
    single = shape.single_slots
    is_second = slot >= single + 2 * shape.double_steps
    double = slot - single - (2 * shape.double_steps if is_second else 0)
    if half == 1 and shape.spread:
        row = slot * 32 + lane if slot < single else single * 32 + double * 64 + lane
        return code * 1024 + row + (32 * is_second if slot >= single else 0)
    start = 0 if half == 1 else shape.high_bytes // 4
    if slot < single:
        return start + (slot // 2) * 1024 + code * 64 + (slot % 2) * 32 + lane
    return start + (single // 2 + double) * 1024 + code * 64 + 32 * is_second + lane


def _entry_planes(words, shape):
    start = shape.map_offset // 4
    ordered = words[start : start + shape.entries] & 255
    return ordered.reshape(-1, 4, 4).transpose(1, 2).flatten().long()


def _dot(word, q):
    point = word.contiguous().view(torch.float16).view(-1, 2).double()
    return point[:, 0] * q.real + point[:, 1] * q.imag


@pytest.mark.parametrize(("step", "row"), [(1, 3), (4, -7), (16, 9)])
def test_turns_of_contiguous_tiles_are_neighbours(step, row):
    rope = _rope(64)
    table = turn_rows(rope, 100, step=step, device=torch.device("cpu"))
    assert table.shape == (16 // step, 7 + 7 + 8, 32, 2)
    position = 16 * row + (16 - step)
    four = table[-1, 7 + row].view(torch.float16).view(-1, 4).float()
    phase = rope.phases(torch.tensor(position)).float()
    right = torch.stack([phase.cos(), -phase.sin(), phase.sin(), phase.cos()], 1)
    torch.testing.assert_close(four, right, atol=1e-3, rtol=0)


def test_tables_for_token_positions_hold_unturned_points_and_exact_frequencies():
    rope, book = _rope(64), synthetic_codebook(2, 32, 32, seed=3, device="cpu")
    shape = KernelShape(64, 32, 1, 1, 4, 8, positions=PositionMode.TOKENS)
    words = build_tables(book, rope, shape).view(torch.int32)
    low = words[:, shape.high_bytes // 4 :][:, : shape.low_bytes // 4]
    assert torch.equal(words[:, : shape.low_bytes // 4], low)
    start = shape.frequency_offset // 4
    fraction = words[0, start : start + shape.entries].long() % 2**32
    ordered = fraction.reshape(-1, 4, 4).transpose(1, 2).flatten()
    position = 131_071
    phase = (ordered * position % 2**32).double() / 2**32 * 2 * torch.pi
    right = rope.phases(torch.tensor(position)).double()[_entry_planes(words[0], shape)]
    torch.testing.assert_close(phase.cos(), right.cos(), atol=3e-4, rtol=0)
    torch.testing.assert_close(phase.sin(), right.sin(), atol=3e-4, rtol=0)


def test_oracle_agrees_with_the_reference_logits():
    layout, rope = tier_layout(64, 32, 4), _rope(64)
    book = synthetic_codebook(2, 32, 32, seed=5, device="cpu")
    pages = random_pages(layout, 2, device="cpu")
    set_bases(pages, layout, torch.tensor([0, 128]))
    query = torch.randn(3, 64)
    lse = Oracle(book, rope, layout).attend(query, pages, 1, AttentionOptions(0.125)).lse
    codes = unpack_keys(pages[:, layout.key_offset : layout.radius_offset])
    gains = unpack_gains(pages[:, layout.radius_offset : layout.value_offset])
    radius = (10.0 + 0.08 * gains[:, 0].float()).flatten()[None]
    phase = rope.phases(torch.arange(256)).T[None]
    logits = angle_logits_reference(
        rope.to_planes(query)[None] * 0.125,
        SphericalCode(codes.transpose(0, 1).flatten(1)[None], radius),
        (phase.cos(), phase.sin()),
        book.rows(torch.tensor([1])),
    )
    torch.testing.assert_close(lse.float(), logits[0].logsumexp(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", list(PositionMode))
@pytest.mark.parametrize("value_bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("head_dim", "slots", "group"), [(128, 64, 4), (128, 64, 8), (64, 32, 8)])
def test_shapes_fit_shared_memory(value_bits, head_dim, slots, group, mode):
    book = synthetic_codebook(2, head_dim // 2, slots, seed=1, device="cpu")
    shape = KernelShape.of_codebook(book, value_bits=value_bits, group=group, positions=mode)
    assert shape.shared_bytes <= 232_448
    # a stage serves one team only, or a warp could mistake the phase of its barrier
    assert shape.num_stages > shape.teams
    assert shape.num_stages % shape.teams == 0
    assert shape.page_bytes == tier_layout(head_dim, slots, value_bits, mode).page_bytes
    assert len(compiler.cubin_name("sphkv_decode", shape.defines(), "sm_90a")) > 20


def test_shapes_refuse_what_no_kernel_reads():
    for settings in ({"head_dim": 80}, {"nibbles": 24}, {"value_bits": 5}, {"columns": 16}):
        values = {"head_dim": 128, "nibbles": 64, "value_bits": 4, "columns": 4} | settings
        with pytest.raises(ValueError, match=next(iter(settings))):
            KernelShape(
                values["head_dim"], values["nibbles"], 0, 0, values["value_bits"], values["columns"]
            )


def _layout_source(shape, index):
    """The constants of ``layout.cuh`` for one shape, with what Python computes asserted."""
    text = compiler.sources()["layout.cuh"]
    body = text[text.index("// What a build is for.") : text.index("struct Params")]
    names = [flag[2:].split("=") for flag in shape.defines()]
    layout = tier_layout(
        shape.head_dim, shape.nibbles, shape.value_bits, shape.positions, shape.page_tokens
    )
    is_contiguous = shape.positions == PositionMode.CONTIGUOUS
    defines = "\n".join(f"#undef {name}\n#define {name} {value}" for name, value in names)
    expected = {
        "SHARED_BYTES": shape.shared_bytes,
        "ROW_PAGES": shape.row_pages,
        "LEAST_PAGES": shape.least_pages,
        "STAGES": shape.num_stages,
        "BLOCK_THREADS": shape.threads,
        "PAGE_BYTES": shape.page_bytes,
        "TABLE_BYTES": shape.table_bytes,
        "FREQUENCY_OFFSET": shape.frequency_offset,
        "CONSTANT_OFFSET": shape.constant_offset,
        "KEY_OFFSET": layout.key_offset,
        "GAIN_OFFSET": layout.radius_offset,
        "VALUE_OFFSET": layout.value_offset,
        "PAYLOAD_END": layout.position_offset,
        "POSITION_OFFSET": POSITION_BASE_OFFSET if is_contiguous else layout.position_offset,
        "POSITION_WORDS": layout.num_position_words,
    }
    checks = "\n".join(f'static_assert({k} == {v}, "{k}");' for k, v in expected.items())
    return f"{defines}\nnamespace shape{index} {{\n{body}\n{checks}\n}}\n"


def test_kernel_computes_the_same_layout(tmp_path):
    compile_command = shutil.which("g++") or shutil.which("clang++")
    if compile_command is None:
        pytest.skip("no C++ compiler to evaluate the kernel's constants")
    shapes = [
        KernelShape(
            head_dim, nibbles, double, 1, bits, columns, positions=mode, page_tokens=tokens
        ).fitted()
        for (head_dim, nibbles, double), bits, columns, mode, tokens in itertools.product(
            ((64, 32, 1), (128, 48, 1), (128, 64, 1), (128, 96, 1), (128, 96, 6)),
            (2, 3, 4, 8),
            (4, 8),
            PositionMode,
            PAGE_SIZES,
        )
    ]
    source = tmp_path / "layout.cpp"
    sources = map(_layout_source, shapes, range(len(shapes)))
    start = compiler.sources()["page_format.cuh"] + "\n#define CONSTANT_FUNCTION constexpr\n"
    source.write_text(start + "".join(sources))
    command = [compile_command, "-std=c++17", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def test_sources_name_every_definition():
    text = "".join(compiler.sources().values())
    for flag in KernelShape(128, 64, 1, 1, 4, 4).defines():
        assert flag[2:].split("=")[0] in text
