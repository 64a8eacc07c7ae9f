# SPDX-License-Identifier: Apache-2.0
"""Tables for people, JSON for machines, files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path | str, data: object) -> None:
    """Write JSON to a file; a failure leaves no partial file behind."""
    write_text(path, json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file whole or not at all."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files private; a result is for whoever may read the folder
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(path: Path | str | None) -> None:
    """Fail before long work, not after it, if a result could not be written."""
    if path is None:
        return
    if not str(path) or "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no name of a file")
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder, not a file to write")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} to")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"cannot write to {target.parent}")


def format_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain-text table, numbers to four digits."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    body = [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(line[at]) for line in body), 0) if body else len(column)
        for at, column in enumerate(columns)
    ]
    lines = [list(columns), ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
