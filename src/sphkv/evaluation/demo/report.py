# SPDX-License-Identifier: Apache-2.0
"""The demonstration as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from sphkv.evaluation.report.sections import table

_COLOURS = ("#c7d3e3", "#9db7d8", "#6f97cb", "#4475b5", "#2a5590", "#e0873a")

_LINES = ("#4475b5", "#c2570c")

_STYLE = """
:root { --ink: #1d2430; --paper: #ffffff; --line: #d5dbe4; --soft: #5b6675; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --paper: #14181f; --line: #333b48; --soft: #9aa5b5; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: 0.92rem; }
th, td { text-align: left; padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
.scroll { overflow-x: auto; }
.soft { color: var(--soft); }
"""


def render_report(
    result: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """The page: the table, bytes of every step, the controller's tier map, answers and text.

    Args:
        result: What ``run_demo`` returned.
        columns: Header of the printed table.
        rows: The printed table.
    """
    config = result["config"]
    _, tier, controller = result["caches"]
    title = f"Spherical KV on {html.escape(config['model'])}, {config['context']} tokens"
    answers = [
        (fact["question"], fact["answer"], *(cache["answers"][at] for cache in result["caches"]))
        for at, fact in enumerate(result["facts"])
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>Tier {html.escape(config['tier'])} for all tokens, and a controller under "
        f"{html.escape(config['budget'])} of the dense bytes; decode backend "
        f"{html.escape(result['backend'])}. One prefill serves all caches; the coded ones are then "
        "read without rebuilding a key.</p>",
        table(columns, rows),
        "<h2>Bytes of every step</h2><p class='soft'>Most bytes of each step after the document, "
        "everything included; dashed: what the budget allows.</p>",
        step_plot([tier, controller]),
        "<h2>Bytes per token by kind</h2>",
        *(_byte_bars(result, cache) for cache in (tier, controller)),
        "<h2>The controller's tier map</h2><p class='soft'>One row per layer and KV head, first "
        "token left; empty where it was dropped.</p>",
        f"<div class='scroll'>{_tier_map(controller['tier_map'])}</div>",
        "<h2>Hidden facts</h2>",
        table(("question", "true", *(cache["name"] for cache in result["caches"])), answers),
        "<h2>The text that was compared</h2>",
        f"<p>{html.escape(result['text'])}</p>",
        f"<p class='soft'>{html.escape(str(result['environment']))}</p></body></html>",
    ]
    return "\n".join(parts) + "\n"


def step_plot(caches: Sequence[dict[str, Any]]) -> str:
    """Bytes of every step of some caches, and what their budgets allowed, as SVG."""
    width, height, left, top = 560.0, 180.0, 80.0, 10.0
    steps = [cache["steps"] for cache in caches]
    highest = 1.1 * max(max(each["bytes"] + (each["limit"] or [])) for each in steps)
    first = min(each["num_tokens"][0] for each in steps)
    last = max(each["num_tokens"][-1] for each in steps)

    def line(tokens: list[int], sizes: list[int], style: str) -> str:
        points = " ".join(
            f"{left + width * (count - first) / max(1, last - first):.1f},"
            f"{top + height * (1 - size / highest):.1f}"
            for count, size in zip(tokens, sizes, strict=True)
        )
        return f"<polyline points='{points}' fill='none' {style}/>"

    parts = [f"<svg viewBox='0 0 {left + width + 120} {top + height + 40}' role='img'>"]
    parts.append(
        f"<path d='M{left} {top} V{top + height} H{left + width}' fill='none' "
        "stroke='var(--soft)'/>"
    )
    for colour, cache, each in zip(_LINES, caches, steps, strict=False):
        style = f"stroke='{colour}' stroke-width='2'"
        parts.append(line(each["num_tokens"], each["bytes"], style))
        y = top + height * (1 - each["bytes"][-1] / highest)
        label = html.escape(f"{cache['name']} {cache['setting']}")
        parts.append(f"<text x='{left + width + 6}' y='{y + 4:.1f}'>{label}</text>")
        if each["limit"]:
            dashed = f"{style} stroke-dasharray='5 4'"
            parts.append(line(each["num_tokens"], each["limit"], dashed))
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f"<text x='0' y='{y + 4:.1f}'>{share * highest / 2**20:.2f} MiB</text>")
    for count, x in ((first, left), (last, left + width - 40)):
        parts.append(f"<text x='{x}' y='{top + height + 20}'>{count:,}</text>")
    return "".join(parts) + "</svg>"


def _byte_bars(result: dict[str, Any], cache: dict[str, Any]) -> str:
    """Dense against coded bytes per token, the latter split by kind."""
    tokens, dense = cache["steps"]["num_tokens"][-1], result["dense_b_kv"]
    kinds = [
        (kind, size / tokens)
        for kind, size in cache["ledger"].items()
        if kind not in ("payload", "total", "tables") and size
    ]
    scale = 640 / dense
    parts = ["<svg viewBox='0 0 760 110' role='img' aria-label='bytes per token'>"]
    parts.append(f"<rect x='0' y='6' width='640' height='26' fill='{_COLOURS[-1]}'/>")
    parts.append(f"<text x='648' y='24'>dense {dense:,}</text>")
    left = 0.0
    for index, (kind, size) in enumerate(kinds):
        colour = _COLOURS[index % (len(_COLOURS) - 1)]
        parts.append(
            f"<rect x='{left:.2f}' y='40' width='{size * scale:.2f}' height='26' fill='{colour}'>"
            f"<title>{html.escape(kind)} {size:.1f}</title></rect>"
        )
        left += size * scale
    label = html.escape(f"{cache['name']} {cache['ledger']['total'] / tokens:,.0f}")
    parts.append(f"<text x='{left + 8:.1f}' y='58'>{label}</text>")
    legend = ", ".join(f"{kind} {size:,.0f}" for kind, size in kinds)
    parts.append(f"<text x='0' y='90'>{html.escape(legend)}</text></svg>")
    return "".join(parts)


def _tier_map(rows: list[list[str]]) -> str:
    if not rows:
        return "<p>The cache holds no pages.</p>"
    names = sorted({name for row in rows for name in row})
    colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    if "max" in colour:
        colour["max"] = _COLOURS[-1]
    colour["drop"] = "none"
    cell, height = 5, 6
    parts = [f"<svg viewBox='0 0 {cell * len(rows[0])} {height * len(rows) + 24}'>"]
    for y, row in enumerate(rows):
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or row[x] != row[start]:
                parts.append(
                    f"<rect x='{cell * start}' y='{height * y}' width='{cell * (x - start)}' "
                    f"height='{height - 1}' fill='{colour[row[start]]}'/>"
                )
                start = x
    for index, name in enumerate(names):
        x, y = 110 * index, height * len(rows) + 8
        parts.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour[name]}'/>")
        parts.append(f"<text x='{x + 18}' y='{y + 11}'>{html.escape(name)}</text>")
    return "".join(parts) + "</svg>"
