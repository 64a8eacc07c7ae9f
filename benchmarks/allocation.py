# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the controller's decision at scale.

    python benchmarks/allocation.py --tokens 131072 --layers 32 --heads 8 --out allocation.json

Features are drawn at random, layer by layer; what is timed is everything from features to a write
contract whose exact bytes fit the budget: scoring, ranking, pricing, solving, byte check.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from sphkv.cache.retained_bytes import contract_bytes
from sphkv.cache.retained_config import RetainedConfig
from sphkv.codec.rope import RopeSpec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.evaluation.environment import describe_environment
from sphkv.retention.blocks import BlockShape
from sphkv.retention.controller import ControlOptions, LayerInput, RetentionController
from sphkv.retention.distortion import TierErrors
from sphkv.retention.features import AttentionRows, TokenFeatures


def draw_layer(config: RetainedConfig, tokens: int, seed: int) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    heads, dim = config.geometry.num_kv_heads, config.geometry.head_dim
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
    values = torch.randn(heads, tokens, dim, generator=generator)
    return LayerInput(features, errors, rows, values, protected)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--granularity", type=int, choices=(1, 16), default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    geometry = KVGeometry(args.layers, args.heads, 4 * args.heads, 128)
    shapes = (BlockShape.RUNS,) if args.granularity == 16 else (BlockShape.TOKENS,)
    config = RetainedConfig(
        geometry,
        (RopeSpec.unrotated(128),) * args.layers,
        ByteBudget.parse(args.budget),
        options=ControlOptions(shapes=shapes),
    )
    draw_layer(config, args.tokens, 0)
    before = peak_bytes()
    controller = RetentionController(config.page_costs(), options=config.options)
    seconds = {"score": 0.0}
    for layer in range(args.layers):
        drawn = draw_layer(config, args.tokens, layer)
        began = time.perf_counter()
        controller.add_layer(drawn)
        seconds["score"] += time.perf_counter() - began
    began = time.perf_counter()
    limit = config.budget.resolve(geometry, args.tokens)
    store = config.store_config()
    calls = []

    def exact(contract):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        used = contract_bytes(store, contract, args.tokens - 16)
        calls.append(time.perf_counter() - start)
        return used

    contract = controller.decide(limit, exact)
    seconds["decide"] = time.perf_counter() - began
    seconds["byte_check"] = sum(calls)
    states = geometry.num_layers * geometry.num_kv_heads * args.tokens
    tiers = len(config.tiers)
    extra = peak_bytes() - before
    record = {
        "states": states,
        "tiers": tiers,
        "seconds": {**seconds, "total": seconds["score"] + seconds["decide"]},
        "byte_checks": len(calls),
        "extra_bytes_per_state_and_tier": extra / states / tiers,
        "used": contract_bytes(store, contract, args.tokens - 16) / limit,
        "granularity": args.granularity,
        "environment": describe_environment(),
    }
    text = json.dumps(record, indent=2)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
