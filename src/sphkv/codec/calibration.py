# SPDX-License-Identifier: Apache-2.0
"""Codebooks of a whole model: fitted from keys and queries, or without any data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sphkv.codec.affine import check_finite
from sphkv.codec.codebook import AngleCodebook, CodebookFit, PlaneCodebooks, fit_plane_codebooks
from sphkv.codec.slots import build_angle_codebook
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

LEAST_TOKENS = 64
"""Fewer samples than this cannot tell sixteen points apart."""

_DEFAULT_SAMPLES = 4096
_DEFAULT_SEED = 20_1


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How a model is calibrated.

    Attributes:
        skip_tokens: Leading tokens left out: attention sinks are stored dense and look unlike
            any other key.
        max_tokens: Samples used per head at most, spread evenly over the text.
        max_distance: Farthest query, in tokens, that the metric averages over.
        fit: Effort of the codebook fit.
    """

    skip_tokens: int = 4
    max_tokens: int = 4096
    max_distance: int = 4096
    fit: CodebookFit = field(default_factory=CodebookFit)

    def __post_init__(self) -> None:
        """Reject options that leave nothing to fit."""
        for name, least in (
            ("skip_tokens", 0),
            ("max_tokens", LEAST_TOKENS),
            ("max_distance", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Calibration:
    """What a codec must know about a model.

    Attributes:
        geometry: Layers, heads and head dimension.
        ropes: Rotary embedding of every layer.
        planes: Codebooks stacked over layers: every tensor is ``[layers, heads, planes, ...]``.
        model_id: The model's name, for the record.
        source: ``"text"``, ``"default"``, ``"prompt"`` while a prompt is calibrated on and for what
            it gave, ``"kept"`` for that read from a file.
        num_tokens: Samples per head behind the fit; 0 for the data-free default.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    planes: PlaneCodebooks
    model_id: str
    source: str
    num_tokens: int

    def __post_init__(self) -> None:
        """Check that layers, heads and planes agree."""
        geometry = self.geometry
        if len(self.ropes) != geometry.num_layers:
            raise ValueError(f"{len(self.ropes)} ropes for {geometry.num_layers} layers")
        for layer, rope in enumerate(self.ropes):
            if rope.head_dim != geometry.head_dim:
                raise ValueError(
                    f"rope of layer {layer} has head_dim {rope.head_dim}, not {geometry.head_dim}"
                )
        lead = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)
        if tuple(self.planes.mean.shape) != (*lead, 2):
            raise ValueError(
                f"codebooks are {tuple(self.planes.mean.shape[:3])}, geometry needs {lead}"
            )

    def codebook(self, layer: int, num_slots: int) -> AngleCodebook:
        """Slots of one layer for a tier with ``num_slots`` nibbles per key."""
        return build_angle_codebook(self.planes.layer(layer), num_slots)


class Calibrator:
    """Collects one layer after another, so that no more than one layer's keys are held."""

    def __init__(
        self,
        geometry: KVGeometry,
        ropes: tuple[RopeSpec, ...],
        *,
        model_id: str,
        source: str = "text",
        options: CalibrationOptions | None = None,
    ) -> None:
        self._geometry = geometry
        self._ropes = ropes
        self._model_id = model_id
        self._source = source
        self._options = options or CalibrationOptions()
        self._layers: dict[int, PlaneCodebooks] = {}
        self._num_tokens = 0

    def add_layer(self, layer: int, keys: Tensor, queries: Tensor, positions: Tensor) -> None:
        """Fit one layer.

        Args:
            layer: Its index.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
            queries: ``[query_heads, tokens, head_dim]`` after RoPE.
            positions: ``[tokens]`` integers.
        """
        geometry, options, rope = self._geometry, self._options, self._ropes[layer]
        tokens = keys.shape[1] - options.skip_tokens
        if tokens < LEAST_TOKENS:
            raise ValueError(
                f"calibration needs at least {LEAST_TOKENS + options.skip_tokens} tokens, "
                f"got {keys.shape[1]}"
            )
        expected = (geometry.num_kv_heads, geometry.num_query_heads)
        if (keys.shape[0], queries.shape[0]) != expected:
            raise ValueError(
                f"keys and queries have {(keys.shape[0], queries.shape[0])} heads, not {expected}"
            )
        check_finite(keys, name="keys")
        check_finite(queries, name="queries")
        stride = -(-tokens // options.max_tokens)
        kept = slice(options.skip_tokens, None, stride)
        moments = query_moments(queries[:, kept], positions[kept], rope, geometry.num_kv_heads)
        metric = key_frame_metric(moments, rope, max_distance=options.max_distance)
        some = keys[:, kept].float()
        z = rope.unrotate(rope.to_planes(some), positions[kept])
        norm = some.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        self._layers[layer] = fit_plane_codebooks(z / norm[..., None, None], metric, options.fit)
        self._num_tokens = some.shape[1]

    def finish(self) -> Calibration:
        """The calibration, once every layer was added."""
        missing = sorted(set(range(self._geometry.num_layers)) - set(self._layers))
        if missing:
            raise ValueError(f"layers {missing} were not calibrated")
        ordered = [self._layers[layer] for layer in range(self._geometry.num_layers)]
        return Calibration(
            geometry=self._geometry,
            ropes=self._ropes,
            planes=stack_planes(ordered),
            model_id=self._model_id,
            source=self._source,
            num_tokens=self._num_tokens,
        )


def stack_planes(layers: list[PlaneCodebooks]) -> PlaneCodebooks:
    """Stack the codebooks of single layers over a new first dimension."""
    names = PlaneCodebooks.__slots__
    return PlaneCodebooks(*(torch.stack([getattr(x, name) for x in layers]) for name in names))


def default_calibration(
    geometry: KVGeometry, ropes: tuple[RopeSpec, ...], *, model_id: str = "unknown"
) -> Calibration:
    """Codebooks for keys about which nothing is known: a uniform direction on the sphere.

    Every plane gets the same share of bits. What that costs is in docs/math/codebooks.md.
    """
    generator = torch.Generator().manual_seed(_DEFAULT_SEED)
    sample = torch.randn(_DEFAULT_SAMPLES, geometry.head_dim, generator=generator)
    sample = sample / sample.norm(dim=-1, keepdim=True)
    # all planes of a uniform direction look alike, so one fit serves them all
    one_plane = sample[:, :2].reshape(1, _DEFAULT_SAMPLES, 1, 2)
    fitted = fit_plane_codebooks(one_plane, torch.eye(2).expand(1, 1, 2, 2), CodebookFit())
    lead = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)

    def spread(name: str) -> Tensor:
        tensor: Tensor = getattr(fitted, name)
        return tensor.unsqueeze(0).expand(*lead, *tensor.shape[2:]).contiguous()

    planes = PlaneCodebooks(*(spread(name) for name in PlaneCodebooks.__slots__))
    return Calibration(geometry, ropes, planes, model_id, "default", 0)


def query_moments(queries: Tensor, positions: Tensor, rope: RopeSpec, num_kv_heads: int) -> Tensor:
    """Second moment of pre-RoPE queries in each plane, averaged over a KV head's group.

    Args:
        queries: ``[query_heads, tokens, head_dim]`` after RoPE.
        positions: ``[tokens]`` integers.
        rope: The layer's rotary embedding.
        num_kv_heads: Groups to average over.

    Returns:
        ``[kv_heads, planes, 2, 2]`` float32.
    """
    z = rope.unrotate(rope.to_planes(queries.float()), positions)
    moments = torch.einsum("htni,htnj->hnij", z, z) / max(1, z.shape[1])
    return moments.reshape(num_kv_heads, -1, *moments.shape[1:]).mean(1)


def key_frame_metric(moments: Tensor, rope: RopeSpec, *, max_distance: int) -> Tensor:
    """Average the query moments over how far queries stand from the key.

    A query ``distance`` tokens later meets the key's plane turned by ``w * distance``. Its
    isotropic part is unchanged; its anisotropic part turns twice as fast and averages out in
    quick planes, but not in slow ones. Distances are uniform up to ``max_distance``.

    Args:
        moments: ``[kv_heads, planes, 2, 2]`` pre-RoPE second moments of queries.
        rope: The layer's rotary embedding.
        max_distance: Tokens between key and query at most.

    Returns:
        ``[kv_heads, planes, 2, 2]``: the expected squared logit error of a key error ``e`` in
        plane ``n`` is ``e' metric[n] e``.
    """
    turn = 2 * rope.frequencies(moments.device) * max_distance
    safe = torch.where(turn.abs() < 1e-6, torch.ones_like(turn), turn)
    cos = torch.where(turn.abs() < 1e-6, torch.ones_like(turn), safe.sin() / safe).float()
    sin = torch.where(turn.abs() < 1e-6, torch.zeros_like(turn), (1 - safe.cos()) / safe).float()
    xx, yy, xy = moments[..., 0, 0], moments[..., 1, 1], moments[..., 0, 1]
    even, odd = xx - yy, 2 * xy
    turned_even, turned_odd = even * cos - odd * sin, even * sin + odd * cos
    trace = xx + yy
    return torch.stack(
        [
            torch.stack([(trace + turned_even) / 2, turned_odd / 2], -1),
            torch.stack([turned_odd / 2, (trace - turned_even) / 2], -1),
        ],
        -2,
    )
