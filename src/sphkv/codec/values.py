# SPDX-License-Identifier: Apache-2.0
"""Values as rotated, uniform, symmetric codes with one step per token.

A rotated value reads ``s_t * (code - (2**bits - 1) / 2)``. The step ``s_t`` folds into the softmax
weight and the rotation is linear, so attention sums codes and undoes the rotation once on its
output. See ``docs/math/values.md``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec import native
from sphkv.codec.affine import AffineCode, check_finite, live_mask, quantise_affine_u8
from sphkv.codec.clipping import CLIP_RANGE, clipped_start, clipped_starts
from sphkv.codec.hadamard import rotate, unrotate
from sphkv.codec.packing import VALUE_BITS
from sphkv.core.devices import constant

NUM_REFINEMENTS = 1

# A page's scale step above this part of a token's own step is coarse: codes beside the nearest are
# tried too. Below it they would gain a thousandth of the error.
COARSE_STEP: dict[int, float] = {2: 1 / 16, 3: 1 / 16, 4: 1 / 16, 8: 1 / 1024}

# What the step of least squared error is multiplied with for a reader: one over the part of a
# Gaussian value that its codes keep. Sums of many values then have no bias towards zero.
READ_GAIN: dict[int, float] = {2: 1.13, 3: 1.035, 4: 1.01, 8: 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class ValueCode:
    """Coded values of a page or a batch of pages, in the rotated basis.

    Attributes:
        codes: ``[..., tokens, head_dim]`` uint8, each below ``2**bits``; 0 for masked tokens.
        scale: Step ``s_t`` of every token, one byte each: ``[..., tokens]``.
        bits: Width of a code.
    """

    codes: Tensor
    scale: AffineCode
    bits: int

    @property
    def midpoint(self) -> float:
        """Code of the value zero, half-way between two levels."""
        return _midpoint(self.bits)


def encode_values(values: Tensor, mask: Tensor | None = None, *, bits: int) -> ValueCode:
    """Rotate values and code them with the step of least squared error per token.

    The step is that of the best clipping ratio, refined by least squares, rounded to the
    page's 8-bit affine code, and the codes are snapped again to the step a reader will see.
    A zero value has step 0, so it comes back as zero.

    Args:
        values: ``[..., tokens, head_dim]`` floating point, one page per leading index; masked
            tokens may hold anything, NaN included.
        mask: ``[..., tokens]`` bool, broadcastable, true for live tokens; all when omitted.
        bits: Width of a code: 2, 3, 4 or 8.

    Returns:
        Codes and steps; masked tokens have code 0 and scale code 0.

    Raises:
        ValueError: On another width, a shape or dtype that is no value tensor, or a live value
            that is not finite before or after the rotation.
    """
    if bits not in VALUE_BITS:
        raise ValueError(f"value code bits must be one of {VALUE_BITS}, got {bits}")
    if values.ndim < 2 or values.shape[-1] == 0 or not values.is_floating_point():
        raise ValueError(
            f"values must be floating-point [..., tokens, head_dim], "
            f"got {values.dtype} {tuple(values.shape)}"
        )
    live = live_mask(values[..., 0], mask)
    clean = values if mask is None else values.masked_fill(~live[..., None], 0.0)
    rotated = rotate(clean).float()
    peak = torch.linalg.vector_norm(rotated, ord=float("inf"), dim=-1, keepdim=True)
    _check_peak(peak, clean)
    # Unit peak: squares neither overflow nor vanish, whatever the magnitude of a token.
    inverse_peak = _inverse(peak)
    unit = rotated * inverse_peak
    step = native.fit_steps(unit, bits=bits, num_refinements=NUM_REFINEMENTS)
    if step is None:
        step = _fit_step(unit, bits=bits)
    scale = quantise_affine_u8((step * peak).squeeze(-1), live)
    found = native.encode_steps(
        unit, inverse_peak, scale, live, bits=bits, coarse=COARSE_STEP[bits]
    )
    if found is not None:
        return ValueCode(found[0], AffineCode(found[1], scale.lo, scale.step), bits)
    return _encode_steps(unit, inverse_peak, scale, live, bits=bits)


def _encode_steps(
    unit: Tensor, inverse_peak: Tensor, scale: AffineCode, live: Tensor, *, bits: int
) -> ValueCode:
    """Codes at the step of each scale code, or a neighbour's; as ``native.encode_steps`` does."""
    half = float(1 << (bits - 1))
    is_coarse = _is_coarse(scale, COARSE_STEP[bits])
    if bool(is_coarse.any()):
        scale = _choose_neighbour(unit, inverse_peak, scale, is_coarse, half)
    centred = _snap(unit, scale.dequantise()[..., None] * inverse_peak, half)
    codes = (centred + _midpoint(bits)).masked_fill(~live[..., None], 0.0).to(torch.uint8)
    scale_code = scale.code.masked_fill(~live, 0)
    return ValueCode(codes, AffineCode(scale_code, scale.lo, scale.step), bits)


def _check_peak(peak: Tensor, values: Tensor) -> None:
    """Raise if rotated values, of which ``peak`` are the largest, are not finite."""
    if not bool(peak.isfinite().all()):
        check_finite(values, name="values")
        raise ValueError(f"rotated values exceed float32, largest is {values.abs().max().item()}")


def recode_values(values: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Values as readers of several widths would see them, without codes; waits for no device.

    Args:
        values: ``[..., tokens, head_dim]`` float32, finite (checked on a CPU, where nothing waits),
            one page per leading index.
        widths: Widths of a code, in any order.

    Returns:
        ``[len(widths), ..., tokens, head_dim]`` float32: what ``encode_values`` with
        ``unbiased_scale`` and ``decode_values`` give.
    """
    rotated = rotate(values)
    peak = torch.linalg.vector_norm(rotated, ord=float("inf"), dim=-1, keepdim=True)
    if not values.is_cuda:
        _check_peak(peak, values)
    inverse_peak = _inverse(peak)
    unit = rotated * inverse_peak

    def spread(numbers: list[float]) -> Tensor:
        return constant(tuple(numbers), device=values.device).view(-1, *(1,) * values.dim())

    half = spread([float(1 << (bits - 1)) for bits in widths])
    clipped = tuple(bits for bits in widths if bits in CLIP_RANGE)
    starts = iter(clipped_starts(unit, clipped)) if clipped else iter(())
    whole = torch.ones_like(unit[..., :1])
    step = torch.stack(
        [next(starts) if bits in CLIP_RANGE else whole / _midpoint(bits) for bits in widths]
    )
    for _ in range(NUM_REFINEMENTS):
        step = _least_squares(unit, step, half)
    scale = quantise_affine_u8((step * peak).squeeze(-1), is_checked=True)
    coarse = spread([COARSE_STEP[bits] for bits in widths])[..., 0]
    scale = _choose_neighbour(unit, inverse_peak, scale, _is_coarse(scale, coarse), half)
    steps = scale.dequantise()[..., None]
    centred = _snap(unit, steps * inverse_peak, half)
    gain = spread([READ_GAIN[bits] for bits in widths])
    return unrotate(centred * (gain * steps))


def unbiased_scale(scale: AffineCode, bits: int) -> AffineCode:
    """The steps of ``encode_values`` as a reader shall see them; see ``READ_GAIN``."""
    gain = READ_GAIN[bits]
    return AffineCode(scale.code, scale.lo * gain, scale.step * gain)


def decode_values(code: ValueCode) -> Tensor:
    """Rebuild dense values; for tests and fallbacks, not for decoding attention.

    Args:
        code: Coded values.

    Returns:
        ``[..., tokens, head_dim]`` float32 in the original basis; masked tokens are undefined.
    """
    centred = code.codes.float() - code.midpoint
    return unrotate(centred * code.scale.dequantise()[..., None])


def value_contribution(weights: Tensor, code: ValueCode) -> Tensor:
    """Sum weighted values without decoding them.

    ``out = sum_t p_t * s_t * code_t - (2**bits - 1) / 2 * sum_t p_t * s_t``. The result stays in
    the rotated basis, so that partial outputs merge first and ``unrotate`` runs once.

    Args:
        weights: ``[..., queries, tokens]`` float32 softmax weights ``p_t``, 0 for masked tokens.
        code: Coded values, ``[..., tokens, head_dim]``.

    Returns:
        ``[..., queries, head_dim]`` float32, rotated.
    """
    folded = weights * code.scale.dequantise()[..., None, :]
    return folded @ code.codes.float() - code.midpoint * folded.sum(dim=-1, keepdim=True)


def _midpoint(bits: int) -> float:
    return ((1 << bits) - 1) / 2


def _inverse(x: Tensor) -> Tensor:
    """Reciprocal, or 0 where there is none in float32."""
    reciprocal = 1.0 / x
    return torch.where(reciprocal.isfinite(), reciprocal, 0.0)


def _snap(unit: Tensor, step: Tensor, half: float | Tensor) -> Tensor:
    """Nearest centred levels: ``code - midpoint`` as float, ``[..., tokens, head_dim]``.

    Args:
        unit: ``[..., tokens, head_dim]``.
        step: ``[..., tokens, 1]``; may have a leading dimension more, one entry per width.
        half: Half the number of levels, or one per width.
    """
    ratio = (unit * _inverse(step)).floor_()
    if isinstance(half, Tensor):
        return ratio.clamp_(-half, half - 1).add_(0.5)
    return ratio.clamp_(-half, half - 1).add_(0.5)


def _fit_step(unit: Tensor, *, bits: int) -> Tensor:
    """Step of least squared error of every token.

    Args:
        unit: ``[..., tokens, head_dim]`` float32 with peak 1 (or 0).
        bits: Width of a code.

    Returns:
        ``[..., tokens, 1]`` float32, relative to the peak.
    """
    if bits in CLIP_RANGE:
        step = clipped_start(unit, bits)
    else:
        step = torch.full_like(unit[..., :1], 1 / _midpoint(bits))
    for _ in range(NUM_REFINEMENTS):
        step = _least_squares(unit, step, float(1 << (bits - 1)))
    return step


def _least_squares(unit: Tensor, step: Tensor, half: float | Tensor) -> Tensor:
    """Best step for the levels ``c`` that ``step`` selects: ``<x, c> / <c, c>``."""
    centred = _snap(unit, step, half)
    refined: Tensor = torch.linalg.vecdot(unit, centred) / torch.linalg.vecdot(centred, centred)
    return refined[..., None]


def _is_coarse(scale: AffineCode, coarse: float | Tensor) -> Tensor:
    """``[..., tokens]`` bool: where a page's scale step is coarse against a token's own step."""
    return scale.step[..., None] > coarse * scale.dequantise()


def _choose_neighbour(
    unit: Tensor, inverse_peak: Tensor, scale: AffineCode, is_coarse: Tensor, half: float | Tensor
) -> AffineCode:
    """Move scale codes that are coarse by at most one where that lowers the error after snapping.

    The nearest step is best for fixed codes only: where the page's step is coarse against a
    token's own, clipping costs more than granularity and the next code up can win.
    """
    best_code = scale.code
    best_error = torch.full(best_code.shape, float("inf"), device=unit.device)
    for offset in (0, -1, 1):
        code = (scale.code.to(torch.int16) + offset).clamp_(0, 255).to(torch.uint8)
        step = AffineCode(code, scale.lo, scale.step).dequantise()[..., None] * inverse_peak
        residual = _snap(unit, step, half).mul_(step).sub_(unit)
        error = torch.linalg.vecdot(residual, residual)
        is_better = error < best_error
        best_code = torch.where(is_better, code, best_code)
        best_error = torch.where(is_better, error, best_error)
    return AffineCode(torch.where(is_coarse, best_code, scale.code), scale.lo, scale.step)
