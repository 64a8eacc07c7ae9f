# SPDX-License-Identifier: Apache-2.0
"""A cache while it is dense: states, the newest queries, and codebooks in the making."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig
from sphkv.codec.calibration import LEAST_TOKENS, Calibration, key_frame_metric, query_moments
from sphkv.codec.codebook import CELL_BITS, PlaneCodebooks, fit_plane_codebooks
from sphkv.core.devices import ReadyTensors, join_beside, upload


class DenseStates:
    """Keys and values of a batch, padding included, and the queries that a controller decides by.

    Only the newest queries are kept, and none without a controller.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Start without states."""
        self._config = config
        layers = config.geometry.num_layers
        self._states: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._queries: list[Tensor | None] = [None] * layers
        # of layers that this pass has been through, as they were before it
        self._queries_before: dict[int, Tensor | None] = {}

    def begin(self) -> None:
        """A pass begins: what came before is there to stay."""
        self._queries_before.clear()

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new states ``[batch, kv_heads, tokens, head_dim]``; all of the layer's."""
        held = self._states[layer]
        if held is not None:
            keys, values = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        self._states[layer] = (keys, values)
        return keys, values

    def has(self, layer: int) -> bool:
        """Whether a layer has states here."""
        return self._states[layer] is not None

    def watch(self, layer: int, query: Tensor, *, is_kept: bool) -> Tensor:
        """Add the queries of a step to the newest ones.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE.
            is_kept: Whether to remember them for the next step.

        Returns:
            ``[batch, query_heads, at most the watched tokens, head_dim]``; all of the step's
            without a controller.
        """
        retention = self._config.retention
        if retention is None:
            return query
        most = retention.policy.watched_tokens
        held = self._queries[layer]
        if held is not None:
            query = torch.cat([held, query], 2)
        if query.shape[2] > most:
            query = query[:, :, -most:]
        if is_kept:
            self._queries_before[layer] = held
            self._queries[layer] = query.clone()
        return query

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that is coded now; they and its queries are forgotten."""
        held = self._states[layer]
        assert held is not None
        self._states[layer] = self._queries[layer] = None
        return held

    def undo(self, length: int) -> None:
        """Forget a pass that failed: states from ``length`` on, and its queries."""
        for layer, query in self._queries_before.items():
            self._queries[layer] = query
        self._queries_before.clear()
        self._trim(length)

    def _trim(self, length: int) -> None:
        for layer, held in enumerate(self._states):
            if held is not None:
                self._states[layer] = (held[0][:, :, :length], held[1][:, :, :length])

    def crop(self, length: int, *, num_removed: int) -> None:
        """Forget states and queries of places from ``length`` on.

        Args:
            length: Places that stay.
            num_removed: Places that go, newest first: queries are not those of all places.
        """
        self._queries = [
            None if query is None else query[:, :, : max(0, query.shape[2] - num_removed)]
            for query in self._queries
        ]
        self._queries_before.clear()
        self._trim(length)

    def select(self, index: Tensor) -> None:
        """Make row ``i`` a copy of row ``index[i]``; ``index [new batch]`` int64."""
        for layer, held in enumerate(self._states):
            if held is not None:
                at = index.to(held[0].device)
                self._states[layer] = (held[0][at], held[1][at])
        self._queries = [
            None if query is None else query[index.to(query.device)] for query in self._queries
        ]

    def fork(self) -> DenseStates:
        """The same, to grow apart; tensors are shared."""
        other = DenseStates(self._config)
        other._states, other._queries = list(self._states), list(self._queries)
        return other

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes at their own width, as a ``ByteLedger`` calls them; queries are tags."""
        kinds = dict.fromkeys(("codes", "values", "tags"), 0)
        for held, query in zip(self._states, self._queries, strict=True):
            if held is not None:
                kinds["codes"] += held[0].nbytes
                kinds["values"] += held[1].nbytes
            kinds["tags"] += 0 if query is None else query.nbytes
        return kinds

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, for saving."""
        state = {}
        for layer, held in enumerate(self._states):
            if held is not None:
                state[f"keys.{layer}"], state[f"values.{layer}"] = held
            if (query := self._queries[layer]) is not None:
                state[f"queries.{layer}"] = query
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        for layer in range(len(self._states)):
            self._states[layer] = (state[f"keys.{layer}"], state[f"values.{layer}"])
            self._queries[layer] = state.get(f"queries.{layer}")


class PromptCalibrator:
    """Gathers query moments while a cache is dense, then fits layer after layer.

    ``calibration`` exists from the start, so that a codec can hold it; a layer of it means
    something only once ``fit`` was called for that layer. A GPU does all of that beside other
    work: what reads codebooks there is queued beside as well, or behind ``join_beside``.

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
        # of layers that this pass has been through, as they were before it
        self._before: dict[int, tuple[Tensor, int]] = {}
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
        self._join()
        other = PromptCalibrator(self._config, model_id=self._model_id)
        other.moments, other.num_queries = self.moments.clone(), self.num_queries.clone()
        return other

    def state(self) -> dict[str, Tensor]:
        """What was seen, by name, for saving."""
        self._join()
        return {"moments": self.moments, "num_queries": self.num_queries}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        self.moments.copy_(state["moments"])
        self.num_queries.copy_(state["num_queries"])

    def begin(self) -> None:
        """A pass begins: what was seen before counts."""
        self._before.clear()

    def undo(self) -> None:
        """Forget what a pass that failed has shown."""
        self._join()
        for layer, (moments, seen) in self._before.items():
            self.moments[layer], self.num_queries[layer] = moments, seen
        self._before.clear()

    def _join(self) -> None:
        join_beside(torch.device(self._config.device))

    def observe(self, layer: int, query: Tensor, is_real: Tensor, positions: Tensor) -> None:
        """Add the queries of a pass.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE.
            is_real: ``[batch, tokens]`` bool on the CPU: which of them are no padding.
            positions: ``[batch, tokens]`` int64 on the CPU.
        """
        seen, new, sample = int(self.num_queries[layer]), *self._sample(query, is_real, positions)
        if sample is None:
            return
        rope, heads = self._config.ropes[layer], self._config.geometry.num_kv_heads
        with sample.beside(self.moments) as (some, at):
            moments = query_moments(some, at, rope, heads)
            self._before[layer] = self.moments[layer].clone(), seen
            self.moments[layer].lerp_(moments.to(self.moments.device), new / (seen + new))
        self.num_queries[layer] += new

    def fit(self, layer: int, keys: Tensor, is_chosen: Tensor, positions: Tensor) -> None:
        """Fit one layer.

        Args:
            layer: The layer.
            keys: ``[batch, kv_heads, tokens, head_dim]`` after RoPE.
            is_chosen: ``[batch, tokens]`` bool on the CPU: which of them count.
            positions: ``[batch, tokens]`` int64 on the CPU.
        """
        options, rope = self._config.calibration, self._config.ropes[layer]
        found = int(is_chosen.sum())
        if found < LEAST_TOKENS:
            raise ValueError(f"calibration needs {LEAST_TOKENS} tokens, got {found}")
        _, sample = self._sample(keys, is_chosen, positions)
        assert sample is not None
        planes = self.calibration.planes
        parts = [getattr(planes, name) for name in PlaneCodebooks.__slots__]
        with sample.beside(self.moments, *parts) as (own, at):
            some = own.float()
            metric = key_frame_metric(self.moments[layer], rope, max_distance=options.max_distance)
            z = rope.unrotate(rope.to_planes(some), at)
            norm = some.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            fitted = fit_plane_codebooks(z / norm[..., None, None], metric, options.fit)
            for name, part in zip(PlaneCodebooks.__slots__, parts, strict=True):
                part[layer] = getattr(fitted, name)

    def _sample(
        self, states: Tensor, is_chosen: Tensor, positions: Tensor
    ) -> tuple[int, ReadyTensors | None]:
        """Evenly spaced states and their positions, as many as are used: their number and they.

        They are chosen on the CPU: a mask on a device would be waited for.
        """
        places = is_chosen.nonzero()
        stride = -(-len(places) // self._config.calibration.max_tokens)
        if stride == 0:
            return 0, None
        row, token = places[::stride].unbind(1)
        index = torch.stack([row, token, positions[row, token]]).numpy().astype(np.int64)
        row, token, at = upload(index.ravel(), states.device).view(3, -1)
        some = states.transpose(0, 1)[:, row, token]
        return len(at), ReadyTensors(some, at)
