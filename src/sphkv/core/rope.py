# SPDX-License-Identifier: Apache-2.0
"""Planes, frequencies and phases of a model's rotary position embedding.

A head is seen as planes: the channel pairs that the embedding rotates, then the channels it
leaves alone, paired up with frequency zero. Derivation: docs/math/coordinates.md, section 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sphkv.core.devices import constant

LAYOUTS = ("half", "interleaved")
_DEFAULT_THETA = 10_000.0

# The last two change other parts of a model than the rotation, so they may be passed over.
_KNOWN_PARAMETERS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
        "max_position_embeddings",
        "llama_4_scaling_beta",
    }
)

_INTERLEAVED_MODELS = frozenset(
    {"cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
)


def principal_angle(angle: Tensor) -> Tensor:
    """Move minus pi to pi, so that an angle in [-pi, pi] lies in (-pi, pi]."""
    return torch.where(angle <= -math.pi, -angle, angle)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding of one attention layer.

    Positions always broadcast against the leading dimensions of what they rotate: ``[tokens]``
    fits ``[heads, tokens, ...]``, and ``[batch, 1, tokens]`` fits ``[batch, heads, tokens, ...]``.

    Attributes:
        head_dim: Channels of a head; even.
        rotary_dim: Leading channels that are rotated; even, 0 for none.
        inv_freq: Radians per position of each rotated plane, ``rotary_dim / 2`` values.
        attention_factor: What a model multiplies rotated channels by, beside the rotation.
        layout: ``"half"`` pairs channel ``i`` with ``i + rotary_dim / 2``; ``"interleaved"``
            pairs ``2 * i`` with ``2 * i + 1``.
        kind: How the frequencies were made, such as ``"llama3"``; a label only.
    """

    head_dim: int
    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    layout: str = "half"
    kind: str = "default"

    def __post_init__(self) -> None:
        """Refuse values that describe no rotary embedding."""
        for name, low in (("head_dim", 2), ("rotary_dim", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < low or value % 2:
                raise ValueError(f"{name} must be an even integer of at least {low}, got {value!r}")
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} exceeds head_dim {self.head_dim}")
        if not isinstance(self.inv_freq, tuple) or len(self.inv_freq) != self.rotary_dim // 2:
            raise ValueError(
                f"inv_freq must be a tuple of {self.rotary_dim // 2} frequencies "
                f"for rotary_dim {self.rotary_dim}, got {self.inv_freq!r}"
            )
        for value in self.inv_freq:
            if not _is_number(value) or value < 0:
                raise ValueError(f"inv_freq must hold finite values of at least 0, got {value!r}")
        if not _is_number(self.attention_factor) or self.attention_factor <= 0:
            raise ValueError(f"attention_factor must be above 0, got {self.attention_factor!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {self.layout!r}")
        if not isinstance(self.kind, str) or not self.kind:
            raise ValueError(f"kind must be a non-empty string, got {self.kind!r}")

    @classmethod
    def unrotated(cls, head_dim: int) -> RopeSpec:
        """The spec of a layer without rotary embedding: every plane has frequency zero."""
        return cls(head_dim=head_dim, rotary_dim=0, inv_freq=(), kind="none")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        head_dim: int,
        seq_len: int | None = None,
        layer_type: str | None = None,
        *,
        layout: str | None = None,
    ) -> RopeSpec:
        """Read the rotary embedding off a transformers-style model config.

        Args:
            config: The text model's config as a dict, with ``rope_parameters``, or with
                ``rope_theta`` and ``rope_scaling`` as older files have it.
            head_dim: Channels of a head.
            seq_len: Current sequence length in tokens; matters for kind ``"dynamic"`` only.
            layer_type: Which entry to read where each layer type has its own parameters.
            layout: Channel pairing; by default read off the config's ``model_type``.

        Raises:
            ValueError: If the parameters are missing, malformed or of an unsupported kind.
        """
        values = _layer_parameters(config, layer_type)
        if values is None:
            return cls.unrotated(head_dim)
        kind = _Parameters(values).kind()
        parameters = _Parameters({**values, "seq_len": seq_len})
        rotary_dim = int(head_dim * parameters.number("partial_rotary_factor", 1.0))
        inv_freq, attention_factor = _FREQUENCY_RULES[kind](parameters, rotary_dim)
        if layout is None:
            is_interleaved = config.get("model_type") in _INTERLEAVED_MODELS
            layout = "interleaved" if is_interleaved else "half"
        return cls(head_dim, rotary_dim, tuple(inv_freq), attention_factor, layout, kind)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> RopeSpec:
        """Rebuild a spec from :meth:`to_json`; missing, unknown or mistyped entries raise."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            wrong = sorted(set(data) ^ names, key=str)
            raise ValueError(f"rope spec has missing or unknown keys: {wrong}")
        inv_freq = data["inv_freq"]
        if not isinstance(inv_freq, list) or not all(_is_number(value) for value in inv_freq):
            raise ValueError(f"inv_freq must be a list of numbers, got {inv_freq!r}")
        values = {**data, "inv_freq": tuple(float(value) for value in inv_freq)}
        return cls(**values)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        """The spec as plain JSON values, exact to the last bit."""
        return {
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "inv_freq": list(self.inv_freq),
            "attention_factor": self.attention_factor,
            "layout": self.layout,
            "kind": self.kind,
        }

    @property
    def num_planes(self) -> int:
        """Planes of a head, rotated or not."""
        return self.head_dim // 2

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """Radians per position, ``[planes]`` float64, zero where nothing rotates; shared."""
        rest = (0.0,) * (self.num_planes - len(self.inv_freq))
        return constant((*self.inv_freq, *rest), device=device or "cpu", dtype=torch.float64)

    def plane_channels(self, device: torch.device | str | None = None) -> Tensor:
        """The two channels of each plane, ``[planes, 2]`` int64."""
        rotated = torch.arange(self.rotary_dim, device=device)
        rest = torch.arange(self.rotary_dim, self.head_dim, device=device)
        pairs = rotated.view(-1, 2) if self.layout == "interleaved" else rotated.view(2, -1).T
        return torch.cat((pairs, rest.view(2, -1).T))

    def phases(self, positions: Tensor) -> Tensor:
        """Angle by which each plane turns, ``[..., planes]`` float32 in (-pi, pi].

        Args:
            positions: ``[...]`` integer token positions.
        """
        return principal_angle(self._phases_float64(positions).float())

    def to_planes(self, x: Tensor) -> Tensor:
        """Regroup channels ``[..., head_dim]`` as planes ``[..., planes, 2]``."""
        self._check_shape(x, (self.head_dim,))
        rotated, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        is_mixed = self.layout == "interleaved"
        z = rotated.unflatten(-1, (-1, 2)) if is_mixed else torch.stack(rotated.chunk(2, -1), -1)
        return torch.cat((z, torch.stack(rest.chunk(2, -1), -1)), -2) if rest.shape[-1] else z

    def from_planes(self, z: Tensor) -> Tensor:
        """Undo :meth:`to_planes`."""
        self._check_shape(z, (self.num_planes, 2))
        rotated, rest = z[..., : self.rotary_dim // 2, :], z[..., self.rotary_dim // 2 :, :]
        parts = (rotated.flatten(-2),) if self.layout == "interleaved" else rotated.unbind(-1)
        return torch.cat((*parts, *rest.unbind(-1)), -1)

    def rotate(self, z: Tensor, positions: Tensor) -> Tensor:
        """Turn planes ``z`` ``[..., planes, 2]`` by the phases of their positions.

        A pure rotation: ``attention_factor`` is left out.
        """
        return self._turn(z, positions, 1.0)

    def unrotate(self, z: Tensor, positions: Tensor) -> Tensor:
        """Undo :meth:`rotate`."""
        return self._turn(z, positions, -1.0)

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embed positions into ``x`` ``[..., head_dim]`` exactly as the model does."""
        z = self.rotate(self.to_planes(x), positions)
        gain = torch.ones(self.num_planes, 1, dtype=z.dtype, device=z.device)
        gain[: self.rotary_dim // 2] = self.attention_factor
        return self.from_planes(z * gain)

    def _turn(self, z: Tensor, positions: Tensor, sign: float) -> Tensor:
        self._check_shape(z, (self.num_planes, 2))
        compute_dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
        phase = (sign * self._phases_float64(positions)).to(compute_dtype)
        cos, sin = phase.cos(), phase.sin()
        x, y = z.to(compute_dtype).unbind(-1)
        try:
            turned = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)
        except RuntimeError as error:
            shapes = f"{tuple(positions.shape)} against {tuple(z.shape)}"
            raise ValueError(f"positions do not fit the planes: {shapes}") from error
        return turned.to(z.dtype)

    def _phases_float64(self, positions: Tensor) -> Tensor:
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions must be integers, got dtype {positions.dtype}")
        # float32 products are wrong by whole hundredths of a radian at a million tokens
        turned = positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)
        return math.pi - torch.remainder(math.pi - turned, 2 * math.pi)

    def _check_shape(self, x: Tensor, tail: tuple[int, ...]) -> None:
        if tuple(x.shape[-len(tail) :]) != tail:
            raise ValueError(f"expected a tensor [..., {tail}], got shape {tuple(x.shape)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _layer_parameters(
    config: Mapping[str, object], layer_type: str | None
) -> dict[str, object] | None:
    """One layer type's rotary parameters, defaults filled in; None where it has no rotation."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters must be a mapping, got {given!r}")
    if not given and config.get("rope_theta") is None:
        raise ValueError("config has none of rope_parameters, rope_scaling, rope_theta")
    is_nested = any(isinstance(entry, Mapping) for entry in given.values())
    if is_nested:
        if layer_type not in given:
            raise ValueError(f"layer_type must be one of {sorted(given)}, got {layer_type!r}")
        given = given[layer_type]
        if given is None:
            return None
    defaults = dict(config)
    local_theta = config.get("rope_local_base_freq")
    if not is_nested and layer_type == "sliding_attention" and local_theta is not None:
        # the older way to say that window layers have a base of their own and no scaling
        given, defaults["rope_theta"] = {}, local_theta
    values = {key: value for key, value in given.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor", "max_position_embeddings"):
        values.setdefault(key, defaults.get(key))
    length = "original_max_position_embeddings"
    if not is_nested and config.get(length) is not None:
        values[length] = config[length]
    values.setdefault(length, config.get("max_position_embeddings"))
    return values


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Checked access to one layer's rotary parameters."""

    values: dict[str, object]

    def kind(self) -> str:
        kind = self.values.get("rope_type") or self.values.get("type") or "default"
        if kind not in _FREQUENCY_RULES:
            raise ValueError(f"unsupported rope_type {kind!r}; known: {sorted(_FREQUENCY_RULES)}")
        unknown = sorted(set(self.values) - _KNOWN_PARAMETERS)
        if unknown:
            raise ValueError(f"unsupported parameters of rope_type {kind!r}: {unknown}")
        return str(kind)

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not _is_number(value) or value <= above:
            raise ValueError(f"rope parameter {name} must be above {above}, got {value!r}")
        return float(value)

    def base(self) -> float:
        return self.number("rope_theta", _DEFAULT_THETA, above=1.0)

    def has(self, name: str) -> bool:
        return bool(self.values.get(name))


_Frequencies = tuple[list[float], float]


def _powers(base: float, rotary_dim: int) -> list[float]:
    return [base ** (-2 * plane / rotary_dim) for plane in range(rotary_dim // 2)]


def _default(parameters: _Parameters, rotary_dim: int) -> _Frequencies:
    return _powers(parameters.base(), rotary_dim), 1.0


def _linear(parameters: _Parameters, rotary_dim: int) -> _Frequencies:
    factor = parameters.number("factor")
    return [freq / factor for freq in _powers(parameters.base(), rotary_dim)], 1.0


def _dynamic(parameters: _Parameters, rotary_dim: int) -> _Frequencies:
    """The base grows with the sequence, so that the slowest plane is stretched in proportion."""
    trained = parameters.number("max_position_embeddings")
    current = max(parameters.number("seq_len", trained), trained)
    factor = parameters.number("factor")
    stretch = factor * current / trained - (factor - 1)
    # a lone plane has frequency 1 whatever the base
    exponent = rotary_dim / (rotary_dim - 2) if rotary_dim > 2 else 1.0
    return _powers(parameters.base() * stretch**exponent, rotary_dim), 1.0


def _blend(freqs: list[float], factor: float, keep: Callable[[int, float], float]) -> list[float]:
    """Divide each frequency by ``factor``, except for the share ``keep`` that stays as it was."""
    shares = [min(max(keep(plane, freq), 0.0), 1.0) for plane, freq in enumerate(freqs)]
    return [freq * (s + (1 - s) / factor) for freq, s in zip(freqs, shares, strict=True)]


def _llama3(parameters: _Parameters, rotary_dim: int) -> _Frequencies:
    """Planes that turn often within the trained length keep their frequency."""
    trained = parameters.number("original_max_position_embeddings")
    low, high = (parameters.number(f"{end}_freq_factor") for end in ("low", "high"))
    if high <= low:
        raise ValueError(f"high_freq_factor {high} must be above low_freq_factor {low}")

    def keep(_: int, freq: float) -> float:
        turns = trained * freq / (2 * math.pi)
        return (turns - low) / (high - low)

    freqs = _powers(parameters.base(), rotary_dim)
    return _blend(freqs, parameters.number("factor"), keep), 1.0


def _yarn(parameters: _Parameters, rotary_dim: int) -> _Frequencies:
    """As llama3, with a ramp that is linear in the plane's index and a gain on the logits."""
    trained = parameters.number("original_max_position_embeddings")
    extent = parameters.number("max_position_embeddings", trained)
    factor = parameters.number("factor", extent / trained)
    base = parameters.base()

    def plane_turning(turns: float) -> float:
        return rotary_dim * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(base))

    def gain(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    first = plane_turning(parameters.number("beta_fast", 32.0))
    last = plane_turning(parameters.number("beta_slow", 1.0))
    truncate = parameters.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"rope parameter truncate must be true or false, got {truncate!r}")
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    freqs = _blend(_powers(base, rotary_dim), factor, lambda plane, _: 1 - (plane - first) / width)
    if parameters.has("attention_factor"):
        return freqs, parameters.number("attention_factor")
    if parameters.has("mscale") and parameters.has("mscale_all_dim"):
        ratio = gain(parameters.number("mscale")) / gain(parameters.number("mscale_all_dim"))
        return freqs, ratio
    return freqs, gain(1.0)


_FREQUENCY_RULES: dict[str, Callable[[_Parameters, int], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
