# SPDX-License-Identifier: Apache-2.0
"""Names that people type, and the nearest one to a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The name if it is known.

    Args:
        kind: What the name stands for, for the message.
        name: As it was given.
        known: All names.

    Raises:
        ValueError: It is not; the message suggests the nearest ones.
    """
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(names))}"
    raise ValueError(f"there is no {kind} {name!r}; {hint}")
