# SPDX-License-Identifier: Apache-2.0
"""Every backend on the one table of cases, against the float64 oracle on identical codes."""

import pytest
import torch

from sphkv.attention.api import BACKENDS, get_backend
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import BatchRequest, DecodeRequest
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract
from sphkv.testing.attention_cases import (
    CASES,
    AttentionCase,
    Precision,
    assert_attention,
    make_batch,
    make_request,
    make_store,
)
from sphkv.testing.cases import CacheCase, random_calibration, random_states, rope_of

CPU = torch.device("cpu")
# Arithmetic of each backend.
PRECISION: dict[str, Precision] = {
    "reference": "float32",
    "native": "int8",
    "native-float32": "float32",
    "triton": "float32",
    "cuda": "half",
}
# Host kernels are compiled for every shape and run thread by thread: a few cases that differ most.
CUDA_CASES = (
    "empty",
    "page plus one",
    "full tail",
    "runs",
    "unused pointers",
    "window",
    "sinks",
    "chunk in pages",
    "short pages",
)
BATCH_CASES = ("mixed tiers", "runs", "full tail", "tail only", "window", "sinks")
CUDA_BATCH_CASES = ("runs", "full tail")


@pytest.fixture
def make_backend(on_the_host):
    """A backend by its key of ``PRECISION``; skips where it cannot be tried here."""

    def make(key):
        if key.startswith("native"):
            pytest.importorskip("sphkv._kernels", reason="the native kernels are not built")
            from sphkv.attention.native.backend import NativeBackend

            return NativeBackend(precision="float32" if key.endswith("float32") else "int8")
        if key in ("triton", "cuda"):
            pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")
        if key == "cuda":
            from sphkv.attention.cuda.backend import CudaBackend

            on_the_host()
            return CudaBackend(CPU)
        return get_backend(key)

    return make


def test_every_backend_is_tried():
    assert {key.removesuffix("-float32") for key in PRECISION} == set(BACKENDS)


def _pairs(names, cuda_names):
    return [
        pytest.param(key, name, id=f"{key}-{name}")
        for key in PRECISION
        for name in (cuda_names if key == "cuda" else names)
    ]


@pytest.mark.parametrize(("key", "name"), _pairs(CASES, CUDA_CASES))
def test_a_sequence_is_read_right(make_backend, key, name):
    backend, case = make_backend(key), CASES[name]
    request = make_request(case, backend)
    sinks = case.sink_logits()
    assert_attention(request, backend, precision=PRECISION[key], sink_logits=sinks)


@pytest.mark.parametrize(("key", "name"), _pairs(BATCH_CASES, CUDA_BATCH_CASES))
def test_a_ragged_batch_is_read_right(make_backend, key, name):
    backend, case = make_backend(key), CASES[name]
    request = make_batch(case, backend)
    sinks = case.sink_logits()
    assert_attention(request, backend, precision=PRECISION[key], sink_logits=sinks)


def test_full_tails_are_full():
    """What the cases of this name are there for."""
    for name in ("full tail", "full tail, no page", "chunk, full tail"):
        store = make_store(CASES[name])
        assert store.tail(0, 0).num_tokens == store.config.tail_capacity, name


@pytest.mark.parametrize("key", PRECISION)
def test_rows_of_several_codecs(make_backend, key):
    """Each row is read with the codebooks that wrote it."""
    backend, case = make_backend(key), AttentionCase(CacheCase(mix="k2v3", num_tokens=140))
    store = make_store(case, backend)
    geometry, rope = case.cache.geometry(), rope_of(store)
    codec = SphericalCodec(random_calibration(geometry, rope, seed=7))
    store.create(1, codec=codec)
    keys, values, _ = random_states(geometry, rope, 140, seed=7)
    tier_id = torch.full((2, 140), store.config.tiers.id_of("k2v3"), dtype=torch.uint8)
    contract = LayerContract(tier_id, torch.zeros(2, 140, dtype=torch.bool))
    store.write(1, 0, contract, keys, values, torch.arange(140))
    query = torch.stack(
        [random_states(geometry, rope, 1, first=147, seed=s)[2][:, 0] for s in (1, 2, 3)]
    )
    positions = torch.tensor([146, 139, 146])
    request = BatchRequest(store, (0, 1, 0), 0, query, positions, case.options())
    assert_attention(request, backend, precision=PRECISION[key])


@pytest.mark.parametrize("key", PRECISION)
def test_pages_that_appear_later_are_seen(make_backend, key):
    """Plans are kept by the version of a table; a page that seals must refresh them."""
    backend = make_backend(key)
    case = AttentionCase(CacheCase(mix="k3v4", num_tokens=140, tail_tokens=1))
    request = make_request(case, backend)
    backend.attend(request)
    store, rope = request.store, rope_of(request.store)
    keys, values, query = random_states(case.cache.geometry(), rope, 200, first=141, seed=8)
    store.append(0, 0, keys, values)
    later = DecodeRequest(store, 0, 0, query[:, -1:], torch.tensor([340]), request.options)
    assert_attention(later, backend, precision=PRECISION[key])


@pytest.mark.parametrize("key", PRECISION)
def test_slack_bytes_do_not_matter(make_backend, key):
    backend = make_backend(key)
    case = AttentionCase(CacheCase(mix="k2v3", num_tokens=50, tail_tokens=0))
    request = make_request(case, backend)
    for slab in request.store.allocator.slabs():
        layout = slab.layout
        live = 46 if layout.tier.is_coded else 4
        if request.store.allocator.order is not None and layout.tier.is_coded:
            continue  # in another order slack lies between the rest
        for page in slab.data:
            if layout.tier.is_coded:
                page[layout.radius_offset : layout.scale_offset][live:] = 0xFF
                page[layout.scale_offset : layout.value_offset][live:] = 0xFF
            else:
                page[layout.key_offset : layout.value_offset].view(torch.int16)[live * 64 :] = (
                    0x7FFF
                )
                page[layout.value_offset :].view(torch.int16)[live * 64 :] = 0x7FFF
    assert_attention(request, backend, precision=PRECISION[key])


@pytest.mark.parametrize("key", PRECISION)
def test_no_queries_give_nothing(make_backend, key):
    backend = make_backend(key)
    request = make_request(CASES["one token"], backend)
    none = DecodeRequest(
        request.store, 0, 0, request.query[:, :0], request.positions[:0], request.options
    )
    got = backend.attend(none)
    assert (got.output.shape, got.lse.shape) == ((6, 0, 64), (6, 0))


def test_a_wrong_answer_is_found():
    """The rule can fail: the keys of one page are enough."""

    class Wrong(ReferenceBackend):
        name = "wrong"

        def attend(self, request):
            group = next(g for g in request.store.pages(0, 0) if g.layout.tier.is_coded)
            slab = next(s for s in request.store.allocator.slabs() if s.layout == group.layout)
            keys = slab.data[0][group.layout.key_offset : group.layout.radius_offset]
            keys ^= 0x55
            answer = super().attend(request)
            keys ^= 0x55
            return answer

    for precision in ("float32", "int8", "half"):
        with pytest.raises(AssertionError, match="wrong: "):
            assert_attention(make_request(CASES["page"]), Wrong(), precision=precision)
