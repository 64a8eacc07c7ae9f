# SPDX-License-Identifier: Apache-2.0
"""Rules of the project that no linter knows."""

import ast
import fnmatch
import importlib
import re
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


def test_functions_stay_small():
    too_long = []
    for path in SOURCES:
        limit = 120 if path.parent.name == "triton" else 50
        too_long += [f"{relative(path)}: {name}" for name, size in functions(path) if size >= limit]
    assert too_long == []


def test_every_source_folder_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [relative(path) for path in folders if not (path / "__init__.py").is_file()] == []


def golden_names(tests: Path) -> list[str]:
    """Strings of the test files below a folder; what an f-string leaves open becomes ``*``."""
    names = []
    for path in tests.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.append(escape_stars(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    escape_stars(str(part.value)) if isinstance(part, ast.Constant) else "*"
                    for part in node.values
                ]
                # a pattern of little more than stars would vouch for every file
                if sum(len(part) for part in parts if part != "*") > len(".bin"):
                    names.append("".join(parts))
    return names


def escape_stars(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def unread_golden_files(tests: Path) -> list[str]:
    """Files below ``golden`` that no test of the folder names."""
    folder = tests / "golden"
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    if not files:
        return []
    names = golden_names(tests)
    return [
        file.as_posix()
        for file in files
        if not any(fnmatch.fnmatchcase(file.as_posix(), name) for name in names)
    ]


def test_every_golden_file_is_read_by_a_test():
    assert unread_golden_files(CHECKOUT / "tests") == []


def test_a_golden_file_that_no_test_reads_is_found(tmp_path: Path):
    golden = tmp_path / "golden" / "pages"
    golden.mkdir(parents=True)
    for name in ("k2v3.bin", "tokens-k2v3.bin", "tokens-old.bin", "orphan.bin"):
        (golden / name).touch()
    (tmp_path / "test_pages.py").write_text(
        """
def test_pages(golden, tier, made):
    golden.check("pages/k2v3.bin", made)
    golden.check(f"pages/tokens-k{tier}.bin", made)
    golden.check(f"{tier}.bin", made)
""",
        encoding="utf-8",
    )
    assert unread_golden_files(tmp_path) == ["pages/orphan.bin", "pages/tokens-old.bin"]


def test_errors_live_in_one_file_that_imports_nothing():
    elsewhere = [
        f"{relative(path)}: {node.name}"
        for path in SOURCES
        if path != PACKAGE / "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    ]
    assert elsewhere == []
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    assert [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))] == []


def test_contributing_names_files_that_exist():
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+(?:/|\.py|\.toml|\.txt|\.md))`", text))
    optional = {"pg19/", "tests/golden/"}
    places = (PACKAGE, CHECKOUT)
    gone = [name for name in named - optional if not any((at / name).exists() for at in places)]
    assert len(named) > 40
    assert sorted(gone) == []


def test_version_is_the_same_everywhere():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == sphkv.__version__


@pytest.mark.parametrize("name", sphkv.__all__)
def test_public_names_exist(name: str):
    if sphkv._HOMES.get(name, "").startswith("sphkv.integrations"):
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
