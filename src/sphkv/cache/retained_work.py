# SPDX-License-Identifier: Apache-2.0
"""What sequences that store the same prompt under different budgets find out only once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Found = TypeVar("Found")


class PromptWork:
    """Findings about one prompt that do not depend on a budget, with the seconds they took.

    Everything is kept until the object goes: for comparing budgets and variants, not for serving.

    Attributes:
        reused_s: Seconds that finding out again would have taken, over all uses so far.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.reused_s = 0.0
        self._found: dict[Hashable, tuple[Any, float]] = {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What ``find`` returned when the key was first asked for."""
        if key in self._found:
            found, seconds = self._found[key]
            self.reused_s += seconds
        else:
            began = time.perf_counter()
            found = find()
            self._found[key] = found, time.perf_counter() - began
        result: Found = found
        return result
