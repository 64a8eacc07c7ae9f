# SPDX-License-Identifier: Apache-2.0
"""The evidence as one self-contained HTML page, with CSV and PNG beside it."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sphkv.evaluation.frontier import PanelFrontier, build_frontier, build_panels
from sphkv.evaluation.report.charts import colour_of
from sphkv.evaluation.report.mechanism import (
    allocation_parts,
    depth_curves,
    gate_traces,
    phase_diagram,
    tier_maps,
)
from sphkv.evaluation.report.sections import (
    ablation_part,
    behaviour_curves,
    behaviour_table,
    budget_curves,
    byte_bars,
    certificate_part,
    drift_bars,
    facet_table,
    frontier_panels,
    panel_title,
    readoff_tables,
    time_bars,
)

_STYLE = """
:root { --ink: #1d2430; --paper: #ffffff; --line: #d5dbe4; --soft: #5b6675; --grey: #9aa3af; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --paper: #14181f; --line: #333b48; --soft: #9aa5b5; --grey: #6b7686; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 74rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 0.5rem 0; }
th, td { text-align: left; padding: 0.25rem 0.5rem; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr));
  gap: 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 11px; } svg .title { font-size: 13px; font-weight: 600; }
svg .name { fill: var(--soft); } svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .axis { stroke: var(--soft); } svg .grid { stroke: var(--line); stroke-dasharray: 2 3; }
svg polyline { stroke-width: 1.8; } svg .star { stroke: var(--paper); stroke-width: 0.8; }
svg .excluded { fill: none; stroke: var(--grey); stroke-width: 1.4; }
.soft { color: var(--soft); } .keys label { margin-right: 1rem; white-space: nowrap; }
.keys span { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 50%;
  margin: 0 0.3rem; }
svg.tiers { max-width: 52rem; } svg .void { fill: none; stroke: var(--line); }
td.safe { background: #0f8a5f33; } td.conservative { background: #b0890044; }
td.unstable { background: #c2410c55; }
pre { overflow-x: auto; font-size: 0.8rem; }
"""

# Switches a method off and on in every chart.
_SCRIPT = """
for (const box of document.querySelectorAll('.keys input')) {
  box.addEventListener('change', () => {
    for (const part of document.querySelectorAll('.series')) {
      if (part.dataset.method === box.value) { part.style.display = box.checked ? '' : 'none'; }
    }
  });
}
"""


def render_report(
    records: Sequence[Mapping[str, Any]],
    frontiers: Sequence[PanelFrontier],
    command: str,
    *,
    certificates: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page.

    Args:
        records: As ``load_records`` returns them.
        frontiers: Of the same records.
        command: What was run to measure them, for the reader.
        certificates: Of ``sphkv certify``, shown beside.
    """
    methods = list(dict.fromkeys(m.method for f in frontiers for m in f.methods))
    setups = {json.dumps(record["setup"], sort_keys=True, indent=1) for record in records}
    sections = [
        ("Frontiers at equal quality", _FRONTIER_NOTE + frontier_panels(frontiers)),
        ("Read-off", readoff_tables(frontiers)),
        ("Quality against budget", budget_curves(frontiers)),
        ("Needles by depth, each method's star", depth_curves(records, frontiers)),
        ("Needles by depth, % found", facet_table(records, "needle", "depth")),
        ("Questions by place of the answer, F1", facet_table(records, "qa", "position")),
        ("Questions by number of distractors, F1", facet_table(records, "qa", "num_distractors")),
        ("Answers that differ from dense's, against budget", behaviour_curves(records, frontiers)),
        ("Behaviour against budget", behaviour_table(records)),
        ("Drift of single tokens", drift_bars(records, frontiers)),
        ("Time of each star", time_bars(records, frontiers)),
        ("Bytes of each star", byte_bars(records, frontiers)),
        ("Tier map", tier_maps(records, frontiers)),
        ("Where the controller spends", allocation_parts(records, frontiers)),
        ("Stability phase diagram", phase_diagram(records)),
        ("Gate trace", gate_traces(records, frontiers)),
        ("Ablation", ablation_part(records)),
        ("Witnesses", "".join(map(certificate_part, certificates))),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections if content)
    return "\n".join(
        [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>Spherical KV: evidence</title><style>{_STYLE}</style></head><body>",
            "<h1>Spherical KV: evidence</h1>",
            f"<p class='soft'>{len(records)} records. Measured with <code>{html.escape(command)}"
            "</code></p>",
            _keys(methods),
            body,
            "<h2>Where it was measured</h2>",
            *(f"<details><summary>Run</summary><pre>{html.escape(s)}</pre></details>"
              for s in sorted(setups)),
            f"<script>{_SCRIPT}</script></body></html>",
        ]
    ) + "\n"  # fmt: skip


_FRONTIER_NOTE = (
    "<p class='soft'>Left and up is better. A hollow grey point lost more quality than allowed. "
    "The line is a method's Pareto envelope, the star its best throughput per byte. Point at a "
    "mark for its figures.</p>"
)


def _keys(methods: Sequence[str]) -> str:
    boxes = "".join(
        f"<label><input type='checkbox' value='{html.escape(name)}' checked>"
        f"<span style='background:{colour_of(index)}'></span>{html.escape(name)}</label>"
        for index, name in enumerate(methods)
    )
    return f"<p class='keys'>{boxes}</p>"


def points_csv(frontiers: Sequence[PanelFrontier]) -> str:
    """Every operating point as CSV, the data behind the charts."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("model", "workload", "context", "method", "budget", "b_kv", "b_hbm", "tok_s", "quality",
         "unit", "is_retained", "is_envelope", "is_star", "num_prompts", "realisation")
    )  # fmt: skip
    for frontier in frontiers:
        key = frontier.panel.key
        for method in frontier.methods:
            for p in method.retained + method.excluded:
                writer.writerow(
                    (key.model, key.workload, key.context, p.method, p.budget, f"{p.b_kv:.3f}",
                     f"{p.b_hbm:.1f}", f"{p.speed:.4f}", f"{p.quality:.6f}", frontier.panel.unit,
                     int(p in method.retained), int(p in method.envelope), int(p is method.star),
                     p.num_cases, p.realisation)
                )  # fmt: skip
    return text.getvalue()


def draw_png(frontiers: Sequence[PanelFrontier], path: Path) -> None:
    """The frontier panels as a picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(frontiers))
    rows = -(-len(frontiers) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, frontier in enumerate(frontiers, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(panel_title(frontier), fontsize=9)
        axes.set_xscale("log")
        axes.set_xlabel("KV bytes per token")
        axes.set_ylabel("decode tokens/s")
        for index, method in enumerate(frontier.methods):
            colour = colour_of(index)
            for p in method.excluded:
                axes.plot(p.b_kv, p.speed, "o", mfc="none", mec="#9aa3af", ms=5)
            xs, ys = [p.b_kv for p in method.retained], [p.speed for p in method.retained]
            axes.plot(xs, ys, "o", color=colour, ms=5, label=method.method)
            line = method.envelope
            axes.plot([p.b_kv for p in line], [p.speed for p in line], color=colour, lw=1.2)
            if method.star is not None:
                axes.plot(method.star.b_kv, method.star.speed, "*", color=colour, ms=13)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def make_frontiers(
    records: Sequence[Mapping[str, Any]], *, delta: float, kl: float, quality_field: str | None
) -> list[PanelFrontier]:
    """Frontiers of all panels of some records."""
    panels = build_panels(records, delta=delta, kl=kl, quality_field=quality_field)
    return [build_frontier(panel) for panel in panels]
