# SPDX-License-Identifier: Apache-2.0
"""Demotion in native code: pages of all layers are coded again in one call, where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS, NUM_RATIOS
from sphkv.codec.native import clip_table
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import COARSE_STEP, NUM_REFINEMENTS, READ_GAIN
from sphkv.core.contract import StateCodec
from sphkv.core.devices import require_kernels
from sphkv.core.tiers import TierSpec
from sphkv.store.layout import PageLayout, blank_pages
from sphkv.store.order import CodecOnly
from sphkv.store.paging import PageBatch


class NativeRecoder(CodecOnly):
    """A ``PageRecoder`` for pages in host memory; everything else is left to the codec.

    Args:
        codebook: Codebook of a codec, a layer and a tier in the kernels' form.
        fields: Offsets of a layout in the order of ``make_kind``.
        num_threads: Threads of a call; ``torch.get_num_threads()`` if None.
    """

    def __init__(
        self,
        codebook: Callable[[SphericalCodec, int, TierSpec], Any],
        fields: Callable[[PageLayout], list[int]],
        num_threads: int | None,
    ) -> None:
        self._codebook, self._fields, self._num_threads = codebook, fields, num_threads

    def recodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Where values are coded; see ``PageRecoder.recodes``."""
        return isinstance(codec, SphericalCodec) and layout.tier.has_value_codes

    def recode(
        self,
        sources: Sequence[tuple[PageLayout, Tensor]],
        layout: PageLayout,
        codec: StateCodec | None,
        batch: PageBatch,
    ) -> Tensor:
        """Code states of pages again; see ``PageRecoder.recode``."""
        assert isinstance(codec, SphericalCodec)
        geometry, bits = codec.calibration.geometry, layout.tier.value_bits
        pages = blank_pages(layout, batch.rows)
        roots = codec.calibration.planes.metric_root.float().contiguous()
        layers = {*(batch.head_ids // geometry.num_kv_heads).unique().tolist()}
        addresses = torch.cat([address for _, address in sources])
        sizes = torch.tensor([len(address) for _, address in sources])
        kind_ids = torch.arange(len(sources)).repeat_interleave(sizes)
        heads, source = batch.head_ids.contiguous(), batch.source.contiguous()
        weights = clip_table(bits) if bits in CLIP_RANGE else None
        parts = (roots, addresses, kind_ids, heads, source)
        require_kernels().recode_pages(
            [layout.head_dim, geometry.num_kv_heads, len(pages)],
            [kind for each, _ in sources for kind in self._kinds(each, codec, layers)],
            self._kinds(layout, codec, layers),
            [*(part.data_ptr() for part in parts), 0 if weights is None else weights.data_ptr()],
            [NUM_RATIOS, NUM_CELLS, NUM_REFINEMENTS],
            [COARSE_STEP[bits], READ_GAIN[bits]],
            self._num_threads or torch.get_num_threads(),
            pages.data_ptr(),
        )
        return pages

    def _kinds(self, layout: PageLayout, codec: SphericalCodec, layers: set[int]) -> list[Any]:
        """Pages of a layout in every layer as the kernels see them; of use in ``layers`` alone."""
        make, fields = require_kernels().make_kind, self._fields(layout)
        none = make(fields, None)
        if not layout.tier.is_coded:
            return [none] * codec.calibration.geometry.num_layers
        return [
            make(fields, self._codebook(codec, layer, layout.tier)) if layer in layers else none
            for layer in range(codec.calibration.geometry.num_layers)
        ]
