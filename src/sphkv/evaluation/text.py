# SPDX-License-Identifier: Apache-2.0
"""Token ids of a text file, exactly as many as asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

# more than any tokenizer packs into a token on average
_MOST_CHARACTERS_PER_TOKEN = 16


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
