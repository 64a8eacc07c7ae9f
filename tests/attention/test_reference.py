# SPDX-License-Identifier: Apache-2.0
"""Requests, the choice of a backend, and what only the reference promises."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sphkv.attention.api as api
from sphkv.attention.api import decode_attention, decode_rows, get_backend
from sphkv.attention.plans import PlanCache
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, BatchRequest, DecodeRequest
from sphkv.errors import BackendUnavailableError
from sphkv.testing.attention_cases import CASES, make_batch, make_request, make_store
from sphkv.testing.cases import exact_attention, random_states, rope_of
from sphkv.testing.fake_gpu import GpuTensor, fake_gpu


def test_sinks_and_rows_are_merged_by_the_api():
    request, batch = make_request(CASES["sinks"]), make_batch(CASES["sinks"])
    sinks = CASES["sinks"].sink_logits()
    expected = exact_attention(request, sink_logits=sinks).output
    got = decode_attention(request, sink_logits=sinks)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-6)
    assert (got - decode_attention(request)).abs().max() > 1e-3
    rows = decode_rows(batch, sink_logits=sinks)
    for row in range(len(batch.sequences)):
        alone = decode_attention(batch.row(row), sink_logits=sinks)
        torch.testing.assert_close(rows[row], alone[:, 0])


def test_bad_requests_are_named():
    request = make_request(CASES["one token"])
    store, query, positions = request.store, request.query, request.positions
    options = request.options
    with pytest.raises(ValueError, match=r"\[6, queries, 64\]"):
        DecodeRequest(store, 0, 0, torch.zeros(4, 1, 64), positions, options)
    with pytest.raises(ValueError, match=r"int64 \[1\]"):
        DecodeRequest(store, 0, 0, query, positions.int(), options)
    with pytest.raises(ValueError, match="not finite"):
        DecodeRequest(store, 0, 0, query * torch.nan, positions, options)
    with pytest.raises(ValueError, match=r"2 sequences must be \[rows, 6, 64\]"):
        BatchRequest(store, (0, 0), 0, query.transpose(0, 1), positions, options)
    with pytest.raises(ValueError, match="0 sequences"):
        BatchRequest(store, (), 0, query.transpose(0, 1)[:0], positions[:0], options)
    with pytest.raises(ValueError, match="scale"):
        AttentionOptions(scale=0.0)
    with pytest.raises(ValueError, match=r"sink_logits must be \[6\], got \(2,\)"):
        decode_attention(request, sink_logits=torch.zeros(2))
    with pytest.raises(ValueError, match=r"sink_logits must be \[6\], got \(2,\)"):
        decode_rows(make_batch(CASES["page"]), sink_logits=torch.zeros(2))


class _NoWaiting(TorchDispatchMode):
    """The host must not ask a GPU for a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_asked = func._schema.name == "aten::_local_scalar_dense"
        assert not (is_asked and isinstance(args[0], GpuTensor)), "the host waits for the GPU"
        return func(*args, **(kwargs or {}))


def test_a_request_does_not_wait_for_a_gpu():
    """Neither shapes nor positions nor a check of the query asks the device for a number."""
    request = make_request(CASES["page plus one"])
    store, options = request.store, request.options
    with fake_gpu(), _NoWaiting():
        query = GpuTensor(request.query)
        DecodeRequest(store, 0, 0, query, request.positions, options)
        rows = GpuTensor(request.query.transpose(0, 1).contiguous())
        BatchRequest(store, (0,), 0, rows, request.positions, options)
        with pytest.raises(AssertionError, match="waits"):
            float(query.sum())
        with pytest.raises(ValueError, match="positions must be on the CPU"):
            DecodeRequest(store, 0, 0, query, GpuTensor(request.positions), options)


def test_backends_are_found_by_name():
    with pytest.raises(ValueError, match=r"got 'warp'$"):
        get_backend("warp")
    with pytest.raises(ValueError, match="did you mean 'native'"):
        get_backend("nativ")
    assert get_backend("reference").name == "reference"


def test_a_missing_backend_raises_and_auto_says_so(monkeypatch, caplog):
    def missing():
        raise ImportError("extension was not built")

    monkeypatch.setitem(api.BACKENDS, "native", missing)
    with pytest.raises(BackendUnavailableError, match="not built"):
        get_backend("native")
    assert get_backend("auto").name == "reference"
    assert "not built" in caplog.text


def test_the_reference_holds_no_tables_and_captures_nothing():
    backend, request = ReferenceBackend(), make_request(CASES["page"])
    store = request.store
    assert backend.table_bytes(request.codec()) == 0
    assert backend.capture(store, [0], max_tokens=200) is None
    assert "reference backend" in backend.why_not(store, [0])


def test_plans_are_kept_until_a_table_changes():
    built = []
    store = make_store(CASES["page plus one"])
    store.fork(0, 1)

    def build(_, sequences, layer):
        built.append((sequences, layer))
        return len(built)

    plans = PlanCache(build)
    assert [plans.get(store, (0,), 0) for _ in range(2)] == [1, 1]
    assert [plans.get(store, (0, 1), 0) for _ in range(2)] == [2, 2]
    assert plans.get(store, (0, 1, 1), 0) == 3
    keys, values, _ = random_states(store.config.geometry, rope_of(store), 170, first=134)
    store.append(1, 0, keys, values)
    assert plans.get(store, (0,), 0) == 1
    assert plans.get(store, (0, 1, 1), 0) == 4
    store.free(1)
    store.fork(0, 1)
    assert plans.get(store, (0, 1, 1), 0) == 5
    assert built[-1] == ((0, 1, 1), 0)
