# SPDX-License-Identifier: Apache-2.0
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sphkv.cache.plan import retention_tiers
from sphkv.cli.main import main
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.evaluation.harness.decode import follow_text
from sphkv.evaluation.harness.states import (
    DenseReference,
    LayerStates,
    PromptStates,
    hidden_states,
    read_prompt,
)
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.retention.fit import (
    Probe,
    describe_fit,
    head_sensitivity,
    head_surprise,
    rank_correlation,
    regress_weights,
)
from sphkv.evaluation.retention.study import StudyConfig, recorded_config, summarise
from sphkv.integrations.transformers.listening import listening
from sphkv.retention.measure import MeasureConfig


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 97, (1, count), generator=torch.Generator().manual_seed(1))


def kl_after(model: LlamaForCausalLM, method: DenseReference, states: PromptStates) -> float:
    run = follow_text(MethodSubject(model, method, states.geometry), states.following)
    return float(token_divergence(model, states.hidden[1:], run.hidden).kl.mean())


def test_unchanged_states_give_the_dense_model_and_dropped_ones_do_not():
    model = tiny_model()
    states = read_prompt(model, tokens(96), num_following=16)
    method = DenseReference(states, capacity=16)
    assert kl_after(model, method, states) == pytest.approx(0, abs=1e-5)
    method.crop(80)
    part = states.layers[0]
    kept = torch.rand(2, 80, generator=torch.Generator().manual_seed(3)) < 0.3
    method.change(0, part.keys, part.values, kept=kept)
    assert kl_after(model, method, states) > 1e-5


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, 3)])
def test_sensitivity_predicts_the_loss_of_a_small_move(layer, head):
    model, ids = tiny_model(), tokens(400)
    found = torch.stack([head_sensitivity(model, ids, seed=seed) for seed in range(4)]).mean(0)
    assert found.shape == (2, 4)
    assert all(parameter.requires_grad for parameter in model.parameters())
    dense = hidden_states(model, ids)
    size = 0.01 * float(dense.std())

    def nudge(call):
        output = call.dense()[0]
        if call.layer == layer:
            noise = torch.randn(output.shape[1], 16, generator=torch.Generator().manual_seed(7))
            output[0, :, head] += size * noise
        return output, None

    with torch.no_grad(), listening(model, nudge):
        moved = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    kl = float(token_divergence(model, dense, moved).kl.mean())
    assert kl == pytest.approx(float(found[layer, head]) * size**2 * 16, rel=0.5)


def test_sensitivity_needs_some_text():
    with pytest.raises(ValueError, match="more than 128 tokens, got 100"):
        head_sensitivity(tiny_model(), tokens(100))


def test_a_head_surprises_whose_later_queries_ask_for_what_none_asked_for():
    geometry = KVGeometry(num_layers=1, num_kv_heads=2, num_query_heads=2, head_dim=64)
    ropes = (RopeSpec.from_config({"rope_theta": 10_000.0}, 64),)
    config = MeasureConfig(geometry, ropes, retention_tiers(64))
    generator = torch.Generator().manual_seed(0)
    known, later = 320, 64
    keys, values = (torch.randn(2, known + later, 64, generator=generator) for _ in range(2))
    # both heads rest on a first token that says nothing; then one copies from anywhere
    values[:, 0] = 0
    asked = torch.zeros(2, known + later, dtype=torch.int64)
    ages = (17 * (304 / 17) ** torch.rand(later, generator=generator)).long()
    asked[0, known:] = known - ages
    query = 2 * keys.gather(1, asked[..., None].expand(-1, -1, 64))
    states = PromptStates(
        torch.zeros(1, known + later), torch.zeros(1, 0), [LayerStates(query, keys, values)],
        torch.zeros(1, 1),
    )  # fmt: skip
    found = head_surprise(config, [states], num_later=later)
    # one copy per query, spread over all factors e of age from 17 to 304
    assert float(found[0, 0]) == pytest.approx(1 / math.log(304 / 17), rel=0.35)
    assert float(found[0, 1]) < 0.01


def test_weights_are_found_again_and_ratios_count_alike():
    terms = [(1.0, 0.2, 0.0), (0.1, 0.5, 0.0), (0.0, 0.0, 3.0), (0.0, 0.0, 0.01)]
    weights = torch.tensor([2.0, 0.5, 0.7])

    def probes(*factors: float) -> list[Probe]:
        return [
            Probe("p", "drop", each, 0.0, 0.0, factor * float(torch.tensor(each) @ weights))
            for each, factor in zip(terms, factors, strict=True)
        ]

    found = regress_weights(probes(1, 1, 1, 1))
    assert [found["alpha_theta"], found["alpha_value"], found["alpha_drop"]] == pytest.approx(
        weights.tolist(), rel=1e-3
    )
    # one drop that is nine times as bad and one as foretold: three times
    assert regress_weights(probes(1, 1, 9, 1))["alpha_drop"] == pytest.approx(2.1, rel=1e-3)
    assert regress_weights(probes(1, 1, 1, 9))["alpha_drop"] == pytest.approx(2.1, rel=1e-3)


def test_rank_correlation_ignores_scale_and_shares_ties():
    assert rank_correlation([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894, abs=1e-3)
    with pytest.raises(ValueError, match="3 and 2"):
        rank_correlation([1, 2, 3], [1, 2])


def test_a_fit_is_described_beside_simpler_scores():
    probes = [
        Probe(f"p{at}", "drop", (0.0, 0.0, float(at + 1)), float(-at), 1.0, 0.1 * (at + 1))
        for at in range(4)
    ]
    found = describe_fit(probes, {"alpha_theta": 1.0, "alpha_value": 1.0, "alpha_drop": 0.1})
    assert found["rank_correlation"]["fit"] == pytest.approx(1)
    assert found["rank_correlation"]["age"] == pytest.approx(-1)
    assert found["curve"][3]["predicted"] == pytest.approx(found["curve"][3]["measured"])


def test_summary_leaves_a_variant_empty_that_some_prompt_could_not_use():
    def record(variant: str, workload: str, kl: float | None) -> dict[str, object]:
        return {
            "budget": "5%", "variant": variant, "workload": workload, "kl": kl,
            "same_top1": 0.5, "is_same_answer": True, "peak_share": 0.9,
        }  # fmt: skip

    rows = summarise(
        [
            record("Joint", "lm", 0.1),
            record("Joint", "lm", 0.3),
            record("Joint", "qa", 0.2),
            record("Quant", "lm", None),
            record("Quant", "lm", 0.1),
        ]
    )
    assert rows[0]["lm_kl"] == pytest.approx(0.2)
    assert rows[0]["answers"] == 1.0
    assert rows[0]["used"] == pytest.approx(0.9)
    assert rows[0]["note"] == ""
    assert rows[1]["lm_kl"] is None
    assert rows[1]["note"] == "does not fit"


def test_records_name_files_not_folders():
    config = StudyConfig(model="m", data="/a/b/data", policy="/x/p.json")
    assert recorded_config(config)["data"] == "data"
    assert recorded_config(config)["policy"] == "p.json"
    with pytest.raises(ValueError, match="'Best'"):
        StudyConfig(model="m", data="d", variants=("Best",))


def test_plan_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The ship left the harbour before dawn. " * 60, encoding="utf-8")
    base = ["plan", "--model", "smollm2", "--prompt-file", str(prompt), "--max-tokens", "256"]
    assert main([*base, "--budget", "5%"]) == 1
    assert "bytes" in capsys.readouterr().err
    assert main([*base, "--budget", "60%", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bytes"] <= record["limit_bytes"]
    assert sum(record["tiers"].values()) == 256 * 90
