# SPDX-License-Identifier: Apache-2.0
"""Strict configs: frozen dataclasses built from dicts, TOML files and flags.

Nothing is guessed: an unknown key, a missing key or a value of the wrong type is a
``ValueError`` that names the key and the value. Precedence is defaults, then file, then flags.
"""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

ConfigT = TypeVar("ConfigT")


def build_config(
    config_type: type[ConfigT], data: Mapping[str, object], *, key: str = ""
) -> ConfigT:
    """Build a config dataclass from plain data.

    Fields may be ``bool``, ``int``, ``float`` (which also takes an int), ``str``, ``Path``,
    ``Literal``, string enums, unions (``X | None``), tuples, ``Mapping[str, X]`` and other
    dataclasses.

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
    if not (isinstance(config_type, type) and dataclasses.is_dataclass(config_type)):
        raise ValueError(f"config type must be a dataclass, got {config_type!r}")
    if not isinstance(data, Mapping):
        raise _wrong_type(key, "a table", data)
    fields = {field.name: field for field in dataclasses.fields(config_type) if field.init}
    hints = get_type_hints(config_type)
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in fields:
            raise ValueError(_unknown_key(_join(key, name), value, list(fields)))
        values[name] = _convert(value, hints[name], _join(key, name))
    for name, field in fields.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if name not in values and not has_default:
            raise ValueError(f"missing key {_join(key, name)!r} of {config_type.__name__}")
    try:
        return cast(ConfigT, config_type(**values))
    except ValueError as error:
        if not key:
            raise
        raise ValueError(f"{key!r}: {error}") from error


def resolve_config(
    config_type: type[ConfigT],
    *,
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> ConfigT:
    """Build a config from its defaults, a TOML file and flags, the later ones winning.

    Args:
        config_type: A dataclass type.
        path: A TOML file whose top level holds the config's fields, or None.
        flags: Values given on the command line, by field name; a nested mapping changes only
            the fields it names. Leave out a flag that was not given.

    Returns:
        An instance of ``config_type``.

    Raises:
        ValueError: The file cannot be read or is not TOML, or as ``build_config``.
    """
    data = {} if path is None else read_toml(path)
    return build_config(config_type, _merge(data, flags or {}))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, naming the file in every error.

    Raises:
        ValueError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read config file {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"config file {str(path)!r} is not TOML: {error}") from error


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
        if field.init
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_to_dict(value)
    raise ValueError(f"key {key!r} holds {value!r}, which a record cannot store")


def _convert(value: object, hint: Any, key: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _convert_literal(value, get_args(hint), key)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, key)
    if origin is tuple:
        return _convert_tuple(value, hint, key)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _convert_mapping(value, hint, key)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, cast(type, hint)):
            return value
        return build_config(cast(type, hint), cast(Mapping[str, object], value), key=key)
    return _convert_scalar(value, hint, key)


def _convert_scalar(value: object, hint: Any, key: str) -> Any:
    if hint is Path:
        if isinstance(value, (str, Path)):
            return Path(value)
        raise _wrong_type(key, "a path", value)
    if hint is type(None):
        if value is None:
            return None
        raise _wrong_type(key, "nothing", value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(_convert_literal(value, tuple(str(member) for member in hint), key))
    # bool is a subclass of int, so types are compared exactly.
    if type(value) is hint and hint in (bool, int, float, str):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if hint not in (bool, int, float, str):
        raise ValueError(f"key {key!r} has the unsupported type {hint!r}; its value is {value!r}")
    raise _wrong_type(key, _type_name(hint), value)


def _convert_literal(value: object, choices: tuple[object, ...], key: str) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    raise ValueError(f"key {key!r} must be one of {_list(choices)}, got {value!r}")


def _convert_union(value: object, hint: Any, key: str) -> object:
    members = get_args(hint)
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return _convert(value, members[0], key)
    # An exact match first, so that `float | int` keeps an int an int.
    for member in members:
        if type(value) is member:
            return value
    for member in members:
        try:
            return _convert(value, member, key)
        except ValueError:
            continue
    raise _wrong_type(key, _type_name(hint), value)


def _convert_tuple(value: object, hint: Any, key: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(key, _type_name(hint), value)
    members = get_args(hint)
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ValueError(f"key {key!r} must have {len(members)} items, got {value!r}")
    return tuple(
        _convert(item, member, f"{key}[{index}]")
        for index, (item, member) in enumerate(zip(value, members, strict=True))
    )


def _convert_mapping(value: object, hint: Any, key: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise _wrong_type(key, "a table", value)
    key_hint, item_hint = get_args(hint)
    if key_hint is not str:
        raise ValueError(f"key {key!r} has the unsupported type {hint!r}; its value is {value!r}")
    return {
        _convert_scalar(name, str, f"{key} (a key of it)"): _convert(
            item, item_hint, _join(key, name)
        )
        for name, item in value.items()
    }


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merge(below, value)
        merged[name] = value
    return merged


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _list(values: tuple[object, ...] | list[str]) -> str:
    return ", ".join(repr(value) for value in values)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)


def _wrong_type(key: str, expected: str, value: object) -> ValueError:
    place = f"key {key!r}" if key else "the config"
    return ValueError(f"{place} must be {expected}, got {value!r} ({type(value).__name__})")


def _unknown_key(key: str, value: object, known: list[str]) -> str:
    close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {_list(known) or 'none'}"
    return f"unknown key {key!r} (value {value!r}); {hint}"
