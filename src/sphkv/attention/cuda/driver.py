# SPDX-License-Identifier: Apache-2.0
"""Load and launch compiled kernels through the CUDA driver, with ctypes alone."""

from __future__ import annotations

import ctypes
import functools

import torch

from sphkv.errors import CudaUnavailableError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id, padding to 8 bytes, a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailableError(f"the CUDA driver library is missing: {error}") from error


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    raise RuntimeError(f"{what} failed: {reason} (CUDA error {status})")


@functools.cache
def _load_function(image: bytes, name: str, shared_bytes: int, _device: int) -> ctypes.c_void_p:
    """An entry point of a module that stays loaded: layers and caches without number share it."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), image), "loading a kernel")
    _check(
        driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
        f"finding kernel {name!r}",
    )
    _check(
        driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
        f"asking for {shared_bytes} bytes of shared memory",
    )
    return function


class Kernel:
    """One entry point of a loaded module.

    Args:
        image: A cubin for the current device.
        name: Entry point.
        shared_bytes: Dynamic shared memory of a block.
        threads: Threads of a block.
    """

    def __init__(self, image: bytes, name: str, *, shared_bytes: int, threads: int) -> None:
        torch.cuda.current_stream()  # makes sure that a context exists
        self._function = _load_function(image, name, shared_bytes, torch.cuda.current_device())
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._launch = _driver().cuLaunchKernelEx
        self._overlap = _Attribute(_OVERLAP)
        self._overlap.value[0] = 1

    def launch(
        self,
        blocks: int | tuple[int, int, int],
        arguments: ctypes.Array[ctypes.c_void_p],
        *,
        overlaps: bool = False,
    ) -> None:
        """Start the kernel on the current stream.

        Args:
            blocks: Thread blocks, in one dimension or three.
            arguments: Pointers to its parameters.
            overlaps: Whether it may begin before the kernel queued last is done; that one must
                let it, and this one wait for it or for all that it writes.
        """
        config = _Config(
            grid=(blocks, 1, 1) if isinstance(blocks, int) else blocks,
            block=(self._threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=ctypes.addressof(self._overlap),
            num_attributes=int(overlaps),
        )
        status = self._launch(ctypes.byref(config), self._function, arguments, None)
        _check(status, "launching a kernel")
