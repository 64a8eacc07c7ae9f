# SPDX-License-Identifier: Apache-2.0
"""Strict configs: frozen dataclasses built from dicts, TOML files and flags.

Nothing is guessed: an unknown key, a missing key or a value of the wrong type is a
``ValueError`` that names the key and the value. Precedence is defaults, then file, then flags.
Names that people type are checked against the known ones.
"""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

ConfigT = TypeVar("ConfigT")


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The name if it is known.

    Args:
        kind: What the name stands for, for the message.
        name: As it was given.
        known: All names.

    Raises:
        ValueError: It is not; the message suggests the nearest ones.
    """
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(names))}"
    raise ValueError(f"there is no {kind} {name!r}; {hint}")


def freeze_sequences(instance: object, *names: str) -> None:
    """Turn lists in some fields of a frozen dataclass, and lists in these, into tuples.

    Whoever made it may hold on to a list and change it; and what configs are asked often is
    remembered by their hashes.
    """
    for name in names:
        object.__setattr__(instance, name, _frozen(getattr(instance, name)))


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def build_config(
    config_type: type[ConfigT], data: Mapping[str, object], *, key: str = ""
) -> ConfigT:
    """Build a config dataclass from plain data.

    Fields may be ``bool``, ``int``, ``float`` (which also takes an int), ``str``, ``Path``,
    ``Literal``, ``X | None``, ``tuple[X, ...]``, ``Mapping[str, X]`` and other dataclasses.

    Args:
        config_type: A dataclass type.
        data: Value of each field by name; fields left out keep their default.
        key: Name of this table inside a larger config, put before the keys in errors.

    Returns:
        An instance of ``config_type``.

    Raises:
        ValueError: A key is unknown or missing, a value has the wrong type, or the config's
            own check rejects it.
    """
    if not isinstance(data, Mapping):
        raise _wrong_type(key, "a table", data)
    names = [field.name for field in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    hints = get_type_hints(config_type)
    values: dict[str, Any] = {}
    for name, value in data.items():
        place = _join(key, name)
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"
            raise ValueError(f"unknown key {place!r} (value {value!r}); {hint}")
        values[name] = _convert(value, hints[name], place)
    try:
        return config_type(**values)
    except (TypeError, ValueError) as error:
        # a missing key is a TypeError of the dataclass; it names the key
        raise ValueError(f"{key!r}: {error}" if key else str(error)) from error


def resolve_config(
    config_type: type[ConfigT], *, path: Path, flags: Mapping[str, object]
) -> ConfigT:
    """Build a config from its defaults, a TOML file and flags, the later ones winning.

    Args:
        config_type: A dataclass type.
        path: A TOML file whose top level holds the config's fields.
        flags: Values given on the command line, by field name. Leave out a flag that was not
            given.

    Returns:
        An instance of ``config_type``.

    Raises:
        ValueError: The file cannot be read or is not TOML, or as ``build_config``.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read config file {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"config file {str(path)!r} is not TOML: {error}") from error
    return build_config(config_type, {**data, **flags})


def config_to_dict(config: object) -> dict[str, Any]:
    """Turn a config into plain data for a result record; ``build_config`` undoes it.

    Args:
        config: A dataclass instance.

    Returns:
        Nested dicts of JSON values: tuples become lists and paths become strings.

    Raises:
        ValueError: ``config`` is no dataclass instance, or holds a value JSON cannot.
    """
    if isinstance(config, type) or not dataclasses.is_dataclass(config):
        raise ValueError(f"config must be a dataclass instance, got {config!r}")
    return {
        field.name: _to_plain(getattr(config, field.name), field.name)
        for field in dataclasses.fields(config)
    }


def _to_plain(value: object, key: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_to_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item, _join(key, name)) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    raise ValueError(f"key {key!r} holds {value!r}, which a record cannot store")


def _convert(value: object, hint: Any, key: str) -> Any:
    origin, members = get_origin(hint), get_args(hint)
    if origin is types.UnionType and members[1:] == (type(None),):
        return None if value is None else _convert(value, members[0], key)
    if origin is Literal:
        if value not in members:
            raise ValueError(f"key {key!r} must be one of {members}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(key, "a list", value)
        kinds = (members[0],) * len(value) if members[1:] == (...,) else members
        if len(kinds) != len(value):
            raise ValueError(f"key {key!r} must have {len(kinds)} items, got {value!r}")
        both = zip(value, kinds, strict=True)
        return tuple(_convert(item, kind, f"{key}[{i}]") for i, (item, kind) in enumerate(both))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong_type(key, "a table", value)
        return {name: _convert(item, members[1], _join(key, name)) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return build_config(hint, value, key=key)  # type: ignore[arg-type]
    return _convert_scalar(value, hint, key)


def _convert_scalar(value: object, hint: type, key: str) -> Any:
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if issubclass(hint, StrEnum):
        if not isinstance(value, str) or value not in list(hint):
            raise ValueError(f"key {key!r} must be one of {[*map(str, hint)]}, got {value!r}")
        return hint(value)
    # bool is a subclass of int, so types are compared exactly
    if type(value) is not hint:
        raise _wrong_type(key, getattr(hint, "__name__", str(hint)), value)
    return value


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _wrong_type(key: str, expected: str, value: object) -> ValueError:
    place = f"key {key!r}" if key else "the config"
    return ValueError(f"{place} must be {expected}, got {value!r} ({type(value).__name__})")
