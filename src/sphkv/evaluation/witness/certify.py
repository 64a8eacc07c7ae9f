# SPDX-License-Identifier: Apache-2.0
"""Run the witness suite against dense and write down what held."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS, follow_text
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.answers import Reply
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.records import content_id, write_text
from sphkv.evaluation.runner.decoding import (
    DecodedAnswer,
    decode_tokens,
    drawn,
    stop_rule,
)
from sphkv.evaluation.runner.methods import JOINT
from sphkv.evaluation.runner.session import Placement, ReadCase, Session, exact_subject
from sphkv.evaluation.schema import CERTIFICATE_FORMAT, FailureRow
from sphkv.evaluation.splits import Split, open_split
from sphkv.evaluation.witness.failures import FAILURE_CLASSES, diagnose
from sphkv.evaluation.witness.suite import (
    AnswerPair,
    Witness,
    WitnessBounds,
    WitnessPrompt,
    build_suite,
    first_of_each,
    judge_answers,
    judge_budget,
    judge_drift,
    judge_realisation,
    judge_seeds,
    summarise_pairs,
)
from sphkv.evaluation.workloads.case import check_context
from sphkv.evaluation.workloads.texts import lm_cases
from sphkv.retention.gate import GateOptions
from sphkv.retention.protection import ProtectionRule

_ANSWER_TOKENS = 32
_SAMPLED_TOKENS = 12


@dataclass(frozen=True, slots=True)
class CertifyConfig:
    """An operating point and how it is examined.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        budget: Byte budget of the cache.
        method: Method to certify.
        context: Tokens of the document.
        data: Data folder; made-up text if None.
        calibration_text: Text to calibrate on; made up if None.
        policy: File with the controller's weights; equal weights if None.
        suffix_tokens: Newest prompt tokens that the controller may not compress.
        has_gate: Whether the controller's stability gate is on.
        per_witness: Most prompts of each witness; 0 takes all.
        num_following: Tokens whose divergence is measured.
        num_seeds: Sampled answers per seeded prompt.
        seed: Draws needles and samples.
        bounds: What each witness may move.
        num_texts: Stretches of books on which divergence is measured.
        failure_budgets: Budgets, loosest first, at which the failure classes are triggered; none
            skips them.
        split: Where documents and stretches come from, if there is data.
        purpose: What the data is for; must be the split's name.
        log: File that counts uses of test data.
        device: Where the model runs; on a GPU the public cache is examined with captured steps.
        dtype: Type of the weights, ``float32`` or ``bfloat16``.
    """

    model: str
    budget: str
    method: str = "spherical"
    context: int = 4096
    data: Path | None = None
    calibration_text: Path | None = None
    policy: Path | None = None
    suffix_tokens: int = 2 * RUN_TOKENS
    has_gate: bool = True
    per_witness: int = 0
    num_following: int = FOLLOWING_TOKENS
    num_seeds: int = 3
    seed: int = 0
    bounds: WitnessBounds = field(default_factory=WitnessBounds)
    num_texts: int = 1
    failure_budgets: tuple[str, ...] = ()
    split: str = "development"
    purpose: str = "development"
    log: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Reject examinations that show nothing."""
        for name, least in (
            ("context", 256), ("num_following", 8), ("num_seeds", 2), ("per_witness", 0),
            ("suffix_tokens", 0), ("num_texts", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def certify(
    config: CertifyConfig, tell: Callable[[str], None], *, keep: Path | None = None
) -> dict[str, Any]:
    """The certificate: what ran, with what, every figure, and the verdict.

    Args:
        config: What is examined, and how.
        tell: Takes lines of progress.
        keep: Folder that keeps the calibration and finished failure classes for the next time; None
            keeps none.
    """
    session = Session(
        config.model,
        calibration_text=config.calibration_text,
        keep=keep,
        policy=config.policy,
        place=Placement(config.device, config.dtype),
    )
    check_context(
        config.context + 100, session.shape.max_tokens, extra=config.num_following + _ANSWER_TOKENS
    )
    split = _open_split(config)
    prompts = build_suite(session.tokenizer, split=split, context=config.context, seed=config.seed)
    prompts = first_of_each(prompts, config.per_witness)
    examiner = _Examiner(session, config, tell)
    examiner.watch_drift(split)
    for prompt in prompts:
        examiner.ask(prompt)
    result = _certificate(config, session, prompts, examiner.judge(), examiner.memory)
    result["stability"] = summarise_pairs(examiner.pairs) if examiner.pairs else None
    if config.failure_budgets:
        result["failures"] = _diagnose_all(config, session, prompts, tell, keep)
    return result


def _diagnose_all(
    config: CertifyConfig,
    session: Session,
    prompts: list[WitnessPrompt],
    tell: Callable[[str], None],
    keep: Path | None,
) -> list[FailureRow]:
    """Every failure class; what an earlier run finished is kept in a folder, if there is one."""
    settings: list[Any] = [
        config.model,
        config.failure_budgets,
        config.num_seeds,
        session.policy_id,
    ]
    settings += [session.calibration_id, [prompt.case.prompt_ids for prompt in prompts]]
    file = None if keep is None else keep / f"failures-{content_id(settings)}.json"
    rows: list[FailureRow] = []
    if file is not None and file.is_file():
        rows = json.loads(file.read_text(encoding="utf-8"))
    known = {row["failure"] for row in rows}
    for failure in (each for each in FAILURE_CLASSES if each.name not in known):
        rows += diagnose(
            session,
            prompts,
            config.failure_budgets,
            tell,
            classes=(failure,),
            seeds=range(config.num_seeds),
        )
        if file is not None:
            write_text(file, json.dumps(rows) + "\n")
    return rows


def _open_split(config: CertifyConfig) -> Split | None:
    if config.data is None:
        return None
    note = f"certify {config.method} {config.budget} {config.context}"
    return open_split(config.split, config.data, purpose=config.purpose, log=config.log, note=note)


class _Examiner:
    """Measures one method on prompts that were read.

    Attributes:
        memory: Bytes and realisation of the last cache it made; None before one.
        pairs: Answers to the prompts that the method could finish in its budget.
    """

    def __init__(
        self, session: Session, config: CertifyConfig, tell: Callable[[str], None]
    ) -> None:
        self._session, self._config, self._tell = session, config, tell
        self.memory: dict[str, Any] | None = None
        self.pairs: list[AnswerPair] = []
        self._divergences: list[float] = []
        self._scores: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        self._broken: list[str] = []

    @contextmanager
    def _budgeted(self, case_id: str) -> Iterator[None]:
        """Notes what does not fit the budget, be it while storing or many tokens later."""
        try:
            yield
        except BudgetError as error:
            self._broken.append(f"{case_id}: {error}")
            self._tell(self._broken[-1])

    def judge(self) -> list[Witness]:
        """The witnesses of all that was examined."""
        bounds = self._config.bounds
        found = [judge_budget(self._broken)]
        if self._divergences:
            found += judge_drift(self._divergences, bounds)
        found += judge_answers(self.pairs, bounds)
        if self._scores[0]:
            found.append(judge_seeds(*self._scores, bounds))
        if self.memory is not None:
            found.append(judge_realisation(self.memory["realisation"]))
        return found

    def ask(self, prompt: WitnessPrompt) -> None:
        """Answers to a prompt, of a retrieval prompt also sampled ones."""
        read = self._session.reader.read(prompt.case)
        with self._budgeted(prompt.case.case_id):
            pair = self._answers(prompt, read)
            self.pairs.append(pair)
            self._tell(
                f"{pair.case_id}: dense {pair.dense.text[:40]!r}, "
                f"{self._config.method} {pair.ours.text[:40]!r}"
            )
            if prompt.kind == "retrieval":
                ours, dense = self._samples(prompt, read)
                self._scores[0][pair.case_id], self._scores[1][pair.case_id] = ours, dense

    def _stored(self, read: ReadCase, extra: int) -> Subject:
        config = self._config
        factory = self._session.factory
        if config.device != "cpu":
            # a cache and what measures it hold each other, and a GPU's memory with them
            gc.collect()
        method: Subject
        if config.method == JOINT:
            method = factory.controlled(
                config.budget,
                protection=ProtectionRule(suffix_tokens=config.suffix_tokens),
                gate=GateOptions() if config.has_gate else None,
                context=read.case.context,
                work=read.work,
            )
        else:
            method = factory.make(
                config.method,
                config.budget,
                context=read.case.context,
                num_new=extra,
                work=read.work,
            )
        method.store_prompt(read.states)
        ledger, tokens = method.ledger(), method.num_tokens()
        self.memory = {
            "b_kv": ledger.b_kv(tokens),
            "eta_meta": ledger.eta_meta,
            "ledger": ledger.to_dict(),
            "table_bytes": method.table_bytes(),
            **method.describe(),
        }
        return method

    def watch_drift(self, split: Split | None) -> None:
        """Divergence from dense over the first stretches of a split, or over made-up text."""
        config, session = self._config, self._session
        if split is None:
            cases = lm_cases(
                session.tokenizer,
                data=None,
                context=config.context,
                num_following=config.num_following,
                num_prompts=config.num_texts,
            )
        else:
            cases = split.stretches(
                session.tokenizer,
                length=config.context,
                num_following=config.num_following,
                part=slice(config.num_texts),
            )
        peaks = []
        for case in cases:
            read = session.reader.read(case)
            with self._budgeted(case.case_id):
                method = self._stored(read, config.num_following)
                run = follow_text(method, read.states.following)
                found = token_divergence(session.model, read.reference, run.hidden)
                self._divergences += found.kl.tolist()
                peaks.append(run.trace.highest(lambda step: step.peak / step.limit, 0.0))
                assert self.memory is not None
                self.memory["peak_share"] = max(peaks)
                self._tell(f"{case.case_id}: {float(found.kl.mean()):.4f} nats per token")

    def _answers(self, prompt: WitnessPrompt, read: ReadCase) -> AnswerPair:
        """Greedy answers of dense and of the method."""
        case = prompt.case
        stops = stop_rule(self._session.tokenizer, at_line_end=case.stops_at_newline)
        method = self._stored(read, case.max_new_tokens)
        got = decode_tokens(
            self._session.model, method, read.states.hidden[-1:], case.max_new_tokens, stops
        )
        is_ended = len(read.answer_ids) < case.max_new_tokens
        return AnswerPair(
            prompt.kind,
            case.case_id,
            dense=self._reply(prompt, read.answer_ids, is_ended),
            ours=self._reply(prompt, got.token_ids, got.is_ended),
        )

    def _reply(self, prompt: WitnessPrompt, token_ids: tuple[int, ...], is_ended: bool) -> Reply:
        text = self._text(token_ids)
        return Reply(text, token_ids, is_ended, prompt.judge(text))

    def _samples(self, prompt: WitnessPrompt, read: ReadCase) -> tuple[list[float], list[float]]:
        """Scores of sampled answers, the same random numbers for both caches."""
        case = prompt.case
        scores: tuple[list[float], list[float]] = ([], [])
        for number in range(self._config.num_seeds):
            caches = (
                self._stored(read, case.max_new_tokens),
                exact_subject(self._session.model, read.states, case.max_new_tokens),
            )
            for held, cache in zip(scores, caches, strict=True):
                got = self._sample(cache, read, self._config.seed + number)
                held.append(float(prompt.judge(self._text(got.token_ids))))
        return scores

    def _sample(self, cache: Subject, read: ReadCase, seed: int) -> DecodedAnswer:
        session = self._session
        stops = stop_rule(session.tokenizer, at_line_end=read.case.stops_at_newline)
        last = read.states.hidden[-1:]
        return decode_tokens(session.model, cache, last, _SAMPLED_TOKENS, stops, choose=drawn(seed))

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return str(self._session.tokenizer.decode(token_ids, skip_special_tokens=True))


def _certificate(
    config: CertifyConfig,
    session: Session,
    prompts: list[WitnessPrompt],
    witnesses: list[Witness],
    memory: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that is needed to repeat and to trust the verdict."""
    settings = asdict(config)
    for name in ("data", "calibration_text", "policy", "log"):
        settings[name] = None if settings[name] is None else Path(settings[name]).name
    return {
        "format": CERTIFICATE_FORMAT,
        "is_safe": all(witness.is_held for witness in witnesses),
        "config": settings,
        "witnesses": [witness.to_dict() for witness in witnesses],
        "prompts": dict(Counter(prompt.kind for prompt in prompts)),
        "memory": memory,
        "dense_bytes_per_token": session.shape.geometry.dense_bytes_per_token,
        "suite_id": content_id([prompt.case.prompt_ids for prompt in prompts]),
        "calibration_id": session.calibration_id,
        "policy_id": session.policy_id,
        "backend": session.factory.backend_name,
        "environment": describe_environment(),
    }
