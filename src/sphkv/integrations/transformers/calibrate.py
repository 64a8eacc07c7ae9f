# SPDX-License-Identifier: Apache-2.0
"""Calibrate a model by one forward pass over some text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.codec.calibration import Calibration, CalibrationOptions, Calibrator
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attachment import (
    AttentionCall,
    AttentionResult,
    EagerPass,
    attach,
)
from sphkv.integrations.transformers.listening import layer_progress


class _Capture(EagerPass):
    """Fits each layer as its keys and queries pass by; holds one layer at a time."""

    needs_mask = True

    def __init__(self, calibrator: Calibrator, positions: Tensor) -> None:
        self._calibrator = calibrator
        self._positions = positions

    def attend(self, call: AttentionCall) -> AttentionResult:
        result = call.dense()
        self._calibrator.add_layer(call.layer, call.key[0], call.query[0], self._positions)
        return result

    def finish(self, *, is_failed: bool) -> None:
        pass


def calibrate_model(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    model_id: str,
    options: CalibrationOptions | None = None,
    source: str = "text",
) -> Calibration:
    """Fit the codebooks of every layer from one pass over a text.

    The model is left as it was, whatever happens.

    Args:
        model: A supported causal language model.
        input_ids: ``[1, tokens]`` int64, about one to four thousand tokens of any text.
        model_id: The model's name, for the record.
        options: How the fit is done.
        source: Where the text came from, for the record.

    Raises:
        UnsupportedModelError: The model cannot be served.
        ValueError: ``input_ids`` has another shape or too few tokens.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids must be [1, tokens], got {tuple(input_ids.shape)}")
    layout = describe_model(model)
    calibrator = Calibrator(
        layout.geometry,
        layout.ropes,
        model_id=model_id,
        source=source,
        options=options,
    )
    device = next(layout.decoder.parameters()).device
    positions = torch.arange(input_ids.shape[1], device=device)

    def listen(_: tuple[Any, ...], __: dict[str, Any]) -> _Capture:
        return _Capture(calibrator, positions)

    was_training = model.training
    attachment = attach(model, layout)
    attachment.listen = listen
    try:
        model.eval()
        with torch.no_grad(), layer_progress(model, "calibration", input_ids.shape[1]):
            # the decoder alone: logits of a whole text would need gigabytes
            layout.decoder(input_ids=input_ids.to(device), use_cache=False)
    finally:
        attachment.listen = None
        model.train(was_training)
        attachment.release(model)
    return calibrator.finish()
