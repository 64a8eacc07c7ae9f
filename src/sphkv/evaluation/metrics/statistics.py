# SPDX-License-Identifier: Apache-2.0
"""How sure a difference is: bootstrap intervals and a paired test, exact or seeded."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sphkv.evaluation.metrics.throughput import quantile

_MOST_EXACT = 14
_DRAWS = 20_000


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
        """The mean and its interval, to three digits."""
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
