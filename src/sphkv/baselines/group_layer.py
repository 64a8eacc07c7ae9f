# SPDX-License-Identifier: Apache-2.0
"""One layer of a method that drops and codes: dense ends, groups of coded states between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import (
    CODED_PAGE_TOKENS,
    PAGE_HEADER_BYTES,
    PAGE_POINTER_BYTES,
    PartCodec,
)
from sphkv.baselines.held_states import UNUSED, HeldStates, Tagged
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers

_HEAD_BYTES = torch.int16.itemsize
_STATE_SAMPLE = 512


@dataclass(frozen=True)
class GroupClass:
    """How the states of a group are coded.

    Attributes:
        name: Label in reports.
        keys: Codec of the keys; the group is its block of tokens.
        values: Codec of the values.
        head_dim: Channels of a head.
    """

    name: str
    keys: PartCodec
    values: PartCodec
    head_dim: int

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Tensors of groups ``[groups, tokens, head_dim]`` under their ledger kinds."""
        tensors = {}
        for name, tensor in self.keys.encode(keys.float()).items():
            tensors["codes.codes" if name == "codes" else f"radii.{name}"] = tensor
        for name, tensor in self.values.encode(values.float()).items():
            tensors[f"values.{name}"] = tensor
        return tensors

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[groups, tokens, head_dim]`` float32."""
        parts: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        for name, tensor in tensors.items():
            kind, _, own = name.partition(".")
            parts[kind == "values"][own] = tensor
        return self.keys.decode(parts[False], num_tokens), self.values.decode(
            parts[True], num_tokens
        )

    def group_bytes(self, num_tokens: int) -> int:
        """Bytes of one group, with positions, attention, head and its part of a page's header."""
        blank = torch.zeros(1, num_tokens, self.head_dim)
        codes = sum(tensor.nbytes for tensor in self.encode(blank, blank).values())
        own = num_tokens * torch.int32.itemsize + torch.float32.itemsize + _HEAD_BYTES
        page = (PAGE_HEADER_BYTES + PAGE_POINTER_BYTES) * num_tokens
        return codes + own - (-page // CODED_PAGE_TOKENS)

    def distortion(self, keys: Tensor, values: Tensor, unit: int) -> float:
        """Squared error of coding over that of dropping, of some states of a layer.

        Args:
            keys: ``[kv_heads, tokens, head_dim]``.
            values: ``[kv_heads, tokens, head_dim]``.
            unit: Tokens of a group.
        """
        count = max(1, min(_STATE_SAMPLE, keys.shape[1]) // unit) * unit
        error = 0.0
        pair = [x[:, :count].float().reshape(-1, unit, self.head_dim) for x in (keys, values)]
        decoded = self.decode(self.encode(*pair), unit)
        for before, after in zip(pair, decoded, strict=True):
            centred = before - before.mean((0, 1))
            error += float((after - before).square().sum() / centred.square().sum().clamp(min=1e-9))
        return error / 2


def integer_class(
    name: str, key_bits: int, value_bits: int, head_dim: int, *, value_group: int | None = None
) -> GroupClass:
    """Keys as integers per channel over the group, values as integers per token."""
    return GroupClass(
        name,
        ChannelIntegers(key_bits, None),
        TokenIntegers(value_bits, head_dim, value_group),
        head_dim,
    )


@dataclass(slots=True, eq=False)
class _Groups:
    """Coded groups of one class and size.

    Attributes:
        kind: Index of the class.
        unit: Tokens of a group.
        tensors: By ledger kind and name, groups first.
        heads: ``[groups]`` int16.
        positions: ``[groups, unit]`` int32.
        mass: ``[groups]`` float32 attention that each received lately.
    """

    kind: int
    unit: int
    tensors: dict[str, Tensor]
    heads: Tensor
    positions: Tensor
    mass: Tensor

    def extend(self, other: _Groups) -> None:
        """Add groups of the same class and size."""
        self.tensors = {n: torch.cat([t, other.tensors[n]]) for n, t in self.tensors.items()}
        self.heads = torch.cat([self.heads, other.heads])
        self.positions = torch.cat([self.positions, other.positions])
        self.mass = torch.cat([self.mass, other.mass])

    def remove(self, index: int) -> None:
        """Drop a group."""
        stays = torch.arange(len(self.heads), device=self.heads.device) != index
        self.tensors = {name: tensor[stays] for name, tensor in self.tensors.items()}
        self.heads, self.positions = self.heads[stays], self.positions[stays]
        self.mass = self.mass[stays]


@dataclass(frozen=True, slots=True, eq=False)
class _Rebuilt:
    """Groups as attention reads them.

    Attributes:
        held: The states, rows of heads.
        where: Head and column of each coded state, group by group.
        group: Number of each state's group, in the same order.
        num_groups: How many there are.
    """

    held: HeldStates
    where: tuple[Tensor, Tensor]
    group: Tensor
    num_groups: int


class GroupLayer:
    """Dense sinks, coded groups and a dense tail.

    Attributes:
        keeps_rebuilt: Whether rebuilt groups are kept until a group comes or goes.
    """

    def __init__(
        self, classes: Sequence[GroupClass], sinks: int, keys: Tensor, values: Tensor
    ) -> None:
        """Start empty, on the device of the given states."""
        self.keeps_rebuilt = False
        self._classes = tuple(classes)
        self._num_sinks = sinks
        self._sinks = self._tail = (keys[:, :0].bfloat16(), values[:, :0].bfloat16())
        self._groups: dict[tuple[int, int], _Groups] = {}
        self._rebuilt: _Rebuilt | None = None
        self._coded_bytes: int | None = None
        self._tail_start = 0
        self.num_tokens = 0

    @property
    def num_open(self) -> int:
        """Dense tokens behind the coded ones."""
        return self._tail[0].shape[1]

    def store_dense(self, keys: Tensor, values: Tensor, num_sinks: int, tail_start: int) -> None:
        """Keep both ends of a prompt."""
        num_sinks = min(num_sinks, keys.shape[1])
        self._sinks = _copy(keys[:, :num_sinks]), _copy(values[:, :num_sinks])
        self._tail = _copy(keys[:, tail_start:]), _copy(values[:, tail_start:])
        self._tail_start = min(tail_start, keys.shape[1])
        self.num_tokens = keys.shape[1]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens to the tail."""
        self._tail = (
            torch.cat([self._tail[0], keys.bfloat16()], 1),
            torch.cat([self._tail[1], values.bfloat16()], 1),
        )
        self.num_tokens += keys.shape[1]

    def add(
        self,
        kind: int,
        heads: Sequence[int],
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        mass: Tensor,
    ) -> None:
        """Code groups.

        Args:
            kind: Their class.
            heads: Head of each group.
            keys: ``[groups, tokens, head_dim]``.
            values: ``[groups, tokens, head_dim]``.
            positions: ``[groups, tokens]`` int64, rising.
            mass: ``[groups]`` attention to begin with.
        """
        unit = keys.shape[1]
        tensors = self._classes[kind].encode(keys, values)
        new = _Groups(
            kind,
            unit,
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            torch.tensor(heads, dtype=torch.int16, device=keys.device),
            positions.int(),
            mass.float().clone(),
        )
        held = self._groups.get((kind, unit))
        if held is None:
            self._groups[kind, unit] = new
        else:
            held.extend(new)
        self._rebuilt = self._coded_bytes = None

    def seal(self, kind: int, unit: int) -> None:
        """Code the oldest tokens of the tail, one group per head."""
        keys, values = (part[:, :unit].float() for part in self._tail)
        heads = range(keys.shape[0])
        start = self._tail_start
        positions = torch.arange(start, start + unit, device=keys.device).expand(len(heads), unit)
        every = [groups.mass for groups in self._groups.values() if len(groups.mass)]
        # until it has been weighed, a new group counts as an average one
        mean = torch.cat(every).mean() if every else torch.ones((), device=keys.device)
        self.add(kind, list(heads), keys, values, positions, mean.expand(len(heads)))
        self._tail = _copy(self._tail[0][:, unit:]), _copy(self._tail[1][:, unit:])
        self._tail_start += unit

    def drop_least(self) -> bool:
        """Drop the group that received least attention; whether there was one."""
        best: tuple[float, tuple[int, int], int] | None = None
        for key, groups in self._groups.items():
            if len(groups.mass):
                index = int(groups.mass.argmin())
                candidate = (float(groups.mass[index]), key, index)
                best = candidate if best is None or candidate < best else best
        if best is None:
            return False
        self._groups[best[1]].remove(best[2])
        self._rebuilt = self._coded_bytes = None
        return True

    def note(self, received: Tensor, decay: float) -> None:
        """Add attention ``[kv_heads, most]``, in the order of ``read``, to the groups."""
        rebuilt = self._rebuild()
        if not rebuilt.num_groups:
            return
        flat = received[rebuilt.where]
        sums = torch.zeros(rebuilt.num_groups, device=flat.device)
        sums.index_add_(0, rebuilt.group, flat)
        at = 0
        for groups in self._groups.values():
            count = len(groups.mass)
            groups.mass = groups.mass * decay + sums[at : at + count]
            at += count

    def _rebuild(self) -> _Rebuilt:
        """The groups, decoded, each head's in one row."""
        if self._rebuilt is not None:
            return self._rebuilt
        heads, _, dim = self._sinks[0].shape
        device = self._sinks[0].device
        keys, values = [torch.empty(0, dim, device=device)], [torch.empty(0, dim, device=device)]
        owners = [torch.empty(0, dtype=torch.int64, device=device)]
        positions, numbers, num_groups = list(owners), list(owners), 0
        for groups in self._groups.values():
            if not len(groups.heads):
                continue
            pair = self._classes[groups.kind].decode(groups.tensors, groups.unit)
            keys.append(pair[0].reshape(-1, dim))
            values.append(pair[1].reshape(-1, dim))
            owners.append(groups.heads.long().repeat_interleave(groups.unit))
            positions.append(groups.positions.long().flatten())
            every = torch.arange(num_groups, num_groups + len(groups.heads), device=device)
            numbers.append(every.repeat_interleave(groups.unit))
            num_groups += len(groups.heads)
        owner, counts = torch.cat(owners), torch.cat(owners).bincount(minlength=heads)
        order = owner.argsort(stable=True)
        rank = torch.empty_like(owner)
        rank[order] = (
            torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[owner[order]]
        )
        shape = (heads, int(counts.max()))
        held = HeldStates(
            torch.zeros(*shape, dim, device=device),
            torch.zeros(*shape, dim, device=device),
            torch.full(shape, UNUSED, dtype=torch.int64, device=device),
        )
        held.keys[owner, rank], held.values[owner, rank] = torch.cat(keys), torch.cat(values)
        held.positions[owner, rank] = torch.cat(positions)
        rebuilt = _Rebuilt(held, (owner, rank), torch.cat(numbers), num_groups)
        if self.keeps_rebuilt:
            self._rebuilt = rebuilt
        return rebuilt

    def read(self) -> HeldStates:
        """Coded groups first, then sinks and tail, rebuilt in float32."""
        held = self._rebuild().held
        heads, device = held.keys.shape[0], held.keys.device
        sinks = torch.arange(self._sinks[0].shape[1], device=device)
        tail = torch.arange(self._tail_start, self.num_tokens, device=device)
        ends = torch.cat([sinks, tail]).expand(heads, -1)
        return HeldStates(
            torch.cat([held.keys, self._sinks[0].float(), self._tail[0].float()], 1),
            torch.cat([held.values, self._sinks[1].float(), self._tail[1].float()], 1),
            torch.cat([held.positions, ends], 1),
        )

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a cut before the tail."""
        if num_tokens < min(self._tail_start, self.num_tokens):
            raise ValueError(
                f"cannot crop to {num_tokens} tokens: those before {self._tail_start} are coded "
                "in groups or dropped"
            )

    def crop(self, num_tokens: int) -> None:
        """Forget tokens of the tail; ``check_crop`` has allowed it."""
        if num_tokens >= self.num_tokens:
            return
        kept = num_tokens - self._tail_start
        self._tail = _copy(self._tail[0][:, :kept]), _copy(self._tail[1][:, :kept])
        self.num_tokens = num_tokens

    def state_counts(self) -> dict[str, int]:
        """States of each class over all heads, and dense ones as ``"max"``."""
        heads = self._sinks[0].shape[0]
        counts = {"max": heads * (self._sinks[0].shape[1] + self.num_open)}
        for groups in self._groups.values():
            name = self._classes[groups.kind].name
            counts[name] = counts.get(name, 0) + len(groups.heads) * groups.unit
        return counts

    def page_counts(self) -> int:
        """Pages that coded states are charged for."""
        pages = 0
        for groups in self._groups.values():
            per_head = groups.heads.long().bincount() * groups.unit
            pages += int(((per_head + CODED_PAGE_TOKENS - 1) // CODED_PAGE_TOKENS).sum())
        return pages

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        tagged: list[Tagged] = []
        for keys, values in (self._sinks, self._tail):
            tagged += [("codes", keys), ("values", values)]
        for groups in self._groups.values():
            tagged += [(name.partition(".")[0], tensor) for name, tensor in groups.tensors.items()]
            tagged += [("positions", groups.positions), ("prot", groups.mass)]
            tagged.append(("tags", groups.heads))
        return tagged

    @property
    def nbytes(self) -> int:
        """Bytes of every live tensor and of page headers and pointers."""
        ends = sum(part.nbytes for part in (*self._sinks, *self._tail))
        if self._coded_bytes is None:
            # asked after every layer of every token, and changed by few of them
            every = sum(tensor.nbytes for _, tensor in self.tensors())
            pages = self.page_counts() * (PAGE_HEADER_BYTES + PAGE_POINTER_BYTES)
            self._coded_bytes = every - ends + pages
        return ends + self._coded_bytes


def _copy(states: Tensor) -> Tensor:
    """A bfloat16 copy that keeps no larger tensor alive."""
    return states.to(torch.bfloat16, copy=True).contiguous()
