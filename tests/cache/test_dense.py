# SPDX-License-Identifier: Apache-2.0
"""A cache while it is dense: what stays of states and queries when steps come and go."""

import torch
from tests.cache.test_retention import GEOMETRY, make_engine

from sphkv.cache.config import CacheConfig
from sphkv.cache.dense import DenseStates

LAYERS, HEADS, DIM = GEOMETRY.num_layers, GEOMETRY.num_kv_heads, GEOMETRY.head_dim


def numbered(config: CacheConfig, tokens: int, watched: int, rows: int = 2) -> DenseStates:
    """Keys, values and queries whose elements are their place."""
    dense = DenseStates(config)
    place = torch.arange(tokens).float()[None, None, :, None]
    for layer in range(LAYERS):
        keys = place.expand(rows, HEADS, tokens, DIM).clone()
        dense.append(layer, keys[:, :, :5], keys[:, :, :5])
        dense.append(layer, keys[:, :, 5:], -keys[:, :, 5:])
        dense.watch(layer, keys[:, :, tokens - watched :], is_kept=True)
    return dense


def test_crops_count_states_from_the_front_and_queries_from_the_end():
    dense = numbered(make_engine("40%").config, 12, watched=4)
    dense.crop(9, num_removed=3)
    state = dense.state()
    assert state["keys.0"][0, 0, :, 0].tolist() == list(range(9))
    assert state["values.1"][1, 0, :, 0].tolist() == [0, 1, 2, 3, 4, -5, -6, -7, -8]
    assert state["queries.1"][0, 0, :, 0].tolist() == [8]
    dense.crop(2, num_removed=7)
    assert dense.state()["queries.0"].shape[2] == 0


def test_only_the_newest_queries_are_watched():
    config = make_engine("40%").config
    assert config.retention is not None
    most = config.retention.policy.watched_tokens
    dense = numbered(config, most + 40, watched=most + 40)
    assert dense.state()["queries.0"][0, 0, :, 0].tolist() == list(range(40, most + 40))
    new = torch.full((2, HEADS, 3, DIM), -1.0)
    seen = dense.watch(0, new, is_kept=False)
    assert seen[0, 0, :, 0].tolist() == [*range(43, most + 40), -1, -1, -1]
    assert dense.state()["queries.0"][0, 0, 0, 0] == 40


def test_what_is_coded_is_gone_and_forks_and_files_have_the_rest():
    config = make_engine("40%").config
    dense = numbered(config, 12, watched=4)
    loaded = DenseStates(config)
    loaded.load_state(dense.state())
    fork = dense.fork()
    keys, _ = dense.take(0)
    assert keys.shape[2] == 12
    assert (dense.has(0), dense.has(1), fork.has(0)) == (False, True, True)
    assert not any(name.endswith(".0") for name in dense.state())
    assert loaded.bytes_by_kind() == fork.bytes_by_kind()
    assert 2 * dense.bytes_by_kind()["codes"] == fork.bytes_by_kind()["codes"] == 2 * keys.nbytes
    fork.select(torch.tensor([1, 1, 0]))
    assert fork.state()["keys.1"].shape[0] == 3
    assert loaded.state()["keys.1"].shape[0] == 2
