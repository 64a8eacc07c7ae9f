# SPDX-License-Identifier: Apache-2.0
"""Plain text, a file's, a data folder's, a hub's or made up, and the workloads over it.

W1 is language modelling on long books, strided; needles are pass keys and sentences hidden at
chosen depths of a long text.

A dataset of a hub is named ``--data hub:NAME``, where one is reachable.
"""

from __future__ import annotations

import functools
import importlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sphkv.evaluation.splits import load_manifest
from sphkv.evaluation.workloads.case import Case

# more than any tokenizer packs into a token on average
_MOST_CHARACTERS_PER_TOKEN = 16

PREFIX = "hub:"
NUM_TEXTS = 8
_SPLITS = ("test", "validation", "train")
_COLUMN = "text"
_PLACES = (
    "the mill", "the upper bridge", "the old quarry", "the chapel yard", "the fish market",
    "the orchard wall", "the ropewalk", "the toll house", "the granary", "the dry dock",
)  # fmt: skip
_PEOPLE = (
    "the miller", "Anna Verity", "two brothers from the coast", "the postmaster", "a glazier",
    "the magistrate's clerk", "Old Tobias", "the schoolmistress", "a drover", "the organist",
)  # fmt: skip
_DEEDS = (
    "settled a quarrel over the boundary stones", "sold nine baskets of pears",
    "found a coin stamped with an unknown crest", "planted a row of lindens",
    "sat all night with a lame horse", "copied the parish register by hand",
    "taught the children a song about the sea", "took the measure of the flood",
    "lost a wager on the weather", "put a new lock on the cellar door",
)  # fmt: skip
_ENDINGS = (
    "and nobody thought of it again until spring", "which pleased the council very little",
    "though the rain had not stopped for a week", "as was the custom in those years",
    "and the account was entered twice by mistake", "for the price of a pair of boots",
    "before the bell had struck four", "to the surprise of the whole street",
)  # fmt: skip
_CITIES = (
    "Valmora", "Brindle", "Castrel", "Dunhaven", "Elsmere", "Farrow", "Gildern", "Harwick",
    "Ilmenau", "Jarrow", "Kestrel", "Lorn",
)  # fmt: skip
_PASSKEY = "The pass key is {number}. Remember it. {number} is the pass key."
_NEEDLE = "One of the special magic numbers for {city} is: {number}."
_PASSKEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
_NEEDLE_QUESTION = (
    "\n\nWhat is the special magic number for {city} mentioned in the text? "
    "The special magic number for {city} mentioned in the text is:"
)


def read_tokens(tokenizer: Any, path: str, count: int, *, offset: int = 0) -> Tensor:
    """The first ``count`` tokens after ``offset`` characters, ``[1, count]``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no UTF-8 text or too short; nothing is padded or repeated.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no text file at {file}")
    try:
        text = file.read_text(encoding="utf-8")[offset:]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}") from error
    piece = text[: _MOST_CHARACTERS_PER_TOKEN * count]
    ids: Tensor = tokenizer(piece, return_tensors="pt").input_ids[:, :count]
    if ids.shape[1] < count:
        raise ValueError(f"{file} has {ids.shape[1]} tokens after offset {offset}, not {count}")
    return ids


def hub_name(data: Path) -> str | None:
    """Name of the dataset if a data folder is none but a hub's dataset."""
    text = str(data)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def refuse_hub(data: Path, what: str) -> None:
    """Say that something needs a folder.

    Raises:
        ValueError: A hub was named.
    """
    name = hub_name(data)
    if name is not None:
        raise ValueError(
            f"{what} come from a data folder; {PREFIX}{name} gives texts for lm and needle only"
        )


@functools.lru_cache(maxsize=4)
def hub_texts(name: str) -> tuple[str, ...]:
    """The first texts of a dataset with a column ``text``.

    Raises:
        ValueError: The package that reads hubs is missing, the hub cannot be reached, or the
            dataset has no texts.
    """
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ValueError(
            f"{PREFIX}{name} needs the package datasets, which is not installed; name a folder "
            "instead"
        ) from error
    problems = []
    for split in _SPLITS:
        try:
            rows = load_dataset(name, split=split, streaming=True)
            found = tuple(str(row[_COLUMN]) for _, row in zip(range(NUM_TEXTS), rows, strict=False))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            problems.append(f"{split}: {error}")
            continue
        if found:
            return found
        problems.append(f"{split}: no rows")
    raise ValueError(f"no texts of {PREFIX}{name}: {'; '.join(problems)}")


def made_up_text(num_characters: int, seed: int) -> str:
    """Sentences drawn at random, at least so many characters of them."""
    draw = random.Random(f"filler {seed}")
    parts: list[str] = []
    size = 0
    while size < num_characters:
        sentences = []
        for _ in range(6):
            where, who = draw.choice(_PLACES), draw.choice(_PEOPLE)
            what, end = draw.choice(_DEEDS), draw.choice(_ENDINGS)
            year = draw.randint(1640, 1820)
            form = draw.randrange(3)
            if form == 0:
                text = f"In {year}, near {where}, {who} {what}, {end}."
            elif form == 1:
                text = f"{who[0].upper()}{who[1:]} {what} at {where}, {end}."
            else:
                text = f"They say that {who} {what} in the year {year}."
            sentences.append(text)
        parts.append(" ".join(sentences))
        size += len(parts[-1]) + 2
    return "\n\n".join(parts)


def book_files(data: Path) -> list[Path]:
    """Books of a data folder in order of their names, but those of the test split.

    Raises:
        FileNotFoundError: There are none.
    """
    files = sorted((data / "pg19").glob("*.txt"))
    files = [file for file in files if load_manifest().split_of(file.stem) != "test"]
    if not files:
        raise FileNotFoundError(f"no books in {data / 'pg19'}")
    return files


def num_fillers(data: Path) -> int:
    """Texts of a data folder or a dataset."""
    name = hub_name(data)
    return len(book_files(data)) if name is None else len(hub_texts(name))


def filler_split(data: Path | None) -> str:
    """Split that texts of a folder belong to; empty for made-up text and other datasets."""
    return "development" if data is not None and hub_name(data) is None else ""


def filler_text(data: Path | None, index: int, *, num_characters: int, skip: int = 0) -> str:
    """Text number ``index``: a book of a data folder, or made up if there is no folder.

    Args:
        data: Folder with ``pg19/*.txt``, ``hub:`` and a dataset, or None.
        index: Which text; books are used in turn.
        num_characters: Characters to return.
        skip: Characters to leave out first.

    Raises:
        ValueError: The book is too short.
    """
    if data is None:
        return made_up_text(skip + num_characters, index)[skip : skip + num_characters]
    whole = _text(data, index)
    text = whole[skip : skip + num_characters]
    if len(text) < num_characters:
        raise ValueError(
            f"{filler_name(data, index)} has {len(text)} characters after {skip}, not "
            f"{num_characters}"
        )
    return text


def _text(data: Path, index: int) -> str:
    name = hub_name(data)
    if name is not None:
        texts = hub_texts(name)
        return texts[index % len(texts)]
    files = book_files(data)
    return files[index % len(files)].read_text(encoding="utf-8")


def filler_name(data: Path | None, index: int) -> str:
    """Short label of text number ``index``."""
    if data is None:
        return f"made-up-{index}"
    name = hub_name(data)
    if name is not None:
        return f"{name.replace('/', '_').replace('-', '_')}_{index % len(hub_texts(name))}"
    files = book_files(data)
    return files[index % len(files)].stem


def lm_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    context: int,
    num_following: int,
    num_prompts: int,
    stride: int = 0,
) -> list[Case]:
    """Prompts of ``context`` tokens and what follows them, one text after another.

    When there are more prompts than books, the next round begins ``stride`` tokens later in each
    book; causality holds because a prompt is only what comes before the tokens it predicts.

    Args:
        tokenizer: Of the model.
        data: Folder with ``pg19/*.txt``; None makes texts up.
        context: Tokens of a prompt.
        num_following: Tokens to predict after it.
        num_prompts: How many prompts.
        stride: Tokens between the prompts of one text; ``num_following`` if 0.
    """
    if num_following < 2:
        raise ValueError(f"num_following must be at least 2, got {num_following}")
    from_text = num_fillers(data) if data is not None else num_prompts
    cases = []
    for index in range(num_prompts):
        book, round_ = index % from_text, index // from_text
        skip = round_ * (stride or num_following)
        needed = skip + context + num_following
        text = filler_text(data, book, num_characters=_MOST_CHARACTERS_PER_TOKEN * needed)
        ids = tokenizer(text).input_ids[skip : skip + context + num_following]
        if len(ids) < context + num_following:
            raise ValueError(
                f"text {filler_name(data, book)!r} gave {len(ids)} tokens after {skip}, "
                f"not {context + num_following}"
            )
        name = f"lm-{context}-{filler_name(data, book)}-{skip}"
        cases.append(
            Case(
                case_id=name,
                workload="lm",
                group=name,
                prompt_ids=tuple(ids[:context]),
                following_ids=tuple(ids[context:]),
                facets={"text": filler_name(data, book), "skip": skip},
                split=filler_split(data),
            )
        )
    return cases


@dataclass(frozen=True, slots=True)
class Needle:
    """A hidden sentence.

    Attributes:
        sentence: As it stands in the text.
        question: What is appended to the text; the model continues it.
        answer: What the continuation must begin with.
        depth: Share of the text before it, 0 to 1.
    """

    sentence: str
    question: str
    answer: str
    depth: float


def make_needles(depths: tuple[float, ...], seed: int) -> list[Needle]:
    """One needle per depth; a single one is the pass key."""
    for depth in depths:
        if not 0.0 <= depth <= 1.0:
            raise ValueError(f"depth must lie between 0 and 1, got {depth}")
    if not 1 <= len(depths) <= len(_CITIES):
        raise ValueError(f"there are needles for 1 to {len(_CITIES)} depths, got {len(depths)}")
    draw = random.Random(f"needles {seed}")
    cities = draw.sample(_CITIES, len(depths))
    needles = []
    for city, depth in zip(cities, depths, strict=True):
        number = str(draw.randint(10_000, 99_999))
        if len(depths) == 1:
            sentence, question = _PASSKEY.format(number=number), _PASSKEY_QUESTION
        else:
            sentence = _NEEDLE.format(city=city, number=number)
            question = _NEEDLE_QUESTION.format(city=city)
        needles.append(Needle(sentence, question, number, depth))
    return needles


def hide_needles(paragraphs: list[str], needles: list[Needle]) -> str:
    """The text with each needle as a paragraph of its own at its depth."""
    sizes = [len(paragraph) for paragraph in paragraphs]
    total = sum(sizes)
    parts: list[str] = []
    waiting = sorted(needles, key=lambda needle: needle.depth)
    seen = 0
    for paragraph, size in zip(paragraphs, sizes, strict=True):
        while waiting and seen >= waiting[0].depth * total:
            parts.append(waiting.pop(0).sentence)
        parts.append(paragraph)
        seen += size
    parts.extend(needle.sentence for needle in waiting)
    return "\n\n".join(parts)


def needle_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    context: int,
    depths: tuple[float, ...],
    num_documents: int,
    seed: int,
    max_new_tokens: int = 8,
) -> list[Case]:
    """One case per document and needle; those of a document share its tokens.

    Args:
        tokenizer: Of the model.
        data: Folder with ``pg19/*.txt``; None makes texts up.
        context: Most tokens of a prompt, question included.
        depths: Depth of each needle.
        num_documents: How many documents.
        seed: Draws cities and numbers.
        max_new_tokens: Most tokens of an answer.
    """
    cases = []
    for index in range(num_documents):
        needles = make_needles(depths, seed + index)
        questions = [tokenizer(n.question, add_special_tokens=False).input_ids for n in needles]
        room = context - max(len(ids) for ids in questions)
        document = _document(tokenizer, data, index, needles, room)
        name = f"needle-{context}-{filler_name(data, index)}-{seed + index}"
        for needle, question in zip(needles, questions, strict=True):
            cases.append(
                Case(
                    case_id=f"{name}-{needle.depth:g}",
                    workload="needle",
                    group=name,
                    prompt_ids=(*document, *question),
                    num_shared=len(document),
                    answers=(needle.answer,),
                    max_new_tokens=max_new_tokens,
                    facets={"depth": needle.depth, "num_needles": len(needles)},
                    split=filler_split(data),
                )
            )
    return cases


def _document(
    tokenizer: Any, data: Path | None, index: int, needles: list[Needle], room: int
) -> list[int]:
    """Whole paragraphs, as many as fit with the needles."""
    if room < 64:
        raise ValueError(f"a context must leave at least 64 tokens for the text, got {room}")
    text = filler_text(data, index, num_characters=8 * room, skip=0 if data is None else 3000)
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    low, high = 0, len(paragraphs)
    best: list[int] = tokenizer(hide_needles([], needles)).input_ids
    while low < high:
        middle = (low + high + 1) // 2
        ids = tokenizer(hide_needles(paragraphs[:middle], needles)).input_ids
        if len(ids) <= room:
            low, best = middle, ids
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(f"{len(needles)} needles and a paragraph do not fit into {room} tokens")
    return best
