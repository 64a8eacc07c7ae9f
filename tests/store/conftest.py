# SPDX-License-Identifier: Apache-2.0
"""A codec whose codes can be foretold from a state's number, so that none can be lost unseen."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import EncodedStates
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.store import PageStore

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

    def numbered(self, num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values ``[2, num_tokens, head_dim]`` of the numbers from ``first`` on."""
        return self.dense(first + torch.arange(2 * num_tokens).reshape(2, num_tokens))

    def number(self, keys: Tensor) -> Tensor:
        return (keys[..., 0].float() + 256 * keys[..., 1].float()).to(torch.int64)

    def key_codes(self, layer: int, tier: TierSpec, number: Tensor) -> Tensor:
        slot = torch.arange(tier.key_nibbles(self.head_dim))
        codes = (number[..., None] * (slot + 7) + layer) % 16
        codes[..., :4] = (number[..., None] >> torch.tensor([0, 4, 8, 12])) % 16
        return codes.to(torch.uint8)

    def radius_code(self, layer: int, number: Tensor) -> Tensor:
        code: Tensor = (number * 11 + layer) % 256
        return code.to(torch.uint8)

    def value_codes(self, tier: TierSpec, number: Tensor) -> Tensor:
        if not tier.has_value_codes:
            return self.dense(number)[1].to(torch.bfloat16)
        index = torch.arange(self.head_dim)
        codes: Tensor = (number[..., None] * (index + 13)) % 2**tier.value_bits
        return codes.to(torch.uint8)

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
            TierSpec("max", "dense", 16.0, 16, 16),
        )
    )


class ReversedOrder:
    """Keeps the bytes of a page from the last to the first."""

    page_sizes: tuple[int, ...] = (32,)

    def takes(self, layout: PageLayout) -> bool:
        return layout.tier.is_coded

    def alignment(self, layout: PageLayout) -> int:
        return layout.page_bytes if layout.tier.is_coded else 1

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        return pages.flip(1)

    def from_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        return pages.flip(1)


@pytest.fixture(scope="session")
def reversed_order() -> PageOrder:
    return ReversedOrder()


@pytest.fixture
def make_store(
    geometry: KVGeometry, tiers: TierTable, codec: FakeCodec
) -> Callable[..., PageStore]:
    def make(
        order: PageOrder | None = None, kernels: PageCodec | None = None, **changes: Any
    ) -> PageStore:
        config = StoreConfig(geometry, tiers, seal_tier="k2v2", recent_tokens=4)
        return PageStore(replace(config, **changes), codec, order=order, kernels=kernels)

    return make


@contextmanager
def _unchanged(store: PageStore) -> Iterator[None]:
    sequences, ledger = store.sequences, store.ledger()
    before = [tensor.clone() for tensor in store.live_tensors()]
    yield
    assert (store.sequences, store.ledger()) == (sequences, ledger)
    now = store.live_tensors()
    assert len(now) == len(before)
    assert all(map(torch.equal, now, before))


@pytest.fixture(scope="session")
def unchanged() -> Callable[[PageStore], AbstractContextManager[None]]:
    """A block after which a store holds, byte by byte, what it held before."""
    return _unchanged
