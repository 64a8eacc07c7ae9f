# SPDX-License-Identifier: Apache-2.0
"""What the controller adds to a prompt: calibrating, measuring, pricing, deciding, writing.

``PYTHONPATH=src python3 benchmarks/gpu_prompt.py --output results/gpu/prompt.json``

States are random, in the shape of a model, with a few tokens that heads attend to; no model runs.
Every prompt is a new cache with the same codebooks. ``--check`` compares decisions about the same
states on the CPU and the device, ``--profile`` says where the host's time goes.
"""

import argparse
import cProfile
import functools
import io
import json
import pstats
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from sphkv.attention.api import row_kernels
from sphkv.cache import prompt
from sphkv.cache.config import CacheConfig, RetentionConfig
from sphkv.cache.dense import PromptCalibrator
from sphkv.cache.engine import CacheEngine
from sphkv.cache.plan import choose_seal_tier, parse_tiers, retention_tiers
from sphkv.cache.retention import page_costs
from sphkv.cache.step import StepTokens
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.retention.controller import RetentionController
from sphkv.retention.measure import MeasureConfig, measure_layer, paged_tokens
from sphkv.retention.notes import RunNotes
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import LayerPricer
from sphkv.store.forecast import contract_bytes
from sphkv.store.store import PageStore

STAGES = {
    "calibrate": (PromptCalibrator, "fit"),
    "measure": (prompt, "measure_layers"),
    "price": (LayerPricer, "price"),
    "note": (RunNotes, "of_prompt"),
    "decide": (RetentionController, "decide"),
    "write": (PageStore, "write_layers"),
}
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}


def finish(device):
    """The time once the device has done all it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def timed_stages(device, seconds):
    """Add the seconds of every stage to a dictionary; each waits for the device."""
    before = {name: vars(owner)[attribute] for name, (owner, attribute) in STAGES.items()}

    def timed(name, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            start = finish(device)
            found = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + finish(device) - start
            return found

        return run

    for name, (owner, attribute) in STAGES.items():
        inner = before[name]
        if isinstance(inner, classmethod):
            setattr(owner, attribute, classmethod(timed(name, inner.__func__)))
        else:
            setattr(owner, attribute, timed(name, inner))
    try:
        yield
    finally:
        for name, (owner, attribute) in STAGES.items():
            setattr(owner, attribute, before[name])


def make_config(args, device):
    """A cache of the shape and tiers that were asked for."""
    geometry = KVGeometry(args.layers, args.heads, args.group * args.heads, args.head_dim)
    tiers = None if args.tiers is None else parse_tiers(args.tiers.split(","), args.head_dim)
    table = retention_tiers(args.head_dim, page_tokens=args.page_tokens, table=tiers)
    budget = ByteBudget.parse(args.budget)
    retention = RetentionConfig(table, choose_seal_tier(table, budget, geometry))
    rope = RopeSpec.from_config(ROPE, args.head_dim)
    return CacheConfig(
        geometry, (rope,) * args.layers, (None,) * args.layers, parse_tiers(None, args.head_dim),
        budget=budget, retention=retention, is_retention_forced=True, device=str(device),
    )  # fmt: skip


def make_states(config, layer, tokens, device):
    """Query of the last 256 tokens, keys and values in bfloat16; one in ten draws attention."""
    geometry, rope = config.geometry, config.ropes[layer]
    generator = torch.Generator(device).manual_seed(layer)
    heads, dim = geometry.num_kv_heads, geometry.head_dim

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    scale = torch.linspace(0.5, 2.0, dim, device=device)
    pull = (torch.rand(heads, tokens, 1, generator=generator, device=device) < 0.1).float()
    last = min(256, tokens)
    query = draw(geometry.num_query_heads, last, dim) + 1.0
    keys = scale * draw(heads, tokens, dim) + 2.0 * pull * draw(heads, 1, 1).abs()
    values = draw(heads, tokens, dim) * (0.5 + draw(heads, 1, 1).abs())
    at = torch.arange(tokens, device=device)
    query, keys = rope.apply(query, at[-last:]), rope.apply(keys, at)
    return tuple(part.to(torch.bfloat16) for part in (query, keys, values))


def run_prompt(config, states, calibration=None):
    """An engine that has taken the prompt, its contract and codebooks."""
    engine = CacheEngine(config, calibration=calibration)
    found = []
    engine.on_contract = found.append
    tokens = states[0][1].shape[1]
    positions = torch.arange(tokens)[None]
    engine.begin(StepTokens(torch.ones(1, tokens, dtype=torch.bool), positions))
    if engine.plan is None:
        raise SystemExit(f"the budget holds from {engine.ceiling.holds_from} tokens: give more")
    for layer, (query, keys, values) in enumerate(states):
        engine.update(layer, keys[None], values[None])
        if engine._calibrator is not None:
            watched = positions[:, -query.shape[1] :]
            engine._calibrator.observe(layer, query[None], torch.ones_like(watched) > 0, watched)
            engine._calibrator.fit(layer, keys[None], positions >= 16, positions)
        engine._dense.take(layer)
        engine._coded.take_prompt(
            layer, query[None], keys[None], values[None], torch.ones(1, tokens, dtype=torch.bool)
        )
    calibrator = engine._calibrator
    engine.finish()
    made = engine.calibration if calibrator is None else calibrator.calibration
    return engine, found[0], made


def decide(config, engine, states):
    """A contract about states where they are, in the bytes of an engine's store; and its prices."""
    retention, store, tokens = config.retention, engine.store, states[0][1].shape[1]
    kernels = row_kernels(states[0][1].device)
    measured = MeasureConfig(config.geometry, config.ropes, retention.tiers, kernels=kernels)
    costs = page_costs(config, engine.plan, store)
    pricer = LayerPricer(costs, retention.policy, retention.options)
    controller = RetentionController(costs, retention.options)
    codec, priced = SphericalCodec(engine.calibration), []
    for layer, part in enumerate(states):
        priced.append(pricer.price(measure_layer(measured, codec, layer, part)))
        controller.add_layer(priced[-1])
    paged = paged_tokens(tokens)
    limit = engine.ceiling.bytes_at(tokens)
    contract = controller.decide(limit, lambda found: contract_bytes(store, found, paged))
    return contract, [each.blocks[BlockShape.WHOLE].distortion.cpu() for each in priced]


def check_devices(args):
    """Part of the states that get another tier on the device than on the CPU, and prices' gap."""
    args = argparse.Namespace(**{**vars(args), "layers": 2})
    config = make_config(args, args.device)
    states = [make_states(config, layer, args.check, args.device) for layer in range(2)]
    engine, _, calibration = run_prompt(config, states)
    engine = CacheEngine(config, calibration=calibration)
    tokens = torch.ones(1, args.check, dtype=torch.bool)
    engine.begin(StepTokens(tokens, torch.arange(args.check)[None]))
    found, prices = decide(config, engine, states)
    moved = [tuple(part.cpu() for part in layer) for layer in states]
    right, others = decide(config, engine, moved)
    pairs = zip(prices, others, strict=True)
    gaps = torch.stack([(one - two).abs() / two.clamp(min=1e-30) for one, two in pairs])
    return {
        "tokens": args.check,
        "share_other_tier": float((found.tier_id.cpu() != right.tier_id.cpu()).float().mean()),
        "share_other_protection": float((found.protected.cpu() != right.protected).float().mean()),
        # of a head that gives all its weight to what goes, next to nothing is left to divide by
        "relative_gap_of_dropped_heads": float(gaps[..., 0].max()),
        "relative_gap_of_coded_heads": float(gaps[..., 1:].max()),
    }


def compile_kernels(config, device):
    """Seconds to compile the kernels that encode the cache's tiers, where they are missing."""
    if device.type != "cuda":
        return 0.0
    from sphkv.attention.cuda.build import prepare, tier_builds
    from sphkv.attention.cuda.compiler import architecture

    start = time.perf_counter()
    builds = tier_builds(config.retention.tiers, config.geometry.head_dim)
    prepare(builds, architecture(device))
    return time.perf_counter() - start


def measure(args):
    """Seconds of a first, a warm and a staged prompt."""
    device, config = torch.device(args.device), make_config(args, args.device)
    states = [make_states(config, layer, args.tokens, device) for layer in range(args.layers)]
    record = {"compile_s": compile_kernels(config, device)}
    start = finish(device)
    engine, contract, calibration = run_prompt(config, states)
    record |= {"first_s": finish(device) - start, "backend": engine.backend_name}
    for name in ("second_s", "warm_s"):
        start = finish(device)
        run_prompt(config, states, calibration)
        record[name] = finish(device) - start
    seconds = {}
    with timed_stages(device, seconds):
        run_prompt(config, states, calibration)
    record["stages_s"] = seconds
    kept = contract.tier_id.flatten().bincount(minlength=len(config.retention.tiers)).tolist()
    record["states"] = dict(zip((tier.name for tier in config.retention.tiers), kept, strict=True))
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(run_prompt, config, states, calibration)
        text = io.StringIO()
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(45)
        Path(args.profile).write_text(text.getvalue(), encoding="utf-8")
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--page-tokens", type=int, default=128)
    parser.add_argument("--tiers", default="k1v2,k2v2,k2v4,k4v4,k4v8")
    parser.add_argument("--check", type=int, default=0, help="tokens of a prompt for both devices")
    parser.add_argument("--profile", help="file for a profile of the host's time")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = {
        name: value for name, value in vars(args).items() if name not in ("output", "profile")
    }
    with torch.inference_mode():
        if args.check:
            record["check"] = check_devices(args)
            print(json.dumps(record["check"]), flush=True)
        record.update(measure(args))
    text = json.dumps(record, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
