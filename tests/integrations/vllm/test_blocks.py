# SPDX-License-Identifier: Apache-2.0
"""Blocks, tails and kernels of the vLLM plugin; none of it needs vLLM itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.codec.calibration import Calibration, default_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm.blocks import CodedBlock
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.runtime import Runtime
from sphkv.integrations.vllm.steps import StepPlan, plan_step
from sphkv.store.layout import PageView

HEADS, GROUP, DIM, BLOCKS = 2, 2, 64, 40
GEOMETRY = KVGeometry(1, HEADS, HEADS * GROUP, DIM)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, DIM)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return default_calibration(GEOMETRY, (ROPE,))


def make_runtime(
    calibration: Calibration, options: ServeOptions, tokens: int, max_sequences: int = 4
) -> Runtime:
    runtime = Runtime(
        options,
        block_tokens=tokens,
        num_kv_heads=HEADS,
        head_dim=DIM,
        max_sequences=max_sequences,
    )
    runtime.layer_ids["layer"] = 0
    runtime.use(calibration, variant="float32")
    return runtime


@dataclass
class Server:
    """One layer of a server: a block table, random states, and what a step computes."""

    runtime: Runtime
    options: AttentionOptions
    table: Tensor
    lengths: list[int]
    states: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, DIM, generator=generator).bfloat16().float()

        self.states = [
            (draw(n, HEADS * GROUP), 2 * draw(n, HEADS), draw(n, HEADS)) for n in self.lengths
        ]
        self.done = [0] * len(self.lengths)
        self.pool = self.runtime.add_pool(["layer"])
        block = self.runtime.block
        # memory that was never written must not be read
        self.kv_cache = torch.full(
            (BLOCKS, HEADS, block.tokens, block.content_bytes), 0xFF, dtype=torch.uint8
        )

    def step(self, counts: list[int]) -> tuple[StepPlan, Tensor]:
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        begin = self.done
        self.done = [a + b for a, b in zip(begin, counts, strict=True)]
        batch = tuple(
            torch.cat([s[part][a:b] for s, a, b in zip(self.states, begin, self.done, strict=True)])
            for part in range(3)
        )
        plan = plan_step(
            self.pool,
            starts,
            self.done,
            self.table,
            self.runtime.block.tokens,
            is_repeatable=self.runtime.options.repeatable,
        )
        query, keys, values = batch
        self.runtime.hold(0, (keys, values), plan)
        output, _ = self.runtime.attend(0, (query, keys, values), self.kv_cache, plan, self.options)
        return plan, output

    def stored(self, index: int, begin: int, codec: SphericalCodec) -> tuple[Tensor, Tensor]:
        """Keys and values ``[heads, tokens, dim]`` as a step that begins there sees them."""
        block, total = self.runtime.block, self.done[index]
        assert isinstance(block, CodedBlock)
        full = begin // block.tokens * block.tokens
        keys, values = (s.transpose(0, 1).clone() for s in self.states[index][1:])
        for at in range(0, full, block.tokens):
            raw = self.kv_cache[self.table[index, at // block.tokens]].flatten(1)
            view = PageView(block.layout, raw[:, : block.layout.page_bytes].contiguous())
            view.check()
            skip = block.sink_tokens if at == 0 else 0
            assert view.counts().tolist() == [block.tokens - skip] * HEADS
            assert view.positions()[:, 0].tolist() == [at + skip] * HEADS
            k, v = codec.decode(
                0,
                block.layout.tier,
                view.encoded(),
                view.positions(),
                head_ids=torch.arange(HEADS),
            )
            count = block.tokens - skip
            keys[:, at + skip : at + block.tokens] = k[:, :count]
            values[:, at + skip : at + block.tokens] = v[:, :count]
        return keys[:, :total], values[:, :total]


def expected_output(server: Server, index: int, begin: int, codec: SphericalCodec) -> Tensor:
    """Attention in float64 over what the cache holds; blocks the step fills are dense to it."""
    options, end = server.options, server.done[index]
    keys, values = server.stored(index, begin, codec)
    query = server.states[index][0][begin:end].transpose(0, 1).double()
    keys, values = (s.double().repeat_interleave(GROUP, 0) for s in (keys, values))
    logits = options.scale * query @ keys.transpose(1, 2)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    distance = torch.arange(begin, end)[:, None] - torch.arange(end)
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    weight = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weight @ values).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("tokens", "sinks", "softcap"), [(32, 4, None), (64, 0, 20.0)])
def test_mixed_steps_attend_to_what_is_stored(
    calibration: Calibration, tokens: int, sinks: int, softcap: float | None, window: int | None
):
    serve = ServeOptions(key_bits=3, value_bits=4, sink_tokens=sinks)
    runtime = make_runtime(calibration, serve, tokens, max_sequences=3)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))[:30].reshape(3, 10)
    options = AttentionOptions(scale=DIM**-0.5, softcap=softcap, window=window)
    server = Server(runtime, options, table, [300, 200, 40])
    codec = SphericalCodec(calibration)
    # whole prompt, chunks that begin inside a block, decode, an idle sequence, a full block
    schedule = [[100, 0, 5], [1, 64, 1], [71, 33, 1], [1, 1, 25], [1, 1, 0], [20, 29, 1]]
    for counts in schedule:
        begin = list(server.done)
        plan, output = server.step(counts)
        row = 0
        for index, count in enumerate(counts):
            if count == 0:
                continue
            want = expected_output(server, index, begin[index], codec)
            got = output[row : row + count].double()
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
            row += count
        # one slot per sequence is enough, even where a chunk fills one block and begins the next
        assert plan.pool.num_open <= len(counts)


def test_a_shared_prefix_reads_the_same(calibration: Calibration):
    runtime = make_runtime(calibration, ServeOptions(), 32)
    table = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]])
    server = Server(runtime, AttentionOptions(scale=0.125), table, [70, 70])
    server.states[1] = server.states[0]
    server.step([70, 0])
    # a prefix hit: two full blocks are there, so only six tokens are computed
    server.done[1] = 64
    _, output = server.step([0, 6])
    server.done[0] = 64
    server.runtime.forget([5])
    server.table[0, 2] = 9
    _, again = server.step([6, 0])
    assert torch.equal(output, again)


@pytest.mark.parametrize("is_reader_first", [False, True])
@pytest.mark.parametrize("last", [64, 1])
def test_a_block_can_be_found_in_the_step_that_fills_it(
    calibration: Calibration, is_reader_first: bool, last: int
):
    # vLLM lets a request find what another one of the same step will have written
    table = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8]])
    writer, reader = (1, 0) if is_reader_first else (0, 1)
    outputs = []
    for is_same_step in (True, False):
        runtime = make_runtime(calibration, ServeOptions(), 32)
        server = Server(runtime, AttentionOptions(scale=0.125), table, [70, 70])
        server.states[1] = server.states[0]
        counts = [0, 0]
        if last < 64:
            counts[writer] = 64 - last
            server.step(counts)
        counts[writer], counts[reader] = last, 0
        if not is_same_step:
            server.step(counts)
            counts[writer] = 0
        server.done[reader], counts[reader] = 64, 6
        _, output = server.step(counts)
        first = 0 if is_reader_first else counts[writer]
        outputs.append(output[first : first + 6])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("chunks", [[100], [31, 1, 68], [33, 66, 1], [64, 35, 1], [1] * 100])
def test_repeatable_outputs_do_not_depend_on_chunks(calibration: Calibration, chunks: list[int]):
    outputs = []
    for counts in (chunks, [32, 32, 32, 4]):
        runtime = make_runtime(calibration, ServeOptions(repeatable=True), 32)
        table = torch.tensor([[7, 2, 5, 0]])
        server = Server(runtime, AttentionOptions(scale=0.125), table, [100])
        outputs.append(torch.cat([server.step([count])[1] for count in counts]))
    torch.testing.assert_close(*outputs, rtol=2e-4, atol=2e-5)


def test_bfloat16_pages_are_exact(calibration: Calibration):
    runtime = make_runtime(calibration, ServeOptions(key_bits=16, value_bits=16), 32)
    server = Server(runtime, AttentionOptions(scale=0.125), torch.tensor([[3, 1, 2, 0]]), [100])
    for count in (70, 29, 1):
        _, output = server.step([count])
    query, keys, values = (part.transpose(0, 1).double() for part in server.states[0])
    keys, values = (part.repeat_interleave(GROUP, 0) for part in (keys, values))
    weight = (0.125 * query[:, 99:] @ keys.transpose(1, 2)).softmax(-1)
    torch.testing.assert_close(output[0].double(), (weight @ values)[:, 0], rtol=2e-4, atol=2e-5)


def test_the_same_states_give_the_same_bytes(calibration: Calibration):
    pages = []
    for chunks in ([64], [20, 44], [32, 31, 1]):
        runtime = make_runtime(calibration, ServeOptions(), 32)
        server = Server(runtime, AttentionOptions(scale=0.125), torch.tensor([[0, 1]]), [64])
        for count in chunks:
            server.step([count])
        pages.append(server.kv_cache[:2].clone())
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])


def test_slots_are_given_back_and_never_run_out(calibration: Calibration):
    runtime = make_runtime(calibration, ServeOptions(), 32, max_sequences=2)
    pool = runtime.add_pool(["layer"])
    table = torch.tensor([[0], [1], [2]])
    for block in range(20):
        plan_step(pool, [0, 5], [5], torch.tensor([[block]]), 32)
        runtime.forget([block])
    assert pool.num_open == 0
    plan_step(pool, [0, 5, 10], [5, 5], table[:2], 32)
    with pytest.raises(RuntimeError, match="all 2 dense slots"):
        plan_step(pool, [0, 5], [5], table[2:], 32)
    with pytest.raises(RuntimeError, match="before offset 7"):
        plan_step(pool, [0, 1], [8], table[2:], 32)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_default_blocks_hold_four_times_the_tokens(head_dim: int):
    runtime = Runtime(
        ServeOptions(), block_tokens=128, num_kv_heads=2, head_dim=head_dim, max_sequences=1
    )
    block = runtime.block
    assert isinstance(block, CodedBlock)
    assert 4 * head_dim / block.content_bytes > 4.9
    assert block.content_bytes * 128 >= block.layout.page_bytes + 64 + 4 * 4 * head_dim
