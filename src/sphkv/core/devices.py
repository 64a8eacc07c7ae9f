# SPDX-License-Identifier: Apache-2.0
"""What work on a device needs: the CPU's C++ extension; constants, numbers and captures of a GPU.

Copying a constant to a GPU waits for all work before it, and launching many short operations takes
longer than they do: small constants are made once per device, numbers that change go through pinned
memory, such functions are captured once and replayed with other tensors. What nobody waits for yet
runs beside the rest.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.errors import NativeUnavailableError

Numbers = tuple[float, ...] | tuple[int, ...] | tuple[bool, ...]
Tensors = tuple[Tensor, ...]
_Key = tuple[object, ...]

_MODULE = "sphkv._kernels"
# Pinned buffers that are filled in turn: so many transfers may be under way.
_NUM_BUFFERS = 8
_LEAST_NUMBERS = 1 << 14


@functools.cache
def native_kernels() -> Any | None:
    """The extension module, or None where it was not built.

    Raises:
        NativeUnavailableError: It was built from other sources than those it lies beside.
    """
    try:
        module = import_module(_MODULE)
    except ImportError:
        return None
    here = sources_digest(Path(__file__).parents[3] / "csrc")
    if here is not None and here != getattr(module, "SOURCES", ""):
        raise NativeUnavailableError(
            f"{module.__file__} was built from other sources than those in csrc; install sphkv "
            "again (pip install -e .)"
        )
    return module


def sources_digest(folder: Path) -> str | None:
    """What an extension built from the sources in a folder names them; None without such a folder.

    As ``CMakeLists.txt`` computes it: the SHA-256 of those of all files, in the order of names.
    """
    if not folder.is_dir():
        return None
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    digests = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256(digests.encode()).hexdigest()


def require_kernels() -> Any:
    """The extension module.

    Raises:
        NativeUnavailableError: It was not built.
    """
    module = native_kernels()
    if module is None:
        raise NativeUnavailableError(
            "the native kernels were not built; install a wheel of sphkv, or install it where a "
            "C++17 compiler is present"
        )
    return module


@functools.cache
def native_variant() -> str:
    """Instruction set of the native code that makes pages and reads prompts: the fastest here."""
    variants: list[str] = require_kernels().recoders()
    return variants[0]


def constant(
    values: Numbers, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Tensor:
    """A shared tensor of some numbers, which callers must not write to.

    Args:
        values: The numbers.
        device: Where the tensor lives.
        dtype: Its type; what ``torch.tensor`` would choose if None.

    Returns:
        ``[len(values)]``.
    """
    kind = type(values[0]).__name__ if values else ""
    return _made(values, dtype, torch.device(device), kind)


# without a limit: captured graphs hold addresses of these
@functools.cache
def _made(values: Numbers, dtype: torch.dtype | None, device: torch.device, kind: str) -> Tensor:
    # 1, 1.0 and True are equal keys but other tensors, hence the kind; and a tensor first made
    # under inference mode could never meet autograd again.
    del kind
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


class _Buffer:
    """Pinned memory, and when the last transfer out of it is over."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.int64)
        self._is_read = torch.cuda.Event()

    def send(self, numbers: NDArray[np.int64], device: torch.device) -> Tensor:
        self._is_read.synchronize()
        if len(self._pinned) < len(numbers):
            size = max(_LEAST_NUMBERS, 2 * len(numbers))
            self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        held = self._pinned[: len(numbers)]
        held.numpy()[:] = numbers
        found = held.to(device, non_blocking=True)
        self._is_read.record()
        return found


class _Buffers:
    """Buffers of a device: pinning memory anew for every transfer may take milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def send(self, numbers: NDArray[np.int64]) -> Tensor:
        self._next = (self._next + 1) % _NUM_BUFFERS
        return self._buffers[self._next].send(numbers, self._device)


@functools.cache
def _buffers(device: torch.device) -> _Buffers:
    return _Buffers(device)


def upload(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """A tensor ``[numbers]`` int64 on a device; the current stream has it in order.

    Args:
        numbers: One row of them.
        device: Where they go.
    """
    if device.type != "cuda":
        return torch.from_numpy(numbers).to(device)
    return _buffers(device).send(numbers)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU with elements of eight bytes on a device; see ``upload``."""
    numbers = tensor.view(torch.int64).numpy().ravel()
    return upload(numbers, device).view(tensor.dtype).view_as(tensor)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of what runs beside other work.

    Its kernels are short and follow one another: with a high priority each begins as soon as a
    block of what else runs is done, otherwise it would wait for the whole of that.
    """
    _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    return torch.cuda.Stream(device, priority=highest)


class ReadyTensors:
    """Tensors for work that nobody waits for, which a GPU may begin as soon as it has them.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """All that was queued so far comes before them."""
        self.tensors = tensors
        self._device = tensors[0].device
        self._event: torch.cuda.Event | None = None
        if self.is_on_gpu:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    @property
    def is_on_gpu(self) -> bool:
        """Whether there is something to run beside."""
        return self._device.type == "cuda"

    @contextmanager
    def beside(self, *others: Tensor) -> Iterator[Tensors]:
        """On a GPU, queue what follows beside other work; elsewhere it is just done.

        Args:
            others: What the work reads or writes besides, made elsewhere.
        """
        if self._event is None:
            yield self.tensors
            return
        side = _side_stream(self._device)
        side.wait_event(self._event)
        for each in (*self.tensors, *others):
            # their owner may give them up before the work is done
            each.record_stream(side)
        with torch.cuda.stream(side):
            yield self.tensors


@contextmanager
def behind_beside(device: torch.device) -> Iterator[None]:
    """On a GPU, queue what follows behind all that was queued beside other work.

    Whoever uses what is found there elsewhere calls ``join_beside`` first.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(_with_index(device))):
        yield


def join_beside(device: torch.device) -> None:
    """What the caller queues from now on comes after all that was queued beside it."""
    if device.type != "cuda":
        return
    torch.cuda.current_stream(device).wait_stream(_side_stream(_with_index(device)))


def _with_index(device: torch.device) -> torch.device:
    """A GPU by its number."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors


class Replay:
    """Calls a function; from the third call with tensors of the same shapes on by replaying it.

    The function must wait for nothing, copy nothing from the CPU, and depend on its tensors alone.
    Results are overwritten by the next call of the same thread on the same stream, so they must be
    used up by then.
    Elsewhere than on a GPU, and while something else is being captured, it is just called.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        """Nothing is captured yet."""
        self._function = function
        self._captured: dict[_Key, _Captured | None] = {}
        self._refused: set[_Key] = set()

    def __call__(self, *inputs: Tensor) -> Tensors:
        """What the function gives for some tensors."""
        if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)
        stream = torch.cuda.current_stream(inputs[0].device)
        key: _Key = (threading.get_ident(), stream)
        key += tuple((each.shape, each.dtype) for each in inputs)
        if key not in self._captured:
            # the first call may still make constants, which copies from the CPU
            self._captured[key] = None
            return self._function(*inputs)
        held = self._captured[key]
        if held is None and key not in self._refused:
            held = self._captured[key] = self._try_capture(key, inputs)
        if held is None:
            return self._function(*inputs)
        for static, given in zip(held.inputs, inputs, strict=True):
            static.copy_(given)
        held.graph.replay()
        return held.outputs

    def _try_capture(self, key: _Key, inputs: Tensors) -> _Captured | None:
        """The function captured; None, for good, if the driver will not have it."""
        # tensors made under inference mode could not be written to outside of it
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(inputs[0].device):
            try:
                return self._capture(inputs)
            except RuntimeError:
                self._refused.add(key)
                return None

    def _capture(self, inputs: Tensors) -> _Captured:
        static = tuple(each.clone() for each in inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function(*static)
            # without what ``torch.cuda.graph`` does besides: it waits for all work on the device.
            # Other threads may go on using it.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs = self._function(*static)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return _Captured(graph, static, outputs)
