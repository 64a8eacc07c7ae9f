# SPDX-License-Identifier: Apache-2.0
"""Codebooks for a worker's share of a model: from a file, or fitted at start-up."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sphkv.codec.calibration import Calibration, CalibrationOptions
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.codebook import CodebookFit, PlaneCodebooks
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

START_UP_CALIBRATION = CalibrationOptions(
    fit=CodebookFit(iterations=5, refinements=3, stage_tokens=1024)
)
"""Half the effort of a calibration that is kept: the server waits for it."""

# Prose with some code in it, present wherever Python is.
_TEXT_MODULES = (
    *("argparse", "datetime", "decimal", "optparse", "pickletools", "random", "statistics"),
    *("textwrap", "threading", "unittest.mock", "urllib.request", "zipfile", "doctest"),
)
_CHECKED_POSITIONS = (1, 17)
_TOLERANCE = 0.02


def built_in_text() -> str:
    """The documentation strings of some modules of the standard library.

    Raises:
        ValueError: Python runs without documentation strings.
    """
    parts: list[str] = []
    for name in _TEXT_MODULES:
        module = import_module(name)
        parts.append(inspect.getdoc(module) or "")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if member.__module__ == name:
                parts.append(inspect.getdoc(member) or "")
    text = "\n\n".join(dict.fromkeys(part for part in parts if part))
    if not text:
        raise ValueError("Python runs without docstrings: pass a calibration file")
    return text


def layer_ropes(
    config: Mapping[str, object], layers: Sequence[int], head_dim: int
) -> list[RopeSpec]:
    """Rotary embedding of some layers of a model, by its config as a dict.

    Raises:
        ValueError: It is of a kind that cannot be coded.
    """
    types: Any = config.get("layer_types")
    has_rope: Any = config.get("no_rope_layers")
    ropes = []
    for layer in layers:
        if has_rope and not has_rope[layer]:
            ropes.append(RopeSpec.unrotated(head_dim))
            continue
        kind = types[layer] if types else None
        rope = RopeSpec.from_config(config, head_dim, None, kind)
        if rope.kind == "dynamic":
            raise ValueError("rope type 'dynamic' changes with the length and cannot be coded")
        ropes.append(rope)
    return ropes


def check_ropes(model: torch.nn.Module, ropes: Sequence[RopeSpec]) -> None:
    """Compare our frequencies with the tables that vLLM rotates with.

    Raises:
        ValueError: No table of the model matches: keys would be turned back wrongly.
    """
    tables: list[Tensor] = []
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, Tensor):
            tables.append(table)
    for rope in set(ropes):
        if rope.rotary_dim and not any(_matches(table, rope) for table in tables):
            raise ValueError(
                f"none of the model's {len(tables)} rotary tables turns as its config says "
                f"({rope.kind}, {rope.rotary_dim} channels)"
            )


def _matches(table: Tensor, rope: RopeSpec) -> bool:
    if table.dim() != 2 or table.shape[1] != rope.rotary_dim:
        return False
    for position in _CHECKED_POSITIONS:
        phase = rope.phases(torch.tensor(position))[: rope.rotary_dim // 2]
        expected = torch.cat([phase.cos(), phase.sin()]) * rope.attention_factor
        if not torch.allclose(table[position].float().cpu(), expected, rtol=0, atol=_TOLERANCE):
            return False
    return True


def load_share(
    path: str,
    whole: KVGeometry,
    layers: Sequence[int],
    heads: Sequence[int],
    ropes: Sequence[RopeSpec],
) -> Calibration:
    """Read a calibration of a whole model and keep some of its layers and KV heads.

    Args:
        path: The file.
        whole: Shape of the whole model.
        layers: Layers of this worker.
        heads: KV heads of this worker.
        ropes: Rotary embeddings of these layers.

    Raises:
        ValueError: The file is damaged or made for another model.
        FileNotFoundError: It does not exist.
    """
    full = load_calibration(path, geometry=whole)
    for layer, rope in zip(layers, ropes, strict=True):
        if full.ropes[layer] != rope:
            raise ValueError(f"{path}: the rope of layer {layer} is not the model's")

    def share(name: str) -> Tensor:
        tensor: Tensor = getattr(full.planes, name)
        return tensor[list(layers)][:, list(heads)].contiguous()

    geometry = KVGeometry(
        num_layers=len(layers),
        num_kv_heads=len(heads),
        num_query_heads=len(heads) * whole.group_size,
        head_dim=whole.head_dim,
    )
    planes = PlaneCodebooks(*(share(name) for name in PlaneCodebooks.__slots__))
    return Calibration(geometry, tuple(ropes), planes, full.model_id, full.source, full.num_tokens)
