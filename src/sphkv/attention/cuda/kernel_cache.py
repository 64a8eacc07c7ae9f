# SPDX-License-Identifier: Apache-2.0
"""Decode kernels of a cache, one per codec, layer and tier, each checked before it serves.

The check is of the kernel against the float64 oracle, on random pages of the real codebook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.cuda.build import prepare
from sphkv.attention.cuda.compiler import architecture
from sphkv.attention.cuda.decode import ENTRY_POINT, CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import PAGE_TOKENS, TILE_KEYS, KernelShape
from sphkv.attention.cuda.pages import PageLists, PagePool
from sphkv.attention.cuda.synthetic import Oracle, random_pages, set_bases, set_counts, tier_layout
from sphkv.attention.cuda.tables import build_tables
from sphkv.attention.request import AttentionOptions
from sphkv.codec.codebook import AngleCodebook
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec
from sphkv.errors import KernelMismatchError
from sphkv.store.paging import PositionMode

# Relative error of the output: half-precision products and weights.
ERROR_FLOOR = 5e-3
_ROW_PAGES = 5
_LEAST_POSITIONS = 8192
# Product steps a layer may do in vain to share its kernel with others.
_SPARE_STEPS = 2


_Kind = tuple[int, TierSpec, PositionMode]

# Kernels that were found right on a device by this process: a cache is made for every prompt, and
# what is compiled for a shape does not change.
_CHECKED: set[tuple[str, KernelShape, int]] = set()


def self_test(
    codebook: AngleCodebook,
    rope: RopeSpec,
    *,
    value_bits: int,
    group: int,
    shape: KernelShape | None = None,
) -> float:
    """Run the kernel of one layer, tier and position mode on random pages.

    Args:
        codebook: Slots of the layer and tier, on the GPU.
        rope: The layer's rotary embedding.
        value_bits: Width of value codes.
        group: Query heads per KV head.
        shape: Kernel shape; the one that fits the codebook if None, for contiguous pages.

    Returns:
        Largest relative error over heads.

    Raises:
        KernelMismatchError: The error is above the floor or the output is not finite.
    """
    device = codebook.points.device
    heads, head_dim = codebook.points.shape[0], rope.head_dim
    mode = PositionMode.CONTIGUOUS if shape is None else shape.positions
    tokens = PAGE_TOKENS if shape is None else shape.page_tokens
    layout = tier_layout(head_dim, codebook.num_slots, value_bits, mode, tokens)
    pages = random_pages(layout, heads * _ROW_PAGES, device=device)
    counts = torch.full((len(pages),), tokens, device=device)
    counts[_ROW_PAGES - 1 :: _ROW_PAGES] = tokens // 2 + 1
    set_counts(pages, counts)
    words = {PositionMode.CONTIGUOUS: 1, PositionMode.RUNS: tokens // TILE_KEYS}.get(mode, tokens)
    bases = torch.arange(_ROW_PAGES * words, device=device) * (tokens // words)
    set_bases(pages, layout, bases.view(_ROW_PAGES, words).repeat(heads, 1).squeeze(1))
    turns = TurnTable.build(rope, max_positions=tokens * _ROW_PAGES, device=device)
    decoder = CudaDecode(
        codebook, rope, turns, value_bits=value_bits, group=group, max_batch=1, shape=shape
    )
    ids = torch.arange(len(pages), device=device).view(heads, 1, _ROW_PAGES)
    lists = PageLists.from_table(ids, torch.full((heads, 1), _ROW_PAGES, device=device), pages)
    query = torch.randn(1, heads * group, head_dim, device=device)
    result = decoder.empty_result(1)
    result.output.fill_(torch.nan)
    options = AttentionOptions(scale=head_dim**-0.5)
    decoder.attend(query, PagePool(pages, mode), lists, options, result=result)
    oracle, worst = Oracle(codebook, rope, layout), 0.0
    for head in range(heads):
        rows = slice(head * group, (head + 1) * group)
        right = oracle.attend(query[0, rows], pages[ids[head, 0]], head, options).output
        gap = (result.output[0, rows].double() - right).norm() / right.norm().clamp(min=1e-6)
        worst = max(worst, gap.nan_to_num(torch.inf).item())
    if not worst < ERROR_FLOOR:
        raise KernelMismatchError(
            f"decode kernel {decoder.shape} is off by {worst:.1e}, more than {ERROR_FLOOR:.0e}"
        )
    return worst


class DecodeTables:
    """What kernels look up, by position and by codes: made once for all that read the same codes.

    Args:
        device: The GPU.

    Attributes:
        num_positions: Positions that tables by position are made for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_positions = _LEAST_POSITIONS
        self._turns: dict[RopeSpec, TurnTable] = {}
        self._codes: WeakKeyDictionary[SphericalCodec, dict[tuple[int, str, KernelShape], Tensor]]
        self._codes = WeakKeyDictionary()

    def reserve(self, num_positions: int) -> None:
        """Make room for positions below ``num_positions``; smaller tables are given up."""
        if num_positions > self.num_positions:
            self.num_positions = max(num_positions, 2 * self.num_positions)
            self._turns.clear()

    def turns(self, rope: RopeSpec) -> TurnTable:
        """Cosines and sines of an embedding."""
        if rope not in self._turns:
            self._turns[rope] = TurnTable.build(
                rope, max_positions=self.num_positions, device=self._device
            )
        return self._turns[rope]

    def codes(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, shape: KernelShape
    ) -> Tensor:
        """Points of a layer's codes at a tier, for kernels of a shape."""
        held = self._codes.setdefault(codec, {})
        key = (layer, tier.name, shape)
        if key not in held:
            codebook = codec.codebook(layer, tier, self._device)
            held[key] = build_tables(codebook, codec.calibration.ropes[layer], shape)
        return held[key]

    def num_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables made for a codec; those by position may serve others too."""
        by_position = sum(
            self._turns[rope].nbytes for rope in set(codec.calibration.ropes) if rope in self._turns
        )
        return by_position + sum(table.nbytes for table in self._codes.get(codec, {}).values())


class DecodeKernels:
    """Builds each kernel once.

    All layers of a tier share one kernel shape where they can, so that one is compiled. Every shape
    is checked against the float64 oracle before it first serves anything in a process.

    Args:
        device: The GPU.
        tables: What the kernels look up; tables of their own if None.
    """

    def __init__(self, device: torch.device, tables: DecodeTables | None = None) -> None:
        self._device = device
        self._max_batch = 1
        self._tables = DecodeTables(device) if tables is None else tables
        self._num_positions = self._tables.num_positions
        self._held: WeakKeyDictionary[SphericalCodec, dict[_Kind, CudaDecode]]
        self._held = WeakKeyDictionary()
        self._shapes: WeakKeyDictionary[SphericalCodec, dict[TierSpec, list[KernelShape]]]
        self._shapes = WeakKeyDictionary()

    def reserve(self, num_positions: int, batch: int) -> None:
        """Make room for positions below ``num_positions`` and calls of so many sequences.

        Kernels that had less are made anew when they are next asked for.
        """
        self._tables.reserve(num_positions)
        if self._tables.num_positions > self._num_positions:
            self._num_positions = self._tables.num_positions
            self._held.clear()
        if batch > self._max_batch:
            self._max_batch = max(batch, 2 * self._max_batch)
            self._held.clear()

    def get(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, mode: PositionMode
    ) -> CudaDecode:
        """The kernel of a layer at a tier for pages of a position mode.

        Raises:
            KernelMismatchError: It does not give what the oracle gives.
        """
        held = self._held.setdefault(codec, {})
        key = (layer, tier, mode)
        if key not in held:
            held[key] = self._build(codec, layer, tier, mode)
        return held[key]

    def compile(
        self, codec: SphericalCodec, wanted: Iterable[tuple[int, TierSpec, PositionMode]]
    ) -> None:
        """Compile what some layers, tiers and modes need, many kernels at a time."""
        shapes = {self._shape(codec, layer, tier, mode) for layer, tier, mode in wanted}
        builds = [(ENTRY_POINT, shape.defines()) for shape in shapes]
        prepare(builds, architecture(self._device))

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the look-up tables made for a codec; those by position may serve others too."""
        return self._tables.num_bytes(codec)

    def _build(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, mode: PositionMode
    ) -> CudaDecode:
        rope, group = codec.calibration.ropes[layer], codec.calibration.geometry.group_size
        codebook = codec.codebook(layer, tier, self._device)
        shape = self._shape(codec, layer, tier, mode)
        known = (str(self._device), shape, group)
        if known not in _CHECKED:
            # random pages must not move the caller's random numbers
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                self_test(codebook, rope, value_bits=tier.value_bits, group=group, shape=shape)
            _CHECKED.add(known)
        return CudaDecode(
            codebook,
            rope,
            self._tables.turns(rope),
            value_bits=tier.value_bits,
            group=group,
            max_batch=self._max_batch,
            shape=shape,
            tables=self._tables.codes(codec, layer, tier, shape),
        )

    def _shape(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, mode: PositionMode
    ) -> KernelShape:
        """One shape for all layers where that costs little: every shape is a compilation."""
        held = self._shapes.setdefault(codec, {})
        if tier not in held:
            held[tier] = _layer_shapes(codec, tier)
        own, common = held[tier][layer], _largest(held[tier])
        if common is not None and common.steps <= own.steps + _SPARE_STEPS:
            own = common
        if mode is PositionMode.CONTIGUOUS:
            return own
        return replace(own, positions=mode).fitted()


def _layer_shapes(codec: SphericalCodec, tier: TierSpec) -> list[KernelShape]:
    """The shape that fits each layer."""
    geometry = codec.calibration.geometry
    return [
        KernelShape.of_codebook(
            codec.codebook(layer, tier),
            value_bits=tier.value_bits,
            group=geometry.group_size,
            page_tokens=tier.page_tokens,
        )
        for layer in range(geometry.num_layers)
    ]


def _largest(shapes: list[KernelShape]) -> KernelShape | None:
    """A shape that fits every layer; None if no multiprocessor has room for it."""
    try:
        return replace(
            shapes[0],
            double_steps=max(shape.double_steps for shape in shapes),
            constant_steps=max(shape.constant_steps for shape in shapes),
        ).fitted()
    except ValueError:
        return None
