# SPDX-License-Identifier: Apache-2.0
"""Spherical KV: a KV cache kept as packed angle codes under an exact byte budget.

Importing this package loads nothing else and changes nothing; a public name is imported from
its home when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphkv.core.budget import ByteBudget
    from sphkv.core.contract import WriteContract
    from sphkv.core.errors import BudgetExceeded
    from sphkv.core.geometry import KVGeometry
    from sphkv.core.tiers import TierSpec, TierTable, ladder
    from sphkv.integrations.models import load_model
    from sphkv.integrations.transformers.cache import SphericalCache
    from sphkv.integrations.transformers.retained import RetainedCache

__version__ = "0.1.0"

__all__ = [
    "BudgetExceeded",
    "ByteBudget",
    "KVGeometry",
    "RetainedCache",
    "SphericalCache",
    "TierSpec",
    "TierTable",
    "WriteContract",
    "__version__",
    "ladder",
    "load_model",
]

_HOMES = {
    "BudgetExceeded": "sphkv.core.errors",
    "ByteBudget": "sphkv.core.budget",
    "KVGeometry": "sphkv.core.geometry",
    "RetainedCache": "sphkv.integrations.transformers.retained",
    "SphericalCache": "sphkv.integrations.transformers.cache",
    "TierSpec": "sphkv.core.tiers",
    "TierTable": "sphkv.core.tiers",
    "WriteContract": "sphkv.core.contract",
    "ladder": "sphkv.core.tiers",
    "load_model": "sphkv.integrations.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
