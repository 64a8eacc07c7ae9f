# SPDX-License-Identifier: Apache-2.0
"""Bad input to the store: refused by name, with nothing changed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore

StoreMaker = Callable[..., PageStore]
Unchanged = Callable[[PageStore], AbstractContextManager[None]]


def numbered(codec: Any, num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of two heads."""
    keys, values = codec.numbered(num_tokens, first)
    return keys, values


def uniform(num_tokens: int, tier_id: int) -> LayerContract:
    tiers = torch.full((2, num_tokens), tier_id, dtype=torch.uint8)
    return LayerContract(tiers, torch.zeros((2, num_tokens), dtype=torch.bool))


def test_pages_of_others_are_refused(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *numbered(codec, 40))
    page = int(store.table(0, 0).all_ids()[0])
    for bad in ([page, page], [page + 50], [-1]):
        with pytest.raises(ValueError, match="page"):
            store.drop(0, 0, bad)
    with pytest.raises(ValueError, match="not all of this layer"):
        store.demote(0, 1, [page], "k2v2")
    with pytest.raises(ValueError, match="not above"):
        store.demote(0, 0, [page], "k3v3")
    with pytest.raises(ValueError, match="no tier"):
        store.demote(0, 0, [page], "k9v9")
    store.drop(0, 0, [])
    store.demote(0, 0, [], 1)


def test_bad_states_are_refused(
    make_store: StoreMaker, codec: Any, tiers: TierTable, unchanged: Unchanged
) -> None:
    store = make_store()
    store.create(0)
    keys, values = numbered(codec, 5)
    bad_keys = {
        "NaN": torch.full_like(keys, float("nan")),
        "infinity": torch.full_like(keys, float("inf")),
        "shape": keys[:, :, :-1],
        "tokens": keys[:, :-1],
        "floating": keys.int(),
        "must have shape": keys[0],
    }
    for message, bad in bad_keys.items():
        with unchanged(store), pytest.raises(ValueError, match=message):
            store.append(0, 0, bad, values)
    with unchanged(store), pytest.raises(ValueError, match="values hold NaN"):
        store.append(0, 0, keys, values / 0 * 0)
    with unchanged(store), pytest.raises(ValueError, match="keys hold"):
        store.write(0, 0, uniform(5, 1), keys.double() * 1e300, values, torch.arange(5))


def test_bad_writes_are_refused(make_store: StoreMaker, codec: Any, tiers: TierTable) -> None:
    store = make_store()
    store.create(0)
    states = numbered(codec, 5)
    good = torch.arange(5)
    for positions in (good.int(), good[:4], good.flip(0), good - 1, good + 2**31):
        with pytest.raises(ValueError, match="positions"):
            store.write(0, 0, uniform(5, 1), *states, positions)
    with pytest.raises(ValueError, match="shape"):
        store.write(0, 0, uniform(4, 1), *states, good)
    with pytest.raises(ValueError, match="tier id 200"):
        store.write(0, 0, uniform(5, 200), *states, good)
    store.append(0, 0, *states)
    with pytest.raises(ValueError, match="open tail"):
        store.write(0, 0, uniform(5, 1), *states, good + 5)
    with pytest.raises(ValueError, match="positions must be in 5"):
        store.write(0, 0, uniform(5, 1), *states, good)


def test_unknown_sequences_and_layers_are_named(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(7)
    with pytest.raises(ValueError, match="sequence 7 exists"):
        store.create(7)
    with pytest.raises(ValueError, match="sequence 7 exists"):
        store.fork(7, 7)
    with pytest.raises(ValueError, match="no sequence 8"):
        store.append(8, 0, *numbered(codec, 1))
    with pytest.raises(ValueError, match="layer must be"):
        store.tail(7, 2)
    with pytest.raises(ValueError, match="integer"):
        store.create("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_tokens"):
        store.crop(7, -1)


def test_coded_tiers_need_a_codec(geometry: KVGeometry, tiers: TierTable, codec: Any) -> None:
    store = PageStore(StoreConfig(geometry, tiers, seal_tier="k2v2", recent_tokens=0))
    store.create(0)
    store.append(0, 0, *numbered(codec, 32))
    with pytest.raises(ValueError, match="needs a codec"):
        store.append(0, 0, *numbered(codec, 1))
    assert store.num_tokens(0, 0) == 32
    store.create(1, codec=codec)
    assert store.codec(1) == codec
    store.append(1, 0, *numbered(codec, 33))
    assert store.tail(1, 0).num_tokens == 1


def test_bad_configs_are_refused(geometry: KVGeometry, tiers: TierTable) -> None:
    config = StoreConfig(geometry, tiers, seal_tier="k2v2")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"seal_tier": "drop"}, "seal_tier"),
        ({"seal_tier": "k7"}, "k7"),
        ({"recent_tokens": -1}, "recent_tokens"),
        ({"max_bytes": -1}, "limit"),
        ({"max_slab_pages": 0}, "slab"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            PageStore(replace(config, **change))
