# SPDX-License-Identifier: Apache-2.0
"""The decode kernel's own source on the CPU: compiled as C++, run thread by thread.

What is checked is what the kernel computes: layouts, indices, barriers that must meet, merging of
warps and blocks. Races between threads and what the GPU's compiler makes of it are not.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sphkv.attention.cuda import compiler, decode
from sphkv.testing.decode_cases import CASES, ERROR_FLOOR, run_case

HOST_KERNEL = Path(__file__).parent / "host_kernel"
# Cases that share what these build, or differ in little, are left to the GPU.
CHOSEN = (
    "ragged, empty, partial",
    "runs, group 8",
    "a position per token",
    "tokens, ragged, window, d=64, group 8",
    "window, soft-cap, sinks",
    "merged with another partial, sinks",
    "all hidden",
    "group 1",
    "group 16",
    "head dim 64",
    "values 3 bits",
    "values 16 bits",
    "128 slots",
)


@functools.cache
def build(defines: tuple[str, ...]) -> ctypes.CDLL:
    command = shutil.which("g++")
    if command is None:
        pytest.skip("no g++ to compile the kernel for the CPU")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in compiler.sources().items():
            (Path(folder) / name).write_text(text)
        for path in HOST_KERNEL.iterdir():
            shutil.copy(path, folder)
        library = Path(folder) / "kernel.so"
        flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defines, "-o", str(library)]
        source = Path(folder) / "launch.cpp"
        done = subprocess.run(
            [command, *flags, str(source)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[:2000]
        built = ctypes.CDLL(str(library))
    built.launch.restype = ctypes.c_char_p
    built.launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return built


class HostKernel:
    """Stands for ``Kernel``; a launch runs one block after another."""

    def __init__(self, image: Any, name: str, *, shared_bytes: int, threads: int) -> None:
        self._library, self._threads = build(image), threads

    def launch(self, blocks: int, arguments: Any, *, overlaps: bool = False) -> None:
        found = self._library.launch(arguments[0], blocks, self._threads)
        if found:
            raise RuntimeError(found.decode())


@pytest.fixture
def on_the_host(monkeypatch):
    """Makes ``CudaDecode`` run on CPU tensors, as on a GPU of so many multiprocessors."""

    def use(processors: int) -> None:
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(decode, "architecture", lambda _: "host")
        monkeypatch.setattr(decode, "load_cubin", lambda _, defines, __: defines)
        monkeypatch.setattr(decode, "Kernel", HostKernel)

    return use


@pytest.mark.parametrize("name", CHOSEN)
def test_the_kernel_computes_attention(on_the_host, name):
    torch.manual_seed(CHOSEN.index(name))
    on_the_host(6)
    assert run_case(CASES[name], torch.device("cpu")) < ERROR_FLOOR


def test_many_blocks_merge_one_row(on_the_host):
    """More blocks than are merged at a time, and the same answer."""
    torch.manual_seed(1)
    on_the_host(40)
    case = replace(CASES["merged with another partial, sinks"], counts=((38,), (1,)))
    assert run_case(case, torch.device("cpu")) < ERROR_FLOOR


def test_a_barrier_that_nobody_meets_is_reported(on_the_host, monkeypatch):
    """The check itself can fail: without an arrival the threads wait for ever."""
    sources = dict(compiler.sources())
    arrival = "if (place.lane == 0) barrier_arrive(empty_barrier(stage.index));"
    assert arrival in sources["decode.cu"]
    sources["decode.cu"] = sources["decode.cu"].replace(arrival, "")
    monkeypatch.setattr(compiler, "sources", lambda: sources)
    build.cache_clear()
    on_the_host(2)
    with pytest.raises(RuntimeError, match="all threads wait"):
        run_case(CASES["values 2 bits"], torch.device("cpu"))
    build.cache_clear()
