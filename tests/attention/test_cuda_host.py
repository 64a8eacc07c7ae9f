# SPDX-License-Identifier: Apache-2.0
"""The decode kernel's own source on the CPU, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch

from sphkv.attention.cuda import compiler
from sphkv.testing.decode_cases import CASES, ERROR_FLOOR, run_case

CPU = torch.device("cpu")
# Cases that share what these build, or differ in little, are left to the GPU.
CHOSEN = (
    "ragged, empty, partial",
    "runs, group 8",
    "heads of unequal lengths",
    "heads of unequal lengths, group 16",
    "a block per head",
    "one head without pages",
    "as many blocks for a head without pages",
    "no pages at all",
    "a position per token",
    "tokens, ragged, window, d=64, group 8",
    "window, soft-cap, sinks",
    "merged with another partial, sinks",
    "all hidden",
    "group 1",
    "group 16",
    "head dim 64",
    "values 3 bits",
    "values 16 bits",
    "128 slots",
    "128 slots, group 6",
    "128 slots, group 6, runs",
    "pages of 64",
    "pages of 64, runs",
    "pages of 64, runs, group 6",
    "pages of 64, d=64, runs, group 3, window",
    "pages of 64, d=64, group 7",
    "pages of 64, d=64, many in a block",
    "pages of 64, d=64, runs, many in a block",
    "pages of 64, 128 slots, group 6, runs",
    "pages of 64, 32 slots, runs",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_kernel_computes_attention(on_the_host, name):
    torch.manual_seed(CHOSEN.index(name))
    on_the_host()
    assert run_case(CASES[name], CPU) < ERROR_FLOOR


def test_many_blocks_merge_one_row(on_the_host):
    """More blocks than are merged at a time, and the same answer."""
    torch.manual_seed(1)
    on_the_host(40)
    case = replace(CASES["merged with another partial, sinks"], counts=((38,), (1,)))
    assert run_case(case, CPU) < ERROR_FLOOR


@pytest.mark.parametrize(
    ("processors", "text", "instead", "what"),
    [
        (2, "if (place.lane == 0) barrier_arrive(empty_barrier(stage.index));", "", "all threads"),
        (10, "row.part = row.index + kept_cta();", "row.part = row.index;", "nobody wrote"),
        (10, "cta = ctas - 1 - block / heads", "cta = block / heads", "nobody wrote"),
        (10, "Parts::clear(from, count, lane);", "", "left partial results"),
    ],
)
def test_a_broken_kernel_is_found(on_the_host, processors, text, instead, what):
    """The check can fail.

    Threads that wait for ever, blocks that write one another's place, that wait for one which may
    begin after them, or that leave something for the next launch.
    """
    sources = dict(compiler.sources())
    changed = {name: body.replace(text, instead) for name, body in sources.items()}
    assert changed != sources
    on_the_host(processors, changed)
    with pytest.raises((RuntimeError, ValueError), match=what):
        run_case(CASES["values 2 bits"], CPU)
