# SPDX-License-Identifier: Apache-2.0
"""The codec the store calls: dense states of one layer to the codes of a tier."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.codec.affine import AffineCode, quantise_affine_u8
from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import CELL_BITS, AngleCodebook, PlaneCodebooks
from sphkv.codec.keys import SphericalCode, decode_keys, encode_keys, recode_keys
from sphkv.codec.slots import SlotLayout, lay_out_tiers
from sphkv.codec.values import (
    ValueCode,
    decode_values,
    encode_values,
    recode_values,
    unbiased_scale,
)
from sphkv.core.contract import EncodedStates
from sphkv.core.devices import Replay
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import CODED_PAGE_MULTIPLE, TierSpec

# Codecs of one calibration share what was made of it: layouts of slots, and whole codebooks where a
# device would have to wait for their points.
_LAYOUTS: WeakKeyDictionary[Calibration, dict[tuple[int, int], SlotLayout]]
_LAYOUTS = WeakKeyDictionary()
_CODEBOOKS: WeakKeyDictionary[Calibration, dict[tuple[int, int, str], AngleCodebook]]
_CODEBOOKS = WeakKeyDictionary()
# What measuring errors on a device needs of it there.
_PLANES: WeakKeyDictionary[Calibration, dict[str, PlaneCodebooks]]
_PLANES = WeakKeyDictionary()
_CELLS: WeakKeyDictionary[Calibration, dict[tuple[int, tuple[int, ...], str], Tensor]]
_CELLS = WeakKeyDictionary()


class SphericalCodec:
    """Encodes keys with a calibration and values with a rotation; a ``StateCodec``."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._layouts = _LAYOUTS.setdefault(calibration, {})
        self._codebooks = _CODEBOOKS.setdefault(calibration, {})

    @property
    def num_bytes(self) -> int:
        """Bytes of the calibration, and of the layouts and codebooks made of it so far."""
        layouts = sum(layout.num_bytes for layout in self._layouts.values())
        books = sum(book.num_bytes for book in self._codebooks.values())
        cells = sum(each.nbytes for each in _CELLS.get(self.calibration, {}).values())
        planes = sum(each.num_bytes for each in _PLANES.get(self.calibration, {}).values())
        return self.calibration.planes.num_bytes + layouts + books + cells + planes

    def codebook(
        self, layer: int, tier: TierSpec, device: torch.device | str = "cpu"
    ) -> AngleCodebook:
        """Slots of a layer at a tier. On the CPU the points are put together anew for each call."""
        slots = tier.key_nibbles(self.calibration.geometry.head_dim)
        planes = self.calibration.planes
        if str(device) == "cpu" and planes.mean.device.type == "cpu":
            return self._layout(layer, slots).codebook(planes.layer(layer))
        key = (layer, slots, str(device))
        if key not in self._codebooks:
            own = self._planes(layer, torch.device(device))
            self._codebooks[key] = self._layout(layer, slots, own.mean.device).codebook(own)
        return self._codebooks[key]

    def joined_codebook(self, tier: TierSpec, device: torch.device) -> AngleCodebook:
        """Slots of all layers at a tier, the heads of each layer behind those of the last one.

        All layers must be fitted. From then on ``codebook`` gives parts of it on that device.
        """
        geometry = self.calibration.geometry
        slots, layers = tier.key_nibbles(geometry.head_dim), range(geometry.num_layers)
        self._lay_out(layers, (slots,), device)
        # layers that were read back one by one may have been laid out elsewhere
        layout = SlotLayout.join([self._layouts[layer, slots] for layer in layers], device)
        planes = PlaneCodebooks.join([self._planes(layer, device) for layer in layers])
        book = layout.codebook(planes)
        for layer, part in enumerate(book.split(geometry.num_kv_heads)):
            self._codebooks[layer, slots, str(device)] = part
        return book

    def _layout(self, layer: int, slots: int, device: torch.device | str = "cpu") -> SlotLayout:
        self._lay_out((layer,), (slots,), torch.device(device))
        return self._layouts[layer, slots]

    def _lay_out(self, layers: Sequence[int], slots: tuple[int, ...], device: torch.device) -> None:
        """Lay out slots that are missing, on a device; those of all layers where they are fitted.

        A calibration on the prompt has its layers one after the other.
        """
        missing = [
            each
            for each in dict.fromkeys(slots)
            if any((layer, each) not in self._layouts for layer in layers)
        ]
        if not missing:
            return
        geometry = self.calibration.geometry
        if self.calibration.source != "prompt":
            layers = range(geometry.num_layers)
        distortion = torch.cat([self._planes(each, device).distortion for each in layers])
        for number, layout in lay_out_tiers(distortion, missing).items():
            for each, part in zip(layers, layout.split(geometry.num_kv_heads), strict=True):
                self._layouts[each, number] = part

    def encode(
        self,
        layer: int,
        tier: TierSpec,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> EncodedStates:
        """Encode pages at a coded tier; see ``StateCodec.encode``."""
        rows, tokens, _ = keys.shape
        codebook = self._rows(layer, tier, head_ids, rows, keys.device)
        live = None
        if counts is not None:
            live = torch.arange(tokens, device=keys.device) < counts[:, None]
        code = encode_keys(keys, positions, codebook, self.calibration.ropes[layer])
        radius = quantise_affine_u8(code.radius, live)
        codes = code.codes if live is None else code.codes * live[:, None]
        if not tier.has_value_codes:
            empty = torch.zeros(rows, device=keys.device)
            scale = AffineCode(torch.zeros_like(radius.code), empty, empty)
            return _pack(codes, radius, values.to(torch.bfloat16), scale)
        value = encode_values(values.float(), live, bits=tier.value_bits)
        return _pack(codes, radius, value.codes, unbiased_scale(value.scale, tier.value_bits))

    def decode(
        self,
        layer: int,
        tier: TierSpec,
        encoded: EncodedStates,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Dense keys and values; for demotion and tests, see ``StateCodec.decode``."""
        rows = encoded.num_rows
        codebook = self._rows(layer, tier, head_ids, rows, encoded.key_codes.device)
        radius = AffineCode(encoded.radius_code, encoded.radius_lo, encoded.radius_step)
        code = SphericalCode(encoded.key_codes, radius.dequantise())
        keys = decode_keys(code, positions, codebook, self.calibration.ropes[layer])
        if not tier.has_value_codes:
            return keys, encoded.value_codes.float()
        scale = AffineCode(encoded.scale_code, encoded.scale_lo, encoded.scale_step)
        return keys, decode_values(ValueCode(encoded.value_codes, scale, tier.value_bits))

    def recode(
        self,
        layers: Sequence[int],
        tiers: Sequence[TierSpec],
        keys: Tensor,
        values: Tensor,
        index: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What tiers make of the same states; see ``RecodingCodec.recode``.

        All tiers and layers at once, by few operations, which wait for no GPU.

        Raises:
            ValueError: On a CPU, a state that is not finite, or too large a value.
        """
        planes = PlaneCodebooks.join([self._planes(layer, keys.device) for layer in layers])
        self._lay_out(layers, self._slots(tiers), keys.device)
        cells = torch.cat([self._cells(layer, tiers, keys.device) for layer in layers], 1)
        fitted = (getattr(planes, name) for name in PlaneCodebooks.__slots__)
        bits = tuple(tier.value_bits if tier.has_value_codes else 0 for tier in tiers)
        replay = _recoder(self.calibration.ropes[layers[0]], bits)
        coded_keys, coded_values, step = replay(keys, values, index, cells, *fitted)
        return coded_keys, coded_values, step

    def _planes(self, layer: int, device: torch.device) -> PlaneCodebooks:
        """Fitted points of a layer on a device, copied there once for all layers."""
        planes = self.calibration.planes
        if planes.mean.device == device:
            return planes.layer(layer)
        held = _PLANES.setdefault(self.calibration, {})
        if str(device) not in held:
            held[str(device)] = planes.to(device)
        return held[str(device)].layer(layer)

    def _cells(self, layer: int, tiers: Sequence[TierSpec], device: torch.device) -> Tensor:
        """Cell classes ``[tiers, heads, planes]`` int64 of a layer's planes."""
        slots = self._slots(tiers)
        held = _CELLS.setdefault(self.calibration, {})
        key = (layer, slots, str(device))
        if key not in held:
            self._lay_out((layer,), slots, device)
            layouts = (self._layouts[layer, each] for each in slots)
            bits = torch.stack([layout.plane_bits.to(device) for layout in layouts])
            # classes are two bits apart
            held[key] = bits // CELL_BITS[1]
        return held[key].long()

    def _slots(self, tiers: Sequence[TierSpec]) -> tuple[int, ...]:
        head_dim = self.calibration.geometry.head_dim
        return tuple(tier.key_nibbles(head_dim) for tier in tiers)

    def _rows(
        self,
        layer: int,
        tier: TierSpec,
        head_ids: Tensor | None,
        rows: int,
        device: torch.device,
    ) -> AngleCodebook:
        codebook = self.codebook(layer, tier, device)
        heads = self.calibration.geometry.num_kv_heads
        if head_ids is None:
            if rows != heads:
                raise ValueError(f"{rows} rows without head_ids, but {heads} KV heads")
            return codebook
        return codebook.rows(head_ids.to(device))


@functools.lru_cache(maxsize=16)
def _recoder(rope: RopeSpec, bits: tuple[int, ...]) -> Replay:
    """What recodes states at tiers with values of so many bits; 0 for bfloat16."""
    widths = tuple(dict.fromkeys(each for each in bits if each))

    def recode(
        keys: Tensor, values: Tensor, index: Tensor, cells: Tensor, *fitted: Tensor
    ) -> tuple[Tensor, ...]:
        planes = PlaneCodebooks(*fitted)
        direction, radius = recode_keys(keys, index, planes, cells, rope)
        paged = quantise_affine_u8(radius.unflatten(2, (-1, CODED_PAGE_MULTIPLE)), is_checked=True)
        radius = paged.dequantise().flatten(2)
        coded_keys = rope.from_planes(rope.rotate(direction * radius[..., None, None], index))
        step = paged.step[..., None].expand(-1, -1, -1, CODED_PAGE_MULTIPLE).flatten(2)
        by_width = {0: values.to(torch.bfloat16).float()}
        if widths:
            found = recode_values(values.unflatten(1, (-1, CODED_PAGE_MULTIPLE)), widths)
            by_width |= dict(zip(widths, found.flatten(2, 3), strict=True))
        return coded_keys, torch.stack([by_width[each] for each in bits]), step

    return Replay(recode)


def _pack(
    codes: Tensor, radius: AffineCode, value_codes: Tensor, scale: AffineCode
) -> EncodedStates:
    return EncodedStates(
        key_codes=codes,
        radius_code=radius.code,
        radius_lo=radius.lo,
        radius_step=radius.step,
        value_codes=value_codes,
        scale_code=scale.code,
        scale_lo=scale.lo,
        scale_step=scale.step,
    )
