# SPDX-License-Identifier: Apache-2.0
"""A model with its codebooks, ready to be measured with any method."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.evaluation.records import content_id
from sphkv.evaluation.runner.methods import MethodFactory, ModelShape
from sphkv.evaluation.runner.reading import PromptReader
from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.filler import made_up_text
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
        factory: Makes caches.
        reader: Reads prompts.
        calibration_id: Names the codebooks by what they were fitted on.
        policy_id: Names the controller's weights.
    """

    def __init__(
        self,
        name: str,
        *,
        calibration_text: Path | None = None,
        calibration_tokens: int = 2048,
        keep: Path | None = None,
        backend: str = "auto",
        policy: Path | None = None,
        prefill_device: str = "cpu",
    ) -> None:
        """Load the model and calibrate it.

        Args:
            name: ``smollm2``, a local folder, or a hub name.
            calibration_text: Text to calibrate on; made up if None.
            calibration_tokens: Tokens of it.
            keep: Folder that keeps the calibration for the next time; None keeps none.
            backend: Decode backend of our methods.
            policy: File with the controller's weights; equal weights if None.
            prefill_device: Where prompts are read; everything after is done on the CPU.
        """
        self.name = name
        model, tokenizer = load_model(name, torch.float32)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        layout = describe_model(model)
        self.shape = ModelShape(layout.geometry, layout.ropes, layout.windows, layout.max_tokens)
        calibration, self.calibration_id = self._calibrate(
            calibration_text, calibration_tokens, keep
        )
        weights = RetentionPolicy() if policy is None else load_policy(policy)
        self.policy_id = content_id(asdict(weights))
        self.factory = MethodFactory(self.shape, calibration, backend=backend, policy=weights)
        reading = self.model
        if prefill_device != "cpu":
            reading = copy.deepcopy(self.model)
            torch.nn.Module.to(reading, _checked_device(prefill_device))
        self.reader = PromptReader(reading, self.tokenizer)

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

    def _calibrate(
        self, source: Path | None, num_tokens: int, keep: Path | None
    ) -> tuple[Calibration, str]:
        if source is None:
            text = made_up_text(8 * num_tokens, seed=1)
        else:
            text = source.read_text(encoding="utf-8")
        ids = self.tokenizer(text[: 16 * num_tokens]).input_ids[:num_tokens]
        name = content_id({"model": self.name, "ids": ids})
        file = None if keep is None else keep / f"calibration-{name}.safetensors"
        if file is not None and file.is_file():
            shape = self.shape
            return load_calibration(file, geometry=shape.geometry, ropes=shape.ropes), name
        made = calibrate_model(self.model, torch.tensor([ids]), model_id=self.name)
        if file is not None:
            save_calibration(made, file)
        return made, name
