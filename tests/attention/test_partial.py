# SPDX-License-Identifier: Apache-2.0
"""Partial results merge exactly."""

import pytest
import torch

from sphkv.attention.partial import PartialAttention, merge_partials


def test_merging_ignores_order_and_empty_parts():
    torch.manual_seed(0)
    parts = [PartialAttention(torch.randn(2, 3, 4), torch.randn(2, 3)) for _ in range(4)]
    parts.append(PartialAttention(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)))
    one = merge_partials(parts)
    other = merge_partials(parts[::-1])
    torch.testing.assert_close(one.output, other.output)
    torch.testing.assert_close(one.lse, other.lse)
    torch.testing.assert_close(merge_partials(parts[:4]).output, one.output)
    with pytest.raises(ValueError, match="at least one"):
        merge_partials([])


@pytest.mark.parametrize("heads_dim", [0, 1])
def test_sinks_take_weight_of_their_own_head(heads_dim):
    logits = torch.tensor([0.5, 3.0])
    shape = [1, 1]
    shape[heads_dim] = 2
    part = PartialAttention(torch.ones(*shape, 4), torch.zeros(shape))
    merged = merge_partials([part, PartialAttention.of_sinks(logits, part, heads_dim=heads_dim)])
    left = (1 / (1 + logits.exp())).reshape(*shape, 1).expand_as(part.output)
    torch.testing.assert_close(merged.output, left)
