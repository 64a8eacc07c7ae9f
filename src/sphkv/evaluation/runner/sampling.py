# SPDX-License-Identifier: Apache-2.0
"""Answers over seeds: whether a cache makes a model's success a matter of luck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.answers import begins_with_answer, best_f1
from sphkv.evaluation.metrics.stability import trajectory_sensitivity
from sphkv.evaluation.runner.decoding import decode_tokens, drawn, stop_rule
from sphkv.evaluation.runner.reading import ReadCase, exact_subject


def sampled_quality(
    model: Any, tokenizer: Any, read: ReadCase, make: Callable[[], Subject], seeds: range
) -> dict[str, Any]:
    """Scores of sampled answers and ``S_traj``, the same random numbers for both caches.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        read: The prompt.
        make: An empty cache of the method.
        seeds: One answer each.
    """
    case = read.case
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)

    def score(cache: Subject, seed: int) -> float:
        last = read.states.hidden[-1:]
        got = decode_tokens(model, cache, last, case.max_new_tokens, stops, choose=drawn(seed))
        text = tokenizer.decode(got.token_ids, skip_special_tokens=True).strip()
        judge = begins_with_answer if case.workload == "needle" else best_f1
        return judge(text, case.answers)

    ours, dense = [], []
    for seed in seeds:
        cache = make()
        cache.store_prompt(read.states)
        ours.append(score(cache, seed))
        if seed not in read.work.sampled:
            exact = exact_subject(model, read.states, case.max_new_tokens)
            read.work.sampled[seed] = score(exact, seed)
        dense.append(read.work.sampled[seed])
    return {
        "sampled": ours,
        "sampled_reference": dense,
        "s_traj": trajectory_sensitivity({case.case_id: ours}),
        "s_traj_reference": trajectory_sensitivity({case.case_id: dense}),
    }
