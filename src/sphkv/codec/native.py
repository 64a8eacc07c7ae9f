# SPDX-License-Identifier: Apache-2.0
"""The slow parts of encoding in native code; None where that is not available.

Same arithmetic as ``keys.py`` and ``values.py``, apart from the order of float32 sums: a code may
differ where two candidates are equally near to within that rounding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sphkv.codec.affine import AffineCode
from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS, NUM_RATIOS, clip_weights
from sphkv.codec.codebook import AngleCodebook
from sphkv.core.devices import native_kernels


def is_native(*tensors: Tensor) -> bool:
    """Whether native code can work on these tensors."""
    return native_kernels() is not None and all(
        tensor.device.type == "cpu" and not tensor.requires_grad for tensor in tensors
    )


def snap_to_slots(unit: Tensor, codebook: AngleCodebook) -> tuple[Tensor, Tensor, Tensor] | None:
    """Nearest points in the query metric, plane by plane.

    Args:
        unit: ``[heads, tokens, planes, 2]`` float32 pre-RoPE components of unit keys.
        codebook: Slots of the layer and tier.

    Returns:
        Codes ``[heads, slots, tokens]`` uint8, the product of each key with its coded direction
        and that direction's length, both ``[heads, tokens]``; or None.
    """
    if not is_native(unit, codebook.points):
        return None
    heads, tokens, planes, _ = unit.shape
    slots = codebook.num_slots
    codes = torch.empty(heads, slots, tokens, dtype=torch.uint8, device="cpu")
    cosine, length = torch.empty(2, heads, tokens, dtype=torch.float32, device="cpu").unbind(0)
    parts = (
        unit.float().contiguous(),
        codebook.plane_bits.long().contiguous(),
        codebook.slot_plane.long().contiguous(),
        codebook.points.float().contiguous(),
        codebook.constant.float().contiguous(),
        codebook.metric_root.float().contiguous(),
    )
    native_kernels().encode_keys(  # type: ignore[union-attr]
        [heads, tokens, planes, slots],
        [part.data_ptr() for part in parts],
        torch.get_num_threads(),
        [codes.data_ptr(), cosine.data_ptr(), length.data_ptr()],
    )
    return codes, cosine, length


@functools.lru_cache(maxsize=8)
def clip_table(bits: int) -> Tensor:
    """``clip_weights`` as the kernels read them: ``[NUM_CELLS, 2, NUM_RATIOS]`` int32."""
    with torch.inference_mode(False):
        return torch.stack(clip_weights(bits)).permute(2, 0, 1).to(torch.int32).contiguous()


def fit_steps(unit: Tensor, *, bits: int, num_refinements: int) -> Tensor | None:
    """Step of least squared error of every token, ``[..., tokens, 1]`` float32, or None.

    Args:
        unit: ``[..., tokens, head_dim]`` float32 with peak 1 (or 0).
        bits: Width of a code.
        num_refinements: Least-squares steps after the best clipping ratio.
    """
    if not is_native(unit) or unit.dtype != torch.float32:
        return None
    unit = unit.contiguous()
    step = torch.empty(*unit.shape[:-1], 1, dtype=torch.float32, device="cpu")
    weights = clip_table(bits) if bits in CLIP_RANGE else None
    native_kernels().fit_value_steps(  # type: ignore[union-attr]
        [*_rows(unit), bits],
        [unit.data_ptr(), 0 if weights is None else weights.data_ptr()],
        [NUM_RATIOS, NUM_CELLS],
        num_refinements,
        torch.get_num_threads(),
        step.data_ptr(),
    )
    return step


def encode_steps(
    unit: Tensor, inverse_peak: Tensor, scale: AffineCode, live: Tensor, *, bits: int, coarse: float
) -> tuple[Tensor, Tensor] | None:
    """Choose coarse scale codes among their neighbours and snap the values to their steps.

    Args:
        unit: ``[..., tokens, head_dim]`` float32 with peak 1 (or 0).
        inverse_peak: ``[..., tokens, 1]`` float32.
        scale: Steps as first rounded.
        live: ``[..., tokens]`` bool.
        bits: Width of a code.
        coarse: Part of a token's own step above which a page's step is coarse.

    Returns:
        Codes ``[..., tokens, head_dim]`` and scale codes ``[..., tokens]``, uint8; or None.
    """
    if not is_native(unit) or unit.dtype != torch.float32:
        return None
    parts = (
        unit.contiguous(),
        scale.lo.contiguous(),
        scale.step.contiguous(),
        inverse_peak.contiguous(),
        live.to(torch.uint8).contiguous(),
    )
    scale_code = scale.code.clone(memory_format=torch.contiguous_format)
    codes = torch.empty(unit.shape, dtype=torch.uint8, device="cpu")
    native_kernels().encode_values(  # type: ignore[union-attr]
        [*_rows(unit), bits],
        [part.data_ptr() for part in parts],
        coarse,
        torch.get_num_threads(),
        [scale_code.data_ptr(), codes.data_ptr()],
    )
    return codes, scale_code


def _rows(unit: Tensor) -> tuple[int, int, int]:
    """Pages, tokens of a page, head dimension."""
    tokens, dim = unit.shape[-2:]
    return unit[..., 0, 0].numel() if tokens else 0, tokens, dim
