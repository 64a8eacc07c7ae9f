# SPDX-License-Identifier: Apache-2.0
"""Votes times codes: drop what no query asks for, code the rest, keep both ends dense.

The rival that drops and codes at once, put together from published parts. One policy scores the
tokens of a prompt (SnapKV, SnapKV with Ada-KV's head budgets, or KVzip); what is kept is coded in
groups, the first and the newest tokens are dense. New tokens are dense for a while, then coded in
groups of 32 per head. Room for them is left at the prompt: for all ``num_new``, or ``new_share``
of the budget if that is less; once it is used up, the groups go that received least attention
lately. A position of four bytes is charged for every coded state, a page header and pointer for
every 128 of a head, and four bytes of attention per group.

Codes: ``int4`` and ``int3`` have keys as integers per channel over a group of tokens and values as
integers per token; ``kivi2`` has KIVI's 2 bits with values in groups of 32 channels.

Deviations: no paper has this exact method. Head budgets are whole groups. A decode step rebuilds a
layer in float32, so the method is format-only.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.coded_layer import PAGE_HEADER_BYTES, PAGE_POINTER_BYTES
from sphkv.baselines.eviction import LayerPrompt, PromptPolicy
from sphkv.baselines.group_layer import GroupClass, GroupLayer, integer_class
from sphkv.baselines.held_states import (
    attend_held,
    check_query,
    check_states,
)
from sphkv.baselines.prompt_eviction import (
    SAFEGUARD,
    ReconstructionVotes,
    WindowVotes,
    adaptive_units,
    max_pool,
)
from sphkv.baselines.quantised import LayeredCache
from sphkv.baselines.settings import MethodShape, changed_fields
from sphkv.core.geometry import KVGeometry


@dataclass(frozen=True, slots=True, eq=False)
class GroupRequest:
    """What a layer's tokens are to be divided under.

    Attributes:
        scores: ``[kv_heads, tokens]`` of the tokens that may be coded or dropped.
        costs: Bytes of a group of each class.
        distortion: Mean squared error of each class over that of dropping.
        budget: Bytes of all groups of the layer.
        unit: Tokens of a group.
    """

    scores: Tensor
    costs: Sequence[int]
    distortion: Sequence[float]
    budget: int
    unit: int


class Allocation(Protocol):
    """Divides the tokens of a layer into classes and what is dropped."""

    def groups(self, request: GroupRequest) -> Tensor:
        """Groups ``[kv_heads, classes]`` int64; a head's best tokens go to its first class."""
        ...


@dataclass(frozen=True)
class KeepHighest:
    """The highest scores, all in one class.

    Attributes:
        safeguard: Share of the groups that heads share equally; None shares all equally.
    """

    safeguard: float | None = None

    def groups(self, request: GroupRequest) -> Tensor:
        """As many groups as the budget has."""
        heads, tokens = request.scores.shape
        total = min(request.budget // request.costs[0], heads * (tokens // request.unit))
        if self.safeguard is None or total < heads:
            counts = [total // heads] * heads
        else:
            counts = adaptive_units(
                request.scores, total, unit=request.unit, safeguard=self.safeguard
            )
        return torch.tensor(counts)[:, None].clamp(max=tokens // request.unit)


@dataclass(frozen=True)
class GroupSettings(ABC):
    """Hyper-parameters of methods that drop and code.

    Attributes:
        kernel: Width of the pooling of votes; odd. KVzip's scores are pooled only beyond 7.
        sinks: First tokens that stay dense.
        recent: Newest tokens that stay dense.
        group: Tokens of a group of the prompt.
        new_group: New tokens of a head that are coded together.
        new_share: Share of the budget that the prompt leaves to new tokens, at most.
        decay: What is left of a group's attention after a step.
    """

    kernel: int = 7
    sinks: int = 4
    recent: int = 32
    group: int = 64
    new_group: int = 32
    new_share: float = 0.5
    decay: float = 0.95

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the method."""

    def policy(self) -> PromptPolicy:
        """What scores the prompt."""
        return WindowVotes(kernel=self.kernel)

    @abstractmethod
    def classes(self, geometry: KVGeometry) -> tuple[GroupClass, ...]:
        """Classes of coded states, the best first."""

    @abstractmethod
    def allocation(self) -> Allocation:
        """How tokens are divided into classes."""

    def new_class(self) -> int:
        """Class of new tokens."""
        return 0

    def trials(self) -> tuple[Self, ...]:
        """Two kernels; more sinks; less room, or none, left to new tokens at the prompt."""
        return tuple(
            dataclasses.replace(self, kernel=kernel, sinks=sinks, recent=recent, new_share=share)
            for kernel in (7, 17)
            for sinks, recent, share in ((4, 32, 0.5), (16, 32, 0.25), (16, 16, 0.0))
        )

    def build(self, shape: MethodShape) -> ComposedCache:
        """An empty cache."""
        return ComposedCache(shape, self)


@dataclass(frozen=True)
class Composed(GroupSettings):
    """Votes of one paper and codes of another.

    Attributes:
        votes: ``"snapkv"``, ``"snapkv+adakv"`` or ``"kvzip"``.
        code: ``"int4"``, ``"int3"`` or ``"kivi2"``.
    """

    votes: str = "snapkv"
    code: str = "int4"

    def __post_init__(self) -> None:
        """Reject parts that are not known."""
        if self.votes not in ("snapkv", "snapkv+adakv", "kvzip"):
            raise ValueError(f"votes must be snapkv, snapkv+adakv or kvzip, got {self.votes!r}")
        if self.code not in ("int4", "int3", "kivi2"):
            raise ValueError(f"code must be int4, int3 or kivi2, got {self.code!r}")

    @property
    def label(self) -> str:
        """Both parts."""
        return f"{self.votes}+{self.code}"

    def policy(self) -> PromptPolicy:
        """SnapKV's or KVzip's."""
        if self.votes == "kvzip":
            return ReconstructionVotes()
        return WindowVotes(kernel=self.kernel)

    def classes(self, geometry: KVGeometry) -> tuple[GroupClass, ...]:
        """The one code."""
        if self.code == "kivi2":
            return (integer_class("kivi2", 2, 2, geometry.head_dim, value_group=32),)
        bits = int(self.code[-1])
        return (integer_class(self.code, bits, bits, geometry.head_dim),)

    def allocation(self) -> Allocation:
        """Equal heads for SnapKV alone, Ada-KV's otherwise."""
        safeguards = {"snapkv": None, "snapkv+adakv": SAFEGUARD, "kvzip": 0.0}
        return KeepHighest(safeguards[self.votes])


class ComposedCache(LayeredCache[GroupLayer]):
    """A ``CacheMethod`` that drops some tokens and codes most others.

    Attributes:
        settings: Its hyper-parameters.
    """

    residency = "evicted and coded"

    def __init__(self, shape: MethodShape, settings: GroupSettings) -> None:
        """Start empty."""
        super().__init__(settings.label, shape)
        self.settings = settings
        self._policy = settings.policy()
        self._classes = settings.classes(shape.geometry)

    @property
    def setting(self) -> str:
        """What differs from the defaults."""
        return changed_fields(self.settings, but=("votes", "code"))

    def tier_shares(self) -> dict[str, float]:
        """States of each class, dense and dropped."""
        totals: dict[str, int] = {"max": 0, **{kind.name: 0 for kind in self._classes}}
        given = 0
        for held in self._held():
            given += held.num_tokens * self.geometry.num_kv_heads
            for name, count in held.state_counts().items():
                totals[name] += count
        shares = {name: count / max(1, given) for name, count in totals.items()}
        return {**shares, "drop": 1 - sum(shares.values())}

    def _fixed_bytes(self) -> int:
        """Bytes of a layer's dense tokens when most of them wait, and of pages begun."""
        options, heads = self.settings, self.geometry.num_kv_heads
        dense = options.sinks + options.recent + options.new_group
        pages = (len(self._classes) + 1) * (PAGE_HEADER_BYTES + PAGE_POINTER_BYTES)
        return heads * (dense * self.geometry.dense_state_bytes + pages)

    def plan(self, num_tokens: int) -> int:
        """Bytes of one layer for the coded tokens of a prompt.

        Raises:
            ValueError: Not even one group per head fits beside the dense tokens.
        """
        options, heads = self.settings, self.geometry.num_kv_heads
        last = num_tokens + self.shape.num_new
        fixed = self._fixed_bytes()
        new = self._classes[options.new_class()].group_bytes(options.new_group)
        groups = -(-max(0, self.shape.num_new - options.new_group) // options.new_group)
        end = self.shape.layer_limit_bytes(last) - fixed
        reserved = min(groups * heads * new, int(options.new_share * max(0, end)))
        room = min(self.shape.layer_limit_bytes(num_tokens) - fixed, end - reserved)
        least = heads * max(self._classes[-1].group_bytes(options.group), new)
        if room < least:
            dense = num_tokens * heads * self.geometry.dense_state_bytes
            needed = (fixed + least + min(groups * heads * new, fixed + least)) / dense
            raise ValueError(
                f"{self.name} needs at least {needed:.4f} of the dense bytes of {num_tokens} "
                f"tokens, the budget is {self.shape.budget:g}"
            )
        return room

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Score a prompt, drop and code."""
        self._check_prompt(layer, keys, values)
        if query is None:
            raise ValueError(f"{self.name} chooses by attention: prefill needs the query")
        check_query(self.geometry, query, keys.shape[1])
        room = self.plan(keys.shape[1])
        prompt = LayerPrompt(layer, query, keys, values, self.shape.ropes[layer])
        held = GroupLayer(self._classes, self.settings.sinks, keys, values)
        held.keeps_rebuilt = self.keeps_rebuilt
        first, last = self.settings.sinks, max(0, keys.shape[1] - self.settings.recent)
        held.store_dense(keys, values, first, max(first, last))
        if last > first:
            self._code_prompt(held, prompt, room, slice(first, last))
        self._layers[layer] = held

    def _code_prompt(self, held: GroupLayer, prompt: LayerPrompt, room: int, part: slice) -> None:
        scores = self._scores(prompt)[:, part]
        keys, values = prompt.keys[:, part], prompt.values[:, part]
        # few tokens make small groups
        unit = min(self.settings.group, scores.shape[1])
        costs = [kind.group_bytes(unit) for kind in self._classes]
        errors = [kind.distortion(keys, values, unit) for kind in self._classes]
        request = GroupRequest(scores, costs, errors, room, unit)
        counts = self.settings.allocation().groups(request)
        order = scores.flip(1).argsort(dim=1, descending=True, stable=True)
        order = scores.shape[1] - 1 - order
        # as much attention as the steps that a group remembers would give
        mass = scores / scores.sum(1, keepdim=True) / (1 - self.settings.decay)
        for head in range(self.geometry.num_kv_heads):
            at = 0
            for kind, count in enumerate(counts[head].tolist()):
                if count == 0:
                    continue
                tokens = order[head, at : at + count * unit].sort().values.view(count, unit)
                at += count * unit
                states = (keys[head, tokens], values[head, tokens])
                share = mass[head, tokens].sum(1)
                held.add(kind, [head] * count, *states, tokens + part.start, share)

    def _scores(self, prompt: LayerPrompt) -> Tensor:
        scores: Tensor = self._policy.prompt_scores(prompt)  # type: ignore[attr-defined]
        finite = scores.isfinite()
        # what a policy protects is what it would keep first
        scores = torch.where(finite, scores, scores[finite].max() if bool(finite.any()) else 1.0)
        if isinstance(self._policy, ReconstructionVotes) and self.settings.kernel > 7:
            scores = max_pool(scores, self.settings.kernel)
        return scores

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store the next tokens as if they came one by one, and attend.

        Tokens between which nothing is coded or dropped see the same states, and attend together.
        """
        check_states(self.geometry, keys, values)
        check_query(self.geometry, query, keys.shape[1])
        held = self._layer(layer)
        outputs, at = [], 0
        while at < keys.shape[1]:
            self._make_room(held)
            some = slice(at, at + min(keys.shape[1] - at, self._num_free(held)))
            held.append(keys[:, some], values[:, some])
            outputs.append(self._attend_some(held, query[:, some], options, sink_logits))
            at = some.stop
        return torch.cat(outputs, 1) if outputs else query.float()

    def _attend_some(
        self, held: GroupLayer, query: Tensor, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """Attention of the newest tokens, which the groups remember, older ones fading."""
        count, states = query.shape[1], held.read()
        positions = torch.arange(held.num_tokens - count, held.num_tokens, device=query.device)
        decay = self.settings.decay
        ages = torch.arange(count - 1, -1, -1, device=query.device)
        received = torch.zeros(states.positions.shape, device=query.device)
        output = attend_held(
            query,
            states,
            positions,
            options,
            sink_logits=sinks,
            received=received,
            weight=decay**ages,
        )
        held.note(received / self.geometry.group_size, decay**count)
        return output

    def _num_free(self, held: GroupLayer) -> int:
        """Tokens that come, one at least, before ``_make_room`` has to act again."""
        options, token, nbytes = self.settings, self._token_bytes, held.nbytes
        most = max(1, options.recent + options.new_group - held.num_open)
        for count in range(1, most):
            limit = self.shape.layer_limit_bytes(held.num_tokens + count + 1)
            if nbytes + (count + 1) * token > limit:
                return count
        return most

    def tokens_until_change(self) -> int:
        """Tokens up to the next seal: they are stored and attend one by one in any case."""
        held = self._layer(0)
        return max(1, self.settings.recent + self.settings.new_group - held.num_open)

    def _make_room(self, held: GroupLayer) -> None:
        """Code the oldest new tokens, then drop groups, so that one more token fits."""
        options = self.settings
        if held.num_open >= options.recent + options.new_group:
            held.seal(options.new_class(), options.new_group)
        limit = self.shape.layer_limit_bytes(held.num_tokens + 1)
        while held.nbytes + self._token_bytes > limit and held.drop_least():
            pass

    @property
    def _token_bytes(self) -> int:
        """Bytes of a dense token of a layer."""
        return self.geometry.num_kv_heads * self.geometry.dense_state_bytes

    def _num_states(self, held: GroupLayer) -> int:
        return sum(held.state_counts().values())
