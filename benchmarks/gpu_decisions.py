# SPDX-License-Identifier: Apache-2.0
"""Whether the controller decides on a GPU as on the CPU reference, and what both lose.

``PYTHONPATH=src python3 benchmarks/gpu_decisions.py MODEL TEXT --calibration-text TEXT --output F``

Decisions first: the GPU's dense pass gives keys, values and the newest queries; both devices price
and decide about these very states, in the bytes of the GPU's pages. A run of 16 tokens that gets
another tier is a near tie if the alternatives, as the CPU prices them, differ by rounding alone.
Then end to end: each device reads the prompt by itself and goes on token by token, KL to its own
dense model. Tiers, pages, policy and codebooks are the GPU's on both, where pages are dropped and
never coded again while decoding; so what differs is arithmetic.
"""

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from sphkv import SphericalCache, calibrate_model, load_model
from sphkv.attention.api import get_backend, row_kernels
from sphkv.attention.partial import PartialAttention, attend_logits, merge_partials
from sphkv.attention.plans import PlanCache
from sphkv.attention.reference import ReferenceBackend, _attend_tail, _grouped
from sphkv.cache.engine import CacheEngine
from sphkv.cache.plan import FAST_RETENTION_TIERS
from sphkv.cache.retention import page_costs
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.devices import native_kernels
from sphkv.evaluation.harness.states import log_probabilities, read_prompt
from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions
from sphkv.retention.controller import RetentionController
from sphkv.retention.measure import (
    MeasureConfig,
    PromptWork,
    layers_together,
    measure_layers,
    paged_tokens,
)
from sphkv.retention.pricing import NO_TIER, LayerPricer
from sphkv.store.forecast import contract_bytes
from sphkv.store.pages import decode_pages

ROUNDING, SAME_KL = 1e-3, 0.02
RUN, PAGE_TOKENS, CALIBRATION_TOKENS = 16, 64, 4096
GAPS = (1e-4, ROUNDING, 1e-2, 1e-1)
PARTS = ("output", "lse")


class WatchedController(RetentionController):
    """Remembers the blocks behind every contract it tries."""

    def __init__(self, costs, options):
        super().__init__(costs, options)
        self.tried = []

    def _contract(self, protected, decision):
        contract = super()._contract(protected, decision)
        self.tried.append((contract, decision))
        return contract


class SamePages:
    """The page order of a GPU on a CPU: as many bytes, in the order of the store."""

    def __init__(self, order):
        self.page_sizes, self.takes, self.alignment = (
            order.page_sizes, order.takes, order.alignment,
        )  # fmt: skip

    def to_slab(self, layout, pages):
        return pages

    def from_slab(self, layout, pages):
        return pages


class DecodedPages(ReferenceBackend):
    """The reference over pages that are decoded once, and kept in float32 while they stay.

    For single tokens behind all pages, without a window: there is nothing to mask.
    """

    name = "decoded"

    def __init__(self):
        self._held = PlanCache(self._decode)

    @staticmethod
    def _decode(store, sequences, layer):
        """Keys and values of every head in pages."""
        found = [[] for _ in range(store.config.geometry.num_kv_heads)]
        for group in store.pages(sequences[0], layer):
            view, codec = store.view(group), store.codec(sequences[0])
            states, flat = decode_pages(view, group.head_ids(), layer=layer, codec=codec)
            for head, parts in enumerate(found):
                own = states.head_ids == head
                parts.append((flat.keys[own], flat.values[own]))
        return [[torch.cat(x) for x in zip(*parts, strict=True)] for parts in found]

    def attend(self, request):
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        query, shape = _grouped(request), request.query.shape
        held = self._held.get(request.store, (request.sequence,), request.layer)
        parts = [
            attend_logits((own @ keys.T)[None], values[None])
            for own, (keys, values) in zip(query, held, strict=True)
        ]
        pages = PartialAttention(*(torch.cat([getattr(x, n) for x in parts]) for n in PARTS))
        merged = merge_partials([_attend_tail(request, query), pages])
        return PartialAttention(merged.output.reshape(shape), merged.lse.reshape(shape[:2]))


def price_layers(engine, calibration, states):
    """Every layer of a prompt, priced where its states are, in the bytes of an engine's pages."""
    config, kept = engine.config, engine.config.retention
    measured = MeasureConfig(
        config.geometry, config.ropes, kept.tiers, policy=kept.policy, protection=kept.protection,
        horizon=kept.horizon, error_samples=kept.error_samples,
        kernels=row_kernels(states[0][1].device),
    )  # fmt: skip
    costs = page_costs(config, engine.plan, engine.store)
    pricer, codec = LayerPricer(costs, kept.policy, kept.options), SphericalCodec(calibration)
    priced, tokens = [], states[0][1].shape[1]
    while (first := len(priced)) < len(states):
        # as a cache measures them: side by side on a GPU
        together = layers_together(measured, tokens, len(states) - first)
        some = states[first : first + together]
        layers = range(first, first + len(some))
        joined = tuple(torch.cat(parts) for parts in zip(*some, strict=True))
        found = pricer.price(measure_layers(measured, codec, layers, joined))
        losses = found.run_loss.split(config.geometry.num_kv_heads)
        parts = found.split(config.geometry.num_kv_heads)
        priced += [replace(one, run_loss=own) for one, own in zip(parts, losses, strict=True)]
    return priced


def decide(engine, priced, tokens):
    """The contract about priced layers in the bytes of an engine's pages, its blocks, its price."""
    costs = page_costs(engine.config, engine.plan, engine.store)
    controller = WatchedController(costs, engine.config.retention.options)
    for layer in priced:
        controller.add_layer(layer)
    paged = paged_tokens(tokens)
    contract = controller.decide(
        engine.ceiling.bytes_at(tokens), lambda found: contract_bytes(engine.store, found, paged)
    )
    blocks = next(decision for made, decision in controller.tried if made is contract)
    return contract, blocks, controller


def chosen_columns(decision, runs):
    """Shape of every head ``[heads]``; block of every run ``[heads, runs]``, -1 for none."""
    blocks = decision.blocks
    shape = blocks.shape_ids[(decision.tier_id != NO_TIER).int().argmax(1)].cpu()
    found, first = torch.full((len(shape), runs), -1), 0
    for number, part in enumerate(blocks.blocks.values()):
        units, count = part.units.cpu(), part.units.shape[1]
        column = (first + torch.arange(count))[None, :, None].expand_as(units).flatten(1)
        place = torch.where(units >= 0, units, runs).flatten(1)
        own = torch.full((len(shape), runs + 1), -1).scatter_(1, place, column)[:, :runs]
        found, first = torch.where((shape == number)[:, None], own, found), first + count
    return shape, found


class Gaps:
    """How far apart, as the CPU prices them, the alternatives are between which devices differ.

    Gaps are relative, of loss plus bytes at the CPU's price of a byte. A second one is the least up
    to the device's price of a byte, 0 if the choice changes in between: that is how far apart the
    losses alone are, for one budget leads both to prices of a byte that differ a little.
    """

    def __init__(self, right, prices, priced, num_tiers):
        blocks = right.blocks
        self.tier = right.tier_id.long()
        self.rank = torch.cat([layer.run_loss[..., 0] for layer in priced]).double()
        self.columns = chosen_columns(right, self.rank.shape[1])[1]
        loss, cost = blocks.distortion.double(), blocks.cost.double()
        self.total = torch.stack([loss + price * cost for price in prices], -1)
        least = self.total[..., :num_tiers, :].amin(2).masked_fill(~blocks.is_block[..., None], 0.0)
        sizes = [part.states.shape[1] for part in blocks.blocks.values()]
        self.of_shape = torch.stack([part.sum(1) for part in least.split(sizes, 1)], 1)

    @staticmethod
    def relative(one, two):
        """Both gaps between losses ``[2]``, one of each price of a byte."""
        gap = (one - two) / torch.maximum(one.abs(), two.abs()).clamp(min=1e-30)
        return float(gap[0].abs()), 0.0 if gap[0] * gap[1] < 0 else float(gap.abs().min())

    def of(self, head, run, shapes, columns, tier):
        """Cause and gaps of one run whose shape, block and tier on the device are given.

        The head has another shape, or the run another block because ranks are close, or the block
        another tier.
        """
        if shapes[0] != shapes[1]:
            return "shape", self.relative(*self.of_shape[head, shapes])
        here, there = columns
        cause, gaps = "tier", (0.0, 0.0)
        if here != there:
            others = self.rank[head][self.columns[head] == there]
            edge = others.max() if there > here else others.min()
            cause = "rank"
            gaps = self.relative(self.rank[head, run].expand(2), edge.expand(2))
        if (expected := int(self.tier[head, there])) != tier:
            pair = self.relative(*self.total[head, there][[expected, tier]])
            gaps = tuple(map(max, gaps, pair))
        return cause, gaps


def compare_decisions(engine, priced, tokens):
    """Decide on both devices; how many runs differ, and how near those ties are."""
    mine, blocks, controller = decide(engine, priced["device"], tokens)
    right, right_blocks, on_cpu = decide(engine, priced["cpu"], tokens)
    losses = torch.cat([layer.run_loss for layer in priced["cpu"]]).double()
    both, runs = (right_blocks, blocks), losses.shape[1]
    shapes, columns = zip(*(chosen_columns(x, runs) for x in both), strict=True)
    is_decided = (columns[0] >= 0) & (columns[1] >= 0)
    tiers = [
        x.tier_id.cpu().long().gather(1, column.clamp(min=0)).masked_fill(~is_decided, 0)
        for x, column in zip(both, columns, strict=True)
    ]
    kept = engine.config.retention
    num_tiers = len(kept.tiers) if kept.options.may_be_dense else kept.tiers.dense_id
    gaps = Gaps(right_blocks, (on_cpu.price, controller.price), priced["cpu"], num_tiers)
    found = [
        gaps.of(
            head, run, [int(x[head]) for x in shapes], [int(x[head, run]) for x in columns],
            int(tiers[1][head, run]),
        )
        for head, run in (tiers[0] != tiers[1]).nonzero().tolist()
    ]  # fmt: skip
    count = int(is_decided.sum())
    lost = [float(losses.gather(2, x[..., None])[..., 0][is_decided].sum()) for x in tiers]
    names = ("at_cpu_byte_price", "between_byte_prices")
    return {
        "decisions": count, "differ": len(found), "share_differ": len(found) / count,
        "causes": {name: sum(x[0] == name for x in found) for name in ("shape", "rank", "tier")},
        "largest_gap": {
            name: max((x[1][at] for x in found), default=0.0) for at, name in enumerate(names)
        },
        "share_beyond": {
            name: {str(gap): sum(x[1][at] > gap for x in found) / count for gap in GAPS}
            for at, name in enumerate(names)
        },
        "is_same_beyond_rounding": {
            name: all(x[1][at] <= ROUNDING for x in found) for at, name in enumerate(names)
        },
        "share_other_protection": float((mine.protected.cpu() != right.protected).float().mean()),
        "price_of_a_byte": {"device": controller.price, "cpu": on_cpu.price},
        "predicted_loss": {"device": controller.loss, "cpu": on_cpu.loss},
        # runs one by one, as the CPU prices them
        "loss_of_device_decision_over_cpu": lost[1] / lost[0],
        "bytes": engine.ceiling.bytes_at(tokens),
    }  # fmt: skip


def price_gaps(priced):
    """Relative difference of the losses of runs and of whole heads at every tier but the dense."""
    found = {}
    for name, pick in (
        ("runs", lambda layer: layer.run_loss),
        ("heads", lambda layer: next(iter(layer.blocks.values())).distortion),
    ):
        one, two = (
            torch.cat([pick(x)[..., :-1].cpu().double().flatten() for x in priced[side]])
            for side in ("device", "cpu")
        )
        gap = ((one - two).abs() / two.abs().clamp(min=1e-30))[two > 0]
        found[name] = {
            "median": float(gap.median()),
            "share_beyond": {str(most): float((gap > most).double().mean()) for most in GAPS},
        }
    return found


@contextmanager
def forced(contract):
    """Prompts are stored as a contract says, whatever a controller would decide."""
    before = RetentionController.decide
    RetentionController.decide = lambda *_: contract
    try:
        yield
    finally:
        RetentionController.decide = before


def prompt_step(tokens):
    """A pass that brings a prompt."""
    return StepTokens(torch.ones(1, tokens, dtype=torch.bool), torch.arange(tokens)[None])


@torch.no_grad()
def follow(model, cache, prompt, states=None):
    """Log-probabilities after each following token, and a record; the prompt is read or given.

    Args:
        model: The model.
        cache: An empty cache of it.
        prompt: ``PromptStates`` of the model's own dense pass.
        states: Queries, keys and values to hand to the cache instead of reading the prompt again.
    """
    found, tokens, engine = [], prompt.num_tokens, cache.engine
    engine.on_contract = found.append
    began = time.perf_counter()
    if states is None:
        ids = prompt.input_ids
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    else:
        engine.begin(prompt_step(tokens))
        for layer, (query, keys, values) in enumerate(states):
            engine.update(layer, keys[None], values[None])
            engine.end_layer(layer, query[None])
        engine.finish()
    if not found:
        raise ValueError(f"{cache.budget} holds from {cache.holds_from} tokens")
    rows, prompt_s = [], time.perf_counter() - began
    for at in range(prompt.following.shape[1]):
        token = prompt.following[:, at : at + 1]
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        rows.append(logits[0, -1].float().log_softmax(-1).cpu())
    return torch.stack(rows), found[0], {
        "backend": cache.backend_name,
        "tiers": cache.describe().tiers,
        "peak_bytes": engine.peak_bytes, "peak_share": engine.peak_share,
        "drops": engine.rows[0].residency.num_rebalances,
        "prompt_s": prompt_s, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def divergence(right, other):
    """Mean KL over the steps."""
    return float((right.double().exp() * (right.double() - other.double())).sum(-1).mean())


class Comparison:
    """A model and a prompt on both devices."""

    def __init__(self, args):
        self.args = args
        model, tokenizer = load_model(args.model)
        if args.layers:
            model.base_model.layers = model.base_model.layers[: args.layers]
            model.config.num_hidden_layers = args.layers
        if args.dtype == "bfloat16":
            # weights alone: frequencies of the rotary embedding stay float32
            for weight in model.parameters():
                weight.data = weight.data.bfloat16()
        self.models = {"cpu": model, "device": copy.deepcopy(model).to(args.device)}
        words = args.text.read_text(encoding="utf-8")
        end = args.start + args.prompt + args.steps
        ids = tokenizer(words, return_tensors="pt").input_ids[:, args.start : end]
        self.prompts, self.dense = {}, {}
        self.calibrations = self._calibrate(tokenizer)
        for side, own in self.models.items():
            began = time.perf_counter()
            on = ids.to(next(own.parameters()).device)
            prompt = self.prompts[side] = read_prompt(own, on, num_following=args.steps)
            rows = [part for _, part in log_probabilities(own, prompt.hidden[1:])]
            self.dense[side] = torch.cat(rows).cpu()
            print(f"dense pass, {side}: {time.perf_counter() - began:.1f} s", flush=True)
        self.priced, self.work = None, PromptWork()

    def _calibrate(self, tokenizer):
        """The same codebooks for both, each with tables of its own."""
        file = self.args.calibration
        with tempfile.TemporaryDirectory() as folder:
            if file is None:
                text = self.args.calibration_text.read_text(encoding="utf-8")
                text = text[: 8 * CALIBRATION_TOKENS]
                ids = tokenizer(text, return_tensors="pt").input_ids[:, :CALIBRATION_TOKENS]
                made = calibrate_model(
                    self.models["device"], ids.to(self.args.device), model_id=self.args.model
                )
                file = Path(folder) / "codebooks.safetensors"
                save_calibration(made, file)
            return {side: load_calibration(file) for side in self.models}

    def device_cache(self, budget):
        """A cache of the device through the public class; a CPU is asked for a GPU's pages."""
        options = RetentionOptions(demotes=False)
        is_gpu = torch.device(self.args.device).type == "cuda"
        if not is_gpu:
            options = replace(options, page_tokens=PAGE_TOKENS, refresh_share=1 / 32)
        return SphericalCache.for_model(
            self.models["device"], budget, retention=options,
            tiers=None if is_gpu else FAST_RETENTION_TIERS, calibration=self.calibrations["device"],
            options=CacheOptions(backend=self.args.backend),
        )  # fmt: skip

    def cpu_cache(self, like):
        """A cache of the CPU with the config and the bytes of another."""
        name, order = self.args.cpu_backend, like.engine.backend.page_order
        backend = DecodedPages() if name == "decoded" else get_backend(name)
        if order is not None:
            backend.page_order = SamePages(order)
        engine = CacheEngine(
            replace(like.config, device="cpu"), calibration=self.calibrations["cpu"],
            backend=backend, work=self.work,
        )  # fmt: skip
        return SphericalCache(self.models["cpu"], engine)

    def decisions(self, budget):
        """Both devices about the device's states."""
        tokens = self.args.prompt
        with self.device_cache(budget) as cache:
            engine = cache.engine
        engine.begin(prompt_step(tokens))
        if engine.plan is None:
            raise ValueError(f"{budget} holds from {cache.holds_from} tokens")
        if self.priced is None:
            last = engine.config.retention.policy.watched_tokens
            states = [
                (part.query[:, -last:], part.keys, part.values)
                for part in self.prompts["device"].layers
            ]
            moved = [tuple(x.cpu() for x in part) for part in states]
            self.priced = {
                side: price_layers(engine, self.calibrations[side], own)
                for side, own in (("device", states), ("cpu", moved))
            }
        return compare_decisions(engine, self.priced, tokens)

    def quality(self, budget):
        """Both devices by themselves, then the device with what the CPU decided."""
        prompt, dense = self.prompts, self.dense
        states = [(x.query, x.keys, x.values) for x in prompt["cpu"].layers]
        with self.device_cache(budget) as cache:
            rows, contract, record = follow(self.models["device"], cache, prompt["device"])
            with self.cpu_cache(cache) as other:
                right, found, cpu_record = follow(self.models["cpu"], other, prompt["cpu"], states)
        record["kl"] = divergence(dense["device"], rows)
        cpu_record["kl"] = divergence(dense["cpu"], right)
        differs = contract.tier_id.cpu()[..., ::RUN] != found.tier_id[..., ::RUN]
        on = contract.tier_id.device
        same = WriteContract(found.tier_id.to(on), found.protected.to(on), found.granularity)
        with forced(same), self.device_cache(budget) as cache:
            rows_same, _, _ = follow(self.models["device"], cache, prompt["device"])
        kl_same = divergence(dense["device"], rows_same)
        return {
            "device": record, "cpu": cpu_record,
            "kl_ratio": record["kl"] / cpu_record["kl"],
            "is_same_kl": abs(record["kl"] / cpu_record["kl"] - 1) <= SAME_KL,
            "kl_of_device_with_cpu_decisions": kl_same,
            "kl_ratio_with_cpu_decisions": kl_same / cpu_record["kl"],
            "kl_between": divergence(right, rows),
            "kl_between_dense": divergence(dense["cpu"], dense["device"]),
            "share_differ": float(differs.float().mean()),
        }  # fmt: skip


def describe(args):
    """What was run, where."""
    words = (Path(word).name for word in sys.argv[1:])
    is_gpu = torch.device(args.device).type == "cuda"
    return {
        "model": Path(args.model).name, "layers": args.layers, "text": args.text.name,
        "calibration": (args.calibration or args.calibration_text).name,
        "prompt_tokens": args.prompt, "first_token": args.start, "steps": args.steps,
        "dtype": args.dtype, "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "has_native_codec": native_kernels() is not None, "threads": torch.get_num_threads(),
        "rounding": ROUNDING,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": args.commit,
        "command": " ".join(["PYTHONPATH=src python3 benchmarks/gpu_decisions.py", *words]),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--calibration", type=Path, help="file of codebooks")
    given.add_argument("--calibration-text", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["20%", "10%", "5%"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--start", type=int, default=2000)
    parser.add_argument("--layers", type=int, help="first layers of the model alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--cpu-backend", default="decoded", help="or reference, native")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    about, runs, failed = describe(args), {budget: {} for budget in args.budgets}, False
    with torch.no_grad():
        both = Comparison(args)
        # all decisions first: they take little time
        for part in ("decisions", "quality"):
            for budget, record in runs.items():
                try:
                    record[part] = getattr(both, part)(budget)
                except Exception as error:  # the others may still run
                    traceback.print_exc()
                    record[part], failed = {"error": f"{type(error).__name__}: {error}"}, True
                print(json.dumps({"budget": budget, part: record[part]}), flush=True)
                if both.priced is not None:
                    about["prices_differ"] = price_gaps(both.priced)
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
