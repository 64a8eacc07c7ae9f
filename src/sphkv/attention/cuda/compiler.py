# SPDX-License-Identifier: Apache-2.0
"""Kernel sources to machine code: shipped or cached cubins first, then the run-time compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch

from sphkv.attention.cuda.driver import CudaUnavailableError
from sphkv.attention.cuda.geometry import KernelShape

ENTRY_POINT = "sphkv_decode"
_MAIN = "decode.cu"
_ARCHITECTURES = {(9, 0): "sm_90a"}
_LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def architecture(device: torch.device) -> str:
    """Compiler target of a device.

    Raises:
        CudaUnavailableError: There is no kernel for this device.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability not in _ARCHITECTURES:
        raise CudaUnavailableError(
            f"decode kernels exist for compute capability {sorted(_ARCHITECTURES)}, "
            f"device has {capability}"
        )
    return _ARCHITECTURES[capability]


def sources() -> dict[str, str]:
    """All kernel sources by file name."""
    folder = resources.files("sphkv.attention.cuda") / "kernels"
    return {
        entry.name: entry.read_text()
        for entry in folder.iterdir()
        if entry.name.endswith((".cu", ".cuh"))
    }


def cubin_name(shape: KernelShape, target: str) -> str:
    """File name that identifies sources, shape and target."""
    digest = hashlib.sha256(repr((sorted(sources().items()), shape.defines(), target)).encode())
    return f"{ENTRY_POINT}-{target}-{digest.hexdigest()[:24]}.cubin"


def load_cubin(shape: KernelShape, target: str) -> bytes:
    """Machine code of a shape: from the package, the disk cache, or compiled now and cached."""
    name = cubin_name(shape, target)
    shipped = resources.files("sphkv.attention.cuda") / "cubins" / name
    if shipped.is_file():
        return shipped.read_bytes()
    cached = cache_folder() / name
    if cached.is_file():
        return cached.read_bytes()
    image = compile_cubin(shape, target)
    cached.parent.mkdir(parents=True, exist_ok=True)
    # a rename is atomic, so that two processes never see half a file
    partial = cached.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(image)
    partial.replace(cached)
    return image


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sphkv" / "cubins"


def compile_cubin(shape: KernelShape, target: str) -> bytes:
    """Compile the kernel for one shape with NVRTC.

    Raises:
        CudaUnavailableError: NVRTC is not installed.
        RuntimeError: The compiler refused the source; the message holds its log.
    """
    files = sources()
    options = (f"--gpu-architecture={target}", "-std=c++17", *shape.defines())
    return _compile(files.pop(_MAIN), files, options)


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
            ctypes.byref(program), main.encode(), _MAIN.encode(), count, texts, names
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
