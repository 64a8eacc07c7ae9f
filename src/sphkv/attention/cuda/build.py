# SPDX-License-Identifier: Apache-2.0
"""Compile kernels ahead of time and in parallel: ``python -m sphkv.attention.cuda.build``.

The command fills the package's ``cubins`` folder, where the loader looks first, so that a machine
without nvcc needs no compiler for the usual kernels. ``prepare`` compiles what one cache will need,
into the folder that is kept between runs; every other shape is compiled at first use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sphkv.attention.cuda import block_shares, compiler, decode, dense, merge
from sphkv.attention.cuda.encode import encode_builds, reorder_build
from sphkv.attention.cuda.geometry import (
    HEAD_DIMS,
    MAX_SLOTS,
    PAGE_SIZES,
    PAGE_TOKENS,
    KernelShape,
    is_served,
)
from sphkv.core.tiers import TierTable, ladder
from sphkv.errors import CudaUnavailableError
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

_KEY_BITS = (2, 3)
_VALUE_BITS = (2, 3, 4)
_COLUMNS = (4, 8)
_GROUPS = (1, 2, 3, 4, 5, 7, 8)
# Steps of second look-ups and of constants that calibrated models need, by bits of a key: a few
# planes of two bits in pairs; none to many without bits where these are few.
_STEPS = {2: ((1, 0), (1, 1), (1, 2), (1, 4)), 3: ((1, 1), (1, 2)), 4: ((1, 0),), 6: ((0, 0),)}
# Bits of keys and values that a controller on a GPU chooses from, in pages of runs.
_CONTROLLED = ((2, 2), (3, 4), (4, 8), (6, 8))
# Pages of single tokens are rare: they are compiled when the first one comes.
_MODES = (PositionMode.CONTIGUOUS, PositionMode.RUNS)

TARGETS = tuple(dict.fromkeys(compiler.ARCHITECTURES.values()))
"""Architectures that are built for if none is named."""

Build = tuple[str, tuple[str, ...]]
_Made = TypeVar("_Made")


def usual_builds() -> Iterator[Build]:
    """Entry point and definitions of each kernel worth shipping."""
    for head_dim, columns in itertools.product(HEAD_DIMS, _COLUMNS):
        uniform = [*itertools.product(_KEY_BITS, _VALUE_BITS)]
        yield from _decode_builds(head_dim, columns, uniform, PAGE_TOKENS, PositionMode.CONTIGUOUS)
        for tokens in PAGE_SIZES:
            yield from _decode_builds(head_dim, columns, _CONTROLLED, tokens, PositionMode.RUNS)
    yield block_shares.ENTRY_POINT, ()
    for head_dim in HEAD_DIMS:
        yield merge.ENTRY_POINT, merge.definitions(head_dim)
    for head_dim, group in itertools.product(HEAD_DIMS, _GROUPS):
        yield dense.ENTRY_POINT, dense.definitions(head_dim, group)
    for head_dim, tokens in itertools.product(HEAD_DIMS, PAGE_SIZES):
        yield from tier_builds(ladder(head_dim, page_tokens=tokens), head_dim)


def _decode_builds(
    head_dim: int, columns: int, bits: Iterable[tuple[int, int]], tokens: int, mode: PositionMode
) -> Iterator[Build]:
    """Kernels that read pages of some bits per key and value element."""
    for key_bits, value_bits in bits:
        slots = key_bits * head_dim // 4
        if slots > MAX_SLOTS:
            continue
        for doubles, constants in _STEPS[key_bits]:
            shape = KernelShape(
                head_dim,
                slots,
                doubles,
                constants,
                value_bits,
                columns,
                positions=mode,
                page_tokens=tokens,
            )
            yield decode.ENTRY_POINT, shape.fitted().defines()


def tier_builds(tiers: TierTable, head_dim: int) -> Iterator[Build]:
    """Kernels that encode and reorder the pages of some tiers, in runs or not."""
    for tier_id, tier in enumerate(tiers):
        if not tier.has_value_codes:
            continue
        layouts = [PageLayout(tier_id, tier, head_dim, mode) for mode in _MODES]
        if is_served(layouts[0]):
            yield reorder_build(layouts[0])
            for layout in layouts:
                yield from encode_builds(layout)


def build(folder: Path, target: str, builds: Iterable[Build] | None = None) -> list[Path]:
    """Compile kernels into a folder, as many at once as there are processors.

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

    def make(each: Build) -> Path:
        path = folder / compiler.cubin_name(*each, target)
        if not path.is_file():
            image = compiler.compile_with_nvcc(*each, target)
            if image is None:
                raise CudaUnavailableError(
                    f"nvcc is missing or cannot build {each[0]} for {target}"
                )
            path.write_bytes(image)
        return path

    return _each_in_parallel(make, list(usual_builds() if builds is None else builds))


def prepare(builds: Iterable[Build], target: str, *, is_told: bool = True) -> int:
    """Compile what is missing of some kernels into the folder that is kept between runs.

    Args:
        builds: Entry points and definitions.
        target: Architecture, such as ``sm_90a``.
        is_told: Whether a line on standard error says how long it takes.

    Returns:
        Kernels that were compiled.

    Raises:
        CudaUnavailableError: There is no compiler.
    """
    names = {compiler.cubin_name(*each, target): each for each in builds}
    missing = [each for name, each in names.items() if compiler.find_cubin(name) is None]
    if not missing:
        return 0
    began = time.perf_counter()
    if is_told:
        sys.stderr.write(f"sphkv: compiling {len(missing)} kernels, once for this machine ...")
        sys.stderr.flush()
    _each_in_parallel(lambda each: compiler.load_cubin(*each, target), missing)
    if is_told:
        sys.stderr.write(f" {time.perf_counter() - began:.0f} s\n")
    return len(missing)


def prepare_behind(
    builds: Iterable[Build], target: str, *, is_told: bool = True
) -> threading.Thread:
    """``prepare`` in a thread of its own, for a caller that has other things to do meanwhile.

    A kernel that is asked for before it is there is waited for, or compiled by who asks; so is one
    that cannot be compiled, and its error is raised then.
    """
    wanted = list(builds)

    def run() -> None:
        try:
            prepare(wanted, target, is_told=is_told)
        except (CudaUnavailableError, RuntimeError, OSError) as error:
            sys.stderr.write(f" failed: {error}\n")

    thread = threading.Thread(target=run, name="sphkv-kernels", daemon=True)
    thread.start()
    return thread


def _each_in_parallel(make: Callable[[Build], _Made], builds: list[Build]) -> list[_Made]:
    with ThreadPoolExecutor(max(1, min(len(builds), os.cpu_count() or 1))) as pool:
        return list(pool.map(make, builds))


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
