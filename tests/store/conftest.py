# SPDX-License-Identifier: Apache-2.0
"""A codec whose codes can be foretold from a state's number, so that none can be lost unseen."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import EncodedStates
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierSpec, TierTable, coded_tier

HEAD_DIM = 8


@dataclass(frozen=True, slots=True)
class FakeCodec:
    """Writes a state's number into its codes; the number sits in the first two key elements."""

    head_dim: int = HEAD_DIM

    def dense(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., head_dim]`` of numbered states, exact in bfloat16."""
        index = torch.arange(self.head_dim)
        keys = (number[..., None] * (index + 3)) % 251
        keys[..., 0], keys[..., 1] = number % 256, number // 256
        values = (number[..., None] * (index + 5)) % 241
        return keys.float(), values.float()

    def number(self, keys: Tensor) -> Tensor:
        return (keys[..., 0].float() + 256 * keys[..., 1].float()).to(torch.int64)

    def key_codes(self, layer: int, tier: TierSpec, number: Tensor) -> Tensor:
        slot = torch.arange(tier.key_nibbles(self.head_dim))
        codes = (number[..., None] * (slot + 7) + layer) % 16
        codes[..., :4] = (number[..., None] >> torch.tensor([0, 4, 8, 12])) % 16
        return codes.to(torch.uint8)

    def radius_code(self, layer: int, number: Tensor) -> Tensor:
        return ((number * 11 + layer) % 256).to(torch.uint8)

    def value_codes(self, tier: TierSpec, number: Tensor) -> Tensor:
        if not tier.has_value_codes:
            return self.dense(number)[1].to(torch.bfloat16)
        index = torch.arange(self.head_dim)
        return ((number[..., None] * (index + 13)) % 2**tier.value_bits).to(torch.uint8)

    def scale_code(self, number: Tensor) -> Tensor:
        return (number * 17 % 256).to(torch.uint8)

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
        assert head_ids is not None
        assert counts is not None
        number = self.number(keys)
        dead = torch.arange(keys.shape[1]) >= counts[:, None]
        assert not keys[dead].any()
        assert torch.equal(values[~dead].float(), self.dense(number)[1][~dead])
        # The writer must zero what lies past the count.
        codes = self.key_codes(layer, tier, number).masked_fill(dead[:, :, None], 15)
        return EncodedStates(
            codes.transpose(1, 2),
            self.radius_code(layer, number).masked_fill(dead, 255),
            head_ids.float() + 0.25,
            torch.full_like(head_ids, 2.0, dtype=torch.float32),
            self.value_codes(tier, number).masked_fill(dead[:, :, None], 1),
            self.scale_code(number).masked_fill(dead, 255),
            -head_ids.float(),
            torch.full_like(head_ids, 0.5, dtype=torch.float32),
        )

    def decode(
        self,
        layer: int,
        tier: TierSpec,
        encoded: EncodedStates,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        codes = encoded.key_codes[:, :4].to(torch.int64)
        shift = torch.tensor([0, 4, 8, 12])[:, None]
        return self.dense((codes << shift).sum(dim=1))


@pytest.fixture(scope="session")
def codec() -> FakeCodec:
    return FakeCodec()


@pytest.fixture(scope="session")
def geometry() -> KVGeometry:
    return KVGeometry(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def tiers() -> TierTable:
    return TierTable(
        (
            TierSpec("drop", "drop", 0.0, 0, 0),
            coded_tier(2.0, 2, page_tokens=32),
            coded_tier(3.0, 3, page_tokens=64),
            coded_tier(4.0, 16, page_tokens=32),
            TierSpec("max", "dense", 16.0, 16, 16),
        )
    )
