# SPDX-License-Identifier: Apache-2.0
"""One answer: a prompt is stored by a method under its budget, asked, and answered greedily.

Our methods are the public ``SphericalCache.for_model``; baselines are attached to the same model in
the same way. All of them store the states of one dense pass and decode token by token, so that a
column differs from another in its cache alone.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.api import get_backend
from sphkv.baselines.registry import find, make_baseline
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.core.budget import ByteBudget
from sphkv.evaluation.harness.decode import Decoder, StepBytes
from sphkv.evaluation.harness.states import PromptStates, read_prompt
from sphkv.evaluation.harness.subject import (
    MethodSubject,
    Pass,
    ProductSubject,
    Subject,
    forward_pass,
)
from sphkv.evaluation.runner.decoding import StopRule, decode_tokens, stop_rule
from sphkv.evaluation.runner.methods import DENSE, JOINT, OUR_METHODS, UNIFORM
from sphkv.evaluation.suites.config import PRESS, QUANTIZED, SuiteConfig
from sphkv.evaluation.suites.records import AnswerBytes, AnswerTimes, Mode
from sphkv.evaluation.suites.samples import Sample, SampleIds, is_settled
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attached import MethodCache
from sphkv.integrations.transformers.cache import (
    CacheOptions,
    RetentionOptions,
    SphericalCache,
)

PROMPT_CALIBRATION = "prompt"
_DENSE_TIER = "max"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method said, and what it held meanwhile.

    Attributes:
        text: The answer.
        num_tokens: Its tokens.
        bytes: Resident bytes.
        times: Seconds.
    """

    text: str
    num_tokens: int
    bytes: AnswerBytes
    times: AnswerTimes


@dataclass(frozen=True)
class SettledRule(StopRule):
    """Ends an answer at the model's end token, or once its score cannot change any more.

    Attributes:
        sample: What is answered.
        tokenizer: Turns tokens into text.
    """

    sample: Sample | None = None
    tokenizer: Any = None

    def ends(self, token: int, before: Sequence[int]) -> bool:
        """Whether a token ends an answer that so far consists of ``before``."""
        if token in self.end_ids:
            return True
        assert self.sample is not None
        text = self.tokenizer.decode(before, skip_special_tokens=True)
        return bool(before) and is_settled(self.sample, text)


class PassSubject(MethodSubject):
    """Another method whose bytes are counted between passes, not after each of their layers.

    Counting waits for the GPU, and a board decodes many thousand tokens.
    """

    _held_bytes: int | None = None
    _plain_cache: MethodCache | None = None

    def feed(self, input_ids: Tensor) -> Pass:
        """Let the model go on with tokens ``[1, tokens]``."""
        if self._plain_cache is None:
            # once there is a prompt: the first pass of an empty one would be taken for it
            self._plain_cache = MethodCache(self._model, self.method)
        cache = self._plain_cache
        began = time.perf_counter()
        hidden = forward_pass(self._model, cache, input_ids, cache.length)
        self._held_bytes = None
        return Pass(hidden, time.perf_counter() - began, 0.0, 0, cache.length)

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        if self._held_bytes is None:
            self._held_bytes = self.method.resident_bytes()
        return self._held_bytes

    def store_prompt(self, states: PromptStates) -> None:
        """Give the method every layer of a prompt."""
        super().store_prompt(states)
        self._held_bytes = None

    def close(self) -> None:
        """Let go of the model."""
        if self._plain_cache is not None:
            self._plain_cache.detach()


@dataclass(frozen=True, slots=True, eq=False)
class ReadSample:
    """A sample whose prompt the dense model has read.

    Attributes:
        sample: The sample.
        ids: Its tokens.
        states: States of the whole prompt, question included.
        prefill_s: Seconds of the pass.
        calibrations: Codebooks that were fitted on it, by the tokens they were fitted on.
    """

    sample: Sample
    ids: SampleIds
    states: PromptStates
    prefill_s: float
    calibrations: dict[int, Calibration]

    def stored(self, mode: Mode) -> PromptStates:
        """What a method is given at once: all, or what stands before the question."""
        states = self.states
        if mode == "visible":
            return states
        count = len(self.ids.context)
        layers = [part.head(count) for part in states.layers]
        return PromptStates(states.input_ids[:, :count], states.following, layers, states.hidden)


class Bench:
    """A model on its device, and every method that can be put into it.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        layout: Shape of its cache, rotary embeddings and windows.
        calibration_id: ``prompt``, or the hash of the codebooks' file.
    """

    def __init__(self, config: SuiteConfig) -> None:
        """Load the model."""
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        model, tokenizer = load_model(config.model, dtype)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        torch.nn.Module.to(self.model, torch.device(config.device))
        self.layout = describe_model(self.model)
        self._config = config
        self._end = stop_rule(self.tokenizer, at_line_end=False)
        self._given: Calibration | None = None
        self.calibration_id = PROMPT_CALIBRATION
        if config.calibration is not None:
            self._given = load_calibration(
                config.calibration, geometry=self.layout.geometry, ropes=self.layout.ropes
            )
            self.calibration_id = _file_id(config.calibration)

    def read(self, sample: Sample, ids: SampleIds) -> ReadSample:
        """Run the dense model over a prompt once."""
        began = time.perf_counter()
        tokens = torch.tensor([ids.prompt], device=self.model.device)
        states = read_prompt(self.model, tokens)
        self._wait()
        return ReadSample(sample, ids, states, time.perf_counter() - began, {})

    def answer(
        self, read: ReadSample, mode: Mode, method: str, budget: str, *, max_new_tokens: int
    ) -> Answer:
        """Store, ask and answer.

        Args:
            read: The prompt.
            mode: Whether the question is stored with it.
            method: ``dense``, one of ours, or a baseline as ``check_method`` reads it.
            budget: Byte budget.
            max_new_tokens: Most tokens.

        Raises:
            ValueError: The budget is too small for the method.
        """
        states, total = read.stored(mode), len(read.ids.prompt) + max_new_tokens
        subject = self._subject(read, states.num_tokens, total, method, budget)
        try:
            return self._answer(read, states, mode, subject, max_new_tokens)
        finally:
            subject.close()

    def _answer(
        self,
        read: ReadSample,
        states: PromptStates,
        mode: Mode,
        subject: ProductSubject | PassSubject,
        max_new_tokens: int,
    ) -> Answer:
        began = time.perf_counter()
        subject.store_prompt(states)
        self._wait()
        stored, stored_at = subject.resident_bytes(), time.perf_counter()
        self._keep_calibration(read, states.num_tokens, subject)
        subject.stop_timing()
        steps: list[StepBytes] = []
        last = states.hidden[-1:]
        if mode == "hidden":
            decoder = Decoder(subject)
            question = torch.tensor([read.ids.question], device=self.model.device)
            last = decoder.feed_text(question)[-1:]
            steps += decoder.trace.steps
        self._wait()
        asked_at = time.perf_counter()
        rule = SettledRule(self._end.end_ids, sample=read.sample, tokenizer=self.tokenizer)
        said = decode_tokens(self.model, subject, last, max_new_tokens, rule, num_timed=0)
        steps += said.trace.steps
        return Answer(
            self.tokenizer.decode(said.token_ids, skip_special_tokens=True),
            len(said.token_ids),
            _bytes(subject, stored, steps),
            {
                "prefill_s": read.prefill_s,
                "store_s": stored_at - began,
                "question_s": asked_at - stored_at,
                "decode_s": time.perf_counter() - asked_at,
            },
        )

    def go_on(
        self, read: ReadSample, method: str, budget: str, count: int
    ) -> tuple[tuple[int, ...], AnswerBytes]:
        """Greedy tokens after a prompt that a method stores, up to the end token.

        Args:
            read: The prompt.
            method: As ``answer``.
            budget: Byte budget.
            count: Most tokens.

        Raises:
            ValueError: The budget is too small for the method.
        """
        states = read.states
        total = states.num_tokens + count
        subject = self._subject(read, states.num_tokens, total, method, budget)
        try:
            subject.store_prompt(states)
            self._keep_calibration(read, states.num_tokens, subject)
            stored = subject.resident_bytes()
            subject.stop_timing()
            last = states.hidden[-1:]
            said = decode_tokens(self.model, subject, last, count, self._end, num_timed=0)
            return said.token_ids, _bytes(subject, stored, said.trace.steps)
        finally:
            subject.close()

    def _subject(
        self, read: ReadSample, num_stored: int, total: int, method: str, budget: str
    ) -> ProductSubject | PassSubject:
        if method == DENSE or method in OUR_METHODS:
            cache = self.make_cache(method, budget, total, read.calibrations.get(num_stored))
            return ProductSubject(self.model, cache, method)
        base, mark, number = method.partition("@")
        parsed, geometry = ByteBudget.parse(budget), self.layout.geometry
        dense = geometry.dense_bytes_per_token * num_stored
        cache_method = make_baseline(
            base,
            geometry,
            self.layout.ropes,
            parsed.resolve(geometry, num_stored) / dense,
            num_tokens=num_stored,
            num_new=total - num_stored,
            settings=find(base).settings().trials()[int(number)] if mark else None,
            backend=get_backend(self._config.baseline_backend, self.model.device),
        )
        return PassSubject(self.model, cache_method, geometry, budget=parsed, name=method)

    def make_cache(
        self, method: str, budget: str, context: int, calibration: Calibration | None = None
    ) -> SphericalCache:
        """A cache as a user makes it.

        Args:
            method: ``dense`` or one of ours.
            budget: Byte budget.
            context: Tokens it will hold at most.
            calibration: Codebooks; the config's, or fitted on the prompt, if None.
        """
        config = self._config
        options = CacheOptions(
            backend=config.backend, cuda_graphs=config.cuda_graphs, finds_calibration=False
        )
        if method == DENSE:
            return SphericalCache.for_model(self.model, tiers=_DENSE_TIER, options=options)
        known = self._given or calibration
        retention: bool | RetentionOptions | None = {UNIFORM: False, JOINT: True}.get(method)
        if method == JOINT and config.page_tokens is not None:
            retention = RetentionOptions(page_tokens=config.page_tokens)
        return SphericalCache.for_model(
            self.model,
            budget,
            retention=retention,
            context=context,
            # caches of one calibration share the tables that are made of it
            calibration=known,
            options=options,
        )

    def _keep_calibration(self, read: ReadSample, num_stored: int, subject: Subject) -> None:
        """Codebooks fitted on these tokens serve every other cache of the same tokens."""
        if isinstance(subject, ProductSubject) and subject.cache.calibration is not None:
            read.calibrations.setdefault(num_stored, subject.cache.calibration)

    def backend_name(self, method: str) -> str:
        """What decodes the pages of a column's method; empty of methods from outside."""
        if method.startswith((PRESS, QUANTIZED)):
            return ""
        is_ours = method == DENSE or method in OUR_METHODS
        asked = self._config.backend if is_ours else self._config.baseline_backend
        return get_backend(asked, self.model.device).name

    def check_device(self) -> None:
        """Raise what a broken device raises."""
        self._wait()

    def free_memory(self) -> None:
        """Give memory of past answers back, as other processes may share the device."""
        if self.model.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _bytes(subject: Subject, stored: int, steps: Sequence[StepBytes]) -> AnswerBytes:
    told = subject.describe()
    count = subject.num_tokens()
    dense, limit = subject.geometry.dense_bytes_per_token * count, subject.limit_bytes(count)
    return {
        "stored": stored,
        "peak": max((step.peak for step in steps), default=stored),
        "limit_share": max((step.peak / step.limit for step in steps), default=stored / limit),
        "dense_share": max((step.peak / step.dense for step in steps), default=stored / dense),
        "setting": told["setting"],
        "residency": told["residency"],
        "realisation": told["realisation"],
        "tiers": told["tiers"],
    }


def counted_bytes(kept: Mapping[str, Any]) -> AnswerBytes:
    """Bytes of a method that runs outside this package, from what it reports of itself."""
    return {
        "stored": int(kept["stored"]),
        "peak": int(kept["peak"]),
        "limit_share": float(kept["peak"]) / max(1, int(kept["limit"])),
        "dense_share": float(kept["peak"]) / int(kept["dense"]),
        "setting": str(kept["setting"]),
        "residency": "counted",
        "realisation": str(kept["realisation"]),
        "tiers": {},
    }


def _file_id(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
