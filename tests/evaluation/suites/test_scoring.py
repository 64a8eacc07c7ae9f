# SPDX-License-Identifier: Apache-2.0
"""Scores of suites against worked examples."""

from typing import Any

import pytest

from sphkv.evaluation.suites.samples import Sample, is_settled, rouge_l, score_answer


def sample(metric: str, answers: tuple[str, ...], **changes: Any) -> Sample:
    parts: Any = {"metric": metric, "answers": answers, **changes}
    return Sample(
        suite="s", task="t", sample_id="0", length=0, context="c", question="q",
        max_new_tokens=8, **parts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "answers", "said", "wanted"),
    [
        ("all", ("123", "Abc"), "they are 123 and 77", 0.5),
        ("all", ("123", "Abc"), "ABC, 1234", 1.0),
        ("part", ("red", "blue"), "it is BLUE", 1.0),
        ("part", ("red", "blue"), "green", 0.0),
        ("f1", ("the white house",), "White House in Washington", 2 * 0.5 / 1.5),
        ("retrieval", ("Paragraph 19",), "Paragraph 19 or 20", 0.5),
        ("retrieval", ("Paragraph 19",), "none", 0.0),
        ("count", ("46",), "46", 1.0),
        ("number", ("1,600",), "So 2 x 800 = 1600. So the answer is 1600.", 1.0),
        ("number", ("18",), "first 18, then 9 left", 0.0),
        ("number", ("3",), "The answer is $3.00, not 4", 1.0),
        ("code", ("return x",), "# a comment\nreturn x\nmore", 1.0),
        ("code", ("abcd",), "abxx", 0.5),
    ],
)
def test_scores(metric: str, answers: tuple[str, ...], said: str, wanted: float) -> None:
    assert score_answer(sample(metric, answers), said) == pytest.approx(wanted)


def test_classification_shares_between_named_classes() -> None:
    classes = ("Date", "Date of birth", "Food")
    one = sample("classification", ("Date of birth",), classes=classes, is_first_line=True)
    # a class whose name is part of the right one's does not count against it
    assert score_answer(one, "\nDate of birth\nFood") == 1.0
    assert score_answer(one, "Food or Date of birth") == 0.5
    assert score_answer(one, "Food") == 0.0


def test_rouge_l_by_hand() -> None:
    assert rouge_l("the cat sat", "the cat sat") == pytest.approx(1.0)
    # common in order: "the cat"; two of three words on either side
    assert rouge_l("the cat ran", "the cat sat") == pytest.approx(2 / 3)
    # sentences are compared one by one, words of all matches are joined
    assert rouge_l("b a. d c", "c d. a b") == pytest.approx(0.5)
    assert rouge_l("", "a") == 0.0


def test_rouge_l_is_that_of_the_package() -> None:
    package = pytest.importorskip("rouge", reason="the package rouge is not installed")
    pairs = [
        ("The man was freed on Friday. He had been in prison.", "A man was freed Friday. He left."),
        ("one two three four. five six", "six five. four three two one"),
        ("a b c d e f g", "a c e g i k"),
    ]
    for ours, theirs in pairs:
        wanted = package.Rouge().get_scores([ours], [theirs], avg=True)["rouge-l"]["f"]
        assert rouge_l(ours, theirs) == pytest.approx(wanted, abs=1e-6)


def test_an_answer_is_settled_only_when_its_score_is() -> None:
    both = sample("all", ("12", "34"))
    assert not is_settled(both, "12 and 3")
    assert is_settled(both, "12 and 34")
    line = sample("f1", ("x",), is_first_line=True)
    assert not is_settled(line, "\nan answer")
    assert is_settled(line, "\nan answer\n")
    code = sample("code", ("x = 1",))
    assert not is_settled(code, "# note\n")
    assert is_settled(code, "# note\nx = 1\n")
    stopped = sample("number", ("3",), stops=("\n\n",))
    assert not is_settled(stopped, "the answer is 3")
    assert is_settled(stopped, "is 3\n\nQ")
    assert score_answer(stopped, "the answer is 3.\n\nthe answer is 4") == 1.0
    assert not is_settled(sample("rouge_l", ("x",)), "x " * 50)
