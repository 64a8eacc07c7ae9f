# SPDX-License-Identifier: Apache-2.0
"""Prompts of several blocks, made up so that nothing is fetched."""

import random

_PLACES = ("harbour", "mill", "library", "market", "chapel", "station", "garden", "bakery")
_PEOPLE = ("the captain", "a young clerk", "the baker", "my aunt", "the surveyor", "a student")
_DEEDS = ("counted the coins", "wrote a letter", "mended the roof", "lost a key", "read the news")


def long_prompt(seed: int, sentences: int = 24) -> str:
    """A few sentences told again and again, about 16 tokens each.

    Going on means to copy what was said before, which a small model does with confidence, but
    only as long as attention finds the place.
    """
    pick = random.Random(seed)
    lines = [
        f"On day {pick.randint(1, 30)}, {pick.choice(_PEOPLE)} {pick.choice(_DEEDS)} near the "
        f"{pick.choice(_PLACES)}."
        for _ in range(min(5, sentences))
    ]
    return " ".join(lines[at % len(lines)] for at in range(sentences))
