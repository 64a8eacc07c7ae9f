# SPDX-License-Identifier: Apache-2.0
"""What can be looked at without measuring: names, a cache's contents, what a budget would keep.

A cache, a prompt's or a saved one, is shown by its ledger, tier histogram and tier map; a budget by
the controller's decision about a prompt, without decoding a token.
"""

from __future__ import annotations

import base64
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.api import BACKENDS
from sphkv.baselines.registry import BASELINES
from sphkv.cache.files import open_pages
from sphkv.cache.plan import retention_tiers
from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import RUN_TOKENS, ladder
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.generate import GenerateConfig
from sphkv.evaluation.harness.states import read_prompt
from sphkv.evaluation.harness.subject import Decision, Subject
from sphkv.evaluation.report.sections import table
from sphkv.evaluation.runner.methods import AUTO, DENSE, JOINT, UNIFORM, method_names
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.splits import SPLITS, load_manifest
from sphkv.evaluation.workloads.qa import passage_segments
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import CacheOptions, SphericalCache
from sphkv.integrations.transformers.stepping import score
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of
from sphkv.store.store import PageStore

# of the smallest common models; sizes of states are listed for it
_HEAD_DIM = 64
_OURS = {
    DENSE: "bfloat16 pages read by the same kernels as ours",
    AUTO: "one tier or the controller, as the budget asks for: the cache's default",
    UNIFORM: "one tier for all older tokens",
    JOINT: "the controller: keep, demote or drop per token and head",
}
_WORKLOADS = {
    "lm": "W1: a book goes on; KL and NLL against the exact model",
    "qa": "W2: questions over many passages; F1",
    "needle": "hidden sentences; share found",
    "tools": "W3: tasks with tools; success",
}
_CALIBRATION_TOKENS = 1024
_COLUMNS = 400


def tier_ids(store: PageStore, layer: int, num_tokens: int, *, sequence: int = 0) -> Tensor:
    """``[kv_heads, num_tokens]`` int64 tier of each token; the drop tier where none is stored."""
    tiers = store.config.tiers
    shape = (store.config.geometry.num_kv_heads, num_tokens)
    found = torch.full(shape, tiers.drop_id, dtype=torch.int64)
    for group in store.pages(sequence, layer):
        view = store.view(group)
        live = view.live()
        heads = group.head_ids()[:, None].expand_as(live)[live]
        found[heads.cpu(), view.positions()[live].cpu()] = group.layout.tier_id
    tail = store.tail(sequence, layer)
    found[:, tail.first_position : tail.first_position + tail.num_tokens] = tiers.dense_id
    return found


def tier_map(store: PageStore, num_tokens: int, *, columns: int = 160) -> list[list[str]]:
    """Tier name of evenly spaced tokens, one row per layer and KV head."""
    at = torch.linspace(0, num_tokens - 1, columns).round().long()
    names = [tier.name for tier in store.config.tiers]
    rows = []
    for layer in range(store.config.geometry.num_layers):
        for head in tier_ids(store, layer, num_tokens)[:, at].tolist():
            rows.append([names[tier] for tier in head])
    return rows


def tier_histogram(store: PageStore, num_tokens: int) -> list[dict[str, Any]]:
    """Tokens at each tier, one row per layer and KV head."""
    names = [tier.name for tier in store.config.tiers]
    rows = []
    for layer in range(store.config.geometry.num_layers):
        for head, ids in enumerate(tier_ids(store, layer, num_tokens)):
            counts = torch.bincount(ids, minlength=len(names)).tolist()
            rows.append({"layer": layer, "head": head, **dict(zip(names, counts, strict=True))})
    return rows


def inspect_prompt(config: GenerateConfig) -> dict[str, Any]:
    """Prefill a prompt into a coded cache and describe the cache; nothing is generated."""
    text = config.text()
    model, tokenizer = load_model(config.model, torch.float32)
    ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(f"{ids.shape[1]} prompt tokens are more than the model's {limit}")
    options = CacheOptions(backend=config.backend)
    with SphericalCache.for_model(
        model, config.budget, tiers=config.tier, calibration=config.calibration, options=options
    ) as cache:
        score(model, cache, ids)
        store, tokens = cache.engine.store, ids.shape[1]
        if store is None:
            raise ValueError(
                f"{tokens} tokens are too few to calibrate on, so the cache is still dense: "
                "give a calibration or a longer prompt"
            )
        return _describe(store, [tokens])


def inspect_folder(folder: str) -> dict[str, Any]:
    """Describe a saved cache, without the model it was made with."""
    store = open_pages(Path(folder))
    return _describe(store, [store.num_tokens(sequence) for sequence in store.sequences])


def _describe(store: PageStore, tokens: list[int]) -> dict[str, Any]:
    """Ledger of all sequences; histogram and map of the first."""
    ledger, geometry = store.ledger(), store.config.geometry
    return {
        "tokens": tokens[0],
        "num_sequences": len(tokens),
        "tier": store.config.seal_tier,
        "b_kv": ledger.b_kv(sum(tokens)),
        "dense_b_kv": geometry.dense_bytes_per_token,
        "ledger": ledger.to_dict(),
        "tiers": [tier.name for tier in store.config.tiers],
        "histogram": tier_histogram(store, tokens[0]),
        "tier_map": tier_map(store, tokens[0]),
    }


def draw_tier_map(rows: list[list[str]]) -> bytes:
    """The token by head tier map as a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a tier map needs matplotlib: pip install 'sphkv[plots]'") from error
    names = sorted({name for row in rows for name in row})
    colours = ["#f2f2f2", "#9db7d8", "#6f97cb", "#4475b5", "#2a5590", "#173a68", "#e0873a"]
    cells = [[names.index(name) for name in row] for row in rows]
    figure = Figure(figsize=(9, max(2.0, 0.06 * len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colour_map = ListedColormap([colours[index % len(colours)] for index in range(len(names))])
    shown = axes.imshow(
        cells, aspect="auto", interpolation="nearest", cmap=colour_map, vmin=-0.5,
        vmax=len(names) - 0.5,
    )  # fmt: skip
    axes.set_xlabel("token (first left, evenly spaced)")
    axes.set_ylabel("layer and KV head")
    bar = figure.colorbar(shown, ticks=range(len(names)))
    bar.set_ticklabels(names)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def list_names(kind: str) -> list[dict[str, object]]:
    """Rows of a table, one per name.

    Args:
        kind: ``methods``, ``workloads``, ``backends``, ``tiers`` or ``splits``.
    """
    if kind == "methods":
        return [_method_row(name) for name in method_names()]
    if kind == "workloads":
        return [{"workload": name, "what": what} for name, what in _WORKLOADS.items()]
    if kind == "backends":
        return [{"backend": name} for name in ("auto", *BACKENDS)]
    if kind == "tiers":
        uniform, retention = ladder(_HEAD_DIM), retention_tiers(_HEAD_DIM)
        tables = {"one tier": uniform, "controller": retention}
        return [
            {
                "tier": tier.name,
                "for": name,
                "key_bits": tier.key_bits,
                "value_bits": tier.value_bits,
                "page_tokens": tier.page_tokens,
                "bytes": tier.state_bytes(_HEAD_DIM),
            }
            for name, table in tables.items()
            for tier in table
        ]
    manifest = load_manifest()
    return [
        {
            "split": split,
            "books": " ".join(manifest.books[split]),
            "stretches": 0 if split == "calibration" else _stretches(split),
            "questions": _questions(split),
            "needles": 0 if split == "calibration" else manifest.needles["count"],
        }
        for split in SPLITS
    ]


def _method_row(name: str) -> dict[str, object]:
    if name in _OURS:
        return {"method": name, "family": "ours", "what": _OURS[name]}
    spec = BASELINES[name]
    return {"method": name, "family": spec.family, "what": spec.paper}


def _stretches(split: str) -> str:
    manifest = load_manifest()
    books = len(manifest.books[split])
    return " ".join(f"{books * len(at)}x{size}" for size, at in manifest.stretches.items())


def _questions(split: str) -> int:
    first, stop = load_manifest().questions.get(split, (0, 0))
    return 2 * (stop - first)


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
