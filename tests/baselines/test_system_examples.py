# SPDX-License-Identifier: Apache-2.0
"""Offload and prefix reuse: what is moved and what is shared, counted by hand."""

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.keep_all import NewestPages, PrefixReuseCache, SharedPrefix
from sphkv.baselines.settings import MethodShape
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

TINY = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
OPTIONS = AttentionOptions(scale=0.125)
# 16 consecutive states of 256 bytes, the header, and two counts
PAGE = 16 * 256 + 64 + 8


def shaped(budget: float) -> MethodShape:
    return MethodShape(TINY, [RopeSpec.unrotated(64)], budget)


def noise(tokens: int, seed: int = 0) -> Tensor:
    states = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(seed))
    return states.bfloat16().float()


def test_offload_by_hand() -> None:
    """20,480 of 40,960 bytes hold three pages beside a tail of one more."""
    method = NewestPages().build(shaped(0.5))
    states = noise(160)
    method.prefill(0, states, states, query=states)
    assert method.read(0).positions[0].tolist() == list(range(160))
    # three pages here, a count and four entries of ten bytes; six there, and a tail that is full
    assert method.resident_bytes() == 3 * PAGE + 8 + 4 * 10
    host = 6 * PAGE + 8 + 6 * 10 + 16 * 256
    assert method.host_bytes() == host
    assert method.peak_bytes() == method.resident_bytes() + host
    moved = method.moved_bytes
    step = noise(1, 1)
    method.attend(0, step, step, step, OPTIONS)
    # every step brings what the host holds in once
    assert method.moved_bytes == moved + host


def test_offload_pushes_the_oldest_pages_out() -> None:
    method = NewestPages().build(shaped(0.5))
    states = noise(160)
    method.prefill(0, states, states, query=states)
    steps = noise(17, 1)
    output = method.attend(0, steps, steps, steps, OPTIONS)
    assert method.read(0).positions[0].tolist() == list(range(177))
    assert method.resident_bytes() <= 0.5 * 177 * 256
    every = torch.cat([states, steps], 1)
    logits = (every[0] @ steps[0, -1]) * 0.125
    assert torch.allclose(output[0, -1], torch.softmax(logits, 0) @ every[0], atol=2e-2)


def test_siblings_share_whole_pages() -> None:
    """The first 40 tokens are equal: two pages are shared, eight tokens stored again."""
    first = SharedPrefix().build(shaped(1.0))
    states = noise(70)
    first.prefill(0, states, states)
    second = first.sibling()
    other = torch.cat([states[:, :40], noise(20, 3)], 1)
    second.prefill(0, other, other)
    assert second.reused_tokens == [32]
    # a page of its own and a tail with the last twelve, a count, and entries for five pages
    assert second.resident_bytes() == PAGE + 16 * 256 + 8 + 5 * 10
    assert second.ledger().total == second.resident_bytes()
    assert torch.equal(second.read(0).keys[:, :60], other)
    step = noise(1, 4)
    second.attend(0, step, step, step, OPTIONS)
    assert torch.equal(first.read(0).keys[:, :70], states)


def test_cropping_one_sibling_leaves_the_other() -> None:
    first = SharedPrefix().build(shaped(1.0))
    states = noise(64)
    first.prefill(0, states, states)
    second = first.sibling()
    second.prefill(0, states, states)
    first.crop(10)
    assert first.num_tokens() == 10
    assert torch.equal(second.read(0).keys[:, :64], states)


def test_unlike_prompts_share_nothing() -> None:
    first = SharedPrefix().build(shaped(1.0))
    first.prefill(0, noise(64), noise(64))
    second = first.sibling()
    second.prefill(0, noise(64, 5), noise(64, 5))
    assert second.reused_tokens == [0]
    with pytest.raises(ValueError, match="at least 1"):
        PrefixReuseCache(shaped(0.5), SharedPrefix())
