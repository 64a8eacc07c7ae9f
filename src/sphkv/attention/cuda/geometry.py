# SPDX-License-Identifier: Apache-2.0
"""Shapes a kernel is built for; the same numbers as ``kernels/layout.cuh``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sphkv.codec.codebook import AngleCodebook

HEAD_DIMS = (64, 128)
VALUE_BITS = (2, 3, 4, 8, 16)
PAGE_TOKENS = 128
TILE_KEYS = 16
LANES = 32
LEVELS = 16
MAX_COLUMNS = 8

_SLOT_WORDS = LANES
_SPREAD_STRIDE = 4096
_SHARED_LIMIT = 232_448
_STEP_ENTRIES = 8

# Measured on an H200: wide heads need registers more than warps.
_TEAMS = {64: 4, 128: 3}
_REGISTER_PAIRS = {64: 3, 128: 5}


def ceil_div(a: int, b: int) -> int:
    """Smallest integer at or above ``a / b``."""
    return -(-a // b)


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
        teams: Groups of four warps in a thread block.
        spread: Leave high nibbles where they are in their byte; costs table space, saves a shift.
        register_pairs: Pairs of steps whose queries stay in registers.
    """

    head_dim: int
    nibbles: int
    double_steps: int
    constant_steps: int
    value_bits: int
    columns: int
    teams: int = 4
    spread: bool = True
    register_pairs: int = 2

    def __post_init__(self) -> None:
        """Reject shapes that no kernel is written for."""
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {self.head_dim}")
        if self.nibbles < 16 or self.nibbles % 16 or self.nibbles > 128:
            raise ValueError(f"nibbles must be a multiple of 16 up to 128, got {self.nibbles}")
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"value_bits must be one of {VALUE_BITS}, got {self.value_bits}")
        if self.columns not in (4, MAX_COLUMNS):
            raise ValueError(f"columns must be 4 or {MAX_COLUMNS}, got {self.columns}")
        if not 0 <= self.double_steps <= self.nibbles // _STEP_ENTRIES:
            raise ValueError(f"double_steps must be at most the steps, got {self.double_steps}")
        if not 0 <= self.constant_steps <= self.head_dim // 16:
            raise ValueError(f"constant_steps must be at most {self.head_dim // 16}")

    @classmethod
    def of_codebook(cls, codebook: AngleCodebook, *, value_bits: int, group: int) -> KernelShape:
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
            teams=_TEAMS[2 * codebook.num_planes],
            register_pairs=_REGISTER_PAIRS[2 * codebook.num_planes],
        ).fitted()

    def fitted(self) -> KernelShape:
        """This shape with as many teams, and a table as fast, as shared memory allows."""
        for buffers in (2, 1):
            for teams, spread in product(range(self.teams, 1, -1), (False, True)):
                shape = replace(self, teams=teams, spread=spread)
                if shape.is_feasible and shape.num_stages >= buffers * teams:
                    return shape
        raise ValueError(f"{self} needs more shared memory than a multiprocessor has")

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
    def entries(self) -> int:
        """Entries of the map: eight per step, padded to pairs of steps."""
        return 16 * ceil_div(self.steps, 2)

    @property
    def half_slots(self) -> int:
        """Table slots addressed by low nibbles; as many by high ones."""
        return 2 * self.lookup_steps

    @property
    def high_bytes(self) -> int:
        """Bytes of the table for high nibbles."""
        return LEVELS * _SPREAD_STRIDE if self.spread else self.low_bytes

    @property
    def low_bytes(self) -> int:
        """Bytes of the table for low nibbles."""
        return self.half_slots * LEVELS * _SLOT_WORDS * 4

    @property
    def constant_offset(self) -> int:
        """Start of the constant points in a table."""
        return self.high_bytes + self.low_bytes

    @property
    def map_offset(self) -> int:
        """Start of the entry map in a table."""
        return self.constant_offset + self.constant_steps * 4 * _SLOT_WORDS * 4

    @property
    def table_bytes(self) -> int:
        """Bytes of one head's table."""
        return ceil_div(self.map_offset + 4 * self.entries, 128) * 128

    @property
    def page_capacity(self) -> int:
        """Bytes kept for one page in shared memory."""
        state_bytes = self.nibbles // 2 + (1 if self.value_bits == 16 else 2)
        payload = PAGE_TOKENS * state_bytes + PAGE_TOKENS * self.head_dim * self.value_bits // 8
        return ceil_div(64 + payload + 4 * (PAGE_TOKENS // TILE_KEYS), 64) * 64

    @property
    def _fixed_bytes(self) -> int:
        warps = 4 * self.teams
        scratch = warps * max(8 * self.entries, self.columns * 32 * 4)
        results = self.columns * self.head_dim * 4 + 16 * warps * self.columns
        queries = max(0, self.entries // 16 - self.register_pairs) * 128 * self.columns
        return self.table_bytes + scratch + results + queries + 48 * self.teams + 16

    @property
    def _stage_bytes(self) -> int:
        return self.page_capacity + (PAGE_TOKENS // TILE_KEYS) * 4 * self.planes

    @property
    def num_stages(self) -> int:
        """Pages in shared memory at a time."""
        fitting = (_SHARED_LIMIT - self._fixed_bytes) // self._stage_bytes
        return min(3, fitting // self.teams) * self.teams

    @property
    def is_feasible(self) -> bool:
        """Whether a thread block of this shape fits a multiprocessor."""
        fits_spread = not self.spread or 128 * self.half_slots <= _SPREAD_STRIDE
        return fits_spread and self._fixed_bytes + self.teams * self._stage_bytes <= _SHARED_LIMIT

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self._fixed_bytes + self.num_stages * self._stage_bytes

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 4 * self.teams * LANES

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
            "REGISTER_PAIRS": self.register_pairs,
        }
        return tuple(f"-DSPHKV_{name}={value}" for name, value in values.items())


def lane_coordinates(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """``g = lane // 4`` and ``t = lane % 4`` of the 32 lanes."""
    lane = torch.arange(LANES, device=device)
    return lane // 4, lane % 4
