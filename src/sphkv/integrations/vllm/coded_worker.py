# SPDX-License-Identifier: Apache-2.0
"""What workers do on every device: load codebooks, or do not serve."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from sphkv.codec.calibration import Calibration, Calibrator
from sphkv.core.geometry import KVGeometry
from sphkv.integrations.vllm.calibrate import (
    START_UP_CALIBRATION,
    built_in_text,
    check_ropes,
    layer_ropes,
    load_share,
)
from sphkv.integrations.vllm.options import CONFIG_KEY, ServeOptions
from sphkv.integrations.vllm.plugin import check_version, register

_RANDOM_SEED = 12


def read_options(vllm_config: Any, *, value_bits: int) -> ServeOptions:
    """Options of a server, checked before anything is loaded.

    Args:
        vllm_config: The server's configuration.
        value_bits: Value bits where the options name none.

    Raises:
        ValueError: They are missing or wrong, or this vLLM or what it is asked for is unsupported.
    """
    check_version(vllm_version)
    options = ServeOptions.from_config(vllm_config.additional_config, value_bits=value_bits)
    if options is None:
        raise ValueError(
            f"SphericalWorker needs additional_config={{'{CONFIG_KEY}': {{...}}}}; "
            "an empty object takes the defaults"
        )
    if vllm_config.speculative_config is not None:
        raise ValueError("coded blocks do not support speculative decoding")
    if options.budget_bytes is not None and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "what a block with budget_bytes keeps depends on later queries, so it cannot be "
            "shared: pass --no-enable-prefix-caching"
        )
    # the entry point may be switched off, so this does not rely on it
    register()
    return options


def stop_on_nans() -> None:
    """Let vLLM stop, and name the requests, where logits are not numbers.

    A state that is not a number would be coded as one and shared by its prefix. In a layer that
    sees everything the step that computes it shows: later tokens of the step attend to it, and the
    last one has logits. Where all layers have windows, one further back than these reach does not.
    Someone who set the variable keeps what it says.
    """
    os.environ.setdefault("VLLM_RAISE_ON_LOGIT_NANS", "1")


class CodedWorker:
    """Part of a vLLM worker whose attention layers read coded blocks."""

    _runtime: Any
    _impl_class: type
    vllm_config: Any
    model_config: Any
    parallel_config: Any
    model_runner: Any

    def _name_layers(self) -> dict[str, Any]:
        """Take note of the model's attention layers, all of which must be ours.

        Raises:
            RuntimeError: One is not, or there is none.
        """
        # experts and other layers without a cache are in the same list
        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        for name, layer in layers.items():
            if not isinstance(getattr(layer, "impl", None), self._impl_class):
                raise RuntimeError(f"layer {name} is served by {type(layer).__name__}, not by us")
        if not layers:
            raise RuntimeError("the model has no attention layers to serve")
        self._runtime.layer_ids.update({name: index for index, name in enumerate(layers)})
        return layers

    def _calibration(self) -> Calibration:
        model, runtime = self.model_config, self._runtime
        layers = [extract_layer_index(name) for name in runtime.layer_ids]
        head_dim = runtime.head_dim
        ropes = layer_ropes(model.hf_text_config.to_dict(), layers, head_dim)
        check_ropes(self.model_runner.get_model(), ropes)
        share = KVGeometry(
            num_layers=len(layers),
            num_kv_heads=runtime.num_kv_heads,
            num_query_heads=model.get_num_attention_heads(self.parallel_config),
            head_dim=head_dim,
        )
        path = runtime.options.calibration
        if path is None:
            runtime.calibrator = Calibrator(
                share, tuple(ropes), model_id=model.model, options=START_UP_CALIBRATION
            )
            self._observe_text(runtime.options.calibration_tokens)
            calibration: Calibration = runtime.calibrator.finish()
            runtime.calibrator = None
            return calibration
        whole = KVGeometry(
            num_layers=model.hf_text_config.num_hidden_layers,
            num_kv_heads=model.get_total_num_kv_heads(),
            num_query_heads=share.num_query_heads * self.parallel_config.tensor_parallel_size,
            head_dim=head_dim,
        )
        return load_share(path, whole, layers, self._heads(whole.num_kv_heads), ropes)

    def _heads(self, total: int) -> list[int]:
        """KV heads of this worker; with more workers than heads, neighbours share one."""
        count, size = self._runtime.num_kv_heads, self.parallel_config.tensor_parallel_size
        first = get_tensor_model_parallel_rank() * total // size
        return list(range(first, first + count))

    def _observe_text(self, wanted: int) -> None:
        """Run the model once over so many tokens of the built-in text."""
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("with pipeline parallelism, pass a calibration file")
        ids = self._text_ids(wanted)
        if len(ids) < wanted or wanted > self.model_config.max_model_len:
            raise ValueError(
                f"start-up reads {wanted} tokens, but the built-in text has {len(ids)} "
                f"and the server takes {self.model_config.max_model_len}"
            )
        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        tokens = torch.tensor(ids, device=device)
        context = set_forward_context(None, self.vllm_config, num_tokens=wanted, skip_compiled=True)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), context:
            model(input_ids=tokens, positions=torch.arange(wanted, device=device))

    def _text_ids(self, wanted: int) -> list[int]:
        """The first tokens of the built-in text; tokens at random for a model without tokenizer."""
        if self.model_config.skip_tokenizer_init:
            generator = torch.Generator().manual_seed(_RANDOM_SEED)
            size = self.model_config.get_vocab_size()
            return torch.randint(size, (wanted,), generator=generator).tolist()
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(self.model_config)
        return list(tokenizer.encode(built_in_text())[:wanted])
