# SPDX-License-Identifier: Apache-2.0
"""Commands end to end on a tiny model."""

import json

from sphkv.cli.main import main


def test_saved_cache_is_inspected_without_its_model(model_folder, text_file, tmp_path, capsys):
    folder, picture = tmp_path / "cache", tmp_path / "map.png"
    prompt = ["--model", str(model_folder), "--prompt-file", str(text_file)]
    argv = ["generate", *prompt, "--tier", "k2v3", "--max-new-tokens", "3", "--json"]
    assert main([*argv, "--save-cache", str(folder)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["inspect", "--cache", str(folder), "--map", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == made["tokens"]
    assert found["ledger"]["payload"] == made["ledger"]["payload"]
    assert found["tier"] == "k2v3"
    for row in found["histogram"]:
        assert sum(row[name] for name in found["tiers"]) == found["tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", "--cache", str(folder)]) == 0
    assert "k2v3" in capsys.readouterr().out


def test_a_cache_and_a_prompt_are_not_both_inspected(model_folder, tmp_path, capsys):
    assert main(["inspect", "--cache", str(tmp_path), "--model", str(model_folder)]) == 1
    assert "not both" in capsys.readouterr().err
    assert main(["inspect"]) == 1
    assert "--cache" in capsys.readouterr().err


def test_retention_stays_below_its_budget(model_folder, text_file, capsys):
    argv = ["generate", "--model", str(model_folder), "--prompt-file", str(text_file), "--json"]
    argv += ["--max-new-tokens", "3"]
    assert main([*argv, "--retention", "--budget", "70%"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["residency"] == "retention"
    assert made["b_kv"] <= 0.7 * made["dense_b_kv"]
    assert main([*argv, "--no-retention", "--budget", "90%"]) == 0
    assert json.loads(capsys.readouterr().out)["residency"] == "uniform"


def test_the_controller_needs_a_budget_and_its_settings_need_it(text_file, capsys):
    argv = ["generate", "--model", "nowhere", "--prompt-file", str(text_file)]
    assert main([*argv, "--retention", "--tier", "k2v3"]) == 1
    assert "k2v3" in capsys.readouterr().err
    assert main([*argv, "--gate"]) == 1
    assert "retention" in capsys.readouterr().err
    assert main([*argv, "--no-retention", "--policy", "policy.json"]) == 1
    assert "policy.json" in capsys.readouterr().err
