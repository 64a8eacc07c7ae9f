# SPDX-License-Identifier: Apache-2.0
"""Offload and prefix reuse: what is moved and what is shared, counted by hand."""

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.offload import OffloadCache
from sphkv.baselines.prefix_reuse import PrefixReuseCache
from sphkv.core.geometry import KVGeometry

TINY = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=2)
OPTIONS = AttentionOptions(scale=1.0)
# 16 states of 8 bytes and a position of 4, and the header
PAGE = 16 * 12 + 64


def noise(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(1, tokens, 2, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_offload_by_hand() -> None:
    """640 of 1280 bytes hold two pages with pointers; one waits for new tokens."""
    method = OffloadCache(TINY, 0.5)
    states = noise(160).float()
    method.prefill(0, states, states, query=states)
    assert method.moved_bytes == 9 * PAGE
    assert method.host_bytes() == 9 * (PAGE + 8) + 8
    assert method.resident_bytes() == PAGE + 8 + 8
    assert method.peak_bytes() == method.resident_bytes() + 9 * PAGE
    step = noise(1, 1).float()
    method.attend(0, step, step, step, OPTIONS)
    # every step brings the nine pages of the host in once
    assert method.moved_bytes == 18 * PAGE


def test_offload_pushes_the_oldest_page_out() -> None:
    method = OffloadCache(TINY, 0.5)
    states = noise(160).float()
    method.prefill(0, states, states, query=states)
    steps = noise(17, 1).float()
    method.attend(0, steps, steps, steps, OPTIONS)
    # 16 steps with nine host pages, one page out, one step with ten
    assert method.moved_bytes == (9 + 16 * 9 + 1 + 10) * PAGE
    assert method.read(0).positions[0].ge(0).sum() == 177
    assert method.resident_bytes() <= 640


def test_siblings_share_whole_pages() -> None:
    """The first 40 tokens are equal: two pages are shared, eight tokens stored again."""
    first = PrefixReuseCache(TINY)
    states = noise(70).float()
    first.prefill(0, states, states)
    second = first.sibling()
    other = torch.cat([states[:, :40], noise(20, 3).float()], 1)
    second.prefill(0, other, other)
    assert second.reused_tokens == [32]
    # 28 tokens of its own take two pages with pointers and a count, and two pointers are shared
    assert second.resident_bytes() == 2 * (PAGE + 8) + 8 + 2 * 8
    assert torch.equal(second.read(0).keys[:, :60], other)
    step = noise(1, 4).float()
    second.attend(0, step, step, step, OPTIONS)
    assert torch.equal(first.read(0).keys[:, :70], states)


def test_cropping_one_sibling_leaves_the_other() -> None:
    first = PrefixReuseCache(TINY)
    states = noise(64).float()
    first.prefill(0, states, states)
    second = first.sibling()
    second.prefill(0, states, states)
    first.crop(10)
    assert first.num_tokens() == 10
    assert torch.equal(second.read(0).keys[:, :64], states)


def test_unlike_prompts_share_nothing() -> None:
    first = PrefixReuseCache(TINY)
    first.prefill(0, noise(64), noise(64))
    second = first.sibling()
    second.prefill(0, noise(64, 5), noise(64, 5))
    assert second.reused_tokens == [0]
    with pytest.raises(ValueError, match="at least 1"):
        PrefixReuseCache(TINY, 0.5)
