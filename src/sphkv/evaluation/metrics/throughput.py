# SPDX-License-Identifier: Apache-2.0
"""Decode speed over a fixed window, and the times around it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from sphkv.evaluation.schema import Times


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
        """Plain data; speeds are None when no step was left to measure."""
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
            "attend_s": sum(inside) if inside else None,
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
