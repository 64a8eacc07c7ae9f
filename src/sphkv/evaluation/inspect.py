# SPDX-License-Identifier: Apache-2.0
"""What a cache holds, a prompt's or a saved one: ledger, tier histogram, tier map."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.files import open_pages
from sphkv.evaluation.generate import GenerateConfig
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import CacheOptions, SphericalCache
from sphkv.integrations.transformers.stepping import score
from sphkv.store.store import PageStore


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
