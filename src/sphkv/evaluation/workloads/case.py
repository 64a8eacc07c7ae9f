# SPDX-License-Identifier: Apache-2.0
"""One prompt of a workload, and what is done after it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sphkv.evaluation.workloads.tools import ApiTask, ToolTask

WorkloadName = Literal["lm", "qa", "needle", "tools"]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt in token ids.

    Cases of one group begin with the same tokens, so that these are read only once.

    Attributes:
        case_id: Unique within a sweep.
        workload: Which workload it belongs to.
        group: Cases with the same group share their first ``num_shared`` tokens.
        prompt_ids: Token ids of the whole prompt.
        num_shared: Leading tokens that the group shares; 0 or the whole prompt if it is alone.
        following_ids: What came after the prompt in the text; for language modelling only.
        answers: Any of these counts as right; for answered workloads only.
        max_new_tokens: Most tokens of an answer.
        stops_at_newline: Whether a line ends the answer.
        facets: What the case stands for, such as its depth; goes into the record.
        task: Task of an episode; for tools only.
        split: ``development`` or ``test``; empty for made-up text.
        retrieved: Token ranges of the prompt's passages.
    """

    case_id: str
    workload: WorkloadName
    group: str
    prompt_ids: tuple[int, ...]
    num_shared: int = 0
    following_ids: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 0
    stops_at_newline: bool = True
    facets: Mapping[str, Any] = field(default_factory=dict)
    task: ToolTask | ApiTask | None = None
    split: str = ""
    retrieved: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Reject a case that asks for nothing."""
        if not self.prompt_ids:
            raise ValueError(f"case {self.case_id!r} has no prompt")
        if not 0 <= self.num_shared <= len(self.prompt_ids):
            raise ValueError(
                f"case {self.case_id!r} shares {self.num_shared} of {len(self.prompt_ids)} tokens"
            )
        if bool(self.following_ids) == bool(self.max_new_tokens):
            raise ValueError(
                f"case {self.case_id!r} needs following tokens or an answer length, not both"
            )

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


def check_context(context: int, limit: int | None, *, extra: int) -> None:
    """Refuse a context that the model cannot hold; nothing is ever cut silently.

    Args:
        context: Tokens of a prompt.
        limit: The model's longest context; None if it states none.
        extra: Tokens that come after the prompt.
    """
    if context < 1:
        raise ValueError(f"context must be positive, got {context}")
    if limit is not None and context + extra > limit:
        raise ValueError(
            f"context {context} and {extra} tokens after it are more than the model's {limit}"
        )


def token_hash(ids: Sequence[int]) -> str:
    """Sixteen hexadecimal digits that name token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
