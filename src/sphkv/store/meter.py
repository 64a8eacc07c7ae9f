# SPDX-License-Identifier: Apache-2.0
"""The one byte limit of a store."""

from sphkv.errors import BudgetError


class ByteMeter:
    """Counts the bytes of all live tensors of a store against one hard limit."""

    def __init__(self, limit: int | None) -> None:
        """Start at zero bytes.

        Args:
            limit: Bytes that may be live at once; None for no limit.
        """
        if limit is not None and (isinstance(limit, bool) or limit < 0):
            raise ValueError(f"byte limit must not be negative, got {limit!r}")
        self.limit = limit
        self.used = 0
        self._peak = 0

    def check(self, delta: int) -> None:
        """Raise if ``delta`` more bytes would pass the limit.

        Raises:
            BudgetError: They would.
        """
        if self.limit is not None and delta > 0 and self.used + delta > self.limit:
            raise BudgetError(delta, self.limit - self.used, self.limit)

    def add(self, delta: int) -> None:
        """Count bytes that are live now, or negative ones that are gone."""
        self.used += delta
        self._peak = max(self._peak, self.used)

    def take_peak(self) -> int:
        """Most bytes that were live at once since the last time this was asked."""
        peak, self._peak = self._peak, self.used
        return peak
