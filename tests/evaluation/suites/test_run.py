# SPDX-License-Identifier: Apache-2.0
"""A board from a tiny random model: run, go on, show; acceptance; kvpress's columns."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sphkv.codec.calibration_file import save_calibration
from sphkv.evaluation.records import content_id
from sphkv.evaluation.suites.acceptance import (
    AcceptanceRunner,
    acceptance_rows,
    parse_columns,
    speculate,
)
from sphkv.evaluation.suites.board import Duel, build_board, weighted_interval, write_board
from sphkv.evaluation.suites.columns import Bench
from sphkv.evaluation.suites.config import PRESETS, SuiteConfig, load_suite_config
from sphkv.evaluation.suites.records import (
    AnswerIdentity,
    SuiteFile,
    load_acceptances,
    load_answers,
)
from sphkv.evaluation.suites.run import SuiteRunner
from sphkv.evaluation.suites.samples import PromptSet, Sample, read_prompts

WORDS = "one two three four five six seven eight nine ten " * 14


def _prompts(model: Any, tokenizer: Any) -> PromptSet:
    """Two prompts whose right answer is what the random model says, one it cannot answer."""
    samples = []
    for number in range(2):
        context, question = f"{number} {WORDS}", "\nWhat now? It is"
        ids = torch.tensor([tokenizer(context + question).input_ids])
        with torch.no_grad():
            said = model.generate(ids, max_new_tokens=3, do_sample=False)
        answer = tokenizer.decode(said[0, ids.shape[1] :])
        samples.append(_sample("known", number, context, question, answer))
        samples.append(_sample("unknown", number, context, question, "no such words"))
    return PromptSet(tuple(samples), "tiny")


def _sample(task: str, number: int, context: str, question: str, answer: str) -> Sample:
    return Sample(
        suite="made",
        task=task,
        sample_id=f"{task}-{number}",
        length=1024,
        context=context,
        question=question,
        answers=(answer,),
        metric="all",
        max_new_tokens=4,
    )


@pytest.fixture(scope="module")
def config(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SuiteConfig:
    from sphkv.integrations.models import load_model

    model, tokenizer = load_model(str(tiny_model_folder))
    path = tmp_path_factory.mktemp("suite") / "prompts.jsonl"
    _prompts(model, tokenizer).write(path)
    return SuiteConfig(
        str(tiny_model_folder),
        ("dense", "spherical", "joint", "snapkv", "int2"),
        ("50%",),
        prompts=(path,),
        num_threads=1,
    )


@pytest.fixture(scope="module")
def records(config: SuiteConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "answers.jsonl"
    lines: list[str] = []
    runner = SuiteRunner(config, keep=path.parent, tell=lines.append)
    with SuiteFile(path) as file:
        # no time at all: nothing is begun
        none = runner.run(file, max_minutes=-1.0)
        assert (none.num_measured, none.num_left) == (0, 36)
        done = runner.run(file)
    assert (done.num_measured, done.num_left, done.num_failed) == (36, 0, 0)
    assert any("min left" in line for line in lines)
    return path


def test_every_column_is_measured_under_its_budget(records: Path) -> None:
    answers = load_answers([records])
    assert len(answers) == 4 * (1 + 4 * 2)
    by_status = {row["method"]: row["status"] for row in answers}
    assert by_status["dense"] == by_status["joint"] == by_status["snapkv"] == "measured"
    for row in answers:
        if row["status"] == "measured" and row["method"] != "dense":
            assert row["bytes"]["limit_share"] <= 1.0
            assert row["bytes"]["dense_share"] <= 0.5
    dense = {row["sample"]: row["score"] for row in answers if row["method"] == "dense"}
    assert dense == {"known-0": 1.0, "known-1": 1.0, "unknown-0": 0.0, "unknown-1": 0.0}


def test_a_hidden_question_is_read_after_the_context(config: SuiteConfig, records: Path) -> None:
    answers = [row for row in load_answers([records]) if row["method"] == "spherical"]
    seconds = {row["mode"]: row["times"]["question_s"] for row in answers}
    assert seconds["hidden"] > seconds["visible"]
    bench, given = Bench(config), read_prompts(config.prompts[0])
    ids = given.ids(bench.tokenizer, given.samples[0])
    read = bench.read(given.samples[0], ids)
    assert read.stored("visible").num_tokens == len(ids.prompt)
    hidden = read.stored("hidden")
    assert hidden.num_tokens == len(ids.context) == hidden.layers[0].keys.shape[1]


def test_a_file_of_codebooks_serves_every_prompt(config: SuiteConfig, tmp_path: Path) -> None:
    given = read_prompts(config.prompts[0])
    first, other = given.samples[0], given.samples[2]
    bench = Bench(config)
    read = bench.read(first, given.ids(bench.tokenizer, first))
    assert bench.calibration_id == "prompt"
    bench.answer(read, "visible", "spherical", "50%", max_new_tokens=2)
    (fitted,) = read.calibrations.values()
    path = tmp_path / "codebooks.safetensors"
    save_calibration(fitted, path)
    bench = Bench(replace(config, calibration=path))
    assert bench.calibration_id not in ("", "prompt")
    read = bench.read(other, given.ids(bench.tokenizer, other))
    said = bench.answer(read, "hidden", "spherical", "50%", max_new_tokens=2)
    assert said.bytes["dense_share"] <= 0.5
    # nothing was fitted on this prompt
    (used,) = read.calibrations.values()
    assert torch.equal(used.planes.mean, fitted.planes.mean)


def test_pages_of_the_controller_may_be_chosen(config: SuiteConfig) -> None:
    sizes = {}
    for tokens in (None, 64):
        bench = Bench(replace(config, page_tokens=tokens))
        retention = bench.make_cache("joint", "50%", 1024).config.retention
        assert retention is not None
        sizes[tokens] = {tier.page_tokens for tier in retention.tiers if tier.is_coded}
    assert sizes[64] == {64}
    assert sizes[None] != {64}


def test_a_run_goes_on_where_it_stopped(config: SuiteConfig, records: Path) -> None:
    whole = records.read_bytes()
    lines = whole.splitlines(keepends=True)
    # killed in the middle of the last line
    records.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    runner = SuiteRunner(config, keep=records.parent, tell=lambda _: None)
    with SuiteFile(records) as file:
        done = runner.run(file)
        assert done.num_measured == 2
    again = {row["id"]: (row["answer"], row["score"]) for row in load_answers([records])}
    before = [row for row in map(_parsed, lines) if row["kind"] == "answer"]
    assert again == {row["id"]: (row["answer"], row["score"]) for row in before}


def _parsed(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_board_leaves_out_what_dense_cannot_do(records: Path, tmp_path: Path) -> None:
    board = build_board([records])
    assert [(task.task, task.is_counted) for task in board.tasks] == [
        ("known", True),
        ("unknown", False),
    ]
    assert all(set(cell.by_task) <= {"known"} for cell in board.cells)
    dense = [cell for cell in board.cells if cell.method == "dense"]
    assert {cell.mode for cell in dense} == {"visible", "hidden"}
    assert all(cell.score is not None and cell.score.mean == 1.0 for cell in dense)
    page, data = write_board(board, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "Best method by budget and length" in text
    assert "| joint | 50% |" in text
    assert data.stat().st_size > 0
    with pytest.raises(ValueError, match="answers of dense"):
        build_board([])


def test_our_cache_meets_every_method_of_its_budget(records: Path, tmp_path: Path) -> None:
    lines = [_parsed(line) for line in records.read_bytes().splitlines()]
    changed = tmp_path / "changed.jsonl"
    with changed.open("w", encoding="utf-8") as file:
        for line in lines:
            if line["kind"] == "answer" and line["method"] == "joint":
                line["method"] = "auto"
                # of the two samples that count, ours misses one
                line["score"] = float(line["sample"] == "known-0")
            if line["kind"] == "answer" and line["method"] == "snapkv":
                line["score"] = 0.0
            file.write(json.dumps(line) + "\n")
    board = build_board([changed])
    found = {(duel.mode, duel.other): duel for duel in board.duels}
    assert {duel.budget for duel in board.duels} == {"50%"}
    for mode in ("visible", "hidden"):
        assert _mean(found[mode, "dense"]) == pytest.approx(-0.5)
        snapkv = found[mode, "snapkv"]
        assert _mean(snapkv) == pytest.approx(0.5)
        assert snapkv.difference is not None
        assert snapkv.difference.count == 2
        assert (snapkv.refused, snapkv.other_refused) == (0, 0)
    assert "Our cache against the others" in board.markdown()


def _mean(duel: Duel) -> float:
    assert duel.difference is not None
    return duel.difference.mean


def test_a_duel_counts_what_either_side_refused(records: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.jsonl"
    none = {"status": "refused", "reason": "too small", "score": None, "bytes": None, "times": None}
    with changed.open("w", encoding="utf-8") as file:
        for line in map(json.loads, records.read_text(encoding="utf-8").splitlines()):
            if line["kind"] == "answer" and line["method"] == "joint":
                line |= {"method": "auto"} | (none if line["sample"] == "known-0" else {})
            if line["kind"] == "answer" and line["method"] == "snapkv":
                line |= none
            file.write(json.dumps(line) + "\n")
    found = {(duel.mode, duel.other): duel for duel in build_board([changed]).duels}
    snapkv, dense = found["visible", "snapkv"], found["visible", "dense"]
    assert (snapkv.difference, snapkv.refused, snapkv.other_refused) == (None, 1, 2)
    assert (dense.refused, dense.other_refused) == (1, 0)
    assert dense.difference is not None
    assert dense.difference.count == 1


def test_a_board_shows_one_device(records: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.jsonl"
    with changed.open("w", encoding="utf-8") as file:
        for line in map(json.loads, records.read_text(encoding="utf-8").splitlines()):
            if line["kind"] == "run":
                line["setup"]["config"]["device"] = "cuda"
            else:
                # as older answers are: only their run says where they come from
                del line["device"], line["backend"], line["page_tokens"]
            file.write(json.dumps(line) + "\n")
    assert len(load_answers([records, changed])) == 2 * len(load_answers([records]))
    with pytest.raises(ValueError, match="differ in device: 'cpu' and 'cuda'"):
        build_board([records, changed])


def test_older_answers_are_not_measured_again(
    config: SuiteConfig, records: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older.jsonl"
    later = SuiteFile.later
    kept = {**AnswerIdentity.__annotations__}
    with older.open("w", encoding="utf-8") as file:
        for line in map(json.loads, records.read_text(encoding="utf-8").splitlines()):
            if line["kind"] == "answer":
                line = {name: value for name, value in line.items() if name not in later}
                line["id"] = content_id({name: line[name] for name in kept if name in line})
            file.write(json.dumps(line) + "\n")
    runner = SuiteRunner(config, keep=tmp_path, tell=lambda line: None)
    with SuiteFile(older) as answers:
        assert runner.run(answers, max_minutes=-1.0).num_left == 0
    other = SuiteRunner(replace(config, page_tokens=128), keep=tmp_path, tell=lambda line: None)
    with SuiteFile(older) as answers:
        assert other.run(answers, max_minutes=-1.0).num_left == 8  # of joint


def test_methods_from_outside_get_the_room_that_their_answer_needs(
    config: SuiteConfig, tmp_path: Path
) -> None:
    rooms: list[int] = []

    class Outside:
        def answer(self, method: str, budget: str, *parts: Any, **flags: Any) -> dict[str, Any]:
            rooms.append(flags["max_new_tokens"])
            count = min(rooms[-1], 20)
            told = {"stored": 1, "peak": 1, "limit": 2, "dense": 4, "setting": "s"}
            times = dict.fromkeys(("prefill_s", "store_s", "question_s", "decode_s"), 0.0)
            return {
                "text": "",
                "num_tokens": count,
                "bytes": {**told, "realisation": "format-only"},
                "times": times,
            }

    prompts = read_prompts(config.prompts[0])
    samples = tuple(replace(sample, max_new_tokens=64) for sample in prompts.samples[:1])
    file = tmp_path / "prompts.jsonl"
    PromptSet(samples, "tiny").write(file)
    one = replace(config, methods=("quantized:quanto-4",), modes=("hidden",), prompts=(file,))
    runner = SuiteRunner(one, keep=tmp_path, tell=lambda line: None)
    runner._outside = Outside()  # type: ignore[assignment]
    with SuiteFile(tmp_path / "answers.jsonl") as answers:
        runner.run(answers)
    (row,) = load_answers([tmp_path / "answers.jsonl"])
    assert rooms == [8, 16, 32]
    assert (row["num_tokens"], row["status"], row["backend"]) == (20, "measured", "")


def test_the_kept_board_is_what_its_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    folder = Path("results/suites")
    board = build_board(sorted(folder.glob("*.jsonl")))
    assert board.markdown() == (folder / "board.md").read_text(encoding="utf-8")


def test_weighted_means_stay_within_their_values() -> None:
    # two tasks that weigh alike, one with a single sample
    found = weighted_interval([1.0, 1.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3, 1.0])
    assert found.mean == pytest.approx((2 / 3 + 1) / 2)
    assert 0.0 <= found.low < found.mean < found.high <= 1.0
    assert found.count == 4
    assert weighted_interval([0.5, 0.5], [1.0, 9.0]).low == pytest.approx(0.5)


def test_bad_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"kind":"answer","run":"x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1, answer: is missing"):
        load_answers([tmp_path / "r.jsonl"])


def test_configs_are_checked() -> None:
    with pytest.raises(ValueError, match="snapkvv"):
        SuiteConfig("m", ("snapkvv",), ("10%",), prompts=(Path("p"),))
    with pytest.raises(ValueError, match="prompts"):
        SuiteConfig("m", ("dense",), ())
    with pytest.raises(ValueError, match="quanto-3"):
        SuiteConfig("m", ("quantized:quanto-3",), ("50%",), prompts=(Path("p"),))
    with pytest.raises(ValueError, match="kivi needs at least one budget"):
        SuiteConfig("m", ("kivi",), (), prompts=(Path("p"),))
    for shard in ("2/2", "1", "a/3"):
        with pytest.raises(ValueError, match=f"got '{shard}'"):
            SuiteConfig("m", ("dense",), (), prompts=(Path("p"),), shard=shard)
    for name in PRESETS:
        assert load_suite_config(None, name, {}).max_minutes
    changed = load_suite_config(None, "small-cpu", {"model": "other", "prompts": ["a"]})
    assert changed.model == "other"


def test_a_method_may_have_budgets_of_its_own() -> None:
    methods = ("dense", "auto", "kivi 25%", "joint:prefix=0.25 10% 5%")
    config = SuiteConfig("m", methods, ("40%",), modes=("hidden",), prompts=(Path("p"),))
    assert config.grid() == [
        ("hidden", "dense", "100%"),
        ("hidden", "auto", "40%"),
        ("hidden", "kivi", "25%"),
        ("hidden", "joint:prefix=0.25", "10%"),
        ("hidden", "joint:prefix=0.25", "5%"),
    ]


def test_shards_share_the_samples(config: SuiteConfig, tmp_path: Path) -> None:
    found = []
    for part in range(3):
        shard = replace(config, methods=("dense",), shard=f"{part}/3")
        runner = SuiteRunner(shard, keep=tmp_path, tell=lambda _: None)
        with SuiteFile(tmp_path / f"{part}.jsonl") as file:
            runner.run(file)
        found.append([row["sample"] for row in load_answers([tmp_path / f"{part}.jsonl"])])
    assert sorted(map(len, found)) == [1, 1, 2]
    assert len({name for names in found for name in names}) == 4


def test_speculation_by_hand() -> None:
    # proposals of two: 1 2 accepted and 3 comes along; 9 refused, 4 comes; 5 accepted, the end
    found = speculate([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], 2)
    assert (found.num_matched, found.num_passes) == (4, 3)
    assert speculate([1, 2, 3], [0, 0, 0], 4).num_passes == 3
    assert speculate([], [], 4).num_passes == 0
    with pytest.raises(ValueError, match="1 proposals for 2"):
        speculate([1, 2], [1], 4)
    assert parse_columns(["dense", "auto=10%"]) == [("dense", "100%"), ("auto", "10%")]
    with pytest.raises(ValueError, match="give 'fp8' a budget"):
        parse_columns(["fp8"])


def test_a_model_accepts_its_own_draft(config: SuiteConfig, tmp_path: Path) -> None:
    config = replace(config, num_samples=1)
    runner = AcceptanceRunner(config, config.model, num_proposed=4, tell=lambda _: None)
    columns = [("dense", "100%"), ("joint", "30%"), ("int2", "1%")]
    with SuiteFile(tmp_path / "a.jsonl") as file:
        assert runner.run(file, columns, max_new_tokens=20) == 6
        assert runner.run(file, columns, max_new_tokens=20) == 0
    found = load_acceptances([tmp_path / "a.jsonl"])
    rows = {row["method"]: row for row in acceptance_rows(found)}
    assert set(rows) == {"dense", "joint"}
    # pages are bfloat16 and the draft's pass is float32, so a close call may differ
    assert rows["dense"]["rate"].mean >= 0.9
    assert rows["dense"]["per_pass"].mean >= 3.0
    assert [row["status"] for row in found if row["method"] == "int2"] == ["refused"] * 2


def _need_kvpress() -> None:
    """Looked up and not imported: the import wraps attention functions that are registered."""
    if importlib.util.find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")


@pytest.mark.parametrize("name", ["snapkv", "h2o", "pyramidkv", "adakv-snapkv"])
def test_kvpress_answers_under_the_same_budget(config: SuiteConfig, name: str) -> None:
    _need_kvpress()
    from sphkv.integrations.kvpress import OutsideCaches

    bench = Bench(config)
    outside = OutsideCaches(bench.model, bench.tokenizer)
    context = tuple(range(1, 200)) * 3
    said = outside.answer(
        f"kvpress:{name}", "40%", context, (5, 6, 7), max_new_tokens=4, is_done=lambda _: False
    )
    assert said["num_tokens"] <= 4
    assert said["bytes"]["stored"] < said["bytes"]["peak"] <= said["bytes"]["limit"] * 1.02
    with pytest.raises(ValueError, match="stay dense"):
        outside.answer(
            f"kvpress:{name}", "1%", context, (5, 6), max_new_tokens=9, is_done=lambda _: False
        )


def test_a_quantised_cache_refuses_a_smaller_budget(config: SuiteConfig) -> None:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from sphkv.integrations.kvpress import OutsideCaches

    bench = Bench(config)
    outside = OutsideCaches(bench.model, bench.tokenizer)
    context = tuple(range(1, 200)) * 3
    given: Any = {"max_new_tokens": 3, "is_done": lambda _: False}
    said = outside.answer("quantized:quanto-4", "60%", context, (5, 6), **given)
    assert said["bytes"]["peak"] <= said["bytes"]["limit"]
    with pytest.raises(ValueError, match="takes"):
        outside.answer("quantized:quanto-4", "20%", context, (5, 6), **given)


def test_our_baselines_choose_as_kvpress_does(config: SuiteConfig) -> None:
    _need_kvpress()
    from sphkv.evaluation.suites.crosscheck import cross_check

    bench, given = Bench(config), read_prompts(config.prompts[0])
    read = bench.read(given.samples[0], given.ids(bench.tokenizer, given.samples[0]))
    found = {row.method: row for row in cross_check(bench, read, share=0.25)}
    assert found["expected_attention"].mean > 0.99
    assert found["streaming_llm"].mean > 0.99
    # the others differ by one definition each, and by nothing else
    assert all(row.aligned > 0.99 for row in found.values())
    assert found["h2o"].mean < found["h2o"].aligned
