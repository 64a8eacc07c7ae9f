# SPDX-License-Identifier: Apache-2.0
"""Plain text to fill a context with: books of a data folder, or made up."""

from __future__ import annotations

import random
from pathlib import Path

from sphkv.evaluation.splits import load_manifest
from sphkv.evaluation.workloads.hub import hub_name, hub_texts

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
