# SPDX-License-Identifier: Apache-2.0
"""Blocks whose heads share a fixed number of bytes; none of it needs vLLM itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.codec.calibration import default_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm.budgeted import PART_TOKENS, BudgetedBlock
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.retention import Votes
from sphkv.integrations.vllm.runtime import Runtime
from sphkv.integrations.vllm.steps import plan_step
from sphkv.store.layout import PageLayout, PageView
from sphkv.store.paging import PositionMode

HEADS, GROUP, DIM, TOKENS, SINKS = 2, 2, 64, 64, 4
SCALE = DIM**-0.5
CALIBRATION = default_calibration(
    KVGeometry(1, HEADS, HEADS * GROUP, DIM), (RopeSpec.from_config({"rope_theta": 1e4}, DIM),)
)
CODEC = SphericalCodec(CALIBRATION)


def draw(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[tokens, heads, dim]``; head 1 attends to few tokens."""
    make = torch.Generator().manual_seed(tokens)
    query, keys, values = (
        torch.randn(tokens, heads, DIM, generator=make).bfloat16().float()
        for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    query[:, GROUP:] += 1.0
    keys[40:60, 1] += 1.5
    return query, keys.bfloat16().float(), values


class Layer:
    """One sequence in one layer of a server with a budget."""

    def __init__(self, budget: int, total: int) -> None:
        options = ServeOptions(budget_bytes=budget, sink_tokens=SINKS)
        self.runtime = Runtime(
            options, block_tokens=TOKENS, num_kv_heads=HEADS, head_dim=DIM, max_sequences=2
        )
        self.runtime.layer_ids["layer"] = 0
        self.runtime.use(CALIBRATION, variant="float32")
        assert isinstance(self.runtime.block, BudgetedBlock)
        self.block = self.runtime.block
        self.states = draw(total)
        learned = tuple(part.transpose(0, 1) for part in draw(160))
        self.runtime.learn(0, (learned[0], learned[1], learned[2]), scale=SCALE)
        self.pool = self.runtime.add_pool(["layer"])
        self.kv_cache = torch.full((9, HEADS, TOKENS, budget), 0xFF, dtype=torch.uint8)
        self.table = torch.tensor([[5, 2, 7, 1, 3]])
        self.done = 0

    def step(self, count: int) -> Tensor:
        begin, self.done = self.done, self.done + count
        plan = plan_step(self.pool, [0, count], [self.done], self.table, TOKENS)
        query, keys, values = (part[begin : self.done] for part in self.states)
        self.runtime.hold(0, (keys, values), plan)
        options = AttentionOptions(scale=SCALE)
        return self.runtime.attend(0, (query, keys, values), self.kv_cache, plan, options)[0]

    def stored(self, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and what is kept ``[heads, tokens]``, read by the directory alone."""
        keys, values = (part.transpose(0, 1).clone() for part in self.states[1:])
        kept = torch.ones(HEADS, keys.shape[1], dtype=torch.bool)
        for at in range(num_blocks):
            raw = self.kv_cache[self.table[0, at]].flatten()
            place = 64 + (HEADS * (64 + SINKS * 4 * DIM) if at == 0 else 0)
            for head in range(HEADS):
                for part in range(TOKENS // PART_TOKENS):
                    tier_id = int(raw[head * (TOKENS // PART_TOKENS) + part])
                    first = at * TOKENS + part * PART_TOKENS
                    skip = SINKS if first == 0 else 0
                    span = slice(first + skip, first + PART_TOKENS)
                    if tier_id == 0:
                        kept[head, span] = False
                        continue
                    layout = PageLayout(
                        tier_id, self.block.tiers[tier_id], DIM, PositionMode.CONTIGUOUS
                    )
                    view = PageView(layout, raw[place : place + layout.page_bytes][None])
                    view.check()
                    place += layout.page_bytes
                    k, v = CODEC.decode(
                        0,
                        layout.tier,
                        view.encoded(),
                        view.positions(),
                        head_ids=torch.tensor([head]),
                    )
                    keys[head, span] = k[0, : PART_TOKENS - skip]
                    values[head, span] = v[0, : PART_TOKENS - skip]
            assert place <= raw.numel()
        return keys, values, kept


def dense(query: Tensor, keys: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """Attention of one query ``[query_heads, dim]`` in float64."""
    keys, values = (x.double().repeat_interleave(GROUP, 0) for x in (keys, values))
    logits = SCALE * torch.einsum("hd,htd->ht", query.double(), keys)
    logits = logits.masked_fill(~kept.repeat_interleave(GROUP, 0), -torch.inf)
    return torch.einsum("ht,htd->hd", logits.softmax(-1), values)


@pytest.mark.parametrize("budget", [24, 36, 90])
def test_steps_read_what_the_directory_says(budget: int):
    layer = Layer(budget, 260)
    # a prompt that fills two blocks, then a chunk, then token by token over a block's end
    layer.step(150)
    layer.step(30)
    for _ in range(20):
        output = layer.step(1)
    total = layer.done
    keys, values, kept = layer.stored((total - 1) // TOKENS)
    want = dense(layer.states[0][total - 1], keys[:, :total], values[:, :total], kept[:, :total])
    torch.testing.assert_close(output[0].double(), want, rtol=2e-4, atol=2e-5)
    if budget == 24:
        assert not bool(kept.all())
    if budget == 90:
        assert bool(kept.all())


def test_more_bytes_lose_less():
    losses = []
    for budget in (24, 36, 48, 68):
        layer = Layer(budget, 200)
        layer.step(199)
        output = layer.step(1)
        keys, values = (part.transpose(0, 1) for part in layer.states[1:])
        exact = dense(layer.states[0][199], keys, values, torch.ones(HEADS, 200).bool())
        losses.append(float((output[0] - exact).square().mean()))
    assert losses == sorted(losses, reverse=True), losses


def test_heads_get_what_they_need():
    block = BudgetedBlock(TOKENS, HEADS, DIM, content_bytes=36, sink_tokens=0)
    loss = torch.zeros(HEADS, TOKENS // PART_TOKENS, len(block.tiers))
    # head 0 loses nothing whatever happens; head 1 gains with every tier
    loss[1] = torch.linspace(1, 0, len(block.tiers))
    tiers = block.choose(loss, is_first=False)
    assert tiers[0].tolist() == [0, 0]
    assert int(tiers[1].min()) >= 4


def test_votes_are_exact_attention():
    torch.manual_seed(0)
    query, output = torch.randn(3, HEADS * GROUP, DIM), torch.randn(3, HEADS * GROUP, DIM)
    keys, values = torch.randn(HEADS, 5, DIM), torch.randn(HEADS, 5, DIM)
    lse = torch.randn(3, HEADS * GROUP) + 3
    distance = torch.tensor([2, 3, 4])[:, None] - torch.arange(5)
    votes = Votes.zeros(HEADS, 5)
    votes.add((query, output, lse), (keys, values), distance, SCALE)
    want = torch.zeros(HEADS, 5)
    for row in range(3):
        for head in range(HEADS * GROUP):
            for token in range(row + 3):
                logit = SCALE * query[row, head] @ keys[head // GROUP, token] - lse[row, head]
                apart = (values[head // GROUP, token] - output[row, head]).square().sum()
                want[head // GROUP, token] += (2 * logit).exp() * apart
    torch.testing.assert_close(votes.shift, want, rtol=1e-4, atol=1e-5)
    assert votes.count[0].tolist() == [6, 6, 6, 4, 2]


def test_drops_are_measured_together():
    torch.manual_seed(0)
    tokens = 2 * PART_TOKENS
    query, keys, values = (
        torch.randn(3, 2, DIM),
        torch.randn(1, tokens, DIM),
        torch.randn(1, tokens, DIM),
    )
    logits = SCALE * query @ keys[0].T
    weight, lse = logits.softmax(-1), logits.logsumexp(-1)
    output = weight @ values[0]
    votes = Votes.zeros(1, tokens)
    distance = torch.arange(tokens, tokens + 3)[:, None] - torch.arange(tokens)
    votes.add((query, output, lse), (keys, values), distance, SCALE)
    move = torch.stack(
        [
            (weight[..., rest] @ values[0, rest]) / weight[..., rest].sum(-1, keepdim=True) - output
            for rest in (slice(PART_TOKENS, tokens), slice(0, PART_TOKENS))
        ]
    )
    alone = move.square().sum(-1).mean((1, 2))
    losses = votes.drop_losses()[0]
    cross = 2 * (move[0] * move[1]).sum(-1).mean()
    both = alone.sum() + cross
    # the second drop never looks cheaper than the first
    first = min(alone.min(), both / 2)
    want = torch.stack([first, both - first])
    torch.testing.assert_close(losses.sort().values, want, rtol=1e-4, atol=1e-6)


def test_a_budget_below_the_sinks_is_refused():
    with pytest.raises(ValueError, match="budget_bytes is 8"):
        BudgetedBlock(TOKENS, HEADS, DIM, content_bytes=8, sink_tokens=4)
