# SPDX-License-Identifier: Apache-2.0
"""Everything that has a name on the command line."""

from __future__ import annotations

from sphkv.attention.api import BACKENDS
from sphkv.baselines.registry import BASELINES
from sphkv.cache.plan import retention_tiers
from sphkv.core.tiers import ladder
from sphkv.evaluation.runner.methods import AUTO, DENSE, JOINT, UNIFORM, method_names
from sphkv.evaluation.splits import SPLITS, load_manifest

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
