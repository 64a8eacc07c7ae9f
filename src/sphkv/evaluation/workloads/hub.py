# SPDX-License-Identifier: Apache-2.0
"""Texts of a dataset on a hub, where one is reachable: ``--data hub:NAME``."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

PREFIX = "hub:"
NUM_TEXTS = 8
_SPLITS = ("test", "validation", "train")
_COLUMN = "text"


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
