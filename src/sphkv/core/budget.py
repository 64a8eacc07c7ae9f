# SPDX-License-Identifier: Apache-2.0
"""The byte ceiling a cache must meet, in exact integers."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from sphkv.core.geometry import KVGeometry

BudgetKind = Literal["share", "per_token", "total"]

_NUMBER = r"(\d+(?:\.\d+)?)"
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SHARE = re.compile(rf"{_NUMBER}\s*%")
_BYTES = re.compile(rf"{_NUMBER}\s*(B|KiB|MiB|GiB)?\s*(/\s*token)?")


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """A ceiling on the resident bytes of a sequence's cache.

    Attributes:
        kind: ``"share"`` of dense bytes, bytes ``"per_token"``, or ``"total"`` bytes.
        amount: The exact share (1 is all dense bytes) or number of bytes.
    """

    kind: BudgetKind
    amount: Fraction

    def __post_init__(self) -> None:
        """Reject unknown kinds and amounts that are not positive."""
        if self.kind not in ("share", "per_token", "total"):
            raise ValueError(f"budget kind must be share, per_token or total, got {self.kind!r}")
        object.__setattr__(self, "amount", Fraction(self.amount))
        if self.amount <= 0:
            raise ValueError(f"budget must be positive, got {self.amount}")
        if self.kind == "total" and self.amount.denominator != 1:
            raise ValueError(f"total budget must be whole bytes, got {self.amount}")

    @classmethod
    def parse(cls, text: "str | int | ByteBudget") -> "ByteBudget":
        """Read ``"25%"``, ``"512B/token"``, ``"64MiB"`` or a whole number of bytes."""
        if isinstance(text, ByteBudget):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            return cls("total", Fraction(text))
        if not isinstance(text, str):
            raise ValueError(f"budget must be a string or an integer, got {text!r}")
        share = _SHARE.fullmatch(text.strip())
        if share:
            return cls("share", Fraction(share[1]) / 100)
        size = _BYTES.fullmatch(text.strip())
        if not size or (size[3] and not size[2]):
            raise ValueError(
                f"budget must look like '25%', '512B/token', '64MiB' or 1000000, got {text!r}"
            )
        amount = Fraction(size[1]) * _UNITS[size[2] or ""]
        return cls("per_token" if size[3] else "total", amount)

    def resolve(self, geometry: KVGeometry, num_tokens: int) -> int:
        """Whole bytes this budget allows for ``num_tokens``, rounded down.

        Args:
            geometry: Gives the dense bytes that a share refers to.
            num_tokens: Active tokens of the sequence.

        Returns:
            Bytes over all layers and KV heads.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        if self.kind == "total":
            return int(self.amount)
        per_token = self.amount
        if self.kind == "share":
            per_token = self.amount * geometry.dense_bytes_per_token
        return int(per_token * num_tokens)

    def __str__(self) -> str:
        """The text that ``parse`` reads back."""
        if self.kind == "share":
            return f"{_decimal(self.amount * 100)}%"
        if self.kind == "per_token":
            return f"{_decimal(self.amount)}B/token"
        return f"{int(self.amount)}B"


def _decimal(amount: Fraction) -> str:
    if amount.denominator == 1:
        return str(amount.numerator)
    return f"{float(amount):.12f}".rstrip("0")
