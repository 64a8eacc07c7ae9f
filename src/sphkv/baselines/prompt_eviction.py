# SPDX-License-Identifier: Apache-2.0
"""Policies that score the tokens of a prompt once.

SnapKV, Ada-KV, PyramidKV, Expected Attention and KVzip. What becomes of the tokens after the prompt
is said by ``sphkv.baselines.eviction``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import (
    DECODE_TRIALS,
    PROTECTED,
    EvictionCache,
    LayerPrompt,
    PromptPolicy,
)
from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.settings import MethodShape
from sphkv.core.rope import RopeSpec

SAFEGUARD = 0.2
_QUERY_BLOCK = 128


@dataclass(frozen=True)
class WindowVotes(PromptPolicy):
    """Pooled attention of an observation window.

    SnapKV: the prompt's last queries vote for the tokens to keep.

    Li et al., 2024, "SnapKV: LLM Knows What You are Looking for Before Generation". The weights
    that the last 32 queries give are summed, pooled over neighbours (max, kernel 7, as in the
    paper's LongBench runs), and the highest are kept beside the 32 tokens themselves.

    Deviations: with grouped queries the vote of a KV head is the mean over its query heads, so that
    keys are stored once and not per query head. The paper keeps all tokens after the prompt,
    whatever they cost; here the budget holds, by one of the rules of ``sphkv.baselines.eviction``.

    Attributes:
        window: Queries that vote; their own tokens are protected.
        kernel: Width of the pooling over neighbouring tokens; odd.
    """

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        """Reject kernels without a middle."""
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    @property
    def name(self) -> str:
        """Label in reports."""
        return "snapkv"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two kernels; new tokens in half or a quarter of the room, or under votes."""
        return tuple(
            cls(kernel=kernel, decode=decode, new_share=share)
            for kernel in (7, 17)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The window and one token."""
        return self.window + 1

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Votes of the window, pooled."""
        votes = window_attention(prompt.query, prompt.keys, self.window).sum(1)
        votes = mean_over_group(votes, prompt.keys.shape[0])
        past = max(0, prompt.keys.shape[1] - self.window)
        scores = torch.full_like(votes, PROTECTED)
        if past:
            scores[:, :past] = max_pool(votes[:, :past], self.kernel)
        return scores


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Maximum over ``kernel`` neighbours of each entry of ``[rows, tokens]``."""
    return torch.nn.functional.max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


@dataclass(frozen=True)
class AdaptiveVotes(WindowVotes):
    """Window votes that heads compete with.

    Ada-KV: the heads of a layer share its room by where their votes are.

    Feng et al., 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
    Efficient LLM Inference". The highest votes of all heads of a layer are sought together; a
    head's room is how many of them are its own, mixed with a fifth (the safeguard) of an equal
    share. Votes are SnapKV's.

    Deviations: rooms are whole pages of 16 tokens, at least one per head; while decoding the rooms
    are found again from the scores at hand. Otherwise as SnapKV here.

    Attributes:
        safeguard: Share of the room that is divided equally.
    """

    safeguard: float = SAFEGUARD

    @property
    def name(self) -> str:
        """Label in reports."""
        return "adakv"

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """By joint votes."""
        return adaptive_units(scores, total, unit=PAGE_TOKENS, safeguard=self.safeguard)


def adaptive_units(scores: Tensor, total: int, *, unit: int, safeguard: float) -> list[int]:
    """Units of each head, at least one, by how many of the highest scores are its own.

    Args:
        scores: ``[heads, tokens]``.
        total: Units of all heads; at least one per head.
        unit: Tokens of a unit.
        safeguard: Share that is divided equally.

    Returns:
        Numbers that add up to ``total``.
    """
    heads, tokens = scores.shape
    wanted = min(total * unit, heads * tokens)
    chosen = scores.flatten().topk(wanted).indices // tokens
    own = chosen.bincount(minlength=heads).double() / max(1, wanted)
    share = total * (safeguard / heads + (1 - safeguard) * own)
    units = share.floor().clamp(min=1)
    # what rounding left over, or took too much, where it changes least
    while int(units.sum()) < total:
        units[(share - units).argmax()] += 1
    while int(units.sum()) > total and bool((units > 1).any()):
        units[torch.where(units > 1, units - share, -torch.inf).argmax()] -= 1
    return [int(count) for count in units]


@dataclass(frozen=True)
class PyramidVotes(WindowVotes):
    """Window votes under a room that falls from layer to layer.

    PyramidKV: SnapKV's votes with more room in lower layers than in upper ones.

    Cai et al., 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
    Funneling". The room of a layer falls linearly with its index, from twice the average less the
    smallest down to a twentieth (beta = 20) of the average; window 8, max pooling with kernel 7.

    Deviations: rooms are rounded down to whole pages of 16 tokens; grouped queries and tokens after
    the prompt as for SnapKV here.

    Attributes:
        beta: Average room over the room of the last layer.
    """

    window: int = 8
    beta: int = 20

    @property
    def name(self) -> str:
        """Label in reports."""
        return "pyramidkv"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two kernels, three slopes."""
        return tuple(cls(kernel=kernel, beta=beta) for kernel in (7, 17) for beta in (20, 5, 2))

    def layer_pages(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """The line from the first layer's room to the last one's, in whole pages."""
        # the observation window is kept in every layer and takes no part in the pyramid
        free = max(1, room * PAGE_TOKENS - self.window)
        least = free // self.beta
        most = 2 * free - least
        if most > prompt - self.window:
            most = max(free, prompt - self.window)
            least = 2 * free - most
        step = (most - least) / max(1, num_layers - 1)
        first = most if num_layers > 1 else free
        # two pages: one to pack into while the tail's page comes
        least_pages = min(2, room)
        pages = [
            max(least_pages, int(first - step * index + self.window) // PAGE_TOKENS)
            for index in range(num_layers)
        ]
        # a layer below that was rounded up; the widest layers pay for it
        while sum(pages) > num_layers * room:
            pages[pages.index(max(pages))] -= 1
        return pages[layer]


@dataclass(frozen=True)
class ExpectedWeights(PromptPolicy):
    """Scores by closed-form expected attention.

    Expected Attention: rank tokens by the attention that queries to come should give them.

    Devoto et al., 2025, "Expected Attention: KV Cache Compression by Estimating Attention from
    Future Queries Distribution". Queries before RoPE are taken as Gaussian with the mean and
    covariance seen in the prompt; turned by the average rotation of the next 512 positions, they
    give a key the expected weight ``exp(mu k / sqrt(d) + k Sigma k / (2 d))``, which is normalised
    over the tokens behind the sinks and multiplied by the norm of the value. The first four tokens,
    the sinks, are taken out before, and protected.

    Deviations: queries before RoPE come from un-rotating what the model computed. Tokens after the
    prompt as for SnapKV here.

    Attributes:
        future: Positions to come over which the rotation is averaged.
        num_sinks: First tokens that always stay.
        epsilon: Added to the expected weights before values are counted.
    """

    future: int = 512
    num_sinks: int = 4
    epsilon: float = 0.0

    @property
    def name(self) -> str:
        """Label in reports."""
        return "expected_attention"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Without and with the published code's epsilon; three rules for new tokens."""
        return tuple(
            cls(epsilon=epsilon, decode=decode, new_share=share)
            for epsilon in (0.0, 1e-2)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The sinks and one token."""
        return self.num_sinks + 1

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Expected weight times value norm."""
        sinks = min(self.num_sinks, prompt.keys.shape[1] - 1)
        keys, values = prompt.keys[:, sinks:].float(), prompt.values[:, sinks:].float()
        heads, _, dim = keys.shape
        mean, covariance = self._future_queries(prompt.rope, prompt.query)
        wide = keys.repeat_interleave(prompt.query.shape[0] // heads, 0)
        logits = (wide @ mean[..., None])[..., 0] * dim**-0.5
        logits += ((wide @ covariance) * wide).sum(-1) / (2 * dim)
        expected = torch.softmax(logits, -1).unflatten(0, (heads, -1)).mean(1)
        scores: Tensor = (expected + self.epsilon) * values.norm(dim=-1)
        return torch.nn.functional.pad(scores, (sinks, 0), value=PROTECTED)

    def _future_queries(self, rope: RopeSpec, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[heads, dim]`` and covariance ``[heads, dim, dim]`` of queries to come."""
        tokens, device = query.shape[1], query.device
        positions = torch.arange(tokens, device=device)
        plain = rope.from_planes(rope.unrotate(rope.to_planes(query.float()), positions))
        seen = plain[:, min(self.num_sinks, tokens - 1) :]
        mean = seen.mean(1)
        centred = seen - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / seen.shape[1]
        average = mean_rotation(rope, tokens, self.future).to(device)
        return mean @ average.T, average @ covariance @ average.T


@functools.lru_cache(maxsize=64)
def mean_rotation(rope: RopeSpec, first: int, count: int) -> Tensor:
    """Average ``[dim, dim]`` of the rotations of ``count`` positions from ``first`` on.

    Cached and shared, so callers must not write to it.
    """
    with torch.inference_mode(False):
        phases = rope.phases(torch.arange(first, first + count))
        cos, sin = phases.cos().mean(0), phases.sin().mean(0)
        along, across = rope.plane_channels().unbind(-1)
        average = torch.zeros(rope.head_dim, rope.head_dim)
        average[along, along] = average[across, across] = cos
        average[across, along], average[along, across] = sin, -sin
        return average


@dataclass(frozen=True)
class ReconstructionVotes(PromptPolicy):
    """Largest weights under queries that follow the prompt.

    KVzip: tokens that would be needed to write the prompt once more.

    Kim et al., 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". The
    model is made to repeat its prompt; a token's score is the largest weight that any query of the
    repetition gives it, over the query heads of its KV head. Heads compete for the room of a layer.

    Deviations: the repetition is not run. The prompt's own queries stand for it, turned on as if
    they came after the prompt, so that they see all of it at the distances they would have; what
    deeper layers would know of the repetition is missing. One query in four is asked. Heads compete
    inside a layer and not over all layers, in whole pages. The newest 16 tokens are protected.
    Tokens after the prompt as for SnapKV here.

    Attributes:
        stride: One query in so many is asked.
        recent: Newest tokens that stay.
        safeguard: Share of a layer's room that heads share equally.
    """

    stride: int = 4
    recent: int = PAGE_TOKENS
    safeguard: float = 0.0

    @property
    def name(self) -> str:
        """Label in reports."""
        return "kvzip"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two safeguards; new tokens in half or a quarter of the room, or under votes."""
        return tuple(
            cls(safeguard=safeguard, decode=decode, new_share=share)
            for safeguard in (0.0, 0.2)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The newest and one token."""
        return self.recent + 1

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """By joint scores."""
        return adaptive_units(scores, total, unit=PAGE_TOKENS, safeguard=self.safeguard)

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Largest weights over the queries of a repetition."""
        heads, tokens, dim = prompt.keys.shape
        rows = torch.arange(0, tokens, self.stride, device=prompt.keys.device)
        planes = prompt.rope.to_planes(prompt.query.index_select(1, rows).float())
        # turned on by the length of the prompt, token t stands where its repetition would
        after = torch.full_like(rows, tokens)
        query = prompt.rope.from_planes(prompt.rope.rotate(planes, after)) * dim**-0.5
        keys = prompt.keys.float().transpose(1, 2)
        best = torch.zeros(heads, tokens, device=keys.device)
        for part in query.split(_QUERY_BLOCK, 1):
            logits = part.reshape(heads, -1, dim) @ keys
            best = torch.maximum(best, torch.softmax(logits, -1).amax(1))
        best[:, max(0, tokens - self.recent) :] = PROTECTED
        return best
