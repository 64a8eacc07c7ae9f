# SPDX-License-Identifier: Apache-2.0
"""The GPU's runtime on a CPU: kernels run as in tests/attention, vLLM's scheduler is played.

Every output is compared with float64 attention over what a sequence must see: its chunk, its tail
and its first tokens densely, full blocks as the bytes in vLLM's cache say.
"""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sphkv.attention.cuda.pages import FragmentOrder
from sphkv.attention.request import AttentionOptions
from sphkv.codec.calibration import Calibration, CalibrationOptions, Calibrator
from sphkv.codec.codebook import CodebookFit
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm.cuda.retain import Cut, compact, kept_blocks
from sphkv.integrations.vllm.cuda.runtime import CudaRuntime
from sphkv.integrations.vllm.cuda.steps import BatchRows
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.store.layout import PageView

_PATH = Path(__file__).parents[2] / "attention" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("attention_conftest", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_KERNELS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_KERNELS)


@pytest.fixture
def kernels(request):
    """Kernels that run on the device there is."""
    if DEVICE.type == "cpu":
        request.getfixturevalue("on_the_host")()


on_the_host = _KERNELS.on_the_host

# with a GPU the kernels run there
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, HEADS, GROUP, DIM, BLOCKS = 2, 2, 2, 64, 40
GEOMETRY = KVGeometry(
    num_layers=LAYERS, num_kv_heads=HEADS, num_query_heads=HEADS * GROUP, head_dim=DIM
)
NAMES = ("layer.0", "layer.1")
# half-precision products of the kernel and bfloat16 states of the workspace
TOLERANCE = 2e-2


def rope() -> RopeSpec:
    return RopeSpec(DIM, DIM, tuple(10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    generator = torch.Generator().manual_seed(0)
    options = CalibrationOptions(fit=CodebookFit(iterations=2, refinements=1, stage_tokens=256))
    calibrator = Calibrator(GEOMETRY, (rope(),) * LAYERS, model_id="random", options=options)
    for layer in range(LAYERS):
        keys = torch.randn(HEADS, 300, DIM, generator=generator)
        queries = torch.randn(HEADS * GROUP, 300, DIM, generator=generator)
        calibrator.add_layer(layer, keys, queries, torch.arange(300))
    return calibrator.finish()


def plain_chunks(query, keys, values, output, chunks, options, sink_logits):
    """Float32 attention row by row, as vLLM's kernel gives it on a GPU."""
    starts, ends = chunks.query_starts.tolist(), chunks.key_starts.tolist()
    for row in range(len(starts) - 1):
        q = query[starts[row] : starts[row + 1]]
        k, v = (part[ends[row] : ends[row + 1]] for part in (keys, values))
        at = torch.arange(len(k) - len(q), len(k))
        output[starts[row] : starts[row + 1]] = exact(q, k, v, at, options).to(output.dtype)


def exact(query, keys, values, positions, options):
    """``[queries, heads, dim]`` float64 attention to keys at positions 0, 1, ..."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * options.scale
    distance = positions.to(DEVICE)[:, None] - torch.arange(len(keys), device=DEVICE)
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    weight = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weight, values)


@dataclass
class Sequence:
    """A request and all its states ``[layers][tokens, heads, dim]``."""

    name: str
    slot: int
    blocks: list[int]
    length: int = 0
    prefix_of: "Sequence | None" = None
    prompt: int = 1 << 20
    cut: tuple[int, int] | None = None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Server:
    """Plays scheduler and model."""

    def __init__(self, calibration, *, sinks=4, window=None, num_sinks=8, value_bits=4, **others):
        options = ServeOptions(key_bits=2.0, value_bits=value_bits, sink_tokens=sinks, **others)
        self.runtime = CudaRuntime(
            options,
            num_kv_heads=HEADS,
            num_query_heads=HEADS * GROUP,
            head_dim=DIM,
            max_sequences=4,
            max_tokens=1024,
            device=DEVICE,
            keeps_prefixes=True,
        )
        runtime = self.runtime
        runtime.layer_ids.update({name: at for at, name in enumerate(NAMES)})
        runtime.use(calibration)
        runtime.num_sinks = num_sinks
        self.group = runtime.add_group(NAMES, window)
        size = (LAYERS, BLOCKS, HEADS, 1, runtime.layout.page_bytes)
        self.cache: Any = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
        runtime.bind({name: self.cache[at] for at, name in enumerate(NAMES)})
        self.codec = SphericalCodec(calibration)
        self.options = AttentionOptions(scale=DIM**-0.5, window=window)
        self.free = list(range(1, BLOCKS))
        self.generator = torch.Generator().manual_seed(5)

    def start(self, name: str, slot: int, found: Sequence | None = None, num_found: int = 0):
        """A request; its first blocks may be another's."""
        sequence = Sequence(name, slot, [] if found is None else found.blocks[:num_found])
        length = 128 * num_found
        for layer in range(LAYERS):
            for to, source in (("keys", "keys"), ("values", "values")):
                states = torch.zeros(0, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
                if found is not None:
                    states = getattr(found, source)[layer][:length]
                getattr(sequence, to).append(states)
        sequence.length = length
        new = [self.free.pop(0) for _ in range(8 - num_found)]
        sequence.blocks = sequence.blocks + new
        self.group.ledger.begin(name, sequence.blocks, num_found)
        return sequence

    def end(self, sequence: Sequence, *, keeps: int = 0) -> None:
        self.group.ledger.end(sequence.name)
        self.free = sequence.blocks[keeps:] + self.free

    def stored(self, sequence: Sequence, layer: int, old: int):
        """States as a query of the step sees those before position ``old``."""
        keys, values = (part[layer][:old].double() for part in (sequence.keys, sequence.values))
        layout, sinks = self.runtime.layout, 0
        if self.group.ledger.row(sequence.name) >= 0:
            sinks = self.runtime.options.sink_tokens
        for block in range(old // 128):
            raw = self.cache[layer][sequence.blocks[block], :, 0]
            view = PageView(layout, FragmentOrder().from_slab(layout, raw))
            first, count = 128 * block, int(view.counts()[0])
            shift = 128 - count
            assert shift == (sinks if block == 0 else 0)
            assert view.positions()[:, 0].tolist() == [first + shift] * HEADS
            k, v = self.codec.decode(layer, layout.tier, view.encoded(), view.positions())
            to = slice(first + shift, first + 128)
            keys[to] = k[:, :count].transpose(0, 1).double()
            values[to] = v[:, :count].transpose(0, 1).double()
        return keys, values

    def step(self, work: list[tuple[Sequence, int]], *, padded: int = 0) -> None:
        """Compute so many tokens of each; decoded rows first, as vLLM sorts them."""
        work = sorted(work, key=lambda one: one[1])
        new = [count for _, count in work]
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int64)
        before = [sequence.length for sequence, _ in work]
        lengths = np.array(before, dtype=np.int64) + np.array(new)
        rows = max(padded, len(work))
        table = torch.zeros(rows, 8, dtype=torch.int32, device=DEVICE)
        for row, (sequence, _) in enumerate(work):
            table[row] = torch.tensor(sequence.blocks, dtype=torch.int32)
        slots = np.array([sequence.slot for sequence, _ in work], dtype=np.int64)
        requests = [sequence.name for sequence, _ in work]
        prompts = np.array([sequence.prompt for sequence, _ in work], dtype=np.int64)
        step = self.group.plan(
            starts, lengths, slots, requests, table, padded=rows, prompts=prompts
        )
        total = max(int(starts[-1]), step.decode.rows if step.decode and not step.chunks else 0)
        sealed_now = [self._states(work, total) for _ in range(LAYERS)]
        for layer in range(LAYERS):
            query, keys, values = sealed_now[layer]
            output = torch.full_like(query, torch.nan)
            self.runtime.attend(
                layer,
                (query, keys, values),
                self.cache[layer],
                step,
                self.options,
                output,
                attend_chunks=plain_chunks,
            )
            parts = [slice(*starts[row : row + 2]) for row in range(len(work))]
            for own, (sequence, _) in zip(parts, work, strict=True):
                sequence.keys[layer] = torch.cat([sequence.keys[layer], keys[own]])
                sequence.values[layer] = torch.cat([sequence.values[layer], values[own]])
            for row, (sequence, count) in enumerate(work):
                own, other = parts[row], sequence.prefix_of
                if other is not None:
                    sequence.keys[layer][:128] = other.keys[layer][:128]
                    sequence.values[layer][:128] = other.values[layer][:128]
                self._check(sequence, layer, before[row], count, query[own], output[own])
        self.runtime.finish(step, NAMES)
        for sequence, count in work:
            if sequence.length < sequence.prompt <= sequence.length + count:
                self._take_back(sequence)
            sequence.length += count

    def _take_back(self, sequence) -> None:
        """What vLLM does with the blocks of a prompt that was cut: someone else writes them."""
        full = sequence.prompt // 128
        kept = kept_blocks(full, self.runtime.kept_share)
        if kept < full:
            sequence.cut = (kept, full)
            for block in sequence.blocks[kept:full]:
                self.cache[:, block] = 0xFF

    def _cut_states(self, sequence, layer, head, old):
        """States of one head of a prompt that was cut, before position ``old``."""
        kept, full = sequence.cut
        layout, sinks = self.runtime.layout, self.runtime.options.sink_tokens
        keys = [sequence.keys[layer][:sinks, head].double()]
        values = [sequence.values[layer][:sinks, head].double()]
        for block in (*range(kept), *range(full, old // 128)):
            raw = self.cache[layer][sequence.blocks[block], head]
            view = PageView(layout, FragmentOrder().from_slab(layout, raw))
            heads = torch.tensor([head])
            k, v = self.codec.decode(
                layer, layout.tier, view.encoded(), view.positions(), head_ids=heads
            )
            count = int(view.counts()[0])
            keys.append(k[0, :count].double())
            values.append(v[0, :count].double())
        return torch.cat(keys), torch.cat(values)

    def _check_cut(self, sequence, layer, before, count, query, output) -> None:
        old = (before - before % 128) if count == 1 else before
        right = torch.empty_like(query, dtype=torch.float64)
        for head in range(HEADS):
            full = old // 128 * 128
            keys, values = self._cut_states(sequence, layer, head, old)
            keys = torch.cat([keys, sequence.keys[layer][full:, head].double()])
            values = torch.cat([values, sequence.values[layer][full:, head].double()])
            at = torch.arange(len(keys) - count, len(keys))
            part = slice(head * GROUP, (head + 1) * GROUP)
            right[:, part] = exact(query[:, part], keys[:, None], values[:, None], at, self.options)
        error = float((output.double() - right).norm() / right.norm())
        assert error < TOLERANCE, (sequence.name, layer, before, count, error)

    def _check(self, sequence, layer, before, count, query, output) -> None:
        if sequence.cut is not None:
            self._check_cut(sequence, layer, before, count, query, output)
            return
        first = 128 - before % 128
        if self.runtime.options.repeatable and count > first:
            # the rest reads its own block densely, and this one as stored
            self._check(sequence, layer, before, first, query[:first], output[:first])
            rest = (query[first:], output[first:])
            self._check(sequence, layer, before + first, count - first, *rest)
            return
        old = (before - before % 128) if count == 1 else before
        keys, values = self.stored(sequence, layer, old)
        keys = torch.cat([keys, sequence.keys[layer][old:].double()])
        values = torch.cat([values, sequence.values[layer][old:].double()])
        right = exact(query, keys, values, torch.arange(before, before + count), self.options)
        error = float((output.double() - right).norm() / right.norm())
        assert error < TOLERANCE, (sequence.name, layer, before, count, error)

    def _states(self, work, total):
        """New queries, keys and values of all rows; keys are those of a model with RoPE."""
        shape = (total, HEADS * GROUP + 2 * HEADS, DIM)
        states = torch.randn(shape, generator=self.generator).bfloat16().to(DEVICE)
        return states.split([HEADS * GROUP, HEADS, HEADS], 1)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_chunks_decodes_and_seals(kernels, calibration, is_quiet):
    server = Server(calibration)
    # where nobody finds a prefix, blocks are encoded beside the model
    server.runtime._is_quiet = is_quiet
    one, two, three = (server.start(name, slot) for slot, name in enumerate("abc"))
    server.step([(one, 300), (two, 5)])
    server.step([(one, 1), (two, 1), (three, 126)], padded=3)
    # a block fills in the middle of a chunk, another one's tail in a step of decoded rows
    server.step([(one, 1), (two, 130), (three, 1)])
    server.step([(one, 1), (two, 1), (three, 1)], padded=4)
    assert server.group.ledger.num_used == 3
    server.step([(one, 1), (two, 1), (three, 1)], padded=4)
    server.step([(one, 100), (two, 250), (three, 1)])
    server.step([(one, 1), (two, 1), (three, 1)], padded=4)


@pytest.mark.parametrize("window", [None, 150])
def test_repeatable_chunks_read_their_own_blocks_as_stored(kernels, calibration, window):
    server = Server(calibration, repeatable=True, window=window, num_sinks=1)
    one, two = (server.start(name, slot) for slot, name in enumerate("ab"))
    server.step([(one, 300), (two, 127)])
    # a piece of one token, a whole block and a token, beside a row that is decoded
    server.step([(one, 1), (two, 130)])
    server.step([(one, 100), (two, 1)])


def test_prefix_is_found_and_rows_of_sinks_come_back(kernels, calibration):
    server = Server(calibration, num_sinks=1)
    one = server.start("a", 0)
    server.step([(one, 270)])
    assert server.group.ledger.row("a") == 0
    server.end(one, keeps=2)
    found = server.start("b", 1, one, 2)
    server.step([(found, 40)])
    server.step([(found, 1)], padded=2)
    # no row is left, so a first block is coded whole
    other = server.start("c", 2)
    server.step([(other, 200), (found, 1)])
    assert server.group.ledger.row("c") == -1
    server.step([(other, 1), (found, 1)])
    # someone else gets the blocks of the prefix
    server.group.ledger.reuse(one.blocks[:1])
    assert server.group.ledger.num_used == 0


@pytest.mark.parametrize("num_new", [7, 1])
def test_request_finds_what_another_writes_in_the_same_step(kernels, calibration, num_new):
    server = Server(calibration)
    one = server.start("a", 0)
    for layer in range(LAYERS):
        # what the other will write is not known yet
        for states in (one.keys, one.values):
            states[layer] = torch.zeros(128, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    two = server.start("b", 1, one, 1)
    two.prefix_of = one
    for layer in range(LAYERS):
        one.keys[layer], one.values[layer] = one.keys[layer][:0], one.values[layer][:0]
    # rows with one new token come first
    server.step([(two, 1), (one, 200)] if num_new == 1 else [(one, 200), (two, num_new)])
    server.step([(one, 1), (two, 1)], padded=2)


@pytest.mark.parametrize("window", [100, 150])
def test_windows_list_only_what_they_see(kernels, calibration, window):
    server = Server(calibration, window=window)
    assert server.group.shape.num_sinks == 0
    one, two = server.start("a", 0), server.start("b", 1)
    server.step([(one, 300), (two, 20)])
    server.step([(one, 1), (two, 1)], padded=2)
    server.step([(one, 90), (two, 120)])
    server.step([(one, 1), (two, 1)], padded=3)


def test_chunks_that_do_not_fit_the_workspace_together_take_turns(kernels, calibration):
    server = Server(calibration)
    server.group.room = 700
    one, two, three = (server.start(name, slot) for slot, name in enumerate("abc"))
    server.step([(one, 400), (two, 300), (three, 10)])
    server.step([(one, 60), (two, 50), (three, 30)])


def scheduled(*, new=(), cached=(), finished=(), preempted=None):
    """As much of vLLM's ``SchedulerOutput`` as is looked at."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=tokens)
            for name, blocks, tokens in new
        ],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=list(cached)),
    )


def test_sinks_follow_the_scheduler(kernels, calibration):
    server = Server(calibration)
    runtime, ledger = server.runtime, server.group.ledger
    runtime.order_groups([NAMES])
    runtime.begin_step(scheduled(new=[("a", [3, 4], 0)]))
    assert runtime._is_quiet
    ledger.assign("a")
    runtime.begin_step(scheduled(new=[("b", [3, 5], 128)], finished=["a"]))
    assert not runtime._is_quiet
    assert ledger.row("a") == -1
    assert ledger.row("b") >= 0
    # the first block goes to someone who writes it
    runtime.begin_step(scheduled(cached=[None, ([9, 3],)], preempted={"b"}))
    assert ledger.num_used == 0
    with pytest.raises(RuntimeError, match="request c begins at token 130, inside a block"):
        runtime.begin_step(scheduled(new=[("c", [3], 130)]))
    runtime.requests = {2: "c"}
    assert runtime.request_names(np.array([2, 3])) == ["c", ""]


def test_prompts_are_cut_to_a_budget(kernels, calibration):
    server = Server(calibration, budget_bytes=25)
    one, two, three = (server.start(name, slot) for slot, name in enumerate("abc"))
    one.prompt, two.prompt, three.prompt = 700, 200, 640
    server.step([(one, 500), (three, 639)])
    # the last token of a prompt may come as a decoded row, which asks no layer
    server.step([(one, 200), (two, 200), (three, 1)])
    assert one.cut == (2, 5)
    assert two.cut is None
    assert three.cut == (2, 5)
    for _ in range(2):
        server.step([(one, 1), (two, 1), (three, 1)], padded=4)
    # a request that was preempted brings more than its prompt in chunks
    server.step([(one, 150), (two, 1), (three, 3)])
    server.step([(one, 1), (two, 1), (three, 1)], padded=4)
    pages = server.cache[0][one.blocks[0], :, 0, 8:12].contiguous().view(torch.int32)
    assert pages.flatten().tolist() == [4, 4]
    server.group.forget("a")
    assert server.group._cuts.keys() == {"c"}


def test_a_request_has_the_budget_that_it_asked_for(kernels, calibration):
    server = Server(calibration, budget_bytes=34)
    runtime = server.runtime
    runtime.order_groups([NAMES])
    asked = scheduled(new=[("a", [1], 0), ("b", [2], 0), ("c", [3], 0)])
    for new, budget in zip(asked.scheduled_new_reqs, (None, 17, "many"), strict=True):
        extra = None if budget is None else {"sphkv_budget_bytes": budget}
        new.sampling_params = SimpleNamespace(extra_args=extra)
    runtime.begin_step(asked)
    # whose scheduler does not know of it may not cut more than it gives back
    assert not server.group.request_shares
    runtime.heeds_requests = True
    runtime.begin_step(asked)
    assert server.group.request_shares == {"b": 0.5}
    prompts = np.array([1000, 1000])
    rows = BatchRows.of(np.array([0, 1000, 2000]), prompts, np.array([0, 1]))
    table = torch.arange(16).reshape(2, 8)
    cuts = server.group._plan_cuts(rows, ["a", "b"], table, prompts)
    share = runtime.kept_share
    assert [cut.num_kept for cut in cuts] == [kept_blocks(7, share), kept_blocks(7, share / 2)]
    assert cuts[0].num_kept > cuts[1].num_kept
    server.group.forget("b")
    assert not server.group.request_shares


@pytest.mark.parametrize("most_keys", [1 << 18, 1])
def test_late_queries_choose_pages(monkeypatch, most_keys):
    # heads of long prompts are looked at one by one
    monkeypatch.setattr("sphkv.integrations.vllm.cuda.retain._MOST_KEYS", most_keys)
    torch.manual_seed(0)
    keys = torch.randn(6 * 128 + 5, HEADS, DIM, device=DEVICE)
    query = torch.zeros(3, HEADS * GROUP, DIM, device=DEVICE)
    # each head looks at one page
    query[:, :GROUP], query[:, GROUP:] = 3 * keys[300, 0], 3 * keys[520, 1]
    blocks = torch.arange(6, device=DEVICE)
    cut = Cut.of(0, blocks, 3, 1, HEADS)
    cut.score(0, query, keys, 1.0)
    assert cut.pages().tolist() == [[[0, 2, 5], [0, 4, 5]]]
    cache = torch.arange(6 * HEADS, device=DEVICE).view(6, HEADS, 1).clone()
    compact(cache, blocks, cut.pages()[0])
    assert cache[:3, :, 0].tolist() == [[0, 1], [4, 9], [10, 11]]
    assert [kept_blocks(n, 0.3) for n in (0, 1, 2, 5, 10)] == [0, 1, 2, 2, 3]


def test_layers_at_uneven_distances_are_stored_one_by_one(kernels, calibration):
    server = Server(calibration)
    # vLLM may put layers of other groups between those of one
    server.cache = [part.clone() for part in server.cache]
    server.runtime.bind({name: server.cache[at] for at, name in enumerate(NAMES)})
    one = server.start("a", 0)
    server.step([(one, 127)])
    server.step([(one, 1)])
    server.step([(one, 1)])
    assert server.runtime._pools == {(0, 1): None}


@pytest.mark.parametrize(("keeps_prefixes", "rows"), [(True, 100), (False, 4)])
def test_dense_first_tokens_have_room(kernels, calibration, keeps_prefixes, rows):
    runtime = Server(calibration).runtime
    runtime.keeps_prefixes = keeps_prefixes
    runtime.reserve_sinks(800 * LAYERS * HEADS * runtime.layout.page_bytes)
    assert runtime.num_sinks == rows


def test_no_sinks_and_three_bits(kernels, calibration):
    server = Server(calibration, sinks=0, value_bits=3)
    one = server.start("a", 0)
    server.step([(one, 260)])
    server.step([(one, 1)], padded=2)
    server.step([(one, 30)])


def test_tiers_that_kernels_do_not_read_are_refused():
    for options, words in (
        (ServeOptions(key_bits=16, value_bits=16), "tier dense"),
        (ServeOptions(budget_bytes=60), "budget_bytes must be below the 42.5"),
    ):
        with pytest.raises(ValueError, match=words):
            CudaRuntime(
                options,
                num_kv_heads=2,
                num_query_heads=4,
                head_dim=64,
                max_sequences=1,
                max_tokens=256,
                device=DEVICE,
                keeps_prefixes=False,
            )
