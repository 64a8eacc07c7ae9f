# SPDX-License-Identifier: Apache-2.0
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sphkv.errors import SplitError
from sphkv.evaluation.sweep.config import QAWorkload
from sphkv.evaluation.workloads.case import Case, check_context
from sphkv.evaluation.workloads.qa import (
    Question,
    answerable_questions,
    choose_questions,
    common_distractors,
    fit_prompt,
    made_up_questions,
    order_passages,
    qa_cases,
    read_questions,
    shared_cases,
    spread_passages,
)
from sphkv.evaluation.workloads.texts import (
    filler_name,
    filler_text,
    hide_needles,
    hub_texts,
    lm_cases,
    made_up_text,
    make_needles,
    needle_cases,
)
from sphkv.evaluation.workloads.tools import read_tool_tasks


def words(text, **_):
    """A tokenizer of words: ids are their hashes, and the text can be found again."""
    return SimpleNamespace(input_ids=[hash(word) for word in text.split()])


def letters(text, **_):
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_a_case_asks_for_exactly_one_thing():
    with pytest.raises(ValueError, match="following tokens or an answer"):
        Case("c", "lm", "g", (1, 2))
    with pytest.raises(ValueError, match="following tokens or an answer"):
        Case("c", "lm", "g", (1, 2), following_ids=(3,), max_new_tokens=4)
    with pytest.raises(ValueError, match="shares 3 of 2"):
        Case("c", "qa", "g", (1, 2), num_shared=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="no prompt"):
        Case("c", "qa", "g", (), max_new_tokens=4)


def test_a_context_is_refused_and_never_cut():
    check_context(90, 100, extra=10)
    check_context(10**6, None, extra=10)
    with pytest.raises(ValueError, match="more than the model's 100"):
        check_context(91, 100, extra=10)


def test_made_up_text_is_the_same_every_time():
    assert made_up_text(500, 3) == made_up_text(500, 3)
    assert made_up_text(500, 3) != made_up_text(500, 4)
    assert len(made_up_text(500, 3)) >= 500


def test_strided_prompts_follow_the_text(tmp_path):
    (tmp_path / "pg19").mkdir()
    for book in range(8):
        text = "".join(chr(97 + (i * (book + 1)) % 26) for i in range(2000))
        (tmp_path / "pg19" / f"{book}.txt").write_text(text)
    cases = lm_cases(letters, data=tmp_path, context=50, num_following=10, num_prompts=9, stride=20)
    first, again = cases[0], cases[8]
    assert [first.facets["text"], again.facets["text"]] == ["0", "0"]
    assert first.prompt_ids[20:] == again.prompt_ids[:30]
    assert first.following_ids == again.prompt_ids[30:40]
    assert len({case.case_id for case in cases}) == 9
    with pytest.raises(FileNotFoundError, match="no books"):
        lm_cases(letters, data=tmp_path / "x", context=5, num_following=2, num_prompts=1)


def test_needles_lie_at_their_depths():
    needles = make_needles((0.0, 0.5, 1.0), seed=3)
    text = hide_needles(["p" * 100] * 10, needles)
    places = [text.index(needle.sentence) / len(text) for needle in needles]
    assert places[0] == 0
    assert places[1] == pytest.approx(0.5, abs=0.1)
    assert text.endswith(needles[2].sentence)
    assert len({needle.answer for needle in needles}) == 3
    assert "pass key" in make_needles((0.5,), seed=3)[0].question
    with pytest.raises(ValueError, match=r"got 1\.5"):
        make_needles((1.5,), seed=0)


def test_needle_cases_share_their_document():
    cases = needle_cases(
        letters, data=None, context=3000, depths=(0.2, 0.7), num_documents=2, seed=1
    )
    assert [case.facets["depth"] for case in cases] == [0.2, 0.7] * 2
    one, two, other, _ = cases
    assert one.group == two.group != other.group
    assert one.prompt_ids[: one.num_shared] == two.prompt_ids[: two.num_shared]
    document = "".join(map(chr, one.prompt_ids[: one.num_shared]))
    for case in (one, two):
        assert case.context <= 3000
        assert case.answers[0] in document
        question = "".join(map(chr, case.prompt_ids[case.num_shared :]))
        assert case.answers[0] not in question
    with pytest.raises(ValueError, match="at least 64"):
        needle_cases(letters, data=None, context=180, depths=(0.5, 0.6), num_documents=1, seed=0)


QUESTION = Question("q", "Where?", ("here",), (("s", "support"),), tuple(
    (f"d{i}", "word " * 20) for i in range(9)
))  # fmt: skip


def test_supporting_passages_move_with_the_position():
    places = [
        [title for title, _ in order_passages(QUESTION, 4, position)].index("s")
        for position in ("early", "middle", "late")
    ]
    assert places == [0, 2, 4]
    with pytest.raises(ValueError, match="'nowhere'"):
        order_passages(QUESTION, 4, "nowhere")  # type: ignore[arg-type]


def test_prompts_lose_whole_distractors_only():
    whole, most = fit_prompt(words, QUESTION, "middle", context=10_000)
    assert most == 9
    ids, used = fit_prompt(words, QUESTION, "middle", context=len(whole) - 1)
    assert used == 8
    assert len(ids) == len(whole) - 23
    assert hash("support") in ids
    assert fit_prompt(words, QUESTION, "late", context=10_000, num_distractors=2)[1] == 2
    with pytest.raises(ValueError, match="does not fit into 10"):
        fit_prompt(words, QUESTION, "late", context=10)
    with pytest.raises(ValueError, match="9 distractors do not fit"):
        fit_prompt(words, QUESTION, "late", context=len(whole) - 1, num_distractors=9)


def test_made_up_questions_can_be_answered():
    for question in made_up_questions(6):
        assert question.answers[0] in question.supporting[1][1]
        assert not any(question.answers[0] in text for _, text in question.distractors)
    cases = qa_cases(words, choose_questions(None, (), 4, ()), context=900)
    assert [case.facets["position"] for case in cases] == ["early", "middle", "late", "early"]
    assert all(700 < case.context <= 900 for case in cases)


def test_questions_can_be_named():
    names = ("made-up-3", "made-up-1")
    cases = qa_cases(words, choose_questions(None, (), 9, names), context=900)
    assert [case.case_id for case in cases] == ["qa-900-made-up-3-early", "qa-900-made-up-1-middle"]
    some_questions = choose_questions(None, (), 1, ())
    (some,) = qa_cases(words, some_questions, context=900, num_distractors=2)
    assert some.case_id == "qa-900-made-up-0-early-d2"
    with pytest.raises(ValueError, match="no question 'hotpotqa-2'"):
        choose_questions(None, (), 1, ("hotpotqa-2",))


def test_questions_that_dense_cannot_answer_are_left_out():
    asked = []

    def answer(prompt_ids, max_new_tokens):
        asked.append((len(prompt_ids), max_new_tokens))
        question = made_up_questions(30)[len(asked) - 1]
        return f" {question.answers[0]}\nmore" if len(asked) % 2 == 0 else " nobody knows"

    names = answerable_questions(
        words, answer, candidates=made_up_questions(30), count=3, least_f1=0.5, max_new_tokens=7
    )
    assert names == ("made-up-1", "made-up-3", "made-up-5")
    assert all(size < 70 and limit == 7 for size, limit in asked)
    with pytest.raises(ValueError, match="answers none of 30 questions"):
        answerable_questions(
            words,
            lambda ids, limit: "",
            candidates=made_up_questions(30),
            count=1,
            least_f1=0.5,
            max_new_tokens=7,
        )


def test_pool_passages_with_the_answer_are_left_out(tmp_path):
    folder = tmp_path / "longbench"
    folder.mkdir()
    record = {
        "input": "Who?",
        "answers": ["Ada"],
        "paragraphs": [
            {"title": "s", "text": "It was Ada.", "supporting": True},
            {"title": "d", "text": "Not this.", "supporting": False},
        ],
    }
    pool = [{"title": "bad", "text": "ada again"}, {"title": "good", "text": "nothing"}]
    (folder / "hotpotqa.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "hotpotqa_distractors.jsonl").write_text("\n".join(map(json.dumps, pool)) + "\n")
    (question,) = read_questions(tmp_path, "hotpotqa", 5)
    assert [title for title, _ in question.distractors] == ["d", "good"]
    with pytest.raises(ValueError, match="'squad'"):
        read_questions(tmp_path, "squad", 1)
    with pytest.raises(FileNotFoundError, match="2wikimqa_distractors"):
        read_questions(tmp_path, "2wikimqa", 1)


def test_questions_of_a_document_share_its_tokens():
    distractors = tuple((f"d{i}", "word " * 20) for i in range(9))
    questions = [
        Question(
            f"q-{i}", f"Where {i}?", (f"answer{i}",), ((f"s{i}", f"at answer{i}"),), distractors
        )
        for i in range(4)
    ]
    questions[1] = replace(questions[1], distractors=(("bad", "ANSWER3 again"), *distractors))
    assert ("bad", "ANSWER3 again") not in common_distractors(questions)
    titles = [title for title, _ in spread_passages(questions, distractors[:6])]
    assert titles == ["s0", "d0", "d1", "s1", "d2", "d3", "s2", "d4", "d5", "s3"]
    cases = shared_cases(
        words, questions, per_document=3, context=10_000, num_distractors=None, max_new_tokens=5
    )
    assert [case.group for case in cases] == ["qa-10000-0"] * 3 + ["qa-10000-1"]
    assert [case.facets["position"] for case in cases] == ["early", "middle", "late", "early"]
    first, second = cases[:2]
    assert first.prompt_ids[: first.num_shared] == second.prompt_ids[: second.num_shared]
    assert first.prompt_ids[first.num_shared :] != second.prompt_ids[second.num_shared :]
    # the fourth question, whose answer one distractor holds, has a document of its own
    assert [case.facets["num_distractors"] for case in cases] == [10, 10, 10, 9]
    shorter = shared_cases(
        words,
        questions[:3],
        per_document=3,
        context=first.context - 1,
        num_distractors=None,
        max_new_tokens=5,
    )
    assert shorter[0].facets["num_distractors"] == 9
    few = shared_cases(
        words, questions[:2], per_document=2, context=900, num_distractors=3, max_new_tokens=5
    )
    assert [case.case_id for case in few] == ["qa-900-0-d3-q-0-early", "qa-900-0-d3-q-1-middle"]
    with pytest.raises(ValueError, match="does not fit into 30"):
        shared_cases(
            words, questions, per_document=4, context=30, num_distractors=None, max_new_tokens=5
        )
    with pytest.raises(ValueError, match="9 distractors, not 12"):
        shared_cases(
            words, questions[:1], per_document=2, context=900, num_distractors=12, max_new_tokens=5
        )


DATA = Path("hub:someone/books-small")


@pytest.fixture(autouse=True)
def nothing_remembered():
    hub_texts.cache_clear()
    yield
    hub_texts.cache_clear()


def a_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_texts_come_from_the_first_split_that_has_some(monkeypatch):
    def load_dataset(name, *, split, streaming):
        assert (name, streaming) == ("someone/books-small", True)
        if split == "test":
            raise ValueError("there is no such split")
        return [{"text": f"{split} {number} " * 20} for number in range(99)]

    a_hub(monkeypatch, load_dataset)
    assert filler_text(DATA, 1, num_characters=12) == "validation 1"
    assert filler_text(DATA, 9, num_characters=12) == "validation 1"
    # a label is divided at its dashes, so it has none of its own
    assert filler_name(DATA, 9) == "someone_books_small_1"
    with pytest.raises(ValueError, match="someone_books_small_0 has"):
        filler_text(DATA, 0, num_characters=10_000)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package datasets"):
        filler_text(DATA, 0, num_characters=10)

    def load_dataset(name, **_):
        raise ConnectionError("no route to the hub")

    a_hub(monkeypatch, load_dataset)
    with pytest.raises(ValueError, match=r"no texts of hub:someone.*no route to the hub"):
        filler_text(DATA, 0, num_characters=10)
    with pytest.raises(ValueError, match="questions come from a data folder"):
        read_questions(DATA, "hotpotqa", 1)
    with pytest.raises(ValueError, match="tool tasks come from a data folder"):
        read_tool_tasks(DATA, 1)


def test_questions_can_be_asked_at_every_place_behind_clutter():
    questions = choose_questions(None, (), 2, ())
    cases = qa_cases(words, questions, context=900, every_position=True, clutter=[7] * 100)
    assert [case.facets["position"] for case in cases] == 2 * ["early", "middle", "late"]
    assert len({case.case_id for case in cases}) == 6
    for case in cases:
        assert case.context <= 900
        assert case.prompt_ids[:100] == (7,) * 100
        ((start, stop),) = case.retrieved
        assert 100 < start < stop < case.context
        assert case.prompt_ids[start] == hash("Passage")


def test_a_workload_takes_its_clutter_from_its_split():
    workload = QAWorkload(900, num_questions=1, clutter=50, max_new_tokens=8)
    (case,) = workload.cases(words, None, seed=0, limit=None)
    assert case.case_id.endswith("-c50")
    with pytest.raises(ValueError, match="clutter must be in"):
        QAWorkload(900, clutter=900)
    with pytest.raises(SplitError, match="log file"):
        QAWorkload(900, split="test", purpose="test").cases(words, Path(), seed=0, limit=None)
