# SPDX-License-Identifier: Apache-2.0
"""Prompts of suites: files, cuts, RULER's and GSM8K's makers, MiniLongBench's questions."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sphkv.evaluation.suites import published, ruler
from sphkv.evaluation.suites.published import make_gsm8k
from sphkv.evaluation.suites.samples import PromptSet, Sample, SampleIds, in_chat, read_prompts


def sample(**changes: Any) -> Sample:
    parts: dict[str, Any] = {
        "suite": "made",
        "task": "one",
        "sample_id": "one-0",
        "length": 512,
        "context": "a long text",
        "question": "\nWhat? It is",
        "answers": ("this",),
        "metric": "all",
        "max_new_tokens": 8,
    }
    return Sample(**{**parts, **changes})


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [len(word) for word in text.split()]

        class Found:
            input_ids = [0, *ids] if add_special_tokens else ids

        return Found

    def apply_chat_template(self, chat: Any, **_: Any) -> str:
        return f"<user>{chat[0]['content']}<assistant>\n"


def test_a_file_is_named_by_its_content(tmp_path: Path) -> None:
    prompts = PromptSet((sample(), sample(sample_id="one-1")), "words", sources={"seed": 1})
    prompts.write(tmp_path / "p.jsonl")
    found = read_prompts(tmp_path / "p.jsonl")
    assert found == prompts
    # where it came from does not change what it is
    assert PromptSet(prompts.samples, "other").set_id == prompts.set_id
    assert PromptSet(prompts.samples[:1]).set_id != prompts.set_id
    text = (tmp_path / "p.jsonl").read_text(encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(text.replace("a long text", "a short text"), "utf-8")
    with pytest.raises(ValueError, match="its head says"):
        read_prompts(tmp_path / "p.jsonl")


def test_chosen_samples_are_the_first_of_each_task_and_length() -> None:
    names = [("a", 512), ("a", 512), ("a", 1024), ("b", 0), ("a", 512)]
    prompts = PromptSet(
        tuple(
            sample(task=task, length=length, sample_id=str(at))
            for at, (task, length) in enumerate(names)
        )
    )
    assert [s.sample_id for s in prompts.chosen(num_samples=2)] == ["0", "1", "2", "3"]
    assert [s.sample_id for s in prompts.chosen(lengths=[1024])] == ["2", "3"]
    with pytest.raises(ValueError, match="no task 'c'"):
        prompts.chosen(tasks=["c"])


def test_long_contexts_lose_their_middle() -> None:
    ids = SampleIds(tuple(range(10)), (90, 91))
    assert ids.cut(12) is ids
    assert ids.cut(7) == SampleIds((0, 1, 2, 8, 9), (90, 91))
    with pytest.raises(ValueError, match="leaves none of 3"):
        ids.cut(3)


def test_a_chat_begins_the_answer_for_the_assistant() -> None:
    (made,) = in_chat(Words(), [sample(question="\nWhat? It is")], [" It is"])
    assert made.context == "<user>a long text"
    assert made.question == "\nWhat?<assistant>\nIt is"


def test_questions_are_cut_off() -> None:
    text = "Some words.\nQuestion: a?\n\nMore words\nQuestion: b?"
    assert ruler.cut_question("vt", text) == (text[:-13], "\nQuestion: b?")
    with pytest.raises(ValueError, match="has no 'What'"):
        ruler.cut_question("niah_single_1", text)


def test_sentences_end_before_capitals() -> None:
    text = 'He left. "Why?" she asked. It cost 3.5 dollars! Then e.g. nothing.'
    assert ruler.split_sentences(text) == [
        "He left.",
        '"Why?" she asked.',
        "It cost 3.5 dollars!",
        "Then e.g. nothing.",
    ]


@pytest.mark.slow
def test_ruler_is_made_alike_and_fits(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra sphkv[suites] is not installed")
    pytest.importorskip("wonderwords", reason="the extra sphkv[suites] is not installed")
    text = "Plain words make up this essay. They go on and on about nothing at all. " * 400
    (tmp_path / "essay.txt").write_text(text, encoding="utf-8")
    options = ruler.RulerOptions((1024,), num_samples=2, essays=tmp_path)
    tokenizer = smollm2[1]
    made = ruler.make_ruler(tokenizer, options, name="smollm2")
    assert ruler.make_ruler(tokenizer, options, name="smollm2").set_id == made.set_id
    assert {s.task for s in made.samples} == set(ruler.TASKS)
    for one in made.samples:
        assert len(made.ids(tokenizer, one).prompt) + one.max_new_tokens <= 1024
        # what is asked for is in the context, and the question does not give it away
        whole = one.context.lower()
        assert all(answer.lower() in whole for answer in one.answers), one.sample_id
        assert not any(answer in one.question for answer in one.answers), one.sample_id
    other = ruler.RulerOptions((1024,), tasks=("vt",), num_samples=1, seed=1, essays=tmp_path)
    assert ruler.make_ruler(tokenizer, other, name="").samples[0].answers != next(
        s.answers for s in made.samples if s.task == "vt"
    )


def test_ruler_refuses_what_it_has_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qa_squad"):
        ruler.RulerOptions((4096,), tasks=("qa_squad",))
    with pytest.raises(ValueError, match="512"):
        ruler.RulerOptions((100,))
    with pytest.raises(ValueError, match="no essays"):
        ruler.essay_words(tmp_path)


def _problem(number: int) -> dict[str, Any]:
    return {
        "doc": {
            "question": f"How much is {number} and 1?",
            "short_answer": f"{number + 1}",
            "choices": [f"It is {number} + 1. So the answer is {number + 1}."],
        },
        "request": {
            "context": "Question: How much is 1 and 1?\nAnswer: So the answer is 2.\n\n"
            f"Question: How much is {number} and 1?\nAnswer:"
        },
    }


def test_gsm8k_is_filled_with_other_problems(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps(_problem(at)) for at in range(200))
    (tmp_path / "rows.gz").write_bytes(gzip.compress(rows.encode()))
    made = make_gsm8k(
        Words(), data=tmp_path / "rows.gz", lengths=(600,), num_samples=5, name="words"
    )
    assert len(made.samples) == 5
    for one in made.samples:
        assert one.question.startswith("\n\nQuestion: How much")
        assert one.question.endswith("Answer:")
        count = len(made.ids(Words(), one).prompt) + one.max_new_tokens
        assert 560 < count <= 600
        # no problem is worked out in its own prompt
        assert one.question.removeprefix("\n\n").splitlines()[0] + "\n" not in one.context
    plain = make_gsm8k(Words(), data=tmp_path / "rows.gz", num_samples=5)
    assert plain.samples[0].context.count("Question:") == 1


def test_longbench_finds_every_question(shared_data: Path) -> None:
    folder = shared_data / "minilongbench"
    if not folder.is_dir():
        pytest.skip("MiniLongBench is not among the data")
    made = published.load_longbench(folder)
    assert {s.task for s in made.samples} == set(published.TASKS)
    assert all(len(s.question) < 10_000 for s in made.samples)
    assert len(published.load_longbench(folder, tasks=["trec"], num_samples=2).samples) == 2
