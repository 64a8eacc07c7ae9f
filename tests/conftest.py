# SPDX-License-Identifier: Apache-2.0
"""What every test relies on: threads, offline libraries, golden files and shared data."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# Before anything imports Triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Nothing is fetched at test time. transformers reads this when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor is anything found that the user has kept.
os.environ["SPHKV_CACHE"] = os.devnull

# Workers share the cores already.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Machines that run tests are slow and shared, so an example may take any time.
settings.register_profile("sphkv", deadline=None, print_blob=True)
settings.load_profile("sphkv")

CHECKOUT = Path(__file__).resolve().parent.parent
GOLDEN_DIR = CHECKOUT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


@dataclass(frozen=True, slots=True)
class GoldenFiles:
    """Compares bytes with ``tests/golden/<name>``, or rewrites the file on ``--update-golden``."""

    is_update: bool

    def read(self, name: str, actual: bytes) -> bytes:
        """What was expected, or ``actual`` if the file is rewritten."""
        path = GOLDEN_DIR / name
        if self.is_update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(actual)
        if not path.is_file():
            pytest.fail(f"no golden file {name!r}; write it with pytest --update-golden")
        return path.read_bytes()

    def check(self, name: str, actual: bytes) -> None:
        expected = self.read(name, actual)
        if actual != expected:
            pairs = zip(actual, expected, strict=False)
            shorter = min(len(actual), len(expected))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            pytest.fail(
                f"golden file {name!r} differs from byte {at} on: {len(expected)} bytes expected, "
                f"{len(actual)} made"
            )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> GoldenFiles:
    return GoldenFiles(is_update=bool(request.config.getoption("--update-golden")))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the evaluation data (``pg19/`` and so on), which is no part of the checkout."""
    given = os.environ.get("SPHKV_DATA")
    folder = Path(given) if given else CHECKOUT.parent / "shared" / "data"
    if not (folder / "pg19").is_dir():
        pytest.skip(f"no evaluation data in {str(folder)!r}; set SPHKV_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M in float32, as (model, tokenizer)."""
    models = pytest.importorskip(
        "sphkv.integrations.models", reason="the extra sphkv[transformers] is not installed"
    )
    try:
        models.smollm2_gguf()
    except ValueError as error:
        pytest.skip(str(error))
    model, tokenizer = models.load_model("smollm2")
    return model, tokenizer
