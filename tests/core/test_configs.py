# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sphkv.core.configs import build_config, config_to_dict, resolve_config


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    key_bits: float = 2.0

    def __post_init__(self) -> None:
        if self.key_bits <= 0:
            raise ValueError(f"key_bits must be positive, got {self.key_bits}")


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    context: int = 4096
    is_paged: bool = True
    scale: float | None = None
    backend: Literal["auto", "reference"] = "auto"
    tiers: tuple[Tier, ...] = ()
    depths: tuple[float, ...] = ()
    main: Tier = field(default_factory=lambda: Tier("main"))
    spare: Tier | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    out: Path | None = None


def test_defaults_apply_and_types_are_kept():
    run = build_config(Run, {"model": "m", "scale": 2, "tiers": [{"name": "a"}], "depths": [1]})
    assert run == Run("m", scale=2.0, tiers=(Tier("a"),), depths=(1.0,))
    assert type(run.scale) is type(run.depths[0]) is float
    assert build_config(Run, {"model": "m", "out": "a/b"}).out == Path("a/b")
    assert build_config(Run, {"model": "m", "spare": None}).spare is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"modell": "m"}, ["'modell'", "'m'", "did you mean 'model'"]),
        ({"model": "m", "zzz": 5}, ["'zzz'", "5", "known keys"]),
        ({}, ["Run", "missing", "'model'"]),
        ({"model": 3}, ["'model'", "str", "3 (int)"]),
        ({"model": "m", "context": "4096"}, ["'context'", "int", "'4096' (str)"]),
        ({"model": "m", "context": 4096.0}, ["'context'", "4096.0 (float)"]),
        ({"model": "m", "context": True}, ["'context'", "True (bool)"]),
        ({"model": "m", "context": None}, ["'context'", "None"]),
        ({"model": "m", "is_paged": 1}, ["'is_paged'", "1 (int)"]),
        ({"model": "m", "scale": True}, ["'scale'", "True"]),
        ({"model": "m", "backend": "cuda"}, ["'backend'", "'cuda'", "'reference'"]),
        ({"model": "m", "backend": 3.0}, ["'backend'", "3.0"]),
        ({"model": "m", "depths": [0.5, "a"]}, ["'depths[1]'", "float", "'a' (str)"]),
        ({"model": "m", "tiers": "ab"}, ["'tiers'", "'ab'"]),
        ({"model": "m", "tiers": [{"name": "a"}, {"nam": "b"}]}, ["'tiers[1].nam'", "'b'"]),
        ({"model": "m", "tiers": [5]}, ["'tiers[0]'", "5"]),
        ({"model": "m", "main": {"name": "a", "key_bits": -1}}, ["'main'", "-1"]),
        ({"model": "m", "main": {}}, ["'main'", "missing", "'name'"]),
        ({"model": "m", "spare": {"name": 1}}, ["'spare.name'", "1 (int)"]),
        ({"model": "m", "limits": {"a": "b"}}, ["'limits.a'", "'b'"]),
        ({"model": "m", "limits": 3}, ["'limits'", "a table", "3"]),
        ({"model": "m", "out": 4}, ["'out'", "4"]),
        ([("model", "m")], ["the config", "a table"]),
    ],
)
def test_bad_data_is_refused_by_key_and_value(data: Any, words: list[str]):
    with pytest.raises(ValueError, match=r".") as caught:
        build_config(Run, data)
    for word in words:
        assert word in str(caught.value)


def test_a_field_of_another_type_is_refused():
    @dataclass(frozen=True)
    class Odd:
        items: list[int]

    with pytest.raises(ValueError, match=r"'items'.*list.*\[1\]"):
        build_config(Odd, {"items": [1]})


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('model = "file"\ncontext = 8\n[main]\nname = "a"\nkey_bits = 3\n')
    assert resolve_config(Run, path=path, flags={}) == Run("file", 8, main=Tier("a", 3.0))
    run = resolve_config(Run, path=path, flags={"context": 9})
    assert run == Run("file", context=9, main=Tier("a", 3.0))
    with pytest.raises(ValueError, match=r"unknown key 'contxt' \(value 9\)"):
        resolve_config(Run, path=path, flags={"contxt": 9})


def test_unreadable_files_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read.*none\.toml"):
        resolve_config(Run, path=tmp_path / "none.toml", flags={})
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ValueError, match=r"broken\.toml.*not TOML"):
        resolve_config(Run, path=broken, flags={})
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"broken\.toml.*not TOML"):
        resolve_config(Run, path=broken, flags={})


tiers = st.builds(Tier, name=st.text(), key_bits=st.floats(0.5, 8))


@given(
    st.builds(
        Run,
        model=st.text(),
        context=st.integers(),
        is_paged=st.booleans(),
        scale=st.none() | st.floats(allow_nan=False),
        backend=st.sampled_from(["auto", "reference"]),
        tiers=st.lists(tiers, max_size=3).map(tuple),
        depths=st.lists(st.floats(0, 1), max_size=3).map(tuple),
        main=tiers,
        spare=st.none() | tiers,
        limits=st.dictionaries(st.text(), st.integers(), max_size=3),
        out=st.none() | st.just(Path("a/b")),
    )
)
def test_a_record_rebuilds_its_config(run: Run):
    record = json.loads(json.dumps(config_to_dict(run)))
    assert build_config(Run, record) == run


def test_a_record_holds_only_plain_values():
    with pytest.raises(ValueError, match="dataclass instance"):
        config_to_dict({"model": "m"})
    with pytest.raises(ValueError, match=r"'limits' holds .*object"):
        config_to_dict(dataclasses.replace(Run("m"), limits=object()))  # type: ignore[arg-type]
