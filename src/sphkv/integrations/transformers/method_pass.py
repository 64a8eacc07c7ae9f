# SPDX-License-Identifier: Apache-2.0
"""A model that continues from any cache method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.cache.method import CacheMethod
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.forward import read_options
from sphkv.integrations.transformers.listening import listening


@torch.no_grad()
def continue_with(model: PreTrainedModel, method: CacheMethod, input_ids: Tensor) -> Tensor:
    """Final hidden states ``[tokens, width]`` of tokens ``[1, tokens]`` after the stored ones."""
    layout = describe_model(model)

    def attend(call: AttentionCall) -> AttentionResult:
        if call.query.shape[0] != 1:
            raise ValueError(f"a cache method holds one sequence, the batch has {len(call.query)}")
        options = read_options(call, layout.windows[call.layer])
        states = (call.query[0], call.key[0], call.value[0])
        sinks = call.options.get("s_aux")
        output = method.attend(call.layer, *states, options, sink_logits=sinks)
        return output.to(call.query.dtype).transpose(0, 1)[None].contiguous(), None

    begin = method.num_tokens()
    positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
    with listening(model, attend, needs_mask=False):
        output: Any = model.base_model(
            input_ids=input_ids, position_ids=positions[None], use_cache=False
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden
