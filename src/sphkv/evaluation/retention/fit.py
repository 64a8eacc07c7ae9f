# SPDX-License-Identifier: Apache-2.0
"""Fitting the controller's weights: how sensitive a model is to each head, and to each error.

Sensitivities are the diagonal of the Fisher information of attention outputs: half its trace per
channel is the KL that a unit squared move of a head's output causes. One backward pass of a short
text gives them.

Some heads rest on the sinks for hundreds of tokens and then copy from one place. Dropping the runs
that such a head has not looked at seems free, and is not. What later queries lose beyond what was
predicted, the head's surprise, is measured on other stretches of the texts.

The weights of angle, radius, value and drop terms are then regressed on measured KL of probes:
small changes of a prompt's states, predicted and measured. Derivation: docs/math/retention.md,
section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.plan import retention_tiers
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS, follow_text
from sphkv.evaluation.harness.states import DenseReference, LayerStates, PromptStates, read_prompt
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.transformers.listening import listening
from sphkv.retention.features import (
    measure_features,
    pool_runs,
    surprise_shift,
)
from sphkv.retention.measure import (
    LayerInput,
    MeasureConfig,
    measure_layer,
    predict_rows,
    protected_states,
    row_share,
)
from sphkv.retention.policy import RetentionPolicy, save_policy
from sphkv.retention.pricing import rank_units
from sphkv.retention.protection import widen_to_runs
from sphkv.retention.rows import window_rows
from sphkv.retention.scores import count_states, sum_blocks, sum_units

_PARTS = 6

# Leading tokens see so little context that their gradients say nothing about long prompts.
_SKIPPED_TOKENS = 64
_TEXT_OFFSET = 60_000
_PROMPT_OFFSET = 140_000
# Heads that copy do so seldom, so it takes many places to see how often.
_STRETCHES = 6
_LATER_TOKENS = 128
_CALIBRATION_TOKENS = 4096
_GAUSS_NEWTON_STEPS = 100
_DAMPING = 1e-3


@dataclass(frozen=True, slots=True)
class FitConfig:
    """What a policy is fitted on.

    Attributes:
        model: ``smollm2``, a local folder or a hub name.
        data: Folder with ``pg19/calibration``.
        context: Tokens of the probed prompt.
        num_following: Tokens after it on which probes are measured.
        calibration: Calibration file; None calibrates on ``pg19/calibration``.
    """

    model: str
    data: str
    context: int = 1024
    num_following: int = FOLLOWING_TOKENS
    calibration: str | None = None

    def __post_init__(self) -> None:
        """Reject a prompt without tokens."""
        for name in ("context", "num_following"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class FitRunner:
    """The model that a policy is fitted to.

    Attributes:
        config: What it is fitted on.
        session: The model.
        codec: Its codebooks.
    """

    def __init__(self, config: FitConfig) -> None:
        """Load the model and fit or load its codebooks."""
        self.config = config
        given = None if config.calibration is None else Path(config.calibration)
        self.session = Session(
            config.model,
            calibration_text=calibration_books(config.data)[0] if given is None else None,
            calibration_tokens=_CALIBRATION_TOKENS,
            calibration_file=given,
        )
        self.codec = SphericalCodec(self.session.calibration)


def calibration_books(data: str) -> list[Path]:
    """Books for calibration in a data folder; raises if there is none."""
    books = sorted((Path(data) / "pg19" / "calibration").glob("*.txt"))
    if not books:
        raise FileNotFoundError(f"no books in {data}/pg19/calibration")
    return books


def recorded_config(config: FitConfig) -> dict[str, Any]:
    """The config for a record; of files only their names, which mean something elsewhere."""
    record = asdict(config)
    for key in ("data", "calibration"):
        record[key] = record[key] and Path(record[key]).name
    return record


@dataclass(frozen=True, slots=True)
class Probe:
    """One change of some layers, what was predicted and what happened.

    Attributes:
        name: Layers and change.
        kind: ``"tier"`` or ``"drop"``.
        terms: Predicted angle, value and drop terms, unweighted.
        by_age: What age alone predicts: the sum of 1 / age over dropped states, and bits lost.
        by_votes: The same with attention votes.
        kl: Measured KL.
    """

    name: str
    kind: str
    terms: tuple[float, float, float]
    by_age: float
    by_votes: float
    kl: float


def measure_probes(
    runner: FitRunner,
    policy: RetentionPolicy,
    prompt: PromptStates,
    report: Callable[[str], None],
) -> list[Probe]:
    """Change a few layers at a time by every tier and by dropping tokens, and measure KL."""
    shape = runner.session.shape
    config = MeasureConfig(
        shape.geometry, shape.ropes, retention_tiers(shape.geometry.head_dim), policy=policy
    )
    tiers = config.tiers
    layers = [
        measure_layer(config, runner.codec, layer, (part.query, part.keys, part.values))
        for layer, part in enumerate(prompt.layers)
    ]
    probes = []
    count = len(layers)
    for part in range(_PARTS):
        chosen = range(part * count // _PARTS, (part + 1) * count // _PARTS)
        for tier in (1, 3):
            probes.append(_tier_probe(runner, prompt, layers, chosen, tiers, tier))
        for number in range(3):
            probes.append(_drop_probe(runner, prompt, layers, chosen, number))
        report(f"layers {chosen[0]}..{chosen[-1]} probed")
    return probes


def _kl(runner: FitRunner, prompt: PromptStates, method: DenseReference) -> float:
    subject = MethodSubject(runner.session.model, method, prompt.geometry)
    run = follow_text(subject, prompt.following)
    found = token_divergence(runner.session.model, prompt.hidden[1:], run.hidden)
    return max(float(found.kl.mean()), 1e-12)


def _tier_probe(
    runner: FitRunner,
    prompt: PromptStates,
    layers: Sequence[LayerInput],
    chosen: range,
    tiers: TierTable,
    tier: int,
) -> Probe:
    """Code all states of some layers at one tier, but those that a cache never codes."""
    method = DenseReference(prompt, capacity=prompt.following.shape[1])
    angle = value = votes = age = 0.0
    tokens = prompt.num_tokens
    spec = tiers[tier]
    for layer in chosen:
        part, found = prompt.layers[layer], layers[layer]
        at = torch.arange(tokens).expand(part.keys.shape[0], -1)
        encoded = runner.codec.encode(layer, spec, part.keys, part.values, at)
        keys, values = runner.codec.decode(layer, spec, encoded, at)
        kept = found.protected[..., None]
        method.change(
            layer, torch.where(kept, part.keys, keys), torch.where(kept, part.values, values)
        )
        f, e = found.features, found.errors
        pull, energy, mass = (
            x.masked_fill(found.protected, 0)
            for x in (
                f.shift * f.radius.square(),
                f.energy * f.value_norm.square(),
                f.mass,
            )
        )
        angle += float((pull.sum(1) * (e.angle + e.radius)[:, tier]).sum())
        value += float((energy.sum(1) * e.value[:, tier]).sum())
        value += float((mass.sum(1) * e.common[:, tier]).sum())
        lost = e.angle[:, tier] + e.value[:, tier]
        votes += float((mass.sum(1) * lost).sum())
        age += float(lost.sum()) * float((1 / torch.arange(1, tokens + 1)).sum())
    kl = _kl(runner, prompt, method)
    name = f"{spec.name} in layers {chosen[0]}..{chosen[-1]}"
    return Probe(name, "tier", (angle, value, 0.0), age, votes, kl)


def _drop_probe(
    runner: FitRunner,
    prompt: PromptStates,
    layers: Sequence[LayerInput],
    chosen: range,
    number: int,
) -> Probe:
    """Drop a third of the older tokens: the least pulling, the oldest, or an arbitrary one."""
    method = DenseReference(prompt, capacity=prompt.following.shape[1])
    tokens = prompt.num_tokens
    middle = torch.arange(16, tokens - 64)
    drop = votes = age = 0.0
    for layer in chosen:
        part, found = prompt.layers[layer], layers[layer]
        kept = torch.ones(part.keys.shape[:2], dtype=torch.bool)
        gone_of_head = []
        for head in range(part.keys.shape[0]):
            order = {
                0: found.features.shift[head, middle].argsort(),
                1: torch.arange(middle.numel()),
                2: torch.randperm(
                    middle.numel(), generator=torch.Generator().manual_seed(layer * 100 + head)
                ),
            }[number]
            gone = middle[order[: middle.numel() // 3]]
            kept[head, gone] = False
            gone_of_head.append(gone)
            if found.features.surprise is not None:
                drop += float(found.features.surprise[head, gone].sum())
            votes += float(found.features.mass[head, gone].sum())
            age += float((1 / (tokens - gone).float()).sum())
        units = torch.stack(gone_of_head)[:, None]
        drop += float(found.rows.drop_losses(part.values, units)[:, -1].sum())
        method.change(layer, part.keys, part.values, kept=kept)
    kl = _kl(runner, prompt, method)
    label = ("least pulling", "oldest", "arbitrary")[number]
    name = f"{label} third dropped in layers {chosen[0]}..{chosen[-1]}"
    return Probe(name, "drop", (0.0, 0.0, drop), age, votes, kl)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"need two lists of equal length, got {len(first)} and {len(second)}")
    a, b = (_ranks(torch.tensor(x, dtype=torch.float64)) for x in (first, second))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()).clamp(min=1e-300))


def _ranks(values: Tensor) -> Tensor:
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below + (equal - 1) / 2.0


def head_surprise(
    config: MeasureConfig, texts: Iterable[PromptStates], *, num_later: int
) -> Tensor:
    """Part of the later queries of every head that turn to a token unforeseen, per factor of age.

    The less important half of a prompt's runs is dropped; what the queries after the prompt lose
    beyond the predicted loss is compared with what they would lose if every one of them turned to
    one token in each factor e of age.

    Args:
        config: Model, tiers and a policy that expects no surprise.
        texts: Texts whose last ``num_later`` tokens come after the prompt.
        num_later: Tokens after the prompt.

    Returns:
        ``[layers, heads]`` float32.
    """
    geometry = config.geometry
    total = torch.zeros(geometry.num_layers, geometry.num_kv_heads, 2)
    for text in texts:
        for layer, states in enumerate(text.layers):
            total[layer] += _excess(config, layer, states, num_later)
    excess, most = total.unbind(-1)
    return (excess / most.clamp(min=torch.finfo(torch.float32).tiny)).clamp(0, 1)


def _excess(config: MeasureConfig, layer: int, states: LayerStates, num_later: int) -> Tensor:
    """``[heads, 2]`` loss beyond what is predicted, and the most that surprise could cause."""
    query, keys, values = states.query, states.keys, states.values
    tokens = keys.shape[1] - num_later
    known = values[:, :tokens]
    _, rows = predict_rows(config, (layer,), query[:, :tokens], keys[:, :tokens])
    features = measure_features(
        rows, keys[:, :tokens], known, sinks=config.protection.sink_tokens, recent=RUN_TOKENS
    )
    later = window_rows(
        query[:, tokens:],
        torch.arange(tokens, keys.shape[1]),
        keys,
        scale=config.geometry.head_dim**-0.5,
        share=row_share(config, (layer,)),
    )
    # what they give is known, however near to a token they stand
    later = replace(later, is_valid=torch.ones_like(later.is_valid))
    free = ~widen_to_runs(protected_states(config, features.radius))
    score, most = pool_runs(features, RUN_TOKENS).shift, surprise_shift(rows, known)
    is_free = free[:, ::RUN_TOKENS]
    runs, count = rank_units(score, is_free, block_units=1)[..., 0], is_free.sum(1, keepdim=True)
    is_gone = torch.arange(runs.shape[1]) >= count // 2
    gone = torch.where(is_gone, runs, -1)[:, None]  # the less important half as one block
    weight, most_gone = (
        sum_blocks(sum_units(part, RUN_TOKENS)[..., None], gone)[:, 0, 0]
        for part in (1 / rows.coverage(), most)
    )
    predicted = rows.drop_losses(known, gone, granularity=RUN_TOKENS)[:, -1]
    predicted = predicted * weight / count_states(gone, RUN_TOKENS, tokens)[:, 0]
    lost = later.drop_losses(values, gone, granularity=RUN_TOKENS)[:, -1]
    return torch.stack([lost - predicted, most_gone], 1)


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
    config: FitConfig,
    policy_out: str,
    *,
    text_tokens: int,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Fit a policy on ``pg19/calibration``, write it, and return the record of the fit."""
    runner = FitRunner(config)
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


def _stretches(runner: FitRunner, book: Path, num_tokens: int) -> list[Tensor]:
    """Evenly spaced stretches of a book: a prompt and what comes later."""
    gap = len(book.read_text(encoding="utf-8")) // (_STRETCHES + 1)
    return [
        read_tokens(
            runner.session.tokenizer, str(book), num_tokens + _LATER_TOKENS, offset=at * gap
        )
        for at in range(1, _STRETCHES + 1)
    ]


def fit_policy(
    runner: FitRunner,
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
    policy = RetentionPolicy(sensitivity=_rows(found.mean(0)), model_id=model_id)
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
