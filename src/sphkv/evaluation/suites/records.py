# SPDX-License-Identifier: Apache-2.0
"""Records of suites: one JSON line per answer, safe against a kill, and a check of their fields.

A ``run`` line says with what the answers after it were measured. A line counts once its line end is
on disk, so a kill leaves at most one unfinished line, which the next start removes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from sphkv.evaluation.records import LineFile, canonical_json
from sphkv.evaluation.runner.methods import JOINT
from sphkv.evaluation.validate import check_value

SUITE_FORMAT = "sphkv-suite-1"

Mode = Literal["visible", "hidden"]
"""Whether the question is part of what a method stores and judges at once, or comes after."""


class SuiteSetup(TypedDict):
    """With what answers were measured.

    Attributes:
        config: The resolved config.
        sets: Hash of every set of prompts.
        dense_bytes_per_token: Bytes of a dense bfloat16 cache per token.
        environment: Hardware, versions, commit.
    """

    config: dict[str, Any]
    sets: list[str]
    dense_bytes_per_token: int
    environment: dict[str, Any]


class AnswerBytes(TypedDict):
    """Bytes of a cache while a question was read and answered.

    Attributes:
        stored: Resident bytes after the prompt was stored.
        peak: Most resident bytes in any pass after it.
        limit_share: Highest bytes over what the budget allows there.
        dense_share: Highest bytes over those of a dense cache there.
        setting: Tier, bits or sizes the method took.
        residency: ``uniform``, ``retention``, ``own``, or ``counted`` where bytes are what the
            states kept would take and not what is resident.
        realisation: ``kernel-realized`` if decode reads what is stored, else ``format-only``.
        tiers: Share of the states that each tier holds.
    """

    stored: int
    peak: int
    limit_share: float
    dense_share: float
    setting: str
    residency: str
    realisation: str
    tiers: dict[str, float]


class AnswerTimes(TypedDict):
    """Seconds; the only part of an answer that differs when it is measured again.

    Attributes:
        prefill_s: Dense pass over the prompt, shared by all methods.
        store_s: Deciding, encoding and writing.
        question_s: Reading the question under the budget; 0 where it was stored with the prompt.
        decode_s: The answer.
    """

    prefill_s: float
    store_s: float
    question_s: float
    decode_s: float


class AnswerIdentity(TypedDict):
    """What makes an answer this one and no other.

    Attributes:
        model: The model.
        dtype: Type of its weights.
        suite: Of the sample.
        task: Of the sample.
        sample: Its name.
        set: Hash of its set.
        length: Tokens it was made for; 0 of a natural text.
        context_tokens: Tokens before the question.
        question_tokens: Tokens of the question.
        max_new_tokens: Most tokens of the answer.
        mode: Visible or hidden question.
        method: Name of the method.
        budget: Its byte budget.
        calibration: ``prompt``, or the hash of a file.
        device: Where the model and the cache were.
        backend: What decoded the method's pages; empty of methods from outside.
        page_tokens: States of a coded page of ``joint`` as asked for; None for its own choice.
    """

    model: str
    dtype: str
    suite: str
    task: str
    sample: str
    set: str
    length: int
    context_tokens: int
    question_tokens: int
    max_new_tokens: int
    mode: Mode
    method: str
    budget: str
    calibration: str
    device: NotRequired[str]
    backend: NotRequired[str]
    page_tokens: NotRequired[int | None]


class AnswerRecord(AnswerIdentity):
    """A line of a record file: one sample, mode, method and budget.

    Attributes:
        kind: ``answer``.
        run: Names its run line.
        id: Hash of the identity.
        status: ``measured``; ``refused`` where the budget is too small for the method; ``failed``
            where the method broke.
        reason: Why it was refused or failed.
        answer: The text; empty if there is none.
        num_tokens: Its tokens.
        score: Between 0 and 1; None if there is no answer.
        bytes: None if there is no answer.
        times: None if there is no answer.
    """

    kind: Literal["answer"]
    run: str
    id: str
    status: Literal["measured", "refused", "failed"]
    reason: str
    answer: str
    num_tokens: int
    score: float | None
    bytes: AnswerBytes | None
    times: AnswerTimes | None


class AcceptanceRecord(TypedDict):
    """A line of a record file: how a draft fares with a target whose cache is a method's.

    Attributes:
        kind: ``acceptance``.
        run: Names its run line.
        id: Hash of model, draft, prompt, method and budget.
        status: As in an answer.
        reason: Why it was refused or failed.
        model: The target.
        draft: The draft.
        set: Hash of the prompts.
        sample: Name of the prompt.
        method: What keeps the target's states.
        budget: Its byte budget.
        max_new_tokens: Most tokens of the target's text.
        num_proposed: Tokens the draft proposes at a time.
        num_tokens: Tokens of the target's text.
        num_matched: Of these, tokens that the draft would have proposed.
        num_passes: Passes of the target that greedy speculation takes for the text.
        same_as_dense: Leading tokens that are those of the dense target; None where not known.
        bytes: None without a text.
    """

    kind: Literal["acceptance"]
    run: str
    id: str
    status: Literal["measured", "refused", "failed"]
    reason: str
    model: str
    draft: str
    set: str
    sample: str
    method: str
    budget: str
    max_new_tokens: int
    num_proposed: int
    num_tokens: int
    num_matched: int
    num_passes: int
    same_as_dense: int | None
    bytes: AnswerBytes | None


class SuiteRun(TypedDict):
    """A line that says how the answers after it were measured.

    Attributes:
        kind: ``run``.
        format: ``SUITE_FORMAT``.
        run: Hash of the setup.
        setup: The setup.
    """

    kind: Literal["run"]
    format: str
    run: str
    setup: SuiteSetup


_LATER = ("device", "backend", "page_tokens")


def answer_place(line: Mapping[str, Any], setup: Mapping[str, Any]) -> dict[str, Any]:
    """Where an answer comes from, by its own word or its run's.

    An older answer does not say its backend, which ``auto`` may have chosen.

    Args:
        line: The answer.
        setup: That of its run.
    """
    config = setup["config"]
    pages = config.get("page_tokens") if line["method"] == JOINT else None
    said = {"device": config.get("device"), "page_tokens": pages}
    return said | {name: line[name] for name in _LATER if name in line}


class SuiteFile(LineFile):
    """Answers of a suite."""

    format = SUITE_FORMAT
    later: ClassVar[tuple[str, ...]] = _LATER

    def place(self, line: Mapping[str, Any], setup: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a run says of where its answers come from."""
        return answer_place(line, setup)

    def read(self, text: str) -> Iterable[Mapping[str, Any]]:
        """Lines of a file, checked."""
        return _parse(text, self.path)

    def counts(self, line: Mapping[str, Any]) -> bool:
        """A failed answer is tried again."""
        return bool(line["status"] != "failed")

    def append(
        self, record: Mapping[str, Any], kind: Literal["answer", "acceptance"] = "answer"
    ) -> None:
        """Add an answer or an acceptance.

        Args:
            record: All fields but ``kind`` and ``run``.
            kind: Which of the two it is.

        Raises:
            ValueError: It is there already, or no run was begun.
        """
        if not self._run:
            raise ValueError("begin_run comes before the first answer")
        if record["id"] in self.done:
            raise ValueError(f"answer {record['id']} is in {self.path} already")
        self._append({"kind": kind, "run": self._run, **record})
        if record["status"] != "failed":
            self.done.add(record["id"])


def load_answers(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Answers of some files, each with its run's ``setup``; the last word on an id counts.

    Raises:
        ValueError: A line is no record of a suite.
    """
    return _load(paths, "answer")


def load_acceptances(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Acceptances of some files, as ``load_answers``."""
    return _load(paths, "acceptance")


def _load(paths: Iterable[Path], kind: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        data = path.read_bytes()
        lines = _parse(data[: data.rfind(b"\n") + 1].decode(), path)
        setups = {line["run"]: line["setup"] for line in lines if line["kind"] == "run"}
        for line in lines:
            if line["kind"] != kind:
                continue
            if line["run"] not in setups:
                raise ValueError(f"{path}: {kind} {line['id']} names run {line['run']}, not there")
            setup = setups[line["run"]]
            # ids of older answers do not depend on where they come from
            where = canonical_json([line["id"], answer_place(line, setup)])
            found[where] = {**line, "setup": setup}
    return list(found.values())


_KINDS: dict[str, Any] = {
    "run": SuiteRun,
    "answer": AnswerRecord,
    "acceptance": AcceptanceRecord,
}


def _parse(text: str, path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
            wanted = _KINDS[line["kind"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no record of a suite: {error}") from error
        for field, problem in check_value(line, wanted):
            raise ValueError(f"{path}, line {number}, {field}: {problem}")
        if line["kind"] == "run" and line["format"] != SUITE_FORMAT:
            raise ValueError(
                f"{path}, line {number}, has format {line['format']!r}, not {SUITE_FORMAT!r}"
            )
        lines.append(line)
    return lines
