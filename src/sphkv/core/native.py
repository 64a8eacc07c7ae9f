# SPDX-License-Identifier: Apache-2.0
"""The C++ extension, where it was built."""

from functools import cache
from importlib import import_module
from typing import Any

from sphkv.errors import NativeUnavailableError

_MODULE = "sphkv._kernels"


@cache
def native_kernels() -> Any | None:
    """The extension module, or None where it was not built."""
    try:
        return import_module(_MODULE)
    except ImportError:
        return None


def require_kernels() -> Any:
    """The extension module.

    Raises:
        NativeUnavailableError: It was not built.
    """
    module = native_kernels()
    if module is None:
        raise NativeUnavailableError(
            "the native kernels were not built; install a wheel of sphkv, or install it where a "
            "C++17 compiler is present"
        )
    return module
