# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sphkv.evaluation.workloads.filler import filler_name, filler_text
from sphkv.evaluation.workloads.hub import hub_texts
from sphkv.evaluation.workloads.qa import read_questions
from sphkv.evaluation.workloads.tools import read_tool_tasks

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
