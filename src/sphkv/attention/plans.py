# SPDX-License-Identifier: Apache-2.0
"""What a backend derives from pointer tables, kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from sphkv.store.pointers import PointerTable
from sphkv.store.store import PageStore

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, eq=False)
class _Held(Generic[Plan]):
    """A plan, and the tables and versions it was made from."""

    tables: list[ReferenceType[PointerTable]]
    versions: list[int]
    plan: Plan

    def is_of(self, tables: Sequence[PointerTable]) -> bool:
        """Whether it was made from just these tables as they are now."""
        return len(tables) == len(self.tables) and all(
            held() is table and version == table.version
            for held, version, table in zip(self.tables, self.versions, tables, strict=True)
        )


class PlanCache(Generic[Plan]):
    """One plan for each layer of a sequence, and one for each layer of a batch.

    A plan goes with the pointer table of its first sequence, and is made anew when the version of
    any of its tables has risen.

    Args:
        build: Makes the plan of a store, its sequences and a layer.
    """

    def __init__(self, build: Callable[[PageStore, tuple[int, ...], int], Plan]) -> None:
        self._build = build
        self._of_one: WeakKeyDictionary[PointerTable, _Held[Plan]] = WeakKeyDictionary()
        self._of_many: WeakKeyDictionary[PointerTable, _Held[Plan]] = WeakKeyDictionary()

    def get(self, store: PageStore, sequences: tuple[int, ...], layer: int) -> Plan:
        """The plan of one sequence or of the rows of a batch, which may repeat a sequence."""
        tables = [store.table(sequence, layer) for sequence in sequences]
        shelf = self._of_one if len(tables) == 1 else self._of_many
        held = shelf.get(tables[0])
        if held is None or not held.is_of(tables):
            plan = self._build(store, sequences, layer)
            versions = [table.version for table in tables]
            held = shelf[tables[0]] = _Held([ref(table) for table in tables], versions, plan)
        return held.plan
