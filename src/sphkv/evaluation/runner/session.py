# SPDX-License-Identifier: Apache-2.0
"""A model with its codebooks, ready to be measured with any method on prompts it has read.

Prompts are read once by the dense model, for every method to store.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.core.configs import check_name
from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.states import DenseReference, LayerStates, PromptStates, read_prompt
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.records import content_id
from sphkv.evaluation.runner.decoding import Episode, decode_tokens, run_episode, stop_rule
from sphkv.evaluation.runner.methods import MethodFactory, ModelShape, SharedWork
from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.texts import made_up_text
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model, model_geometry
from sphkv.integrations.transformers.cache import COPY_CHANCE
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.copying import copying_policy
from sphkv.retention.policy import load_policy

_GPU_TOKENS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ReadCase:
    """A case whose prompt was read.

    Attributes:
        case: The case.
        states: States of the prompt.
        reference: What the exact model says: hidden states after the following tokens, or after
            each token of its own answer.
        answer_ids: The exact model's answer; empty for language modelling.
        prefill_s: Seconds of the dense pass, a shared document counted whole.
        work: What the caches that store it share.
        episode: The exact model's episode; of a task only.
    """

    case: Case
    states: PromptStates
    reference: Tensor
    answer_ids: tuple[int, ...]
    prefill_s: float
    work: SharedWork
    episode: Episode | None = None


class PromptReader:
    """Reads cases; a document that several share is read once.

    The model may be on a GPU while methods store what was read on another device.
    """

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device | str | None = None
    ) -> None:
        """Read with a model.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            device: Where methods run; the CPU if None.
        """
        self._model = model
        self._device = torch.device(device or "cpu")
        # several readers share a GPU, and states in float32 are as large as a model
        self._waiting = torch.device("cpu") if model.dtype == torch.float32 else self._device
        self._geometry = model_geometry(model)
        self._tokenizer = tokenizer
        self._group = ""
        self._shared: PromptStates | None = None
        self._shared_s = 0.0
        self._attention = SharedAttention(0)

    def read(self, case: Case) -> ReadCase:
        """Run the dense model over a case."""
        with gpu_range("prefill"):
            read = self._read(case)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return read

    def _read(self, case: Case) -> ReadCase:
        began = time.perf_counter()
        extra = 0.0
        if case.following_ids:
            ids = self._ids([*case.prompt_ids, *case.following_ids])
            states = self._dense_pass(ids, num_following=len(case.following_ids))
            seconds = time.perf_counter() - began
            work = SharedWork(SharedAttention(case.context, device=ids.device))
            states = self._moved(states)
            return ReadCase(case, states, states.hidden[1:], (), seconds, work)
        if 0 < case.num_shared < case.context:
            states, extra = self._read_shared(case)
        else:
            states = self._dense_pass(self._ids(case.prompt_ids))
            self._attention = SharedAttention(case.context, device=self._model.device)
        seconds = time.perf_counter() - began + extra
        work = SharedWork(self._attention)
        if case.task is not None:
            exact = exact_subject(self._model, states, case.max_new_tokens)
            last = states.hidden[-1:]
            episode = run_episode(self._model, self._tokenizer, case.task, exact, last)
            states = self._moved(states)
            return ReadCase(case, states, states.hidden[-1:], (), seconds, work, episode)
        hidden, answer = self._exact_answer(states, case)
        hidden = hidden.to(self._device)
        return ReadCase(case, self._moved(states), hidden, answer, seconds, work)

    def _moved(self, states: PromptStates) -> PromptStates:
        """Layers to where they wait for methods, the rest to where methods run."""
        layers = [LayerStates(*part.on(self._waiting)) for part in states.layers]
        ids, following = states.input_ids.to(self._device), states.following.to(self._device)
        return PromptStates(ids, following, layers, states.hidden.to(self._device))

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=self._model.device)

    def _dense_pass(self, ids: Tensor, *, num_following: int = 0) -> PromptStates:
        """As ``read_prompt``, in parts where a GPU would hold the logits of a whole prompt.

        Its attention in 16 bits holds none.
        """
        prompt = ids.shape[1] - num_following
        is_whole = ids.device.type == "cpu" or self._model.dtype != torch.float32
        if is_whole or prompt <= _GPU_TOKENS:
            return read_prompt(self._model, ids, num_following=num_following)
        first = read_prompt(self._model, ids[:, :_GPU_TOKENS])
        exact = DenseReference(first, capacity=ids.shape[1] - _GPU_TOKENS, queries_on=self._waiting)
        rest = ids[:, _GPU_TOKENS:prompt]
        for part in rest.split(_GPU_TOKENS, 1):
            hidden = self._go_on(exact, part)
        states = exact.extended(first, rest, hidden)
        if num_following == 0:
            return states
        after = self._go_on(exact, ids[:, prompt:])
        whole = torch.cat([states.hidden, after])
        return PromptStates(ids[:, :prompt], ids[:, prompt:], states.layers, whole)

    def _go_on(self, exact: DenseReference, input_ids: Tensor) -> Tensor:
        return MethodSubject(self._model, exact, self._geometry).feed(input_ids).hidden

    def _read_shared(self, case: Case) -> tuple[PromptStates, float]:
        """The whole prompt's states, and the seconds the document took if it was read before."""
        ids = self._ids(case.prompt_ids)
        known = self._shared is not None and self._group == case.group
        if not known:
            self._shared = None
            began = time.perf_counter()
            self._shared = self._dense_pass(ids[:, : case.num_shared])
            self._group, self._shared_s = case.group, time.perf_counter() - began
            self._attention = SharedAttention(case.num_shared, device=ids.device)
        assert self._shared is not None
        rest = ids[:, case.num_shared :]
        exact = DenseReference(self._shared, capacity=rest.shape[1], queries_on=self._waiting)
        hidden = self._go_on(exact, rest)
        return exact.extended(self._shared, rest, hidden), self._shared_s if known else 0.0

    def _exact_answer(self, states: PromptStates, case: Case) -> tuple[Tensor, tuple[int, ...]]:
        exact = exact_subject(self._model, states, case.max_new_tokens)
        steps = decode_tokens(
            self._model,
            exact,
            states.hidden[-1:],
            case.max_new_tokens,
            stop_rule(self._tokenizer, at_line_end=case.stops_at_newline),
        )
        return steps.hidden, steps.token_ids


def exact_subject(model: Any, states: PromptStates, capacity: int) -> MethodSubject:
    """The exact model after a prompt, with room for so many tokens."""
    return MethodSubject(model, DenseReference(states, capacity=capacity), states.geometry)


def _checked_device(name: str) -> torch.device:
    """A device that is there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {error}") from error
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is measured.

    Attributes:
        device: Where methods run.
        dtype: Type of the weights, ``float32`` or ``bfloat16``.
        prefill_device: Where prompts are read, if methods run on the CPU.
    """

    device: str = "cpu"
    dtype: str = "float32"
    prefill_device: str = "cpu"

    def __post_init__(self) -> None:
        """Reject a type that no model is measured in."""
        check_name("dtype", self.dtype, ("float32", "bfloat16"))


class Session:
    """Everything that is loaded once.

    Attributes:
        name: The model as it was asked for.
        model: The model, on the device that methods run on.
        tokenizer: Its tokenizer.
        shape: What methods must know of it.
        reader: Reads prompts.
        policy: The controller's weights.
        policy_id: Names them.
    """

    def __init__(
        self,
        name: str,
        *,
        calibration_text: Path | None = None,
        calibration_tokens: int = 2048,
        calibration_file: Path | None = None,
        keep: Path | None = None,
        backend: str = "auto",
        policy: Path | None = None,
        place: Placement | None = None,
    ) -> None:
        """Load the model; codebooks are fitted when they are first needed.

        Args:
            name: ``smollm2``, a local folder, or a hub name.
            calibration_text: Text to calibrate on; made up if None.
            calibration_tokens: Tokens of it.
            calibration_file: Codebooks to load instead.
            keep: Folder that keeps the calibration for the next time; None keeps none.
            backend: Decode backend of our methods.
            policy: File with the controller's weights; what the public cache takes if None.
            place: Where everything runs; in float32 on the CPU if None.

        Raises:
            ValueError: Both a calibration text and a file are given.
        """
        if calibration_text is not None and calibration_file is not None:
            raise ValueError("give a calibration text or a file, not both")
        self.name = name
        place = place or Placement()
        model, tokenizer = load_model(name, getattr(torch, place.dtype))
        self.model: Any = model
        torch.nn.Module.to(self.model, _checked_device(place.device))
        self.tokenizer: Any = tokenizer
        layout = describe_model(model)
        self.shape = ModelShape(layout.geometry, layout.ropes, layout.windows, layout.max_tokens)
        self.policy = copying_policy(model, COPY_CHANCE) if policy is None else load_policy(policy)
        self.policy_id = content_id(asdict(self.policy))
        self._backend = backend
        self._source = (calibration_text, calibration_tokens, calibration_file, keep)
        self._own_ids: Tensor | None = None
        reading = self.model
        if place.prefill_device != place.device == "cpu":
            reading = copy.deepcopy(self.model)
            torch.nn.Module.to(reading, _checked_device(place.prefill_device))
        self.reader = PromptReader(reading, self.tokenizer, place.device)

    def calibrate_on(self, input_ids: Tensor) -> None:
        """Fit the codebooks on tokens ``[1, tokens]`` of what is measured itself."""
        self._own_ids = input_ids

    @property
    def calibration(self) -> Calibration:
        """The codebooks."""
        return self._fitted[0]

    @property
    def calibration_id(self) -> str:
        """Names the codebooks by what they were fitted on."""
        return self._fitted[1]

    @cached_property
    def factory(self) -> MethodFactory:
        """Makes caches."""
        return MethodFactory(
            self.model, self.shape, self.calibration, backend=self._backend, policy=self.policy
        )

    def answer(self, prompt_ids: tuple[int, ...], max_new_tokens: int) -> str:
        """The exact model's greedy answer to a short prompt."""
        case = Case(
            case_id="question",
            workload="qa",
            group="question",
            prompt_ids=prompt_ids,
            answers=("",),
            max_new_tokens=max_new_tokens,
        )
        ids = self.reader.read(case).answer_ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @cached_property
    def calibration_ids(self) -> list[int]:
        """Tokens that codebooks are fitted on.

        Raises:
            ValueError: They were loaded from a file, which has no tokens.
        """
        text, num_tokens, given, _ = self._source
        if given is not None:
            raise ValueError(f"the codebooks of {given.name} come without the text they fit")
        if self._own_ids is not None:
            return [int(token) for token in self._own_ids[0]]
        words = made_up_text(8 * num_tokens, seed=1) if text is None else _read(text)
        ids: list[int] = self.tokenizer(words[: 16 * num_tokens]).input_ids[:num_tokens]
        return ids

    @cached_property
    def _fitted(self) -> tuple[Calibration, str]:
        *_, given, keep = self._source
        shape = self.shape
        if given is not None:
            found = load_calibration(given, geometry=shape.geometry, ropes=shape.ropes)
            return found, hashlib.sha256(given.read_bytes()).hexdigest()[:16]
        ids, source = self.calibration_ids, "text" if self._own_ids is None else "prompt"
        name = content_id({"model": self.name, "ids": ids})
        file = None if keep is None else keep / f"calibration-{name}.safetensors"
        if file is not None and file.is_file():
            return load_calibration(file, geometry=shape.geometry, ropes=shape.ropes), name
        given_ids = torch.tensor([ids], device=self.model.device)
        made = calibrate_model(self.model, given_ids, model_id=self.name, source=source)
        if file is not None:
            save_calibration(made, file)
        return made, name


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
