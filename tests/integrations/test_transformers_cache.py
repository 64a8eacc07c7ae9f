# SPDX-License-Identifier: Apache-2.0
"""What users do with the cache: batches, chunks, turns, beams, crops, files."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from transformers import DynamicCache

from sphkv import SphericalCache
from sphkv.errors import BudgetError, CacheFileError
from sphkv.integrations.transformers.cache import CacheOptions
from sphkv.integrations.transformers.calibrate import calibrate_model


def make_tokens(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, count), generator=generator)


@pytest.fixture(scope="module")
def model(tiny_model) -> Any:
    return tiny_model("llama3")


@pytest.fixture(scope="module")
def calibration(model) -> Any:
    return calibrate_model(model, make_tokens(300, seed=7), model_id="tiny")


@pytest.fixture(params=["max", "k3v4", "retention"])
def new_cache(request, model, calibration) -> Any:
    """Makes caches whose codes do not depend on what they are given first.

    They decode with the reference: these tests ask whether the cache keeps the right states, and
    kernels that round to eight bits answer differently for one query than for several at once.
    The controller's budget is generous: it decides, and what it keeps is close to dense.
    """
    made = []
    options = CacheOptions(backend="reference")
    is_retention = request.param == "retention"

    def make(target: Any = model) -> SphericalCache:
        made.append(
            SphericalCache.for_model(
                target,
                "150%" if is_retention else None,
                retention=True if is_retention else None,
                tiers=None if is_retention else request.param,
                calibration=calibration,
                options=options,
            )
        )
        return made[-1]

    yield make
    for cache in made:
        cache.detach()


def is_near_dense(cache: SphericalCache) -> bool:
    """Whether what is kept is bfloat16 for the most part."""
    return cache.residency == "retention" or (cache.tier is not None and not cache.tier.is_coded)


def generate(model: Any, tokens: Tensor, cache: Any, count: int = 6, **options: Any) -> Any:
    options = {"do_sample": False, "max_new_tokens": count, **options}
    return model.generate(
        tokens,
        past_key_values=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def test_left_padded_rows_equal_single_runs(model, new_cache):
    lengths = [230, 300, 41]
    rows = [make_tokens(length, seed=length) for length in lengths]
    tokens = torch.zeros(3, 300, dtype=torch.int64)
    mask = torch.zeros(3, 300, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, -row.shape[1] :] = row
        mask[index, -row.shape[1] :] = 1
    cache = new_cache()
    together = generate(model, tokens, cache, attention_mask=mask)
    assert cache.engine.num_tokens == [length + 5 for length in lengths]
    # alone, a row that is too short for the controller's budget stays dense
    tolerance = 5e-3 if cache.residency == "retention" else 1e-4
    for index, row in enumerate(rows):
        alone = generate(model, row, new_cache())
        assert torch.equal(alone.sequences[0, -6:], together.sequences[index, -6:])
        for one, batch in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(batch[index], one[0], atol=tolerance, rtol=0)


def test_padding_without_positions_is_refused(model, new_cache):
    tokens, mask = make_tokens(50, batch=2), torch.ones(2, 50, dtype=torch.int64)
    mask[1, :10] = 0
    cache = new_cache()
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_masks_that_cannot_be_followed_are_refused(model, new_cache):
    tokens, cache = make_tokens(20), new_cache()
    with pytest.raises(ValueError, match="hide some tokens"):
        model(tokens, attention_mask=torch.zeros(1, 1, 20, 20), past_key_values=cache)
    model(tokens, past_key_values=cache)
    mask = torch.ones(1, 21, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be"):
        model(tokens[:, :1], attention_mask=mask[:, :5], past_key_values=cache)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="changes what was padding"):
        model(tokens[:, :1], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_chunked_prefill_is_close_to_one_pass(model, new_cache):
    tokens = make_tokens(500)
    whole, cache = new_cache(), new_cache()
    expected = model(tokens, past_key_values=whole).logits
    parts = [
        model(tokens[:, at : at + 120], past_key_values=cache).logits for at in range(0, 500, 120)
    ]
    error = (torch.cat(parts, 1) - expected).abs().max()
    tolerance = 0.02 if is_near_dense(whole) else 0.3
    assert error < tolerance
    assert cache.engine.num_tokens == whole.engine.num_tokens == [500]
    following = make_tokens(1, seed=5)
    one = model(following, past_key_values=whole).logits
    two = model(following, past_key_values=cache).logits
    torch.testing.assert_close(two, one, atol=tolerance, rtol=0)


def test_generate_in_prefill_chunks(model, new_cache):
    cache = new_cache()
    output = generate(model, make_tokens(300), cache, prefill_chunk_size=90)
    assert output.sequences.shape == (1, 306)
    assert cache.engine.num_tokens == [305]


def test_multi_turn_equals_one_conversation(model, new_cache):
    cache, other = new_cache(), new_cache()
    first = generate(model, make_tokens(310), cache).sequences
    prompt = torch.cat([first, make_tokens(15, seed=3)], 1)
    second = generate(model, prompt, cache)
    assert cache.engine.num_tokens == [prompt.shape[1] + 5]
    again = generate(model, make_tokens(310), other)
    torch.testing.assert_close(again.sequences, first)
    with torch.no_grad():
        model(prompt[:, 315:-1], past_key_values=other)
        logits = model(prompt[:, -1:], past_key_values=other).logits
    # the controller seals before a pass, so what is coded depends on where turns are cut
    tolerance = 5e-3 if cache.residency == "retention" else 1e-4
    torch.testing.assert_close(second.logits[0], logits[:, -1], atol=tolerance, rtol=0)


def test_sampling_is_reproducible(model, new_cache):
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(
            generate(model, make_tokens(200), new_cache(), do_sample=True, top_k=5).sequences
        )
    assert torch.equal(*texts)


def test_beam_search_reorders_rows(model, new_cache):
    options = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    prompt, cache = make_tokens(300), new_cache()
    ours = generate(model, prompt, cache, count=8, **options)
    dense = generate(model, prompt, DynamicCache(), count=8, **options)
    tolerance = 0.01 if is_near_dense(cache) else 0.2
    torch.testing.assert_close(
        ours.sequences_scores, dense.sequences_scores, atol=tolerance, rtol=0
    )
    if tolerance == 0.01:
        assert torch.equal(ours.sequences, dense.sequences)


def test_assisted_decoding_crops(model, new_cache):
    prompt = make_tokens(30).repeat(1, 8)
    plain = generate(model, prompt, new_cache(), count=12)
    assisted = generate(model, prompt, new_cache(), count=12, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, assisted.sequences)


@torch.no_grad()
def test_crop_and_reset(model, new_cache):
    tokens = make_tokens(340)
    cache, fresh = new_cache(), new_cache()
    model(tokens[:, :300], past_key_values=cache)
    model(tokens[:, 300:], past_key_values=cache)
    cache.crop(-40)
    assert cache.get_seq_length() == 300
    model(tokens[:, :300], past_key_values=fresh)
    expected = model(tokens[:, 300:301], past_key_values=fresh).logits
    # what the controller has sealed stays coded when a crop makes it the newest again
    tolerance = 5e-3 if cache.residency == "retention" else 1e-5
    cropped = model(tokens[:, 300:301], past_key_values=cache).logits
    torch.testing.assert_close(cropped, expected, atol=tolerance, rtol=0)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.ledger().total == 0
    model(tokens[:, :300], past_key_values=cache)
    again = model(tokens[:, 300:301], past_key_values=cache).logits
    torch.testing.assert_close(again, expected, atol=0, rtol=0)


@torch.no_grad()
def test_copies_continue_on_their_own(model, new_cache):
    tokens = make_tokens(340)
    cache = new_cache()
    model(tokens, past_key_values=cache)
    other = copy.deepcopy(cache)
    step = make_tokens(1, seed=9)
    expected = model(step, past_key_values=cache).logits
    assert (cache.get_seq_length(), other.get_seq_length()) == (341, 340)
    assert torch.equal(model(step, past_key_values=other).logits, expected)
    other.detach()


@torch.no_grad()
def test_rows_can_be_repeated_and_selected(model, new_cache):
    tokens = make_tokens(340, batch=2)
    cache = new_cache()
    model(tokens, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.batch_size == 2
    step = make_tokens(1, seed=9, batch=2)
    other = new_cache()
    model(tokens[[1, 0]], past_key_values=other)
    expected = model(step, past_key_values=other).logits
    torch.testing.assert_close(
        model(step, past_key_values=cache).logits, expected, atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_save_and_load(model, new_cache, tiny_model, tmp_path):
    tokens = make_tokens(340)
    cache = new_cache()
    model(tokens, past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = SphericalCache.load(tmp_path / "cache", model, backend="reference")
    assert loaded.engine.num_tokens == [340]
    step = make_tokens(1, seed=9)
    expected = model(step, past_key_values=cache).logits
    assert torch.equal(model(step, past_key_values=loaded).logits, expected)
    loaded.detach()
    with pytest.raises(CacheFileError):
        SphericalCache.load(tmp_path / "cache", tiny_model("mistral"))
    if cache.calibration is not None:
        with pytest.raises(CacheFileError, match="rope"):
            SphericalCache.load(tmp_path / "cache", tiny_model("qwen2"))


def test_budget_is_kept_in_use(model):
    with SphericalCache.for_model(model, budget="30%", context=4096) as cache:
        start = cache.holds_from
        assert start is not None
        assert start <= 4096
        prompt = make_tokens(start + 20)
        generate(model, prompt, cache, count=4)
        allowed = 0.3 * cache.config.geometry.dense_bytes_per_token * cache.get_seq_length()
        assert cache.engine.is_coded
        assert cache.ledger().total <= allowed
    with pytest.raises(BudgetError, match="bytes"):
        SphericalCache.for_model(model, budget="1KiB")


def test_training_is_refused(model, new_cache):
    cache = new_cache()
    model.train()
    try:
        with pytest.raises(ValueError, match="inference only"):
            model(make_tokens(20), past_key_values=cache)
    finally:
        model.eval()


def test_a_kept_calibration_is_found_by_the_weights(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPHKV_CACHE", str(tmp_path))
    model = copy.deepcopy(tiny_model("llama3"))
    with SphericalCache.for_model(model, tiers="k3v4") as cache:
        with pytest.raises(ValueError, match="no calibration yet"):
            cache.keep_calibration()
        with torch.no_grad():
            model(make_tokens(600), past_key_values=cache, use_cache=True)
        path = cache.keep_calibration()
        fitted = cache.calibration
    assert path.is_relative_to(tmp_path)
    # where a model was loaded from does not matter, its weights do
    model.config._name_or_path = "elsewhere"
    with SphericalCache.for_model(model, tiers="k3v4") as cache:
        assert cache.calibration is not None
        assert torch.equal(cache.calibration.planes.stages, fitted.planes.stages)
    with torch.no_grad():
        next(iter(model.model.layers[0].self_attn.parameters())).mul_(1.5)
    with SphericalCache.for_model(model, tiers="k3v4") as cache:
        assert cache.calibration is None
