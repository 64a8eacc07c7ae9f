# SPDX-License-Identifier: Apache-2.0
"""Which data may be used for what: calibration, development and test never mix.

The manifest ``splits.toml`` beside this file names books, stretches, questions and needles of every
split. Test data is handed out only to who says that it is for a test, and every such use is
written to a log that the user names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sphkv.core.configs import check_name
from sphkv.errors import SplitError
from sphkv.evaluation.workloads.case import Case

SplitName = Literal["calibration", "development", "test"]
SPLITS: tuple[SplitName, ...] = ("calibration", "development", "test")
PURPOSES = ("calibration", "development", "test")

# more than tokenizers pack into a token on average
_MOST_CHARACTERS = 8
_ANSWER_TOKENS = 24
_ALL = slice(None)
_WORDS = (
    "amber", "barley", "cobalt", "dahlia", "ember", "falcon", "garnet", "harbour", "indigo",
    "juniper", "kelp", "lantern", "marble", "nectar", "orchid", "pewter", "quartz", "raven",
    "saffron", "thistle", "umber", "velvet", "walnut", "yarrow",
)  # fmt: skip
_SENTENCE = "\n\nThe {kind} of the {place} is {answer}. Remember it.\n\n"
_QUESTION = "\n\nWhat is the {kind} of the {place}? The {kind} of the {place} is"
_PLACES = {
    "development": ("old mill", "north gate", "salt house", "ferry landing", "glass works"),
    "test": ("clock tower", "east pier", "powder store", "orchard lodge", "copper mine"),
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``splits.toml`` says.

    Attributes:
        books: Book to SHA-256 of its file, by split.
        stretches: First tokens by length of the prompt.
        questions: First record and one past the last, by split.
        needles: Count, depths, digits, words and first tokens.
    """

    books: Mapping[str, Mapping[str, str]]
    stretches: Mapping[int, tuple[int, ...]]
    questions: Mapping[str, tuple[int, int]]
    needles: Mapping[str, Any]

    def split_of(self, book: str) -> SplitName | None:
        """Split of a book; None of a book that is in none."""
        for split in SPLITS:
            if book in self.books[split]:
                return split
        return None


@cache
def load_manifest() -> Manifest:
    """The packaged manifest.

    Raises:
        SplitError: A book is in two splits, or questions overlap.
    """
    text = resources.files("sphkv.evaluation").joinpath("splits.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    manifest = Manifest(
        books=data["books"],
        stretches={int(length): tuple(at) for length, at in data["stretches"].items()},
        questions={split: (first, stop) for split, (first, stop) in data["questions"].items()},
        needles=data["needles"],
    )
    names = [book for split in SPLITS for book in manifest.books[split]]
    twice = {book for book in names if names.count(book) > 1}
    if twice:
        raise SplitError(f"books {', '.join(sorted(twice))} are in two splits")
    parts = sorted(manifest.questions.values())
    if any(before[1] > after[0] for before, after in itertools.pairwise(parts)):
        raise SplitError(f"questions of two splits overlap: {parts}")
    return manifest


def open_split(
    name: str, data: Path, *, purpose: str, log: Path | None = None, note: str = ""
) -> Split:
    """The data of a split, for a purpose that allows it.

    Args:
        name: ``calibration``, ``development`` or ``test``.
        data: Folder with ``pg19`` and ``longbench``.
        purpose: What the data is for; must be the split's own name.
        log: File to which a use of test data is appended; needed for these only.
        note: What is measured, for the log.

    Raises:
        SplitError: The purpose is another, or test data is asked for without a log.
    """
    check_name("split", name, SPLITS)
    check_name("purpose", purpose, PURPOSES)
    if purpose != name:
        raise SplitError(
            f"{name} data was asked for with purpose={purpose!r}; say purpose={name!r} if it is "
            "what you mean"
        )
    if name == "test":
        if log is None:
            raise SplitError("test data needs a log file, so that every look at it is counted")
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "note": note}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
    return Split(name, data, load_manifest())


def check_calibration(path: Path) -> Path:
    """A text to calibrate on, unless it is a book that something is measured on.

    Raises:
        SplitError: It is a development or test book.
    """
    split = load_manifest().split_of(path.stem)
    if split not in (None, "calibration"):
        raise SplitError(f"{path.name} is a {split} book; codebooks must not be fitted on it")
    return path


@dataclass(frozen=True, slots=True)
class Split:
    """Data of one split; made by ``open_split``.

    Attributes:
        name: Which split.
        data: Folder with ``pg19`` and ``longbench``.
        manifest: All splits.
    """

    name: str
    data: Path
    manifest: Manifest

    @property
    def books(self) -> tuple[str, ...]:
        """Its books."""
        return tuple(self.manifest.books[self.name])

    def text(self, book: str) -> str:
        """A book of the split, its bytes checked against the manifest.

        Raises:
            SplitError: The book belongs to another split, or the file is another edition.
        """
        if book not in self.manifest.books[self.name]:
            owner = self.manifest.split_of(book)
            raise SplitError(f"book {book} belongs to {owner or 'no split'}, not to {self.name}")
        folder = self.data / "pg19"
        path = (folder / "calibration" if self.name == "calibration" else folder) / f"{book}.txt"
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != self.manifest.books[self.name][book]:
            raise SplitError(f"{path} is not the file that the manifest names")
        return raw.decode("utf-8")

    def stretches(
        self, tokenizer: Any, *, length: int, num_following: int, part: slice = _ALL
    ) -> list[Case]:
        """Prompts of books and the tokens after them, every book's first stretch first.

        Args:
            tokenizer: Of the model.
            length: Tokens of a prompt, one of the manifest's.
            num_following: Tokens after it.
            part: Which of them.

        Raises:
            ValueError: The manifest has no such length, or a book is too short.
        """
        known = self.manifest.stretches
        if length not in known:
            raise ValueError(f"length must be one of {sorted(known)}, got {length}")
        places = [(book, first) for first in known[length] for book in self.books][part]
        cases: dict[tuple[str, int], Case] = {}
        for book in dict.fromkeys(book for book, _ in places):
            firsts = [first for name, first in places if name == book]
            ids = self._tokens(tokenizer, book, max(firsts) + length + num_following)
            for first in firsts:
                cases[book, first] = self._stretch(book, first, ids, length, num_following)
        return [cases[place] for place in places]

    def _tokens(self, tokenizer: Any, book: str, count: int) -> list[int]:
        text = self.text(book)
        # a whole book takes seconds; its beginning has the same tokens
        ids: list[int] = tokenizer(text[: _MOST_CHARACTERS * count]).input_ids
        if len(ids) < count:
            ids = tokenizer(text).input_ids
        if len(ids) < count:
            raise ValueError(f"book {book} has {len(ids)} tokens, not {count}")
        return ids

    def _stretch(
        self, book: str, first: int, ids: list[int], length: int, num_following: int
    ) -> Case:
        name = f"lm-{length}-{book}-{first}"
        middle = first + length
        return Case(
            case_id=name,
            workload="lm",
            group=name,
            prompt_ids=tuple(ids[first:middle]),
            following_ids=tuple(ids[middle : middle + num_following]),
            facets={"text": book, "skip": first},
            split=self.name,
        )

    def question_ids(self, dataset: str) -> tuple[str, ...]:
        """Names of the split's questions of a dataset, such as ``hotpotqa-3``.

        Raises:
            SplitError: The split has no questions.
        """
        if self.name not in self.manifest.questions:
            raise SplitError(f"{self.name} has no questions")
        return tuple(f"{dataset}-{at}" for at in range(*self.manifest.questions[self.name]))

    def needles(self, tokenizer: Any, *, length: int, part: slice = _ALL) -> list[Case]:
        """A book with one hidden sentence, and a question for it; each a document of its own.

        Args:
            tokenizer: Of the model.
            length: Tokens of a prompt, question included.
            part: Which of them.

        Raises:
            SplitError: The split has no needles.
        """
        if self.name not in _PLACES:
            raise SplitError(f"{self.name} has no needles")
        needles = list(self._needles())[part]
        return [self._needle_case(tokenizer, needle, length) for needle in needles]

    def _needles(self) -> Iterator[SplitNeedle]:
        told = self.manifest.needles
        kinds = [("number", size) for size in told["digits"]]
        kinds += [("password", size) for size in told["words"]]
        for number in range(told["count"]):
            draw = random.Random(f"{self.name} needle {number}")
            kind, size = kinds[number % len(kinds)]
            if kind == "number":
                answer = str(draw.randrange(10 ** (size - 1), 10**size))
            else:
                answer = " ".join(draw.sample(_WORDS, size))
            depths, firsts = told["depths"], told["first_tokens"]
            yield SplitNeedle(
                number=number,
                book=self.books[number % len(self.books)],
                first=firsts[number // len(self.books) % len(firsts)],
                depth=depths[number % len(depths)],
                place=draw.choice(_PLACES[self.name]),
                kind=kind,
                answer=answer,
            )

    def _needle_case(self, tokenizer: Any, needle: SplitNeedle, length: int) -> Case:
        parts = {"kind": needle.kind, "place": needle.place, "answer": needle.answer}
        sentence, question = (
            tokenizer(text.format(**parts), add_special_tokens=False).input_ids
            for text in (_SENTENCE, _QUESTION)
        )
        room = length - len(sentence) - len(question)
        if room < 64:
            raise ValueError(f"{length} tokens leave {room} for the text of a needle, not 64")
        text = self._tokens(tokenizer, needle.book, needle.first + room)
        text = text[needle.first : needle.first + room]
        at = round(needle.depth * room)
        name = f"needle-{length}-{needle.book}-{self.name}{needle.number}"
        return Case(
            case_id=name,
            workload="needle",
            group=name,
            prompt_ids=(*text[:at], *sentence, *text[at:], *question),
            answers=(needle.answer,),
            max_new_tokens=_ANSWER_TOKENS,
            facets={
                "depth": needle.depth,
                "num_needles": 1,
                "kind": needle.kind,
                "answer_tokens": len(tokenizer(f" {needle.answer}").input_ids),
            },
            split=self.name,
        )


@dataclass(frozen=True, slots=True)
class SplitNeedle:
    """A sentence that is hidden in a book.

    Attributes:
        number: Which needle of the split.
        book: The book.
        first: First token of the book's stretch.
        depth: Share of the text before the sentence.
        place: What it speaks of.
        kind: ``number`` or ``password``.
        answer: What must be found again.
    """

    number: int
    book: str
    first: int
    depth: float
    place: str
    kind: str
    answer: str
