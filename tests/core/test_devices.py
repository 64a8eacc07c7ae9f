# SPDX-License-Identifier: Apache-2.0
"""Replayed functions give what the functions give, on a GPU captured and elsewhere called."""

import pytest
import torch

from sphkv.core.devices import Replay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(4, 8), (3,)])
def test_every_call_gives_what_the_function_gives(shape):
    calls = []

    def scaled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(x.shape)
        return 2 * x + y, x.sum()

    replay = Replay(scaled)
    for number in range(5):
        x = torch.full(shape, float(number), device=DEVICE)
        first, total = replay(x, x + 1)
        assert first.unique().tolist() == [3 * number + 1]
        assert float(total) == number * x.numel()
    # called, called before capture and captured; then replayed
    assert len(calls) == (3 if DEVICE == "cuda" else 5)
