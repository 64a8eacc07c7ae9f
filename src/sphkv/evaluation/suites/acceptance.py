# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: how often a draft's tokens are the target's, whatever the target's cache.

Under greedy speculation a draft's token is accepted where it is the target's own next token. As a
proposal counts only up to its first wrong token, all proposals can be read off one pass of the
draft over the text that the target wrote: no speculation need be run, and none is approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sphkv.core.configs import config_to_dict
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import hidden_states, log_probabilities
from sphkv.evaluation.metrics.statistics import mean_interval
from sphkv.evaluation.records import content_id
from sphkv.evaluation.runner.methods import DENSE
from sphkv.evaluation.suites.columns import Bench, ReadSample
from sphkv.evaluation.suites.config import SuiteConfig
from sphkv.evaluation.suites.records import SuiteFile, SuiteSetup
from sphkv.evaluation.suites.samples import PromptSet, read_prompts
from sphkv.integrations.models import load_model

Column = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a draft proposes for a text.

    Attributes:
        num_matched: Tokens of the text that the draft would have proposed.
        num_passes: Passes of the target over the whole text.
    """

    num_matched: int
    num_passes: int


def speculate(text: Sequence[int], proposed: Sequence[int], num_proposed: int) -> Speculation:
    """Greedy speculation over a text that is known.

    Args:
        text: Tokens that the target wrote.
        proposed: The draft's likeliest token at each place, given all tokens before it.
        num_proposed: Tokens the draft proposes at a time.

    Raises:
        ValueError: The two differ in length, or nothing is proposed.
    """
    if len(text) != len(proposed):
        raise ValueError(f"{len(proposed)} proposals for {len(text)} tokens")
    if num_proposed < 1:
        raise ValueError(f"num_proposed must be positive, got {num_proposed}")
    matches = [a == b for a, b in zip(text, proposed, strict=True)]
    at = passes = 0
    while at < len(text):
        accepted = 0
        while accepted < num_proposed and at + accepted < len(text) and matches[at + accepted]:
            accepted += 1
        # the target's own next token comes with every pass
        at += accepted + 1
        passes += 1
    return Speculation(sum(matches), passes)


def parse_columns(names: Sequence[str]) -> list[Column]:
    """Methods with their budgets: ``dense``, ``fp8=55%``, ``auto=10%``."""
    columns = []
    for name in names:
        method, mark, budget = name.partition("=")
        if not mark and method != DENSE:
            raise ValueError(f"give {method!r} a budget: {method}=10%")
        columns.append((method, budget or "100%"))
    return columns


class AcceptanceRunner:
    """A target with any cache, and a draft that reads what it wrote."""

    def __init__(
        self, config: SuiteConfig, draft: str, *, num_proposed: int, tell: Callable[[str], None]
    ) -> None:
        """Load both models.

        Args:
            config: The target, the prompts and where they run.
            draft: The draft, with the target's vocabulary.
            num_proposed: Tokens it proposes at a time.
            tell: Takes lines of progress.

        Raises:
            ValueError: The two models have other tokens.
        """
        self._config, self._draft, self._num = config, draft, num_proposed
        self._tell = tell
        self._bench = Bench(config)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        model, tokenizer = load_model(draft, dtype)
        self._drafter: Any = model
        torch.nn.Module.to(self._drafter, torch.device(config.device))
        if tokenizer.get_vocab() != self._bench.tokenizer.get_vocab():
            raise ValueError(f"{draft} and {config.model} have other tokens")
        self._sets = [*map(read_prompts, config.prompts)]

    def run(self, file: SuiteFile, columns: Sequence[Column], *, max_new_tokens: int) -> int:
        """Measure what a file lacks; returns how many."""
        setup: SuiteSetup = {
            "config": {**config_to_dict(self._config), "draft": self._draft},
            "sets": [prompts.set_id for prompts in self._sets],
            "dense_bytes_per_token": self._bench.layout.geometry.dense_bytes_per_token,
            "environment": describe_environment(),
        }
        file.begin_run(setup)
        count = 0
        config = self._config
        for prompts in self._sets:
            chosen = prompts.chosen(lengths=config.lengths, num_samples=config.num_samples)
            for sample in chosen:
                count += self._sample(file, prompts, sample.sample_id, columns, max_new_tokens)
        return count

    def _sample(
        self,
        file: SuiteFile,
        prompts: PromptSet,
        name: str,
        columns: Sequence[Column],
        max_new_tokens: int,
    ) -> int:
        records = [self._empty(prompts, name, *column, max_new_tokens) for column in columns]
        missing = [record for record in records if record["id"] not in file.done]
        if not missing:
            return 0
        sample = next(one for one in prompts.samples if one.sample_id == name)
        ids = prompts.ids(self._bench.tokenizer, sample)
        if self._config.max_prompt_tokens is not None:
            ids = ids.cut(self._config.max_prompt_tokens)
        read = self._bench.read(sample, ids)
        dense: Sequence[int] | None = None
        for record in sorted(missing, key=lambda record: record["method"] != DENSE):
            text = self._measure(read, record)
            dense = text if record["method"] == DENSE else dense
            if text is not None and dense is not None:
                record["same_as_dense"] = _common(text, dense)
            file.append(record, "acceptance")
            rate = record["num_matched"] / max(1, record["num_tokens"])
            said = f"{rate:.3f} accepted" if text is not None else record["reason"][:60]
            self._tell(f"{name} {record['method']} {record['budget']}: {said}")
        return len(missing)

    def _empty(
        self, prompts: PromptSet, name: str, method: str, budget: str, max_new_tokens: int
    ) -> dict[str, Any]:
        identity = {
            "model": self._config.model,
            "draft": self._draft,
            "set": prompts.set_id,
            "sample": name,
            "method": method,
            "budget": budget,
            "max_new_tokens": max_new_tokens,
            "num_proposed": self._num,
        }
        return {
            "id": content_id(identity),
            **identity,
            "status": "measured",
            "reason": "",
            "num_tokens": 0,
            "num_matched": 0,
            "num_passes": 0,
            "same_as_dense": None,
            "bytes": None,
        }

    def _measure(self, read: ReadSample, record: dict[str, Any]) -> Sequence[int] | None:
        """Fill in a record; the target's text, or None if there is none."""
        count = record["max_new_tokens"]
        try:
            text, held = self._bench.go_on(read, record["method"], record["budget"], count)
        except (BudgetError, ValueError) as error:
            record.update(status="refused", reason=str(error))
            return None
        except RuntimeError as error:
            record.update(status="failed", reason=f"{type(error).__name__}: {error}")
            return None
        found = speculate(text, self._proposals(read.ids.prompt, text), self._num)
        record.update(
            num_tokens=len(text),
            num_matched=found.num_matched,
            num_passes=found.num_passes,
            bytes=held,
        )
        return text

    @torch.no_grad()
    def _proposals(self, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
        """The draft's likeliest token at every place of a text."""
        if not text:
            return []
        ids = torch.tensor([[*prompt, *text[:-1]]], device=self._drafter.device)
        hidden = hidden_states(self._drafter, ids)[len(prompt) - 1 :]
        rows = [part.argmax(-1) for _, part in log_probabilities(self._drafter, hidden)]
        return [int(token) for token in torch.cat(rows)]


def acceptance_rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance by target, draft, method and budget, over prompts.

    Returns:
        Rows with ``rate`` (share of tokens accepted), ``per_pass`` (tokens per pass of the target)
        as mean intervals over prompts, the number of prompts and the highest share of dense bytes.
    """
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["status"] == "measured" and record["num_tokens"]:
            key = (record["model"], record["draft"], record["method"], record["budget"])
            groups.setdefault(key, []).append(record)
    rows = []
    for (model, draft, method, budget), found in groups.items():
        rate = mean_interval([r["num_matched"] / r["num_tokens"] for r in found])
        per_pass = mean_interval([r["num_tokens"] / r["num_passes"] for r in found])
        peak = max(r["bytes"]["dense_share"] for r in found)
        rows.append(
            {
                "model": model,
                "draft": draft,
                "method": method,
                "budget": budget,
                "rate": rate,
                "per_pass": per_pass,
                "count": len(found),
                "peak_share": peak,
            }
        )
    return rows


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that two texts share."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
