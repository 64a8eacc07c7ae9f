# SPDX-License-Identifier: Apache-2.0
"""The budget bar and the token x head tier map of a plan."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

from sphkv.evaluation.harness.subject import Decision

_COLUMNS = 400


def draw_plan(record: dict[str, Any], decision: Decision) -> bytes:
    """PNG of a plan.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    contract = decision.contract
    names = list(record["tiers"])
    palette = ListedColormap(_colours(len(names)))
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    bar, tier_map = figure.subplots(2, 1, height_ratios=(1, 6))
    left = 0
    for tier, name in enumerate(names):
        size = record["bytes_by_tier"][name]
        if size:
            bar.barh(0, size, left=left, color=palette(tier), label=name)
            left += size
    meta = record["bytes"] - left
    bar.barh(0, max(0, meta), left=left, color="0.8", label="other")
    bar.axvline(record["limit_bytes"], color="black", linestyle="--")
    bar.set_yticks([])
    bar.set_xlabel("bytes; dashed: the budget")
    bar.legend(ncols=len(names) + 1, loc="upper center", bbox_to_anchor=(0.5, 1.8), fontsize=8)
    tokens = contract.num_tokens
    stride = max(1, tokens // _COLUMNS)
    rows = contract.tier_id.flatten(0, 1)[:, ::stride].numpy()
    norm = BoundaryNorm([at - 0.5 for at in range(len(names) + 1)], len(names))
    tier_map.imshow(
        rows, aspect="auto", interpolation="nearest", cmap=palette, norm=norm,
        extent=(0, tokens, rows.shape[0], 0),
    )  # fmt: skip
    for start, stop in decision.segments.retrieved:
        tier_map.axvline(start, color="black", linewidth=1)
        tier_map.axvline(stop, color="black", linewidth=1)
    tier_map.set_xlabel("token; lines bound the retrieved passages")
    tier_map.set_ylabel("layer x head")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _colours(count: int) -> list[tuple[float, float, float]]:
    """White for dropped, then ever darker blues, and orange for dense."""
    coded = max(1, count - 2)
    shades = [
        (0.80 - 0.70 * at / coded, 0.88 - 0.60 * at / coded, 0.97 - 0.45 * at / coded)
        for at in range(count - 2)
    ]
    return [(1.0, 1.0, 1.0), *shades, (0.90, 0.45, 0.10)]


def plan_html(record: dict[str, Any], image: bytes) -> str:
    """A page with the figure and all tables."""
    picture = base64.b64encode(image).decode()
    tiers = [[name, n, record["bytes_by_tier"][name]] for name, n in record["tiers"].items()]
    segments = [
        [name, int(row["tokens"]), f"{row['rho']:.3f}", f"{row['bytes']:.2f}"]
        for name, row in record["segments"].items()
    ]
    heads = [
        [row["layer"], row["head"], f"{row['bytes_per_token']:.2f}"]
        + [row[name] for name in record["tiers"]]
        for row in record["heads"]
    ]
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Retention plan</title>",
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}"
        "img{max-width:100%}</style>",
        f"<h1>{record['bytes']} of {record['limit_bytes']} bytes</h1>",
        f"<p>{record['num_tokens']} tokens, dense {record['dense_bytes']} bytes; head entropy "
        f"{record['head_entropy']:.3f}, Gini {record['head_gini']:.3f}</p>",
        f"<img alt='budget bar and tier map' src='data:image/png;base64,{picture}'>",
        _table(["tier", "states", "bytes"], tiers),
        _table(["segment", "tokens", "rho", "bytes per state"], segments),
        _table(["layer", "head", "bytes per token", *record["tiers"]], heads),
    ]
    return "\n".join(parts) + "\n"


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
