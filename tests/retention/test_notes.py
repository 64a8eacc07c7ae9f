# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from sphkv.retention.notes import AGE_EDGES, RunNotes
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import LayerBlocks, PricedLayer

TIERS = 4
INF = float("inf")
BOUND = torch.ones(1, TIERS)
# first bin from 16 to 24, last from 2056 to twice that
CENTRES = [
    math.sqrt(max(a, 16) * b) for a, b in zip(AGE_EDGES, [*AGE_EDGES[1:], 4112], strict=True)
]


def make_blocks(*heads: tuple[list[list[int]], list[float]]) -> dict[BlockShape, LayerBlocks]:
    """Runs of the blocks of every head, and what dropping each block loses."""
    most = max(len(runs) for runs, _ in heads)
    widest = max(len(each) for runs, _ in heads for each in runs)
    units = torch.full((len(heads), most, widest), -1)
    loss = torch.zeros(len(heads), most, TIERS)
    for head, (runs, drops) in enumerate(heads):
        for at, each in enumerate(runs):
            units[head, at, : len(each)] = torch.tensor(each, dtype=torch.int64)
        loss[head, : len(drops), 0] = torch.tensor(drops)
    states = 16 * (units >= 0).sum(2)
    return {BlockShape.RUNS: LayerBlocks(BlockShape.RUNS, units, states, loss, loss.long())}


def make_notes() -> RunNotes:
    """Six runs of 100 tokens; run 0 is protected, the other head has nothing free."""
    priced = PricedLayer(
        torch.zeros(2, 100, dtype=torch.bool),
        make_blocks(([[2, 3], [5, 1], [4]], [8.0, 4.0, 1.0]), ([[]], [0.0])),
    )
    loss = torch.zeros(2, 7, TIERS)
    loss[0, :, 0] = torch.tensor([100.0, 1.0, 2.0, 3.0, 0.5, 0.25, 7.0])
    loss[1, :, 0] = 2.0
    loss[..., 1] = 0.5 * loss[..., 0]
    loss[..., 2] = 0.1 * loss[..., 0]
    bound = torch.tensor([[1.0, 0.5, 0.1, 0.0], [1.0, 0.8, 0.4, 0.0]])
    return RunNotes.of_prompt(loss, priced, bound, num_tokens=96)


def test_a_run_gets_its_part_of_its_block():
    notes = make_notes()
    assert notes.num_runs == 6
    assert notes.log_drop.dtype == notes.log_importance.dtype == torch.float16
    drops = notes.log_drop[0].float().exp().tolist()
    assert drops == pytest.approx([INF, 2.0, 4.0, 4.0, 1.0, 2.0], rel=1e-3)
    assert notes.log_drop[1].tolist() == [INF] * 6
    importance = notes.log_importance[0].float().exp().tolist()
    assert importance == pytest.approx([100.0, 1.0, 2.0, 3.0, 0.5, 0.25], rel=2e-3)
    assert notes.tier_ratio[0].tolist() == pytest.approx([1.0, 0.5, 0.1, 0.0])
    # middles at 8, 24, ... of 100 tokens
    assert notes.born.tolist() == [92, 76, 60, 44, 28, 12]
    assert notes.born.dtype == torch.int32


def test_single_tokens_share_their_block_by_state():
    tokens = torch.tensor([[[0, 1, 17, 18], [31, 16, -1, -1]]])
    loss = torch.zeros(1, 2, TIERS)
    loss[0, :, 0] = torch.tensor([8.0, 3.0])
    states = (tokens >= 0).sum(2)
    blocks = LayerBlocks(BlockShape.TOKENS, tokens, states, loss, loss.long())
    priced = PricedLayer(torch.zeros(1, 48, dtype=torch.bool), {BlockShape.TOKENS: blocks})
    notes = RunNotes.of_prompt(torch.ones(1, 3, TIERS), priced, BOUND, num_tokens=48)
    assert notes.log_drop[0].float().exp().tolist() == pytest.approx([4.0, 7.0, INF], rel=1e-3)


def test_the_profile_is_the_mean_of_free_runs_by_age():
    notes = make_notes()
    profile = notes.profile[0].float().exp()
    # ages 12; 28; 44 and 60; 76: bins 0 to 3; older bins take the oldest known
    assert profile[:, 0].tolist() == pytest.approx([0.25, 0.5, 2.5, 1.0, 1.0, 1, 1, 1, 1], rel=1e-3)
    assert profile[:, 1].tolist() == pytest.approx([2.0, 1.0, 4.0, 2.0, 2.0, 2, 2, 2, 2], rel=1e-3)
    # a head without free runs goes by what its protected ones are worth
    assert notes.profile[1].float().exp().flatten().tolist() == pytest.approx([2.0] * 18, rel=1e-3)


def test_empty_bins_take_the_next_older():
    blocks = make_blocks(([[0], [10]], [6.0, 2.0]))
    priced = PricedLayer(torch.zeros(1, 640, dtype=torch.bool), blocks)
    notes = RunNotes.of_prompt(torch.ones(1, 40, TIERS), priced, BOUND, num_tokens=640)
    # ages 632 (bin 6) and 472 (bin 5)
    found = notes.profile[0, :, 1].float().exp().tolist()
    assert found == pytest.approx([2.0] * 6 + [6.0] * 3, rel=1e-3)


def test_between_centres_the_profile_is_linear_in_log_age():
    notes = make_notes()
    ages = torch.tensor([1.0, CENTRES[1], math.sqrt(CENTRES[1] * CENTRES[2]), CENTRES[2], 1e6])
    found = notes.profile_at(ages)[0, :, 0].exp().tolist()
    assert found == pytest.approx([0.25, 0.5, math.sqrt(0.5 * 2.5), 2.5, 1.0], rel=1e-3)


def test_new_runs_get_a_part_of_the_profile_of_their_age():
    notes = make_notes()
    notes.extend(2, 56, scale=0.3)
    assert notes.num_runs == 8
    assert notes.born.tolist()[-2:] == [56, 40]
    expected = 0.3 * notes.profile_at(torch.tensor([56, 40])).exp()
    torch.testing.assert_close(
        notes.log_importance[:, -2:].float().exp(), expected[..., 0], rtol=2e-3, atol=0
    )
    torch.testing.assert_close(
        notes.log_drop[:, -2:].float().exp(), expected[..., 1], rtol=2e-3, atol=0
    )
    with pytest.raises(ValueError, match=r"-0\.3"):
        notes.extend(1, 8, scale=-0.3)


def test_losses_are_those_noted_until_age_lowers_them():
    notes = make_notes()
    now = notes.losses(100)
    assert now.shape == (2, 6, TIERS)
    assert now.dtype == torch.float32
    assert now[0, 3].tolist() == pytest.approx([4.0, 1.5, 0.3, 0.0], rel=2e-3)
    assert now[0, 0, 0] == INF
    assert now[0, 0, 1] == pytest.approx(50.0, rel=2e-3)
    later = notes.losses(1100)
    # run 3 was 44 old, between bins 1 and 2, and is 1044 old now
    then = notes.profile_at(torch.tensor([44, 1044]))[0].exp()
    factor = (then[1] / then[0]).clamp(max=1)
    assert float(factor[0]) < 1
    assert later[0, 3].tolist() == pytest.approx(
        [4.0 * float(factor[1]), 1.5 * float(factor[0]), 0.3 * float(factor[0]), 0.0], rel=2e-3
    )
    # the youngest run would have become more important, which it does not
    assert later[0, 5, 1] == now[0, 5, 1]


def test_crop_copy_and_bytes():
    notes = make_notes()
    kept = notes.copy()
    notes.extend(1, 8)
    notes.crop(65)
    assert notes.num_runs == 5
    assert kept.num_runs == 6
    # four bytes per run and head, four per run, and what does not grow
    assert kept.num_bytes - notes.num_bytes == 2 * 4 + 4
    assert kept.num_bytes == 2 * 6 * 4 + 6 * 4 + 2 * TIERS * 8 + 2 * len(AGE_EDGES) * 2 * 2
    assert len(kept.tensors()) == len(kept.state())


def test_drift_counts_what_is_coded_by_its_bound_and_what_is_gone_whole():
    notes = make_notes()
    #                        dense, gone, coded, coded, dense, gone
    tier_id = torch.tensor([[3, 0, 1, 2, 3, 0], [3] * 6], dtype=torch.uint8)
    expected = 2.0 + 0.25 * 2.0 + 0.01 * 3.0 + 2.0
    assert notes.squared_drift(tier_id, 100).tolist() == pytest.approx([expected, 0.0], rel=2e-3)
    lower = tier_id.clone()
    lower[0, 3] = 1
    assert notes.squared_drift(lower, 100)[0] > notes.squared_drift(tier_id, 100)[0]
    # youngest runs of the prompt: importance 0.25 of the first head, 2 of the other
    expected_new = 0.25 * 0.25 + 2.0 * 0.64
    assert notes.new_drift(1) == pytest.approx(expected_new, rel=2e-3)
    # protected runs cannot be gone, and old ones count less
    assert notes.squared_drift(torch.zeros_like(tier_id), 100)[1] == 0
    assert notes.squared_drift(tier_id, 4000)[0] < expected


def test_state_survives_and_is_checked():
    notes = make_notes()
    again = RunNotes.from_state(notes.state())
    assert torch.equal(again.losses(500), notes.losses(500))
    with pytest.raises(ValueError, match="got \\['born'\\]"):
        RunNotes.from_state({"born": notes.born})
    with pytest.raises(ValueError, match="born must be"):
        RunNotes.from_state({**notes.state(), "born": notes.born[:2]})


def test_joined_heads_are_those_of_the_layers():
    first, second = make_notes(), make_notes()
    second.log_drop += 1
    joined = RunNotes.join([first, second])
    losses = torch.cat([first.losses(300), second.losses(300)])
    torch.testing.assert_close(joined.losses(300), losses)
    second.extend(1, 8)
    with pytest.raises(ValueError, match="same runs"):
        RunNotes.join([first, second])


def test_only_whole_runs_are_noted():
    blocks = make_blocks(([[0]], [6.0]))
    priced = PricedLayer(torch.zeros(1, 40, dtype=torch.bool), blocks)
    with pytest.raises(ValueError, match="got 40"):
        RunNotes.of_prompt(torch.ones(1, 3, TIERS), priced, BOUND, num_tokens=40)
