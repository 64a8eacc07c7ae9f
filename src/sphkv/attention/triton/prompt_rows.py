# SPDX-License-Identifier: Apache-2.0
"""Sums over rows of a prompt's attention, for the controller: no row is ever written down.

Each kernel reads keys and values once and finds weights where it needs them. Products of two
numbers of the model's own type are exact in float32. A float32 operand is cut into parts of that
type: queries into three, whose products add up to what float32 would give; weights and outputs into
two, for a share of 2^-17 of a weight moves no decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton import grid
from sphkv.codec import point_kernels
from sphkv.core.prompt_rows import PartTotals, RowPart, RowShape
from sphkv.core.tiers import RUN_TOKENS

# Rows and tokens of a tile of states of up to 256 bytes; products need at least 16.
_ROWS, _TOKENS, _LEAST = 64, 64, 16
_STATE_BYTES = 256
_WARPS = 4
# Sums over rows have larger tiles of tokens and smaller ones of rows, so that two are in flight.
_SUM_ROWS, _SUM_TOKENS, _SUM_WARPS = 32, 128, 8
# A block of moves reads few tiles, so nothing is loaded ahead, and small ones; a warp has 16 rows.
_MOVE_TOKENS, _MOVE_ROWS = 32, 16
# Blocks whose moves are added up at once. One warp does so within its threads; several would
# meet after every few blocks.
_NESTED_BLOCKS, _NESTED_WARPS = 16, 1
# The tokens of rows are split so that thread blocks have this many rows together: small ones are
# waited for longest. More blocks than the second number leave more to join than they save.
_SPLIT_ROWS, _MOST_BLOCKS = 264 * 128, 1056
# The largest tiles take 112 KiB of shared memory: compute capabilities whose blocks may have them.
_ROOMY = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


@triton.jit
def _parts(x, dtype: tl.constexpr):
    """Three numbers of a type whose sum is a float32 number."""
    high = x.to(dtype)
    rest = x - high.to(tl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(tl.float32)).to(dtype)


@triton.jit
def _left_product(x, y):
    """Product of float32 ``x`` with ``y`` of the model's type."""
    if y.dtype == tl.float32:
        found = tl.dot(x, y, input_precision="ieee")
    else:
        high, middle, low = _parts(x, y.dtype)
        found = tl.dot(high, y)
        found = tl.dot(middle, y, found)
        found = tl.dot(low, y, found)
    return found


@triton.jit
def _weighted(weight, values):
    """Sums of values by float32 weights, which two parts of the values' type are enough for."""
    if values.dtype == tl.float32:
        found = tl.dot(weight, values, input_precision="ieee")
    elif values.dtype == tl.float16:
        # half precision has no small weights: each row is scaled by its largest
        most = tl.maximum(tl.max(weight, axis=1), 1e-30)
        found = _in_two_parts(weight / most[:, None], values) * most[:, None]
    else:
        found = _in_two_parts(weight, values)
    return found


@triton.jit
def _in_two_parts(weight, values):
    """``_weighted`` by numbers that two parts of the values' type hold."""
    high = weight.to(values.dtype)
    low = (weight - high.to(tl.float32)).to(values.dtype)
    found = tl.dot(high, values)
    return tl.dot(low, values, found)


@triton.jit
def _right_product(x, y):
    """Product of ``x`` of the model's type with float32 ``y``."""
    if x.dtype == tl.float32:
        found = tl.dot(x, y, input_precision="ieee")
    else:
        high, middle, low = _parts(y, x.dtype)
        found = tl.dot(x, high)
        found = tl.dot(x, middle, found)
        found = tl.dot(x, low, found)
    return found


@triton.jit
def _row_logits(query, keys, IS_EXACT: tl.constexpr):
    """``[rows, tokens]`` of queries ``[rows, dim]`` and keys ``[dim, tokens]``."""
    if IS_EXACT:
        return tl.dot(query, keys, input_precision="ieee")
    else:
        return _left_product(query, keys)


@triton.jit
def _token_logits(keys, query, IS_EXACT: tl.constexpr):
    """``[tokens, rows]`` of keys ``[tokens, dim]`` and queries ``[dim, rows]``."""
    if IS_EXACT:
        return tl.dot(keys, query, input_precision="ieee")
    else:
        return _right_product(keys, query)


# one build for prompts of any length
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "chunk", "far_start", "far_stop"])
def _totals_kernel(
    query,
    bias,
    seen,
    keys,
    values,
    stats,
    outputs,
    key_head,
    key_token,
    value_head,
    value_token,
    num_tokens,
    num_rows,
    chunk,
    far_start,
    far_stop,
    scale,
    REPEAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
):
    """What a tile of rows gives to a chunk of the tokens.

    ``stats [splits, heads, rows, 4]``: greatest logit, sum of exponentials above it, the part of
    far tokens in that, and the second logit. ``outputs [splits, heads, rows, DIM]``.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim = tile * BR + tl.arange(0, BR), tl.arange(0, BD)
    is_row, is_dim = row < num_rows, dim < DIM
    is_held = is_row[:, None] & is_dim[None, :]
    own = head * num_rows + row
    rows = tl.load(query + own[:, None] * DIM + dim[None, :], mask=is_held, other=0.0)
    last = tl.load(seen + row, mask=is_row, other=-1)
    peak = tl.full([BR], float("-inf"), tl.float32)
    second = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    far = tl.zeros([BR], tl.float32)
    output = tl.zeros([BR, BD], tl.float32)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    groups = num_rows // REPEAT
    column = tl.arange(0, BT)
    for start in range(split * chunk, min(split * chunk + chunk, num_tokens), BT):
        token = start + column
        is_token = token < num_tokens
        at = token.to(tl.int64)
        key = tl.load(
            keys + at[None, :] * key_token + dim[:, None],
            mask=is_dim[:, None] & is_token[None, :],
            other=0.0,
        )
        logit = scale * _row_logits(rows, key, IS_EXACT)
        if HAS_BIAS:
            group = (head * groups + row // REPEAT).to(tl.int64) * num_tokens
            is_both = is_row[:, None] & is_token[None, :]
            logit += tl.load(bias + group[:, None] + at[None, :], mask=is_both, other=0.0)
        is_seen = (token[None, :] <= last[:, None]) & is_token[None, :]
        logit = tl.where(is_seen, logit, float("-inf"))
        best, place = tl.max(logit, axis=1, return_indices=True)
        others = tl.where(column[None, :] == place[:, None], float("-inf"), logit)
        second = tl.maximum(tl.minimum(peak, best), tl.maximum(second, tl.max(others, axis=1)))
        now = tl.maximum(peak, best)
        # rows that have seen nothing yet have no greatest logit
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp(peak - base)
        weight = tl.exp(logit - base[:, None])
        is_far = (token >= far_start) & (token < far_stop)
        total = total * shrink + tl.sum(weight, axis=1)
        far = far * shrink + tl.sum(tl.where(is_far[None, :], weight, 0.0), axis=1)
        value = tl.load(
            values + at[:, None] * value_token + dim[None, :],
            mask=is_token[:, None] & is_dim[None, :],
            other=0.0,
        )
        output = output * shrink[:, None] + _weighted(weight, value)
        peak = now
    heads = tl.num_programs(1)
    at = (split * heads).to(tl.int64) * num_rows + own
    tl.store(stats + at * 4, peak, mask=is_row)
    tl.store(stats + at * 4 + 1, total, mask=is_row)
    tl.store(stats + at * 4 + 2, far, mask=is_row)
    tl.store(stats + at * 4 + 3, second, mask=is_row)
    tl.store(outputs + at[:, None] * DIM + dim[None, :], output, mask=is_held)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sums_kernel(
    query,
    bias,
    share,
    valid,
    lse,
    output,
    rest,
    squares,
    keys,
    values,
    found,
    key_head,
    key_token,
    value_head,
    value_token,
    num_tokens,
    num_rows,
    scale,
    REPEAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
):
    """What a tile of tokens gets: ``found [3, heads, tokens]``.

    ``output`` and ``rest [heads, rows, DIM]`` are two parts of what rows give, in the values' type
    (the first is all of it where that is float32); ``squares`` are its squared norms.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    token, dim = tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    is_token, is_dim = token < num_tokens, dim < DIM
    is_held = is_token[:, None] & is_dim[None, :]
    at, first = token.to(tl.int64), head.to(tl.int64)
    key = tl.load(
        keys + first * key_head + at[:, None] * key_token + dim[None, :], mask=is_held, other=0.0
    )
    value = tl.load(
        values + first * value_head + at[:, None] * value_token + dim[None, :],
        mask=is_held,
        other=0.0,
    )
    wide = value.to(tl.float32)
    norm = tl.sum(wide * wide, axis=1)
    mass = tl.zeros([BT], tl.float32)
    energy = tl.zeros([BT], tl.float32)
    pull = tl.zeros([BT], tl.float32)
    groups = num_rows // REPEAT
    for start in range(0, num_rows, BR):
        row = start + tl.arange(0, BR)
        is_row = row < num_rows
        own = head * num_rows + row
        place = own[None, :] * DIM + dim[:, None]
        is_in = is_dim[:, None] & is_row[None, :]
        rows = tl.load(query + place, mask=is_in, other=0.0)
        logit = scale * _token_logits(key, rows, IS_EXACT)
        if HAS_BIAS:
            group = (head * groups + row // REPEAT).to(tl.int64) * num_tokens
            is_both = is_token[:, None] & is_row[None, :]
            logit += tl.load(bias + group[None, :] + at[:, None], mask=is_both, other=0.0)
        limit = tl.load(valid + row, mask=is_row, other=-1)
        above = tl.load(lse + own, mask=is_row, other=0.0)
        part = tl.load(share + own, mask=is_row, other=0.0)
        is_valid = (token[:, None] <= limit[None, :]) & is_token[:, None]
        weight = tl.where(is_valid, tl.exp(logit - above[None, :]), 0.0)
        given = tl.load(output + place, mask=is_in, other=0.0)
        if given.dtype == tl.float32:
            along = tl.dot(value, given, input_precision="ieee")
        else:
            along = tl.dot(value, given)
            along = tl.dot(value, tl.load(rest + place, mask=is_in, other=0.0), along)
        length = tl.load(squares + own, mask=is_row, other=0.0)
        gap = tl.maximum(length[None, :] + norm[:, None] - 2.0 * along, 0.0)
        mass += tl.sum(weight * part[None, :], axis=1)
        square = weight * weight * part[None, :]
        energy += tl.sum(square, axis=1)
        pull += tl.sum(square * gap, axis=1)
    place = first * num_tokens + at
    size = tl.num_programs(1).to(tl.int64) * num_tokens
    tl.store(found + place, mass, mask=is_token)
    tl.store(found + size + place, energy, mask=is_token)
    tl.store(found + 2 * size + place, pull, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_blocks", "num_units"])
def _moves_kernel(
    query,
    bias,
    valid,
    lse,
    keys,
    values,
    units,
    moved,
    gone,
    key_head,
    key_token,
    value_head,
    value_token,
    num_tokens,
    num_rows,
    num_blocks,
    num_units,
    scale,
    GRANULARITY: tl.constexpr,
    REPEAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
):
    """Weighted values of a block, and their weight, for a tile of rows.

    ``moved [heads, blocks, rows, DIM]`` and ``gone [heads, blocks, rows]``.
    """
    block, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dim = tile * BR + tl.arange(0, BR), tl.arange(0, BD)
    is_row, is_dim = row < num_rows, dim < DIM
    is_held = is_row[:, None] & is_dim[None, :]
    own = head * num_rows + row
    rows = tl.load(query + own[:, None] * DIM + dim[None, :], mask=is_held, other=0.0)
    limit = tl.load(valid + row, mask=is_row, other=-1)
    above = tl.load(lse + own, mask=is_row, other=0.0)
    mass = tl.zeros([BR], tl.float32)
    output = tl.zeros([BR, BD], tl.float32)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    place = head.to(tl.int64) * num_blocks + block
    groups = num_rows // REPEAT
    for start in range(0, num_units * GRANULARITY, BT):
        index = start + tl.arange(0, BT)
        is_unit = index < num_units * GRANULARITY
        unit = tl.load(units + place * num_units + index // GRANULARITY, mask=is_unit, other=-1)
        at = unit * GRANULARITY + index % GRANULARITY
        is_token = is_unit & (unit >= 0) & (at < num_tokens)
        key = tl.load(
            keys + at[None, :] * key_token + dim[:, None],
            mask=is_dim[:, None] & is_token[None, :],
            other=0.0,
        )
        logit = scale * _row_logits(rows, key, IS_EXACT)
        if HAS_BIAS:
            group = (head * groups + row // REPEAT).to(tl.int64) * num_tokens
            is_both = is_row[:, None] & is_token[None, :]
            logit += tl.load(bias + group[:, None] + at[None, :], mask=is_both, other=0.0)
        is_valid = (at[None, :] <= limit[:, None]) & is_token[None, :]
        weight = tl.where(is_valid, tl.exp(logit - above[:, None]), 0.0)
        mass += tl.sum(weight, axis=1)
        value = tl.load(
            values + at[:, None] * value_token + dim[None, :],
            mask=is_token[:, None] & is_dim[None, :],
            other=0.0,
        )
        output += _weighted(weight, value)
    at = place * num_rows + row
    tl.store(gone + at, mass, mask=is_row)
    tl.store(moved + at[:, None] * DIM + dim[None, :], output, mask=is_held)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _nested_kernel(
    moved,
    gone,
    output,
    share,
    found,
    num_rows,
    num_blocks,
    least_left,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Squared moves of a row as ever more blocks go: ``found [heads, rows, blocks]``."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, BD)
    is_dim = dim < DIM
    own = head * num_rows + row
    given = tl.load(output + own * DIM + dim, mask=is_dim, other=0.0)
    part = tl.load(share + own)
    lost = tl.zeros([BD], tl.float32)
    mass = tl.zeros([STEPS], tl.float32)
    first = head.to(tl.int64) * num_blocks
    for start in range(0, num_blocks, STEPS):
        step = start + tl.arange(0, STEPS)
        is_step = step < num_blocks
        at = (first + num_blocks - 1 - step) * num_rows + row
        more = tl.load(gone + at, mask=is_step, other=0.0)
        each = tl.load(
            moved + at[:, None] * DIM + dim[None, :],
            mask=is_step[:, None] & is_dim[None, :],
            other=0.0,
        )
        without = mass + tl.cumsum(more, axis=0)
        move = lost[None, :] + tl.cumsum(each, axis=0) - without[:, None] * given[None, :]
        left = tl.maximum(1.0 - without, least_left)
        square = tl.sum(move * move, axis=1) / (left * left)
        tl.store(found + own.to(tl.int64) * num_blocks + step, square * part, mask=is_step)
        lost += tl.sum(each, axis=0)
        mass += tl.sum(more, axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def _apart_kernel(
    values,
    mean,
    found,
    value_head,
    value_token,
    num_tokens,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """Squared distances of a tile of values to their head's mean: ``found [heads, tokens]``."""
    tile, head = tl.program_id(0), tl.program_id(1)
    token, dim = tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    is_token, is_dim = token < num_tokens, dim < DIM
    at, first = token.to(tl.int64), head.to(tl.int64)
    value = tl.load(
        values + first * value_head + at[:, None] * value_token + dim[None, :],
        mask=is_token[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    gap = value - tl.load(mean + head * DIM + dim, mask=is_dim, other=0.0)[None, :]
    gap = tl.where(is_dim[None, :], gap, 0.0)
    tl.store(found + first * num_tokens + at, tl.sum(gap * gap, axis=1), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def _spread_kernel(
    keys,
    weight,
    found,
    key_head,
    key_token,
    num_tokens,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """Squared keys of a tile times the weights of each group: ``found [heads, GROUPS, tokens]``."""
    tile, head = tl.program_id(0), tl.program_id(1)
    token, dim = tile * BT + tl.arange(0, BT), tl.arange(0, BD)
    is_token, is_dim = token < num_tokens, dim < DIM
    at, first = token.to(tl.int64), head.to(tl.int64)
    key = tl.load(
        keys + first * key_head + at[:, None] * key_token + dim[None, :],
        mask=is_token[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    square = key * key
    for group in range(GROUPS):
        own = head * GROUPS + group
        each = tl.load(weight + own * DIM + dim, mask=is_dim, other=0.0)
        total = tl.sum(square * each[None, :], axis=1)
        tl.store(found + own.to(tl.int64) * num_tokens + at, total, mask=is_token)


class TritonRows:
    """Sums over rows on a GPU; see ``RowKernels``."""

    def __init__(self) -> None:
        """Nothing is compiled yet."""
        self._lock = threading.Lock()
        self._compiling: dict[tuple[RowShape | None, torch.device], threading.Thread] = {}

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Whether blocks of a GPU may have the shared memory that the kernels need."""
        return torch.cuda.get_device_capability(device) in _ROOMY

    def prepare(self, shape: RowShape | None, device: torch.device) -> None:
        """Compile in threads, all at once, while a prompt is read; see ``RowKernels``."""
        if device.type != "cuda":
            return
        if device.index is None:
            # threads begin with a current device of their own
            device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            if (shape, device) in self._compiling:
                return
            # a process that ends waits for them: a compiler may not be left in its midst
            thread = threading.Thread(target=_compile_all, args=(shape, device))
            thread.start()
            self._compiling[shape, device] = thread

    def settle(self) -> None:
        """Wait for what is being compiled; see ``RowKernels``."""
        with self._lock:
            threads = list(self._compiling.values())
        for each in threads:
            each.join()

    def trials(self, shape: RowShape, device: torch.device) -> list[Callable[[], object]]:
        """Every kernel on a few states, which compiles it for prompts of any length."""
        heads, tokens, dim = 2, _SUM_TOKENS, shape.head_dim
        states = torch.zeros(heads, tokens, dim, dtype=shape.dtype, device=device)
        units = torch.zeros(heads, 1, tokens // RUN_TOKENS, dtype=torch.int64, device=device)
        mean = torch.zeros(heads, dim, device=device)
        works: list[Callable[[], object]] = [partial(self.apart, states, mean)]
        for rows, groups in ((shape.votes, 0), (shape.expected, shape.groups)):
            if not rows:
                continue
            dtype, bias = shape.dtype, None
            if groups:
                dtype, bias = torch.float32, torch.zeros(heads, groups, tokens, device=device)
                weight = torch.zeros(heads, groups, dim, device=device)
                works.append(partial(self.spread, states, weight))
            query = torch.zeros(heads, rows, dim, dtype=dtype, device=device)
            share = torch.zeros(heads, rows, device=device)
            last = torch.full((rows,), tokens - 1, dtype=torch.int32, device=device)
            part = RowPart(query, share, last, last, 1.0, bias)
            found = PartTotals(share, query.float(), share, share)
            works += [
                partial(self.totals, part, states, states, (0, tokens)),
                partial(self.sums, part, states, states, found),
                partial(self.drop_losses, part, states, states, found, units, RUN_TOKENS, 1.0),
            ]
        return works

    def spread(self, keys: Tensor, weight: Tensor) -> Tensor:
        """Squared keys times weights; see ``RowKernels``."""
        self.settle()
        keys = _packed(keys)
        heads, tokens, dim = keys.shape
        found = weight.new_empty(heads, weight.shape[1], tokens)
        _spread_kernel[(triton.cdiv(tokens, _TOKENS), heads)](
            keys, weight, found, *keys.stride()[:2], tokens,
            GROUPS=weight.shape[1], DIM=dim, BD=triton.next_power_of_2(dim), BT=_TOKENS,
        )  # fmt: skip
        return found

    def totals(
        self, part: RowPart, keys: Tensor, values: Tensor, far: tuple[int, int]
    ) -> PartTotals:
        """What each row gives; see ``RowKernels``."""
        self.settle()
        keys, values = _packed(keys), _packed(values)
        heads, rows, dim = part.query.shape
        tokens, constants = keys.shape[1], _constants(part, keys)
        tiles, most = triton.cdiv(rows, constants["BR"]), triton.cdiv(tokens, constants["BT"])
        blocks = min(_SPLIT_ROWS // constants["BR"], _MOST_BLOCKS)
        splits = max(1, min(most, blocks // (heads * tiles)))
        chunk = constants["BT"] * triton.cdiv(most, splits)
        splits = triton.cdiv(tokens, chunk)
        stats = part.share.new_empty(splits, heads, rows, 4)
        outputs = part.share.new_empty(splits, heads, rows, dim)
        _totals_kernel[(tiles, heads, splits)](
            part.query, part.bias, part.seen, keys, values, stats, outputs,
            *keys.stride()[:2], *values.stride()[:2], tokens, rows, chunk, *far, part.scale,
            **constants,
        )  # fmt: skip
        return _join(stats, outputs)

    def sums(
        self, part: RowPart, keys: Tensor, values: Tensor, totals: PartTotals
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What tokens get of the rows; see ``RowKernels``."""
        keys, values = _packed(keys), _packed(values)
        heads, rows, _ = part.query.shape
        tokens = keys.shape[1]
        found = part.share.new_empty(3, heads, tokens)
        output, constants = totals.output, _constants(part, keys)
        high = output.to(values.dtype)
        rest = high if high.dtype == output.dtype else (output - high).to(values.dtype)
        if (constants["BR"], constants["BT"]) == (_ROWS, _TOKENS):
            constants |= {"BR": _SUM_ROWS, "BT": _SUM_TOKENS, "num_warps": _SUM_WARPS}
        # the rows are few: one tile leaves nothing to load ahead
        stages = min(2, triton.cdiv(rows, constants["BR"]))
        _sums_kernel[(triton.cdiv(tokens, constants["BT"]), heads)](
            part.query, part.bias, part.share, part.valid, totals.lse, high, rest,
            output.square().sum(-1), keys, values, found, *keys.stride()[:2], *values.stride()[:2],
            tokens, rows, part.scale, num_stages=stages, **constants,
        )  # fmt: skip
        return found[0], found[1], found[2]

    def apart(self, values: Tensor, mean: Tensor) -> Tensor:
        """Squared distances of values to means; see ``RowKernels``."""
        values = _packed(values)
        heads, tokens, dim = values.shape
        found = mean.new_empty(heads, tokens)
        _apart_kernel[(triton.cdiv(tokens, _TOKENS), heads)](
            values, mean.contiguous(), found, *values.stride()[:2], tokens,
            DIM=dim, BD=triton.next_power_of_2(dim), BT=_TOKENS,
        )  # fmt: skip
        return found

    def drop_losses(
        self,
        part: RowPart,
        keys: Tensor,
        values: Tensor,
        totals: PartTotals,
        units: Tensor,
        granularity: int,
        least_left: float,
    ) -> Tensor:
        """Squared moves as ever more blocks go; see ``RowKernels``."""
        keys, values, units = _packed(keys), _packed(values), units.contiguous()
        heads, rows, dim = part.query.shape
        blocks, size = units.shape[1:]
        tokens, constants = keys.shape[1], _constants(part, keys)
        constants |= {
            "BT": min(constants["BT"], _MOVE_TOKENS),
            "num_warps": min(_WARPS, constants["BR"] // _MOVE_ROWS),
        }
        moved = part.share.new_empty(heads, blocks, rows, dim)
        gone = part.share.new_empty(heads, blocks, rows)
        if blocks:
            _moves_kernel[(blocks, triton.cdiv(rows, constants["BR"]), heads)](
                part.query, part.bias, part.valid, totals.lse, keys, values, units, moved, gone,
                *keys.stride()[:2], *values.stride()[:2], tokens, rows, blocks, size, part.scale,
                GRANULARITY=granularity, num_stages=1, **constants,
            )  # fmt: skip
        found = part.share.new_empty(heads, rows, blocks)
        _nested_kernel[(rows, heads)](
            moved, gone, totals.output, part.share, found, rows, blocks, least_left,
            DIM=dim, BD=constants["BD"], STEPS=_NESTED_BLOCKS, num_warps=_NESTED_WARPS,
        )  # fmt: skip
        return found.sum(1)


def _compile_all(shape: RowShape | None, device: torch.device) -> None:
    """Run every trial in a thread of its own."""

    def run(work: Callable[[], object]) -> None:
        # who needs what could not be compiled is told then
        with suppress(Exception), torch.cuda.device(device):
            work()

    with torch.cuda.device(device):
        # of an instance of its own: nothing there waits for these threads
        works = [] if shape is None else TritonRows().trials(shape, device)
        works += point_kernels.trials(device) + grid.trials(device)
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _packed(states: Tensor) -> Tensor:
    """States whose features lie side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def _constants(part: RowPart, keys: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for; larger states have smaller tiles."""
    groups, rows = 1 if part.bias is None else part.bias.shape[1], part.query.shape[1]
    width = max(16, triton.next_power_of_2(keys.shape[2]))
    size = max(1, width * keys.element_size() // _STATE_BYTES)
    return {
        # only biases are shared by rows: without any, one build does for all numbers of rows
        "REPEAT": 1 if part.bias is None else rows // groups,
        "HAS_BIAS": part.bias is not None,
        "IS_EXACT": part.query.dtype == keys.dtype,
        "DIM": keys.shape[2],
        "BD": width,
        "BR": max(_LEAST, min(_ROWS // size, 1 << (rows - 1).bit_length())),
        "BT": max(_LEAST, _TOKENS // size),
        "num_warps": _WARPS,
    }


def _join(stats: Tensor, outputs: Tensor) -> PartTotals:
    """Totals over chunks of tokens, ``[splits, heads, rows, ...]``."""
    peak, total, far, second = stats.unbind(-1)
    most = peak.amax(0)
    weight = (peak - most).exp()
    total = (weight * total).sum(0)
    lse = most + total.log()
    output = (weight[..., None] * outputs).sum(0) / total[..., None]
    # without a search for the two largest, which takes longer than all else here
    others = peak.scatter(0, peak.argmax(0, keepdim=True), -torch.inf)
    top = torch.stack([most, torch.maximum(others.amax(0), second.amax(0))], -1)
    return PartTotals(lse, output, (weight * far).sum(0) / total, (top - lse[..., None]).exp())
