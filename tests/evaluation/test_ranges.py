# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from sphkv.evaluation.ranges import gpu_range


@pytest.mark.parametrize("is_gpu_used", [False, True])
def test_a_range_is_closed_even_if_what_is_inside_fails(monkeypatch, is_gpu_used):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_gpu_used)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with pytest.raises(KeyError), gpu_range("decode step"):
        raise KeyError("inside")
    assert calls == (["decode step", "end"] if is_gpu_used else [])
