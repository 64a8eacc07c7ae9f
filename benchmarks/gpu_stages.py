# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, PLR0913
"""What the parts of decode attention cost, and what rebuilding keys would cost.

``PYTHONPATH=src python3 benchmarks/gpu_stages.py --output results/gpu/stages.json``

*Stages*: the decode kernel with one stage left out of its source; what it then computes is wrong,
only its time is meant. *Recon*: decode all pages to dense bfloat16 keys and values, then attend to
those with the dense kernel; checked against the definition.
"""

import argparse
import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from gpu_baselines import CONFIGS, PAGE_TOKENS, DensePaged
from gpu_decode import DEVICE, MODELS, Workspace, common, copy_bandwidth, median_us

from sphkv.attention.cuda import compiler
from sphkv.attention.cuda.pages import PagePool
from sphkv.attention.triton.tables import turn_steps
from sphkv.store.layout import PageView
from sphkv.store.paging import PositionMode

POINTS = ((1, 131072), (8, 131072))
# (file, text, what stands there instead)
STAGES = {
    "look-ups": (
        ("keys.cuh", "  look_up<WORD>(points, low, high, lane);",
         "  for (int k = 0; k < 8; k++) points.first[k] = low + k, points.second[k] = high ^ k;"),
    ),
    "turned queries": (
        ("keys.cuh",
         "combine_half2(query.at[0][k], turns.word[2 * i], turns.word[2 * i + 1])",
         "query.at[0][k]"),
        ("keys.cuh",
         "if constexpr (!IS_TOKENS) turns.load(places.turns[set] + PAIR * TURN_PAIR_BYTES);", ""),
    ),
    "exponentials": (
        ("decode.cu", "exp2_fast(above[2 * half]), b = exp2_fast(above[2 * half + 1])",
         "above[2 * half], b = above[2 * half + 1]"),
        ("decode.cu", "if (__any_sync(ALL_LANES, above.is_too_high()))", "if (false)"),
    ),
    "values": (
        ("decode.cu",
         "add_values(acc, values + u * VALUE_TILE_BYTES, w[0] & mine, w[1] & mine, lane);",
         "acc.o[u][0] += __uint_as_float((w[0] + w[1]) & mine) + values;"),
    ),
    "all but loads": (
        ("decode.cu",
         "attend_page(p, row.index, query, run, acc, stage_address(stage.index), place, supply,"
         " page,\n                  constants);",
         "if constexpr (!HAS_SUPPLIERS) supply.send(p, page, place.lane);"
         "\n      acc.o[0][0] += __uint_as_float(query.at[0][0]);"),
    ),
}  # fmt: skip


def without(stage):
    """Kernel sources with a stage left out."""
    files = dict(SOURCES)
    for name, text, instead in STAGES.get(stage, ()):
        if text not in files[name]:
            raise SystemExit(f"{name} has no {text!r} any more")
        files[name] = files[name].replace(text, instead)
    return files


SOURCES = compiler.sources()


def time_stages(space):
    """Microseconds of the kernel by point, whole and with each stage left out."""
    pool, times = PagePool(space.pages, PositionMode.CONTIGUOUS), {}
    lists = {point: space.point(*point)[1] for point in POINTS}
    for stage in (None, *STAGES):
        compiler.sources = lambda s=stage: without(s)
        compiler._kernel_files.cache_clear()
        decoder = space.decoder(None)
        for point in POINTS:
            query, result = space.query(point[0]), decoder.empty_result(point[0])
            us = median_us(
                lambda i, d=decoder, q=query, r=result, p=point: d.attend(
                    q, pool, lists[p][i], space.options, result=r
                ),
                4,
                len(lists[point]),
            )
            times.setdefault(stage or "whole", {})[str(point)] = us
            print(f"  {stage or 'whole':16s} {point!s:14s} {us:8.1f} us", flush=True)
    compiler.sources = lambda: SOURCES
    compiler._kernel_files.cache_clear()
    return times


@triton.jit
def _rebuild_kernel(
    page_ptr, list_ptr, key_ptr, value_ptr, slot_ptr, point_ptr, constant_ptr, turn_ptr,
    channel_ptr, per_head, PAGE_BYTES: tl.constexpr, PLANES: tl.constexpr, STAGES: tl.constexpr,
    RADIUS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Keys and values of one page with 4-bit values; a plane sums up to ``STAGES`` points."""
    at = tl.program_id(0).to(tl.int64)
    head = at // per_head
    page = page_ptr + tl.load(list_ptr + at).to(tl.int64) * PAGE_BYTES
    plane, token = tl.arange(0, PLANES), tl.arange(0, 128)
    word = page.to(tl.pointer_type(tl.float32))
    radius = tl.load(page + RADIUS + token).to(tl.float32)
    radius = tl.load(word + 3) + tl.load(word + 4) * radius
    base = tl.load((page + 8).to(tl.pointer_type(tl.int32))).to(tl.int64)
    x = tl.load(constant_ptr + (head * PLANES + plane) * 2)[None, :] + tl.zeros(
        [128, 1], tl.float32
    )
    y = tl.load(constant_ptr + (head * PLANES + plane) * 2 + 1)[None, :] + tl.zeros(
        [128, 1], tl.float32
    )
    for stage in tl.static_range(STAGES):
        # slot, and first point, of the plane's stage; the points of no slot are zero
        slot = tl.load(slot_ptr + ((head * PLANES + plane) * STAGES + stage) * 2)
        first = tl.load(slot_ptr + ((head * PLANES + plane) * STAGES + stage) * 2 + 1)
        packed = tl.load(page + 64 + slot[None, :] * 64 + (token % 64)[:, None])
        code = (packed >> (token // 64 * 4)[:, None]) & 15
        place = (first[None, :] + code) * 2
        x += tl.load(point_ptr + place)
        y += tl.load(point_ptr + place + 1)
    turn = (tl.load(turn_ptr + plane)[None, :] * (base + token)[:, None]) >> 32
    angle = turn.to(tl.float32) * 1.4629180792671596e-09
    cos, sin = tl.cos(angle), tl.sin(angle)
    row = (at * 128 + token)[:, None] * (2 * PLANES)
    one = row + tl.load(channel_ptr + plane * 2)[None, :]
    two = row + tl.load(channel_ptr + plane * 2 + 1)[None, :]
    tl.store(key_ptr + one, ((x * cos - y * sin) * radius[:, None]).to(tl.bfloat16))
    tl.store(key_ptr + two, ((x * sin + y * cos) * radius[:, None]).to(tl.bfloat16))
    scale = tl.load(page + RADIUS + 128 + token).to(tl.float32)
    scale = tl.load(word + 5) + tl.load(word + 6) * scale
    dim = tl.arange(0, 2 * PLANES)
    where = ((token // 8)[:, None] * (2 * PLANES) + dim[None, :]) * 4 + (token % 4)[:, None]
    packed = tl.load(page + VALUES + where)
    code = ((packed >> (token % 8 // 4 * 4)[:, None]) & 15).to(tl.float32)
    value = (code - 7.5) * scale[:, None]
    tl.store(value_ptr + row + dim[None, :], value.to(tl.bfloat16))


class Rebuild:
    """Decodes pages to dense ones; random bytes are read as token-transposed pages."""

    def __init__(self, space, num_pages):
        book, heads = space.book, space.model.kv_heads
        planes, slots = book.num_planes, book.num_slots
        # a last slot of zero points stands for stages a plane does not have
        table = torch.zeros(heads, planes, 3, 2, dtype=torch.int64)
        table[..., 1] = heads * slots * 32
        filled = torch.zeros(heads, planes, dtype=torch.int64)
        for head in range(heads):
            singles = slots - int(book.num_pairs[head])
            for slot in range(slots):
                for half in range(1 if slot < singles else 2):
                    plane = int(book.slot_plane[head, slot, half])
                    first = ((head * slots + slot) * 2 + half) * 16
                    table[head, plane, filled[head, plane]] = torch.tensor([slot, first])
                    filled[head, plane] += 1
        points = torch.cat([book.points.flatten(0, 3), book.points.new_zeros(16, 2)])
        size = (num_pages * PAGE_TOKENS, space.model.head_dim)
        self.space = space
        self.keys, self.values = (
            torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
        )
        self.tables = (
            table.to(DEVICE), points.contiguous(), book.constant.contiguous(),
            turn_steps(space.rope).to(DEVICE), space.rope.plane_channels(DEVICE),
        )  # fmt: skip

    def __call__(self, lists):
        """Pages of a point, head by head."""
        layout, model = self.space.layout, self.space.model
        pages = len(lists.page_ids)
        _rebuild_kernel[(pages,)](
            self.space.pages, lists.page_ids, self.keys, self.values, *self.tables,
            pages // model.kv_heads, PAGE_BYTES=layout.page_bytes, PLANES=model.head_dim // 2,
            STAGES=3, RADIUS=layout.radius_offset, VALUES=layout.value_offset, num_warps=8,
        )  # fmt: skip

    def check(self, lists):
        """Largest relative error of a few pages against the definition."""
        self(lists)
        space, book, worst = self.space, self.space.book, 0.0
        per_head = len(lists.page_ids) // space.model.kv_heads
        for at in (0, per_head + 1, len(lists.page_ids) - 1):
            view = PageView(space.layout, space.pages[lists.page_ids[at]][None])
            head, codes = at // per_head, view.key_codes()[0].long()
            z = book.constant[head].double()[:, None].expand(-1, 128, -1).clone()
            slot = torch.arange(len(codes), device=DEVICE)[:, None]
            for half in range(2):
                picked = book.points[head, :, half].double()[slot, codes]
                z.index_add_(0, book.slot_plane[head, :, half], picked)
            phase = space.rope.phases(view.positions()[0]).T
            turned = torch.view_as_complex(z) * torch.polar(torch.ones_like(phase), phase)
            channel, right = space.rope.plane_channels(DEVICE), torch.zeros(128, 128).to(DEVICE)
            radius = view.radius()[0].double()
            right[:, channel[:, 0]] = (turned.real * radius).T.float()
            right[:, channel[:, 1]] = (turned.imag * radius).T.float()
            got = self.keys[at * 128 : at * 128 + 128].float()
            worst = max(worst, float((got - right).norm() / right.norm()))
            right = (view.value_codes()[0].float() - 7.5) * view.value_scale()[0][:, None]
            got = self.values[at * 128 : at * 128 + 128].float()
            worst = max(worst, float((got - right).norm() / right.norm()))
        return worst


def time_recon(space):
    """Microseconds by point: rebuilding, attending to what was rebuilt, both."""
    model, times = space.model, {}
    rebuild = Rebuild(space, space.total)
    for batch, context in POINTS:
        lists = space.point(batch, context)[1]
        error = rebuild.check(lists[0])
        if not error < 1e-2:
            raise SystemExit(f"wrong pages rebuilt: error {error}")
        query, per_row = space.query(batch), context // PAGE_TOKENS
        # a head's pages lie together: every (head, sequence) is a sequence of its own
        rows = query.view(batch, model.kv_heads, model.group, -1).transpose(0, 1)
        rows = rows.reshape(model.kv_heads * batch, model.group, -1).contiguous()
        table = torch.arange(len(lists[0].page_ids), dtype=torch.int32, device=DEVICE)
        table = table.view(-1, per_row)
        made = median_us(lambda i, ls=lists: rebuild(ls[i]), 2, len(lists))
        best = float("inf")
        for splits in (8, 16, 32) if batch == 1 else (2, 4, 8):
            for config in CONFIGS:
                dense = DensePaged(rows, rebuild.keys, rebuild.values, 1, config, splits)

                def both(i, ls=lists, d=dense, t=table, c=context):
                    rebuild(ls[i])
                    d(t, c, model.head_dim**-0.5)

                best = min(best, median_us(both, 2, len(lists), repeats=5))
        times[str((batch, context))] = {"rebuild_us": made, "us": best, "error": error}
        print(f"  recon {(batch, context)!s:14s} {best:8.1f} us, rebuilding {made:.1f}", flush=True)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    copy, records = copy_bandwidth(), []
    for value_bits in (4, 2):
        space = Workspace(MODELS[0], value_bits, seed=1)
        print(f"{MODELS[0].name}, values of {value_bits} bits", flush=True)
        record = {
            "shape": MODELS[0].name,
            "value_bits": value_bits,
            "bytes_per_key": space.layout.page_bytes / PAGE_TOKENS,
            "us_without": time_stages(space),
        }
        if value_bits == 4:
            record["recon"] = time_recon(space)
        shared = common(args.commit, copy)
        shared["command"] = "PYTHONPATH=src python3 benchmarks/gpu_stages.py"
        records.append(record | shared)
        del space
        torch.cuda.empty_cache()
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
