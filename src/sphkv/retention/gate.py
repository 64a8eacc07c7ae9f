# SPDX-License-Identifier: Apache-2.0
"""The stability gate: holds compression back while a decision is about to tip.

Danger is the predicted drift of the logits over the margin between the two best tokens. Between
the two thresholds the gate keeps its state, so it cannot flutter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateOptions:
    """When the gate opens and closes, and what it may spend.

    Attributes:
        tau_drop: Danger at or below which ordinary compression resumes.
        tau_prot: Danger at or above which states are escalated and nothing is dropped.
        cooldown_steps: Steps the gate stays on at least.
        reserve_share: Part of the budget held back for escalated states.
        probe_every: Steps between live probes of a few heads; 0 for none.
    """

    tau_drop: float = 0.5
    tau_prot: float = 1.0
    cooldown_steps: int = 8
    reserve_share: float = 0.02
    probe_every: int = 0

    def __post_init__(self) -> None:
        """Reject thresholds out of order and shares that are none."""
        if not 0 <= self.tau_drop < self.tau_prot:
            raise ValueError(
                f"thresholds must satisfy 0 <= tau_drop < tau_prot, got {self.tau_drop!r} and "
                f"{self.tau_prot!r}"
            )
        if not 0 <= self.reserve_share < 1:
            raise ValueError(f"reserve_share must be in [0, 1), got {self.reserve_share!r}")
        for name in ("cooldown_steps", "probe_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


def danger_score(drift: float, margin: float) -> float:
    """Predicted drift of the logits over the margin that it must not exceed.

    Args:
        drift: Bound on how far approximation moves the compared logits; not negative.
        margin: First minus second logit; not negative.
    """
    if drift < 0 or margin < 0 or math.isnan(drift) or math.isnan(margin):
        raise ValueError(f"drift and margin must not be negative, got {drift!r} and {margin!r}")
    if drift == 0:
        return 0.0
    return drift / margin if margin > 0 else math.inf


def logit_drift_bound(
    query_norm: float, radius: float, *, angle_error: float, radius_error: float, scale: float
) -> float:
    """The paper's bound on one attention logit: scale * |q| * (eps_r + r * eps_theta)."""
    return scale * query_norm * (radius_error + radius * angle_error)


class StabilityGate:
    """Hysteresis between two thresholds, with a cooldown.

    Attributes:
        options: Thresholds.
        is_on: Whether states are protected now.
        num_switches: Times the gate changed its state.
        trace: The newest danger scores with the state after each.
    """

    def __init__(self, options: GateOptions | None = None, *, trace_steps: int = 256) -> None:
        """Start off, with no danger seen."""
        self.options = options or GateOptions()
        self.is_on = False
        self.num_switches = 0
        self.num_steps = 0
        self.num_on_steps = 0
        self.trace: deque[tuple[float, bool]] = deque(maxlen=trace_steps)
        self._hold = 0

    def observe(self, danger: float) -> bool:
        """Take the danger score of a step and say whether the gate is on after it."""
        if math.isnan(danger) or danger < 0:
            raise ValueError(f"danger must not be negative, got {danger!r}")
        if danger >= self.options.tau_prot:
            self._switch(True)
            self._hold = self.options.cooldown_steps
        elif self._hold > 0:
            self._hold -= 1
        elif danger <= self.options.tau_drop:
            self._switch(False)
        self.num_steps += 1
        self.num_on_steps += self.is_on
        self.trace.append((danger, self.is_on))
        return self.is_on

    def _switch(self, is_on: bool) -> None:
        self.num_switches += self.is_on != is_on
        self.is_on = is_on
