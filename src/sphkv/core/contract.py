# SPDX-License-Identifier: Apache-2.0
"""What controller, codec and store promise each other."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import RUN_TOKENS, TierSpec, TierTable

GRANULARITIES = (1, RUN_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class LayerContract:
    """The part of a ``WriteContract`` that concerns one layer.

    Attributes:
        tier_id: ``[heads, tokens]`` uint8.
        protected: ``[heads, tokens]`` bool.
        granularity: Tokens per decision, 1 or 16.
    """

    tier_id: Tensor
    protected: Tensor
    granularity: int = 1

    def __post_init__(self) -> None:
        """Reject wrong shapes and dtypes, and runs of 16 with mixed tiers."""
        _check_decision(self.tier_id, self.protected, self.granularity, num_dims=2)

    def check(self, table: TierTable, geometry: KVGeometry, num_tokens: int) -> None:
        """Raise if the decision does not fit the tiers, the heads or the tokens."""
        _check_fit(self.tier_id, self.protected, table, (geometry.num_kv_heads, num_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class WriteContract:
    """Which token of which head goes to which tier.

    Attributes:
        tier_id: ``[layers, heads, tokens]`` uint8 ids of a tier table; 0 drops the state.
        protected: ``[layers, heads, tokens]`` bool; a protected state is at the dense tier.
        granularity: Tokens per decision: 1, or 16 for aligned runs that share one tier.
    """

    tier_id: Tensor
    protected: Tensor
    granularity: int = 1

    def __post_init__(self) -> None:
        """Reject wrong shapes and dtypes, and on the CPU runs of 16 with mixed tiers."""
        _check_decision(self.tier_id, self.protected, self.granularity, num_dims=3)

    @classmethod
    def uniform(
        cls,
        geometry: KVGeometry,
        num_tokens: int,
        *,
        tier_id: int,
        granularity: int = 1,
        device: torch.device | str = "cpu",
    ) -> "WriteContract":
        """Every state at one tier, none protected."""
        shape = (geometry.num_layers, geometry.num_kv_heads, num_tokens)
        return cls(
            torch.full(shape, tier_id, dtype=torch.uint8, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            granularity,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens the contract decides about."""
        return self.tier_id.shape[2]

    def layer(self, layer: int) -> LayerContract:
        """The decision for one layer."""
        if not 0 <= layer < self.tier_id.shape[0]:
            raise ValueError(f"layer must be in 0..{self.tier_id.shape[0] - 1}, got {layer}")
        return LayerContract(self.tier_id[layer], self.protected[layer], self.granularity)

    def check(self, table: TierTable, geometry: KVGeometry) -> None:
        """Raise if a tier id, a shape or a protected state does not fit."""
        shape = (geometry.num_layers, geometry.num_kv_heads, self.num_tokens)
        _check_fit(self.tier_id, self.protected, table, shape)

    def state_counts(self, num_tiers: int) -> Tensor:
        """States of each tier: ``[layers, heads, num_tiers]`` int64."""
        shape, device = (*self.tier_id.shape[:2], num_tiers), self.tier_id.device
        one_hot = torch.zeros(shape, dtype=torch.int64, device=device)
        index = self.tier_id.to(torch.int64)
        return one_hot.scatter_add_(2, index, torch.ones_like(index))


def _check_decision(tier_id: Tensor, protected: Tensor, granularity: int, num_dims: int) -> None:
    if tier_id.dtype != torch.uint8 or tier_id.dim() != num_dims:
        raise ValueError(
            f"tier_id must be uint8 with {num_dims} dimensions, got {tier_id.dtype} "
            f"{tuple(tier_id.shape)}"
        )
    if protected.dtype != torch.bool or protected.shape != tier_id.shape:
        raise ValueError(
            f"protected must be bool {tuple(tier_id.shape)}, got {protected.dtype} "
            f"{tuple(protected.shape)}"
        )
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    # looking at tiers on a device would wait for it; who decides there spreads whole runs
    if granularity == 1 or tier_id.shape[-1] == 0 or tier_id.device.type != "cpu":
        return
    whole = tier_id.shape[-1] // granularity * granularity
    runs, rest = tier_id[..., :whole].unflatten(-1, (-1, granularity)), tier_id[..., whole:]
    if bool((runs != runs[..., :1]).any()) or bool((rest != rest[..., :1]).any()):
        raise ValueError(f"tier_id differs inside an aligned run of {granularity} tokens")


def _check_fit(
    tier_id: Tensor, protected: Tensor, table: TierTable, shape: tuple[int, ...]
) -> None:
    if tuple(tier_id.shape) != shape:
        raise ValueError(f"contract must have shape {shape}, got {tuple(tier_id.shape)}")
    if tier_id.numel() == 0 or tier_id.device.type != "cpu":
        return
    highest = int(tier_id.max())
    if highest >= len(table):
        raise ValueError(f"tier id {highest} is not in a table of {len(table)} tiers")
    if bool((protected & (tier_id != table.dense_id)).any()):
        raise ValueError(f"a protected state is not at the dense tier {table.dense_id}")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedStates:
    """Codes of some pages of one tier, before they are packed.

    A row is one page, ``tokens`` the page tokens of the tier; states past the count of a
    page carry any code. Radius and value scale are ``lo + step * code``.

    Attributes:
        key_codes: ``[rows, nibbles, tokens]`` uint8, each below 16.
        radius_code: ``[rows, tokens]`` uint8.
        radius_lo: ``[rows]`` float32.
        radius_step: ``[rows]`` float32.
        value_codes: ``[rows, tokens, head_dim]`` uint8 codes below ``2**value_bits``, or
            bfloat16 values at 16 bits.
        scale_code: ``[rows, tokens]`` uint8; unused at 16 value bits.
        scale_lo: ``[rows]`` float32.
        scale_step: ``[rows]`` float32.
    """

    key_codes: Tensor
    radius_code: Tensor
    radius_lo: Tensor
    radius_step: Tensor
    value_codes: Tensor
    scale_code: Tensor
    scale_lo: Tensor
    scale_step: Tensor

    @property
    def num_rows(self) -> int:
        """Pages that are encoded."""
        return self.key_codes.shape[0]

    def check(self, tier: TierSpec, head_dim: int) -> None:
        """Raise if a shape, a dtype or a code does not fit the tier."""
        rows, tokens = self.num_rows, tier.page_tokens
        nibbles = tier.key_nibbles(head_dim)
        value_dtype = torch.uint8 if tier.has_value_codes else torch.bfloat16
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "key_codes": (torch.uint8, (rows, nibbles, tokens)),
            "radius_code": (torch.uint8, (rows, tokens)),
            "radius_lo": (torch.float32, (rows,)),
            "radius_step": (torch.float32, (rows,)),
            "value_codes": (value_dtype, (rows, tokens, head_dim)),
            "scale_code": (torch.uint8, (rows, tokens)),
            "scale_lo": (torch.float32, (rows,)),
            "scale_step": (torch.float32, (rows,)),
        }
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} of tier {tier.name!r} must be {dtype} {shape}, got "
                    f"{tensor.dtype} {tuple(tensor.shape)}"
                )
            if dtype == torch.float32 and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of tier {tier.name!r} is not finite")
        if rows and int(self.key_codes.max()) > 15:
            raise ValueError(f"key_codes must be below 16, got {int(self.key_codes.max())}")
        if rows and tier.has_value_codes and int(self.value_codes.max()) >> tier.value_bits:
            raise ValueError(
                f"value_codes must be below {2**tier.value_bits}, got {int(self.value_codes.max())}"
            )


class StateCodec(Protocol):
    """Turns dense states into codes; the store calls it and never looks inside.

    Rows are pages. ``head_ids`` says which KV head a row belongs to and ``counts`` how many
    of its leading states are live; without them row ``h`` is head ``h`` and all are live.
    States past the count are zero and must not influence any code of a live state.
    """

    def encode(
        self,
        layer: int,
        tier: TierSpec,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> EncodedStates:
        """Encode pages at a coded tier.

        Args:
            layer: Layer of the states.
            tier: Coded tier of the pages; ``tokens`` below is its ``page_tokens``.
            keys: ``[rows, tokens, head_dim]`` keys after rotary embedding.
            values: ``[rows, tokens, head_dim]``.
            positions: ``[rows, tokens]`` int64.
            head_ids: ``[rows]`` int64.
            counts: ``[rows]`` int64.

        Returns:
            The codes, radius and scale quantised over the live states of each page.
        """
        ...

    def decode(
        self,
        layer: int,
        tier: TierSpec,
        encoded: EncodedStates,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Dense keys (after rotary embedding) and values of encoded pages.

        Args:
            layer: Layer of the states.
            tier: Coded tier of the pages.
            encoded: The codes.
            positions: ``[rows, tokens]`` int64.
            head_ids: ``[rows]`` int64.

        Returns:
            Keys and values, ``[rows, tokens, head_dim]`` float32 each.
        """
        ...
