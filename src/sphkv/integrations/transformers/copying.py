# SPDX-License-Identifier: Apache-2.0
"""Which heads of a model copy: they ask for any old token once the text turns to it.

A number in a long document is asked for by nobody until the question comes, so the queries of the
prompt tell nothing about it. What can be known beforehand is which heads would look it up. Tokens
at random, given twice, show them: at the second time a head that copies looks at the same
token of the first, or at the one behind it. Derivation: docs/math/retention.md, section 2.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.integrations.transformers.architecture import ModelLayout, describe_model
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.listening import listening
from sphkv.retention.policy import RetentionPolicy

PROBE_TOKENS = 256
"""Tokens that the probe gives twice."""

_KNOWN: WeakKeyDictionary[PreTrainedModel, Tensor] = WeakKeyDictionary()


def copy_shares(model: PreTrainedModel) -> Tensor:
    """How much every head looks back at what it has seen before; measured once per model.

    Returns:
        ``[layers, kv_heads]`` float32 in 0..1: mean square of the weight that the head's queries
        give to the earlier copy and the token behind it together, over the second copy. 0 for
        layers with a window.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _measure(model, describe_model(model))
    return _KNOWN[model]


def copying_policy(model: PreTrainedModel, chance: float) -> RetentionPolicy:
    """Equal weights that expect heads which copy to ask for what nobody asked for.

    Args:
        model: The model whose heads are meant.
        chance: See ``RetentionOptions.copying``.
    """
    shares = (chance * copy_shares(model)).tolist()
    return RetentionPolicy(
        surprise=tuple(map(tuple, shares)), surprise_even=0.5, surprise_coded=0.0
    )


def _measure(model: PreTrainedModel, layout: ModelLayout) -> Tensor:
    geometry = layout.geometry
    found = torch.zeros(geometry.num_layers, geometry.num_kv_heads)
    once = _probe_ids(model.config.get_text_config().vocab_size)

    def attend(call: AttentionCall) -> AttentionResult:
        if layout.windows[call.layer] is None:
            found[call.layer] = _looked_back(call)
        return call.dense()

    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), listening(model, attend):
            layout.decoder(
                input_ids=torch.cat([once, once])[None].to(layout.device), use_cache=False
            )
    finally:
        for module in training:
            module.training = True
    # a model whose numbers are broken says so itself, not by its heads
    return found.nan_to_num_(0.0)


def _probe_ids(vocab_size: int) -> Tensor:
    """Distinct tokens at random, always the same, from the middle of the vocabulary."""
    order = torch.randperm(vocab_size // 2, generator=torch.Generator().manual_seed(0))
    return vocab_size // 8 + order[:PROBE_TOKENS]


def _looked_back(call: AttentionCall) -> Tensor:
    """``[kv_heads]`` mean squared weight on the earlier copy and the token behind it."""
    keys = call.key[0].float()
    count, dim = keys.shape[1] // 2, keys.shape[2]
    query = call.query[0, :, count:].float().unflatten(0, (len(keys), -1))
    scale = call.options.get("scaling") or dim**-0.5
    logits = scale * query @ keys[:, None].transpose(-1, -2)  # [kv_heads, group, count, 2 * count]
    place = torch.arange(2 * count, device=keys.device)
    if call.options.get("softcap") is not None and call.previous != "sdpa":
        logits = call.options["softcap"] * (logits / call.options["softcap"]).tanh()
    logits.masked_fill_(place > place[count:, None], -torch.inf)
    sinks = call.options.get("s_aux")
    if sinks is not None:
        # learned sinks take their part of every query
        sinks = sinks.float().view(len(keys), -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    weight = logits.softmax(-1)[..., : 2 * count]
    same = weight.diagonal(dim1=-2, dim2=-1)
    behind = weight[..., 1:].diagonal(dim1=-2, dim2=-1)[..., :count]
    share: Tensor = (same + behind).square().mean((1, 2))
    return share.cpu()
