# SPDX-License-Identifier: Apache-2.0
"""The merge of what several launches found, its kernel run on the CPU."""

import pytest
import torch

from sphkv.attention.cuda.merge import MOST_PARTS, PartsMerge
from sphkv.attention.partial import PartialAttention, merge_partials

CPU = torch.device("cpu")
HEADS = 6


def fill(merge, count):
    """Random parts: one of a row saw no key, nor did any of another row."""
    held = [PartialAttention(part.output, part.lse) for part in merge.parts[:count]]
    for part in held:
        part.output.normal_(), part.lse.normal_(std=20)
    held[-1].lse[0, 1], held[-1].output[0, 1] = -torch.inf, 0.0
    for part in held:
        part.lse[1, 2], part.output[1, 2] = -torch.inf, 0.0
    return [PartialAttention(part.output.double(), part.lse.double()) for part in held]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_become_one_and_their_places_empty(on_the_host, head_dim, dtype, has_sinks):
    torch.manual_seed(0)
    on_the_host()
    merge = PartsMerge(4, 2, HEADS, head_dim, CPU)
    for count in (4, 2):
        assert merge.is_clear()
        each = fill(merge, count)
        sinks = torch.randn(HEADS) if has_sinks else None
        if sinks is not None:
            each.append(PartialAttention.of_sinks(sinks.double(), each[0], heads_dim=1))
        result = PartialAttention(
            torch.empty(2, HEADS, head_dim, dtype=dtype), torch.empty(2, HEADS)
        )
        merge.merge(count, result, sink_logits=sinks)
        right = merge_partials(each)
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
        assert torch.allclose(result.output.double(), right.output, atol=tolerance, rtol=tolerance)
        assert torch.allclose(result.lse.double(), right.lse, atol=1e-4)
    assert merge.is_clear()


def test_a_part_that_nobody_wrote_is_waited_for(on_the_host):
    on_the_host()
    merge = PartsMerge(2, 1, HEADS, 64, CPU)
    (part, other), result = (
        merge.parts,
        PartialAttention(torch.empty(1, HEADS, 64), torch.empty(1, HEADS)),
    )
    part.output.zero_(), part.lse.zero_(), other.lse.zero_()
    with pytest.raises(RuntimeError, match="waits for what nobody wrote"):
        merge.merge(2, result)


def test_more_parts_than_can_be_merged_are_refused(on_the_host):
    on_the_host()
    with pytest.raises(ValueError, match=f"1..{MOST_PARTS}, got {MOST_PARTS + 1}"):
        PartsMerge(MOST_PARTS + 1, 1, HEADS, 64, CPU)
