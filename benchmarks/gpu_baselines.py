# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, PLR0913
"""Paged split-KV decode attention over dense bfloat16 or FP8 pages: what we compare with."""

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 128
# keys per tile, warps, pipeline stages
CONFIGS = ((64, 4, 3), (64, 4, 4), (128, 8, 3), (128, 4, 3))
SPLITS = (8, 16, 32, 64)


@triton.jit
def _partial_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, out_ptr, lse_ptr, tokens, splits, scale,
    PAGE: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim, token = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TILE)
    query = tl.load(
        query_ptr + ((b * HEADS + h) * GROUP + row[:, None]) * DIM + dim[None],
        mask=row[:, None] < GROUP, other=0.0,
    ).to(COMPUTE)  # fmt: skip
    per_split = tl.cdiv(tokens, splits * PAGE) * PAGE
    start = s * per_split
    stop = tl.minimum(start + per_split, tokens)
    most = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for at in range(start, stop, TILE):
        page = tl.load(table_ptr + b * (tokens // PAGE) + at // PAGE).to(tl.int64)
        base = (page * HEADS + h) * PAGE + at % PAGE
        key = tl.load(key_ptr + (base + token[:, None]) * DIM + dim[None]).to(COMPUTE)
        value = tl.load(value_ptr + (base + token[:, None]) * DIM + dim[None]).to(COMPUTE)
        logit = tl.dot(query, tl.trans(key)) * scale
        top = tl.maximum(most, tl.max(logit, 1))
        weight = tl.exp2(logit - top[:, None])
        shrink = tl.exp2(most - top)
        mass = mass * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(COMPUTE), value)
        most = top
    slot = ((b * HEADS + h) * splits + s) * ROWS + row
    tl.store(out_ptr + slot[:, None] * DIM + dim[None], acc / mass[:, None])
    tl.store(lse_ptr + slot, most + tl.log2(mass))


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, splits,
    DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    head, g = tl.program_id(0), tl.program_id(1)
    split, dim = tl.arange(0, MOST), tl.arange(0, DIM)
    slot = (head * splits + split) * ROWS + g
    lse = tl.load(lse_ptr + slot, mask=split < splits, other=-1e30)
    weight = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(
        part_ptr + slot[:, None] * DIM + dim[None], mask=split[:, None] < splits, other=0.0
    )
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + (head * GROUP + g) * DIM + dim, out)


@triton.jit
def _append_kernel(
    key_ptr, value_ptr, key_pool, value_pool, page_ptr, key_stride, value_stride,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    b, h, dim = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM)
    at = (tl.load(page_ptr + b).to(tl.int64) * HEADS + h) * PAGE * DIM + dim
    tl.store(key_pool + at, tl.load(key_ptr + b * key_stride + h * DIM + dim))
    tl.store(value_pool + at, tl.load(value_ptr + b * value_stride + h * DIM + dim))


def append_state(keys, values, pool, pages):
    """The newest states ``[batch, heads, dim]`` go to the first place of each sequence's page."""
    batch, heads, dim = keys.shape
    _append_kernel[(batch, heads)](
        keys, values, *pool, pages, keys.stride(0), values.stride(0),
        PAGE=PAGE_TOKENS, HEADS=heads, DIM=dim, num_warps=1,
    )  # fmt: skip


class DensePaged:
    """One build of the dense kernel, combine included."""

    def __init__(self, query, keys, values, heads, config, splits):
        self.query, self.keys, self.values = query, keys, values
        self.batch, query_heads, self.dim = query.shape
        self.heads, self.group = heads, query_heads // heads
        self.rows = 16
        # FP8 turns into half with one instruction per two numbers, into bfloat16 with several
        self.compute = tl.bfloat16 if keys.dtype == torch.bfloat16 else tl.float16
        self.tile, self.warps, self.stages = config
        self.splits = splits
        size = (self.batch * heads * splits * self.rows, self.dim)
        self.part = torch.empty(size, device=query.device)
        self.lse = torch.empty(size[0], device=query.device)
        self.out = torch.empty(self.batch, query_heads, self.dim, device=query.device)

    def __call__(self, table, tokens, scale):
        """``table [batch, pages]`` int32; pages hold all heads."""
        _partial_kernel[(self.batch, self.heads, self.splits)](
            self.query, self.keys, self.values, table, self.part, self.lse, tokens, self.splits,
            scale * 1.44269504, PAGE=PAGE_TOKENS, DIM=self.dim, GROUP=self.group, ROWS=self.rows,
            HEADS=self.heads, TILE=self.tile, COMPUTE=self.compute, num_warps=self.warps,
            num_stages=self.stages,
        )  # fmt: skip
        _combine_kernel[(self.batch * self.heads, self.group)](
            self.part, self.lse, self.out, self.splits, DIM=self.dim, GROUP=self.group,
            ROWS=self.rows, MOST=triton.next_power_of_2(self.splits),
        )  # fmt: skip
        return self.out
