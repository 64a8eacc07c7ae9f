# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels on the CPU: their own source, compiled as C++ and run thread by thread.

What is checked so is what a kernel computes: layouts, indices, barriers that must meet. Races
between threads, and what the GPU's compiler makes of the source, are not.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sphkv.attention.cuda import block_shares, compiler, decode, dense, encode, merge

HOST_KERNEL = Path(__file__).parent / "host_kernel"
# Named by what they are made of, so that all processes and runs of the tests share them.
BUILT = Path(__file__).parents[2] / ".pytest_cache" / "host-kernels"
PARAMS = {
    "sphkv_decode": "Params",
    "sphkv_dense": "DenseParams",
    "sphkv_encode_keys": "EncodeParams",
    "sphkv_encode_values": "EncodeParams",
    "sphkv_merge": "MergeParams",
    "sphkv_reorder": "ReorderParams",
    "sphkv_share": "ShareParams",
}
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC")
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) uint8_t shared_memory\[\];")


@functools.cache
def _build(name: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    command = shutil.which("g++")
    if command is None:
        pytest.skip("no g++ to compile the kernel for the CPU")
    memory = "uint8_t* shared_memory = host::block.shared + host::SHARED_START;"
    files = {file: _SHARED.sub(memory, text) for file, text in compiler.sources().items()}
    files |= {path.name: path.read_text() for path in HOST_KERNEL.iterdir()}
    names = {"SOURCE": f'"{compiler.MAIN[name]}"', "ENTRY": name, "PARAMS": PARAMS[name]}
    flags = [*_FLAGS]
    flags += [*(f"-D{key}={value}" for key, value in names.items()), *defines]
    made_of = json.dumps([files, flags, Path(command).stat().st_mtime_ns], sort_keys=True)
    library = BUILT / f"{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.so"
    if not library.is_file():
        _compile(command, flags, files, library)
    built = ctypes.CDLL(str(library))
    built.launch.restype = ctypes.c_char_p
    built.launch.argtypes = (ctypes.c_void_p, *[ctypes.c_int] * 4)
    return built


def _compile(command: str, flags: list[str], files: dict[str, str], library: Path) -> None:
    headers = _compile_headers(command)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        for file, text in files.items():
            (Path(folder) / file).write_text(text)
        made, source = Path(folder) / library.name, Path(folder) / "launch.cpp"
        _run(command, *flags, "-shared", "-include", headers, "-o", made, source)
        # whole or not at all, as another process may look for it
        made.replace(library)


def _compile_headers(command: str) -> Path:
    """The header whose compiled form lies beside it: a third of the time of every kernel."""
    text = (HOST_KERNEL / "standard.h").read_text()
    made_of = json.dumps([text, _FLAGS, Path(command).stat().st_mtime_ns])
    header = BUILT / hashlib.sha256(made_of.encode()).hexdigest()[:24] / "standard.h"
    if not header.is_file():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            made = Path(folder) / "headers"
            made.mkdir()
            (made / header.name).write_text(text)
            _run(command, *_FLAGS, "-x", "c++-header", made / header.name)
            # another process may have been as quick
            with contextlib.suppress(OSError):
                made.replace(header.parent)
    return header


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


class HostKernel:
    """Stands for ``Kernel``; a launch runs one block after another."""

    def __init__(self, image: Any, name: str, *, shared_bytes: int, threads: int) -> None:
        self._library, self._threads = _build(*image), threads

    def launch(self, blocks: Any, arguments: Any, *, overlaps: bool = False) -> None:
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        found = self._library.launch(arguments[0], *grid, self._threads)
        if found:
            raise RuntimeError(found.decode())


def _filled(make):
    """``make`` with its result full of what nobody may take for an answer."""

    @functools.wraps(make)
    def filled(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.is_floating_point():
            made.fill_(torch.nan)
        elif made.dtype == torch.uint8:
            made.fill_(0xFF)
        return made

    return filled


@pytest.fixture(autouse=True)
def fresh_memory_is_no_number(monkeypatch):
    """An element that a kernel leaves out then shows in what is computed from it."""
    for place, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(place, name, _filled(getattr(place, name)))


@pytest.fixture
def on_the_host(monkeypatch):
    """Makes kernels run on CPU tensors, as on a GPU of so many multiprocessors."""

    def use(processors: int = 6, sources: dict[str, str] | None = None) -> None:
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        for module in (block_shares, decode, dense, encode, merge):
            monkeypatch.setattr(module, "architecture", lambda _: "host")
            monkeypatch.setattr(module, "load_cubin", lambda name, defines, _: (name, defines))
            monkeypatch.setattr(module, "Kernel", HostKernel)
        if sources is not None:
            monkeypatch.setattr(compiler, "sources", lambda: sources)
            _build.cache_clear()
            changed.append(sources)

    changed: list[dict[str, str]] = []
    yield use
    if changed:
        _build.cache_clear()
