# SPDX-License-Identifier: Apache-2.0
"""Draw loss against key bits, from a record of ``sphkv eval lm --compare``.

python benchmarks/plot_codecs.py results/lm/smollm2-1024-compare.json docs/images/codecs.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

STYLES = {
    "spherical": ("Spherical KV", "#d9622b", "o"),
    "rotation-lloyd": ("random rotation, Lloyd-Max", "#4475b5", "s"),
    "hadamard-int": ("Hadamard, integers", "#6f97cb", "^"),
    "per-channel-int": ("integers per channel", "#7a8594", "D"),
    "hyperspherical": ("the paper's angles", "#3f8f7b", "v"),
    "polar_tree": ("polar tree", "#8fb8ad", "P"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    rows = json.loads(args.record.read_text(encoding="utf-8"))
    # the same bytes from the same record
    mpl.rcParams["svg.hashsalt"] = "sphkv"
    figure = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for method, (label, colour, marker) in STYLES.items():
        points = sorted((row["key_bits"], row["kl"]) for row in rows if row["method"] == method)
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=label, lw=2)
    axes.set_yscale("log")
    axes.set_xlabel("bits per key element, all metadata included")
    axes.set_ylabel("KL to the dense model, nats per token")
    context = rows[0]["config"]["context"]
    axes.set_title(f"SmolLM2-135M, {context:,} tokens: keys coded, values kept", fontsize=11)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
