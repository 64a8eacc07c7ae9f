# SPDX-License-Identifier: Apache-2.0
"""lm-eval runs its tasks through our cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra sphkv[suites] is not installed")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from sphkv.integrations.lm_eval import SphericalLM
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import SphericalCache

TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 14
TEXT = TEXT.rstrip()


def _request(kind: str, *args: Any) -> Instance:
    return Instance(kind, {}, args, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny") / "model"
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{symbol: at for at, symbol in enumerate(symbols, 1)}}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def coded(folder: Path) -> SphericalLM:
    return SphericalLM(str(folder), budget="40%", retention="never")


def test_the_registry_knows_it() -> None:
    assert get_model("sphkv") is SphericalLM


def test_loglikelihood_of_a_dense_cache_is_the_models(folder: Path) -> None:
    lm = SphericalLM(str(folder), budget="dense")
    model, tokenizer = load_model(str(folder))
    request = _request("loglikelihood", TEXT, " and so on")
    ids = torch.tensor([tokenizer(TEXT + " and so on").input_ids])
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    count = len(" and so on")
    wanted = rows[-count - 1 : -1].gather(1, ids[0, -count:, None]).sum()
    assert lm.loglikelihood([request])[0][0] == pytest.approx(float(wanted), abs=1e-3)


def test_loglikelihood_goes_through_the_coded_cache(folder: Path, coded: SphericalLM) -> None:
    dense = SphericalLM(str(folder), budget="dense")
    ends = (" and so on", " never to return", "?")
    requests = [_request("loglikelihood", TEXT, end) for end in ends]
    ours = [score for score, _ in coded.loglikelihood(requests)]
    theirs = [score for score, _ in dense.loglikelihood(requests)]
    # the first token of a continuation is chosen from the dense pass, the others see codes
    assert ours[2] == pytest.approx(theirs[2], abs=1e-3)
    assert ours[0] != pytest.approx(theirs[0], abs=1e-4)
    assert ours == pytest.approx(theirs, rel=0.05)
    # alone, without a shared context, a continuation scores the same
    assert coded.loglikelihood(requests[:1])[0][0] == pytest.approx(ours[0], abs=1e-3)


def test_answers_are_those_of_generate(coded: SphericalLM) -> None:
    options = {"until": [], "max_gen_toks": 6, "do_sample": False}
    said = coded.generate_until([_request("generate_until", TEXT, options)])[0]
    ids = torch.tensor([coded.tok_encode(TEXT)])
    cache = SphericalCache.for_model(coded.model, "40%", retention=False, context=2048)
    output = coded.model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert said == coded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert said
    cut = coded.generate_until(
        [_request("generate_until", TEXT, {**options, "until": [said[2:4]]})]
    )[0]
    assert cut == said.split(said[2:4], 1)[0]


def test_rolling_scores_every_token_once(folder: Path) -> None:
    lm = SphericalLM(str(folder), budget="dense", max_length=300)
    model, tokenizer = load_model(str(folder))
    ids = [lm.prefix_token_id, *tokenizer(TEXT).input_ids]
    total = 0.0
    for begin in range(0, len(ids) - 1, 299):
        part = torch.tensor([ids[begin : begin + 300]])
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=part).logits[0].float(), -1)
        total += float(rows[:-1].gather(1, part[0, 1:, None]).sum())
    found = lm.loglikelihood_rolling([_request("loglikelihood_rolling", TEXT)])[0]
    assert found == pytest.approx(total, rel=1e-4)


def test_sampling_and_batches_are_refused(folder: Path, coded: SphericalLM) -> None:
    with pytest.raises(ValueError, match="greedy"):
        coded.generate_until([_request("generate_until", "a", {"do_sample": True})])
    with pytest.raises(ValueError, match="batch_size=4"):
        SphericalLM(str(folder), batch_size=4)
