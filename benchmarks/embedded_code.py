# SPDX-License-Identifier: Apache-2.0
"""Key and value codes whose tiers are prefixes of one code; a study, not a format.

Every plane has a chain of three stages of four bits. A stage has 16 points, and four coarse points
that the upper two bits of its code pick, so that bits come in units of two: with ``u`` units a
plane reads the sum of its whole stages and, where ``u`` is odd, a coarse point of the next one. A
tier says how many units each plane has; units only grow from tier to tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.rotation_lloyd import gaussian_levels
from sphkv.codec.affine import quantise_affine_u8
from sphkv.codec.codebook import fit_points, nearest_point, take_points
from sphkv.codec.hadamard import rotate, unrotate

TIERS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Code bits per key element of the tiers, upwards."""

TIER_WEIGHTS = (3.0, 2.0, 2.0, 0.7, 0.4)
"""What a relative error of each tier counts for in the fit."""

STATES = 7
PAGE_TOKENS = 128
STAGES, LEVELS, GROUPS = 3, 16, 4
_START_WEIGHTS = (0.0, 0.5, 1.0, 0.5, 1.0, 0.3, 0.5)
_FLOOR = (0.0, 0.0005, 0.001, 0.003, 0.01, 0.01, 0.01)
_TINY = 1e-20
_RELAXATION = 1.8

# Squared error of uniform codes of each width, as a part of a value's energy.
_VALUE_ERROR = {2: 0.1117, 3: 0.0324, 4: 0.0086}

# Uniform levels of least squared error once low bits are cut, relative to the midpoints.
_UNIFORM_GAIN = {2: 0.918, 3: 0.991, 4: 1.008}


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Points of some planes in the query metric, counted from the plane's mean.

    Attributes:
        fine: ``[planes, 3, 16, 2]``.
        coarse: ``[planes, 3, 4, 2]``, picked by ``code // 4``.
    """

    fine: Tensor
    coarse: Tensor

    def rows(self, at: slice) -> Chain:
        """Some of the planes."""
        return Chain(self.fine[at], self.coarse[at])

    def prefixes(self, codes: Tensor) -> list[Tensor]:
        """Points ``[planes, tokens, 2]`` of all seven states; ``codes [3, planes, tokens]``."""
        total = torch.zeros(*codes.shape[1:], 2, device=codes.device)
        states = [total]
        for stage in range(STAGES):
            code = codes[stage]
            states.append(total + take_points(self.coarse[:, stage], code // GROUPS))
            total = total + take_points(self.fine[:, stage], code)
            states.append(total)
        return states


def _weighted_nearest(x: Tensor, prefixes: list[Tensor], weight: Tensor) -> Tensor:
    """Code that minimises ``sum_j weight_j |x - prefix_j|^2``.

    Args:
        x: ``[planes, tokens, 2]``.
        prefixes: ``[planes, codes, 2]`` each; the number of codes is a power of two.
        weight: ``[planes, prefixes]``.

    Returns:
        ``[planes, tokens]`` int64.
    """
    stacked = torch.stack(prefixes, 1)
    pull = (weight[..., None, None] * stacked).sum(1)
    offset = (weight[..., None] * stacked.square().sum(-1)).sum(1, keepdim=True)
    total = weight.sum(1)[:, None, None]
    square, codes = x.square().sum(-1, keepdim=True), pull.shape[1]
    number = torch.arange(codes, dtype=torch.int32, device=x.device)
    step = max(1, (1 << (29 if x.is_cuda else 19)) // (x.shape[1] * codes))
    found = []
    for at in range(0, len(x), step):
        part = slice(at, at + step)
        cost = torch.baddbmm(offset[part], x[part], pull[part].mT, alpha=-2)
        cost += total[part] * square[part]
        # floats of one sign order like their bits; the code rides in the lowest of them
        key = cost.clamp_(min=1e-30).view(torch.int32)
        key &= -codes
        key |= number
        found.append((key.amin(-1) & (codes - 1)).long())
    return torch.cat(found)


def encode_chain(x: Tensor, chain: Chain, weight: Tensor) -> Tensor:
    """Codes ``[3, planes, tokens]`` of least weighted error over the states.

    The first two stages are searched together over 256 codes, the third given those.

    Args:
        x: ``[planes, tokens, 2]`` in the metric, minus the mean.
        chain: The points.
        weight: ``[planes, 7]`` what the error of each state counts for.
    """
    fine, coarse = chain.fine, chain.coarse.repeat_interleave(GROUPS, 2)
    first, second = (part.repeat_interleave(LEVELS, 1) for part in (coarse[:, 0], fine[:, 0]))
    third, fourth = (second + part.repeat(1, LEVELS, 1) for part in (coarse[:, 1], fine[:, 1]))
    deep = weight[:, 4:].sum(1, keepdim=True)
    joint = _weighted_nearest(
        x, [first, second, third, fourth], torch.cat([weight[:, 1:4], deep], 1)
    )
    one, two = joint // LEVELS, joint % LEVELS
    rest = x - take_points(fine[:, 0], one) - take_points(fine[:, 1], two)
    three = _weighted_nearest(rest, [coarse[:, 2], fine[:, 2]], weight[:, 5:] + 1e-12)
    return torch.stack([one, two, three])


def state_errors(x: Tensor, chain: Chain, codes: Tensor) -> Tensor:
    """Mean squared error of every state, ``[planes, 7]`` float64."""
    errors = [(x - point).square().sum(-1).mean(1) for point in chain.prefixes(codes)]
    return torch.stack(errors, 1).double()


def _means(x: Tensor, index: Tensor, old: Tensor) -> Tensor:
    """Cluster means ``[planes, levels, 2]``; clusters without samples keep their point."""
    rows, levels = old.shape[:2]
    flat = (index + levels * torch.arange(rows, device=x.device)[:, None]).flatten()
    mass = torch.bincount(flat, minlength=rows * levels).view(rows, levels, 1)
    sums = [torch.bincount(flat, c.flatten(), minlength=rows * levels) for c in x.unbind(-1)]
    mean = torch.stack(sums, -1).view(rows, levels, 2).to(x.dtype) / mass.clamp(min=1)
    return torch.where(mass > 0, mean, old)


def _start(x: Tensor) -> Chain:
    """Stage by stage: 16 points, and the means of their groups of four."""
    weight = torch.ones_like(x[..., 0])
    # points that were split from one of four differ by multiples of four
    order = torch.arange(LEVELS, device=x.device).view(GROUPS, -1).T.flatten()
    fine, coarse = [], []
    for _ in range(STAGES):
        points = fit_points(x, weight, levels=LEVELS, iterations=8)[LEVELS][:, order].contiguous()
        code = nearest_point(x, points)
        fine.append(points)
        coarse.append(_means(x, code // GROUPS, points[:, ::GROUPS]))
        x = x - take_points(points, code)
    return Chain(torch.stack(fine, 1), torch.stack(coarse, 1))


def _refine(x: Tensor, chain: Chain, weight: Tensor, rounds: int) -> Chain:
    """Alternate between codes and points; each point is the mean of what it has to explain.

    All rounds but the last go farther than that, so that fewer are needed.
    """
    share = [weight[:, state, None, None] for state in range(STATES)]
    for left in reversed(range(rounds)):
        codes = encode_chain(x, chain, weight)
        fine, coarse = list(chain.fine.unbind(1)), list(chain.coarse.unbind(1))
        rest = x
        for stage in range(STAGES):
            code = codes[stage]
            coarse[stage] = _means(rest, code // GROUPS, coarse[stage])
            # states beyond this stage also have what later stages add
            later, mass = torch.zeros_like(rest), share[2 * stage + 2]
            added = torch.zeros_like(rest)
            for other in range(stage + 1, STAGES):
                half = added + take_points(coarse[other], codes[other] // GROUPS)
                added = added + take_points(fine[other], codes[other])
                odd, even = share[2 * other + 1], share[2 * other + 2]
                later = later + odd * half + even * added
                mass = mass + odd + even
            fine[stage] = _means(rest - later / mass.clamp(min=_TINY), code, fine[stage])
            rest = rest - take_points(fine[stage], code)
        step = _RELAXATION if left else 1.0
        chain = Chain(
            torch.lerp(chain.fine, torch.stack(fine, 1), step),
            torch.lerp(chain.coarse, torch.stack(coarse, 1), step),
        )
    return chain


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedCode:
    """Chains of all planes of a model and the units that tiers give them.

    Attributes:
        chain: Points of ``heads * planes`` planes.
        weight: ``[heads * planes, 7]`` of the encoder that codes for all tiers.
        units: ``[tiers, heads * planes]`` int64.
    """

    chain: Chain
    weight: Tensor
    units: Tensor


def fit_embedded(x: Tensor, num_planes: int) -> EmbeddedCode:
    """Joint fit of points and units.

    Args:
        x: ``[heads * planes, tokens, 2]`` samples in the metric, minus their mean.
        num_planes: Planes of a head.
    """
    samples = x[:, 1::2].contiguous()
    few = samples[:, ::2].contiguous()
    equal = (1.0,) * len(TIERS)
    chain = _start(few)
    start = x.new_tensor(_START_WEIGHTS)
    errors = state_errors(few, chain, encode_chain(few, chain, start.expand(len(x), -1)))
    chain = _refine(few, chain, (start / errors.clamp(min=_TINY)).float(), 5)
    weight = (start / errors.clamp(min=_TINY)).float()
    for data, rounds, tier_weights in (
        (few, 5, equal),
        (samples, 5, equal),
        (samples, 0, TIER_WEIGHTS),
        (x, 8, TIER_WEIGHTS),
    ):
        errors = state_errors(data, chain, encode_chain(data, chain, weight))
        units = allocate_units(errors.view(-1, num_planes, STATES))
        weight = _weights_by_use(units, errors.view(-1, num_planes, STATES), tier_weights)
        chain = _refine(data, chain, weight, rounds)
    return EmbeddedCode(chain, weight, units.flatten(1))


def _weights_by_use(units: Tensor, errors: Tensor, tier_weights: tuple[float, ...]) -> Tensor:
    """Weights ``[heads * planes, 7]``: each tier's, over the head's error at that tier.

    States that no tier uses get a hundredth of the largest weight and less, which only shapes them.
    """
    weight = torch.zeros_like(errors)
    for chosen, factor in zip(units, tier_weights, strict=True):
        total = errors.gather(2, chosen[..., None]).sum((1, 2), keepdim=True)
        share = (factor / total.clamp(min=_TINY)).expand(-1, chosen.shape[1], 1).contiguous()
        weight.scatter_add_(2, chosen[..., None], share)
    floor = weight.amax(2, keepdim=True) * weight.new_tensor(_FLOOR)
    return torch.maximum(weight, floor).flatten(0, 1).float()


def allocate_units(errors: Tensor) -> Tensor:
    """Units of each plane at every tier, ``[tiers, heads, planes]``, each tier on top of the last.

    Halves of a stage are stored in pairs of planes: those that open at a tier are even in number,
    and so are those of every earlier tier that close. Exact dynamic programming over planes.

    Args:
        errors: ``[heads, planes, 7]`` by state.
    """
    heads, planes, _ = errors.shape
    units = torch.zeros(heads, planes, dtype=torch.int64, device=errors.device)
    opened, chosen = torch.full_like(units, -1), []
    for tier, bits in enumerate(TIERS):
        new = _allocate_tier(errors, units, opened, tier, round(bits * planes))
        stays = (new == units) & (new % 2 == 1)
        opened = torch.where(new % 2 == 1, torch.where(stays, opened, tier), -1)
        units = new
        chosen.append(units)
    return torch.stack(chosen)


def _parity(units: Tensor | int, before: Tensor, opened: Tensor, tier: int) -> Tensor:
    """Bits that flip when a plane goes from ``before`` to ``units``: what closes, what opens."""
    grows = before < units
    closes = grows & (before % 2 == 1)
    opens = grows & (torch.as_tensor(units, device=before.device) % 2 == 1)
    return torch.where(closes, 1 << opened.clamp(min=0), 0) ^ torch.where(opens, 1 << tier, 0)


def _allocate_tier(
    errors: Tensor, before: Tensor, opened: Tensor, tier: int, budget: int
) -> Tensor:
    """Units ``[heads, planes]`` of one tier; the state is (units spent, parities)."""
    heads, planes, _ = errors.shape
    device, masks = errors.device, 2 << tier
    best = torch.full((heads, budget + 1, masks), torch.inf, dtype=torch.float64, device=device)
    best[:, 0, 0] = 0.0
    mask = torch.arange(masks, device=device)
    choices = []
    for plane in range(planes):
        candidates = []
        for state in range(STATES):
            moved = torch.full_like(best, torch.inf)
            if state <= budget:
                moved[:, state:] = best[:, : budget + 1 - state]
            flip = _parity(state, before[:, plane], opened[:, plane], tier)
            source = (mask ^ flip[:, None])[:, None].expand(-1, budget + 1, -1)
            cost = errors[:, plane, state].masked_fill(before[:, plane] > state, torch.inf)
            candidates.append(moved.gather(2, source) + cost[:, None, None])
        best, choice = torch.stack(candidates).min(0)
        choices.append(choice.to(torch.uint8))
    if bool(best[:, budget, 0].isinf().any()):
        raise ValueError(f"{budget} units cannot be spread over {planes} planes")
    units, row = torch.zeros_like(before), torch.arange(heads, device=device)
    spent, parity = torch.full_like(row, budget), torch.zeros_like(row)
    for plane in reversed(range(planes)):
        units[:, plane] = choices[plane][row, spent, parity].long()
        parity = parity ^ _parity(units[:, plane], before[:, plane], opened[:, plane], tier)
        spent = spent - units[:, plane]
    return units


def by_page(x: Tensor) -> Tensor:
    """Scalars ``[..., tokens]`` as a page's 8-bit affine code leaves them."""
    parts = [quantise_affine_u8(part).dequantise() for part in x.split(PAGE_TOKENS, -1)]
    return torch.cat(parts, -1)


class NestedValues:
    """Four-bit value codes whose upper two and three bits are codes as well, one scale per token.

    Attributes:
        levels: Normalised levels by width: uniform ones, or those of least error for a Gaussian.
        gains: Factor by width that makes a reader's value unbiased; set by ``calibrate``.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        fine = gaussian_levels(4) if kind == "lloyd" else torch.arange(16) - 7.5
        edges = (fine[1:] + fine[:-1]) / 2
        self._edges = edges.to(device)
        self.levels = {bits: _merged(fine, edges, bits, kind).to(device) for bits in (2, 3, 4)}
        top = float(fine[-1])
        span = (0.7, 1.25) if kind == "lloyd" else (0.9 / top, 3.2 / top)
        self._scales = torch.linspace(*span, 27).tolist()
        self.gains = {2: 1.0, 3: 1.0, 4: 1.0}

    def calibrate(self, values: Tensor) -> None:
        """Gains that keep values ``[..., tokens, head_dim]`` unbiased along themselves."""
        self.gains = {2: 1.0, 3: 1.0, 4: 1.0}
        for bits in self.gains:
            read = self.read(values, bits).double()
            along = float((values.double() * read).sum())
            self.gains[bits] = float(values.double().square().sum()) / along

    def read(self, values: Tensor, bits: int) -> Tensor:
        """Values ``[..., tokens, head_dim]`` coded with four bits and cut to ``bits``."""
        rotated = rotate(values.float())
        rms = rotated.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        unit = rotated / rms
        best, scale = torch.full_like(rms, torch.inf), torch.ones_like(rms)
        for factor in self._scales:
            code = torch.bucketize(unit / factor, self._edges)
            cost = torch.zeros_like(rms)
            for width, error in _VALUE_ERROR.items():
                rest = unit - self.levels[width][code >> (4 - width)] * factor
                cost += rest.square().sum(-1, keepdim=True) / error
            scale = torch.where(cost < best, factor, scale)
            best = torch.minimum(best, cost)
        scale = by_page((scale * rms).squeeze(-1))[..., None]
        code = torch.bucketize(rotated / scale.clamp(min=1e-30), self._edges)
        level = self.levels[bits][code >> (4 - bits)]
        return unrotate(level * scale * self.gains[bits])


def _merged(fine: Tensor, edges: Tensor, bits: int, kind: str) -> Tensor:
    """Levels of the upper bits: midpoints of merged cells, or their means under a Gaussian."""
    if kind == "uniform":
        return fine.view(2**bits, -1).mean(1) * _UNIFORM_GAIN[bits]
    ends = torch.cat([edges.new_tensor([-30.0]), edges, edges.new_tensor([30.0])]).double()
    normal = torch.distributions.Normal(ends.new_tensor(0.0), ends.new_tensor(1.0))
    mass = normal.cdf(ends).diff().view(2**bits, -1).sum(1)
    first = -normal.log_prob(ends).exp().diff().view(2**bits, -1).sum(1)
    return (first / mass).float()
