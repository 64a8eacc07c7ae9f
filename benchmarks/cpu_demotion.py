# SPDX-License-Identifier: Apache-2.0
"""Demotion of many pages on a CPU: through the codec in torch, and by native kernels.

    python benchmarks/cpu_demotion.py --out results/cpu/demotion.json

Stores hold the same pages of all layers and heads; one demotes by the codec, the others by kernels
of every instruction set that the processor has, of which the native backend brings the fastest; all
through ``PageStore.demote_listed``. The first round is checked: the same pages as the codec's but
for what rounding decides, and no larger error against the states that were written.
Further rounds take turns on forks of the same sequence. Processor time of one thread, so that other
work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.native.backend import CodebookCache, NativePageCodec
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract
from sphkv.core.devices import require_kernels
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, ladder
from sphkv.evaluation.environment import describe_environment
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore
from sphkv.testing.cases import random_calibration, random_states

SHAPES = {
    "smollm2": (KVGeometry(30, 3, 9, 64), 512),
    "llama-3.1-8b, 4 layers": (KVGeometry(4, 8, 32, 128), 1024),
}
# tiers before, the tier after, and one page in so many
CASES = (
    (("k6v8",), "k3v4", 1),
    (("k4v4",), "k2v2", 1),
    (("k3v4",), "k1v2", 1),
    (("k2v3", "k3v4", "k4v4", "k6v8"), "k1v2", 1),
    (("k4v4",), "k2v2", 8),
)
_SOURCE, _COPY = 0, 1
_CODEC = "codec"


class Demotions:
    """One decision in several stores."""

    def __init__(
        self, shape: str, codec: SphericalCodec, before: tuple[str, ...], after: str, every: int
    ) -> None:
        self.geometry, self.num_tokens = SHAPES[shape]
        self.codec, self.every = codec, every
        self.tiers = ladder(self.geometry.head_dim, names=(*before, after))
        self.after, ids = self.tiers.id_of(after), [self.tiers.id_of(name) for name in before]
        books = CodebookCache()
        ways = {name: NativePageCodec(books, 1, name) for name in require_kernels().recoders()}
        self.stores = {
            name: PageStore(
                StoreConfig(self.geometry, self.tiers, seal_tier=after), codec, kernels=kernels
            )
            for name, kernels in {_CODEC: None, **ways}.items()
        }
        for store in self.stores.values():
            store.create(_SOURCE)
            for layer in range(self.geometry.num_layers):
                self._write(store, layer, ids)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that were written to a layer."""
        rope = self.codec.calibration.ropes[layer]
        keys, values, _ = random_states(self.geometry, rope, self.num_tokens, seed=layer)
        return keys, values

    def _write(self, store: PageStore, layer: int, tier_ids: list[int]) -> None:
        draw = torch.Generator().manual_seed(layer)
        runs = (self.geometry.num_kv_heads, self.num_tokens // RUN_TOKENS)
        chosen = torch.tensor(tier_ids)[torch.randint(len(tier_ids), runs, generator=draw)]
        tier_id = chosen.repeat_interleave(RUN_TOKENS, 1).to(torch.uint8)
        contract = LayerContract(tier_id, torch.zeros_like(tier_id, dtype=torch.bool), RUN_TOKENS)
        store.write(_SOURCE, layer, contract, *self.states(layer), torch.arange(self.num_tokens))

    def demote(self, name: str) -> tuple[float, int, int]:
        """Seconds, pages and states of one decision on a fresh fork, which stays."""
        store = self.stores[name]
        store.fork(_SOURCE, _COPY)
        pages = store.page_list(_COPY)
        layers, ids = pages.layer_ids[:: self.every], pages.page_ids[:: self.every]
        num_states = int(store.allocator.counts(ids).sum())
        began = time.process_time()
        store.demote_listed(_COPY, layers, ids, self.after)
        return time.process_time() - began, len(ids), num_states

    def forget(self, name: str) -> None:
        """Give up the fork."""
        self.stores[name].free(_COPY)

    def compare(self, name: str) -> dict[str, Any]:
        """Shares of new codes and bytes unlike the codec's, and squared errors over its own."""
        unlike = {"key_codes": 0, "value_codes": 0, "bytes": 0}
        total = dict.fromkeys(unlike, 0)
        errors = [[0.0, 0.0], [0.0, 0.0]]
        stores = (self.stores[_CODEC], self.stores[name])
        for layer in range(self.geometry.num_layers):
            groups = [store.pages(_COPY, layer) for store in stores]
            for pair in zip(*groups, strict=True):
                if pair[0].layout.tier_id != self.after:
                    continue
                views = [store.view(group) for store, group in zip(stores, pair, strict=True)]
                for own, view in zip(errors, views, strict=True):
                    found = self._errors(layer, pair[0].head_ids(), view)
                    own[:] = [a + b for a, b in zip(own, found, strict=True)]
                for part in unlike:
                    a, b = (_part(view, part) for view in views)
                    unlike[part] += int((a != b).sum())
                    total[part] += a.numel()
        ratios = [b / a for a, b in zip(*errors, strict=True)]
        return {
            "unlike": {part: unlike[part] / total[part] for part in unlike},
            "error_over_codec": {"keys": ratios[0], "values": ratios[1]},
        }

    def _errors(self, layer: int, heads: Tensor, view: Any) -> tuple[float, float]:
        live, tier = view.live(), view.layout.tier
        at = view.positions() * live
        told = self.codec.decode(layer, tier, view.encoded(), at, head_ids=heads)
        right = (states[heads[:, None], at] for states in self.states(layer))
        parts = zip(told, right, strict=True)
        keys, values = (float((a - b)[live].double().square().sum()) for a, b in parts)
        return keys, values


def _part(view: Any, part: str) -> Tensor:
    found: Tensor = view.pages if part == "bytes" else getattr(view, part)()
    return found


def measure(demotions: Demotions, rounds: int) -> dict[str, Any]:
    """Check one round, then time others.

    Raises:
        RuntimeError: Kernels differ from the codec by more than rounding.
    """
    for name in demotions.stores:
        _, num_pages, num_states = demotions.demote(name)
    row: dict[str, Any] = {"pages": num_pages, "states": num_states}
    for name in demotions.stores:
        row[name] = demotions.compare(name)
        if max(row[name]["unlike"].values()) > 5e-3:
            raise RuntimeError(f"{name} makes other pages than the codec: {row[name]}")
        if max(row[name]["error_over_codec"].values()) > 1.001:
            raise RuntimeError(f"{name} errs more than the codec: {row[name]}")
    for name in demotions.stores:
        demotions.forget(name)
    seconds: dict[str, list[float]] = {name: [] for name in demotions.stores}
    for _ in range(rounds):
        for name, found in seconds.items():
            found.append(demotions.demote(name)[0])
            demotions.forget(name)
    for name, found in seconds.items():
        each = [1e6 * one / num_states for one in found]
        pairs = zip(seconds[_CODEC], found, strict=True)
        row[name] |= {
            "us": statistics.median(each),
            "us_range": [min(each), max(each)],
            "times_faster": statistics.median(a / b for a, b in pairs),
        }
    return row


def main() -> None:
    """Measure all cases, print a table and write one record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of a case")
    parser.add_argument("--out", type=Path, required=True, help="file for the record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = require_kernels().recoders()
    record: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "environment": describe_environment(),
        "recoders": variants,
        "threads": 1,
        "clock": "processor time",
        "unit": "us per state and head",
        "rows": [],
    }
    print("| shape | tiers | pages | codec, us |", *(f"{name}, us (ratio) |" for name in variants))
    print("| --- " * (4 + len(variants)) + "|")
    for shape, (geometry, num_tokens) in SHAPES.items():
        rope = RopeSpec.from_config({"rope_theta": 10_000.0}, geometry.head_dim)
        codec = SphericalCodec(random_calibration(geometry, rope))
        for before, after, every in CASES:
            row = measure(Demotions(shape, codec, before, after, every), args.rounds)
            told = {"shape": shape, "tokens": num_tokens, "before": before, "after": after}
            record["rows"].append({**told, "one_page_in": every, **row})
            found = [row[name] for name in variants]
            print(
                f"| {shape} | {', '.join(before)} -> {after} | {row['pages']} "
                f"| {row[_CODEC]['us']:.1f} |",
                *(f"{each['us']:.2f} ({each['times_faster']:.1f}) |" for each in found),
                flush=True,
            )
            args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
