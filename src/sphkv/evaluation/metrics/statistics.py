# SPDX-License-Identifier: Apache-2.0
"""Figures of samples: times of decode steps, bootstrap intervals and a paired test."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sphkv.evaluation.schema import Times

_MOST_EXACT = 14
_DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """When a point spent its time.

    Attributes:
        prefill_s: Seconds of the dense pass over the prompt.
        store_s: Seconds to decide, encode and write the cache.
        step_s: Seconds of each decode step, warm-up included.
        num_warm: Steps of the warm-up; fewer if the answer was short.
        attend_s: Of each step, seconds inside the cache method; empty if they were not taken.
    """

    prefill_s: float
    store_s: float
    step_s: tuple[float, ...]
    num_warm: int
    attend_s: tuple[float, ...] = ()

    @property
    def measured(self) -> tuple[float, ...]:
        """Steps after the warm-up."""
        return self.step_s[self.num_warm :]

    def to_dict(self) -> Times:
        """Plain data; what no step was left to measure, or nobody timed, is None."""
        steps = self.measured
        inside = self.attend_s[self.num_warm :]
        first = self.step_s[0] if self.step_s else 0.0
        # the median, because another process may slow a step down
        middle = statistics.median(steps) if steps else None
        return {
            "t_prefill_s": self.prefill_s,
            "t_allocate_write_s": self.store_s,
            "t_decode_s": sum(self.step_s),
            "ttft_s": self.prefill_s + self.store_s + first,
            "num_measured": len(steps),
            "decode_s": sum(steps),
            "attend_s": sum(inside) if any(inside) else None,
            "tok_s": 1.0 / middle if middle else None,
            "step_p50_s": middle,
            "step_p95_s": quantile(steps, 0.95) if steps else None,
        }


def quantile(values: tuple[float, ...] | list[float], share: float) -> float:
    """Linear quantile of a few values."""
    if not values:
        raise ValueError("no values to take a quantile of")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean.

    Args:
        values: One per prompt.
        level: Coverage.
        draws: Resamples.
        seed: Of the resampling.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    draw = random.Random(seed)
    means = [statistics.fmean(draw.choices(values, k=len(values))) for _ in range(draws)]
    tail = (1.0 - level) / 2
    return quantile(means, tail), quantile(means, 1.0 - tail)


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean over prompts and where it may lie.

    Attributes:
        mean: The mean.
        low: Lower end of its 95% interval.
        high: Upper end.
        count: Prompts.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        """The mean and its interval, to three digits; a single value has none."""
        if self.count < 2:
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_interval(values: Sequence[float], *, seed: int = 0) -> MeanInterval:
    """The mean of some prompts with its bootstrap interval."""
    low, high = bootstrap_interval(values, seed=seed)
    return MeanInterval(statistics.fmean(values), low, high, len(values))


def paired_interval(
    first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0
) -> MeanInterval:
    """Mean difference of two methods over the prompts that both have, with its interval.

    Prompts are drawn as pairs, so that what makes a prompt hard for both does not widen it.

    Args:
        first: Figure of each prompt by its name.
        second: The same of the method that is taken off.
        seed: Of the resampling.

    Raises:
        ValueError: They have no prompt in common.
    """
    common = [name for name in first if name in second]
    if not common:
        raise ValueError("the two methods have no prompt in common")
    return mean_interval([first[name] - second[name] for name in common], seed=seed)


def paired_sign_flip(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p-value that paired differences average zero.

    Under the null every difference may as well have the other sign. All sign patterns are tried
    up to 14 pairs, else a seeded sample of them.
    """
    if not differences:
        raise ValueError("a paired test needs at least one pair")
    observed = abs(sum(differences))
    slack = 1e-12 * (1.0 + observed)
    if len(differences) <= _MOST_EXACT:
        totals = [
            abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differences))
        ]
        return sum(total >= observed - slack for total in totals) / len(totals)
    draw = random.Random(seed)
    extreme = sum(
        abs(sum(d if draw.random() < 0.5 else -d for d in differences)) >= observed - slack
        for _ in range(_DRAWS)
    )
    return (extreme + 1) / (_DRAWS + 1)
