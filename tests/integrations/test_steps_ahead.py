# SPDX-License-Identifier: Apache-2.0
"""Steps that are launched before they are asked for, with stand-ins for streams and graphs.

A stand-in for a graph runs the decoder again, by counters of its own as a device does. What is
launched ahead runs at once, as on a GPU that takes no time, or when something waits for it: as late
as may be. Either way everything must be as if no step had been launched ahead.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv import GateOptions, RetentionOptions, SphericalCache
from sphkv.attention.request import AttentionOptions, BatchRequest, DecodeBackend
from sphkv.cache import ahead
from sphkv.cache.ahead import StepAhead
from sphkv.cache.engine import CacheEngine
from sphkv.cache.retention import RetentionResidency
from sphkv.cache.rows import CodedRows
from sphkv.integrations.transformers import attachment
from sphkv.integrations.transformers.architecture import ModelLayout
from sphkv.integrations.transformers.cache import CacheOptions, _watch_output
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.forward import CachePass, DecoderGraph
from sphkv.integrations.transformers.guesses import GuessHistory
from sphkv.store.store import PageStore

CPU = torch.device("cpu")
PROMPT, STEPS = 560, 70
KINDS: dict[str, dict[str, Any]] = {
    "one tier": {"tiers": "k3v4"},
    "controller": {
        "budget": "30%",
        "retention": RetentionOptions(page_tokens=32, demotes=False, copying=0),
    },
}


class Stream:
    """Stands for a CUDA stream; a late one does its work when somebody waits for it."""

    device = CPU

    def __init__(self, *, is_late: bool = False) -> None:
        self.is_late = is_late
        self.queue: list[Callable[[], None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        if not self.is_late:
            self.synchronize()

    def wait_stream(self, other: "Stream") -> None:
        other.synchronize()

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Device:
    """Stands for a GPU: its current stream, and the one of steps that are launched ahead."""

    def __init__(self, *, is_late: bool) -> None:
        self.current = Stream()
        self.side = Stream(is_late=is_late)

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture(params=["at once", "late"])
def device(request, monkeypatch) -> Device:
    made = Device(is_late=request.param == "late")
    monkeypatch.setattr(ahead, "ahead_stream", lambda _: made.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.using)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return made


class DeviceSteps:
    """Steps that count as a device does, whatever the store knows; see ``StepGraph``."""

    def __init__(
        self, store: PageStore, rows: Sequence[int], backend: DecodeBackend, max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._store, self._rows, self._backend = store, tuple(rows), backend
        self.positions = torch.zeros(len(rows), 1, dtype=torch.int64)
        self.used = [0] * len(rows)
        self.recount()

    def _firsts(self) -> list[int]:
        return [self._store.tail(row, 0).first_position for row in self._rows]

    def recount(self) -> None:
        for at, row in enumerate(self._rows):
            self.positions[at] = self._store.num_tokens(row) - 1
            self.used[at] = self._store.tail(row, 0).num_tokens

    def advance(self) -> None:
        self.positions += 1
        self.used = [count + 1 for count in self.used]

    def prepare(self, make_room: Callable[[], bool]) -> bool:
        before = self._firsts()
        make_room()
        if self._firsts() != before:
            self.recount()
        return True

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        tails: list[Any] = [self._store.open_tail(row, layer) for row in self._rows]
        known = [tail.num_tokens for tail in tails]
        for tail, used, key, value in zip(tails, self.used, keys, values, strict=True):
            tail.keys[:, used - 1], tail.values[:, used - 1] = key[:, 0], value[:, 0]
            tail.num_tokens = used
        positions = self.positions[:, 0].clone()
        request = BatchRequest(self._store, self._rows, layer, query[:, :, 0], positions, options)
        output = self._backend.attend_rows(request).output.unsqueeze(2)
        for tail, count in zip(tails, known, strict=True):
            tail.num_tokens = count
        return output

    def commit(self) -> None:
        self._store.absorb(self._rows)


class HostGraph:
    """Stands for ``torch.cuda.CUDAGraph``: does its work on the current stream."""

    def __init__(self, work: Callable[[], None], device: Device) -> None:
        self._work, self._device = work, device

    def replay(self) -> None:
        self._device.current.give(self._work)


class HostDecoderGraph(DecoderGraph):
    """Replays by running the decoder again, whoever runs passes meanwhile."""

    def __init__(self, cache: SphericalCache, device: Device) -> None:
        super().__init__(cache.engine)
        self._attachment = attachment._ATTACHMENTS[cache._attached_model()]
        self._on = device

    def _can_capture(self, ids: Tensor) -> bool:
        return True

    def _record(self, forward: Callable[..., Any], cache: Any, device: torch.device) -> None:
        self._hidden = self._forward(forward, cache).clone()
        made: Any = HostGraph(lambda: self._run_on_device(forward, cache), self._on)
        self._graph = made

    def _run_on_device(self, forward: Callable[..., Any], cache: Any) -> None:
        engine, passes = self._engine, attachment._passes()
        held, fresh = engine._step, dict(engine._fresh)
        engine._step = held or object()  # type: ignore[assignment]
        passes.append((self._attachment, CachePass(engine, captured=self)))
        try:
            self._hidden.copy_(self._forward(forward, cache))
        finally:
            passes.pop()
            engine._step, engine._fresh = held, fresh


@pytest.fixture(scope="module")
def model(tiny_model) -> Any:
    return tiny_model("llama3")


@pytest.fixture(scope="module")
def calibration(model) -> Any:
    return calibrate_model(model, make_tokens(300, seed=7, batch=1), model_id="tiny")


@pytest.fixture
def new_cache(model, calibration, device, monkeypatch) -> Iterator[Any]:
    made: list[SphericalCache] = []

    def make(kind: str, *, is_ahead: bool) -> SphericalCache:
        options = CacheOptions(backend="auto", cuda_graphs=False)
        cache = SphericalCache.for_model(
            model, calibration=calibration, options=options, **KINDS[kind]
        )
        backend: Any = cache.engine.backend

        def capture(store: PageStore, rows: Sequence[int], *, max_tokens: int, **_: Any) -> Any:
            return DeviceSteps(store, rows, backend, max_tokens)

        monkeypatch.setattr(backend, "capture", capture)
        cache._captured = HostDecoderGraph(cache, device)
        if is_ahead:
            cache._unwatch = _watch_output(cache, model)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.detach()


def make_tokens(count: int, seed: int = 1, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, count), generator=generator)


def go_on(model: Any, cache: SphericalCache, tokens: Tensor, steps: int, **options: Any) -> Tensor:
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": steps, **options}
    found: Tensor = model.generate(tokens, past_key_values=cache, **options)
    return found


def guesses_of(cache: SphericalCache) -> GuessHistory:
    assert cache._captured is not None
    return cache._captured.guesses


def steps_of(cache: SphericalCache) -> DeviceSteps:
    steps: Any = cache.engine.graph
    assert isinstance(steps, DeviceSteps)
    return steps


def contents(cache: SphericalCache) -> dict[str, Any]:
    """All that a cache holds of its tokens."""
    engine, store = cache.engine, cache.engine.store
    assert store is not None
    found: dict[str, Any] = {"counts": engine.num_tokens, "ledger": cache.ledger()}
    for at, row in enumerate(engine.rows):
        for layer in range(engine.config.geometry.num_layers):
            tail = store.tail(row.sequence, layer)
            found[f"tail {at}.{layer}"] = [tail.first_position, tail.keys, tail.values]
            for group in store.pages(row.sequence, layer):
                view = store.view(group)
                found[f"pages {at}.{layer} {group.layout}"] = [view.pages]
    return found


def assert_same(cache: SphericalCache, other: SphericalCache) -> None:
    left, right = contents(cache), contents(other)
    assert left.keys() == right.keys()
    for name, held in left.items():
        if not isinstance(held, list) or name == "counts":
            assert held == right[name], name
            continue
        for one, two in zip(held, right[name], strict=True):
            same = torch.equal(one, two) if isinstance(one, Tensor) else one == two
            assert same, name


@pytest.fixture
def always_in_time(monkeypatch) -> None:
    """Steps are launched beside work as well; what is found and kept must not hang on that."""
    monkeypatch.setattr(CacheEngine, "has_work_next", property(lambda _: False))


@pytest.fixture
def always_trusts(monkeypatch, always_in_time) -> None:
    """Every guess is worth a step."""
    monkeypatch.setattr(GuessHistory, "is_trusted", property(lambda _: True))
    monkeypatch.setattr(GuessHistory, "is_due", lambda _: True)


@pytest.mark.usefixtures("always_in_time")
@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_search_finds_and_keeps_the_same(model, new_cache, device, kind: str) -> None:
    plain, cache = new_cache(kind, is_ahead=False), new_cache(kind, is_ahead=True)
    tokens = make_tokens(PROMPT)
    right, found = (go_on(model, each, tokens, STEPS) for each in (plain, cache))
    assert torch.equal(found, right)
    guesses = guesses_of(cache)
    # two steps before the first that is replayed, a few guesses, and one nobody asks for
    assert guesses.num_right == guesses.num_launched - 1 >= STEPS - 8
    assert guesses_of(plain).num_launched == 0
    assert cache.engine.ahead.is_launched
    steps, held = steps_of(cache), [count - 1 for count in cache.engine.num_tokens]
    device.side.synchronize()
    assert steps.positions[:, 0].tolist() == [at + 1 for at in held]
    assert_same(cache, plain)
    assert cache.engine.peak_bytes == plain.engine.peak_bytes
    assert cache.engine.peak_share == plain.engine.peak_share <= 1
    if kind == "controller":
        assert sum(row.residency.num_rebalances for row in cache.engine.rows) > 0


def test_no_step_is_launched_beside_which_pages_change(model, new_cache, monkeypatch) -> None:
    cache = new_cache("controller", is_ahead=True)
    expected, done, launched = [], [], []
    guess, prepare = DecoderGraph.guess, CodedRows.prepare_next
    parts = [CodedRows._seal, RetentionResidency.work_ahead]

    def noted_guess(graph, logits):
        before = graph.guesses.num_launched
        guess(graph, logits)
        expected.append(cache.engine.has_work_next)
        launched.append(graph.guesses.num_launched > before)

    def noted_prepare(rows):
        done.append(False)
        prepare(rows)

    def noted(part):
        def work(*args, **kwargs):
            # to look whether there is room is work as well
            if done:
                done[-1] = True
            return part(*args, **kwargs)

        return work

    monkeypatch.setattr(DecoderGraph, "guess", noted_guess)
    monkeypatch.setattr(CodedRows, "prepare_next", noted_prepare)
    monkeypatch.setattr(CodedRows, "_seal", noted(parts[0]))
    monkeypatch.setattr(RetentionResidency, "work_ahead", noted(parts[1]))
    go_on(model, cache, make_tokens(PROMPT), STEPS)
    assert any(done)
    assert not all(done)
    assert expected[-len(done) : -1] == done[1:]
    assert not any(both for both in zip(launched, expected, strict=True) if all(both))
    assert sum(launched) > STEPS // 4


@pytest.mark.usefixtures("always_trusts")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_for_wrong_tokens_leave_no_trace(model, new_cache, kind: str) -> None:
    plain, cache = new_cache(kind, is_ahead=False), new_cache(kind, is_ahead=True)
    tokens, warm = make_tokens(PROMPT), {"do_sample": True, "top_k": 2}
    right, found = (go_on(model, each, tokens, STEPS, **warm) for each in (plain, cache))
    assert torch.equal(found, right)
    guesses = guesses_of(cache)
    assert guesses.num_launched >= STEPS - 4
    assert STEPS // 10 < guesses.num_right < guesses.num_launched - STEPS // 10
    assert_same(cache, plain)


@pytest.mark.usefixtures("always_in_time")
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_step_that_nobody_asks_for(model, new_cache, kind: str) -> None:
    caches = new_cache(kind, is_ahead=False), new_cache(kind, is_ahead=True)
    prompts = make_tokens(PROMPT), make_tokens(PROMPT + 30, seed=5)
    ends = []
    for cache in caches:
        text = go_on(model, cache, prompts[0], 12)
        is_launched = [cache.engine.ahead.is_launched]
        cache.crop(-1)
        # the token that was taken back is read anew, beside the last one
        text = go_on(model, cache, text, 12)
        is_launched.append(cache.engine.ahead.is_launched)
        # the next turn
        text = go_on(model, cache, torch.cat([text, make_tokens(9, seed=6)], 1), 12)
        is_launched.append(cache.engine.ahead.is_launched)
        cache.reset()
        assert not cache.engine.ahead.is_launched
        ends.append([text, go_on(model, cache, prompts[1], 12)])
        assert is_launched == [cache is caches[1]] * 3
    for right, found in zip(*ends, strict=True):
        assert torch.equal(found, right)
    assert_same(*caches)


CHANGES: dict[str, Callable[[SphericalCache], object]] = {
    "end_graph": lambda cache: cache.engine.end_graph(),
    "crop": lambda cache: cache.crop(-3),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "fork": lambda cache: cache.fork().detach(),
    "detach": lambda cache: cache.detach(),
    "pass": lambda cache: cache._attached_model()(make_tokens(4), past_key_values=cache),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_cache_comes_behind_the_step(model, new_cache, device, change) -> None:
    cache = new_cache("one tier", is_ahead=True)
    go_on(model, cache, make_tokens(PROMPT), 12)
    assert cache.engine.ahead.is_launched
    assert bool(device.side.queue) is device.side.is_late
    seen = []
    if device.side.is_late:
        known = cache.engine.num_tokens
        # nothing may have changed when the step runs
        device.side.queue.insert(0, lambda: seen.append(cache.engine.num_tokens == known))
        device.side.queue.insert(0, lambda: seen.append(cache.engine.graph is not None))
    CHANGES[change](cache)
    assert not cache.engine.ahead.is_launched
    assert not device.side.queue
    assert all(seen)


def test_a_pass_that_is_refused_leaves_the_step_to_the_next(model, new_cache) -> None:
    caches = new_cache("one tier", is_ahead=False), new_cache("one tier", is_ahead=True)
    found = []
    for cache in caches:
        text = go_on(model, cache, make_tokens(PROMPT), 12)
        wrong = torch.full((2, 1), 3)
        with pytest.raises(ValueError, match="positions"):
            model(text[:, -1:], past_key_values=cache, position_ids=wrong)
        found.append(go_on(model, cache, text, 12))
    assert torch.equal(*found)
    assert_same(*caches)


def test_other_tokens_than_guessed_by_hand(model, new_cache) -> None:
    """The counters are right after a hit, after a miss, and after a step that was never asked."""
    cache = new_cache("one tier", is_ahead=True)
    text = go_on(model, cache, make_tokens(PROMPT), 12)
    steps, guesses = steps_of(cache), guesses_of(cache)
    positions = torch.tensor(cache.engine.num_tokens)[:, None]
    num_right = guesses.num_right
    with torch.no_grad():
        # the last token of the text is the one that was guessed
        model(text[:, -1:], past_key_values=cache, position_ids=positions)
        assert guesses.num_right == num_right + 1
        assert cache.engine.ahead.is_launched
        model((text[:, -1:] + 1) % 90 + 3, past_key_values=cache, position_ids=positions + 1)
    assert guesses.num_right == num_right + 1
    # it is not trusted any more, and counts what the store counts
    assert not cache.engine.ahead.is_launched
    assert steps_of(cache) is steps
    assert steps.positions.tolist() == (positions + 1).tolist()
    store = cache.engine.store
    assert store is not None
    assert steps.used == [store.tail(row, 0).num_tokens for row in (0, 1)]


def test_another_text_is_no_wrong_guess(model, new_cache) -> None:
    cache = new_cache("one tier", is_ahead=True)
    text = go_on(model, cache, make_tokens(PROMPT), 12)
    guesses = guesses_of(cache)
    num_launched = guesses.num_launched
    assert cache.engine.ahead.is_launched
    cache.crop(-2)
    positions = torch.tensor(cache.engine.num_tokens)[:, None]
    with torch.no_grad():
        # as many tokens as were guessed, and others
        model(text[:, -1:] % 90 + 4, past_key_values=cache, position_ids=positions)
    # what follows them is guessed at once
    assert guesses.num_launched == num_launched + 1
    assert guesses.is_trusted


def test_caches_of_one_model_take_turns(model, new_cache, device) -> None:
    first, second = (new_cache("one tier", is_ahead=True) for _ in range(2))
    text = go_on(model, first, make_tokens(PROMPT), 12)
    num_right = guesses_of(first).num_right
    other = go_on(model, second, make_tokens(PROMPT, seed=8), 12)
    # what the first one had launched was over before a pass of the second began
    assert not first.engine.ahead.is_launched
    assert second.engine.ahead.is_launched
    positions = torch.tensor(first.engine.num_tokens)[:, None]
    with torch.no_grad():
        model(text[:, -1:], past_key_values=first, position_ids=positions)
    # and serves all the same
    assert guesses_of(first).num_right == num_right + 1
    alone = new_cache("one tier", is_ahead=False)
    assert torch.equal(go_on(model, alone, make_tokens(PROMPT, seed=8), 12), other)
    assert_same(second, alone)


@torch.no_grad()
def test_whoever_uses_the_decoder_alone_is_never_ahead(model, new_cache) -> None:
    cache = new_cache("one tier", is_ahead=True)
    tokens = make_tokens(PROMPT)
    model.model(input_ids=tokens, past_key_values=cache)
    for at in range(PROMPT, PROMPT + 10):
        positions = torch.full((2, 1), at)
        model.model(input_ids=tokens[:, :1], past_key_values=cache, position_ids=positions)
    # what was replayed is another cache's no more than it is nobody's
    model(tokens, past_key_values=new_cache("one tier", is_ahead=True))
    assert cache.engine.graph is not None
    assert guesses_of(cache).num_launched == 0
    assert not cache.engine.ahead.is_launched


@pytest.mark.parametrize(
    ("options", "gate", "num_hooks"),
    [
        ({}, None, 1),
        ({"steps_ahead": False}, None, 0),
        ({"cuda_graphs": False}, None, 0),
        ({}, GateOptions(), 0),
    ],
)
def test_logits_are_watched_on_a_gpu_without_a_gate(
    model, calibration, monkeypatch, options, gate, num_hooks
) -> None:
    retention = RetentionOptions(gate=gate, copying=0)
    cache = SphericalCache.for_model(model, "45%", retention=retention, calibration=calibration)
    # on a CPU no step is captured
    assert not model._forward_hooks
    monkeypatch.setattr(ModelLayout, "device", torch.device("cuda"))
    on_gpu = SphericalCache(model, cache.engine, **options)
    assert len(model._forward_hooks) == num_hooks
    if not gate:
        forked = on_gpu.fork()
        assert len(model._forward_hooks) == 2 * num_hooks
        del forked
    gc.collect()
    assert len(model._forward_hooks) == num_hooks
    for each in (cache, on_gpu):
        each.detach()
    assert not model._forward_hooks


def test_memory_is_given_up_behind_the_step(device) -> None:
    done = []
    step = StepAhead()
    with device.using(device.side):
        device.side.give(lambda: None)
    step.launch(lambda: device.current.give(lambda: done.append(True)), CPU)
    assert step.is_launched
    assert bool(done) is not device.side.is_late
    del step
    gc.collect()
    assert done


class Listed(Stream):
    """A stream that lists those it has waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


def test_both_streams_wait_where_the_current_one_is_another(device) -> None:
    step, behind, other = StepAhead(), Listed(), Listed()
    with device.using(behind):
        step.launch(lambda: None, CPU)
    with device.using(other):
        step.join()
        assert behind.waits == other.waits == [device.side]
        assert not step.is_launched
        step.join()
    assert len(other.waits) == 1
