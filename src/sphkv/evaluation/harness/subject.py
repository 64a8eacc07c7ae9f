# SPDX-License-Identifier: Apache-2.0
"""What is measured: a cache inside a model, whoever wrote it.

Everything that depends on how a cache is built into a model is in this file. Ours is the cache that
``generate`` uses; other methods run through the same attachment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from sphkv.cache.engine import CacheEngine
from sphkv.cache.method import CacheMethod, MethodRecord
from sphkv.cache.retention import RetentionResidency
from sphkv.cache.step import StepTokens
from sphkv.core.budget import ByteBudget
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.states import PromptStates
from sphkv.evaluation.schema import MethodDescription
from sphkv.integrations.transformers.attached import MethodCache
from sphkv.integrations.transformers.cache import SphericalCache
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import SegmentSpans
from sphkv.store.ledger import ByteLedger

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass over a stored prompt.

    Attributes:
        hidden: ``[tokens, width]`` final hidden states.
        seconds: Of the pass, without what counting bytes took.
        attend_s: Of these, seconds inside the cache.
        peak_bytes: Most resident bytes after any layer.
        limit_tokens: Length whose limit the peak is held against: the first token's, or the last
            one's where a method stores and charges the tokens of a pass one by one.
    """

    hidden: Tensor
    seconds: float
    attend_s: float
    peak_bytes: int
    limit_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a controller decided about a prompt.

    Attributes:
        contract: The tier of every state.
        tiers: What its numbers mean.
        segments: Passages of the prompt.
        drift: Predicted drift of a token's logits, as of now.
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

    def stop_timing(self) -> None:
        """No pass is timed any more, so nothing need be rebuilt twice."""
        ...


@runtime_checkable
class ChangesAtKnownTokens(Protocol):
    """A method that stores tokens one by one and says when what is stored changes next."""

    def tokens_until_change(self) -> int:
        """As ``Subject.tokens_until_change``."""
        ...


class _Clock:
    """Adds up seconds inside the cache."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], Found]) -> Found:
        began = time.perf_counter()
        with gpu_range("cache"):
            found = call()
        self.seconds += time.perf_counter() - began
        return found


@torch.no_grad()
def forward_pass(model: Any, cache: Any, input_ids: Tensor, begin: int) -> Tensor:
    """Final hidden states ``[tokens, width]`` of a pass that uses a cache."""
    positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
    output = model.base_model(
        input_ids=input_ids, position_ids=positions[None], past_key_values=cache, use_cache=True
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def wait_for(device: torch.device) -> None:
    """Until a GPU has done its work; elsewhere there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedEngine(CacheEngine):
    """The engine of ``SphericalCache``, with the seconds spent in it.

    Attributes:
        clock: The seconds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``CacheEngine``."""
        self.clock = _Clock()
        super().__init__(*args, **kwargs)

    def begin(self, step: StepTokens) -> None:
        """As the engine does."""
        self.clock.time(lambda: CacheEngine.begin(self, step))

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the engine does."""
        return self.clock.time(lambda: CacheEngine.attend(self, *args, **kwargs))

    def finish(self, *, is_failed: bool = False) -> None:
        """As the engine does."""
        self.clock.time(lambda: CacheEngine.finish(self, is_failed=is_failed))


class EngineSubject:
    """Our cache, as ``SphericalCache.for_model`` makes it.

    Attributes:
        name: Label in reports.
        engine: The cache itself.
        cache: The same as ``past_key_values``.
        geometry: Shape of the cache.
    """

    def __init__(self, model: Any, engine: TimedEngine, name: str) -> None:
        """Put an empty engine into a model."""
        self.name = name
        self.engine = engine
        self.geometry = engine.config.geometry
        self.cache = SphericalCache(model, engine, cuda_graphs=False)
        self._model = model
        self._contract: WriteContract | None = None
        engine.on_contract = self._keep_contract

    def store_prompt(self, states: PromptStates) -> None:
        """Give the engine a pass whose attention the dense model has computed.

        Raises:
            BudgetError: The budget cannot hold at this length.
        """
        engine, count = self.engine, states.num_tokens
        positions = torch.arange(count)[None]
        engine.begin(StepTokens(torch.ones_like(positions, dtype=torch.bool), positions))
        try:
            for layer, part in enumerate(states.layers):
                query, keys, values = part.on(self._model.device)
                engine.update(layer, keys[None], values[None])
                engine.end_layer(layer, query[None])
        except BaseException:
            engine.finish(is_failed=True)
            raise
        engine.finish()
        if not engine.is_coded:
            needed, limit = engine.resident_bytes(), self.limit_bytes(count)
            least = engine.ceiling.holds_from
            raise BudgetError(needed, limit, limit, f"{count} of {least} tokens, dense,")
        if self._has_gate:
            head = self._model.get_output_embeddings()
            engine.see_logits(head(states.hidden[-1:][None]))

    def _keep_contract(self, contract: WriteContract) -> None:
        self._contract = replace(
            contract, tier_id=contract.tier_id.cpu(), protected=contract.protected.cpu()
        )

    @property
    def _has_gate(self) -> bool:
        retention = self.engine.config.retention
        return retention is not None and retention.gate is not None

    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``."""
        engine = self.engine
        engine.clock.seconds = 0.0
        # the engine keeps the highest moment of all passes; here each pass has its own
        engine.peak_bytes = 0
        begin = engine.length
        began = time.perf_counter()
        hidden = forward_pass(self._model, self.cache, input_ids, begin)
        if self._has_gate:
            # a gate hears of margins through the language-model head, as in ``generate``
            self._model.get_output_embeddings()(hidden[None])
        seconds = time.perf_counter() - began
        return Pass(hidden, seconds, engine.clock.seconds, engine.peak_bytes, begin + 1)

    def tokens_until_change(self) -> int:
        """Up to where a tail is full; the token that has it sealed comes alone."""
        if self._has_gate:
            return 1
        return max(1, min(row.room() for row in self.engine.rows))

    def num_tokens(self) -> int:
        """Tokens stored."""
        return self.engine.length

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        return self.engine.resident_bytes()

    def limit_bytes(self, num_tokens: int) -> int:
        """Bytes the budget allows at a length; those of a dense cache without one."""
        limit = self.engine.ceiling.bytes_at(num_tokens)
        return self.geometry.dense_bytes_per_token * num_tokens if limit is None else limit

    def table_bytes(self) -> int:
        """Bytes of codebooks, which all sequences share."""
        return self.engine.ledger().tables

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind."""
        return self.engine.ledger()

    def describe(self) -> MethodDescription:
        """What was chosen under the budget, and by which weights."""
        record = self.engine.describe()
        told = _told(record, self.name)
        retention = self.engine.config.retention
        if retention is not None and record.residency == "retention":
            told["setting"] += f", {_told_policy(retention.policy)}"
        return told

    def decision(self) -> Decision | None:
        """What the controller decided; None with one tier."""
        if not self.engine.rows:
            return None
        residency, retention = self.engine.rows[0].residency, self.engine.config.retention
        if not isinstance(residency, RetentionResidency) or self._contract is None:
            return None
        assert retention is not None
        drift = residency.predict_drift()
        return Decision(self._contract, retention.tiers, retention.segments, drift)

    def stop_timing(self) -> None:
        """Nothing is rebuilt."""


class ProductSubject(EngineSubject):
    """Our cache exactly as ``SphericalCache.for_model`` made it, on the model's own device.

    On a GPU single steps are captured and replayed, as ``generate`` has them, so that the seconds
    inside the cache are not known, and text is fed token by token.
    """

    engine: Any

    def __init__(self, model: Any, cache: SphericalCache, name: str) -> None:
        """Measure a cache that a user could have made."""
        self.name = name
        self.engine = cache.engine
        self.geometry = cache.config.geometry
        self.cache = cache
        self._model = model
        self._contract = None
        self.engine.on_contract = self._keep_contract

    @torch.no_grad()
    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``; waits for a GPU as ``generate`` does."""
        engine = self.engine
        engine.peak_bytes = 0
        begin = engine.length
        began = time.perf_counter()
        output = self._model.base_model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True
        )
        # a captured step hands out the same memory every time
        hidden = output.last_hidden_state[0].clone()
        if self._has_gate:
            self._model.get_output_embeddings()(hidden[None])
        wait_for(input_ids.device)
        seconds = time.perf_counter() - began
        return Pass(hidden, seconds, 0.0, engine.peak_bytes, begin + 1)

    def describe(self) -> MethodDescription:
        """What was chosen under the budget, and whether the last step was a captured one."""
        told = super().describe()
        if self.engine.graph is not None:
            told["setting"] += ", captured steps"
        return told

    def close(self) -> None:
        """Let go of the model and of what a captured step holds."""
        self.engine.on_contract = None
        self.engine.end_graph()
        self.cache.detach()

    def tokens_until_change(self) -> int:
        """One where steps are captured; else as every engine's."""
        return 1 if self._model.device.type == "cuda" else super().tokens_until_change()


class MethodSubject:
    """Another method inside a model.

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
        name: str | None = None,
    ) -> None:
        """Put a method into a model.

        Args:
            model: The model.
            method: The method; it may hold a prompt already.
            geometry: Shape of the cache.
            budget: What it was made for; None for all dense bytes.
            name: Label in reports; the method's own if None.
        """
        self.name = name or method.name
        self.method = method
        self.geometry = geometry
        self._model = model
        self._budget = budget or ByteBudget.parse("100%")
        self._watched = _Watched(method)
        self._cache: MethodCache | None = None

    def store_prompt(self, states: PromptStates) -> None:
        """Give the method every layer of a prompt."""
        for layer, part in enumerate(states.layers):
            query, keys, values = part.on(self._model.device)
            self.method.prefill(layer, keys, values, query=query)

    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``."""
        if self._cache is None:
            # once there is a prompt: the first pass of an empty one would be taken for it
            self._cache = MethodCache(self._model, self._watched)
        watched = self._watched
        watched.begin()
        began = time.perf_counter()
        hidden = forward_pass(self._model, self._cache, input_ids, self._cache.length)
        wait_for(input_ids.device)
        seconds = time.perf_counter() - began - watched.count_s
        length = self._cache.length
        return Pass(hidden, seconds, watched.clock.seconds, watched.peak_bytes, length)

    def tokens_until_change(self) -> int:
        """What the method says; one token if it says nothing."""
        method = self.method
        if isinstance(method, ChangesAtKnownTokens):
            return max(1, method.tokens_until_change())
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
        """Bytes of codebooks that the method does not count itself."""
        return self.method.ledger().tables

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind."""
        return self.method.ledger()

    def describe(self) -> MethodDescription:
        """What was chosen under the budget."""
        return _told(self.method.describe(), self.name)

    def decision(self) -> Decision | None:
        """Other methods have no controller."""
        return None

    def stop_timing(self) -> None:
        """A method that rebuilds its states may keep them rebuilt."""
        self.method.keep_rebuilt()


class _Watched:
    """A method as the model sees it: time and bytes of its attention are noted."""

    def __init__(self, method: CacheMethod) -> None:
        self._method = method
        self.clock = _Clock()
        self.count_s = 0.0
        self.peak_bytes = 0

    def begin(self) -> None:
        """A pass begins."""
        self.clock.seconds = self.count_s = 0.0
        self.peak_bytes = self._method.resident_bytes()

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the method does."""
        output = self.clock.time(lambda: self._method.attend(*args, **kwargs))
        began = time.perf_counter()
        self.peak_bytes = max(self.peak_bytes, self._method.resident_bytes())
        self.count_s += time.perf_counter() - began
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def _told_policy(policy: RetentionPolicy) -> str:
    """Where the controller's weights come from."""
    if policy.model_id:
        return f"weights fitted on {policy.model_id}"
    return "equal weights" if policy.surprise is None else "equal weights, copying heads expected"


def _told(record: MethodRecord, name: str) -> MethodDescription:
    return {
        "name": name,
        "setting": record.setting or "as in its paper",
        "residency": record.residency,
        "tiers": dict(record.tiers),
        "realisation": record.realisation,
    }
