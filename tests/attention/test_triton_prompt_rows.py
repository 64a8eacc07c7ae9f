# SPDX-License-Identifier: Apache-2.0
"""Rows that are never written down give what whole matrices of them give."""

import contextlib
import functools
import threading
from dataclasses import replace

import pytest
import torch

from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.prompt_rows import RowShape
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, ladder
from sphkv.retention.features import measure_features
from sphkv.retention.measure import (
    MeasureConfig,
    _predict,
    measure_layer,
    measure_layers,
    predict_rows,
)
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.pricing import rank_units
from sphkv.retention.streamed import StreamedRows
from sphkv.testing.cases import random_calibration

pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")

from sphkv.attention.triton import grid, prompt_rows
from sphkv.attention.triton.prompt_rows import TritonRows
from sphkv.codec import point_kernels

# Triton's interpreter has no products of bfloat16; benchmarks/gpu_prompt.py --check looks at them.
DTYPES = (torch.float32, torch.float16)
NEAR = {"sinks": 16, "recent": RUN_TOKENS}


@functools.cache
def make_states(dtype, *, heads=2, group=2, tokens=203, dim=32, held=80):
    """Queries of the newest tokens, keys and values; some keys draw attention, one nearly all."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    query, keys = draw(heads * group, held, dim) + 0.5, draw(heads, tokens, dim)
    keys[:, 5] += 2.0
    keys[1, 140] += 4.0
    # states of a cache lie token by token, all heads of one side by side
    values = draw(tokens, heads, dim).transpose(0, 1)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def make_config(dim, *, layers=1, mix=0.25, window=10, kernels=None):
    geometry = KVGeometry(layers, 2, 4, dim)
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, dim)
    policy = RetentionPolicy(attention_mix=mix, window=window, window_stride=2)
    return MeasureConfig(
        geometry, (rope,) * layers, ladder(dim, names=("k2v2", "k4v4")), policy=policy,
        error_samples=64, kernels=kernels,
    )  # fmt: skip


def both(dtype, dim, mix=0.25, window=10):
    """Votes and all rows as matrices, and streamed; with the states."""
    states = make_states(dtype, dim=dim)
    config = make_config(dim, mix=mix, window=window)
    whole = predict_rows(config, (0,), *states[:2])
    found = _predict(replace(config, kernels=TritonRows()), (0,), states)
    assert all(isinstance(rows, StreamedRows) for rows in found)
    return whole, found, states


@pytest.mark.parametrize("dtype", DTYPES)
# more than 32 rows, as real prompts have them, take larger tiles
@pytest.mark.parametrize(("dim", "mix", "window"), [(32, 0.25, 10), (48, 0.0, 10), (64, 0.25, 33)])
def test_streamed_rows_are_those_of_the_matrices(dtype, dim, mix, window):
    (votes, rows), (own_votes, own), (_, keys, values) = both(dtype, dim, mix, window)
    expected, found = rows.totals(values, **NEAR), own.totals(values, **NEAR)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(own.coverage(), rows.coverage())
    features = [
        measure_features(each, keys, values, sinks=16, recent=RUN_TOKENS) for each in (own, rows)
    ]
    for name in ("mass", "energy", "shift", "reuse", "stability", "output_energy"):
        one, two = (getattr(each, name) for each in features)
        # gaps of a value and an output near it are differences of squares
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-6, msg=name)
    torch.testing.assert_close(own.apart(values), rows.apart(values), rtol=2e-5, atol=1e-5)
    index = torch.stack([torch.randperm(keys.shape[1])[:50] for _ in range(2)])
    for one, two in ((own, rows), (own_votes, votes)):
        weight, is_valid = one.at(index)
        true_weight, true_valid = two.at(index)
        torch.testing.assert_close(weight, true_weight, rtol=2e-5, atol=1e-7)
        assert torch.equal(is_valid, true_valid)


@pytest.mark.parametrize(("granularity", "size", "window"), [(16, 2, 10), (1, 24, 10), (16, 3, 33)])
def test_dropping_blocks_loses_the_same(granularity, size, window):
    (_, rows), (_, own), (_, keys, values) = both(torch.float16, 32, window=window)
    units = -(-keys.shape[1] // granularity)
    score = torch.rand(2, units, generator=torch.Generator().manual_seed(1))
    is_free = torch.ones(2, units, dtype=torch.bool)
    # once nearly all weight is gone, the loss is a ratio of roundings
    is_free[:, [5 // granularity, 140 // granularity]] = False
    is_free[1, :3] = False
    blocks = rank_units(score, is_free, block_units=size)
    expected = rows.drop_losses(values, blocks, granularity=granularity)
    found = own.drop_losses(values, blocks, granularity=granularity)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[:, 0], torch.zeros(2))


def test_a_layer_is_measured_alike():
    states = make_states(torch.float16, dim=64)
    config = make_config(64)
    codec = SphericalCodec(random_calibration(config.geometry, config.ropes[0]))
    one, two = (
        measure_layer(replace(config, kernels=kernels), codec, 0, states)
        for kernels in (TritonRows(), None)
    )
    assert torch.equal(one.protected, two.protected)
    for name in ("angle", "radius", "value", "common", "direction", "length"):
        found, expected = getattr(one.errors, name), getattr(two.errors, name)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6, msg=name)


def test_what_is_prepared_is_what_prompts_run(monkeypatch):
    """Constants of every launch of a layer were those of a trial: nothing compiles later."""
    launched = set()

    class Noted:
        def __init__(self, name, kernel):
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid):
            def run(*args, **constants):
                kinds = tuple(x.dtype for x in args if isinstance(x, torch.Tensor))
                absent = tuple(at for at, x in enumerate(args) if x is None)
                launched.add((self._name, kinds, absent, *sorted(constants.items())))
                self._kernel[grid](*args, **constants)

            return run

    names = [name for name in vars(prompt_rows) if name.endswith("_kernel")]
    for name in names:
        monkeypatch.setattr(prompt_rows, name, Noted(name, getattr(prompt_rows, name)))
    states = make_states(torch.float16, dim=64)
    config = make_config(64)
    policy = config.policy
    shape = RowShape(64, 2 * policy.window, 2 * len(config.horizon), 2, torch.float16)
    for trial in TritonRows().trials(shape, torch.device("cpu")):
        trial()
    prepared = set(launched)
    assert {each[0] for each in prepared} == set(names)

    launched.clear()
    codec = SphericalCodec(random_calibration(config.geometry, config.ropes[0]))
    found = measure_layer(replace(config, kernels=TritonRows()), codec, 0, states)
    found.rows.apart(states[2])
    units = torch.arange(12).view(1, 6, 2).expand(2, -1, -1)
    found.rows.drop_losses(states[2], units, granularity=RUN_TOKENS)
    assert launched == prepared
    # a window that the prompt fills in part: fewer rows, the same builds
    short = tuple(part[:, -17:] if at == 0 else part for at, part in enumerate(states))
    measure_layer(replace(config, kernels=TritonRows()), codec, 0, short)
    assert launched == prepared


def test_layers_are_measured_once_everything_is_compiled(monkeypatch):
    rows, done = TritonRows(), []
    begun = threading.Event()

    def work():
        begun.wait(5)
        done.append(1)

    def trials(self, shape, device):
        assert self is not rows
        assert device == torch.device("cuda", 0)
        return [work, lambda: 1 / 0, work]

    monkeypatch.setattr(TritonRows, "trials", trials)
    for module in (point_kernels, grid):
        monkeypatch.setattr(module, "trials", lambda device: [work])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    shape = RowShape(32, 4, 0, 0)
    for device in ("cuda", "cuda:0", "cpu"):
        # the second time there is nothing to do
        rows.prepare(shape, torch.device(device))
    begun.set()
    states, weight = torch.ones(1, 16, 32), torch.ones(1, 1, 32)
    assert torch.equal(rows.spread(states, weight), torch.full((1, 1, 16), 32.0))
    assert len(done) == 4


def test_tokens_that_a_row_does_not_see_may_have_any_logit():
    """Weights of others must not become numbers that are none."""
    states = tuple(part.clone() for part in make_states(torch.float32))
    query, keys, values = states
    # the newest key draws all that see it; the oldest row of the window does not
    keys[:, -2] = 400 * query[::2, -1] / query[::2, -1].norm(dim=-1, keepdim=True)
    found = _predict(make_config(32, kernels=TritonRows()), (0,), (query, keys, values))[1]
    right = predict_rows(make_config(32), (0,), query, keys)[1]
    index = torch.arange(keys.shape[1] - 64, keys.shape[1]).expand(2, -1)
    one, two = found.at(index)[0], right.at(index)[0]
    assert bool(torch.isfinite(one).all())
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropping_what_has_hardly_any_weight(dtype):
    """In half precision such weights would be no numbers."""
    query, keys, values = (part.clone() for part in make_states(dtype))
    query, keys = 1 + 0.1 * query, 0.2 * keys
    keys[:, 5] = 3.5
    whole = predict_rows(make_config(32, mix=0.0), (0,), query, keys)[1]
    own = _predict(make_config(32, mix=0.0, kernels=TritonRows()), (0,), (query, keys, values))[1]
    units = torch.arange(1, 12).view(1, 11, 1).expand(2, -1, -1)
    expected = whole.drop_losses(values, units, granularity=16)
    assert float(whole.weight[..., 16:192].median()) < 1e-8
    torch.testing.assert_close(
        own.drop_losses(values, units, granularity=16), expected, rtol=1e-2, atol=1e-24
    )


def test_layers_are_measured_together_without_writing_rows_down():
    config = make_config(64, layers=2, kernels=TritonRows())
    codec = SphericalCodec(random_calibration(config.geometry, config.ropes[0]))
    states = [make_states(torch.float16, dim=64), make_states(torch.float16, dim=64, tokens=203)]
    states[1] = tuple(0.5 * part for part in states[1])
    query, keys, values = (torch.cat(parts) for parts in zip(*states, strict=True))
    found = measure_layers(config, codec, (0, 1), (query, keys, values))
    for layer, own in enumerate(states):
        alone = measure_layer(config, codec, layer, own)
        heads = slice(2 * layer, 2 * layer + 2)
        assert torch.equal(found.protected[heads], alone.protected)
        for name in ("mass", "energy", "shift", "reuse", "stability", "output_energy"):
            one, two = (getattr(each.features, name) for each in (found, alone))
            torch.testing.assert_close(one[heads], two, rtol=1e-4, atol=2e-6, msg=name)
        for name in ("angle", "radius", "value", "common", "direction", "length"):
            one, two = (getattr(each.errors, name) for each in (found, alone))
            torch.testing.assert_close(one[heads], two, rtol=1e-3, atol=1e-6, msg=name)
