# SPDX-License-Identifier: Apache-2.0
"""The controller inside a model: the budget at every step, turns, crops, beams, and what raises."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from transformers import DynamicCache

from sphkv import SphericalCache
from sphkv.cache.retention import RetentionResidency
from sphkv.core.contract import WriteContract
from sphkv.errors import BudgetError
from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.stepping import score
from sphkv.retention.gate import GateOptions

PROMPT = 300


def make_tokens(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, count), generator=generator)


@pytest.fixture(scope="module")
def model(tiny_model) -> Any:
    return tiny_model("llama3")


@pytest.fixture(scope="module")
def calibrations(tiny_model) -> Any:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = calibrate_model(
                tiny_model(name), make_tokens(PROMPT, seed=7), model_id="tiny"
            )
        return made[name]

    return get


@pytest.fixture
def new_cache(tiny_model, calibrations) -> Any:
    """Makes caches under a controller that decode with the reference."""
    made = []

    def make(
        budget: str | int = "60%", name: str = "llama3", calibrated: bool = True, **retention: Any
    ) -> SphericalCache:
        cache = SphericalCache.for_model(
            tiny_model(name),
            budget,
            retention=RetentionOptions(**retention),
            calibration=calibrations(name) if calibrated else None,
            options=CacheOptions(backend="reference"),
        )
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.detach()


def residency(cache: SphericalCache, row: int = 0) -> RetentionResidency:
    found = cache.engine.rows[row].residency
    assert isinstance(found, RetentionResidency)
    return found


def check_budget(cache: SphericalCache) -> None:
    """Under the ceiling now, and at every moment before."""
    limit = cache.engine.limit_bytes()
    assert limit is not None
    assert cache.residency == "retention"
    assert cache.ledger().total == cache.engine.resident_bytes() <= limit
    assert cache.engine.peak_share <= 1


def generate(model: Any, tokens: Tensor, cache: Any, count: int, **options: Any) -> Tensor:
    output: Tensor = model.generate(
        tokens,
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        **options,
    )
    return output[:, tokens.shape[1] :]


def test_a_budget_that_holds_everything_changes_nothing(model, new_cache):
    """With room for bfloat16 of all states the next logits are those of a dense cache."""
    tokens, cache, dense = make_tokens(PROMPT), new_cache("200%"), DynamicCache(config=model.config)
    torch.testing.assert_close(score(model, cache, tokens), score(model, dense, tokens))
    for step in range(3):
        token = make_tokens(1, seed=step)
        ours, exact = score(model, cache, token), score(model, dense, token)
        torch.testing.assert_close(ours, exact, atol=2e-2, rtol=0)
    check_budget(cache)


def test_the_score_decides(model, new_cache):
    """What is kept of a prompt depends on what values its states; unknown scores are named."""
    kept = {}
    for name in ("attention", "votes"):
        cache = new_cache("30%", score=name)
        score(model, cache, make_tokens(max(PROMPT + 100, cache.holds_from)))
        check_budget(cache)
        kept[name] = cache.describe().tiers
    assert kept["attention"] != kept["votes"]
    with pytest.raises(ValueError, match="'atention'; did you mean 'attention'"):
        new_cache(score="atention")


@pytest.mark.parametrize("budget", ["40%", "300B/token", "100KiB"])
def test_bytes_stay_in_the_budget_at_every_step(model, new_cache, budget):
    cache = new_cache(budget)
    score(model, cache, make_tokens(max(PROMPT + 100, cache.holds_from)))
    for step in range(40):
        score(model, cache, make_tokens(1, seed=step))
        check_budget(cache)
    assert len([share for share in cache.describe().tiers.values() if share]) > 1


def test_a_share_is_of_bfloat16(model, new_cache):
    cache = new_cache("40%")
    score(model, cache, make_tokens(500))
    assert cache.ledger().total <= 0.4 * cache.config.geometry.dense_bytes_per_token * 500


def test_a_short_prompt_stays_dense_until_the_budget_can_hold(model, new_cache):
    cache, dense = new_cache(), DynamicCache(config=model.config)
    score(model, cache, make_tokens(1))
    score(model, dense, make_tokens(1))
    for seed in range(3):
        more = make_tokens(60, seed)
        torch.testing.assert_close(score(model, cache, more), score(model, dense, more))
        assert cache.residency == "dense"
    score(model, cache, make_tokens(cache.holds_from - cache.length))
    check_budget(cache)


def test_rows_of_a_padded_batch_are_as_they_would_be_alone(model, new_cache):
    """Each has its own budget, contract and gate; a row can leave."""
    lengths, slots, count = (360, 300), 360, 12
    prompts = [make_tokens(length, seed=length) for length in lengths]
    alone, bytes_alone = [], []
    for prompt in prompts:
        cache = new_cache(gate=GateOptions())
        alone += generate(model, prompt, cache, count).tolist()
        bytes_alone.append(cache.ledger().total)
    tokens = torch.zeros(2, slots, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, slots - prompt.shape[1] :] = prompt
    cache = new_cache(gate=GateOptions())
    mask = (tokens > 0).long()
    assert generate(model, tokens, cache, count, attention_mask=mask).tolist() == alone
    check_budget(cache)
    assert cache.engine.num_tokens == [length + count - 1 for length in lengths]
    for row in range(2):
        gate = residency(cache, row).gate
        assert gate is not None
        assert gate.num_steps == count
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1
    check_budget(cache)


def test_the_prompt_calibrates_the_cache(model, new_cache):
    cache = new_cache(calibrated=False)
    ids = generate(model, make_tokens(600), cache, 4)
    assert cache.get_seq_length() == 603
    assert cache.calibration is not None
    assert cache.calibration.source == "prompt"
    check_budget(cache)
    cache.reset()
    assert torch.equal(generate(model, make_tokens(600), cache, 4), ids)


def test_turns_and_crops(model, new_cache):
    """A second turn goes on; a cropped cache answers as it did before."""
    cache = new_cache("80%")
    score(model, cache, make_tokens(PROMPT))
    turn = make_tokens(20, seed=5)
    once = score(model, cache, turn)
    assert cache.get_seq_length() == PROMPT + 20
    cache.crop(-20)
    torch.testing.assert_close(once, score(model, cache, turn), atol=2e-2, rtol=0)
    score(model, cache, make_tokens(150, seed=6))
    cache.crop(-170)
    check_budget(cache)
    score(model, cache, turn)
    check_budget(cache)


def test_beams_hold_the_budget(model, new_cache):
    cache = new_cache()
    found = generate(model, make_tokens(PROMPT), cache, 40, num_beams=3, num_return_sequences=3)
    assert found.shape == (3, 40)
    assert cache.batch_size == 3
    check_budget(cache)


def test_files_and_forks_go_on_as_the_original(model, new_cache, tmp_path):
    cache = new_cache("41%")
    score(model, cache, make_tokens(500))
    score(model, cache, make_tokens(50, seed=2))
    cache.save(tmp_path / "cache")
    loaded = SphericalCache.load(tmp_path / "cache", model, backend="reference")
    fork = cache.fork()
    assert loaded.config == cache.config
    for seed in range(2):
        # a page seals and old ones are demoted in each of them
        steps = [score(model, each, make_tokens(40, seed)) for each in (cache, loaded, fork)]
        assert torch.equal(steps[0], steps[1])
        assert torch.equal(steps[0], steps[2])
    for each in (cache, loaded, fork):
        check_budget(each)
        each.detach()
    assert residency(cache).num_rebalances > 0


@pytest.mark.parametrize(("name", "budget"), [("mistral", "200%"), ("gpt-oss", "100%")])
def test_windows_beside_full_attention(tiny_model, new_cache, name, budget):
    """A model behind windows alone has nothing to decide; one with full layers decides those."""
    model, cache = tiny_model(name), new_cache(budget, name)
    score(model, cache, make_tokens(max(400, cache.holds_from)))
    for seed in range(3):
        score(model, cache, make_tokens(33, seed))
        check_budget(cache)
    assert len(residency(cache).notes) == (0 if name == "mistral" else 1)


def test_the_gate_sees_every_decision_and_only_its_own(model, new_cache):
    """One margin per pass of this cache, that of the last token; none after it is detached."""
    cache = new_cache(gate=GateOptions())
    score(model, cache, make_tokens(PROMPT))
    gate = residency(cache).gate
    assert gate is not None
    logits = score(model, cache, make_tokens(1))
    score(model, DynamicCache(config=model.config), make_tokens(20))
    assert gate.num_steps == 2
    first, second = logits[-1].topk(2).values.tolist()
    assert gate.trace[-1][0] == pytest.approx(residency(cache).drift / (first - second))
    fork = cache.fork()
    score(model, fork, make_tokens(1))
    copied = residency(fork).gate
    assert copied is not None
    assert (gate.num_steps, copied.num_steps) == (2, 3)
    cache.detach()
    fork.detach()
    assert not model.get_output_embeddings()._forward_hooks


def test_protected_spans_stay_dense(model, new_cache):
    cache = new_cache(protect=[[64, 96]])
    decided: list[WriteContract] = []
    cache.engine.on_contract = decided.append
    score(model, cache, make_tokens(400))
    (contract,) = decided
    assert cache.config.retention is not None
    dense = cache.config.retention.tiers.dense_id
    assert bool((contract.tier_id[..., 64:96] == dense).all())
    assert not bool((contract.tier_id[..., 96:300] == dense).all())


def test_a_high_budget_does_without_the_controller_unless_it_is_asked_for(model, calibrations):
    kinds = []
    for retention in (None, True):
        with SphericalCache.for_model(
            model, "100%", retention=retention, calibration=calibrations("llama3")
        ) as cache:
            score(model, cache, make_tokens(400))
            kinds.append(cache.residency)
    assert kinds == ["uniform", "retention"]


def test_windows_alone_are_served_by_one_tier(tiny_model, calibrations):
    """Where the controller has nothing to decide, it is not what a budget must pay for."""
    model = tiny_model("mistral")
    with SphericalCache.for_model(model, "100%", calibration=calibrations("mistral")) as cache:
        assert cache.holds_from is not None
        score(model, cache, make_tokens(cache.holds_from + 10))
        assert cache.residency == "uniform"
        for seed in range(3):
            score(model, cache, make_tokens(70, seed))
            assert cache.engine.peak_share <= 1


def test_a_short_row_beside_windows_grows_past_them(tiny_model, new_cache):
    """Sinks of a layer behind a window are not kept for ever."""
    model, cache = tiny_model("gpt-oss"), new_cache("100%", "gpt-oss")
    slots = cache.holds_from + 20
    mask = torch.ones(2, slots, dtype=torch.int64)
    mask[1, : slots - 20] = 0
    tokens = make_tokens(slots, batch=2)
    with torch.no_grad():
        for _ in range(9):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, cache.length :]
            model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
            check_budget(cache)
            tokens = make_tokens(32, batch=2)
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    assert cache.engine.rows[1].first_kept[0] > 0
    assert cache.engine.rows[1].first_kept[1] == 0


def test_what_raises(model, new_cache):
    cache = new_cache()
    score(model, cache, make_tokens(PROMPT))
    with pytest.raises(ValueError, match="holds 1 sequences, the step has 2"):
        score(model, cache, make_tokens(1, batch=2))
    cache.detach()
    with pytest.raises(RuntimeError, match="detached"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(BudgetError):
        new_cache("1KiB")
    for never in ("1KiB", "3%"):
        with pytest.raises(BudgetError, match="with one tier"):
            SphericalCache.for_model(model, never, retention=False)
    with pytest.raises(ValueError, match="decides under a budget"):
        SphericalCache.for_model(model, retention=True, tiers="k2v3")
    # what is protected alone is more than a share of so few tokens
    greedy = new_cache("40%", protect=[(0, 400)])
    with pytest.raises(BudgetError):
        score(model, greedy, make_tokens(500))
