# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of the GPU's backend, without a GPU: sizes of blocks, layouts, plans of steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.utils import customize_attention_spec

from sphkv.integrations.vllm.cuda.backend import (
    CudaMetadataBuilder,
    CudaSphericalBackend,
    CudaSphericalImpl,
)
from sphkv.integrations.vllm.cuda.groups import GroupShape, LayerGroup
from sphkv.integrations.vllm.cuda.manager import request_shares
from sphkv.integrations.vllm.cuda.scheduler import SphericalScheduler
from sphkv.integrations.vllm.runtime import activate

PAGE, HEADS, DIM = 12608, 8, 128


class FakeRuntime:
    """What the backend asks of a runtime."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(page_bytes=PAGE)
        self.num_query_heads, self.num_kv_heads, self.head_dim = 4 * HEADS, HEADS, DIM
        self.kept_share = 1.0
        self.planned: dict[tuple[str, ...], Any] = {}
        self.calls: list[Any] = []

    def add_group(self, names: tuple[str, ...], window: int | None) -> Any:
        self.calls.append((names, window))
        return SimpleNamespace(shape=SimpleNamespace(num_slots=16), plan=self.plan)

    def plan(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "step"

    def prompt_lengths(self, slots: Any) -> None:
        return None

    def request_names(self, slots: Any) -> list[str]:
        return [f"r{slot}" if slot != 2 else "" for slot in slots]


@pytest.fixture
def runtime():
    fake = FakeRuntime()
    activate(fake)  # type: ignore[arg-type]
    yield fake
    activate(None)


def layer_spec(window: int | None = None) -> Any:
    """What vLLM makes of a layer that sees everything, or of one with a window."""
    given: dict[str, Any] = {
        "block_size": 128,
        "num_kv_heads": HEADS,
        "head_size": DIM,
        "dtype": torch.bfloat16,
    }
    if window is None:
        return FullAttentionSpec(**given)
    return SlidingWindowSpec(sliding_window=window, **given)


@pytest.mark.usefixtures("runtime")
def test_a_block_of_a_head_is_one_run_of_bytes():
    spec = customize_attention_spec(CudaSphericalBackend, layer_spec())
    assert spec.page_size_bytes == HEADS * PAGE
    assert CudaSphericalBackend.customize_spec(spec) == spec
    assert CudaSphericalBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    size = 2 * 3 * spec.page_size_bytes
    raw = torch.zeros(size, dtype=torch.int8)
    place = KVCacheTensor(
        size=size,
        layers=["a", "b"],
        layer_stride=3 * spec.page_size_bytes,
        block_stride=spec.page_size_bytes,
    )
    views = create_kv_cache_views(raw, spec, 3, KVCacheLayout.LBHNC, place)
    assert [tuple(view.shape) for view in views] == [(3, HEADS, 1, PAGE)] * 2
    assert views[0].stride()[:2] == (HEADS * PAGE, PAGE)
    assert views[0].dtype == torch.uint8


@pytest.mark.usefixtures("runtime")
def test_windowed_layers_have_pages_of_the_same_size():
    asked = SlidingWindowSpec(
        block_size=1, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16, sliding_window=128
    )
    assert CudaSphericalBackend.customize_spec(asked).page_size_bytes == HEADS * 99
    chosen = SlidingWindowSpec(
        block_size=128, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16, sliding_window=128
    )
    assert CudaSphericalBackend.customize_spec(chosen).page_size_bytes == HEADS * PAGE


def test_steps_are_planned_from_what_the_host_knows(runtime):
    builder = CudaMetadataBuilder(layer_spec(), ["a", "b"], None, torch.device("cpu"))
    assert runtime.calls.pop() == (("a", "b"), None)
    support = builder.get_cudagraph_support(None, layer_spec())
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    table = torch.zeros(4, 2, dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=4,
        num_actual_tokens=4,
        # two rows of a graph are padding
        query_start_loc_cpu=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([7, 200, 0, 0], dtype=torch.int32),
        req_idx=np.array([3, 1]),
        block_table_tensor=table,
    )
    metadata = builder.build(0, common)
    assert metadata.num_actual_tokens == 4
    assert runtime.planned == {("a", "b"): metadata.step}
    (starts, lengths, slots, names, given), options = runtime.calls.pop()
    assert starts.tolist() == [0, 1, 2]
    assert lengths.tolist() == [7, 200]
    assert slots.tolist() == [3, 1]
    assert names == ["r3", "r1"]
    assert given is table
    assert options == {"padded": 4, "prompts": None}
    common.req_idx = np.array([3, 2])
    builder.build(0, common)
    assert runtime.calls.pop()[0][2].tolist() == [3, 16]
    common.req_idx = None
    with pytest.raises(RuntimeError, match="which request"):
        builder.build(0, common)
    builder.build_for_cudagraph_capture(common)
    assert runtime.calls.pop()[0][2].tolist() == [16] * 4


def test_other_blocks_are_refused(runtime):
    spec = FullAttentionSpec(block_size=64, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="blocks of 64 tokens"):
        CudaMetadataBuilder(spec, ["a"], None, torch.device("cpu"))


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"kv_sharing_target_layer_name": "x"}, "shared between layers"),
        ({"num_kv_heads": 4}, "unlike the others"),
    ],
)
def test_layers_that_cannot_be_coded_are_refused(given: dict[str, Any], reason: str):
    layer = {"num_heads": 32, "head_size": DIM, "scale": 1.0, "num_kv_heads": HEADS}
    with pytest.raises(ValueError, match=reason):
        CudaSphericalImpl(**{**layer, **given})


def test_memory_is_what_was_foreseen():
    shape = GroupShape(
        num_layers=2,
        num_kv_heads=2,
        num_query_heads=4,
        head_dim=64,
        num_slots=3,
        num_sinks=5,
        sink_tokens=4,
        max_tokens=512,
    )
    group = LayerGroup(shape, torch.device("cpu"), room=512, keeps_prefixes=False)
    assert group.keys.nbytes + group.values.nbytes == shape.tail_bytes
    keys, values = group.sink_states(1)
    assert keys.shape == values.shape == (6, 2, 4, 64)
    assert shape.sink_bytes == 2 * 6 * 2 * (64 + 2 * 4 * 64 * 2)


def make_manager(spec: Any, *, caches: bool, num_blocks: int = 20) -> tuple[Any, BlockPool]:
    """The manager that vLLM makes for a specification, and its pool."""
    pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=caches, hash_block_size=128)
    manager_class = KVCacheSpecRegistry.get_manager_class(spec)
    assert manager_class is not None
    manager = manager_class(
        spec,
        block_pool=pool,
        enable_caching=caches,
        kv_cache_group_id=0,
        scheduler_block_size=128,
    )
    return manager, pool


def test_blocks_of_a_cut_prompt_go_back_to_the_pool(runtime):
    runtime.kept_share = 0.4
    spec = customize_attention_spec(CudaSphericalBackend, layer_spec())
    assert spec.kept_share == 0.4
    assert spec.page_size_bytes == HEADS * PAGE
    assert type(spec).merge([spec, spec]) == spec
    manager, pool = make_manager(spec, caches=False)
    free = pool.get_num_free_blocks()
    manager.allocate_new_blocks("a", 1300, 1300)
    assert pool.get_num_free_blocks() == free - 11
    manager.remove_skipped_blocks("a", 1200, 1290)
    assert pool.get_num_free_blocks() == free - 11
    manager.remove_skipped_blocks("a", 1290, 1290)
    # ten of the blocks were full, and four of those stay
    assert pool.get_num_free_blocks() == free - 5
    manager.remove_skipped_blocks("a", 1300, 1290)
    assert pool.get_num_free_blocks() == free - 5
    blocks = manager.req_to_blocks["a"]
    assert [block.is_null for block in blocks] == [False] * 4 + [True] * 6 + [False]
    manager.free("a")
    assert pool.get_num_free_blocks() == free


def test_a_request_may_ask_for_less_than_the_budget(runtime, monkeypatch):
    runtime.kept_share = 0.4
    spec = customize_attention_spec(CudaSphericalBackend, layer_spec())
    manager, pool = make_manager(spec, caches=False)
    scheduler = object.__new__(SphericalScheduler)
    scheduler._budget = 50
    queued: list[str] = []
    monkeypatch.setattr(AsyncScheduler, "add_request", lambda _, one: queued.append(one.request_id))
    monkeypatch.setattr(AsyncScheduler, "_free_blocks", lambda *_: None)

    def asks(name: str, budget: object) -> SimpleNamespace:
        sampling = SimpleNamespace(extra_args={"sphkv_budget_bytes": budget})
        return SimpleNamespace(request_id=name, sampling_params=sampling)

    requests = [asks("half", 25), asks("more", 90), asks("wrong", "many")]
    for request in requests:
        scheduler.add_request(request)
    assert queued == ["half", "more", "wrong"]
    for name, kept in (("half", 2), ("more", 4), ("wrong", 4)):
        free = pool.get_num_free_blocks()
        manager.allocate_new_blocks(name, 1290, 1290)
        manager.remove_skipped_blocks(name, 1290, 1290)
        # ten full blocks, and one that is not
        assert pool.get_num_free_blocks() == free - kept - 1
        manager.free(name)
    for request in requests:
        scheduler._free_blocks(request)
    assert not request_shares


def test_prompts_keep_their_blocks_without_a_budget(runtime):
    spec = customize_attention_spec(CudaSphericalBackend, layer_spec())
    manager, pool = make_manager(spec, caches=False)
    manager.allocate_new_blocks("a", 1300, 1300)
    free = pool.get_num_free_blocks()
    manager.remove_skipped_blocks("a", 1300, 1290)
    assert pool.get_num_free_blocks() == free


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("window", [None, 256])
def test_nobody_finds_a_block_in_the_step_whose_single_token_fills_it(window: int | None):
    spec = customize_attention_spec(CudaSphericalBackend, layer_spec(window))
    manager, _ = make_manager(spec, caches=True)
    request = SimpleNamespace(
        request_id="a",
        num_computed_tokens=0,
        num_prompt_tokens=200,
        num_tokens=256,
        shared_prefix_boundary=None,
        block_hashes=[b"first", b"second"],
        all_token_ids=list(range(256)),
    )
    cached: list[int] = []
    manager.block_pool.cache_full_blocks = lambda **given: cached.append(given["num_full_blocks"])
    manager.allocate_new_blocks("a", 256, 256)
    # a chunk: its blocks are coded before anyone reads
    manager.cache_blocks(request, 200, replay_boundaries=())
    assert cached == [1]
    request.num_computed_tokens = 255
    manager.cache_blocks(request, 256, replay_boundaries=())
    assert cached == [1]
    # the step is done
    request.num_computed_tokens = 256
    manager.cache_blocks(request, 256, replay_boundaries=())
    assert cached == [1, 2]


@pytest.mark.usefixtures("runtime")
def test_layers_without_a_manager_are_refused():
    spec = ChunkedLocalAttentionSpec(
        block_size=128,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=torch.bfloat16,
        attention_chunk_size=256,
    )
    with pytest.raises(ValueError, match="layers of ChunkedLocalAttentionSpec"):
        CudaSphericalBackend.customize_spec(spec)


def test_other_layers_keep_their_managers(runtime):
    assert KVCacheSpecRegistry.get_manager_class(layer_spec()) is FullAttentionManager
    runtime.kept_share = 0.4
    specs = [customize_attention_spec(CudaSphericalBackend, layer_spec())]
    runtime.kept_share = 0.5
    specs.append(customize_attention_spec(CudaSphericalBackend, layer_spec()))
    with pytest.raises(ValueError, match="layers of one group differ"):
        type(specs[0]).merge(specs)
