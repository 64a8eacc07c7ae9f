# SPDX-License-Identifier: Apache-2.0
"""The bytes of a page: pinned by golden files, and the same numbers in every language."""

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import EncodedStates
from sphkv.core.tiers import DENSE, TierSpec, coded_tier
from sphkv.store import layout as page_layout
from sphkv.store.layout import PageLayout, PageView, header_words, write_dense_pages, write_pages
from sphkv.store.paging import PageRows, PositionMode

CHECKOUT = Path(__file__).resolve().parents[2]
HEAD_DIM, COUNT = 8, 21
K2V3, K1V16 = coded_tier(2.0, 3, page_tokens=32), coded_tier(1.0, 16, page_tokens=32)
GOLDEN = [
    ("page-k2v3-contiguous.bin", K2V3, PositionMode.CONTIGUOUS),
    ("page-k2v3-runs.bin", K2V3, PositionMode.RUNS),
    ("page-k2v3-tokens.bin", K2V3, PositionMode.TOKENS),
    ("page-k1v16-contiguous.bin", K1V16, PositionMode.CONTIGUOUS),
    ("page-k1v16-runs.bin", K1V16, PositionMode.RUNS),
    ("page-k1v16-tokens.bin", K1V16, PositionMode.TOKENS),
    ("page-max-contiguous.bin", DENSE, PositionMode.CONTIGUOUS),
    ("page-max-runs.bin", DENSE, PositionMode.RUNS),
    ("page-max-tokens.bin", DENSE, PositionMode.TOKENS),
]


def numbers(*shape: int, step: int, below: int) -> Tensor:
    """Integers of no pattern that a mistake would keep; the same everywhere."""
    count = torch.arange(int(torch.tensor(shape).prod()))
    return (count * step + count // 7 * 5 + 3).remainder(below).reshape(shape)


def rows_of(mode: PositionMode, tokens: int) -> PageRows:
    index = torch.arange(tokens)
    jump = {PositionMode.CONTIGUOUS: index * 0, PositionMode.RUNS: index // 16 * 48}
    positions = 1000 + index + jump.get(mode, index // 3 * 5)
    # two pages: a short one, which starts later, and a full one
    flags = numbers(2, tokens, step=7, below=3) == 0
    counts = torch.tensor([min(COUNT, tokens - 5), tokens])
    return PageRows(torch.stack([positions + 64, positions]), counts, flags)


def dense_states(tokens: int) -> Tensor:
    return numbers(2, tokens, HEAD_DIM, step=37, below=255).float() / 16 - 7


def encoded_states(tier: TierSpec) -> EncodedStates:
    tokens = tier.page_tokens
    if tier.has_value_codes:
        values = numbers(2, tokens, HEAD_DIM, step=11, below=2**tier.value_bits).to(torch.uint8)
    else:
        values = dense_states(tokens).bfloat16()
    return EncodedStates(
        numbers(2, tier.key_nibbles(HEAD_DIM), tokens, step=5, below=16).to(torch.uint8),
        numbers(2, tokens, step=29, below=256).to(torch.uint8),
        torch.tensor([0.5, -1.25]),
        torch.tensor([0.125, 3.0]),
        values,
        numbers(2, tokens, step=31, below=256).to(torch.uint8),
        torch.tensor([0.0625, 2.5]),
        torch.tensor([0.001, 0.75]),
    )


@pytest.mark.parametrize(("name", "tier", "mode"), GOLDEN, ids=[name for name, _, _ in GOLDEN])
def test_pages_are_those_of_the_golden_files(
    golden: Any, name: str, tier: TierSpec, mode: PositionMode
) -> None:
    layout = PageLayout(5, tier, HEAD_DIM, mode)
    rows, tokens = rows_of(mode, tier.page_tokens), tier.page_tokens
    if tier.is_coded:
        pages = write_pages(layout, encoded_states(tier), rows)
    else:
        pages = write_dense_pages(layout, dense_states(tokens), -dense_states(tokens), rows)
    golden.check(name, pages.numpy().tobytes())
    view = PageView(layout, pages)
    view.check()
    live = rows.live()
    assert torch.equal(view.counts(), rows.counts)
    assert torch.equal(view.positions()[live], rows.positions[live])
    assert torch.equal(view.flags(), rows.flags & live)
    if tier.is_coded:
        codes = view.key_codes().transpose(1, 2)[live]
        assert torch.equal(codes, encoded_states(tier).key_codes.transpose(1, 2)[live])
    else:
        assert torch.equal(view.dense_values()[live].float(), -dense_states(tokens)[live])


def coded_layouts() -> Iterator[PageLayout]:
    shapes = itertools.product((64, 80, 128), (1.0, 2.0, 3.0), (2, 3, 4, 8, 16), (32, 128))
    for (head_dim, key_bits, value_bits, tokens), mode in itertools.product(shapes, PositionMode):
        tier = coded_tier(key_bits, value_bits, page_tokens=tokens)
        yield PageLayout(1, tier, head_dim, mode)


def assert_compiles(folder: Path, text: str, *options: str) -> None:
    """Compile static assertions; nothing is run."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to evaluate the constants")
    source = folder / "check.cpp"
    source.write_text(text)
    command = [compiler, "-std=c++17", "-fsyntax-only", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def equal(name: str, value: int) -> str:
    return f'static_assert({name} == {value}, "{name}");\n'


def test_gpu_kernels_know_the_same_format(tmp_path: Path) -> None:
    folder = next((CHECKOUT / "src").rglob("page_format.cuh")).parent
    text = '#include "page_format.cuh"\n'
    for name, value in {
        "HEADER_BYTES": page_layout.HEADER_BYTES,
        "COUNT_OFFSET": page_layout.COUNT_OFFSET,
        "POSITION_BASE_OFFSET": page_layout.POSITION_BASE_OFFSET,
        "RADIUS_LOW_OFFSET": page_layout.RADIUS_LO_OFFSET,
        "RADIUS_STEP_OFFSET": page_layout.RADIUS_STEP_OFFSET,
        "SCALE_LOW_OFFSET": page_layout.SCALE_LO_OFFSET,
        "SCALE_STEP_OFFSET": page_layout.SCALE_STEP_OFFSET,
        "FLAGS_OFFSET": page_layout.FLAGS_OFFSET,
    }.items():
        text += equal(name, value)
    for index, layout in enumerate(coded_layouts()):
        sizes = (layout.page_tokens, layout.head_dim, layout.num_nibbles, layout.tier.value_bits)
        arguments = ", ".join(map(str, (*sizes, int(layout.position_mode))))
        text += f"using S{index} = PageStreams<{arguments}>;\n"
        for name, value in {
            "KEYS": layout.key_offset,
            "RADII": layout.radius_offset,
            "SCALES": layout.scale_offset,
            "VALUES": layout.value_offset,
            "PLACES": layout.position_offset,
            "NUM_PLACES": layout.num_position_words,
            "END": layout.payload_end,
            "BYTES": layout.page_bytes,
        }.items():
            text += equal(f"S{index}::{name}", value)
    assert_compiles(tmp_path, text, f"-I{folder}")


def test_native_kernels_know_the_same_format(tmp_path: Path) -> None:
    text = '#include "page.h"\nusing namespace sphkv;\n'
    for name, value in {
        "version": 0,
        "tier": 1,
        "mode": 2,
        "count": page_layout.COUNT_OFFSET,
        "capacity": page_layout.COUNT_OFFSET + 2,
        "position_base": page_layout.POSITION_BASE_OFFSET,
        "radius_lo": page_layout.RADIUS_LO_OFFSET,
        "radius_step": page_layout.RADIUS_STEP_OFFSET,
        "scale_lo": page_layout.SCALE_LO_OFFSET,
        "scale_step": page_layout.SCALE_STEP_OFFSET,
        "offsets": page_layout.FLAGS_OFFSET - 4 * len(next(coded_layouts()).offsets()),
        "flags": page_layout.FLAGS_OFFSET,
    }.items():
        text += equal(f"offsetof(PageHeader, {name})", value)
    text += equal("sizeof(PageHeader)", page_layout.HEADER_BYTES)
    text += equal("kPageVersion", page_layout.PAGE_VERSION)
    for index, layout in enumerate(coded_layouts()):
        sizes = (layout.page_tokens, layout.head_dim, layout.num_nibbles, layout.tier.value_bits)
        arguments = ", ".join(map(str, sizes))
        mode = f"static_cast<PositionMode>({int(layout.position_mode)})"
        text += f"constexpr PageLayout l{index} = coded_layout({arguments}, {mode});\n"
        for name, value in {
            "tokens": layout.page_tokens,
            "key_offset": layout.key_offset,
            "radius_offset": layout.radius_offset,
            "scale_offset": layout.scale_offset,
            "value_offset": layout.value_offset,
            "position_offset": layout.position_offset,
            "page_bytes": layout.page_bytes,
        }.items():
            text += equal(f"l{index}.{name}", value)
    assert_compiles(tmp_path, text, f"-I{CHECKOUT / 'csrc'}")


def test_header_words_are_those_of_a_page() -> None:
    layout = PageLayout(3, K2V3, HEAD_DIM, PositionMode.RUNS)
    pages = write_pages(layout, encoded_states(K2V3), rows_of(PositionMode.RUNS, 32))
    found = pages[0, : page_layout.FLAGS_OFFSET].view(torch.int32).tolist()
    words = header_words(layout)
    assert (words[0], words[7:]) == (found[0], tuple(found[7:]))
    assert words[1] | int(pages[0, page_layout.COUNT_OFFSET]) == found[1]
    assert words[2:7] == (0,) * 5
