# SPDX-License-Identifier: Apache-2.0
"""Shapes a kernel is built for; the same numbers as ``kernels/layout.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sphkv.codec.codebook import AngleCodebook
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

HEAD_DIMS = (64, 128)
VALUE_BITS = (2, 3, 4, 8, 16)
PAGE_TOKENS = 128
"""States of a page where nothing asks for smaller ones."""
PAGE_SIZES = (64, PAGE_TOKENS)
"""States of a page that kernels are written for, the fewest first."""
TILE_KEYS = 16
LANES = 32
LEVELS = 16
MAX_COLUMNS = 8
ROWS_BEFORE = PAGE_TOKENS // TILE_KEYS - 1
"""Rows of turns before position zero, see ``kernels/layout.cuh``."""
WARP_KEYS = 32
MAX_WARPS = 16
MAX_SLOTS = 128
SLOT_MULTIPLE = 16

_SLOT_WORDS = LANES
_SPREAD_STRIDE = 4096
_SHARED_LIMIT = 232_448
_STEP_ENTRIES = 8

_LONG_ENTRIES = 96
# What a page costs beside its product steps, in such steps; what a row costs beside its pages: its
# queries are turned, the warps' sums merged.
_PAGE_STEPS = 40
ROW_STEPS = 105
"""What a row costs a block beside its pages, in product steps of one team."""
_LEAST_KEYS = 256
# Part of that which a page takes where every scheduler of a multiprocessor has but one warp.
_ALONE = 0.72
_SCHEDULERS = 4
_PASS_DIMS = 32


def ceil_div(a: int, b: int) -> int:
    """Smallest integer at or above ``a / b``."""
    return -(-a // b)


def is_served(layout: PageLayout) -> bool:
    """Whether the kernel reads pages of this layout, so that they are kept in fragment order."""
    return (
        layout.tier.is_coded
        and layout.page_tokens in PAGE_SIZES
        and layout.head_dim in HEAD_DIMS
        and layout.num_nibbles % SLOT_MULTIPLE == 0
        and layout.num_nibbles <= MAX_SLOTS
    )


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What one build of the decode kernel can read.

    Attributes:
        head_dim: Elements of a key: 64 or 128.
        nibbles: Slots per key, a multiple of 16.
        double_steps: The last ``8 * double_steps`` slots are looked up twice.
        constant_steps: Groups of eight planes without bits.
        value_bits: 2, 3, 4, 8 or 16.
        columns: Query heads per pass: 4 or 8.
        teams: Groups of warps in a thread block, each at work on a page.
        spread: Leave high nibbles where they are in their byte; costs table space, saves a shift.
        positions: How pages store positions.
        page_tokens: States of a page: 64 or 128.
    """

    head_dim: int
    nibbles: int
    double_steps: int
    constant_steps: int
    value_bits: int
    columns: int
    teams: int = MAX_WARPS // (PAGE_TOKENS // WARP_KEYS)
    spread: bool = False
    positions: PositionMode = PositionMode.CONTIGUOUS
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        """Reject shapes that no kernel is written for."""
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {self.head_dim}")
        if not 0 < self.nibbles <= MAX_SLOTS or self.nibbles % SLOT_MULTIPLE:
            raise ValueError(
                f"nibbles must be a multiple of {SLOT_MULTIPLE} up to {MAX_SLOTS}, "
                f"got {self.nibbles}"
            )
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"value_bits must be one of {VALUE_BITS}, got {self.value_bits}")
        if self.columns not in (4, MAX_COLUMNS):
            raise ValueError(f"columns must be 4 or {MAX_COLUMNS}, got {self.columns}")
        if self.page_tokens not in PAGE_SIZES:
            raise ValueError(f"page_tokens must be one of {PAGE_SIZES}, got {self.page_tokens}")
        if not 0 <= self.double_steps <= self.nibbles // _STEP_ENTRIES:
            raise ValueError(f"double_steps must be at most the steps, got {self.double_steps}")
        if not 0 <= self.constant_steps <= self.head_dim // 16:
            raise ValueError(f"constant_steps must be at most {self.head_dim // 16}")

    @classmethod
    def of_codebook(
        cls,
        codebook: AngleCodebook,
        *,
        value_bits: int,
        group: int,
        positions: PositionMode = PositionMode.CONTIGUOUS,
        page_tokens: int = PAGE_TOKENS,
    ) -> KernelShape:
        """The shape that fits all heads of a codebook."""
        pairs = int(codebook.num_pairs.max())
        constants = int((codebook.plane_bits == 0).sum(1).max())
        return cls(
            head_dim=2 * codebook.num_planes,
            nibbles=codebook.num_slots,
            double_steps=ceil_div(pairs, _STEP_ENTRIES),
            constant_steps=ceil_div(constants, _STEP_ENTRIES),
            value_bits=value_bits,
            columns=4 if group <= 4 else MAX_COLUMNS,
            positions=positions,
            page_tokens=page_tokens,
        ).fitted()

    def fitted(self) -> KernelShape:
        """This shape with as many teams as registers and shared memory allow.

        Queries of many entries, and points that are turned one by one, need more registers than
        sixteen warps leave. A spread table pays in wide heads, whose pages take long enough for two
        stages per team to do.
        """
        is_wide = self.entries > _LONG_ENTRIES or self.positions is PositionMode.TOKENS
        most = (12 if is_wide else MAX_WARPS) // self.team_warps
        is_spread = self.head_dim == 128 and self.positions is PositionMode.CONTIGUOUS
        for buffers, spread in ((2, is_spread), (2, False), (1, False)):
            for teams in range(most, 0, -1):
                shape = replace(self, teams=teams, spread=spread)
                if not shape.is_feasible or shape.num_stages < buffers * teams:
                    continue
                if not spread or teams == most:
                    return shape
        raise ValueError(f"{self} needs more shared memory than a multiprocessor has")

    @property
    def team_warps(self) -> int:
        """Warps that work on a page."""
        return self.page_tokens // WARP_KEYS

    @property
    def _page_tiles(self) -> int:
        return self.page_tokens // TILE_KEYS

    @property
    def planes(self) -> int:
        """Planes of a head."""
        return self.head_dim // 2

    @property
    def code_steps(self) -> int:
        """Product steps of stored slots."""
        return self.nibbles // _STEP_ENTRIES

    @property
    def lookup_steps(self) -> int:
        """Product steps that look points up."""
        return self.code_steps + self.double_steps

    @property
    def steps(self) -> int:
        """All product steps."""
        return self.lookup_steps + self.constant_steps

    @property
    def page_steps(self) -> float:
        """What a page costs a multiprocessor, in product steps of one team."""
        alone = _ALONE if self.teams * self.team_warps <= _SCHEDULERS else 1
        return alone * (self.steps + _PAGE_STEPS) / self.teams

    @property
    def row_pages(self) -> int:
        """What a row costs a block beside its pages, in pages."""
        return int(ROW_STEPS / self.page_steps + 0.5)

    @property
    def least_pages(self) -> int:
        """Pages of a head for each thread block of it that has any."""
        return _LEAST_KEYS // self.page_tokens

    @property
    def entries(self) -> int:
        """Entries of the map: eight per step, padded to pairs of steps."""
        return 16 * ceil_div(self.steps, 2)

    @property
    def single_slots(self) -> int:
        """Table slots (four entries each) that are looked up once; the others twice."""
        return 2 * (self.code_steps - self.double_steps)

    @property
    def high_bytes(self) -> int:
        """Bytes of the table for high nibbles."""
        return LEVELS * _SPREAD_STRIDE if self.spread else self.low_bytes

    @property
    def low_bytes(self) -> int:
        """Bytes of the table for low nibbles."""
        return self.lookup_steps * 2 * LEVELS * _SLOT_WORDS * 4

    @property
    def constant_offset(self) -> int:
        """Start of the constant points in a table."""
        return self.high_bytes + self.low_bytes

    @property
    def map_offset(self) -> int:
        """Start of the entry map in a table."""
        return self.constant_offset + self.constant_steps * 4 * _SLOT_WORDS * 4

    @property
    def frequency_offset(self) -> int:
        """Start of the frequencies in a table."""
        return self.map_offset + 4 * self.entries

    @property
    def table_bytes(self) -> int:
        """Bytes of one head's table."""
        return ceil_div(self.frequency_offset + 4 * self.entries, 128) * 128

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        state_bytes = self.nibbles // 2 + (1 if self.value_bits == 16 else 2)
        payload = self.page_tokens * (state_bytes + self.head_dim * self.value_bits // 8)
        position_words = {
            PositionMode.CONTIGUOUS: 0,
            PositionMode.RUNS: self._page_tiles,
            PositionMode.TOKENS: self.page_tokens,
        }[self.positions]
        return ceil_div(64 + payload + 4 * position_words, 64) * 64

    @property
    def _fixed_bytes(self) -> int:
        warps = self.team_warps * self.teams
        results = self.columns * self.head_dim * 4 + 16 * warps * self.columns
        sums = warps * self.columns * (_PASS_DIMS + 8) * 4
        scratch = max(self._query_bytes, sums + results)
        is_turned = self.columns == MAX_COLUMNS and self.positions is not PositionMode.TOKENS
        zeros = self._turn_bytes if is_turned else 0
        return self.table_bytes + zeros + scratch + 16 * self._most_stages + 48

    @property
    def _query_bytes(self) -> int:
        """Queries in shared memory, turned to every tile of a page."""
        is_contiguous = self.positions is PositionMode.CONTIGUOUS
        if is_contiguous and self.columns == MAX_COLUMNS and self.head_dim == 64:
            row = 2 * self.entries + 4
        else:
            row = self.entries + (0 if self.entries // 16 % 2 else 16)
        turned = self.team_warps if is_contiguous else 1
        if self.positions is not PositionMode.TOKENS and self.columns != MAX_COLUMNS:
            turned = self._page_tiles
        return 4 * turned * self.columns * row

    @property
    def has_half_turns(self) -> bool:
        """Whether rows of turns hold half of each: with four columns, on pages of runs."""
        return self.positions is PositionMode.RUNS and self.columns != MAX_COLUMNS

    @property
    def _turn_bytes(self) -> int:
        return (4 if self.has_half_turns else 8) * self.entries

    @property
    def _stage_bytes(self) -> int:
        # eight columns need a row of turns per tile unless registers hold two sets of queries
        is_single = self.columns == 4 or self.head_dim == 64
        turn_rows = {
            PositionMode.CONTIGUOUS: 1 if is_single else 2,
            PositionMode.RUNS: self._page_tiles,
            PositionMode.TOKENS: 0,
        }[self.positions]
        return self.page_bytes + turn_rows * self._turn_bytes

    @property
    def _most_stages(self) -> int:
        # a warp asks for one page before a block begins
        return min(4, self.team_warps + 1) * self.teams

    @property
    def num_stages(self) -> int:
        """Pages in shared memory at a time."""
        fitting = (_SHARED_LIMIT - self._fixed_bytes) // self._stage_bytes
        return min(self._most_stages, fitting // self.teams * self.teams)

    @property
    def is_feasible(self) -> bool:
        """Whether a thread block of this shape fits a multiprocessor."""
        fits_spread = not self.spread or 256 * self.lookup_steps <= _SPREAD_STRIDE
        return fits_spread and self.num_stages > self.teams

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self._fixed_bytes + self.num_stages * self._stage_bytes

    @property
    def has_suppliers(self) -> bool:
        """Whether four warps more ask for pages; see ``kernels/layout.cuh``."""
        return self.head_dim == 64 and self.teams > 1 and self.page_tokens == PAGE_TOKENS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.team_warps * (self.teams + int(self.has_suppliers)) * LANES

    def defines(self) -> tuple[str, ...]:
        """Compiler definitions that select this shape."""
        values = {
            "HEAD_DIM": self.head_dim,
            "NIBBLES": self.nibbles,
            "DOUBLE_STEPS": self.double_steps,
            "CONSTANT_STEPS": self.constant_steps,
            "VALUE_BITS": self.value_bits,
            "COLUMNS": self.columns,
            "TEAMS": self.teams,
            "SPREAD": int(self.spread),
            "POSITIONS": int(self.positions),
            "PAGE_TOKENS": self.page_tokens,
        }
        return tuple(f"-DSPHKV_{name}={value}" for name, value in values.items())


def lane_coordinates(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """``g = lane // 4`` and ``t = lane % 4`` of the 32 lanes."""
    lane = torch.arange(LANES, device=device)
    return lane // 4, lane % 4
