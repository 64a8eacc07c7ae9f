# SPDX-License-Identifier: Apache-2.0
"""Fitting the controller's weights: how sensitive a model is to each head, and to each error.

Sensitivities are the diagonal of the Fisher information of attention outputs: half its trace per
channel is the KL that a unit squared move of a head's output causes. One backward pass of a short
text gives them. What heads do that no prompt predicts is measured on other stretches of the texts.
The weights of angle, radius, value and drop terms are then regressed on measured KL of probes.
Derivation: docs/math/retention.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.plan import retention_tiers
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import PromptStates, read_prompt
from sphkv.evaluation.retention.config import StudyConfig
from sphkv.evaluation.retention.probes import Probe, measure_probes, rank_correlation
from sphkv.evaluation.retention.study import (
    StudyRunner,
    calibration_books,
    recorded_config,
)
from sphkv.evaluation.retention.surprise import head_surprise
from sphkv.evaluation.text import read_tokens
from sphkv.integrations.transformers.listening import listening
from sphkv.retention.measure import MeasureConfig
from sphkv.retention.policy import RetentionPolicy, save_policy

# Leading tokens see so little context that their gradients say nothing about long prompts.
_SKIPPED_TOKENS = 64
_TEXT_OFFSET = 60_000
_PROMPT_OFFSET = 140_000
# Heads that copy do so seldom, so it takes many places to see how often.
_STRETCHES = 6
_LATER_TOKENS = 128
_GAUSS_NEWTON_STEPS = 100
_DAMPING = 1e-3


def head_sensitivity(model: Any, input_ids: Tensor, *, seed: int = 0) -> Tensor:
    """KL per squared move of each query head's output.

    Args:
        model: A decoder whose attention goes through the attention interface.
        input_ids: ``[1, tokens]`` of any text.
        seed: Of the tokens drawn from the model's own predictions.

    Returns:
        ``[layers, query_heads]`` float32.
    """
    if input_ids.shape[1] <= 2 * _SKIPPED_TOKENS:
        raise ValueError(
            f"sensitivity needs more than {2 * _SKIPPED_TOKENS} tokens, got {input_ids.shape[1]}"
        )
    moves: dict[int, Tensor] = {}

    def attend(call: Any) -> tuple[Tensor, None]:
        output = call.dense()[0]  # [1, tokens, heads, head_dim]
        moves[call.layer] = torch.zeros_like(output[0].transpose(0, 1), requires_grad=True)
        return output + moves[call.layer].transpose(0, 1)[None], None

    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.enable_grad(), listening(model, attend):
            hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
            logits = model.get_output_embeddings()(hidden[_SKIPPED_TOKENS:]).float()
            log_p = torch.log_softmax(logits, -1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            log_p.gather(1, drawn).sum().backward()
    finally:
        for parameter, needs in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(needs)
    rows = []
    for layer in range(len(moves)):
        gradient = moves[layer].grad
        assert gradient is not None
        # the last tokens have too few successors to move
        part = gradient[:, _SKIPPED_TOKENS:-_SKIPPED_TOKENS]
        rows.append(part.square().sum(-1).mean(1) / (2 * part.shape[-1]))
    return torch.stack(rows)


def _rows(table: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())


def fit_on_books(
    config: StudyConfig,
    policy_out: str,
    *,
    text_tokens: int,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fit a policy on ``pg19/calibration``, write it, and return the record of the fit."""
    runner = StudyRunner(config, report)
    books = calibration_books(config.data)
    texts = [
        read_tokens(runner.session.tokenizer, str(book), text_tokens, offset=_TEXT_OFFSET)
        for book in books
    ]
    ids = read_tokens(
        runner.session.tokenizer,
        str(books[-1]),
        config.context + config.num_following,
        offset=_PROMPT_OFFSET,
    )
    prompt = read_prompt(runner.session.model, ids, num_following=config.num_following)
    stretches = [ids for book in books for ids in _stretches(runner, book, text_tokens)]
    policy, record = fit_policy(runner, texts, stretches, prompt, report)
    save_policy(policy, policy_out)
    return {**record, "config": recorded_config(config), "environment": describe_environment()}


def _stretches(runner: StudyRunner, book: Path, num_tokens: int) -> list[Tensor]:
    """Evenly spaced stretches of a book: a prompt and what comes later."""
    gap = len(book.read_text(encoding="utf-8")) // (_STRETCHES + 1)
    return [
        read_tokens(
            runner.session.tokenizer, str(book), num_tokens + _LATER_TOKENS, offset=at * gap
        )
        for at in range(1, _STRETCHES + 1)
    ]


def fit_policy(
    runner: StudyRunner,
    texts: Sequence[Tensor],
    stretches: Sequence[Tensor],
    prompt: PromptStates,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[RetentionPolicy, dict[str, Any]]:
    """Fit a policy on calibration texts and say how well it predicts measured loss.

    Args:
        runner: Model and codebooks.
        texts: Token ids ``[1, tokens]`` for the sensitivities.
        stretches: The same for surprise; the last ``_LATER_TOKENS`` of each come after a prompt.
        prompt: A prompt with following tokens, on which probes are measured.
        report: Told about progress.

    Returns:
        The policy, and a record with the calibration curve and rank correlations.
    """
    found = torch.stack(
        [head_sensitivity(runner.session.model, ids, seed=at) for at, ids in enumerate(texts)]
    )
    model_id = runner.config.model
    policy = replace(runner.session.policy, sensitivity=_rows(found.mean(0)), model_id=model_id)
    report("sensitivities measured")
    shape = runner.session.shape
    measured = MeasureConfig(
        shape.geometry, shape.ropes, retention_tiers(shape.geometry.head_dim), policy=policy
    )
    surprise = head_surprise(
        measured,
        (read_prompt(runner.session.model, ids) for ids in stretches),
        num_later=_LATER_TOKENS,
    )
    policy = replace(policy, surprise=_rows(surprise))
    report("surprise measured")
    probes = measure_probes(runner, policy, prompt, report)
    alphas = regress_weights(probes)
    policy = replace(
        policy,
        alpha_theta=alphas["alpha_theta"],
        alpha_r=alphas["alpha_r"],
        alpha_value=alphas["alpha_value"],
        alpha_drop=alphas["alpha_drop"],
    )
    return policy, {**describe_fit(probes, alphas), "surprise": describe_surprise(surprise)}


def regress_weights(probes: Sequence[Probe]) -> dict[str, float]:
    """Positive weights of the distortion's terms that predict measured KL best.

    Errors are ratios, so that small and large probes count alike, and half as much is as wrong as
    twice as much; of relative errors, those of guesses that are too low never exceed one.
    """
    names = ("alpha_theta", "alpha_value", "alpha_drop")
    terms = torch.tensor([probe.terms for probe in probes], dtype=torch.float64)
    measured = torch.tensor([probe.kl for probe in probes], dtype=torch.float64)
    weights = torch.ones(len(names), dtype=torch.float64)
    for _ in range(_GAUSS_NEWTON_STEPS):
        part = terms * weights
        guess = part.sum(1, keepdim=True)
        # in logarithms of the weights, which keeps these positive; damped where terms say nothing
        slope, wrong = part / guess, (measured[:, None] / guess).log()
        gram = slope.T @ slope + _DAMPING * torch.eye(len(names), dtype=torch.float64)
        weights = weights * torch.linalg.solve(gram, slope.T @ wrong)[:, 0].clamp(-1, 1).exp()
    found = dict(zip(names, weights.tolist(), strict=True))
    return {**found, "alpha_r": found["alpha_theta"]}


def describe_surprise(surprise: Tensor, count: int = 8) -> list[dict[str, Any]]:
    """The heads ``[layers, heads]`` that surprise most."""
    most = surprise.flatten().topk(min(count, surprise.numel()))
    return [
        {"layer": at // surprise.shape[1], "head": at % surprise.shape[1], "surprise": value}
        for value, at in zip(most.values.tolist(), most.indices.tolist(), strict=True)
    ]


def describe_fit(probes: Sequence[Probe], alphas: dict[str, float]) -> dict[str, Any]:
    """Calibration curve and rank correlations of the fit and of simpler scores."""
    weights = torch.tensor(
        [alphas["alpha_theta"], alphas["alpha_value"], alphas["alpha_drop"]], dtype=torch.float64
    )
    terms = torch.tensor([probe.terms for probe in probes], dtype=torch.float64)
    predicted = (terms @ weights).tolist()
    measured = [probe.kl for probe in probes]
    tokens = [at for at, probe in enumerate(probes) if probe.kind == "drop"]
    rankings = {
        "fit": predicted,
        "age": [probe.by_age for probe in probes],
        "votes": [probe.by_votes for probe in probes],
    }
    return {
        "alphas": alphas,
        "curve": [
            {"probe": probe.name, "kind": probe.kind, "measured": kl, "predicted": guess}
            for probe, kl, guess in zip(probes, measured, predicted, strict=True)
        ],
        "rank_correlation": {
            name: rank_correlation(scores, measured) for name, scores in rankings.items()
        },
        "rank_correlation_drops": {
            name: rank_correlation([scores[at] for at in tokens], [measured[at] for at in tokens])
            for name, scores in rankings.items()
        },
    }
