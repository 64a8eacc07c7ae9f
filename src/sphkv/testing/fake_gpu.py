# SPDX-License-Identifier: Apache-2.0
"""Tensors that say they are on a GPU and refuse to meet others, for tests without one.

A ``GpuTensor`` computes on the CPU. An operation that mixes it with a CPU tensor raises, as it
would on a GPU, save where torch allows it: scalars, copies, and indices on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
_TAKES_CPU_INDICES = ("aten::index", "aten::index_put_", "aten::index_put")


class GpuTensor(torch.Tensor):
    """A CPU tensor that says it is on ``DEVICE``; to torch's own code it has no data at all."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "GpuTensor":
        """Wrap a CPU tensor, which is not copied."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says it is."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Always."""
        return True

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy on the CPU."""
        return self.held.clone()

    def tolist(self) -> Any:
        """Its numbers."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _is_gpu(device: torch.device | str | None) -> bool:
    # a GpuTensor is "meta" to torch's own code, which asks for the device of another tensor there
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _leaves(x: Any) -> Iterator[Any]:
    """What lists and tuples hold; torch's own walk knows more kinds and takes longer."""
    if isinstance(x, list | tuple):
        for part in x:
            yield from _leaves(part)
    else:
        yield x


def _map(change: Callable[[Any], Any], x: Any) -> Any:
    return type(x)(_map(change, part) for part in x) if isinstance(x, list | tuple) else change(x)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = (*_leaves(args), *kwargs.values())
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    is_on_gpu = [isinstance(tensor, GpuTensor) for tensor in tensors]
    name, device = func._schema.name, kwargs.get("device")
    if device is None and not any(is_on_gpu):
        return func(*args, **kwargs)
    if device is None and not all(is_on_gpu):
        _check_mix(name, args, tensors)
    if name == "aten::copy_":
        goes_to_gpu = isinstance(args[0], GpuTensor)
    else:
        goes_to_gpu = True if device is None else _is_gpu(device)
    out = func(*_map(_unwrapped, args), **{key: _unwrapped(x) for key, x in kwargs.items()})
    if func._schema.is_mutable and args and isinstance(args[0], GpuTensor):
        return args[0]
    return _map(lambda x: GpuTensor(x) if goes_to_gpu and isinstance(x, torch.Tensor) else x, out)


def _unwrapped(x: Any) -> Any:
    if isinstance(x, GpuTensor):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and _is_gpu(x) else x


def _check_mix(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    if name == "aten::copy_":
        return
    if name in _TAKES_CPU_INDICES and isinstance(args[0], GpuTensor):
        tensors = [args[0], *(part for part in args[2:3] if isinstance(part, torch.Tensor))]
    if any(not isinstance(tensor, GpuTensor) and tensor.dim() > 0 for tensor in tensors):
        shapes = [(type(tensor).__name__, tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{name} of tensors on two devices: {shapes}")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let tensors be made on ``DEVICE``."""
    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return GpuTensor(made) if _is_gpu(device) else made

    with (
        mock.patch.object(torch.cuda, "_lazy_init", return_value=None),
        mock.patch.object(torch, "tensor", tensor),
        _Dispatch(),  # type: ignore[no-untyped-call]
    ):
        yield
