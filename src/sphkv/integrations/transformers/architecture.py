# SPDX-License-Identifier: Apache-2.0
"""What the cache must know about a transformers model, or why it cannot serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.errors import UnsupportedModelError

LAYER_TYPES = ("full_attention", "sliding_attention")
_FREQUENCY_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class ModelLayout:
    """The parts of a model that the cache works with.

    Attributes:
        decoder: The module whose forward runs all layers.
        attentions: Attention module of every layer, in order.
        geometry: Shape of the KV cache.
        ropes: Rotary embedding of every layer.
        windows: Sliding window of every layer in tokens; None for full attention.
        max_tokens: Longest context of the model; None if it states none.
    """

    decoder: nn.Module
    attentions: tuple[nn.Module, ...]
    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    max_tokens: int | None

    @property
    def device(self) -> torch.device:
        """Where the model is, and its cache will be."""
        return next(self.decoder.parameters()).device


def describe_model(model: PreTrainedModel) -> ModelLayout:
    """Read a model's layout off its config and modules.

    Raises:
        UnsupportedModelError: The cache cannot serve it: the message names the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a transformers model, got {type(model).__name__}; a model wrapped by "
            "torch.compile is not supported, pass the model itself"
        )
    config = _text_config(model)
    decoder = model.base_model
    types = _layer_types(config)
    attentions = _attention_modules(model, decoder, config.num_hidden_layers)
    geometry = model_geometry(model)
    _check_heads(model, attentions, geometry)
    if len({parameter.device for parameter in decoder.parameters()}) > 1:
        raise UnsupportedModelError(
            f"{_name(model)} is spread over several devices; the cache lives on one"
        )
    ropes = model_ropes(model)
    _check_frequencies(model, decoder, ropes, types)
    window = getattr(config, "sliding_window", None)
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return ModelLayout(
        decoder=decoder,
        attentions=attentions,
        geometry=geometry,
        ropes=ropes,
        windows=windows,
        max_tokens=getattr(config, "max_position_embeddings", None),
    )


def model_geometry(model: PreTrainedModel) -> KVGeometry:
    """Layers, heads and head dimension of a model's KV cache.

    Raises:
        UnsupportedModelError: Its layers differ, or do not cache keys and values per head.
    """
    config = _text_config(model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        num_query_heads=heads,
        head_dim=head_dim,
    )


def model_ropes(model: PreTrainedModel, seq_len: int | None = None) -> tuple[RopeSpec, ...]:
    """Rotary embedding of every layer.

    Args:
        model: The model.
        seq_len: Sequence length in tokens; only a rope that depends on it may need it.

    Raises:
        UnsupportedModelError: The rope changes with the length and ``seq_len`` is None, or is
            of an unknown kind.
    """
    config = _text_config(model)
    data: Mapping[str, object] = config.to_dict()
    head_dim = model_geometry(model).head_dim
    # SmolLM3 and others: 0 marks a layer without positions
    has_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    ropes = []
    for kind, is_rotated in zip(_layer_types(config), has_rope, strict=True):
        if not is_rotated:
            ropes.append(RopeSpec.unrotated(head_dim))
            continue
        try:
            rope = RopeSpec.from_config(data, head_dim, seq_len, kind)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{_name(model)} has a position encoding the cache cannot code: {error}"
            ) from error
        if rope.kind == "dynamic" and seq_len is None:
            raise UnsupportedModelError(
                f"{_name(model)} has rope type 'dynamic': its frequencies change with the length, "
                "so keys coded earlier would turn at the wrong speed"
            )
        ropes.append(rope)
    return tuple(ropes)


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


def _text_config(model: PreTrainedModel) -> Any:
    """Config of a decoder-only text model; raises for every other kind."""
    config: Any = model.config
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder model; cross attention is not supported"
    elif getattr(config, "text_config", None) is not None:
        reason = "is a multimodal model; pass a text-only model"
    elif getattr(config, "kv_lora_rank", None):
        reason = "caches a latent (MLA), not keys and values per head"
    elif getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        reason = "uses ALiBi: its logits depend on positions outside the key"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "shares one cache between layers"
    elif getattr(config, "use_bidirectional_attention", False):
        reason = "attends to later tokens"
    elif not hasattr(config, "num_attention_heads") or not hasattr(config, "num_hidden_layers"):
        reason = f"has no attention heads in its config ({type(config).__name__})"
    elif not model._can_set_attn_implementation():
        reason = "does not use transformers' attention interface"
    if reason:
        raise UnsupportedModelError(f"{_name(model)} {reason}")
    return config


def _layer_types(config: Any) -> list[str]:
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        window = getattr(config, "sliding_window", None)
        return ["full_attention" if window is None else "sliding_attention"] * count
    other = sorted(set(types[:count]) - set(LAYER_TYPES))
    if other:
        raise UnsupportedModelError(
            f"{type(config).__name__} has layers of type {other}; the cache serves {LAYER_TYPES}"
        )
    return list(types[:count])


def _attention_modules(
    model: PreTrainedModel, decoder: nn.Module, num_layers: int
) -> tuple[nn.Module, ...]:
    """The one attention module of each layer."""
    found: dict[int, list[nn.Module]] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal") and hasattr(module, "config"):
            found.setdefault(index, []).append(module)
    for layer in range(num_layers):
        modules = found.get(layer, [])
        if len(modules) != 1:
            raise UnsupportedModelError(
                f"{_name(model)} has {len(modules)} attention modules in layer {layer}, not one: "
                f"{[type(module).__name__ for module in modules]}"
            )
    return tuple(found[layer][0] for layer in range(num_layers))


def _check_heads(
    model: PreTrainedModel, attentions: tuple[nn.Module, ...], geometry: KVGeometry
) -> None:
    """Refuse layers whose heads differ from the config's."""
    expected = {
        "q_proj": geometry.num_query_heads * geometry.head_dim,
        "k_proj": geometry.num_kv_heads * geometry.head_dim,
        "v_proj": geometry.num_kv_heads * geometry.head_dim,
    }
    for layer, attention in enumerate(attentions):
        head_dim = getattr(attention, "head_dim", geometry.head_dim)
        if head_dim != geometry.head_dim:
            raise UnsupportedModelError(
                f"{_name(model)}: layer {layer} has head_dim {head_dim}, the config says "
                f"{geometry.head_dim}; layers must agree"
            )
        for name, size in expected.items():
            found = getattr(getattr(attention, name, None), "out_features", size)
            if found != size:
                raise UnsupportedModelError(
                    f"{_name(model)}: {name} of layer {layer} has {found} outputs, not {size}; "
                    "layers must have equal heads"
                )


def _check_frequencies(
    model: PreTrainedModel, decoder: nn.Module, ropes: tuple[RopeSpec, ...], types: list[str]
) -> None:
    """Compare our frequencies with those the model really uses."""
    rotary = getattr(decoder, "rotary_emb", None)
    for layer, (rope, kind) in enumerate(zip(ropes, types, strict=True)):
        found = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
        if not isinstance(found, torch.Tensor) or rope.rotary_dim == 0:
            continue
        ours = torch.tensor(rope.inv_freq, dtype=torch.float64)
        theirs = found.detach().to("cpu", torch.float64)
        same_shape = ours.shape == theirs.shape
        if not same_shape or not torch.allclose(ours, theirs, rtol=_FREQUENCY_TOLERANCE, atol=0):
            raise UnsupportedModelError(
                f"{_name(model)}: rotary frequencies of layer {layer} are not those its config "
                f"describes ({rope.kind}); the cache would turn its keys wrongly"
            )
