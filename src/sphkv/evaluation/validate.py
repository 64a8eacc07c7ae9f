# SPDX-License-Identifier: Apache-2.0
"""``sphkv validate``: whether a record file holds what ``schema.py`` says, field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from sphkv.evaluation.schema import (
    CERTIFICATE_FORMAT,
    FORMAT,
    AnswerQuality,
    Certificate,
    EpisodeQuality,
    Point,
    Run,
    TextQuality,
)

_QUALITY_OF = {
    "lm": TextQuality,
    "qa": AnswerQuality,
    "needle": AnswerQuality,
    "tools": EpisodeQuality,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in a record file that is not as it should be.

    Attributes:
        line: Number of the line, from 1 on.
        field: Path of the field, such as ``memory.setting``; empty for the whole line.
        problem: What is wrong with it.
    """

    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        """As a compiler would say it."""
        where = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{where}: {self.problem}"


def validate_file(path: Path) -> list[Fault]:
    """Everything that is wrong with a record file or certificate; an empty list if nothing is."""
    faults: list[Fault] = []
    runs: set[str] = set()
    seen: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if _is_certificate(text):
        wrong = check_value(json.loads(text), Certificate)
        return [Fault(1, field, problem) for field, problem in wrong]
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
        except ValueError as error:
            faults.append(Fault(number, "", f"is no JSON: {error}"))
            continue
        found = list(_check_line(line, runs, seen))
        faults += [Fault(number, field, problem) for field, problem in found]
    return faults


def _is_certificate(text: str) -> bool:
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("format") == CERTIFICATE_FORMAT


def _check_line(line: Any, runs: set[str], seen: set[str]) -> Iterator[tuple[str, str]]:
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind == "run":
        yield from check_value(line, Run)
        if line.get("format") != FORMAT:
            yield "format", f"is {line.get('format')!r}, not {FORMAT!r}"
        runs.add(str(line.get("run")))
    elif kind == "point":
        yield from check_point(line)
        if line.get("run") not in runs:
            yield "run", f"names {line.get('run')!r}, and no line before has that run"
        if str(line.get("id")) in seen:
            yield "id", f"{line.get('id')!r} is there twice"
        seen.add(str(line.get("id")))
    else:
        yield "kind", f"must be 'run' or 'point', got {kind!r}"


def check_point(point: Any) -> Iterator[tuple[str, str]]:
    """Fields of a point that are missing, too many, of another type or contradict each other."""
    found = list(check_value(point, Point, skip=("quality",)))
    yield from found
    parts = {name: point.get(name) for name in ("quality", "memory", "times")}
    if point.get("status") == "refused":
        yield from ((n, "must be null where refused") for n, v in parts.items() if v is not None)
        if not point.get("reason"):
            yield "reason", "must say why the point was refused"
        return
    missing = [name for name, value in parts.items() if value is None]
    yield from ((name, "must not be null where measured") for name in missing)
    wanted = _QUALITY_OF.get(str(point.get("workload")))
    if wanted is not None and parts["quality"] is not None:
        yield from check_value(parts["quality"], wanted, path="quality")
    if not found and parts["memory"] is not None:
        yield from _check_memory(parts["memory"])


def _check_memory(memory: Any) -> Iterator[tuple[str, str]]:
    for name in ("setting", "residency", "realisation"):
        if not memory[name]:
            yield f"memory.{name}", "must not be empty"
    steps = memory["steps"]
    if len({len(column) for column in steps.values()}) != 1:
        yield "memory.steps", "columns differ in length"
    elif steps["peak"] and max(steps["peak"]) != memory["peak_bytes"]:
        yield "memory.peak_bytes", f"is {memory['peak_bytes']}, the steps say {max(steps['peak'])}"


def check_value(
    value: Any, wanted: Any, *, path: str = "", skip: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Compare JSON data with a type: a ``TypedDict``, a list, a dict, a union or a plain type.

    Args:
        value: The data.
        wanted: The type.
        path: Where it stands; prefix of the fields that are named.
        skip: Fields of the outermost ``TypedDict`` whose values are not looked at.

    Yields:
        Field and problem.
    """
    origin = get_origin(wanted)
    if wanted is Any:
        return
    if is_typeddict(wanted):
        yield from _check_fields(value, wanted, path, skip)
    elif origin in (Union, UnionType):
        yield from _check_options(value, get_args(wanted), path)
    elif origin is Literal:
        if value not in get_args(wanted):
            yield path, f"is {_show(value)}, not one of {', '.join(map(repr, get_args(wanted)))}"
    elif origin is list:
        yield from _check_items(value, list, get_args(wanted)[0], path)
    elif origin is dict:
        yield from _check_items(value, dict, get_args(wanted)[1], path)
    elif not _is_plain(value, wanted):
        yield path, f"is {_show(value)}, not {_name(wanted)}"


def _check_options(value: Any, options: tuple[Any, ...], path: str) -> Iterator[tuple[str, str]]:
    others = [option for option in options if option is not NoneType]
    if value is None and len(others) < len(options):
        return
    tries = [list(check_value(value, option, path=path)) for option in others]
    if len(tries) == 1:
        yield from tries[0]
    elif all(tries):
        yield path, f"is {_show(value)}, not {' or '.join(map(_name, others))}"


def _check_fields(
    value: Any, wanted: Any, path: str, skip: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, f"is {_show(value)}, not an object"
        return
    hints = get_type_hints(wanted, include_extras=True)
    optional = {name for name, kind in hints.items() if get_origin(kind) is NotRequired}
    for name in sorted(hints.keys() - optional - value.keys()):
        yield _join(path, name), "is missing"
    for name in sorted(value.keys() - hints.keys()):
        yield _join(path, name), "is no known field"
    for name, kind in hints.items():
        if name in value and name not in skip:
            plain = get_args(kind)[0] if name in optional else kind
            yield from check_value(value[name], plain, path=_join(path, name))


def _check_items(value: Any, kind: Any, item: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, kind):
        yield path, f"is {_show(value)}, not {'a list' if kind is list else 'an object'}"
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in pairs:
        yield from check_value(part, item, path=_join(path, str(name)))


def _is_plain(value: Any, wanted: Any) -> bool:
    if wanted is NoneType:
        return value is None
    if wanted is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _name(wanted: Any) -> str:
    return getattr(wanted, "__name__", str(wanted).replace("sphkv.evaluation.schema.", ""))
