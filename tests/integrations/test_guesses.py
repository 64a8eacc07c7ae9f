# SPDX-License-Identifier: Apache-2.0
"""Guesses of the next token: when they are trusted, how they are made, how they are checked."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv.integrations.transformers.forward import read_step
from sphkv.integrations.transformers.guesses import DeviceBool, GuessHistory, most_likely


def go_on(history: GuessHistory, answers: list[bool]) -> list[bool]:
    """For every pass, whether its successor was launched, of which ``answers`` tells the worth."""
    launched = []
    for is_right in answers:
        is_due = history.is_due()
        launched.append(is_due and history.is_trusted)
        if launched[-1]:
            history.launch()
        history.tell(is_right=is_right if is_due else None)
    return launched


def test_a_few_right_guesses_are_enough():
    history = GuessHistory()
    assert go_on(history, [True] * 20) == [False] * 3 + [True] * 17
    assert (history.num_launched, history.num_right) == (17, 17)


def test_a_wrong_step_has_to_be_made_up_for():
    history = GuessHistory()
    go_on(history, [True] * 3 + [False])
    assert (history.num_launched, history.num_right) == (1, 0)
    # one pass of rest, then 32 guesses in a row
    assert go_on(history, [True] * 40).index(True) == 33
    go_on(history, [False])
    assert go_on(history, [True] * 80).index(True) == 65
    # 15 right ones have not paid for it
    go_on(history, [False])
    assert go_on(history, [True] * 200).index(True) == 129
    # 71 right ones have
    go_on(history, [False])
    assert go_on(history, [True] * 40).index(True) == 33


def test_what_is_demanded_has_a_limit():
    history = GuessHistory()
    firsts = []
    for _ in range(8):
        launched = go_on(history, [True] * 400)
        firsts.append(launched.index(True))
        history._paid = 0
        history._needed = max(32, history._needed)
        go_on(history, [False])
    assert max(firsts) <= 256 + 1


def test_wrong_guesses_become_rare():
    history = GuessHistory()
    dues = 0
    for _ in range(400):
        if history.is_due():
            dues += 1
            history.tell(is_right=False)
        else:
            history.tell(is_right=None)
    assert history.num_launched == 0
    assert dues < 40


def test_sampling_is_launched_for_next_to_never():
    torch.manual_seed(0)
    history = GuessHistory()
    go_on(history, (torch.rand(2000) < 0.7).tolist())
    assert history.num_launched <= 12


def test_a_step_that_nobody_asked_for_proves_nothing():
    history = GuessHistory()
    go_on(history, [True] * 3)
    history.launch()
    history.tell(is_right=None)
    assert history.is_trusted
    assert go_on(history, [True]) == [True]
    assert (history.num_launched, history.num_right) == (2, 1)


@pytest.mark.parametrize("size", [1, 2, 63, 97, 511, 512, 513, 1000, 49152, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_is_that_of_argmax(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    # few distinct numbers, so that the largest comes many times
    logits = (torch.randn(5, size) * 3).round().to(dtype)
    logits[3] = -math.inf
    logits[4] = 7.0
    found = most_likely(logits)
    assert found.shape == (5, 1)
    assert found.dtype == torch.int64
    assert torch.equal(found[:, 0], logits.argmax(-1))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 1500), seed=st.integers(0, 1000), levels=st.integers(1, 4))
def test_the_first_of_several_is_found(size: int, seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, 1, (2, size), generator=generator).float()
    first = [row.tolist().index(row.max()) for row in logits]
    assert most_likely(logits)[:, 0].tolist() == first


def test_rows_that_are_parts_of_longer_ones_are_read_right():
    logits = torch.randn(3, 4, 640)
    assert torch.equal(most_likely(logits[:, -1])[:, 0], logits[:, -1].argmax(-1))


HELD: Any = SimpleNamespace(length=7, has_padding=False, is_real=torch.ones(2, 7).bool())
PADDED: Any = SimpleNamespace(length=7, has_padding=True, is_real=torch.ones(2, 7).bool())
PADDED.is_real[1, 0] = False


def arguments(held: Any, **changes: Any) -> dict[str, Any]:
    mask = torch.cat([held.is_real, torch.ones(2, 1)], 1).long()
    found = {
        "input_ids": torch.zeros(2, 1, dtype=torch.int64),
        "attention_mask": mask,
        "position_ids": mask.sum(1, keepdim=True) - 1,
    }
    return {**found, **changes}


@pytest.mark.parametrize(("held", "has_mask"), [(HELD, True), (HELD, False), (PADDED, True)])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_told_along_with_what_a_step_reads(held, has_mask, value, monkeypatch):
    kwargs = arguments(held) if has_mask else arguments(held, attention_mask=None)
    also = DeviceBool(torch.tensor(value))
    reads: list[torch.Tensor] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        reads.append(tensor)
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    step = read_step((), kwargs, held, also=also)
    with_it, reads[:] = len(reads), []
    alone = read_step((), kwargs, held)
    assert also.told is value
    # no copy more than without it
    assert with_it == len(reads) > 0
    for found in (step, alone):
        assert found.is_real.tolist() == [[True], [True]]
        assert torch.equal(found.positions, kwargs["position_ids"])
        assert found.positions.dtype == torch.int64


def test_what_lies_on_another_device_is_not_told():
    elsewhere = DeviceBool(torch.empty((), dtype=torch.bool, device="meta"))
    read_step((), arguments(HELD), HELD, also=elsewhere)
    assert elsewhere.told is None
