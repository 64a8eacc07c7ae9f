# SPDX-License-Identifier: Apache-2.0
"""The stability gate: holds compression back while a decision is about to tip.

Danger is the predicted drift of the logits over the margin between the two best tokens. Between
the two thresholds the gate keeps its state, so it cannot flutter.
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
    query_norm: Tensor, radius: Tensor, *, angle_error: Tensor, radius_error: Tensor, scale: float
) -> Tensor:
    """The paper's bound on one attention logit: scale * |q| * (eps_r + r * eps_theta).

    Tensors of any shapes that go together: norms of queries and keys, the distance of a key's
    direction and the difference of its norm from the coded ones.
    """
    return scale * query_norm * (radius_error + radius * angle_error)


def predicted_drift(
    query_norm: Tensor,
    radius: Tensor,
    attention: Tensor,
    tier_id: Tensor,
    errors: TierErrors,
    *,
    scale: float,
) -> float:
    """How far coding moves the attention logits of a layer, as its queries will notice.

    Every stored state's bound counts by the attention it gets, so a head's drift is that of the
    logit it attends to on average; the layer's is its worst head's. Dropped states have no logit.

    Args:
        query_norm: ``[heads]`` norm that most queries keep, see ``norm_quantile``.
        radius: ``[heads, tokens]`` key norms.
        attention: ``[heads, tokens]`` expected attention weight, in any unit.
        tier_id: ``[heads, tokens]`` tier of every state.
        errors: With ``direction`` and ``length`` of every tier.
        scale: Factor on the dot product.

    Returns:
        Drift in logits, to be compared with a margin by ``danger_score``.

    Raises:
        ValueError: The errors have no direction or no length.
    """
    if errors.direction is None or errors.length is None:
        raise ValueError("predicted drift needs errors with direction and length")
    tier = tier_id.long()
    bound = logit_drift_bound(
        query_norm[:, None],
        radius,
        angle_error=errors.direction.gather(1, tier),
        radius_error=errors.length.gather(1, tier),
        scale=scale,
    )
    weight = attention * (tier > 0)
    total = weight.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((weight * bound).sum(1) / total).max())


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

    def _switch(self, is_on: bool) -> None:
        self.num_switches += self.is_on != is_on
        self.is_on = is_on
