# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a prompt's runs of 16 tokens once its attention is gone.

Decoding needs to know what dropping or coding an old run would lose, and what a new run will be
worth before any query has come back to it. The first was noted with the contract and falls with age
as the losses of the prompt did; the second is read off the same curve of loss by age.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import LayerBlocks, PricedLayer
from sphkv.retention.scores import tier_ratio

# Importances span many decades; their logarithm is what half precision keeps well.
LEAST_IMPORTANCE = 1e-30

AGE_EDGES = (0, 24, 40, 72, 136, 264, 520, 1032, 2056)
"""Ages in tokens at which the bins of a profile begin; the last bin is open."""

_YOUNGEST = RUN_TOKENS // 2
# Logarithms of the geometric means of edges, the first bin taken from 16 and the last to 4112.
_CENTRES = tuple(
    math.log(max(low, RUN_TOKENS) * high) / 2
    for low, high in zip(AGE_EDGES, (*AGE_EDGES[1:], 2 * AGE_EDGES[-1]), strict=True)
)


@dataclass(slots=True, eq=False)
class RunNotes:
    """Losses of every run of some heads, of one layer or of several joined.

    Attributes:
        log_importance: ``[heads, runs]`` float16 log of the loss of dropping the run's states,
            each alone, summed.
        log_drop: ``[heads, runs]`` float16 log of the run's part in the loss of dropping its block,
            less important blocks gone before it; plus infinity for a run that no block holds: it is
            protected, and must not be decided about.
        tier_ratio: ``[heads, tiers]`` float32 loss of a tier over the importance; 0 at the dense
            tier.
        bound: ``[heads, tiers]`` float32 bound on the relative change of a state's weight at a
            tier, see ``gate.tier_bounds``; 1 at tier 0.
        born: ``[runs]`` int32 age of the run's middle when its losses were noted.
        profile: ``[heads, bins, 2]`` float16 log of mean importance and mean drop loss of the
            prompt's free runs, by age.
    """

    log_importance: Tensor
    log_drop: Tensor
    tier_ratio: Tensor
    bound: Tensor
    born: Tensor
    profile: Tensor

    @classmethod
    def of_prompt(
        cls, run_losses: Tensor, priced: PricedLayer, bound: Tensor, *, num_tokens: int
    ) -> RunNotes:
        """Notes of a prompt's first tokens, those that were decided about.

        Args:
            run_losses: ``[heads, runs, tiers]``, see ``LayerPricer.run_losses``.
            priced: The same layer as blocks.
            bound: ``[heads, tiers]``, see ``gate.tier_bounds``.
            num_tokens: Tokens to note, whole runs; ages are counted from the end of the prompt.
        """
        if num_tokens % RUN_TOKENS or not 0 < num_tokens <= priced.protected.shape[1]:
            raise ValueError(
                f"num_tokens must be whole runs of the prompt's {priced.protected.shape[1]} "
                f"tokens, got {num_tokens}"
            )
        runs = num_tokens // RUN_TOKENS
        importance = run_losses[:, :runs, 0]
        drop = _run_drops(priced.blocks, num_tokens)
        ratio = tier_ratio(run_losses)
        ratio[:, -1] = 0
        age = _ages(runs, priced.protected.shape[1], importance.device)
        profile = _age_profile(importance, drop, age)
        return cls(_log(importance).half(), _log(drop).half(), ratio, bound, age, profile)

    @classmethod
    def unmeasured(cls, num_heads: int, tiers: TierTable) -> RunNotes:
        """Notes of a prompt too short to learn from: all heads alike, losses falling as 1 / age.

        A tier's loss is what its bits leave of the squared error of keys and values.
        """
        ratio = torch.tensor(
            [0.5 * (4.0**-tier.key_bits + 4.0**-tier.value_bits) for tier in tiers]
        )
        bound = torch.tensor([2.0**-tier.key_bits for tier in tiers])
        ratio[tiers.dense_id] = bound[tiers.dense_id] = 0
        profile = -torch.tensor(_CENTRES, dtype=torch.float16)
        return cls(
            torch.empty(num_heads, 0, dtype=torch.float16),
            torch.empty(num_heads, 0, dtype=torch.float16),
            ratio.repeat(num_heads, 1),
            bound.repeat(num_heads, 1),
            torch.empty(0, dtype=torch.int32),
            profile[None, :, None].repeat(num_heads, 1, 2),
        )

    @classmethod
    def join(cls, parts: Sequence[RunNotes]) -> RunNotes:
        """Heads of several layers with the same runs, as if they were those of one."""
        if any(not torch.equal(part.born, parts[0].born) for part in parts):
            raise ValueError("only notes of the same runs can be joined")
        names = ("log_importance", "log_drop", "tier_ratio", "bound", "profile")
        heads = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(born=parts[0].born, **heads)

    def split(self, num_heads: int) -> list[RunNotes]:
        """Notes of so many heads each: what ``join`` put together."""
        names = ("log_importance", "log_drop", "tier_ratio", "bound", "profile")
        parts = zip(*(getattr(self, name).split(num_heads) for name in names), strict=True)
        return [
            RunNotes(born=self.born.clone(), **dict(zip(names, part, strict=True)))
            for part in parts
        ]

    @property
    def num_runs(self) -> int:
        """Runs that were noted."""
        return self.born.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept alive."""
        return tuple(self.state().values())

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, for saving; not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> RunNotes:
        """Notes of what ``state`` returned.

        Raises:
            ValueError: Tensors are missing or do not fit together.
        """
        names = [field.name for field in fields(cls)]
        if set(state) != set(names):
            raise ValueError(f"notes need the tensors {names}, got {sorted(state)}")
        notes = cls(**state)
        heads, runs = notes.log_importance.shape
        shapes = {
            "log_drop": (heads, runs),
            "tier_ratio": (heads, notes.tier_ratio.shape[-1]),
            "bound": (heads, notes.tier_ratio.shape[-1]),
            "born": (runs,),
            "profile": (heads, len(AGE_EDGES), 2),
        }
        for name, shape in shapes.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(state[name].shape)}")
        return notes

    def to(self, device: torch.device | str) -> RunNotes:
        """The same on a device."""
        return RunNotes(*(tensor.to(device) for tensor in self.tensors()))

    def copy(self) -> RunNotes:
        """Notes that grow apart from these."""
        return RunNotes(*(tensor.clone() for tensor in self.tensors()))

    def extend(self, num_runs: int, age: int, *, scale: float = 0.3) -> None:
        """Note runs that follow, at a part of what the prompt's runs of their age lost.

        Args:
            num_runs: Runs to add.
            age: Tokens from the middle of the first of them to the end of the sequence; each
                further run is 16 tokens younger.
            scale: The part.
        """
        if num_runs < 0:
            raise ValueError(f"num_runs must not be negative, got {num_runs}")
        self.extend_at(age - RUN_TOKENS * torch.arange(num_runs), scale=scale)

    def extend_at(self, ages: Tensor, *, scale: float = 0.3) -> None:
        """Note runs that follow; see ``extend``.

        Args:
            ages: ``[runs]`` int64 tokens from the middle of each to the end of the sequence.
            scale: The part.
        """
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale!r}")
        ages = ages.to(self.born.device)
        added = (self.profile_at(ages) + math.log(scale)).half()
        self.log_importance = torch.cat([self.log_importance, added[..., 0]], 1)
        self.log_drop = torch.cat([self.log_drop, added[..., 1]], 1)
        self.born = torch.cat([self.born, ages.clamp(min=_YOUNGEST).to(torch.int32)])

    def crop(self, num_tokens: int) -> None:
        """Forget runs that begin at ``num_tokens`` or later."""
        runs = -(-num_tokens // RUN_TOKENS)
        self.log_importance = self.log_importance[:, :runs].clone()
        self.log_drop = self.log_drop[:, :runs].clone()
        self.born = self.born[:runs].clone()

    def losses(self, num_tokens: int) -> Tensor:
        """What each run would lose at every tier now.

        A run that is older than it was when it was noted has lost as much of its importance as
        runs of the prompt had from the one age to the other; nothing becomes more important.

        Args:
            num_tokens: Length of the sequence.

        Returns:
            ``[heads, runs, tiers]`` float32; infinite at tier 0 for protected runs.
        """
        importance, drop = self._now(num_tokens)
        loss = importance[..., None] * self.tier_ratio[:, None]
        loss[..., 0] = drop
        return loss

    def squared_drift(self, tier_id: Tensor, num_tokens: int) -> Tensor:
        """Bound on the squared move of each head's output, in units of loss.

        An error of a logit moves the output by that part of what dropping the state would, and
        errors of different states are independent. Dropped runs count with what dropping all of
        them together moved.

        Args:
            tier_id: ``[heads, runs]`` tier of every run that was noted.
            num_tokens: Length of the sequence.

        Returns:
            ``[heads]`` float32.
        """
        importance, drop = self._now(num_tokens)
        coded = importance * self.bound.gather(1, tier_id.long()).square()
        # what no block holds is protected and cannot be gone
        gone = drop.masked_fill(drop.isinf(), 0.0)
        return torch.where(tier_id > 0, coded, gone).sum(1)

    def new_drift(self, tier_id: int) -> float:
        """What a new run at a tier would add to the squared drift of all heads."""
        importance = self.profile_at(torch.tensor([_YOUNGEST]))[:, 0, 0].exp()
        return float((importance * self.bound[:, tier_id].square()).sum())

    def _now(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Importance and loss of dropping of every run at a length, ``[heads, runs]`` each."""
        now = _ages(self.num_runs, num_tokens, self.born.device)
        aged = (self.profile_at(now) - self.profile_at(self.born)).clamp(max=0)
        importance = (self.log_importance.float() + aged[..., 0]).exp()
        return importance, (self.log_drop.float() + aged[..., 1]).exp()

    def profile_at(self, ages: Tensor) -> Tensor:
        """Log of mean importance and mean drop loss at some ages.

        Linear in the logarithm of age between the centres of bins, constant beyond the outer two.

        Args:
            ages: ``[n]`` tokens.

        Returns:
            ``[heads, n, 2]`` float32.
        """
        centres = constant(_CENTRES, device=ages.device)
        at = ages.float().clamp(min=_YOUNGEST).log()
        right = torch.searchsorted(centres, at).clamp(1, len(_CENTRES) - 1)
        low, high = centres[right - 1], centres[right]
        part = ((at - low) / (high - low)).clamp(0, 1)[:, None]
        profile = self.profile.float()
        return torch.lerp(profile[:, right - 1], profile[:, right], part.expand(-1, 2))


def _log(loss: Tensor) -> Tensor:
    return loss.clamp(min=LEAST_IMPORTANCE).log()


def _ages(num_runs: int, num_tokens: int, device: torch.device) -> Tensor:
    """``[runs]`` int32 tokens from the middle of each run to the end of the sequence."""
    middle = RUN_TOKENS * torch.arange(num_runs, device=device) + RUN_TOKENS // 2
    return (num_tokens - middle).clamp(min=_YOUNGEST).to(torch.int32)


def _run_drops(blocks: Mapping[BlockShape, LayerBlocks], num_tokens: int) -> Tensor:
    """Part of each run in its block's loss of dropping; infinite without one.

    Args:
        blocks: Blocks of every head by shape.
        num_tokens: Tokens to look at, whole runs.

    Returns:
        ``[heads, runs]`` float32.
    """
    shape = next(
        shape for shape in (BlockShape.RUNS, BlockShape.TOKENS, BlockShape.WHOLE) if shape in blocks
    )
    found, size = blocks[shape], shape.granularity
    each = found.distortion[..., 0] / found.states.clamp(min=1) * size  # of a unit
    count = num_tokens // size
    # padding and units behind the last one share a place that nobody reads
    is_unit = (found.units >= 0) & (found.units < count)
    index = torch.where(is_unit, found.units, count).flatten(1)
    drop = each.new_full((len(index), count + 1), -1.0)
    drop.scatter_(1, index, each[..., None].expand_as(found.units).flatten(1))
    per_run = drop[:, :count].unflatten(1, (-1, RUN_TOKENS // size))
    is_held = (per_run >= 0).any(2)
    found_drops: Tensor = per_run.clamp(min=0).sum(2).masked_fill(~is_held, torch.inf)
    return found_drops


def _age_profile(importance: Tensor, drop: Tensor, age: Tensor) -> Tensor:
    """Mean losses of free runs by age; a bin without runs takes those of the next older one.

    Args:
        importance: ``[heads, runs]``.
        drop: ``[heads, runs]``, infinite for protected runs.
        age: ``[runs]``.

    Returns:
        ``[heads, bins, 2]`` float16 logarithms.
    """
    is_free = drop.isfinite()
    # all that is known of a head without free runs is what the protected ones are worth
    is_counted = is_free | ~is_free.any(1, keepdim=True)
    both = torch.stack([importance, torch.where(is_free, drop, importance)], -1)
    edges = constant(AGE_EDGES[1:], device=age.device)
    bins = torch.bucketize(age, edges, right=True)
    one_hot = (bins[:, None] == torch.arange(len(AGE_EDGES), device=age.device)).to(both.dtype)
    counted = is_counted.to(both.dtype)
    count = counted @ one_hot  # [heads, bins]
    total = torch.einsum("hrc,rb->hbc", both * counted[..., None], one_hot)
    index = _nearest_filled(count > 0)
    mean = total / count.clamp(min=1)[..., None]
    return _log(mean.gather(1, index[..., None].expand_as(mean))).half()


def _nearest_filled(is_filled: Tensor) -> Tensor:
    """``[heads, bins]`` int64 bin to take for each: itself, the next older filled, or the oldest.

    Args:
        is_filled: ``[heads, bins]`` bool, one at least in every head.
    """
    bins = is_filled.shape[1]
    number = torch.arange(bins, device=is_filled.device).expand_as(is_filled)
    older = torch.where(is_filled, number, bins).flip(1).cummin(1).values.flip(1)
    oldest = torch.where(is_filled, number, -1).amax(1, keepdim=True)
    return torch.minimum(older, oldest)
