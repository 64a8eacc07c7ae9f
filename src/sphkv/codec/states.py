# SPDX-License-Identifier: Apache-2.0
"""The codec the store calls: dense states of one layer to the codes of a tier."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.codec.affine import AffineCode, quantise_affine_u8
from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import AngleCodebook
from sphkv.codec.keys import SphericalCode, decode_keys, encode_keys
from sphkv.codec.slots import SlotLayout, lay_out_slots
from sphkv.codec.values import ValueCode, decode_values, encode_values, unbiased_scale
from sphkv.core.contract import EncodedStates
from sphkv.core.tiers import TierSpec

# Codecs of one calibration share what was made of it: layouts of slots, and whole codebooks where a
# device would have to wait for their points.
_LAYOUTS: WeakKeyDictionary[Calibration, dict[tuple[int, int], SlotLayout]]
_LAYOUTS = WeakKeyDictionary()
_CODEBOOKS: WeakKeyDictionary[Calibration, dict[tuple[int, int, str], AngleCodebook]]
_CODEBOOKS = WeakKeyDictionary()


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
        return self.calibration.planes.num_bytes + layouts + books

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
            on_cpu = planes.layer(layer).to("cpu")
            self._codebooks[key] = self._layout(layer, slots).codebook(on_cpu).to(device)
        return self._codebooks[key]

    def _layout(self, layer: int, slots: int) -> SlotLayout:
        if (layer, slots) not in self._layouts:
            planes = self.calibration.planes.layer(layer).to("cpu")
            self._layouts[layer, slots] = lay_out_slots(planes, slots)
        return self._layouts[layer, slots]

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
