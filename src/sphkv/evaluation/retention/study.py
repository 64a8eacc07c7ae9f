# SPDX-License-Identifier: Apache-2.0
"""The paper's ablations A1 to A5: which variants are compared, on what, and what is read off.

Variants are methods of a sweep, so an ablation is a grid like any other: token by token under the
budget, one record per prompt, variant and budget, resumable.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sphkv.errors import SplitError
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS
from sphkv.evaluation.metrics.answers import failure_rate
from sphkv.evaluation.metrics.statistics import mean_interval, paired_interval
from sphkv.evaluation.records import content_id, load_records
from sphkv.evaluation.runner.methods import DENSE, JOINT, UNIFORM, find_variant
from sphkv.evaluation.sweep.config import QAWorkload, SplitWorkload, SweepConfig
from sphkv.retention.policy import RetentionPolicy, load_policy, save_policy

STUDIES: dict[str, tuple[str, ...]] = {
    "a1": (JOINT, "joint:rebuild", UNIFORM),
    "a2": (
        JOINT,
        "joint:keepdrop",
        "joint:keepdrop-best",
        "joint:keepdrop=k2v2",
        "joint:keepdrop=k3v3",
        "joint:keepdrop=k4v4",
        "joint:quant",
        "joint:decoupled=0.1",
        "joint:decoupled=0.2",
        "joint:decoupled=0.35",
        "joint:decoupled",
    ),
    "a3": (JOINT, "joint:uniform-head"),
    "a4": (
        JOINT,
        "joint:noseg",
        "joint:retrieved=0.5",
        "joint:retrieved=2",
        "joint:retrieved=4",
        "joint:prefix=0.25",
        "joint:recent=4",
    ),
    "a5": (JOINT, "joint:gate"),
}
"""Variants of each ablation. A1: ``joint:rebuild`` is the paper's RD-only, ``spherical`` its
Angle-only. A2: fixed tiers and kept shares are tried in turn, so that each partial variant is there
at its best."""

BUDGETS = ("5%", "10%", "20%")
ANSWERED_F1 = 0.5
"""F1 from which dense's own answer counts as one; what dense cannot answer shows nothing."""

_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """What is compared, and on what.

    Attributes:
        model: ``smollm2``, a local folder or a hub name.
        data: Folder with ``pg19`` and ``longbench``.
        variants: Methods as ``check_method`` reads them.
        budgets: Byte budgets.
        length: Tokens of a prompt, one of the manifest's.
        num_following: Tokens after a stretch.
        num_texts: Stretches of books.
        num_questions: Questions.
        answerable_f1: F1 from which dense must answer a question from its passages alone for it to
            be asked; 0 takes the first ones, whatever dense says to them.
        num_needles: Hidden sentences.
        clutter: Tokens of a book in front of every question's passages.
        num_seeds: Answers drawn beside the greedy one; 0 for none.
        split: ``development`` or ``test``.
        purpose: What the data is for; must be the split's name.
        log: File that counts uses of test data.
        policy: Weights of the controller; None takes equal ones.
        calibration_text: Text to calibrate on, inside the data folder.
        calibration_tokens: Tokens of it.
        num_threads: Threads of torch; 0 leaves its default.
    """

    model: str
    data: Path
    variants: tuple[str, ...]
    budgets: tuple[str, ...] = BUDGETS
    length: int = 2048
    num_following: int = FOLLOWING_TOKENS
    num_texts: int = 4
    num_questions: int = 4
    answerable_f1: float = ANSWERED_F1
    num_needles: int = 0
    clutter: int = 0
    num_seeds: int = 0
    split: str = "development"
    purpose: str = "development"
    log: Path | None = None
    policy: Path | None = None
    calibration_text: str = "pg19/calibration/10046.txt"
    calibration_tokens: int = 4096
    num_threads: int = 0

    def grid(self) -> SweepConfig:
        """The sweep that measures it, dense first.

        Raises:
            ValueError: There is nothing to measure on, or no such variant or budget.
        """
        split = SplitWorkload(
            self.length,
            split=self.split,
            purpose=self.purpose,
            log=self.log,
            num_following=self.num_following,
        )
        parts = []
        for workload, count in (("lm", self.num_texts), ("needle", self.num_needles)):
            if count:
                parts.append(replace(split, workload=workload, count=count))
        questions: tuple[QAWorkload, ...] = ()
        if self.num_questions:
            part = QAWorkload(
                self.length,
                num_questions=self.num_questions,
                max_new_tokens=_ANSWER_TOKENS,
                answerable_f1=self.answerable_f1,
                clutter=self.clutter,
                split=self.split,
                purpose=self.purpose,
                log=self.log,
            )
            questions = (part,)
        return SweepConfig(
            self.model,
            (DENSE, *(name for name in self.variants if name != DENSE)),
            self.budgets,
            data=self.data,
            qa=questions,
            split=tuple(parts),
            num_seeds=self.num_seeds,
            calibration_text=self.calibration_text,
            calibration_tokens=self.calibration_tokens,
            policy=self.policy,
            num_threads=self.num_threads,
        )


def ablation_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts, one row per budget and variant, in the order of the records.

    ``lm_*`` are of stretches. Of questions and needles there are the divergence (``qa_kl``),
    answers that are dense's token by token, failures that dense does not have, the change of length
    and the variance over seeds; these compare with dense's answer, be it right or wrong.
    ``*_interval`` is a mean divergence with its 95% interval over prompts, ``*_above`` how much it
    is above ``joint``'s at the budget, paired, with that one's.
    Questions to which dense says nothing are left out of them. ``num_asked`` says how many are
    left, ``num_answered`` how many of these dense gets right; ``qa_f1`` and ``qa_f1_dense`` are of
    the latter. A variant that some prompt leaves without a contract has no means.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["method"] != DENSE:
            groups.setdefault((record["budget"], record["method"]), []).append(record)
    rows = [_row(*key, members) for key, members in groups.items()]
    for row, ((budget, _), members) in zip(rows, groups.items(), strict=True):
        joint = groups.get((budget, JOINT), [])
        for name, workloads in (("lm", ("lm",)), ("qa", ("qa", "needle"))):
            own, base = _measured(members, workloads), _measured(joint, workloads)
            row[f"{name}_interval"] = (
                str(mean_interval([member["quality"]["kl"] for member in own])) if own else None
            )
            row[f"{name}_above"] = _above(own, base)
    return rows


def _above(members: Sequence[Mapping[str, Any]], joint: Sequence[Mapping[str, Any]]) -> str | None:
    """Divergence above the joint variant's with its interval; None of itself and without pairs."""
    own, base = ({m["case"]: m["quality"]["kl"] for m in part} for part in (members, joint))
    if members == joint or not own.keys() & base.keys():
        return None
    return str(paired_interval(own, base))


def _row(budget: str, variant: str, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"budget": budget, "variant": variant, "num_prompts": len(members)}
    refused = [member for member in members if member["status"] == "refused"]
    row["note"] = f"{len(refused)} refused" if refused else ""
    texts = _measured(members, ("lm",))
    for name, source in (("lm_kl", "kl"), ("lm_worst", "kl_max"), ("lm_same", "same_top1")):
        row[name] = _mean([text["quality"][source] for text in texts])
    row["nll_delta"] = _mean([text["quality"]["nll_delta"] for text in texts])
    row["tok_s"] = _mean([text["times"]["tok_s"] for text in texts if text["times"]["tok_s"]])
    row["attend_ms"] = _mean(
        [1e3 * text["times"]["attend_s"] / text["times"]["num_measured"] for text in texts]
    )
    asked = [member["quality"] for member in _measured(members, ("qa", "needle"))]
    row["num_asked"] = len(asked) if asked else None
    row["num_texts"] = len(texts) if texts else None
    row["qa_kl"] = _mean([quality["kl"] for quality in asked])
    row["qa_same"] = _mean([quality["is_same"] for quality in asked])
    row["r_fail"] = failure_rate([q["failures"] for q in asked]) if asked else None
    row["delta_t"] = _mean([abs(quality["length_drift"]) for quality in asked])
    row["s_traj"] = _mean([quality["s_traj"] for quality in asked if "s_traj" in quality])
    answered = [quality for quality in asked if quality["f1_reference"] >= ANSWERED_F1]
    row["num_answered"] = len(answered) if asked else None
    row["qa_f1"] = _mean([quality["f1"] for quality in answered])
    row["qa_f1_dense"] = _mean([quality["f1_reference"] for quality in answered])
    done = [member for member in members if member["status"] == "measured"]
    row["peak"] = max((member["memory"]["peak_share"] for member in done), default=None)
    return row


def _measured(
    members: Sequence[Mapping[str, Any]], workloads: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Points of some workloads; none if one of them was refused.

    A question to which dense says nothing is left out: it ends at the prompt's own logits, which
    no cache has a part in.
    """
    part = [member for member in members if member["workload"] in workloads]
    if any(member["status"] != "measured" for member in part):
        return []
    return [member for member in part if _says_something(member)]


def _says_something(member: Mapping[str, Any]) -> bool:
    """Whether the exact model's answer has a token; of a text always."""
    if member["workload"] == "lm":
        return True
    return bool(member["quality"]["length"] > member["quality"]["length_drift"])


def tune_policy(
    policy: RetentionPolicy, records: Sequence[Mapping[str, Any]]
) -> tuple[RetentionPolicy, dict[str, Any]]:
    """Choose segment weights and the scale of drift by what was measured on development data.

    Args:
        policy: What to start from; the points were measured with it.
        records: Points of ``joint`` and of ``joint:SEGMENT=WEIGHT`` on questions, and of ``joint``
            on texts; what there is decides.

    Returns:
        The policy, and ``segments``, ``segment_weights`` and ``gate`` for a record.

    Raises:
        SplitError: A point is of test data.
        ValueError: A point was measured with another policy.
    """
    if any(record["split"] == "test" for record in records):
        raise SplitError("a policy must not be chosen by test data")
    own = content_id(asdict(policy))
    if any(record["policy"] not in ("", own) for record in records):
        raise ValueError("records and policy do not go together: another policy was measured")
    segments, weights = _choose_weights(records, policy.segment_weights)
    gate = _choose_scale(records, policy.drift_scale)
    scale = policy.drift_scale if gate is None else gate["drift_scale"]
    tuned = replace(policy, segment_weights=weights, drift_scale=scale)
    return tuned, {"segments": segments, "segment_weights": list(weights), "gate": gate}


def tune_by_files(records: Sequence[Path], policy: Path | None, out: Path) -> dict[str, Any]:
    """As ``tune_policy``, from record files and a policy file to another policy file.

    Args:
        records: Record files.
        policy: What to start from; equal weights if None.
        out: Where the tuned policy is written.
    """
    start = RetentionPolicy() if policy is None else load_policy(policy)
    tuned, record = tune_policy(start, load_records(records))
    save_policy(tuned, out)
    return {**record, "records": [path.name for path in records]}


def _choose_weights(
    records: Sequence[Mapping[str, Any]], held: tuple[float, float, float]
) -> tuple[list[dict[str, Any]], tuple[float, float, float]]:
    """Mean divergence under each weighting on the points that all have, and the best weights.

    Another weighting than the policy's own must be better on more than half of the points too.
    """
    found: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        is_ours = record["method"] == JOINT or _weights_of(record["method"]) is not None
        if is_ours and record["workload"] == "qa" and record["status"] == "measured":
            place = (record["case"], record["budget"])
            found.setdefault(record["method"], {})[place] = record["quality"]["kl"]
    if JOINT not in found:
        return [], held
    places = set.intersection(*(set(points) for points in found.values()))
    rows, best = [], (JOINT, math.inf)
    for method, points in found.items():
        kl = _mean([points[place] for place in places])
        if kl is None:
            continue
        better = sum(points[place] < found[JOINT][place] for place in places)
        rows.append({"variant": method, "kl": kl, "better": better, "prompts": len(places)})
        if kl < best[1] and (method == JOINT or 2 * better > len(places)):
            best = (method, kl)
    return rows, _weights_of(best[0]) or held


def _weights_of(method: str) -> tuple[float, float, float] | None:
    """Segment weights that a method's name sets; None if it sets none."""
    return find_variant(method).segment_weights if method.startswith(JOINT) else None


def _choose_scale(records: Sequence[Mapping[str, Any]], held: float) -> dict[str, float] | None:
    """Scale of drift at which a danger of one tells changed tokens from others best.

    It was ``held`` when the drift was measured. Of all scales, the one with the largest difference
    between the share of changed tokens that are in danger and the share of all tokens that are;
    None without texts.
    """
    dangers: list[float] = []
    tipped: list[bool] = []
    for record in records:
        if record["workload"] != "lm" or record["status"] != "measured":
            continue
        told = record["quality"]["by_margin"]
        if record["method"] == JOINT and "tipped_at" in told:
            at = set(told["tipped_at"])
            dangers += [told["drift"] / max(margin, 1e-6) for margin in told["margins"]]
            tipped += [place in at for place in range(len(told["margins"]))]
    if not any(tipped):
        return None
    order = sorted(range(len(dangers)), key=lambda place: -dangers[place])
    caught, best, least = 0, -1.0, 0
    for count, place in enumerate(order, 1):
        caught += tipped[place]
        gain = caught / sum(tipped) - count / len(order)
        if gain > best:
            best, least = gain, count
    threshold = dangers[order[least - 1]]
    return {
        "drift_scale": held / threshold,
        "share_in_danger": least / len(order),
        "share_of_tipped": best + least / len(order),
        "num_tokens": float(len(order)),
        "num_tipped": float(sum(tipped)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
