# SPDX-License-Identifier: Apache-2.0
"""How sure a difference is: bootstrap intervals and a paired test, exact or seeded."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

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
