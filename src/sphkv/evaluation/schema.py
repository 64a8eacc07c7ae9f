# SPDX-License-Identifier: Apache-2.0
"""What a record holds, field by field, and a check that it does.

A record file has ``run`` lines, which say how the points after them were measured, and ``point``
lines. These types are what writers build and what ``sphkv validate`` compares a file with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

FORMAT = "sphkv-records-2"
"""Since 2 text is decoded under the budget and a point is labelled by its peak bytes."""

CERTIFICATE_FORMAT = "sphkv-certificate-2"
"""Since 2 a certificate names its split and failure classes say whether they were recovered."""


class MethodDescription(TypedDict):
    """What a cache chose under its budget.

    Attributes:
        name: Label of the method.
        setting: Tier, bits or sizes it took; never empty.
        residency: ``uniform`` or ``retention`` of ours, ``own`` of another method.
        tiers: Share of the states that each tier holds; what is missing to 1 was dropped.
        realisation: ``kernel-realized`` if decode reads what is stored, else ``format-only``.
    """

    name: str
    setting: str
    residency: str
    tiers: dict[str, float]
    realisation: str


class StepColumns(TypedDict):
    """Bytes of every pass after the prompt, one list per column.

    Attributes:
        num_tokens: Tokens stored after the pass.
        before: Resident bytes before it.
        peak: Most resident bytes inside it.
        after: Resident bytes after it.
        limit: Bytes the budget allows at the first token of the pass.
    """

    num_tokens: list[int]
    before: list[int]
    peak: list[int]
    after: list[int]
    limit: list[int]


class Memory(TypedDict):
    """Bytes of a point.

    Attributes:
        active_tokens: Tokens stored at the end.
        ledger: Resident bytes at the end, by kind.
        b_kv: Resident bytes per token at the highest moment of any pass; the point's label.
        b_kv_mean: Resident bytes per token after a pass, mean over passes.
        b_kv_tables: Bytes of codebooks per token at the end; not part of the others.
        eta_meta: Share of the bytes at the end that is not payload.
        stored_bytes: Resident bytes after the prompt was stored.
        peak_bytes: Most resident bytes inside any pass.
        peak_share: Highest resident bytes over what the budget allows there.
        dense_share: Highest resident bytes over those of a dense cache there.
        table_bytes: Bytes of codebooks, which all sequences share.
        b_hbm: Bytes that one step moves.
        b_hbm_source: ``counted`` or ``profiled``.
        setting: See ``MethodDescription``.
        residency: See ``MethodDescription``.
        tiers: See ``MethodDescription``.
        realisation: See ``MethodDescription``.
        steps: Bytes of every pass.
    """

    active_tokens: int
    ledger: dict[str, int]
    b_kv: float
    b_kv_mean: float
    b_kv_tables: float
    eta_meta: float
    stored_bytes: int
    peak_bytes: int
    peak_share: float
    dense_share: float
    table_bytes: int
    b_hbm: int
    b_hbm_source: str
    setting: str
    residency: str
    tiers: dict[str, float]
    realisation: str
    steps: StepColumns


class DistanceBins(TypedDict):
    """Divergence by distance from the prompt.

    Attributes:
        edges: Last distance, in tokens, of every bin; the first bin begins at 1.
        tokens: Tokens of each bin.
        kl: Their mean divergence in nats; None of an empty bin.
    """

    edges: list[int]
    tokens: list[int]
    kl: list[float | None]


class Verdicts(TypedDict):
    """Whether a text is continued as well as with the dense cache, by two rules.

    Attributes:
        kl: Mean divergence at most ``KL_TOLERANCE``.
        nll: Loss at most ``NLL_TOLERANCE`` above that of dense.
    """

    kl: bool
    nll: bool


class KLSummary(TypedDict):
    """Two runs of a model over the same tokens, in nats.

    Attributes:
        kl: Mean divergence from the exact model.
        kl_without_worst: The same without the worst token.
        kl_p95: 95% quantile.
        kl_max: Worst token.
        kl_by_distance: Means by distance from the prompt.
        kl_counts: Tokens by divergence.
        nll: Mean loss on the true next tokens.
        nll_dense: The same of the exact model.
        nll_delta: Their difference.
        same_top1: Share of tokens with the same best next token.
        num_tokens: Tokens compared.
        verdicts: By divergence and by loss.
    """

    kl: float
    kl_without_worst: float
    kl_p95: float
    kl_max: float
    kl_by_distance: DistanceBins
    kl_counts: list[int]
    nll: float
    nll_dense: float
    nll_delta: float
    same_top1: float
    num_tokens: int
    verdicts: Verdicts


class MarginCounts(TypedDict):
    """Changed best tokens by how sure the exact model was.

    Attributes:
        tokens: Tokens by margin.
        tipped: Of these, with another best token.
        drift: Predicted drift at the end; of a controller only.
        margins: Margin of every token; of a controller only.
        tipped_at: Tokens with another best token, counted from 0; of a controller only.
    """

    tokens: list[int]
    tipped: list[int]
    drift: NotRequired[float]
    margins: NotRequired[list[float]]
    tipped_at: NotRequired[list[int]]


class TextQuality(KLSummary):
    """A text that was continued.

    Attributes:
        by_margin: See ``MarginCounts``.
    """

    by_margin: MarginCounts


class AnswerQuality(TypedDict):
    """A greedy answer, and answers over seeds where they were asked for.

    Attributes:
        answer: The text.
        reference_answer: The exact model's.
        f1: Against the true answers.
        f1_reference: The exact model's.
        agreement_f1: Against the exact model's answer.
        em: Whether it is a true answer.
        found: Whether it begins with one.
        found_reference: The exact model's.
        is_same: Whether its tokens are the exact model's.
        length: Tokens.
        length_drift: Tokens more than the exact model's.
        is_ended: Whether the model ended it.
        failures: What went wrong that did not with the exact model.
        kl: Mean divergence while both answers agree.
        sampled: Scores of sampled answers.
        sampled_reference: The exact model's.
        s_traj: Variance of these scores.
        s_traj_reference: The exact model's.
    """

    answer: str
    reference_answer: str
    f1: float
    f1_reference: float
    agreement_f1: float
    em: float
    found: float
    found_reference: NotRequired[float]
    is_same: float
    length: int
    length_drift: int
    is_ended: float
    failures: list[str]
    kl: float
    sampled: NotRequired[list[float]]
    sampled_reference: NotRequired[list[float]]
    s_traj: NotRequired[float]
    s_traj_reference: NotRequired[float]


class EpisodeQuality(TypedDict):
    """An episode of tool use beside the exact model's.

    Attributes:
        success: Whether the task was solved.
        success_reference: The same of the exact model.
        schema_validity: Share of statements that ran.
        actions: The statements.
        is_same: Whether they are the exact model's.
        length: Tokens.
        length_drift: Tokens more than the exact model's.
        is_ended: Whether the model ended every statement.
        failures: What went wrong that did not with the exact model.
    """

    success: float
    success_reference: float
    schema_validity: float
    actions: list[str]
    is_same: float
    length: int
    length_drift: int
    is_ended: float
    failures: list[str]


class Times(TypedDict):
    """Seconds; the only part of a point that differs when it is measured again.

    Attributes:
        t_prefill_s: Dense pass over the prompt.
        t_allocate_write_s: Deciding, encoding and writing.
        t_decode_s: All timed steps.
        ttft_s: Until the first token.
        num_measured: Steps after the warm-up.
        decode_s: All of them.
        tok_s: One over the median step; None without a measured step.
        step_p50_s: Median step.
        step_p95_s: 95% quantile.
        attend_s: Seconds of the measured steps inside the cache.
    """

    t_prefill_s: float
    t_allocate_write_s: float
    t_decode_s: float
    ttft_s: float
    num_measured: int
    decode_s: float
    tok_s: float | None
    step_p50_s: float | None
    step_p95_s: float | None
    attend_s: float | None


class Result(TypedDict):
    """What measuring a case gives.

    Attributes:
        quality: By workload.
        memory: Bytes.
        times: Seconds.
        allocation: Where a controller spent its bytes; of texts only.
    """

    quality: TextQuality | AnswerQuality | EpisodeQuality
    memory: Memory
    times: Times
    allocation: NotRequired[dict[str, Any]]


class Identity(TypedDict):
    """What makes a point this point and no other.

    Attributes:
        model: The model.
        workload: ``lm``, ``qa``, ``needle`` or ``tools``.
        case: Name of the prompt.
        split: ``development``, ``test``, or empty for text of no split.
        prompt: Hash of its token ids.
        following: Hash of the token ids after it; empty if there are none.
        context: Tokens of the prompt.
        num_following: Tokens after it.
        max_new_tokens: Most tokens of an answer.
        window: How decoding was timed.
        seed: Draws what is drawn.
        calibration: Names the codebooks.
        method: Name of the method.
        budget: As it was asked for.
        policy: Names the controller's weights; empty for other methods.
        num_seeds: Sampled answers.
    """

    model: str
    workload: Literal["lm", "qa", "needle", "tools"]
    case: str
    split: str
    prompt: str
    following: str
    context: int
    num_following: int
    max_new_tokens: int
    window: dict[str, int]
    seed: int
    calibration: str
    method: str
    budget: str
    policy: str
    num_seeds: int


class Point(Identity):
    """A line of a record file: one prompt, method and budget.

    Attributes:
        kind: ``point``.
        run: Names its run line.
        id: Hash of the identity.
        facets: What the prompt stands for.
        status: ``measured``, or ``refused`` where the budget is too small for the method.
        reason: Why it was refused.
        quality: None if refused.
        memory: None if refused.
        times: None if refused.
        allocation: See ``Result``.
    """

    kind: Literal["point"]
    run: str
    id: str
    facets: dict[str, Any]
    status: Literal["measured", "refused"]
    reason: str
    quality: TextQuality | AnswerQuality | EpisodeQuality | None
    memory: Memory | None
    times: Times | None
    allocation: NotRequired[dict[str, Any]]


class Setup(TypedDict):
    """With what points were measured.

    Attributes:
        model: The model.
        model_shape: Shape of its cache.
        dense_bytes_per_token: Bytes of a dense cache per token.
        seed: Draws what is drawn.
        window: How decoding was timed.
        decode: Greedy, batch 1.
        substrate: Pages, device, types, backend.
        tiers: Tiers our methods choose from.
        calibration: Text and size.
        timing: Clock.
        environment: Hardware, versions, commit.
    """

    model: str
    model_shape: dict[str, Any]
    dense_bytes_per_token: int
    seed: int
    window: dict[str, int]
    decode: dict[str, Any]
    substrate: dict[str, Any]
    tiers: list[dict[str, Any]]
    calibration: dict[str, Any]
    timing: dict[str, str]
    environment: dict[str, Any]


class Run(TypedDict):
    """A line of a record file that says how the points after it were measured.

    Attributes:
        kind: ``run``.
        format: ``FORMAT``.
        run: Hash of the setup.
        setup: The setup.
    """

    kind: Literal["run"]
    format: str
    run: str
    setup: Setup


class FailureRow(TypedDict):
    """One of the paper's failure classes, under its trigger and after its fix.

    Attributes:
        failure: Its name.
        mechanism: What goes wrong.
        budget: At which it was examined.
        num_prompts: Prompts examined.
        num_shown: Prompts on which dense has what may be lost; 0 if all were examined in vain.
        is_triggered: Whether the failure showed.
        is_recovered: Whether the fix made nothing worse and something better.
        drift_trigger: Mean divergence from dense's answers, in nats.
        drift_fix: The same after the fix, as all that end so.
        lost_trigger: Answers that lost what dense's have.
        lost_fix: After the fix.
        delta_t_trigger: Mean difference of answers' lengths, in tokens.
        delta_t_fix: After the fix.
        s_traj_trigger: Mean variance over sampled answers of having the property.
        s_traj_fix: After the fix.
        cost_bytes_per_token: Bytes that the fix pins.
    """

    failure: str
    mechanism: str
    budget: str
    num_prompts: int
    num_shown: int
    is_triggered: bool
    is_recovered: bool
    drift_trigger: float
    drift_fix: float
    lost_trigger: int
    lost_fix: int
    delta_t_trigger: float
    delta_t_fix: float
    s_traj_trigger: float
    s_traj_fix: float
    cost_bytes_per_token: float


class WitnessRow(TypedDict):
    """One judged behaviour of a certificate.

    Attributes:
        name: What is watched.
        value: The method's figure.
        bound: The most that it may be.
        dense: Dense's figure, where there is one.
        exemplar: The worst example.
        is_held: Whether the figure is within its bound.
        is_mute: Whether dense itself fails, so that it shows nothing.
    """

    name: str
    value: float
    bound: float
    dense: float | None
    exemplar: str
    is_held: bool
    is_mute: bool


class Certificate(TypedDict):
    """What ``sphkv certify`` writes.

    Attributes:
        format: ``CERTIFICATE_FORMAT``.
        is_safe: Whether every witness holds.
        config: The operating point and how it was examined.
        witnesses: Every judged behaviour.
        prompts: Prompts of each witness.
        memory: Bytes and realisation; None if nothing could be stored.
        dense_bytes_per_token: Bytes of a dense cache per token.
        suite_id: Names the prompts.
        calibration_id: Names the codebooks.
        policy_id: Names the controller's weights.
        backend: What ran decode attention.
        environment: Hardware, versions, commit.
        stability: Figures over all answers; None if there are none.
        failures: The failure classes, if they were examined.
    """

    format: str
    is_safe: bool
    config: dict[str, Any]
    witnesses: list[WitnessRow]
    prompts: dict[str, int]
    memory: dict[str, Any] | None
    dense_bytes_per_token: int
    suite_id: str
    calibration_id: str
    policy_id: str
    backend: str
    environment: dict[str, Any]
    stability: dict[str, Any] | None
    failures: NotRequired[list[FailureRow]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in a record file that is not as it should be.

    Attributes:
        line: Number of the line, from 1 on.
        field: Path of the field, such as ``memory.setting``; empty for the whole line.
        problem: What is wrong with it.
    """

    line: int
    field: str
    problem: str

    def __str__(self) -> str:
        """As a compiler would say it."""
        where = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{where}: {self.problem}"


def validate_file(path: Path) -> list[Fault]:
    """Everything that is wrong with a record file or certificate; an empty list if nothing is."""
    faults: list[Fault] = []
    runs: set[str] = set()
    seen: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if _is_certificate(text):
        wrong = check_value(json.loads(text), Certificate)
        return [Fault(1, field, problem) for field, problem in wrong]
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
        except ValueError as error:
            faults.append(Fault(number, "", f"is no JSON: {error}"))
            continue
        found = list(_check_line(line, runs, seen))
        faults += [Fault(number, field, problem) for field, problem in found]
    return faults


def _is_certificate(text: str) -> bool:
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("format") == CERTIFICATE_FORMAT


def _check_line(line: Any, runs: set[str], seen: set[str]) -> Iterator[tuple[str, str]]:
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind == "run":
        yield from check_value(line, Run)
        if line.get("format") != FORMAT:
            yield "format", f"is {line.get('format')!r}, not {FORMAT!r}"
        runs.add(str(line.get("run")))
    elif kind == "point":
        yield from check_point(line)
        if line.get("run") not in runs:
            yield "run", f"names {line.get('run')!r}, and no line before has that run"
        if str(line.get("id")) in seen:
            yield "id", f"{line.get('id')!r} is there twice"
        seen.add(str(line.get("id")))
    else:
        yield "kind", f"must be 'run' or 'point', got {kind!r}"


_QUALITY_OF = {
    "lm": TextQuality,
    "qa": AnswerQuality,
    "needle": AnswerQuality,
    "tools": EpisodeQuality,
}


def check_point(point: Any) -> Iterator[tuple[str, str]]:
    """Fields of a point that are missing, too many, of another type or contradict each other."""
    found = list(check_value(point, Point, skip=("quality",)))
    yield from found
    parts = {name: point.get(name) for name in ("quality", "memory", "times")}
    if point.get("status") == "refused":
        yield from ((n, "must be null where refused") for n, v in parts.items() if v is not None)
        if not point.get("reason"):
            yield "reason", "must say why the point was refused"
        return
    missing = [name for name, value in parts.items() if value is None]
    yield from ((name, "must not be null where measured") for name in missing)
    wanted = _QUALITY_OF.get(str(point.get("workload")))
    if wanted is not None and parts["quality"] is not None:
        yield from check_value(parts["quality"], wanted, path="quality")
    if not found and parts["memory"] is not None:
        yield from _check_memory(parts["memory"])


def _check_memory(memory: Any) -> Iterator[tuple[str, str]]:
    for name in ("setting", "residency", "realisation"):
        if not memory[name]:
            yield f"memory.{name}", "must not be empty"
    steps = memory["steps"]
    if len({len(column) for column in steps.values()}) != 1:
        yield "memory.steps", "columns differ in length"
    elif steps["peak"] and max(steps["peak"]) != memory["peak_bytes"]:
        yield "memory.peak_bytes", f"is {memory['peak_bytes']}, the steps say {max(steps['peak'])}"


def check_value(
    value: Any, wanted: Any, *, path: str = "", skip: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Compare JSON data with a type: a ``TypedDict``, a list, a dict, a union or a plain type.

    Args:
        value: The data.
        wanted: The type.
        path: Where it stands; prefix of the fields that are named.
        skip: Fields of the outermost ``TypedDict`` whose values are not looked at.

    Yields:
        Field and problem.
    """
    origin = get_origin(wanted)
    if wanted is Any:
        return
    if is_typeddict(wanted):
        yield from _check_fields(value, wanted, path, skip)
    elif origin in (Union, UnionType):
        yield from _check_options(value, get_args(wanted), path)
    elif origin is Literal:
        if value not in get_args(wanted):
            yield path, f"is {_show(value)}, not one of {', '.join(map(repr, get_args(wanted)))}"
    elif origin is list:
        yield from _check_items(value, list, get_args(wanted)[0], path)
    elif origin is dict:
        yield from _check_items(value, dict, get_args(wanted)[1], path)
    elif not _is_plain(value, wanted):
        yield path, f"is {_show(value)}, not {_name(wanted)}"


def _check_options(value: Any, options: tuple[Any, ...], path: str) -> Iterator[tuple[str, str]]:
    others = [option for option in options if option is not NoneType]
    if value is None and len(others) < len(options):
        return
    tries = [list(check_value(value, option, path=path)) for option in others]
    if len(tries) == 1:
        yield from tries[0]
    elif all(tries):
        yield path, f"is {_show(value)}, not {' or '.join(map(_name, others))}"


def _check_fields(
    value: Any, wanted: Any, path: str, skip: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, f"is {_show(value)}, not an object"
        return
    hints = get_type_hints(wanted, include_extras=True)
    optional = {name for name, kind in hints.items() if get_origin(kind) is NotRequired}
    for name in sorted(hints.keys() - optional - value.keys()):
        yield _join(path, name), "is missing"
    for name in sorted(value.keys() - hints.keys()):
        yield _join(path, name), "is no known field"
    for name, kind in hints.items():
        if name in value and name not in skip:
            plain = get_args(kind)[0] if name in optional else kind
            yield from check_value(value[name], plain, path=_join(path, name))


def _check_items(value: Any, kind: Any, item: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, kind):
        yield path, f"is {_show(value)}, not {'a list' if kind is list else 'an object'}"
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in pairs:
        yield from check_value(part, item, path=_join(path, str(name)))


def _is_plain(value: Any, wanted: Any) -> bool:
    if wanted is NoneType:
        return value is None
    if wanted is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _name(wanted: Any) -> str:
    return getattr(wanted, "__name__", str(wanted).replace("sphkv.evaluation.schema.", ""))
