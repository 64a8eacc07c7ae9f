# SPDX-License-Identifier: Apache-2.0
"""Rules of the project that no linter knows."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sphkv

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = CHECKOUT / "src" / "sphkv"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = sorted(
    file
    for folder in ("src", "tests", "benchmarks", "examples")
    for file in (CHECKOUT / folder).rglob("*.py")
)


def relative(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines, docstring not counted, of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                text = node.body[0]
                assert text.end_lineno is not None
                num_lines -= text.end_lineno - text.lineno + 1
            yield node.name, num_lines


def test_every_python_file_names_its_licence():
    bare = [
        relative(path)
        for path in PYTHON_FILES
        if not path.read_text(encoding="utf-8").startswith(
            "# SPDX-License-Identifier: Apache-2.0\n"
        )
    ]
    assert bare == []


def test_files_and_functions_stay_small():
    too_long = [
        relative(path)
        for path in SOURCES
        if len(path.read_text(encoding="utf-8").splitlines()) > 600
    ]
    for path in SOURCES:
        limit = 120 if "attention/triton" in path.as_posix() else 50
        too_long += [f"{relative(path)}: {name}" for name, size in functions(path) if size >= limit]
    assert too_long == []


def test_files_are_named_after_what_they_hold():
    vague = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [relative(path) for path in SOURCES if path.name in vague] == []


def test_every_source_folder_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [relative(path) for path in folders if not (path / "__init__.py").is_file()] == []


def test_every_golden_file_is_read_by_a_test():
    golden = CHECKOUT / "tests" / "golden"
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("test_*.py")
    )
    unread = [path.name for path in golden.rglob("*") if path.is_file() and path.name not in tests]
    assert unread == []


def test_version_is_the_same_everywhere():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sphkv.__version__


def test_readme_is_short():
    assert len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()) < 250


@pytest.mark.parametrize("name", sphkv.__all__)
def test_public_names_exist(name: str):
    if name == "load_model":
        pytest.importorskip("transformers", reason="sphkv[transformers] is not installed")
    assert getattr(sphkv, name) is not None
    assert name in dir(sphkv)


def test_public_names_have_one_home():
    homes = {name: getattr(sphkv, name).__module__ for name in sphkv._HOMES}
    assert homes == sphkv._HOMES
    assert sorted(sphkv.__all__) == sorted([*sphkv._HOMES, "__version__"])


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        importlib.import_module("sphkv").nonsense  # noqa: B018


def test_import_loads_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import sphkv; "
        "print(*sorted(m for m in set(sys.modules) - before if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "sphkv" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "triton", "gguf", "matplotlib"}
