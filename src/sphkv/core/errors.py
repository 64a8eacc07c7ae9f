# SPDX-License-Identifier: Apache-2.0
"""Errors that callers are expected to catch by name."""


class BudgetExceeded(RuntimeError):  # noqa: N818
    """A request does not fit under the store's byte limit; nothing was changed.

    Attributes:
        needed: Bytes the request would have added.
        free: Bytes that were still free under the limit.
        limit: The limit itself, in bytes.
    """

    def __init__(self, needed: int, free: int, limit: int) -> None:
        """Record the three byte counts and say them in the message."""
        self.needed = needed
        self.free = free
        self.limit = limit
        super().__init__(
            f"request needs {needed} bytes but {free} of the {limit} byte limit are free"
        )

    def __reduce__(self) -> tuple[type["BudgetExceeded"], tuple[int, int, int]]:
        """Rebuild from the byte counts, so that the error crosses process borders."""
        return (type(self), (self.needed, self.free, self.limit))


class CacheFileError(ValueError):
    """A saved cache is truncated, tampered with, or belongs to another geometry."""
