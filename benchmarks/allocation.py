# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the controller's decision at scale.

    python benchmarks/allocation.py --level states --device cuda --out states.json
    python benchmarks/allocation.py --level runs --out runs.json

``states`` gives the solver every state as a unit of its own, with losses in half precision.
``runs`` is everything from features to a write contract whose exact bytes fit the budget, at the
granularity the cache uses: scoring, ranking, pricing, solving, byte check. Features are drawn at
random, layer by layer; values are the same in every layer.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from sphkv.cache.config import CacheConfig, ResidencyPlan, RetentionConfig
from sphkv.cache.plan import choose_seal_tier, retention_tiers
from sphkv.cache.retention import page_costs
from sphkv.core.budget import ByteBudget
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import ladder
from sphkv.evaluation.environment import describe_environment
from sphkv.retention.controller import RetentionController
from sphkv.retention.errors import TierErrors
from sphkv.retention.features import TokenFeatures
from sphkv.retention.measure import LayerInput
from sphkv.retention.policy import BlockShape, ControlOptions
from sphkv.retention.pricing import LayerPricer
from sphkv.retention.rows import AttentionRows
from sphkv.retention.solver import TierChoices, allocate_tiers
from sphkv.store.forecast import contract_bytes
from sphkv.store.store import PageStore

HEAD_DIM = 128
SPREAD = 2.0
LARGEST_HALF = 6e4


def draw_layer(config: RetentionConfig, values: torch.Tensor, seed: int) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, _ = values.shape
    pull = torch.exp(3 * torch.randn(heads, tokens, generator=generator)) / tokens**2
    ones = torch.ones(heads, tokens)
    per_head = torch.exp(torch.randn(heads, 1, generator=generator))
    falls = torch.tensor([0.0, *(4.0**-at for at in range(len(config.tiers) - 2)), 0.0])
    errors = TierErrors(*(part * per_head * falls for part in (1.0, 0.01, 0.1, 0.001)))
    features = TokenFeatures(
        mass=pull.sqrt(), energy=pull, shift=pull, radius=ones, value_norm=ones,
        reuse=ones[:, 0], stability=ones[:, 0], output_energy=ones[:, 0],
    )  # fmt: skip
    weight = pull.sqrt()[:, None]
    rows = AttentionRows(
        weight / weight.sum(-1, keepdim=True),
        torch.ones(heads, 1),
        torch.ones(1, tokens, dtype=torch.bool),
    )
    protected = torch.zeros(heads, tokens, dtype=torch.bool)
    protected[:, :16] = protected[:, -16:] = True
    return LayerInput(features, errors, rows, values, protected)


class PeakMemory:
    """Bytes in use at most since the start, on the processor or the accelerator."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self._before = self._peak()

    def _peak(self) -> int:
        if self._device != "cpu":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def extra(self) -> int:
        return self._peak() - self._before


def finish(device: str) -> float:
    """The time once the device has done all it was told."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def allocate_states(geometry: KVGeometry, tokens: int, share: float, device: str) -> dict[str, Any]:
    """The solver alone on single states."""
    sizes = ladder(HEAD_DIM).state_bytes(HEAD_DIM)
    cost = torch.tensor([sizes[0], *sizes[2:]], device=device)
    falls = torch.tensor([1.0, *(4.0**-at / 4 for at in range(len(cost) - 2)), 0.0], device=device)
    warm_up = TierChoices(torch.rand(4096, len(cost), device=device), cost)
    allocate_tiers(warm_up, 4096 * int(cost[2]))
    memory = PeakMemory(device)
    per_layer, generator = geometry.num_kv_heads * tokens, torch.Generator(device)
    units = geometry.num_layers * per_layer
    losses = torch.empty(units, len(cost), device=device, dtype=torch.float16)
    for layer, part in enumerate(losses.split(per_layer)):
        pull = torch.randn(per_layer, generator=generator.manual_seed(layer), device=device)
        for tier in range(len(cost)):
            part[:, tier] = (pull.mul(SPREAD).exp() * falls[tier]).clamp(max=LARGEST_HALF)
    budget = int(share * int(cost[-1]) * units)
    seconds = []
    for _ in range(3):
        began = finish(device)
        found = allocate_tiers(TierChoices(losses, cost), budget)
        seconds.append(finish(device) - began)
    return {
        "states": units,
        "tiers": len(cost),
        "seconds": seconds,
        "used": found.num_bytes / budget,
        "extra_bytes_per_state_and_tier": memory.extra() / losses.numel(),
    }


def allocate_runs(geometry: KVGeometry, tokens: int, budget: str) -> dict[str, Any]:
    """From features to a contract that fits."""
    parsed, tiers = ByteBudget.parse(budget), retention_tiers(HEAD_DIM)
    retention = RetentionConfig(
        tiers,
        choose_seal_tier(tiers, parsed, geometry),
        options=ControlOptions(shapes=(BlockShape.RUNS,)),
    )
    layers = geometry.num_layers
    ropes = (RopeSpec.unrotated(HEAD_DIM),) * layers
    config = CacheConfig(
        geometry, ropes, (None,) * layers, tiers, budget=parsed, retention=retention
    )
    plan = ResidencyPlan("retention", tiers, retention.seal_tier, 0)
    store = PageStore(plan.store_config(config, 1))
    costs = page_costs(config, plan, store)
    values = torch.randn(geometry.num_kv_heads, tokens, HEAD_DIM)
    draw_layer(retention, values, 0)
    memory = PeakMemory("cpu")
    controller = RetentionController(costs, retention.options)
    pricer = LayerPricer(costs, retention.policy, retention.options)
    score, checks = 0.0, []
    for layer in range(geometry.num_layers):
        drawn = draw_layer(retention, values, layer)
        began = time.perf_counter()
        controller.add_layer(pricer.price(drawn))
        score += time.perf_counter() - began
    limit = parsed.resolve(geometry, tokens)

    def exact(contract: WriteContract) -> int:
        start = time.perf_counter()
        used = contract_bytes(store, contract, tokens - 16)
        checks.append(time.perf_counter() - start)
        return used

    began = time.perf_counter()
    contract = controller.decide(limit, exact)
    decide = time.perf_counter() - began
    states = geometry.num_layers * geometry.num_kv_heads * tokens
    return {
        "states": states,
        "tiers": len(tiers),
        "seconds": {"score": score, "decide": decide, "byte_check": sum(checks)},
        "byte_checks": len(checks),
        "extra_bytes_per_state_and_tier": memory.extra() / states / len(tiers),
        "used": contract_bytes(store, contract, tokens - 16) / limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", choices=("states", "runs"), default="states")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; runs are decided on the CPU")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.1, help="budget as a part of dense bytes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    geometry = KVGeometry(args.layers, args.heads, 4 * args.heads, HEAD_DIM)
    if args.level == "states":
        record = allocate_states(geometry, args.tokens, args.share, args.device)
    else:
        record = allocate_runs(geometry, args.tokens, f"{100 * args.share:g}%")
    record |= {
        "level": args.level,
        "device": args.device,
        "layers": args.layers,
        "heads": args.heads,
        "tokens": args.tokens,
        "share": args.share,
        "command": f"benchmarks/allocation.py --level {args.level} --device {args.device}",
        "environment": describe_environment(),
    }
    text = json.dumps(record, indent=2)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
