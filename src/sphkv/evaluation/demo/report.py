# SPDX-License-Identifier: Apache-2.0
"""The demonstration as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

_COLOURS = ("#c7d3e3", "#9db7d8", "#6f97cb", "#4475b5", "#2a5590", "#e0873a")

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


def render_report(result: dict[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    """The page: the table, bytes by kind, the tier map, the answers and both texts.

    Args:
        result: What ``run_demo`` returned.
        rows: The printed table: name, dense, spherical.
    """
    config = result["config"]
    title = f"Spherical KV on {html.escape(config['model'])}, {config['context']} tokens"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>Tier {html.escape(config['tier'])}, decode backend {result['backend']}. One prefill "
        "serves both caches; the coded one is then read without rebuilding a key.</p>",
        _table(("", "dense", "spherical"), rows),
        "<h2>Bytes per token</h2>",
        _byte_bars(result),
        "<h2>Tier map</h2><p class='soft'>One row per layer and KV head, first token left.</p>",
        f"<div class='scroll'>{_tier_map(result['tier_map'])}</div>",
        "<h2>Hidden facts</h2>",
        _table(
            ("question", "true", "dense", "spherical"),
            [(a["question"], a["answer"], a["dense"], a["coded"]) for a in result["answers"]],
        ),
        "<h2>Continuations</h2>",
        _table(
            ("cache", "text"),
            [("dense", result["dense"]["text"]), ("spherical", result["coded"]["text"])],
        ),
        f"<p class='soft'>{html.escape(str(result['environment']))}</p></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _byte_bars(result: dict[str, Any]) -> str:
    """Dense against coded bytes per token, the latter split by kind."""
    context, dense = result["config"]["context"], result["dense_b_kv"]
    kinds = [
        (kind, size / context)
        for kind, size in result["ledger"].items()
        if kind not in ("payload", "total") and size
    ]
    scale = 640 / dense
    parts = ["<svg viewBox='0 0 760 150' role='img' aria-label='bytes per token'>"]
    parts.append(f"<rect x='0' y='10' width='640' height='32' fill='{_COLOURS[-1]}'/>")
    parts.append(f"<text x='648' y='31'>dense {dense:,}</text>")
    left = 0.0
    for index, (kind, size) in enumerate(kinds):
        colour = _COLOURS[index % (len(_COLOURS) - 1)]
        parts.append(
            f"<rect x='{left:.2f}' y='54' width='{size * scale:.2f}' height='32' fill='{colour}'>"
            f"<title>{html.escape(kind)} {size:.1f}</title></rect>"
        )
        left += size * scale
    parts.append(f"<text x='{left + 8:.1f}' y='75'>spherical {result['b_kv']:,.0f}</text>")
    legend = ", ".join(f"{kind} {size:,.0f}" for kind, size in kinds)
    parts.append(f"<text x='0' y='115'>{html.escape(legend)}</text></svg>")
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
