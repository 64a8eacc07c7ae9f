# SPDX-License-Identifier: Apache-2.0
"""The one way to measure: parts are as good as single steps, and no byte goes unseen."""

from typing import Any

import pytest
import torch

from sphkv.baselines.registry import BASELINES
from sphkv.cache.method import CacheMethodBase
from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.decode import Decoder, follow_text
from sphkv.evaluation.harness.states import DenseReference, PromptStates, read_prompt
from sphkv.evaluation.harness.subject import MethodSubject, ProductSubject, Subject
from sphkv.evaluation.metrics.divergence import (
    DISTANCE_EDGES,
    TokenDivergence,
    token_divergence,
)
from sphkv.evaluation.runner.continuation import describe_memory
from sphkv.evaluation.runner.session import Placement, Session
from sphkv.integrations.transformers.cache import SphericalCache

NUM_FOLLOWING = 150
OURS = [("dense", "100%"), ("spherical", "60%"), ("joint", "30%")]


@pytest.fixture(scope="module")
def session(tiny_model_folder) -> Session:
    return Session(str(tiny_model_folder), calibration_tokens=256)


@pytest.fixture(scope="module")
def prompt(session) -> PromptStates:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (1, 700 + NUM_FOLLOWING), generator=generator)
    return read_prompt(session.model, ids, num_following=NUM_FOLLOWING)


def stored(session: Session, prompt: PromptStates, name: str, budget: str) -> Subject:
    subject = session.factory.make(name, budget, context=700, num_new=NUM_FOLLOWING)
    subject.store_prompt(prompt)
    return subject


@pytest.mark.parametrize(("name", "budget"), OURS)
def test_parts_that_end_where_pages_seal_are_as_good_as_single_steps(session, prompt, name, budget):
    runs = [
        follow_text(stored(session, prompt, name, budget), prompt.following, is_single=is_single)
        for is_single in (True, False)
    ]
    single, parts = runs
    assert len(single.trace.steps) == NUM_FOLLOWING
    assert len(parts.trace.steps) < NUM_FOLLOWING / 4
    # hidden states are of size 1, new tokens are stored in bfloat16
    torch.testing.assert_close(parts.hidden, single.hidden, rtol=0, atol=0.02)
    # the bytes after a part are those after its last single step
    after = {step.num_tokens: step.after for step in single.trace.steps}
    assert all(after[step.num_tokens] == step.after for step in parts.trace.steps)
    shares = [run.trace.highest(lambda step: step.peak / step.limit, 0.0) for run in runs]
    assert shares[0] <= shares[1] <= shares[0] * 1.1


@pytest.mark.parametrize("name", ["snapkv+adakv+int4@5", "diffkv"])
def test_parts_are_as_good_as_single_steps_for_methods_that_store_one_by_one(session, prompt, name):
    single, parts = (
        follow_text(stored(session, prompt, name, "45%"), prompt.following, is_single=is_single)
        for is_single in (True, False)
    )
    assert len(parts.trace.steps) < NUM_FOLLOWING / 4
    torch.testing.assert_close(parts.hidden, single.hidden, rtol=0, atol=0.02)
    after = {step.num_tokens: step.after for step in single.trace.steps}
    assert all(after[step.num_tokens] == step.after for step in parts.trace.steps)
    runs = (single, parts)
    shares = [run.trace.highest(lambda step: step.peak / step.limit, 0.0) for run in runs]
    assert shares[1] == pytest.approx(shares[0], rel=0.01)
    assert max(shares) <= 1


def test_the_public_cache_is_measured_as_it_is(session, prompt):
    cache = SphericalCache.for_model(
        session.model, "30%", retention=True, calibration=session.calibration
    )
    product = ProductSubject(session.model, cache, "joint")
    product.store_prompt(prompt)
    runs = [
        follow_text(subject, prompt.following, num_timed=2)
        for subject in (stored(session, prompt, "joint", "30%"), product)
    ]
    torch.testing.assert_close(runs[1].hidden, runs[0].hidden, rtol=0, atol=0)
    assert runs[0].trace.columns() == runs[1].trace.columns()
    found = [subject.describe() for subject in (product, stored(session, prompt, "joint", "30%"))]
    assert found[0]["setting"] == found[1]["setting"]
    assert product.decision() is not None


@pytest.mark.parametrize(("name", "budget"), [("joint", "30%"), ("snapkv+adakv+int4@5", "45%")])
def test_weights_of_16_bits_are_measured_too(tiny_model_folder, session, name, budget):
    place = Placement(dtype="bfloat16")
    half = Session(str(tiny_model_folder), calibration_tokens=256, place=place)
    ids = torch.randint(3, 250, (1, 720), generator=torch.Generator().manual_seed(1))
    read = read_prompt(half.model, ids, num_following=20)
    assert read.layers[0].keys.dtype == torch.bfloat16
    subject = half.factory.make(name, budget, context=700, num_new=20)
    subject.store_prompt(read)
    run = follow_text(subject, read.following)
    kl = token_divergence(half.model, read.hidden[1:], run.hidden).kl
    assert 0 < float(kl.mean()) < 0.5
    assert run.trace.highest(lambda step: step.peak / step.limit, 0.0) <= 1


def test_states_may_wait_on_another_device_than_their_queries(session, prompt):
    """Half a prompt read at once, half through the reference that keeps queries elsewhere."""
    first = read_prompt(session.model, prompt.input_ids[:, :350])
    exact = DenseReference(first, capacity=350, queries_on=torch.device("cpu"))
    rest = prompt.input_ids[:, 350:]
    hidden = MethodSubject(session.model, exact, first.geometry).feed(rest).hidden
    whole = exact.extended(first, rest, hidden)
    for ours, right in zip(whole.layers, prompt.layers, strict=True):
        torch.testing.assert_close(ours.query, right.query, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.keys, right.keys, rtol=0, atol=1e-4)


def test_one_pass_over_all_tokens_is_not_what_decoding_sees(session, prompt):
    """What parts are for: the same tokens at once see pages that were never written."""
    single = follow_text(stored(session, prompt, "joint", "30%"), prompt.following)
    whole = Decoder(stored(session, prompt, "joint", "30%")).feed(prompt.following).hidden
    # twice what parts may differ by
    assert float((whole - single.hidden).abs().max()) > 0.04


@pytest.mark.parametrize("name", ["snapkv", "h2o", "kivi"])
def test_a_method_that_states_nothing_gets_single_tokens(session, prompt, name):
    run = follow_text(stored(session, prompt, name, "60%"), prompt.following[:, :5])
    assert [step.num_tokens - step.num_before for step in run.trace.steps] == [1] * 5
    assert name in BASELINES


class Breathing(CacheMethodBase):
    """A method whose bytes rise inside a pass and fall before its end."""

    name = "breathing"

    def __init__(self) -> None:
        self.tokens, self.size = 10, 1000

    def num_tokens(self, layer: int = 0) -> int:
        return self.tokens

    def attend(self, layer: int, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.size = 5000 if layer == 0 else 900
        self.tokens += query.shape[1] if layer else 0
        return query.float()

    def resident_bytes(self) -> int:
        return self.size

    def ledger(self) -> Any:
        from sphkv.store.ledger import ByteLedger

        return ByteLedger(self.size, 0, 0, 0, 0, 0, 0, 0, 0, tables=80)


def test_a_point_is_labelled_by_its_peak(session):
    breathing: Any = Breathing()
    subject = MethodSubject(session.model, breathing, session.shape.geometry)
    run = follow_text(subject, torch.tensor([[5, 6, 7]]), num_timed=2)
    assert [step.peak for step in run.trace.steps] == [5000] * 3
    assert [(step.before, step.after) for step in run.trace.steps][:2] == [(1000, 900), (900, 900)]
    memory = describe_memory(subject, 1000, run.trace)
    assert memory["b_kv"] == 5000 / 11
    assert memory["peak_bytes"] == 5000
    assert memory["b_kv_mean"] == pytest.approx((900 / 11 + 900 / 12 + 900 / 13) / 3)
    dense = session.shape.geometry.dense_bytes_per_token
    assert memory["peak_share"] == memory["dense_share"] == 5000 / (11 * dense)
    assert (memory["table_bytes"], memory["b_kv_tables"]) == (80, 80 / 13)
    assert len(run.step_s) == len(run.attend_s) == 2


def test_every_method_of_ours_says_what_it_chose(session, prompt):
    told = {
        (name, budget): stored(session, prompt, name, budget).describe() for name, budget in OURS
    }
    assert told["dense", "100%"]["setting"] == "max"
    assert told["spherical", "60%"]["residency"] == "uniform"
    assert told["spherical", "60%"]["tiers"][told["spherical", "60%"]["setting"]] > 0.5
    assert told["joint", "30%"]["residency"] == "retention"
    assert len(told["joint", "30%"]["tiers"]) > 1
    assert stored(session, prompt, "spherical", "60%").table_bytes() > 0
    assert stored(session, prompt, "dense", "100%").table_bytes() == 0


def test_codebooks_are_counted_whatever_was_measured_before(session, prompt):
    alone = stored(session, prompt, "spherical", "60%").table_bytes()
    stored(session, prompt, "spherical", "90%")
    assert stored(session, prompt, "spherical", "60%").table_bytes() == alone


def test_a_name_that_does_not_exist_is_nearly_one(session):
    with pytest.raises(ValueError, match="no method 'snapvk'; did you mean snapkv"):
        session.factory.make("snapvk", "50%", context=100)


def divergence(kl: list[float], delta: float) -> TokenDivergence:
    rows = len(kl)
    same, margin = torch.ones(rows, dtype=torch.bool), torch.ones(rows)
    loss = torch.full((rows - 1,), 2.0, dtype=torch.float64)
    return TokenDivergence(
        torch.tensor(kl, dtype=torch.float64), same, margin, margin, loss + delta, loss
    )


def test_a_summary_tells_where_the_loss_lies():
    kl = [0.01] * 32 + [0.04] * 96 + [0.1] * 71 + [9.0]
    found = divergence(kl, 0.02).summary()
    bins = found["kl_by_distance"]
    assert bins["edges"] == list(DISTANCE_EDGES) == [32, 128, 512, 2048]
    assert bins["tokens"] == [32, 96, 72, 0]
    assert bins["kl"][:2] == pytest.approx([0.01, 0.04])
    assert bins["kl"][3] is None
    assert found["kl"] == pytest.approx(sum(kl) / 200)
    assert found["kl_without_worst"] == pytest.approx(sum(kl[:-1]) / 199)
    assert found["kl_max"] == 9.0
    assert found["nll_delta"] == pytest.approx(0.02)
    assert found["verdicts"] == {"kl": False, "nll": False}
    assert divergence([0.05] * 8, 0.009).summary()["verdicts"] == {"kl": True, "nll": True}
    assert divergence([0.06] * 8, -0.2).summary()["verdicts"] == {"kl": False, "nll": True}


def test_divergence_of_a_model_from_itself_is_zero(session, prompt):
    found = token_divergence(session.model, prompt.hidden, prompt.hidden, prompt.following[0])
    assert found.summary()["kl"] == pytest.approx(0, abs=1e-9)
    assert found.summary()["nll_delta"] == 0
    assert len(found.nll) == NUM_FOLLOWING


@pytest.mark.parametrize("is_gpu_used", [False, True])
def test_a_range_is_closed_even_if_what_is_inside_fails(monkeypatch, is_gpu_used):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_gpu_used)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with pytest.raises(KeyError), gpu_range("decode step"):
        raise KeyError("inside")
    assert calls == (["decode step", "end"] if is_gpu_used else [])
