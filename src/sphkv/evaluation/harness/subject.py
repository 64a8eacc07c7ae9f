# SPDX-License-Identifier: Apache-2.0
"""What is measured: a cache inside a model, whoever wrote it.

Everything that depends on how a cache is built into a model is in this file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sphkv.baselines.quantised import QuantisedCache
from sphkv.cache.method import CacheMethod
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.sequence import SphericalSequence
from sphkv.core.budget import ByteBudget
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.evaluation.ranges import gpu_range
from sphkv.core.tiers import TierTable
from sphkv.evaluation.harness.states import PromptStates
from sphkv.evaluation.schema import MethodDescription
from sphkv.integrations.transformers.method_pass import continue_with
from sphkv.retention.protection import SegmentSpans
from sphkv.store.ledger import ByteLedger


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass over a stored prompt.

    Attributes:
        hidden: ``[tokens, width]`` final hidden states.
        seconds: Of the pass, without what counting bytes took.
        attend_s: Of these, seconds inside the cache.
        peak_bytes: Most resident bytes after any layer.
    """

    hidden: Tensor
    seconds: float
    attend_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a controller decided about a prompt.

    Attributes:
        contract: The tier of every state.
        tiers: What its numbers mean.
        segments: Passages of the prompt.
        drift: Predicted drift of a token's logits.
    """

    contract: WriteContract
    tiers: TierTable
    segments: SegmentSpans
    drift: float


class Subject(Protocol):
    """A cache inside a model, ready to be measured.

    Attributes:
        name: Label in reports.
        geometry: Shape of the cache.
    """

    name: str
    geometry: KVGeometry

    def store_prompt(self, states: PromptStates) -> None:
        """Take a prompt that the dense model has read."""
        ...

    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``, which stay stored."""
        ...

    def tokens_until_change(self) -> int:
        """Tokens that may come in one pass and see what they would see one by one."""
        ...

    def num_tokens(self) -> int:
        """Tokens stored."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        ...

    def limit_bytes(self, num_tokens: int) -> int:
        """Bytes the budget allows at a length."""
        ...

    def table_bytes(self) -> int:
        """Bytes of codebooks, which all sequences share."""
        ...

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind."""
        ...

    def describe(self) -> MethodDescription:
        """What was chosen under the budget."""
        ...

    def decision(self) -> Decision | None:
        """What a controller decided; None of a method without one."""
        ...

    def observe_logits(self, row: Tensor) -> None:
        """Take the log-probabilities ``[vocabulary]`` of the step that is to be decided."""
        ...

    def stop_timing(self) -> None:
        """No pass is timed any more, so nothing need be rebuilt twice."""
        ...


@runtime_checkable
class ChangesAtKnownTokens(Protocol):
    """A method that says when what it stores changes next."""

    def tokens_until_change(self) -> int:
        """As ``Subject.tokens_until_change``."""
        ...


class MethodSubject:
    """A ``CacheMethod`` inside a model.

    Attributes:
        name: Label in reports.
        method: The method, empty at first.
        geometry: Shape of the cache.
    """

    def __init__(
        self,
        model: Any,
        method: CacheMethod,
        geometry: KVGeometry,
        *,
        budget: ByteBudget | None = None,
        table_bytes: int = 0,
    ) -> None:
        """Put an empty method into a model.

        Args:
            model: The model.
            method: The method.
            geometry: Shape of the cache.
            budget: What it was made for; None for all dense bytes.
            table_bytes: Bytes of codebooks that it reads and does not count itself.
        """
        self.name = method.name
        self.method = method
        self.geometry = geometry
        self._model = model
        self._budget = budget or ByteBudget.parse("100%")
        self._table_bytes = table_bytes
        self._attend_s = self._count_s = 0.0
        self._peak_bytes = 0

    def store_prompt(self, states: PromptStates) -> None:
        """Give the method every layer of a prompt."""
        for layer, part in enumerate(states.layers):
            self.method.prefill(layer, part.keys, part.values, query=part.query)

    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``."""
        self._attend_s = self._count_s = 0.0
        self._peak_bytes = self.method.resident_bytes()
        began = time.perf_counter()
        hidden = continue_with(self._model, _Watched(self), input_ids)
        seconds = time.perf_counter() - began - self._count_s
        return Pass(hidden, seconds, self._attend_s, self._peak_bytes)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the method does, with the time and the bytes noted."""
        began = time.perf_counter()
        with gpu_range("cache attend"):
            output = self.method.attend(*args, **kwargs)
        ended = time.perf_counter()
        self._peak_bytes = max(self._peak_bytes, self.method.resident_bytes())
        self._attend_s += ended - began
        self._count_s += time.perf_counter() - ended
        return output

    def tokens_until_change(self) -> int:
        """Up to where a page seals; one token of a method that does not say."""
        method = self.method
        if isinstance(method, ChangesAtKnownTokens):
            return max(1, method.tokens_until_change())
        if isinstance(method, SphericalSequence | RetainedSequence):
            # the token that seals a page sees it sealed, so it comes alone
            store, sequence = _store_of(method)
            rooms = [
                store.config.tail_capacity - 1 - store.tail(sequence, layer).num_tokens
                for layer in range(self.geometry.num_layers)
            ]
            return max(1, min(rooms))
        return 1

    def num_tokens(self) -> int:
        """Tokens stored."""
        return self.method.num_tokens()

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        return self.method.resident_bytes()

    def limit_bytes(self, num_tokens: int) -> int:
        """Bytes the budget allows at a length."""
        return self._budget.resolve(self.geometry, num_tokens)

    def table_bytes(self) -> int:
        """Bytes of codebooks, which all sequences share."""
        return self._table_bytes

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind."""
        return self.method.ledger()

    def describe(self) -> MethodDescription:
        """What was chosen under the budget."""
        method = self.method
        tiers: dict[str, float] = {}
        residency, setting = "", str(getattr(method, "setting", ""))
        if isinstance(method, SphericalSequence):
            residency, setting = "uniform", method._config.tier
            tiers = {setting: 1.0}
        elif isinstance(method, RetainedSequence):
            residency = "retention"
            counts = [] if method.contract is None else _tier_counts(method)
            total = sum(count for _, count in counts)
            tiers = {name: count / total for name, count in counts if count and name != "drop"}
            setting = "+".join(tiers)
        stated = str(getattr(method, "realisation", "kernel-realized"))
        return {
            "name": self.name,
            "setting": setting or "fixed",
            "residency": residency or "own",
            "tiers": tiers,
            "realisation": stated,
        }

    def decision(self) -> Decision | None:
        """What a controller decided; None of a method without one."""
        method = self.method
        if not isinstance(method, RetainedSequence) or method.contract is None:
            return None
        config = method.config
        return Decision(method.contract, config.tiers, config.segments, method.refresher.drift)

    def observe_logits(self, row: Tensor) -> None:
        """A controller's gate opens and closes by the margin of the step to be decided."""
        if isinstance(self.method, RetainedSequence):
            self.method.refresher.observe_logits(row)

    def stop_timing(self) -> None:
        """A method that rebuilds its states may keep them rebuilt."""
        if isinstance(self.method, QuantisedCache):
            self.method.keep_rebuilt()


class _Watched:
    """The method as the model sees it: its attention is watched, all else is its own."""

    def __init__(self, subject: MethodSubject) -> None:
        self._subject = subject
        self.attend = subject.attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject.method, name)


def _store_of(method: SphericalSequence | RetainedSequence) -> tuple[Any, int]:
    if isinstance(method, RetainedSequence):
        return method.store, 0
    return method._store, method.sequence


def _tier_counts(method: RetainedSequence) -> list[tuple[str, int]]:
    assert method.contract is not None
    tiers = method.config.tiers
    counts = method.contract.state_counts(len(tiers)).sum((0, 1)).tolist()
    return list(zip((tier.name for tier in tiers), counts, strict=True))
