# SPDX-License-Identifier: Apache-2.0
"""Compile the usual kernels ahead of time: ``python -m sphkv.attention.cuda.build``.

Fills the package's ``cubins`` folder, where the loader looks first, so that a machine without nvcc
needs no compiler for them. Every other shape is compiled at first use.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sphkv.attention.cuda import compiler, decode, dense
from sphkv.attention.cuda.geometry import HEAD_DIMS, KernelShape
from sphkv.errors import CudaUnavailableError

_KEY_BITS = (2, 3)
_VALUE_BITS = (2, 3, 4)
_COLUMNS = (4, 8)
_GROUPS = (1, 2, 3, 4, 5, 7, 8)
# What calibrated models need: a few planes of two bits in pairs, a few without bits.
_DOUBLE_STEPS, _CONSTANT_STEPS = 1, 1

TARGETS = tuple(dict.fromkeys(compiler.ARCHITECTURES.values()))
"""Architectures that are built for if none is named."""

Build = tuple[str, tuple[str, ...]]


def usual_builds() -> Iterator[Build]:
    """Entry point and definitions of each kernel worth shipping."""
    for head_dim, key_bits, value_bits, columns in itertools.product(
        HEAD_DIMS, _KEY_BITS, _VALUE_BITS, _COLUMNS
    ):
        shape = KernelShape(
            head_dim,
            key_bits * head_dim // 4,
            _DOUBLE_STEPS,
            _CONSTANT_STEPS,
            value_bits,
            columns,
        )
        yield decode.ENTRY_POINT, shape.fitted().defines()
    for head_dim, group in itertools.product(HEAD_DIMS, _GROUPS):
        yield dense.ENTRY_POINT, dense.definitions(head_dim, group)


def build(folder: Path, target: str, builds: Iterable[Build] | None = None) -> list[Path]:
    """Compile kernels into a folder.

    Args:
        folder: Where the cubins go; made if missing.
        target: Architecture, such as ``sm_90a``.
        builds: Entry points and definitions; the usual ones if None.

    Returns:
        The files, old and new.

    Raises:
        CudaUnavailableError: nvcc is missing or refuses the sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for kernel, defines in usual_builds() if builds is None else builds:
        path = folder / compiler.cubin_name(kernel, defines, target)
        if not path.is_file():
            image = compiler.compile_with_nvcc(kernel, defines, target)
            if image is None:
                raise CudaUnavailableError(f"nvcc is missing or cannot build {kernel} for {target}")
            path.write_bytes(image)
        files.append(path)
    return files


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compile the usual GPU kernels ahead of time.")
    parser.add_argument("--folder", type=Path, default=compiler.shipped_folder())
    parser.add_argument(
        "--target", nargs="+", default=TARGETS, help="architectures (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    try:
        files = [file for target in args.target for file in build(args.folder, target)]
    except CudaUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{len(files)} kernels in {args.folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
