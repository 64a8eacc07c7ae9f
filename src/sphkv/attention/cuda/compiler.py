# SPDX-License-Identifier: Apache-2.0
"""Kernel sources to machine code: shipped or cached cubins first, then the run-time compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch

from sphkv.errors import CudaUnavailableError

# The file of each kernel; its other files are headers.
MAIN = {
    "sphkv_decode": "decode.cu",
    "sphkv_dense": "dense.cu",
    "sphkv_encode_keys": "encode_keys.cu",
    "sphkv_encode_values": "encode_values.cu",
    "sphkv_merge": "merge.cu",
    "sphkv_reorder": "reorder.cu",
    "sphkv_share": "share.cu",
}
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100f", (10, 3): "sm_100f"}
"""Compiler target by compute capability; the instructions in use need a target of one family."""

# One thread compiles a kernel, others that want it wait.
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

_LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def architecture(device: torch.device) -> str:
    """Compiler target of a device.

    Raises:
        CudaUnavailableError: There is no kernel for this device.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        raise CudaUnavailableError(
            f"decode kernels exist for compute capability {sorted(ARCHITECTURES)}, "
            f"device has {capability}"
        )
    return ARCHITECTURES[capability]


def sources() -> dict[str, str]:
    """All kernel sources by file name."""
    folder = resources.files("sphkv.attention.cuda") / "kernels"
    return {
        entry.name: entry.read_text()
        for entry in folder.iterdir()
        if entry.name.endswith((".cu", ".cuh"))
    }


@functools.cache
def _kernel_files(kernel: str) -> tuple[str, dict[str, str]]:
    """Source of a kernel and its headers."""
    files = sources()
    headers = {name: text for name, text in files.items() if name.endswith(".cuh")}
    return files[MAIN[kernel]], headers


def cubin_name(kernel: str, defines: Sequence[str], target: str) -> str:
    """File name that identifies sources, definitions and target."""
    identity = repr((_sources_hash(kernel), tuple(defines), target))
    return f"{kernel}-{target}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"


@functools.cache
def _sources_hash(kernel: str) -> str:
    main, headers = _kernel_files(kernel)
    return hashlib.sha256(repr((main, sorted(headers.items()))).encode()).hexdigest()


def load_cubin(kernel: str, defines: Sequence[str], target: str) -> bytes:
    """Machine code of a kernel: from the package, the disk cache, or compiled now and cached.

    Args:
        kernel: Entry point.
        defines: Compiler definitions, such as ``-DSPHKV_HEAD_DIM=128``.
        target: Architecture, such as ``sm_90a``.
    """
    name = cubin_name(kernel, defines, target)
    with _LOCKS[name]:
        found = find_cubin(name)
        if found is not None:
            return found.read_bytes()
        image = compile_cubin(kernel, defines, target)
        cached = cache_folder() / name
        cached.parent.mkdir(parents=True, exist_ok=True)
        # a rename is atomic, so that two processes never see half a file
        partial = cached.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(image)
        partial.replace(cached)
        return image


def find_cubin(name: str) -> Path | None:
    """Where a kernel lies that was compiled before, by ``cubin_name``."""
    folders = (shipped_folder(), cache_folder())
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def shipped_folder() -> Path:
    """Where kernels compiled ahead of time lie; see ``build``."""
    return Path(str(resources.files("sphkv.attention.cuda"))) / "cubins"


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sphkv" / "cubins"


def compile_cubin(kernel: str, defines: Sequence[str], target: str) -> bytes:
    """Compile a kernel: with nvcc where it is installed, else with NVRTC.

    Raises:
        CudaUnavailableError: NVRTC is not installed.
        RuntimeError: The compiler refused the source; the message holds its log.
    """
    main, headers = _kernel_files(kernel)
    image = compile_with_nvcc(kernel, defines, target)
    if image is not None:
        return image
    options = (f"--gpu-architecture={target}", "-std=c++17", *defines)
    return _compile(main, headers, options)


def compile_with_nvcc(kernel: str, defines: Sequence[str], target: str) -> bytes | None:
    """Machine code from the toolkit's compiler; None if it is missing or too old."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, text in sources().items():
            (Path(folder) / name).write_text(text)
        image = Path(folder) / "kernel.cubin"
        architecture = f"arch={target.replace('sm_', 'compute_')},code={target}"
        command = [nvcc, "-gencode", architecture, "-std=c++17", "-cubin", *defines]
        done = subprocess.run(
            [*command, "-o", str(image), str(Path(folder) / MAIN[kernel])],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return None if done.returncode else image.read_bytes()


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    candidates: list[str] = list(_LIBRARY_NAMES)
    for folder in folders:
        for name in _LIBRARY_NAMES:
            candidates += [str(path) for path in sorted(folder.glob(f"*/lib/{name}"))]
    candidates += [f"/usr/local/cuda/lib64/{name}" for name in _LIBRARY_NAMES]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaUnavailableError(
        "the run-time compiler NVRTC is missing: install the CUDA toolkit or torch's nvidia wheels"
    )


def _compile(main: str, headers: dict[str, str], options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    count = len(headers)
    texts = (ctypes.c_char_p * count)(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * count)(*(name.encode() for name in headers))
    _require(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), main.encode(), b"kernel.cu", count, texts, names
        )
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), flags) != 0:
            raise RuntimeError(f"kernel did not compile:\n{_log(nvrtc, program)}")
        size = ctypes.c_size_t()
        _require(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _require(nvrtc.nvrtcGetCUBIN(program, image))
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _require(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _require(nvrtc.nvrtcGetProgramLog(program, text))
    return text.value.decode(errors="replace")


def _require(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC call failed with status {status}")
