# SPDX-License-Identifier: Apache-2.0
"""Draw the README's picture: loss against bytes, from the records of ``sphkv sweep``.

python benchmarks/plot_sweep.py results/sweep/smollm2.jsonl docs/images/sweep.svg
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib as mpl
from matplotlib.figure import Figure

STYLES = {
    "joint": ("Spherical KV, controller", "#d9622b", "o"),
    "spherical": ("Spherical KV, one tier", "#eb9a6f", "o"),
    "h2o": ("H2O", "#4475b5", "s"),
    "expected_attention": ("Expected Attention", "#6f97cb", "^"),
    "snapkv": ("SnapKV", "#3f8f7b", "v"),
    "streaming_llm": ("StreamingLLM", "#8fb8ad", "<"),
    "kivi": ("KIVI", "#7a8594", "D"),
    "ott": ("OTT", "#a58bbd", "P"),
    "polarquant_rope": ("PolarQuant", "#77609c", "X"),
    "turboquant": ("TurboQuant", "#b5a642", "*"),
}


def read_points(path: Path) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Share of dense bytes and KL of every method, averaged over texts; and the context."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    dense = next(row["setup"]["dense_bytes_per_token"] for row in rows if row["kind"] == "run")
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    context = 0
    for row in rows:
        if row["kind"] == "point" and row["case"].startswith("lm-") and row["status"] == "measured":
            share = 100 * row["memory"]["b_kv"] / dense
            found[row["method"], row["budget"]].append((share, row["quality"]["kl"]))
            context = row["context"]
    points = defaultdict(list)
    for (method, _), pairs in found.items():
        points[method].append((mean(p[0] for p in pairs), mean(p[1] for p in pairs)))
    return points, context


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    points, context = read_points(args.records)
    # the same bytes from the same record
    mpl.rcParams["svg.hashsalt"] = "sphkv"
    figure = Figure(figsize=(7.6, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for method, (label, colour, marker) in STYLES.items():
        width = 2.5 if method in ("joint", "spherical") else 1.3
        axes.plot(
            *zip(*sorted(points[method]), strict=True),
            marker=marker, color=colour, label=label, lw=width, ms=6,
        )  # fmt: skip
    axes.axhline(0.05, color="#555555", lw=1, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [3, 4, 6, 9, 14, 20, 28]
    axes.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("resident bytes, everything counted, of a dense bfloat16 cache")
    axes.set_ylabel("KL to the dense model, nats per token")
    axes.set_title(f"SmolLM2-135M, {context:,} tokens of two books", fontsize=11)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
