# SPDX-License-Identifier: Apache-2.0
"""Data of one split never reaches another."""

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sphkv.errors import SplitError
from sphkv.evaluation import splits
from sphkv.evaluation.splits import (
    Split,
    check_calibration,
    load_manifest,
    open_split,
)
from sphkv.evaluation.workloads import texts
from sphkv.evaluation.workloads.case import token_hash
from sphkv.evaluation.workloads.qa import choose_questions
from sphkv.evaluation.workloads.texts import book_files


def words(text: str, **_: object) -> SimpleNamespace:
    """A tokenizer of words: one number for each."""
    return SimpleNamespace(input_ids=[int.from_bytes(w.encode()) for w in text.split()])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with made-up books of the manifest's names, and a manifest of their hashes."""
    manifest = load_manifest()
    books: dict[str, dict[str, str]] = {}
    for split, known in manifest.books.items():
        folder = tmp_path / "pg19" / ("calibration" if split == "calibration" else "")
        folder.mkdir(parents=True, exist_ok=True)
        for book in known:
            text = " ".join(f"{book}x{at}" for at in range(32_000))
            (folder / f"{book}.txt").write_text(text, encoding="utf-8")
            books.setdefault(split, {})[book] = hashlib.sha256(text.encode()).hexdigest()
    made = replace(manifest, books=books)
    for module in (splits, texts):
        monkeypatch.setattr(module, "load_manifest", lambda: made)
    return tmp_path


def test_no_book_or_question_is_in_two_splits():
    manifest = load_manifest()
    books = [book for split in manifest.books.values() for book in split]
    assert len(books) == len(set(books)) == 10
    assert manifest.questions["development"][1] <= manifest.questions["test"][0]
    for length, firsts in manifest.stretches.items():
        assert 4 * len(firsts) >= 8
        if length <= 16_384:
            gaps = [b - a for a, b in itertools.pairwise(firsts)]
            assert min(gaps) >= length + 512


def test_the_manifest_names_the_files_that_are_there(shared_data):
    for name in ("calibration", "development"):
        split = open_split(name, shared_data, purpose=name)
        assert all(len(split.text(book)) > 200_000 for book in split.books)


def test_test_data_needs_its_purpose_and_a_log(data, tmp_path):
    with pytest.raises(SplitError, match="purpose='development'"):
        open_split("test", data, purpose="development")
    with pytest.raises(SplitError, match="purpose='test'"):
        open_split("development", data, purpose="test")
    with pytest.raises(SplitError, match="needs a log"):
        open_split("test", data, purpose="test")
    with pytest.raises(ValueError, match="no split 'tests'; did you mean test"):
        open_split("tests", data, purpose="test")
    log = tmp_path / "uses.jsonl"
    for note in ("first", "second"):
        open_split("test", data, purpose="test", log=log, note=note)
    assert [json.loads(line)["note"] for line in log.read_text().splitlines()] == [
        "first",
        "second",
    ]


def test_a_split_gives_only_its_own_books(data):
    split = open_split("development", data, purpose="development")
    with pytest.raises(SplitError, match="book 5962 belongs to test"):
        split.text("5962")
    with pytest.raises(SplitError, match="belongs to no split"):
        split.text("1")
    (data / "pg19" / "10146.txt").write_text("another edition", encoding="utf-8")
    with pytest.raises(SplitError, match="is not the file"):
        split.text("10146")
    assert [file.stem for file in book_files(data)] == ["10146", "10321", "10356", "7412"]
    with pytest.raises(SplitError, match=r"10146\.txt is a development book"):
        check_calibration(data / "pg19" / "10146.txt")
    assert check_calibration(Path("10046.txt")) == Path("10046.txt")


def test_stretches_are_what_the_manifest_says(data):
    split = open_split("development", data, purpose="development")
    cases = split.stretches(words, length=1024, num_following=16)
    assert len(cases) == 12
    assert [case.facets["text"] for case in cases[:4]] == list(split.books)
    assert {case.facets["skip"] for case in cases} == set(load_manifest().stretches[1024])
    ids = words(split.text("10321")).input_ids
    case = next(c for c in cases if c.case_id == "lm-1024-10321-14000")
    assert case.prompt_ids == tuple(ids[14_000:15_024])
    assert case.following_ids == tuple(ids[15_024:15_040])
    assert case.split == "development"
    assert len({token_hash(c.prompt_ids) for c in cases}) == 12
    some = split.stretches(words, length=1024, num_following=16, part=slice(3, 5))
    assert [case.case_id for case in some] == [case.case_id for case in cases[3:5]]
    with pytest.raises(ValueError, match="length must be one of"):
        split.stretches(words, length=1000, num_following=16)
    with pytest.raises(ValueError, match="has 32000 tokens, not"):
        split.stretches(words, length=31_744, num_following=16)


def test_needles_differ_between_splits_and_in_length(data, tmp_path):
    found = {}
    for name in ("development", "test"):
        split = open_split(name, data, purpose=name, log=tmp_path / "log")
        found[name] = split.needles(words, length=900)
        assert len(found[name]) == 40
        assert {case.case_id.split("-")[2] for case in found[name]} == set(split.books)
        for case in found[name]:
            (*_, last) = words(f"{case.answers[0]}.").input_ids
            at = case.prompt_ids.index(last)
            assert at / 900 == pytest.approx(case.facets["depth"], abs=0.05)
            assert len(case.prompt_ids) == 900
    sizes = {len(case.answers[0]) for case in found["test"] if case.facets["kind"] == "number"}
    assert sizes == {3, 5, 8, 12}
    assert len({case.facets["depth"] for case in found["test"]}) == 7
    long = [
        {case.answers[0] for case in cases if len(case.answers[0]) > 4} for cases in found.values()
    ]
    assert not long[0] & long[1]


def test_calibration_has_neither_needles_nor_questions(data):
    split = open_split("calibration", data, purpose="calibration")
    with pytest.raises(SplitError, match="no needles"):
        split.needles(words, length=900)
    with pytest.raises(SplitError, match="no questions"):
        split.question_ids("hotpotqa")


def test_questions_of_the_test_split_must_be_opened(data):
    with pytest.raises(SplitError, match="question 40 belongs to the test"):
        choose_questions(data, ("hotpotqa",), 1, ("hotpotqa-40",))
    with pytest.raises(SplitError, match="question 49 belongs to the test"):
        choose_questions(data, ("hotpotqa",), 50, ())
    test = Split("test", data, load_manifest())
    assert test.question_ids("2wikimqa")[0] == "2wikimqa-40"
    assert len(test.question_ids("hotpotqa")) == 100
