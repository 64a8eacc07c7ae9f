# SPDX-License-Identifier: Apache-2.0
"""W1: language modelling on long books, strided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.filler import (
    filler_name,
    filler_split,
    filler_text,
    num_fillers,
)

# more than any tokenizer packs into a token on average
_MOST_CHARACTERS = 8


def lm_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    context: int,
    num_following: int,
    num_prompts: int,
    stride: int = 0,
) -> list[Case]:
    """Prompts of ``context`` tokens and what follows them, one text after another.

    When there are more prompts than books, the next round begins ``stride`` tokens later in each
    book; causality holds because a prompt is only what comes before the tokens it predicts.

    Args:
        tokenizer: Of the model.
        data: Folder with ``pg19/*.txt``; None makes texts up.
        context: Tokens of a prompt.
        num_following: Tokens to predict after it.
        num_prompts: How many prompts.
        stride: Tokens between the prompts of one text; ``num_following`` if 0.
    """
    if num_following < 2:
        raise ValueError(f"num_following must be at least 2, got {num_following}")
    from_text = num_fillers(data) if data is not None else num_prompts
    cases = []
    for index in range(num_prompts):
        book, round_ = index % from_text, index // from_text
        skip = round_ * (stride or num_following)
        needed = skip + context + num_following
        text = filler_text(data, book, num_characters=_MOST_CHARACTERS * needed)
        ids = tokenizer(text).input_ids[skip : skip + context + num_following]
        if len(ids) < context + num_following:
            raise ValueError(
                f"text {filler_name(data, book)!r} gave {len(ids)} tokens after {skip}, "
                f"not {context + num_following}"
            )
        name = f"lm-{context}-{filler_name(data, book)}-{skip}"
        cases.append(
            Case(
                case_id=name,
                workload="lm",
                group=name,
                prompt_ids=tuple(ids[:context]),
                following_ids=tuple(ids[context:]),
                facets={"text": filler_name(data, book), "skip": skip},
                split=filler_split(data),
            )
        )
    return cases
