# SPDX-License-Identifier: Apache-2.0
"""Result records: one JSON line per measured point, safe against a kill at any moment.

A file holds lines of two kinds. A ``run`` line says where and with what settings the points after
it were measured; a ``point`` line names its run. A line counts once its line end is on disk, so a
kill leaves at most one unfinished line at the end, which the next start removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from sphkv.evaluation.schema import FORMAT, PLACE_FIELDS

TIMES = "times"


def canonical_json(data: object) -> str:
    """The same text for the same data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_id(data: object) -> str:
    """Sixteen hexadecimal digits that name some data."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()[:16]


class Older:
    """Records that do not say everything which names a record today, by id.

    What they leave open, the setup of their run may say; the rest is unknown, and equals anything.
    """

    def __init__(self) -> None:
        self._said: dict[str, Mapping[str, Any]] = {}

    def add(self, line: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """Remember a record.

        Args:
            line: The record.
            said: What is known of the fields it lacks.
        """
        self._said[line["id"]] = said

    def has(self, identity: Mapping[str, Any], later: Iterable[str]) -> bool:
        """Whether a record is one of these.

        Args:
            identity: What names it today.
            later: Fields of it that older records lack.
        """
        fields = tuple(later)
        said = self._said.get(
            content_id({name: part for name, part in identity.items() if name not in fields})
        )
        return said is not None and all(said.get(n, identity[n]) == identity[n] for n in fields)


class LineFile(ABC):
    """Appends records to a file, one JSON line each; one writer at a time.

    Use as a context manager.

    Attributes:
        path: The file.
        done: Ids of the records it holds.
    """

    format: ClassVar[str]
    later: ClassVar[tuple[str, ...]] = PLACE_FIELDS
    """Fields of an identity that older files lack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        self._older = Older()
        self._runs: set[str] = set()
        self._run = ""
        self._file: Any = None

    @abstractmethod
    def read(self, text: str) -> Iterable[Mapping[str, Any]]:
        """Lines of a file, checked."""

    @abstractmethod
    def place(self, line: Mapping[str, Any], setup: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a run says of the fields in ``later`` that a record of it lacks."""

    def has(self, identity: Mapping[str, Any]) -> bool:
        """Whether a record need not be made again.

        Args:
            identity: What names it.
        """
        return content_id(identity) in self.done or self._older.has(identity, self.later)

    def counts(self, line: Mapping[str, Any]) -> bool:
        """Whether a record need not be made again."""
        return True

    def __enter__(self) -> Self:
        """Lock the file, drop an unfinished last line, and learn what is there."""
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"{self.path} is being written by another process") from error
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        setups: dict[str, Mapping[str, Any]] = {}
        for line in self.read(data[:whole].decode()):
            if line["kind"] == "run":
                self._runs.add(line["run"])
                setups[line["run"]] = line["setup"]
            elif self.counts(line):
                self.done.add(line["id"])
                if line["run"] in setups and any(name not in line for name in self.later):
                    self._older.add(line, self.place(line, setups[line["run"]]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the file back."""
        self._file.close()

    def begin_run(self, setup: Mapping[str, Any]) -> str:
        """Say what the next records were measured with; written only if it is new."""
        self._run = content_id(setup)
        if self._run not in self._runs:
            self._runs.add(self._run)
            self._append({"kind": "run", "format": self.format, "run": self._run, "setup": setup})
        return self._run

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(canonical_json(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class RecordFile(LineFile):
    """Points of a sweep."""

    format = FORMAT

    def read(self, text: str) -> Iterable[Mapping[str, Any]]:
        """Lines of a file, checked."""
        return read_lines(text, self.path)

    def place(self, line: Mapping[str, Any], setup: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the substrate of a run says; of a controller's pages older ones say nothing."""
        said = setup.get("substrate", {})
        known = {name: said[name] for name in ("device", "backend") if name in said}
        # such as "float32 compute, bfloat16 dense pages"
        return {**known, "dtype": said["dtype"].split()[0]} if "dtype" in said else known

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a point.

        Raises:
            ValueError: A point with its id is there already, or no run was begun.
        """
        if not self._run:
            raise ValueError("begin_run comes before the first point")
        if record["id"] in self.done:
            raise ValueError(f"point {record['id']} is in {self.path} already")
        self._append({"kind": "point", "run": self._run, **record})
        self.done.add(record["id"])


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_lines(text: str, path: Path) -> list[dict[str, Any]]:
    """Parse whole lines, and refuse what is no record or is there twice."""
    lines = []
    seen: set[tuple[str, str]] = set()
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
            key = (line["kind"], line["run"] if line["kind"] == "run" else line["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no record: {error}") from error
        if line["kind"] == "run" and line.get("format") != FORMAT:
            raise ValueError(
                f"{path}, line {number}, has format {line.get('format')!r}, not {FORMAT!r}"
            )
        if key in seen:
            raise ValueError(f"{path}, line {number}: {key[0]} {key[1]} is there twice")
        seen.add(key)
        lines.append(line)
    return lines


def load_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Points of some files, each with its run's ``setup``.

    An unfinished last line is left out, as the next writer would.
    """
    records = []
    for path in paths:
        data = path.read_bytes()
        lines = read_lines(data[: data.rfind(b"\n") + 1].decode(), path)
        setups = {line["run"]: line["setup"] for line in lines if line["kind"] == "run"}
        for line in lines:
            if line["kind"] != "point":
                continue
            if line["run"] not in setups:
                raise ValueError(f"{path}: point {line['id']} names run {line['run']}, not there")
            records.append({**line, "setup": setups[line["run"]]})
    return records


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change when the same point is measured again."""
    return {name: value for name, value in record.items() if name != TIMES}
