# SPDX-License-Identifier: Apache-2.0
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sphkv.cache.plan import retention_tiers
from sphkv.cli.main import main
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.errors import SplitError
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
    FitConfig,
    Probe,
    describe_fit,
    head_sensitivity,
    head_surprise,
    rank_correlation,
    recorded_config,
    regress_weights,
)
from sphkv.evaluation.retention.study import (
    STUDIES,
    AblationConfig,
    ablation_rows,
    tune_policy,
)
from sphkv.evaluation.runner.continuation import DecodeWindow
from sphkv.evaluation.runner.methods import check_method, find_variant
from sphkv.evaluation.schema import TextQuality
from sphkv.evaluation.sweep.config import LMWorkload, SweepConfig
from sphkv.evaluation.sweep.grid import PointList, SweepRunner
from sphkv.evaluation.validate import check_value
from sphkv.integrations.transformers.listening import listening
from sphkv.retention.measure import MeasureConfig
from sphkv.retention.policy import RetentionPolicy


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


def point(method: str, workload: str, case: str, kl: float | None, **more: Any) -> dict[str, Any]:
    """A record as a sweep writes it, as far as an ablation reads it."""
    margins = {"tokens": [3], "tipped": [1], "drift": 0.5, **more}
    quality = {
        "kl": kl, "kl_max": 2.0, "same_top1": 0.5, "nll_delta": 0.1, "by_margin": margins,
        "is_same": 1.0, "failures": ["derailment"] if kl and kl > 0.25 else [],
        "length_drift": -2, "s_traj": 0.25, "f1_reference": 0.0 if case == "unknown" else 1.0,
        "f1": 0.0 if case == "n" else 1.0, "length": -2 if case == "mute" else 3,
    }  # fmt: skip
    return {
        "method": method,
        "budget": "5%",
        "workload": workload,
        "case": case,
        "split": "development",
        "policy": "",
        "status": "measured" if kl is not None else "refused",
        "quality": quality if kl is not None else None,
        "times": {"tok_s": 10.0, "attend_s": 0.02, "num_measured": 4},
        "memory": {"peak_share": 0.9},
    }


def test_an_ablation_leaves_a_variant_empty_that_some_prompt_could_not_use():
    rows = ablation_rows(
        [
            point("dense", "lm", "a", 0.0),
            point("joint", "lm", "a", 0.1),
            point("joint", "lm", "b", 0.3),
            point("joint", "qa", "q", 0.2),
            point("joint", "needle", "n", 0.4),
            point("joint", "needle", "unknown", 9.0),
            point("joint", "qa", "mute", 0.0),
            point("joint:quant", "lm", "a", None),
            point("joint:quant", "lm", "b", 0.1),
            point("joint:noseg", "lm", "b", 0.4),
            point("joint:noseg", "lm", "a", 0.2),
        ]
    )
    assert [row["variant"] for row in rows] == ["joint", "joint:quant", "joint:noseg"]
    assert [row["lm_above"] for row in rows] == [None, None, "0.1 [0.1, 0.1]"]
    assert rows[0]["lm_kl"] == pytest.approx(0.2)
    # divergence from dense counts whatever dense says, if it says something; what is right only
    # where dense is
    assert rows[0]["qa_kl"] == pytest.approx(3.2)
    assert rows[0]["r_fail"] == pytest.approx(2 / 3)
    assert (rows[0]["num_answered"], rows[0]["qa_f1"], rows[0]["qa_f1_dense"]) == (2, 0.5, 1.0)
    assert rows[0]["delta_t"] == 2
    assert rows[0]["attend_ms"] == pytest.approx(5.0)
    assert rows[0]["note"] == ""
    assert rows[1]["lm_kl"] is None
    assert rows[1]["num_answered"] is None
    assert rows[1]["note"] == "1 refused"


def test_an_ablation_is_a_grid_on_a_split():
    grid = AblationConfig("m", Path("d"), STUDIES["a5"], num_needles=3, num_seeds=5).grid()
    assert grid.methods == ("dense", "joint", "joint:gate")
    assert [part.workload for part in grid.split] == ["lm", "needle"]
    assert grid.qa[0].answerable_f1 > 0
    assert grid.num_seeds == 5
    anything = AblationConfig("m", Path("d"), STUDIES["a5"], answerable_f1=0.0).grid()
    assert anything.qa[0].answerable_f1 == 0
    for variants in STUDIES.values():
        AblationConfig("m", Path("d"), variants).grid()
    with pytest.raises(ValueError, match="at least one of"):
        AblationConfig("m", Path("d"), STUDIES["a3"], num_texts=0, num_questions=0).grid()


def test_a_policy_takes_the_weights_that_most_questions_are_better_with():
    records = [point("joint", "qa", case, 0.2) for case in "abc"]
    records += [point("joint:retrieved=2", "qa", case, 0.1) for case in "abc"]
    # the least mean, but by one question
    records += [point("joint:prefix=0.5", "qa", case, 0.21) for case in "ab"]
    records.append(point("joint:prefix=0.5", "qa", "c", -1.0))
    tuned, found = tune_policy(RetentionPolicy(), records)
    assert tuned.segment_weights == (1.0, 2.0, 1.0)
    assert [row["better"] for row in found["segments"]] == [0, 3, 1]
    worse = [point("joint", "qa", "a", 0.1), point("joint:retrieved=2", "qa", "a", 0.2)]
    assert tune_policy(RetentionPolicy(), worse)[0].segment_weights == (1.0, 1.0, 1.0)
    with pytest.raises(SplitError, match="test data"):
        tune_policy(RetentionPolicy(), [{**worse[0], "split": "test"}])


def test_the_scale_of_drift_tells_changed_tokens_from_others():
    # drift 0.5 and these margins: dangers 5, 0.5, 1, 0.05
    margins = {"margins": [0.1, 1.0, 0.5, 10.0], "tipped_at": [0, 2]}
    tuned, found = tune_policy(RetentionPolicy(), [point("joint", "lm", "a", 0.1, **margins)])
    assert tuned.drift_scale == pytest.approx(1.0)
    assert found["gate"]["share_in_danger"] == 0.5
    assert found["gate"]["share_of_tipped"] == 1.0
    # drift was measured with the policy's own scale
    twice = tune_policy(
        RetentionPolicy(drift_scale=2.0), [point("joint", "lm", "a", 0.1, **margins)]
    )
    assert twice[0].drift_scale == pytest.approx(2.0)
    with pytest.raises(ValueError, match="another policy"):
        tune_policy(RetentionPolicy(), [{**point("joint", "lm", "a", 0.1), "policy": "other"}])
    none = tune_policy(RetentionPolicy(drift_scale=3.0), [point("joint", "lm", "a", 0.1)])
    assert none[0].drift_scale == 3.0
    assert none[1]["gate"] is None


def test_variants_are_methods():
    assert find_variant("joint:decoupled=0.3").options.keep_share == 0.3
    assert find_variant("joint:keepdrop=k3v3").options.fixed_tier == "k3v3"
    assert find_variant("joint:retrieved=2").segment_weights == (1.0, 2.0, 1.0)
    assert find_variant("joint:gate").gate is not None
    assert find_variant("joint").gate is None
    for name in ("joint:prefix", "joint:quant=2", "joint:decoupled=all", "joint:best"):
        with pytest.raises(ValueError, match=r"joint|variant"):
            check_method(name)


def test_variants_decode_through_the_sweep(tiny_model_folder):
    methods = ("joint", "joint:gate", "joint:rebuild", "joint:uniform-head", "joint:keepdrop=k3v3")
    config = SweepConfig(
        str(tiny_model_folder),
        methods,
        ("60%",),
        lm=(LMWorkload(1200, num_following=80),),
        window=DecodeWindow(num_warm=0, num_measured=1),
    )
    points = PointList()
    SweepRunner(config, keep=None, tell=lambda _: None).run(points)
    found = {record["method"]: record for record in points.records}
    assert list(found) == list(methods)
    assert all(record["status"] == "measured" for record in found.values())
    assert all(record["memory"]["peak_share"] <= 1 for record in found.values())
    assert not [fault for record in found.values() for fault in check_quality(record)]
    # the same codes, read by another kernel
    kl = {name: record["quality"]["kl"] for name, record in found.items()}
    assert kl["joint:rebuild"] == pytest.approx(kl["joint"], rel=0.2, abs=1e-5)
    assert found["joint:keepdrop=k3v3"]["memory"]["tiers"].keys() >= {"k3v3"}


def check_quality(record: dict[str, Any]) -> list[tuple[str, str]]:
    return list(check_value(record["quality"], TextQuality))


def test_records_name_files_not_folders():
    config = FitConfig(model="m", data="/a/b/data", calibration="/x/c.safetensors")
    assert recorded_config(config)["data"] == "data"
    assert recorded_config(config)["calibration"] == "c.safetensors"


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
