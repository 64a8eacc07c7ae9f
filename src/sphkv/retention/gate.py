# SPDX-License-Identifier: Apache-2.0
"""The stability gate: holds compression back while a decision is about to tip.

Danger is the predicted drift of the logits over the margin between the two best tokens. Between
the two thresholds the gate keeps its state, so it cannot flutter. Derivation of the drift:
docs/math/retention.md, section 7.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.retention.errors import TierErrors, drift_quantile


@dataclass(frozen=True, slots=True)
class GateOptions:
    """When the gate opens and closes, and what it may spend.

    Attributes:
        tau_drop: Danger at or below which ordinary compression resumes.
        tau_prot: Danger at or above which states are escalated and nothing is dropped.
        cooldown_steps: Steps the gate stays on at least.
        reserve_share: Part of the budget held back for escalated states.
    """

    tau_drop: float = 0.5
    tau_prot: float = 1.0
    cooldown_steps: int = 0
    reserve_share: float = 0.02

    def __post_init__(self) -> None:
        """Reject thresholds out of order and shares that are none."""
        if not 0 <= self.tau_drop < self.tau_prot:
            raise ValueError(
                f"thresholds must satisfy 0 <= tau_drop < tau_prot, got {self.tau_drop!r} and "
                f"{self.tau_prot!r}"
            )
        if not 0 <= self.reserve_share < 1:
            raise ValueError(f"reserve_share must be in [0, 1), got {self.reserve_share!r}")
        steps = self.cooldown_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"cooldown_steps must be an integer of at least 0, got {steps!r}")


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
    query_norm: Tensor, radius: Tensor, *, angle_error: Tensor, radius_error: Tensor, scale: float
) -> Tensor:
    """The paper's bound on one attention logit: scale * |q| * (eps_r + r * eps_theta).

    Tensors of any shapes that go together: norms of queries and keys, the distance of a key's
    direction and the difference of its norm from the coded ones.
    """
    return scale * query_norm * (radius_error + radius * angle_error)


def tier_bounds(
    query: Tensor, radius: Tensor, attention: Tensor, errors: TierErrors, *, scale: float
) -> Tensor:
    """The bound of the state that a head attends to on average, at every tier.

    Args:
        query: ``[query_heads, queries, head_dim]``; the norm that 95% of them keep counts.
        radius: ``[heads, tokens]`` key norms.
        attention: ``[heads, tokens]`` expected attention weight, in any unit.
        errors: With ``direction`` and ``length`` of every tier.
        scale: Factor on the dot product.

    Returns:
        ``[heads, tiers]`` float32 logits; 1 at tier 0 and at most 1 elsewhere, for a state that is
        coded badly cannot move its head's output further than one that is gone.

    Raises:
        ValueError: The errors have no direction or no length.
    """
    if errors.direction is None or errors.length is None:
        raise ValueError("a bound on drift needs errors with direction and length")
    total = attention.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    mean = (attention * radius).sum(1) / total
    bound = logit_drift_bound(
        norm_quantile(query, radius.shape[0])[:, None],
        mean[:, None],
        angle_error=errors.direction,
        radius_error=errors.length,
        scale=scale,
    ).clamp(max=1.0)
    bound[:, 0] = 1.0
    return bound


def norm_quantile(query: Tensor, num_kv_heads: int) -> Tensor:
    """Norm that 95% of a window's queries keep, over each KV head's group.

    Args:
        query: ``[query_heads, window, head_dim]``.
        num_kv_heads: KV heads.

    Returns:
        ``[heads]`` float32.
    """
    return drift_quantile(query.float().norm(dim=-1).reshape(num_kv_heads, -1))


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

    def state(self) -> Tensor:
        """``[5]`` int64 for saving: on or off, switches, steps, steps on, steps to hold."""
        counts = (self.num_switches, self.num_steps, self.num_on_steps, self._hold)
        return torch.tensor([int(self.is_on), *counts])

    def load_state(self, state: Tensor) -> None:
        """Take over what ``state`` gave; the trace begins anew.

        Raises:
            ValueError: It is no state of a gate.
        """
        if state.shape != (5,) or bool((state < 0).any()):
            raise ValueError(f"a gate's state is 5 counts, got {state.tolist()}")
        is_on, self.num_switches, self.num_steps, self.num_on_steps, self._hold = state.tolist()
        self.is_on = bool(is_on)

    def _switch(self, is_on: bool) -> None:
        self.num_switches += self.is_on != is_on
        self.is_on = is_on
