# SPDX-License-Identifier: Apache-2.0
"""Points that a plane's angle code selects, and how many bits each plane deserves.

A plane of a unit key is a point ``z = cos(psi) * (cos(theta), sin(theta))``: elevation and
pre-RoPE azimuth together. Codebooks live in that plane, so amplitude and phase are quantised
jointly. Errors are measured in the metric that queries see (see docs/math/codebooks.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sphkv.codec import native_points
from sphkv.core.devices import native_kernels

CELL_BITS = (0, 2, 4, 6, 8, 10, 12)
"""Bits a plane may get: a 16-point codebook for every four of them, and one of four points for two
more; their points add."""

SLOT_LEVELS = 16
PAIR_LEVELS = 4
_SPLIT_SCALE = 0.7
_RELAXATION = 1.9
_SWEEPS = 3
_TRIAL_ROUNDS = 2
_START_ITERATIONS = 3
_TINY = 1e-20
# Scores that exist at a time, on a CPU and elsewhere.
_CACHED_SCORES, _DEVICE_SCORES = 1 << 19, 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class PlaneCodebooks:
    """Fitted points of every plane of one layer, for every cell class.

    Attributes:
        metric_root: ``[heads, planes, 2, 2]`` square root of the query metric.
        mean: ``[heads, planes, 2]`` the 0-bit cell.
        pair: ``[heads, planes, 4, 2]`` the 2-bit cell.
        single: ``[heads, planes, 16, 2]`` the 4-bit cell.
        joint: ``[heads, planes, 16, 2]`` the first stage of the 6-bit cell.
        halves: ``[heads, planes, 2, 4, 2]`` four points that are added: to ``joint`` in the 6-bit
            cell, to two of ``stages`` in the 10-bit cell.
        stages: ``[heads, planes, 3, 16, 2]`` additive stages; 8 and 10 bits use two, 12 bits all
            three.
        distortion: ``[heads, planes, 7]`` expected query-weighted error by cell class.
    """

    metric_root: Tensor
    mean: Tensor
    pair: Tensor
    single: Tensor
    joint: Tensor
    halves: Tensor
    stages: Tensor
    distortion: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)

    def to(self, device: torch.device | str) -> PlaneCodebooks:
        """The same codebooks on another device."""
        return PlaneCodebooks(*(getattr(self, name).to(device) for name in self.__slots__))

    def layer(self, layer: int) -> PlaneCodebooks:
        """One layer of codebooks that were stacked over layers."""
        return PlaneCodebooks(*(getattr(self, name)[layer] for name in self.__slots__))

    @classmethod
    def join(cls, parts: Sequence[PlaneCodebooks]) -> PlaneCodebooks:
        """Heads of several layers, as if they were those of one."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(each, name) for each in parts]) for name in cls.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class AngleCodebook:
    """Slots of one layer at one tier: what each stored nibble means.

    A single slot serves one plane with 16 points. A pair slot serves two planes, four points
    each: its low two bits pick the first plane's point, its high two bits the second's. Single
    slots come first. A plane may own several single slots and half a pair slot; their points add.

    Attributes:
        plane_bits: ``[heads, planes]`` int64 cell class of each plane.
        num_pairs: ``[heads]`` int64 number of pair slots; they are the last ones.
        slot_plane: ``[heads, slots, 2]`` int64; a single slot repeats its plane.
        points: ``[heads, slots, 2, 16, 2]`` float32 by (plane of the slot, code); the second
            half of a single slot is zero.
        constant: ``[heads, planes, 2]`` float32; non-zero only where a plane has no bits.
        metric_root: ``[heads, planes, 2, 2]`` for encoding.
    """

    plane_bits: Tensor
    num_pairs: Tensor
    slot_plane: Tensor
    points: Tensor
    constant: Tensor
    metric_root: Tensor

    @property
    def num_slots(self) -> int:
        """Nibbles stored per key."""
        return int(self.slot_plane.shape[1])

    @property
    def num_planes(self) -> int:
        """Planes of a head."""
        return int(self.plane_bits.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)

    def to(self, device: torch.device | str) -> AngleCodebook:
        """The same codebook on another device."""
        return AngleCodebook(*(getattr(self, name).to(device) for name in self.__slots__))

    def rows(self, head_ids: Tensor) -> AngleCodebook:
        """One row per entry of ``head_ids``, as if each were a head of its own."""
        return AngleCodebook(*(getattr(self, name)[head_ids] for name in self.__slots__))

    def split(self, num_heads: int) -> list[AngleCodebook]:
        """Codebooks of so many heads each, which keep no memory of their own."""
        parts = (getattr(self, name).split(num_heads) for name in self.__slots__)
        return [AngleCodebook(*part) for part in zip(*parts, strict=True)]


def point_kernels_for(x: Tensor) -> ModuleType | None:
    """What finds and fits points where ``x`` is, in few calls; None leaves it to torch."""
    if x.is_cuda:
        return _gpu_kernels()
    is_served = x.device.type == "cpu" and not x.requires_grad and x.dtype == torch.float32
    return native_points if is_served and native_kernels() is not None else None


@functools.cache
def _gpu_kernels() -> ModuleType | None:
    try:
        from sphkv.codec import point_kernels
    except ImportError:
        return None
    return point_kernels


def nearest_point(x: Tensor, points: Tensor) -> Tensor:
    """Index of the closest point; on a CPU to within a relative 2**-15 of its squared distance.

    Args:
        x: ``[n, tokens, 2]`` float32.
        points: ``[n, levels, 2]`` float32; ``levels`` is a power of two up to 256.

    Returns:
        ``[n, tokens]`` int64.
    """
    if x.is_cuda and (kernels := point_kernels_for(x)) is not None:
        nearest: Tensor = kernels.find_nearest(x, points)
        return nearest
    u, v = x.unbind(-1)
    left = torch.stack([u, v, u * u + v * v, torch.ones_like(u)], -1)
    u, v = points.unbind(-1)
    right = torch.stack([-2 * u, -2 * v, torch.ones_like(u), u * u + v * v], -1)
    rows, tokens, _ = x.shape
    # scores that stay in a processor's cache are ranked several times faster
    most = _DEVICE_SCORES if x.is_cuda else _CACHED_SCORES
    step = max(1, most // max(1, tokens * points.shape[1]))
    if step >= rows:
        return _smallest(torch.bmm(left, right.mT))
    parts = zip(left.split(step), right.split(step), strict=True)
    return torch.cat([_smallest(torch.bmm(one, other.mT)) for one, other in parts])


def find_nearest(x: Tensor, points: Tensor) -> Tensor:
    """``nearest_point`` in native code where that is there; no reference for native encoders."""
    if (kernels := point_kernels_for(x)) is None:
        return nearest_point(x, points)
    nearest: Tensor = kernels.find_nearest(x, points)
    return nearest


def _smallest(distance: Tensor) -> Tensor:
    """Index of the smallest entry ``[n, tokens]`` of ``distance [n, tokens, levels]``, which goes.

    Floats of one sign order like their bits, so the index rides in the lowest bits and one plain
    minimum finds it: several times faster than argmin over a short dimension.
    """
    levels = distance.shape[-1]
    key = distance.abs_().view(torch.int32)
    key &= -levels
    key |= torch.arange(levels, dtype=torch.int32, device=key.device)
    return (key.amin(-1) & (levels - 1)).long()


def take_points(points: Tensor, index: Tensor) -> Tensor:
    """Gather ``[n, levels, 2]`` points by ``[n, tokens]`` index."""
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))


def sum_points(first: Tensor, second: Tensor) -> Tensor:
    """All sums of two codebooks, code ``levels of the second * first + second``."""
    return (first.unsqueeze(2) + second.unsqueeze(1)).flatten(1, 2)


def _cluster_means(x: Tensor, weight: Tensor, index: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Weight ``[n, levels, 1]`` and column means ``[n, levels, c]`` of each cluster."""
    columns = torch.cat([weight.unsqueeze(-1), weight.unsqueeze(-1) * x], -1)
    count = _one_hot_sums if x.is_cuda else _bin_sums
    mass, sums = count(columns, index, levels).split([1, x.shape[-1]], -1)
    return mass, sums / mass.clamp(min=_TINY)


def _bin_sums(columns: Tensor, index: Tensor, levels: int) -> Tensor:
    """Sums ``[n, levels, c]`` of ``columns [n, tokens, c]`` over clusters ``index [n, tokens]``."""
    rows = len(columns)
    first = levels * torch.arange(rows, device=index.device).unsqueeze(1)
    flat = (index + first).reshape(-1)
    sums = [
        torch.bincount(flat, column.reshape(-1), minlength=rows * levels).reshape(rows, levels)
        for column in columns.unbind(-1)
    ]
    return torch.stack(sums, -1)


def _one_hot_sums(columns: Tensor, index: Tensor, levels: int) -> Tensor:
    """``_bin_sums`` by products: bins of a GPU are waited for, and added to in any order."""
    level = torch.arange(levels, device=index.device).unsqueeze(1)
    step = max(1, _DEVICE_SCORES // max(1, index.shape[1] * levels))
    parts = zip(columns.split(step), index.unsqueeze(1).split(step), strict=True)
    return torch.cat([torch.bmm((own == level).to(some.dtype), some) for some, own in parts])


def _centroids(x: Tensor, weight: Tensor, index: Tensor, old: Tensor) -> Tensor:
    mass, mean = _cluster_means(x, weight, index, old.shape[1])
    return torch.where(mass > 0, mean, old)


def _split(x: Tensor, weight: Tensor, points: Tensor) -> Tensor:
    """Double the points by moving each along its cluster's principal axis."""
    index = nearest_point(x, points)
    offset = x - take_points(points, index)
    moments = torch.stack(
        [offset[..., 0].square(), offset[..., 1].square(), offset[..., 0] * offset[..., 1]], -1
    )
    xx, yy, xy = _cluster_means(moments, weight, index, points.shape[1])[1].unbind(-1)
    angle = 0.5 * torch.atan2(2 * xy, xx - yy)
    spread = ((xx + yy) / 2 + (((xx - yy) / 2).square() + xy.square()).sqrt()).sqrt()
    step = _SPLIT_SCALE * spread.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1)
    return torch.cat([points - step, points + step], 1)


def fit_points(x: Tensor, weight: Tensor, *, levels: int, iterations: int) -> dict[int, Tensor]:
    """Lloyd's algorithm in the plane, grown by splitting; deterministic.

    Args:
        x: ``[n, tokens, 2]`` samples of n independent planes.
        weight: ``[n, tokens]`` weight of each sample.
        levels: Power of two, points wanted at the end.
        iterations: Lloyd steps for codebooks that are used; others are only a start.

    Returns:
        Points ``[n, k, 2]`` for every power of two ``k`` up to ``levels``.
    """
    points = (weight.unsqueeze(-1) * x).sum(1, keepdim=True) / weight.sum(1)[:, None, None]
    fitted = {1: points}
    while points.shape[1] < levels:
        is_used = 2 * points.shape[1] in (PAIR_LEVELS, levels)
        points = _grow(x, weight, points, iterations if is_used else _START_ITERATIONS)
        fitted[points.shape[1]] = points
    return fitted


def _grow(x: Tensor, weight: Tensor, points: Tensor, rounds: int) -> Tensor:
    """Twice as many points, after so many Lloyd steps."""
    if (kernels := point_kernels_for(x)) is not None:
        grown: Tensor = kernels.grow_points(x, weight, points, rounds, _SPLIT_SCALE)
        return grown
    points = _split(x, weight, points)
    for _ in range(rounds):
        points = _centroids(x, weight, nearest_point(x, points), points)
    return points


def _lloyd_1d(x: Tensor, weight: Tensor, *, levels: int, iterations: int = 20) -> Tensor:
    """Scalar Lloyd-Max levels ``[n, levels]`` of ``x [n, tokens]``."""
    ordered, order = x.sort(1)
    weight = weight.gather(1, order).double()
    tokens = x.shape[1]
    zero = torch.zeros(x.shape[0], 1, dtype=torch.float64, device=x.device)
    mass_before = torch.cat([zero, weight.cumsum(1)], 1)
    sum_before = torch.cat([zero, (weight * ordered).cumsum(1)], 1)
    quantile = (torch.arange(levels, device=x.device) + 0.5) / levels * (tokens - 1)
    points = ordered[:, quantile.long()]
    for _ in range(iterations):
        edges = torch.searchsorted(ordered, ((points[:, 1:] + points[:, :-1]) / 2).contiguous())
        first = torch.zeros_like(edges[:, :1])
        bounds = torch.cat([first, edges, first + tokens], 1)
        mass = mass_before.gather(1, bounds).diff(dim=1)
        mean = sum_before.gather(1, bounds).diff(dim=1) / mass.clamp(min=_TINY)
        points = torch.where(mass > 0, mean.to(x.dtype), points).sort(1).values
    return points


def _principal_stages(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two additive codebooks: Lloyd-Max levels along each principal axis of the samples."""
    share = (weight / weight.sum(1, keepdim=True)).unsqueeze(-1)
    mean = (share * x).sum(1, keepdim=True)
    offset = x - mean
    cov = torch.bmm((share * offset).transpose(1, 2), offset)
    axes = eigen_2x2(cov)[1]  # [n, 2, 2], columns
    along = torch.bmm(offset, axes)
    both = torch.cat([along[..., 0], along[..., 1]])
    minor, major = _lloyd_1d(both, weight.repeat(2, 1), levels=SLOT_LEVELS).chunk(2)
    first = major.unsqueeze(-1) * axes[:, None, :, 1] + mean
    return first, minor.unsqueeze(-1) * axes[:, None, :, 0]


def _alternate(
    x: Tensor, weight: Tensor, stages: tuple[Tensor, Tensor], iterations: int
) -> tuple[Tensor, Tensor]:
    """Fit each stage to what the other leaves over, in turn; both half-steps lower the error."""
    if (kernels := point_kernels_for(x)) is not None:
        fitted: tuple[Tensor, Tensor] = kernels.alternate_stages(x, weight, stages, iterations)
        return fitted
    first, second = stages
    b = nearest_point(x - take_points(first, nearest_point(x, first)), second)
    for _ in range(iterations):
        rest = x - take_points(second, b)
        a = nearest_point(rest, first)
        first = _centroids(rest, weight, a, first)
        rest = x - take_points(first, a)
        b = nearest_point(rest, second)
        second = _centroids(rest, weight, b, second)
    return first, second


def _refine_sums(
    x: Tensor, weight: Tensor, stages: tuple[Tensor, Tensor], rounds: int
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm over all sums of two stages, searched as the encoder does.

    Given the codes, both stages follow from the masses and sums of the joint clusters. All rounds
    but the last go farther than to that optimum: the next assignment then changes more, and about
    half as many rounds are needed.
    """
    if (kernels := point_kernels_for(x)) is not None:
        fitted: tuple[Tensor, Tensor] = kernels.refine_stages(
            x, weight, stages, rounds, sweeps=_SWEEPS, relaxation=_RELAXATION
        )
        return fitted
    first, second = stages
    levels, count = second.shape[1], first.shape[1] * second.shape[1]
    for left in reversed(range(rounds)):
        joint = nearest_point(x, sum_points(first, second))
        mass, mean = _cluster_means(x, weight, joint, count)
        mass = mass.reshape(len(x), -1, levels)
        sums = mass.unsqueeze(-1) * mean.reshape(len(x), -1, levels, 2)
        one, two = first, second
        for _ in range(_SWEEPS):
            one = _explain_rest(mass, sums, two, one)
            two = _explain_rest(mass.mT, sums.transpose(1, 2), one, two)
        step = _RELAXATION if left else 1.0
        first, second = torch.lerp(first, one, step), torch.lerp(second, two, step)
    return first, second


def _explain_rest(mass: Tensor, sums: Tensor, other: Tensor, old: Tensor) -> Tensor:
    """Points of one stage given the other's; ``mass [n, own, other]``, ``sums [..., 2]``."""
    own = mass.sum(2, keepdim=True)
    return torch.where(own > 0, (sums.sum(2) - mass @ other) / own.clamp(min=_TINY), old)


def _fit_sums(
    x: Tensor, weight: Tensor, single: Tensor, second: Tensor, options: CodebookFit
) -> tuple[Tensor, Tensor]:
    """Two stages of 16 points whose 256 sums fit the samples.

    Clouds that fill an ellipse are fitted best from a grid along their principal axes, bent and
    clustered ones from 16 points and those of the rest. Both are tried on half of the samples, and
    each plane keeps what served it better.

    Args:
        x: ``[n, tokens, 2]``.
        weight: ``[n, tokens]``.
        single: ``[n, 16, 2]`` points of the 4-bit cell.
        second: ``[n, 16, 2]`` points of what it leaves over.
        options: Effort.
    """
    some, some_w = x[:, ::2].contiguous(), weight[:, ::2].contiguous()
    grid = _alternate(some, some_w, _principal_stages(some, some_w), options.iterations)
    grid = _refine_sums(some, some_w, grid, _TRIAL_ROUNDS)
    rest = _refine_sums(some, some_w, (single, second), _TRIAL_ROUNDS)
    errors = [_error(some, some_w, nearest_sums(some, *start)) for start in (grid, rest)]
    is_grid = (errors[0] < errors[1])[:, None, None]
    start = torch.where(is_grid, grid[0], rest[0]), torch.where(is_grid, grid[1], rest[1])
    return _refine_sums(x, weight, start, options.refinements)


def nearest_sums(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The sum of a point of each stage that is nearest to ``x [n, tokens, 2]``."""
    sums = sum_points(first, second)
    return take_points(sums, find_nearest(x, sums))


def _error(x: Tensor, weight: Tensor, approximation: Tensor) -> Tensor:
    return (weight * (x - approximation).square().sum(-1)).sum(1) / weight.sum(1)


@dataclass(frozen=True, slots=True)
class CodebookFit:
    """How much effort goes into the points.

    Attributes:
        iterations: Lloyd steps of the 2-bit and 4-bit cells.
        refinements: Rounds over all sums of two stages.
        stage_tokens: Samples used for the stages; each is compared with 256 sums per round.
    """

    iterations: int = 10
    refinements: int = 3
    stage_tokens: int = 2048

    def __post_init__(self) -> None:
        """Reject efforts that fit nothing."""
        for name in ("iterations", "refinements", "stage_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _fit_rows(x: Tensor, w: Tensor, options: CodebookFit) -> list[Tensor]:
    """Fit independent planes, a share of them in each thread: the steps are short and serial."""
    has_own = x.is_cuda or point_kernels_for(x) is not None
    workers = 1 if has_own else min(torch.get_num_threads(), x.shape[0])
    if workers == 1:
        return list(_fit_some_rows(x, w, options))
    with ThreadPoolExecutor(workers) as pool:
        shares = pool.map(
            lambda rows: _fit_some_rows(rows[0], rows[1], options),
            zip(x.chunk(workers), w.chunk(workers), strict=True),
        )
    return [torch.cat(parts) for parts in zip(*shares, strict=True)]


def _fit_some_rows(x: Tensor, w: Tensor, options: CodebookFit) -> tuple[Tensor, ...]:
    """Points of every cell class of ``x [n, tokens, 2]`` and distortions ``[n, 7]``."""
    grown = fit_points(x, w, levels=SLOT_LEVELS, iterations=options.iterations)
    mean, pair, single = grown[1], grown[PAIR_LEVELS], grown[SLOT_LEVELS]
    stride = -(-x.shape[1] // options.stage_tokens)
    some, some_w = x[:, ::stride].contiguous(), w[:, ::stride].contiguous()
    rest = some - take_points(single, find_nearest(some, single))
    finer = fit_points(rest, some_w, levels=SLOT_LEVELS, iterations=_START_ITERATIONS)
    joint, half = _refine_sums(some, some_w, (single, finer[PAIR_LEVELS]), options.refinements)
    first, second = _fit_sums(some, some_w, single, finer[SLOT_LEVELS], options)
    coarse = nearest_sums(some, first, second)
    rest = some - coarse
    last = fit_points(rest, some_w, levels=SLOT_LEVELS, iterations=options.iterations)
    tail, third = last[PAIR_LEVELS], last[SLOT_LEVELS]
    distortion = torch.stack(
        [
            _error(x, w, mean),
            _error(x, w, take_points(pair, find_nearest(x, pair))),
            _error(x, w, take_points(single, find_nearest(x, single))),
            _error(some, some_w, nearest_sums(some, joint, half)),
            _error(some, some_w, coarse),
            _error(rest, some_w, take_points(tail, find_nearest(rest, tail))),
            _error(rest, some_w, take_points(third, find_nearest(rest, third))),
        ],
        -1,
    )
    return mean, pair, single, joint, half, tail, first, second, third, distortion


def fit_plane_codebooks(
    z: Tensor,
    metric: Tensor,
    options: CodebookFit,
    weight: Tensor | None = None,
) -> PlaneCodebooks:
    """Fit the points of every plane of one layer.

    Args:
        z: ``[heads, tokens, planes, 2]`` pre-RoPE components of unit keys.
        metric: ``[heads, planes, 2, 2]`` second moment of queries in the key's frame.
        options: Effort of the fit.
        weight: ``[heads, tokens]`` how much an error of each key matters; alike if None.

    Returns:
        Codebooks in key coordinates and the distortion of every cell class.
    """
    heads, tokens, planes, _ = z.shape
    root, inverse = metric_roots(metric)
    x = torch.einsum("hnij,htnj->hnti", root, z).reshape(heads * planes, tokens, 2).contiguous()
    if weight is None:
        weight = torch.ones_like(z[..., 0, 0])
    w = weight[:, None].expand(-1, planes, -1).reshape(heads * planes, tokens).contiguous()
    *fitted, distortion = _fit_rows(x, w, options)

    def in_key_space(points: Tensor) -> Tensor:
        shaped = points.reshape(heads, planes, -1, 2)
        return torch.einsum("hnij,hnkj->hnki", inverse, shaped).contiguous()

    mean, pair, single, joint, half, tail, *stages = (in_key_space(part) for part in fitted)
    return PlaneCodebooks(
        metric_root=root,
        mean=mean[:, :, 0],
        pair=pair,
        single=single,
        joint=joint,
        halves=torch.stack([half, tail], 2),
        stages=torch.stack(stages, 2),
        distortion=distortion.reshape(heads, planes, len(CELL_BITS)),
    )


def metric_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root of a normalised metric, and its inverse.

    The metric is scaled so that its mean trace per head is 2, and its smaller eigenvalue is
    kept above a ten-thousandth of the larger, so that the inverse exists.
    """
    trace = metric.diagonal(dim1=-2, dim2=-1).sum(-1)  # [heads, planes]
    scale = trace.mean(-1).clamp(min=_TINY)[:, None, None, None]
    # a plane that no query ever excites still needs an invertible metric
    identity = torch.eye(2, dtype=metric.dtype, device=metric.device)
    values, vectors = eigen_2x2(2 * metric / scale + 1e-6 * identity)
    values = torch.maximum(values, 1e-4 * values.amax(-1, keepdim=True))
    root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.transpose(-1, -2)
    inverse = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.transpose(-1, -2)
    return root, inverse


def eigen_2x2(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rising eigenvalues ``[..., 2]`` of symmetric matrices ``[..., 2, 2]``, and their vectors.

    In closed form on a device, whose solver would be waited for; a vector's sign means nothing.
    """
    if matrix.device.type == "cpu":
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors
    xx, yy, xy = matrix[..., 0, 0], matrix[..., 1, 1], matrix[..., 0, 1]
    middle, half = (xx + yy) / 2, (xx - yy) / 2
    reach = torch.hypot(half, xy)
    angle = 0.5 * torch.atan2(xy, half)
    cos, sin = angle.cos(), angle.sin()
    # the last column points along the longer axis
    vectors = torch.stack([torch.stack([-sin, cos], -1), torch.stack([cos, sin], -1)], -1)
    return torch.stack([middle - reach, middle + reach], -1), vectors
