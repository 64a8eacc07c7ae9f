# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to a cache: its bytes are counted, its ceiling holds, its answers are right."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv import SphericalCache
from sphkv.attention.reference import ReferenceBackend
from sphkv.cache.retention import RetentionResidency
from sphkv.integrations.transformers.cache import CacheOptions
from sphkv.integrations.transformers.calibrate import calibrate_model

MODELS = ("llama3", "qwen3", "gemma3", "gpt-oss")
LONGEST = 1800
# Weights of eight bits, through two layers.
MOST_ERROR = 0.03


@dataclass(frozen=True)
class Setting:
    """What ``for_model`` is asked for, and the prompt."""

    model: str
    kind: str
    budget: str | int | None
    retention: bool | None
    tiers: str | None = None
    beyond: int = 0
    rows: int = 1


@dataclass
class Driver:
    """A cache, the tokens it was given, and what must hold after everything done to it."""

    model: Any
    cache: SphericalCache
    tokens: Tensor
    is_real: Tensor
    is_cropped: bool = False

    def feed(self, cache: SphericalCache, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Logits ``[rows, tokens, vocabulary]`` of new tokens."""
        every = torch.cat([self.is_real, is_real], 1)
        positions = (every.cumsum(1) - 1)[:, -tokens.shape[1] :].clamp(min=0)
        with torch.no_grad():
            output = self.model(
                tokens,
                attention_mask=every.long(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = output.logits
        return logits

    def append(self, tokens: Tensor, is_real: Tensor | None = None) -> None:
        """Feed tokens; their logits are those of the reference on the same pages."""
        is_real = torch.ones_like(tokens, dtype=torch.bool) if is_real is None else is_real
        expected = self._expected(tokens, is_real)
        got = self.feed(self.cache, tokens, is_real)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.is_real = torch.cat([self.is_real, is_real], 1)
        if expected is None:
            expected = self._dense()[:, -tokens.shape[1] :]
        error = (got - expected)[is_real].norm() / expected[is_real].norm()
        assert error <= MOST_ERROR
        self.check()

    def _expected(self, tokens: Tensor, is_real: Tensor) -> Tensor | None:
        """What the reference answers from the same pages; None while the cache is dense."""
        if not self.cache.engine.is_coded:
            return None
        twin = self.cache.fork()
        twin.engine.backend = ReferenceBackend()
        for row in twin.engine.rows:
            row.backend = twin.engine.backend
        logits = self.feed(twin, tokens, is_real)
        twin.reset()
        twin.detach()
        return logits

    def _dense(self) -> Tensor:
        """What the model answers without a cache."""
        positions = (self.is_real.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            output = self.model(
                self.tokens,
                attention_mask=self.is_real.long(),
                position_ids=positions,
                use_cache=False,
            )
        logits: Tensor = output.logits
        return logits

    def check(self) -> None:
        """Lengths, every byte, and the ceiling."""
        cache, engine = self.cache, self.cache.engine
        lengths = self.is_real.sum(1).tolist()
        assert cache.get_seq_length() == self.tokens.shape[1]
        assert engine.num_tokens == lengths
        assert cache.ledger().total == engine.resident_bytes() == held_bytes(cache)
        if engine.is_coded:
            assert [row.num_tokens() for row in engine.rows] == lengths
        limit = engine.limit_bytes()
        # with one tier, slabs that a crop left pages in stay
        is_held = cache.residency == "retention" or not self.is_cropped
        if limit is not None and engine.is_coded and is_held:
            assert engine.peak_share <= 1
            assert cache.ledger().total <= limit

    def crop(self, share: float) -> None:
        """Forget the end; a window that has moved on cannot go back, and says so."""
        keep = max(1, int(self.tokens.shape[1] * share))
        try:
            self.cache.crop(keep - self.tokens.shape[1])
        except ValueError as error:
            if "keeps a window" not in str(error):
                raise
        else:
            self.is_cropped = True
            self.tokens, self.is_real = self.tokens[:, :keep], self.is_real[:, :keep]
        self.check()

    def select(self, rows: Tensor) -> None:
        """Reorder, repeat or drop rows."""
        self.cache.reorder_cache(rows)
        self.tokens, self.is_real = self.tokens[rows], self.is_real[rows]
        self.check()

    def fork(self, token: Tensor) -> None:
        """Go on with a copy; the original answers as if there were none."""
        original, self.cache = self.cache, self.cache.fork()
        self.check()
        step = token.expand(len(self.tokens), 1)
        real = torch.ones_like(step, dtype=torch.bool)
        one, two = (self.feed(cache, step, real) for cache in (original, self.cache))
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
        self.tokens = torch.cat([self.tokens, step], 1)
        self.is_real = torch.cat([self.is_real, real], 1)
        original.reset()
        original.detach()
        self.check()

    def save_and_load(self) -> None:
        """Go on with what was read from a folder."""
        with TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            loaded = SphericalCache.load(
                Path(folder) / "cache", self.model, backend=self.cache.backend_name
            )
        before, self.cache = self.cache, loaded
        self.check()
        before.detach()


def held_bytes(cache: SphericalCache) -> int:
    """Bytes of the tensors themselves."""
    engine = cache.engine
    if engine.store is None:
        state = engine.export_state()
        return sum(
            tensor.nbytes
            for name, tensor in state.items()
            if name.startswith(("keys.", "values.", "queries."))
        )
    notes = [
        tensor.nbytes
        for row in engine.rows
        if isinstance(row.residency, RetentionResidency) and row.residency._notes is not None
        for tensor in row.residency._notes.tensors()
    ]
    return sum(tensor.nbytes for tensor in engine.store.live_tensors()) + sum(notes)


@pytest.fixture(scope="module")
def calibrated(tiny_model) -> Any:
    """Each model with codebooks, made once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            model = tiny_model(name)
            tokens = make_tokens(300, 7)
            made[name] = (model, calibrate_model(model, tokens, model_id="tiny"))
        return made[name]

    return get


def make_tokens(count: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


SETTINGS = st.one_of(
    st.builds(
        Setting,
        st.sampled_from(MODELS),
        st.just("share"),
        st.sampled_from(["25%", "40%", "100%"]),
        st.sampled_from([None, True, False]),
        beyond=st.sampled_from([-60, -1, 0, 30]),
        rows=st.sampled_from([1, 1, 2]),
    ),
    st.builds(
        Setting,
        st.sampled_from(MODELS),
        st.just("total"),
        st.sampled_from([200_000, 400_000]),
        st.sampled_from([None, True, False]),
        beyond=st.sampled_from([0, 100]),
        rows=st.sampled_from([1, 2]),
    ),
    st.builds(
        Setting,
        st.sampled_from(MODELS),
        st.just("tier"),
        st.none(),
        st.sampled_from([None, False]),
        st.sampled_from(["k2v3", "k4v4", "max"]),
        beyond=st.sampled_from([1, 37, 300]),
        rows=st.sampled_from([1, 2]),
    ),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 2, 5, 33, 70])),
        st.tuples(st.just("append"), st.just(1)),
        st.tuples(st.just("crop"), st.sampled_from([0.98, 0.8, 0.4])),
        st.tuples(st.just("select"), st.sampled_from([(0,), (-1, 0), (0, 0, -1)])),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("save"), st.just(0)),
    ),
    min_size=3,
    max_size=7,
)


def start(calibrated: Any, setting: Setting) -> Driver | None:
    """A cache that was given its prompt; None where it would be too long for a test."""
    model, calibration = calibrated(setting.model)
    cache = SphericalCache.for_model(
        model,
        setting.budget,
        retention=setting.retention,
        tiers=setting.tiers,
        context=LONGEST if setting.kind == "total" else None,
        calibration=calibration,
        options=CacheOptions(backend="native"),
    )
    length = (cache.holds_from or 0) + setting.beyond
    if length > LONGEST:
        cache.detach()
        return None
    length, rows = max(1, length), setting.rows
    empty = torch.zeros(rows, 0, dtype=torch.int64)
    driver = Driver(model, cache, empty, empty.bool())
    is_real = torch.ones(rows, length, dtype=torch.bool)
    # rows of a batch are of different lengths, padded on the left
    is_real[1:, : length // 3] = False
    driver.append(make_tokens(length, length, rows), is_real)
    return driver


def carry_out(driver: Driver, operation: tuple[str, Any], seed: int) -> None:
    name, what = operation
    rows = len(driver.tokens)
    if name == "append":
        driver.append(make_tokens(what, seed, rows))
    elif name == "crop":
        driver.crop(what)
    elif name == "select":
        driver.select(torch.tensor([row % rows for row in what]))
    elif name == "repeat" and rows <= 2:
        driver.cache.batch_repeat_interleave(what)
        driver.tokens = driver.tokens.repeat_interleave(what, 0)
        driver.is_real = driver.is_real.repeat_interleave(what, 0)
        driver.check()
    elif name == "fork":
        driver.fork(make_tokens(1, seed))
    elif name == "save":
        driver.save_and_load()


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SETTINGS, OPERATIONS)
def test_whatever_is_done_to_a_cache(calibrated, setting, operations):
    driver = start(calibrated, setting)
    if driver is None:
        return
    try:
        for seed, operation in enumerate(operations):
            carry_out(driver, operation, seed)
    finally:
        driver.cache.detach()
