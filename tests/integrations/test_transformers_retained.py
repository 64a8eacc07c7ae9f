# SPDX-License-Identifier: Apache-2.0
"""A retained cache inside a model: the budget at every step, turns, crops, and what raises."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv.integrations.transformers.retained import RetainedCache, RetentionOptions
from transformers import DynamicCache

from sphkv.errors import BudgetError
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.stepping import score
from sphkv.retention.gate import GateOptions

REFERENCE = RetentionOptions(backend="reference")


def make_tokens(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, count), generator=generator)


@pytest.fixture(scope="module")
def model(tiny_model) -> Any:
    return tiny_model("llama3")


@pytest.fixture(scope="module")
def calibration(model) -> Any:
    return calibrate_model(model, make_tokens(300, seed=7), model_id="tiny")


def generate(model: Any, tokens: Tensor, cache: Any, count: int) -> list[int]:
    output = model.generate(
        tokens, past_key_values=cache, do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    ids: list[int] = output[0, tokens.shape[1] :].tolist()
    return ids


def test_a_budget_that_holds_everything_changes_nothing(model, calibration):
    """With room for bfloat16 of all states the next logits are those of a dense cache."""
    tokens = make_tokens(240)
    dense = DynamicCache(config=model.config)
    with RetainedCache.for_model(
        model, "200%", calibration=calibration, options=REFERENCE
    ) as cache:
        first = score(model, cache, tokens), score(model, dense, tokens)
        torch.testing.assert_close(*first)
        for step in range(3):
            token = make_tokens(1, seed=step)
            ours, exact = score(model, cache, token), score(model, dense, token)
            torch.testing.assert_close(ours, exact, atol=2e-2, rtol=0)


def test_bytes_stay_in_the_budget_at_every_step(model, calibration):
    with RetainedCache.for_model(model, "60%", calibration=calibration, options=REFERENCE) as cache:
        score(model, cache, make_tokens(400))
        dense = model.config.num_hidden_layers * cache.sequences[0].config.geometry.num_kv_heads
        dense *= 2 * 2 * cache.sequences[0].config.geometry.head_dim
        for step in range(40):
            score(model, cache, make_tokens(1, seed=step))
            assert cache.ledger().total <= 0.6 * dense * cache.length
        kept = cache.sequences[0].contract
        assert kept is not None
        assert len(kept.tier_id.unique()) > 1


def test_rows_of_a_padded_batch_are_as_they_would_be_alone(model, calibration):
    """Each has its own budget, contract and gate; a row can leave."""
    options = RetentionOptions(backend="reference", gate=GateOptions())
    lengths, slots, count = (300, 220), 300, 24
    prompts = [make_tokens(length, seed=length) for length in lengths]
    alone, bytes_alone = [], []
    for prompt in prompts:
        with RetainedCache.for_model(
            model, "60%", calibration=calibration, options=options
        ) as cache:
            alone.append(generate(model, prompt, cache, count))
            bytes_alone.append(cache.ledger().total)
    tokens = torch.zeros(2, slots, dtype=torch.int64)
    mask = torch.zeros(2, slots, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, slots - prompt.shape[1] :] = prompt
        mask[row, slots - prompt.shape[1] :] = 1
    with RetainedCache.for_model(model, "60%", calibration=calibration, options=options) as cache:
        output = model.generate(
            tokens,
            attention_mask=mask,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
        )
        assert output[:, slots:].tolist() == alone
        assert [row.ledger().total for row in cache.sequences] == bytes_alone
        assert cache.ledger().total == sum(bytes_alone)
        assert [row.num_tokens() for row in cache.sequences] == [n + count - 1 for n in lengths]
        gates = [row.refresher.gate for row in cache.sequences]
        assert all(gate is not None and gate.num_steps == count for gate in gates)
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.batch_size == 1
        assert cache.ledger().total == bytes_alone[1]


def test_the_prompt_calibrates_the_cache(model):
    with RetainedCache.for_model(model, "60%", options=REFERENCE) as cache:
        ids = generate(model, make_tokens(600), cache, 4)
        assert len(ids) == 4
        assert cache.get_seq_length() == 603
        cache.reset()
        assert generate(model, make_tokens(600), cache, 4) == ids


def test_turns_and_crops(model, calibration):
    """A second turn goes on; a cropped cache answers as it did before."""
    with RetainedCache.for_model(model, "80%", calibration=calibration, options=REFERENCE) as cache:
        score(model, cache, make_tokens(300))
        turn = make_tokens(20, seed=5)
        once = score(model, cache, turn)
        assert cache.get_seq_length() == 320
        cache.crop(-20)
        again = score(model, cache, turn)
        torch.testing.assert_close(once, again, atol=2e-2, rtol=0)


def test_the_gate_sees_every_decision_and_only_its_own(model, calibration):
    """One margin per pass of this cache, that of the last token; none after it is detached."""
    options = RetentionOptions(backend="reference", gate=GateOptions())
    cache = RetainedCache.for_model(model, "60%", calibration=calibration, options=options)
    score(model, cache, make_tokens(200))
    gate = cache.sequences[0].refresher.gate
    assert gate is not None
    logits = score(model, cache, make_tokens(1))
    score(model, DynamicCache(config=model.config), make_tokens(20))
    assert gate.num_steps == 2
    first, second = logits.flatten()[-model.config.vocab_size :].topk(2).values.tolist()
    assert gate.trace[-1][0] == pytest.approx(cache.sequences[0].refresher.drift / (first - second))
    cache.detach()
    assert not model.get_output_embeddings()._forward_hooks


def test_protected_spans_stay_dense(model, calibration):
    options = RetentionOptions(backend="reference", protect=[(64, 96)])
    with RetainedCache.for_model(model, "60%", calibration=calibration, options=options) as cache:
        score(model, cache, make_tokens(400))
        contract = cache.sequences[0].contract
        assert contract is not None
        dense = cache.sequences[0].config.tiers.dense_id
        assert bool((contract.tier_id[..., 64:96] == dense).all())


def test_what_raises(model, calibration, tiny_model):
    with RetainedCache.for_model(model, "60%", calibration=calibration, options=REFERENCE) as cache:
        score(model, cache, make_tokens(100))
        with pytest.raises(ValueError, match="holds 1 sequences, the step has 2"):
            score(model, cache, make_tokens(1, batch=2))
        with pytest.raises(ValueError, match="cannot be copied"):
            cache.batch_repeat_interleave(2)
        cache.reset()
        with pytest.raises(ValueError, match="at least 48 tokens, got 20"):
            score(model, cache, make_tokens(20))
        score(model, cache, make_tokens(400))
        assert cache.get_seq_length() == 400
    with pytest.raises(RuntimeError, match="detached"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with (
        RetainedCache.for_model(model, "2%", calibration=calibration, options=REFERENCE) as cache,
        pytest.raises(BudgetError),
    ):
        score(model, cache, make_tokens(400))
    with pytest.raises(ValueError, match="sliding window"):
        RetainedCache.for_model(tiny_model("mistral"))
