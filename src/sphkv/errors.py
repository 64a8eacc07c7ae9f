# SPDX-License-Identifier: Apache-2.0
"""Errors of this package, below one class; this file imports nothing.

Each class also derives from the built-in error that says what kind of mistake it is:
``except ValueError`` finds what a caller can change, ``except SphKVError`` finds everything.
"""


class SphKVError(Exception):
    """Base of every error that this package has a name for."""


class BudgetError(SphKVError, ValueError):
    """Something does not fit under a byte budget; nothing was changed.

    Attributes:
        needed: Bytes that are asked for.
        free: Bytes that are free under the limit.
        limit: The limit itself, in bytes.
        what: What asks for them, as the message says it.
    """

    # positional, so that copies and pickles are made from the same four values
    def __init__(self, needed: int, free: int, limit: int, what: str = "the request") -> None:
        """Record the byte counts and say them in the message."""
        self.needed = needed
        self.free = free
        self.limit = limit
        self.what = what
        super().__init__(
            f"{what} needs {needed} bytes and exceeds the {free} bytes that are free under the "
            f"limit of {limit} bytes by {self.missing} bytes"
        )

    @property
    def missing(self) -> int:
        """Bytes by which the request exceeds what is free."""
        return self.needed - self.free

    def __reduce__(self) -> tuple[type["BudgetError"], tuple[int, int, int, str]]:
        """Rebuild from the byte counts, so that the error crosses process borders."""
        return type(self), (self.needed, self.free, self.limit, self.what)


class UnsupportedModelError(SphKVError, ValueError):
    """The cache cannot serve this model; the message says why."""


class UnsupportedBatchError(SphKVError, ValueError):
    """A cache holds pages that a captured step cannot read; the message says which."""


class CacheFileError(SphKVError, ValueError):
    """A saved cache is truncated, tampered with, or belongs to another geometry."""


class UnfairComparisonError(SphKVError, ValueError):
    """Records were measured under different conditions and must not be compared."""


class SplitError(SphKVError, ValueError):
    """Data of one split was asked for in the name of another."""


class BackendUnavailableError(SphKVError, RuntimeError):
    """A backend was asked for by name and cannot run here."""


class NativeUnavailableError(BackendUnavailableError, ImportError):
    """The native kernels were not built."""


class CudaUnavailableError(BackendUnavailableError):
    """Something the CUDA kernels need is missing here; the message names it."""


class KernelMismatchError(SphKVError, RuntimeError):
    """A kernel disagrees with the reference and must not be used."""
