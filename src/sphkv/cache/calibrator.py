# SPDX-License-Identifier: Apache-2.0
"""Calibrating on the prompt itself, one layer at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig
from sphkv.codec.calibration import LEAST_TOKENS, Calibration, key_frame_metric, query_moments
from sphkv.codec.codebook import CELL_BITS, PlaneCodebooks, fit_plane_codebooks


class PromptCalibrator:
    """Gathers query moments while a cache is dense, then fits layer after layer.

    ``calibration`` exists from the start, so that a codec can hold it; a layer of it means
    something only once ``fit`` was called for that layer.

    Attributes:
        calibration: Codebooks of all layers.
        moments: ``[layers, kv_heads, planes, 2, 2]`` float32 running mean of query moments.
        num_queries: ``[layers]`` int64 tokens behind each mean.
    """

    def __init__(self, config: CacheConfig, *, model_id: str) -> None:
        geometry = config.geometry
        lead = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)
        shapes = {
            "metric_root": (2, 2),
            "mean": (2,),
            "pair": (4, 2),
            "single": (16, 2),
            "joint": (16, 2),
            "halves": (2, 4, 2),
            "stages": (3, 16, 2),
            "distortion": (len(CELL_BITS),),
        }
        device = config.device
        planes = {name: torch.zeros(*lead, *s, device=device) for name, s in shapes.items()}
        self._config = config
        self._model_id = model_id
        self.moments = torch.zeros(*lead, 2, 2, device=device)
        self.num_queries = torch.zeros(geometry.num_layers, dtype=torch.int64)
        self.calibration = Calibration(
            geometry=geometry,
            ropes=config.ropes,
            planes=PlaneCodebooks(**planes),
            model_id=model_id,
            source="prompt",
            num_tokens=config.calibration.max_tokens,
        )

    def fork(self) -> PromptCalibrator:
        """One of its own that has seen the same queries."""
        other = PromptCalibrator(self._config, model_id=self._model_id)
        other.moments, other.num_queries = self.moments.clone(), self.num_queries.clone()
        return other

    def observe(self, layer: int, queries: Tensor, positions: Tensor) -> None:
        """Add queries ``[query_heads, tokens, head_dim]`` at ``[tokens]`` positions."""
        stride = -(-queries.shape[1] // self._config.calibration.max_tokens)
        if stride == 0:
            return
        some, at = queries[:, ::stride], positions[::stride]
        rope, heads = self._config.ropes[layer], self._config.geometry.num_kv_heads
        moments = query_moments(some, at, rope, heads)
        seen, new = int(self.num_queries[layer]), some.shape[1]
        self.moments[layer].lerp_(moments.to(self.moments.device), new / (seen + new))
        self.num_queries[layer] += new

    def fit(self, layer: int, keys: Tensor, positions: Tensor) -> None:
        """Fit one layer from keys ``[kv_heads, tokens, head_dim]`` at ``[tokens]`` positions."""
        options, rope = self._config.calibration, self._config.ropes[layer]
        if keys.shape[1] < LEAST_TOKENS:
            raise ValueError(f"calibration needs {LEAST_TOKENS} tokens, got {keys.shape[1]}")
        stride = -(-keys.shape[1] // options.max_tokens)
        some, at = keys[:, ::stride].float(), positions[::stride]
        metric = key_frame_metric(self.moments[layer], rope, max_distance=options.max_distance)
        z = rope.unrotate(rope.to_planes(some), at)
        norm = some.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        fitted = fit_plane_codebooks(z / norm[..., None, None], metric, options.fit)
        for name in PlaneCodebooks.__slots__:
            getattr(self.calibration.planes, name)[layer] = getattr(fitted, name)
