# SPDX-License-Identifier: Apache-2.0
"""A model with its codebooks, ready to be measured with any method."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.evaluation.records import content_id
from sphkv.evaluation.runner.methods import MethodFactory, ModelShape
from sphkv.evaluation.runner.reading import PromptReader
from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.texts import made_up_text
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.retention.policy import RetentionPolicy, load_policy


def _checked_device(name: str) -> torch.device:
    """A device that is there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {error}") from error
    return torch.device(name)


class Session:
    """Everything that is loaded once.

    Attributes:
        name: The model as it was asked for.
        model: The model, in float32 on the CPU.
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
        prefill_device: str = "cpu",
    ) -> None:
        """Load the model; codebooks are fitted when they are first needed.

        Args:
            name: ``smollm2``, a local folder, or a hub name.
            calibration_text: Text to calibrate on; made up if None.
            calibration_tokens: Tokens of it.
            calibration_file: Codebooks to load instead.
            keep: Folder that keeps the calibration for the next time; None keeps none.
            backend: Decode backend of our methods.
            policy: File with the controller's weights; equal weights if None.
            prefill_device: Where prompts are read; everything after is done on the CPU.

        Raises:
            ValueError: Both a calibration text and a file are given.
        """
        if calibration_text is not None and calibration_file is not None:
            raise ValueError("give a calibration text or a file, not both")
        self.name = name
        model, tokenizer = load_model(name, torch.float32)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        layout = describe_model(model)
        self.shape = ModelShape(layout.geometry, layout.ropes, layout.windows, layout.max_tokens)
        self.policy = RetentionPolicy() if policy is None else load_policy(policy)
        self.policy_id = content_id(asdict(self.policy))
        self._backend = backend
        self._source = (calibration_text, calibration_tokens, calibration_file, keep)
        self._own_ids: Tensor | None = None
        reading = self.model
        if prefill_device != "cpu":
            reading = copy.deepcopy(self.model)
            torch.nn.Module.to(reading, _checked_device(prefill_device))
        self.reader = PromptReader(reading, self.tokenizer)

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
        made = calibrate_model(self.model, torch.tensor([ids]), model_id=self.name, source=source)
        if file is not None:
            save_calibration(made, file)
        return made, name


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
