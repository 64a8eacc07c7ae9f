# SPDX-License-Identifier: Apache-2.0
"""Spherical KV: a KV cache kept as packed angle codes under an exact byte budget.

Importing this package loads nothing else and changes nothing; a public name is imported from
its home when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphkv.codec.calibration import Calibration
    from sphkv.core.budget import ByteBudget
    from sphkv.core.tiers import TierSpec
    from sphkv.errors import (
        BackendUnavailableError,
        BudgetError,
        CacheFileError,
        CudaUnavailableError,
        NativeUnavailableError,
        SphKVError,
        UnsupportedBatchError,
        UnsupportedModelError,
    )
    from sphkv.integrations.models import load_model
    from sphkv.integrations.transformers.cache import (
        CacheOptions,
        RetentionOptions,
        SphericalCache,
    )
    from sphkv.integrations.transformers.calibrate import calibrate_model
    from sphkv.retention.gate import GateOptions

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BudgetError",
    "ByteBudget",
    "CacheFileError",
    "CacheOptions",
    "Calibration",
    "CudaUnavailableError",
    "GateOptions",
    "NativeUnavailableError",
    "RetentionOptions",
    "SphKVError",
    "SphericalCache",
    "TierSpec",
    "UnsupportedBatchError",
    "UnsupportedModelError",
    "__version__",
    "calibrate_model",
    "load_model",
]

_HOMES = {
    "BackendUnavailableError": "sphkv.errors",
    "BudgetError": "sphkv.errors",
    "ByteBudget": "sphkv.core.budget",
    "CacheFileError": "sphkv.errors",
    "CacheOptions": "sphkv.integrations.transformers.cache",
    "Calibration": "sphkv.codec.calibration",
    "CudaUnavailableError": "sphkv.errors",
    "GateOptions": "sphkv.retention.gate",
    "NativeUnavailableError": "sphkv.errors",
    "RetentionOptions": "sphkv.integrations.transformers.cache",
    "SphKVError": "sphkv.errors",
    "SphericalCache": "sphkv.integrations.transformers.cache",
    "TierSpec": "sphkv.core.tiers",
    "UnsupportedBatchError": "sphkv.errors",
    "UnsupportedModelError": "sphkv.errors",
    "calibrate_model": "sphkv.integrations.transformers.calibrate",
    "load_model": "sphkv.integrations.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
