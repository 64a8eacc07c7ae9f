# SPDX-License-Identifier: Apache-2.0
"""What a budget would keep of a prompt, without decoding a token, and a picture of it."""

from __future__ import annotations

import base64
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import RUN_TOKENS
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import read_prompt
from sphkv.evaluation.harness.subject import Decision, Subject
from sphkv.evaluation.report.sections import table
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.qa import passage_segments
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of

_CALIBRATION_TOKENS = 1024

_COLUMNS = 400


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """A prompt and a budget.

    Attributes:
        model: ``smollm2``, a local folder or a hub name.
        prompt_file: UTF-8 text.
        budget: Such as ``"10%"``.
        policy: Policy file; None takes equal weights.
        calibration: Calibration file; None calibrates on the prompt.
        max_tokens: Tokens of the prompt that are read at most; None reads all.
        page_tokens: States of a coded page.
    """

    model: str
    prompt_file: str
    budget: str
    policy: str | None = None
    calibration: str | None = None
    max_tokens: int | None = None
    page_tokens: int = 32

    def __post_init__(self) -> None:
        """Reject a prompt of no tokens."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {self.max_tokens}")


def plan_retention(config: PlanConfig) -> tuple[dict[str, Any], Decision]:
    """Store a prompt under a budget and say what was kept.

    Returns:
        A record with ``bytes``, ``limit_bytes`` and counts by tier, segment and head, and the
        decision itself.

    Raises:
        BudgetError: What must stay dense does not fit; says how many bytes are missing.
    """
    ByteBudget.parse(config.budget)
    file = Path(config.prompt_file)
    if not file.is_file():
        raise FileNotFoundError(f"no prompt file at {file}")
    session = Session(
        config.model,
        calibration_file=None if config.calibration is None else Path(config.calibration),
        policy=None if config.policy is None else Path(config.policy),
    )
    text = file.read_text(encoding="utf-8")
    ids = session.tokenizer(text, return_tensors="pt").input_ids[:, : config.max_tokens]
    if config.calibration is None:
        session.calibrate_on(ids[:, :_CALIBRATION_TOKENS])
    subject = session.factory.controlled(
        config.budget,
        segments=passage_segments(session.tokenizer, ids[0].tolist()),
        page_tokens=config.page_tokens,
    )
    subject.store_prompt(read_prompt(session.model, ids))
    decision = subject.decision()
    assert decision is not None
    return describe_plan(subject, decision, config), decision


def describe_plan(subject: Subject, decision: Decision, config: PlanConfig) -> dict[str, Any]:
    """Bytes and counts of a stored prompt."""
    contract, tiers, geometry = decision.contract, decision.tiers, subject.geometry
    names = [tier.name for tier in tiers]
    each = state_bytes_of(contract.tier_id, tiers.state_bytes(geometry.head_dim))
    counts = contract.state_counts(len(tiers))
    spread = head_spread(each)
    labels = decision.segments.label(contract.num_tokens, recent_tokens=RUN_TOKENS)
    ledger = subject.ledger()
    bytes_by_tier = {
        name: int(counts[..., tier].sum()) * tiers[tier].state_bytes(geometry.head_dim)
        for tier, name in enumerate(names)
    }
    return {
        "bytes": subject.resident_bytes(),
        "limit_bytes": subject.limit_bytes(contract.num_tokens),
        "dense_bytes": geometry.dense_bytes_per_token * contract.num_tokens,
        "num_tokens": contract.num_tokens,
        "ledger": ledger.to_dict(),
        "tiers": {name: int(counts[..., tier].sum()) for tier, name in enumerate(names)},
        "bytes_by_tier": bytes_by_tier,
        "segments": segment_spread(each, labels),
        "heads": [
            {
                "layer": row // geometry.num_kv_heads,
                "head": row % geometry.num_kv_heads,
                "bytes_per_token": spread.bytes_per_token[row],
                **dict(zip(names, line, strict=True)),
            }
            for row, line in enumerate(counts.flatten(0, 1).tolist())
        ],
        "head_entropy": spread.entropy,
        "head_gini": spread.gini,
        "protected": int(contract.protected.sum()),
        "config": {
            **asdict(config),
            **{
                key: (path := getattr(config, key)) and Path(path).name
                for key in ("prompt_file", "policy", "calibration")
            },
        },
        "environment": describe_environment(),
    }


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
    return table(columns, [[str(cell) for cell in row] for row in rows])
