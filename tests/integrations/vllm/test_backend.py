# SPDX-License-Identifier: Apache-2.0
"""The backend as vLLM's layers call it, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sphkv.codec.calibration import default_calibration
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm import backend as module
from sphkv.integrations.vllm import worker
from sphkv.integrations.vllm.backend import SphericalBackend, SphericalImpl
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.plugin import register
from sphkv.integrations.vllm.runtime import Runtime, activate

HEADS, GROUP, DIM, TOKENS = 2, 2, 64, 32


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    one = Runtime(
        ServeOptions(), block_tokens=TOKENS, num_kv_heads=HEADS, head_dim=DIM, max_sequences=2
    )
    one.layer_ids["layer"] = 0
    rope = RopeSpec.from_config({"rope_theta": 1e4}, DIM)
    one.use(default_calibration(KVGeometry(1, HEADS, HEADS * GROUP, DIM), (rope,)))
    activate(one)
    yield one
    activate(None)


def spec() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
    )


def test_registering_twice_is_harmless():
    register()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is SphericalBackend
    AttentionBackendEnum.CPU_ATTN.clear_override()


def test_the_page_is_bytes(runtime: Runtime):
    once = SphericalBackend.customize_spec(spec())
    assert once == SphericalBackend.customize_spec(once)
    assert once.dtype == torch.uint8
    assert once.page_size_bytes == HEADS * TOKENS * runtime.block.content_bytes
    assert SphericalBackend.get_impl_cls() is SphericalImpl


def test_without_options_it_is_stock():
    activate(None)
    with set_current_vllm_config(VllmConfig()):
        assert SphericalBackend.customize_spec(spec()) == spec()
        assert SphericalBackend.get_impl_cls() is CPUAttentionBackend.get_impl_cls()
        assert SphericalBackend.get_builder_cls() is CPUAttentionBackend.get_builder_cls()
        sizes = CPUAttentionBackend.get_supported_kernel_block_sizes()
        assert SphericalBackend.get_supported_kernel_block_sizes() == sizes


def test_options_without_our_worker_are_refused():
    activate(None)
    with (
        set_current_vllm_config(VllmConfig(additional_config={"sphkv": {}})),
        pytest.raises(RuntimeError, match="the worker is not SphericalWorker"),
    ):
        SphericalBackend.customize_spec(spec())


@pytest.mark.parametrize(
    "given",
    [
        {"alibi_slopes": [0.5] * 4},
        {"attn_type": "encoder_only"},
        {"kv_cache_dtype": "fp8"},
        {"kv_sharing_target_layer_name": "other"},
        {"num_kv_heads": 1},
    ],
)
def test_what_cannot_be_coded_is_refused(runtime: Runtime, given: dict[str, Any]):
    layer: dict[str, Any] = {"num_heads": 4, "head_size": DIM, "scale": 1.0, "num_kv_heads": HEADS}
    with pytest.raises(ValueError, match=r"coded blocks do not support|unlike the first one"):
        SphericalImpl(**{**layer, **given})


def build(runtime: Runtime, lengths: list[int], queries: list[int], table: Tensor) -> Any:
    builder = SphericalBackend.get_builder_cls()(
        SphericalBackend.customize_spec(spec()), ["layer"], None, torch.device("cpu")
    )
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=table.int(),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )
    return builder.build(0, common)


def test_a_step_with_learned_sinks(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    sinks = torch.randn(HEADS * GROUP)
    impl = SphericalImpl(HEADS * GROUP, DIM, 0.125, HEADS, sinks=sinks)
    layer = SimpleNamespace(layer_name="layer")
    rows = 20
    query = torch.randn(rows + 4, HEADS * GROUP, DIM)
    keys, values = torch.randn(rows + 4, HEADS, DIM), torch.randn(rows + 4, HEADS, DIM)
    kv_cache = torch.full((4, HEADS, TOKENS, runtime.block.content_bytes), 0xFF, dtype=torch.uint8)
    metadata = build(runtime, [12, 8], [12, 8], torch.tensor([[1], [2]]))
    context = SimpleNamespace(attn_metadata={"layer": metadata})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    impl.do_kv_cache_update(layer, keys, values, kv_cache, torch.zeros(rows))
    output = torch.full_like(query, 7.0)
    impl.forward(layer, query, keys, values, kv_cache, metadata, output)
    # rows past the batch are padding and stay as they were
    assert bool((output[rows:] == 7.0).all())
    for part in (slice(0, 12), slice(12, 20)):
        k = keys[part].repeat_interleave(GROUP, 1).transpose(0, 1)
        v = values[part].repeat_interleave(GROUP, 1).transpose(0, 1)
        logits = 0.125 * query[part].transpose(0, 1) @ k.transpose(1, 2)
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
        extra = sinks[:, None, None].expand(-1, logits.shape[1], 1)
        weight = torch.cat([logits, extra], 2).softmax(-1)[..., :-1]
        torch.testing.assert_close(output[part].transpose(0, 1), weight @ v, rtol=1e-4, atol=1e-5)


def test_warm_up_without_metadata_computes_nothing(runtime: Runtime):
    impl = SphericalImpl(HEADS * GROUP, DIM, 0.125, HEADS)
    x = torch.randn(3, HEADS * GROUP, DIM)
    layer = SimpleNamespace(layer_name="layer")
    output = impl.forward(layer, x, x[:, :2], x[:, :2], torch.empty(0), None, torch.ones_like(x))
    assert not output.any()


def test_other_devices_are_refused():
    tpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_type="tpu")
    with pytest.raises(ValueError, match=r"CPUs and NVIDIA GPUs.*'tpu'"):
        worker.worker_class(tpu)
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    assert worker.worker_class(gpu).__name__ == "CudaWorker"
    assert worker.SphericalWorker.__name__ == "CpuWorker"


@pytest.mark.parametrize(
    ("additional", "given", "reason"),
    [
        ({}, {}, "SphericalWorker needs additional_config"),
        ({"sphkv": {"key_bits": 0}}, {}, "key_bits"),
        ({"sphkv": {}}, {"block_size": 16}, "block size must be one of"),
        ({"sphkv": {}}, {"speculative_config": object()}, "speculative decoding"),
        ({"sphkv": {"budget_bytes": 44}}, {}, "pass --no-enable-prefix-caching"),
    ],
)
def test_a_worker_that_cannot_code_does_not_start(
    additional: dict[str, Any], given: dict[str, Any], reason: str
):
    config = SimpleNamespace(
        additional_config=additional,
        speculative_config=given.get("speculative_config"),
        cache_config=SimpleNamespace(
            block_size=given.get("block_size", 64), enable_prefix_caching=True
        ),
        model_config=SimpleNamespace(
            get_num_kv_heads=lambda parallel: HEADS, get_head_size=lambda: DIM
        ),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )
    with pytest.raises(ValueError, match=reason):
        worker.SphericalWorker(config)
    AttentionBackendEnum.CPU_ATTN.clear_override()


@pytest.mark.parametrize(
    "given", [{"sliding_window": 64}, {"logits_soft_cap": 30.0}, {"sinks": torch.zeros(4)}]
)
def test_a_budget_needs_plain_attention(given: dict[str, Any]):
    options = ServeOptions(budget_bytes=40)
    activate(
        Runtime(options, block_tokens=TOKENS, num_kv_heads=HEADS, head_dim=DIM, max_sequences=2)
    )
    layer: dict[str, Any] = {"num_heads": 4, "head_size": DIM, "scale": 1.0, "num_kv_heads": HEADS}
    with pytest.raises(ValueError, match="together with budget_bytes"):
        SphericalImpl(**layer, **given)
    activate(None)
