# SPDX-License-Identifier: Apache-2.0
"""Steps that a graph can hold, their kernels run on the CPU, against eager ones."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sphkv.attention.cuda.batch import BatchDecode

from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions
from sphkv.cache.engine import CacheEngine
from sphkv.cache.plan import CacheConfig, parse_tiers
from sphkv.cache.step import StepTokens
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.testing.cases import random_calibration, random_states

GEOMETRY = KVGeometry(2, 2, 6, 64)
# the tail is full but for three tokens
BATCH, PROMPT, STEPS = 2, 545, 5
OPTIONS = AttentionOptions(scale=0.125)


def states_of(rope, count, first):
    """Keys, values and queries of all sequences and layers, ``[layer][batch, heads, ...]``."""
    found = []
    for layer in range(GEOMETRY.num_layers):
        parts = [
            random_states(GEOMETRY, rope, count, first=first, seed=10 * first + 2 * layer + row)
            for row in range(BATCH)
        ]
        found.append(tuple(torch.stack(part).bfloat16() for part in zip(*parts, strict=True)))
    return found


def prompted(backend, calibration, rope):
    tiers = parse_tiers("k2v4", GEOMETRY.head_dim)
    layers = GEOMETRY.num_layers
    config = CacheConfig(GEOMETRY, (rope,) * layers, (None,) * layers, tiers, "k2v4")
    engine = CacheEngine(config, calibration=calibration, backend=backend)
    step(engine, states_of(rope, PROMPT, 0), PROMPT, 0)
    return engine


def step(engine, states, count, first):
    """One eager pass; outputs of all layers unless it is the prompt's."""
    positions = torch.arange(first, first + count).expand(BATCH, -1)
    engine.begin(StepTokens(torch.ones(BATCH, count, dtype=torch.bool), positions))
    outputs = []
    for layer, (keys, values, query) in enumerate(states):
        engine.update(layer, keys, values)
        if engine.is_dense_step:
            engine.settle(layer, query)
        else:
            outputs.append(engine.attend(layer, query, OPTIONS).float())
    engine.finish()
    return outputs


def test_captured_steps_go_through_a_seal_as_eager_ones_do(on_the_host):
    on_the_host()
    rope = RopeSpec.from_config({"rope_theta": 10000.0}, GEOMETRY.head_dim)
    calibration = random_calibration(GEOMETRY, rope)
    eager = prompted(ReferenceBackend(), calibration, rope)
    captured = prompted(CudaBackend(torch.device("cpu")), calibration, rope)
    assert captured.store is not None
    sequences = [row.sequence for row in captured.rows]
    batch = BatchDecode(captured.store, sequences, captured.config.spec, max_tokens=PROMPT + STEPS)
    pages = captured.store.table(0, 0).num_pages.tolist()
    for at in range(PROMPT, PROMPT + STEPS):
        states = states_of(rope, 1, at)
        expected = step(eager, states, 1, at)
        batch.prepare()
        batch.advance()
        assert batch.positions.flatten().tolist() == [at] * BATCH
        for layer, (keys, values, query) in enumerate(states):
            found = batch.attend(layer, query, keys, values, OPTIONS).float()
            error = (found - expected[layer]).norm() / expected[layer].norm()
            assert float(error) < 1e-2, (at, layer)
        batch.commit()
    assert captured.store.table(0, 0).num_pages.tolist() == [count + 1 for count in pages]
