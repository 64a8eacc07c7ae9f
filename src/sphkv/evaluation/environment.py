# SPDX-License-Identifier: Apache-2.0
"""The machine under a measurement: what a record says about it, and ranges its profiler shows."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_SOURCES = (".py", ".cu", ".cuh", ".toml")
_BUILT = ("__pycache__", "cubins")
_PACKAGES = ("sphkv", "torch", "transformers", "triton", "numpy", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Processor, versions and commit; these runs use the processor, whatever GPU stands beside."""
    return {
        "device": _processor_name(),
        "gpu": str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None,
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "tree": source_tree(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """Commit of a source checkout when first asked for; None for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@functools.cache
def source_tree() -> str:
    """Git's name of this package's folder, where there is no git to ask for a commit.

    It equals ``git rev-parse COMMIT:src/sphkv`` of the commit that the files are from.
    """
    return _tree_id(Path(__file__).resolve().parents[1]).hex()[:12]


def _tree_id(folder: Path) -> bytes:
    """SHA-1 of a folder as git stores it, of sources alone; empty if there are none."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path.name not in _BUILT:
            # git sorts a folder as if its name ended in a slash
            entries.append((f"{path.name}/", b"40000", _tree_id(path)))
        elif path.suffix in _SOURCES or path.name == "py.typed":
            entries.append((path.name, b"100644", _git_id(b"blob", path.read_bytes())))
    rows = (
        mode + b" " + name.rstrip("/").encode() + b"\0" + own
        for name, mode, own in sorted(entries)
        if own
    )
    data = b"".join(rows)
    return _git_id(b"tree", data) if data else b""


def _git_id(kind: bytes, data: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(data) + data, usedforsecurity=False).digest()


@contextmanager
def gpu_range(name: str) -> Iterator[None]:
    """An NVTX range around what runs inside; nothing where CUDA is not in use."""
    # asking whether a GPU is there would start the driver; only a program that uses one pays
    if not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
