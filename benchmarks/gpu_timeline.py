# SPDX-License-Identifier: Apache-2.0
"""When the thread blocks of a layer's launches begin and end, under the controller.

``PYTHONPATH=src python3 benchmarks/gpu_timeline.py --allocation FILE --output timeline.json``

The layers of ``gpu_mixed.py``, read by kernels that note the time: when a block begins, knows which
pages it has, has asked for the first of them, is ready (it has its table and its queries), has its
first page, has read its last one, is done.
Where blocks of one launch end late the multiprocessors are shared badly; what lies between a
block's beginning and its being ready is paid by every launch.
"""

import argparse
import json
import statistics
from pathlib import Path

import gpu_mixed as mixed
import torch
from gpu_decode import DEVICE, common, median_us
from safetensors.torch import load_file

from sphkv.attention.cuda import compiler
from sphkv.attention.cuda.pages import PagePool
from sphkv.store.paging import PositionMode

EVENTS = ("begin", "told", "asked", "ready", "page", "read", "end")
# Words that a block writes: a time for every event.
WORDS = 8
MOST_BLOCKS = 256
# (text of decode.cu, what stands there instead); notes go where positions of queries would be read
NOTES = (
    ("// What the teams do: attend to the block's pages, row by row.",
     "INLINE void note(const Params& p, int event) {\n"
     "  unsigned long long now;\n"
     '  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));\n'
     f"  ((unsigned long long*)p.query_positions)[blockIdx.x * {WORDS} + event] = now;\n"
     "}\n"),
    ("    if constexpr (KEEPS_CONSTANTS) constants.load(place.lane);",
     "    if constexpr (KEEPS_CONSTANTS) constants.load(place.lane);\n"
     "    if (!is_next && tid == 0) note(p, 3);"),
    ("  start_dependents();\n", "  if (tid == 0) note(p, 0);\n  start_dependents();\n"),
    ("  // a short share may hold", "  if (tid == 0) note(p, 1);\n  // a short share may hold"),
    ("  start.store(p, row, tid);\n  if (tid == PARTS_THREAD)",
     "  if (tid == 0) note(p, 2);\n  start.store(p, row, tid);\n  if (tid == PARTS_THREAD)"),
    ("      attend_page(p, row.index, query,",
     "      if (tid == 0 && page == share.first) note(p, 4);\n"
     "      attend_page(p, row.index, query,"),
    ("    row.head = kept_head(), row.block",
     "    if (tid == 0) note(p, 5);\n    row.head = kept_head(), row.block"),
    ("  if (tid < THREADS) write_rest(p, row, tid);\n}\n",
     "  if (tid < THREADS) write_rest(p, row, tid);\n  if (tid == 0) note(p, 6);\n}\n"),
)  # fmt: skip


def noted_sources():
    """Kernel sources that note the time."""
    files = compiler.sources()
    for text, instead in NOTES:
        if files["decode.cu"].count(text) != 1:
            raise SystemExit(f"decode.cu has no {text!r} any more, or several")
        files["decode.cu"] = files["decode.cu"].replace(text, instead)
    return files


class NotedLayer:
    """A layer whose launches note the time of every block."""

    def __init__(self, layer):
        self.layer = layer
        self.times = [
            torch.zeros(MOST_BLOCKS, WORDS, dtype=torch.int64, device=DEVICE) for _ in layer.kinds
        ]

    def attend(self):
        """Queue the layer as ``gpu_mixed.py`` does, if it has several tiers."""
        layer = self.layer
        newest, own = layer.tails[:, :, :, -1], layer.merge.parts
        for kind, part, times in zip(layer.kinds, own[1:], self.times, strict=True):
            kind.decoder.attend(
                layer.query, PagePool(kind.pages, PositionMode.RUNS), kind.lists, mixed.OPTIONS,
                result=part, query_positions=times,
            )  # fmt: skip
        layer._attend_dense(newest, own[0], None)
        layer.merge.merge(len(own), layer.result)

    def launches(self):
        """What every launch has noted, in microseconds from the layer's first block on."""
        noted = [times.cpu() for times in self.times]
        zero = min(int(times[times[:, 0] > 0, 0].min()) for times in noted)
        return [
            {"tier": kind.layout.tier.name, "blocks": kind.lists.blocks, **spread_of(times, zero)}
            for kind, times in zip(self.layer.kinds, noted, strict=True)
        ]


def spread_of(times, zero):
    """Median and last of each event of a launch's blocks."""
    found = {}
    for event, name in enumerate(EVENTS):
        own = [(int(t) - zero) / 1e3 for t in times[:, event] if int(t) >= zero]
        if own:
            found[name] = {"median": statistics.median(own), "last": max(own)}
    return found


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--allocation", type=Path, required=True)
    parser.add_argument("--budgets", default="20,10,5")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    return parser.parse_args()


def main():
    args = read_arguments()
    files = noted_sources()
    compiler.sources = lambda: files
    compiler._kernel_files.cache_clear()
    torch.manual_seed(1)
    held = load_file(args.allocation)
    names = bytes(held["tiers"].tolist()).decode().split(",")
    rope = mixed.case_rope(mixed.MODEL.head_dim)
    turns = mixed.TurnTable.build(rope, max_positions=131072 + 128, device=DEVICE)
    about, rows = common(args.commit, 0.0), []
    for batch, context in mixed.POINTS:
        for budget in args.budgets.split(","):
            made = mixed.layers_of(
                held[budget], names, batch, context, rope, turns, args.layers, 128
            )
            layers = [NotedLayer(layer) for layer in made if len(layer.kinds) > 1]
            # kernels are compiled and loaded here, not while a graph is captured
            for layer in layers:
                layer.attend()
            torch.cuda.synchronize()
            us = median_us(lambda i, own=layers: own[i].attend(), 2 * len(layers), len(layers))
            row = {"budget": budget, "batch": batch, "context": context, "us": us}
            row["layers"] = [layer.launches() for layer in layers]
            row |= {name: about[name] for name in ("device", "versions", "commit")}
            row["command"] = (
                f"PYTHONPATH=src python3 benchmarks/gpu_timeline.py --allocation {args.allocation}"
            )
            rows.append(row)
            print(f"{budget}% {(batch, context)} {us:.1f} us", flush=True)
            for launches in row["layers"]:
                parts = (
                    f"{each['tier']} {each['blocks']}: "
                    + ", ".join(
                        f"{name} {each[name]['median']:.1f}-{each[name]['last']:.1f}"
                        for name in EVENTS
                        if name in each
                    )
                    for each in launches
                )
                print("   " + "; ".join(parts), flush=True)
            del made, layers
            torch.cuda.empty_cache()
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
