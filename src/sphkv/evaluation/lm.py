# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval lm``: KL to the dense model under teacher forcing, and the codecs it can compare.

Every key and value codec goes through its stored form.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PartCodec
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.rotation_lloyd import RotationLloyd
from sphkv.baselines.rounding import RotatedIntegers
from sphkv.codec.calibration import Calibration, default_calibration
from sphkv.codec.coordinates.levels import encode_angles, fit_angle_codebook, split_radius
from sphkv.codec.coordinates.maps import HypersphericalMap, PolarTreeMap
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import decode_values, encode_values
from sphkv.core.configs import check_name
from sphkv.core.contract import LayerContract
from sphkv.core.tiers import DENSE, DENSE_BITS, DROP, VALUE_BITS, TierSpec, TierTable
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import hidden_states, read_prompt
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.case import check_context
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.transformers.listening import transformed_states
from sphkv.store.config import StoreConfig
from sphkv.store.layout import HEADER_BYTES
from sphkv.store.ledger import ByteLedger
from sphkv.store.store import PageStore

CALIBRATION_TOKENS = 4096
SELF_CALIBRATION_TOKENS = 1024
COORDINATES = ("hyperspherical", "polar_tree")
"""The paper's own angles, coded one by one after the rotary embedding."""
METHODS = (
    "spherical", "spherical-default", *COORDINATES, "rotation-lloyd", "per-channel-int",
    "hadamard-int",
)  # fmt: skip
_PAGE_TOKENS = 128
# page id and tier tag of the pointer table, reference and state count of the slab
_POINTER_BYTES = 8 + 2 + 4 + 4
_RADIUS_BITS = 16
_MOST_ANGLE_BITS = 8
_MOST_KEY_BITS = 6.0
_FLOAT16_BITS = 16
_GROUP = 32


@dataclass(frozen=True, slots=True)
class LMConfig:
    """One measurement of language-model loss.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        text: UTF-8 file to read; its first tokens are the context.
        context: Tokens; never more than the model allows or the text has.
        key_bits: Bits per key element at most, all metadata included.
        value_bits: Bits per value element at most; 16 keeps values.
        method: One of ``METHODS``.
        calibration_text: Text to calibrate on; None calibrates on the context's beginning.
        calibration: A calibration file instead of a text.
        calibration_tokens: Tokens of the calibration text.
        offset: Characters of the text to skip.
        dense_tokens: Leading tokens kept dense.
    """

    model: str
    text: str
    context: int
    key_bits: float = 2.25
    value_bits: float = 16.0
    method: str = "spherical"
    calibration_text: str | None = None
    calibration: str | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    offset: int = 0
    dense_tokens: int = 4

    def __post_init__(self) -> None:
        """Reject what cannot be measured."""
        check_name("method", self.method, METHODS)
        if self.context < 2:
            raise ValueError(f"context must be at least 2 tokens, got {self.context}")
        for name in ("key_bits", "value_bits"):
            if not 0 < getattr(self, name) <= DENSE_BITS:
                raise ValueError(
                    f"{name} must be above 0 and at most {DENSE_BITS}, got {getattr(self, name)}"
                )
        for name in ("offset", "dense_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.calibration is not None and self.calibration_text is not None:
            raise ValueError("give calibration or calibration_text, not both")


class LMRunner:
    """A text read once, and any number of codecs measured on it."""

    def __init__(self, config: LMConfig) -> None:
        given = (config.calibration_text, config.calibration)
        text, file = (None if path is None else Path(path) for path in given)
        self._session = Session(
            config.model,
            calibration_text=text,
            calibration_tokens=config.calibration_tokens,
            calibration_file=file,
        )
        check_context(config.context, self._session.shape.max_tokens, extra=0)
        self.input_ids = read_tokens(
            self._session.tokenizer, config.text, config.context, offset=config.offset
        )
        if text is None and file is None:
            self._session.calibrate_on(self.input_ids[:, :SELF_CALIBRATION_TOKENS])
        self._dense = hidden_states(self._session.model, self.input_ids)

    @cached_property
    def _calibration_keys(self) -> list[Tensor]:
        """Keys of every layer of the text that codebooks are fitted on."""
        ids = torch.tensor([self._session.calibration_ids])
        states = read_prompt(self._session.model, ids)
        return [part.keys for part in states.layers]

    def _method(self, config: LMConfig) -> StateMethod:
        shape = self._session.shape
        head_dim = shape.geometry.head_dim
        if config.method in ("spherical", "spherical-default"):
            tier = tier_for_bits(config.key_bits, config.value_bits, head_dim)
            if config.method == "spherical":
                calibration = self._session.calibration
            else:
                calibration = default_calibration(shape.geometry, shape.ropes)
            return SphericalMethod(calibration, tier, dense_tokens=config.dense_tokens)
        if config.method in COORDINATES:
            return CoordinateMethod(
                config.method,
                config.key_bits,
                config.value_bits,
                calibration_keys=self._calibration_keys,
                dense_tokens=config.dense_tokens,
            )
        return comparison_method(
            config.method,
            config.key_bits,
            config.value_bits,
            head_dim=head_dim,
            dense_tokens=config.dense_tokens,
        )

    def run(self, config: LMConfig) -> dict[str, Any]:
        """Measure one setting.

        Returns:
            A record with ``kl``, ``nll_delta``, ``same_top1``, the bits really stored, and for
            the product's own codec ``b_kv`` and ``ledger``.
        """
        began = time.perf_counter()
        method = self._method(config)
        calibrated = time.perf_counter()
        model = self._session.model
        with transformed_states(model, method):
            coded = hidden_states(model, self.input_ids)
        found = token_divergence(model, self._dense, coded, self.input_ids[0, 1:]).summary()
        record: dict[str, Any] = {
            **{name: found[name] for name in ("kl", "kl_without_worst", "nll_delta", "same_top1")},
            "method": config.method,
            "key_bits": method.key_bits,
            "value_bits": method.value_bits,
            "b_kv": None,
            "ledger": None,
            "realisation": "format-only",
            "calibrate_s": calibrated - began,
            "run_s": time.perf_counter() - calibrated,
            "config": asdict(config),
            "environment": describe_environment(),
        }
        if isinstance(method, CoordinateMethod):
            record["angle_bits"], record["table_bytes"] = method.angle_bits, method.table_bytes
        if isinstance(method, SphericalMethod):
            ledger = method.ledger()
            record["b_kv"] = ledger.b_kv(config.context)
            record["ledger"] = ledger.to_dict()
            record["tier"] = method.tier.name
            record["dense_b_kv"] = self._session.shape.geometry.dense_bytes_per_token
        return record


class StateMethod(Protocol):
    """Replaces the states of a layer by what it would read back from its store."""

    @property
    def key_bits(self) -> float:
        """Bits per key element, metadata included."""
        ...

    @property
    def value_bits(self) -> float:
        """Bits per value element, metadata included."""
        ...

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States after encoding, packing, unpacking and decoding."""
        ...


def shared_bits(head_dim: int) -> float:
    """Page header and pointers per element, half of which a key and half a value pays."""
    return 8 * (HEADER_BYTES + _POINTER_BYTES) / _PAGE_TOKENS / head_dim / 2


def tier_for_bits(key_bits: float, value_bits: float, head_dim: int) -> TierSpec:
    """The tier nearest from below to the asked bits per element, all metadata included.

    Raises:
        ValueError: Even the smallest code needs more bits.
    """
    overhead = 8 / head_dim + shared_bits(head_dim)
    nibbles = int((key_bits - overhead) * head_dim / 4 + 1e-9)
    nibbles = min(nibbles, int(_MOST_KEY_BITS * head_dim / 4))
    if nibbles < 2:
        raise ValueError(f"key_bits {key_bits} is less than a code of two nibbles needs")
    fitting = [bits for bits in VALUE_BITS if bits == DENSE_BITS or bits + overhead <= value_bits]
    fitting = [bits for bits in fitting if bits <= value_bits]
    if not fitting:
        raise ValueError(f"value_bits {value_bits} is less than {min(VALUE_BITS)} bits need")
    code_bits = nibbles * 4 / head_dim
    name = f"k{code_bits:g}v{max(fitting)}"
    return TierSpec(name, "coded", code_bits, max(fitting), _PAGE_TOKENS)


class SphericalMethod:
    """The product's own path: pages are written to a store and read back from its bytes."""

    def __init__(self, calibration: Calibration, tier: TierSpec, *, dense_tokens: int) -> None:
        self.tier = tier
        self.codec = SphericalCodec(calibration)
        config = StoreConfig(
            calibration.geometry, TierTable((DROP, tier, DENSE)), seal_tier=tier.name
        )
        self.store = PageStore(config, self.codec)
        self._dense_tokens = dense_tokens
        head_dim = calibration.geometry.head_dim
        self.key_bits = tier.key_bits_stored(head_dim) + shared_bits(head_dim)
        is_exact = tier.value_bits == DENSE_BITS
        shared = 0.0 if is_exact else shared_bits(head_dim)
        self.value_bits = tier.value_bits_stored(head_dim) + shared

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's states and read them back."""
        heads, tokens, _ = keys.shape
        if layer == 0:
            for sequence in self.store.sequences:
                self.store.free(sequence)
            self.store.create(0)
        tier_id = torch.ones(heads, tokens, dtype=torch.uint8)
        tier_id[:, : self._dense_tokens] = self.store.config.tiers.dense_id
        contract = LayerContract(tier_id, torch.zeros(heads, tokens, dtype=torch.bool))
        self.store.write(0, layer, contract, keys, values, torch.arange(tokens))
        return self.read(layer, tokens)

    def read(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Decode every page of a layer; a measurement, never a decode step."""
        geometry = self.store.config.geometry
        shape = (geometry.num_kv_heads, tokens, geometry.head_dim)
        keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for group in self.store.pages(0, layer):
            view, head_ids = self.store.view(group), group.head_ids()
            if group.layout.tier.is_coded:
                pair = self.codec.decode(
                    layer, group.layout.tier, view.encoded(), view.positions(), head_ids=head_ids
                )
            else:
                pair = view.dense_keys().float(), view.dense_values().float()
            live = view.live()
            where = (head_ids[:, None].expand_as(live)[live], view.positions()[live])
            keys[where], values[where] = pair[0][live], pair[1][live]
        return keys, values

    def ledger(self) -> ByteLedger:
        """Bytes of the store after a pass."""
        return self.store.ledger()


class CoordinateMethod:
    """Keys as a radius and one code for each angle of a coordinate map; format-only.

    Levels of each angle of each head are fitted to keys of a calibration text. Values are coded
    as the product codes them.

    Attributes:
        angle_bits: Bits of each angle.
        key_bits: Bits per key element: angles, a float16 radius, page header and pointers.
        value_bits: Bits per value element, metadata included.
        table_bytes: Bytes of the levels, which all sequences share; not part of the bits.
    """

    def __init__(
        self,
        name: str,
        key_bits: float,
        value_bits: float,
        *,
        calibration_keys: Sequence[Tensor],
        dense_tokens: int,
    ) -> None:
        """Fit the levels at the bits nearest from below.

        Args:
            name: One of ``COORDINATES``.
            key_bits: Bits per key element at most, all metadata included.
            value_bits: Bits per value element at most; 16 keeps values.
            calibration_keys: ``[kv_heads, tokens, head_dim]`` post-RoPE keys of every layer.
            dense_tokens: Leading tokens left alone, and left out of the fit.

        Raises:
            ValueError: Even one bit per angle needs more.
        """
        head_dim = calibration_keys[0].shape[-1]
        self._map = HypersphericalMap() if name == "hyperspherical" else PolarTreeMap()
        num_angles, shared = self._map.num_angles(head_dim), shared_bits(head_dim)

        def bits_at(width: int) -> float:
            return (num_angles * width + _RADIUS_BITS) / head_dim + shared

        fitting = [w for w in range(1, _MOST_ANGLE_BITS + 1) if bits_at(w) <= key_bits + 1e-9]
        if not fitting:
            raise ValueError(f"{name} needs at least {bits_at(1):.3g} key bits, got {key_bits:g}")
        self.angle_bits = fitting[-1]
        self.key_bits = bits_at(self.angle_bits)
        self._value_width = tier_for_bits(DENSE_BITS, value_bits, head_dim).value_bits
        is_exact = self._value_width == DENSE_BITS
        scale = 8 / head_dim + shared
        self.value_bits = float(DENSE_BITS) if is_exact else self._value_width + scale
        self._dense_tokens = dense_tokens
        self._codebooks = [
            fit_angle_codebook(self._map, keys[:, dense_tokens:].float(), bits=self.angle_bits)
            for keys in calibration_keys
        ]
        self.table_bytes = sum(book.levels.nbytes for book in self._codebooks)

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they would come back from their codes."""
        book, kept = self._codebooks[layer], self._dense_tokens
        radius, _ = split_radius(keys)
        codes = encode_angles(self._map, keys, book)
        unit = self._map.from_angles(book.look_up(book.levels, codes))
        new_keys = unit * radius.half().float()[..., None]
        new_keys[:, :kept] = keys[:, :kept]
        if self._value_width == DENSE_BITS:
            return new_keys, values
        new_values = decode_values(encode_values(values.float(), bits=self._value_width))
        new_values[:, :kept] = values[:, :kept]
        return new_keys, new_values


class _KeyCodec(Protocol):
    def bits_per_element(self, head_dim: int) -> float: ...

    def roundtrip(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CodedPart:
    """A codec of the baselines, from states to codes and back.

    Attributes:
        codec: The codec.
        bits: Width of a code.
        shared: Entries that share a float16 minimum and spacing.
        block: Tokens that are coded together.
    """

    codec: PartCodec
    bits: int
    shared: int
    block: int = 1

    def bits_per_element(self, head_dim: int) -> float:
        """Bits per entry, minimum and spacing included; the head dim does not matter."""
        return self.bits + 2 * _FLOAT16_BITS / self.shared

    def roundtrip(self, x: Tensor) -> Tensor:
        """States ``[heads, tokens, head_dim]`` as they would come back, float32."""
        heads, tokens, dim = x.shape
        # repeating the last token leaves the range of its block as it is
        padding = x[:, -1:].expand(heads, -tokens % self.block, dim)
        padded = torch.cat([x, padding], 1).float()
        return self.codec.decode(self.codec.encode(padded), padded.shape[1])[:, :tokens]


def _coded_part(name: str, bits: int, head_dim: int) -> _KeyCodec:
    """KIVI's integers per channel and 32 tokens, or QuaRot's per token after a rotation."""
    if name == "rotation-lloyd":
        return RotationLloyd(bits)
    if name == "per-channel-int":
        return CodedPart(ChannelIntegers(bits, _GROUP), bits, _GROUP, block=_GROUP)
    if name == "hadamard-int":
        return CodedPart(RotatedIntegers(TokenIntegers(bits, head_dim)), bits, head_dim)
    raise ValueError(f"no comparison codec {name!r}; there are {', '.join(METHODS[2:])}")


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonMethod:
    """Another codec for keys and, if asked, for values; format-only.

    Attributes:
        key_codec: Codec of the keys.
        value_codec: Codec of the values; None keeps them.
        dense_tokens: Leading tokens left alone.
        key_bits: Bits per key element, metadata included.
        value_bits: Bits per value element, metadata included.
    """

    key_codec: _KeyCodec
    value_codec: _KeyCodec | None
    dense_tokens: int
    key_bits: float
    value_bits: float

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Quantise and restore."""
        new_keys = self.key_codec.roundtrip(keys.float())
        new_keys[:, : self.dense_tokens] = keys[:, : self.dense_tokens]
        if self.value_codec is None:
            return new_keys, values
        new_values = self.value_codec.roundtrip(values.float())
        new_values[:, : self.dense_tokens] = values[:, : self.dense_tokens]
        return new_keys, new_values


def comparison_method(
    name: str, key_bits: float, value_bits: float, *, head_dim: int, dense_tokens: int
) -> ComparisonMethod:
    """A comparison codec at the bits nearest from below."""
    candidates = [_coded_part(name, bits, head_dim) for bits in range(1, 9)]

    def nearest(wanted: float, what: str) -> _KeyCodec:
        fitting = [c for c in candidates if c.bits_per_element(head_dim) <= wanted + 1e-9]
        if not fitting:
            least = candidates[0].bits_per_element(head_dim)
            raise ValueError(f"{name} needs at least {least:g} {what}, got {wanted:g}")
        return fitting[-1]

    key_codec = nearest(key_bits, "key bits")
    value_codec = None if value_bits >= DENSE_BITS else nearest(value_bits, "value bits")
    return ComparisonMethod(
        key_codec,
        value_codec,
        dense_tokens,
        key_codec.bits_per_element(head_dim),
        value_codec.bits_per_element(head_dim) if value_codec else float(DENSE_BITS),
    )
