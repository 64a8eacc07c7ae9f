# SPDX-License-Identifier: Apache-2.0
"""Replayed functions give what the functions give; a stale extension is refused."""

from types import SimpleNamespace

import pytest
import torch

from sphkv.core import devices
from sphkv.core.devices import ReadyTensors, Replay, behind_beside, join_beside
from sphkv.errors import NativeUnavailableError

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


def test_what_runs_beside_is_there_once_it_is_joined():
    device, total = torch.device(DEVICE), torch.zeros((), device=DEVICE)
    for number in range(20):
        part = torch.full((1 << 16,), float(number), device=device)
        ready = ReadyTensors(part)
        # what its owner does with it later must not show
        with ready.beside() as (own,):
            total = total + own.sum()
        del part, own, ready
        torch.full((1 << 16,), -1.0, device=device)
    join_beside(device)
    assert float(total) == (1 << 16) * sum(range(20))


def test_what_is_queued_behind_it_sees_what_ran_beside():
    device = torch.device(DEVICE)
    ready = ReadyTensors(torch.full((1 << 16,), 2.0, device=device))
    with ready.beside() as (own,):
        # on a GPU, long enough to be still under way
        many = torch.eye(512, device=device)
        for _ in range(200 if device.type == "cuda" else 1):
            many = many @ many
        square = own.square() * many[0, 0]
    with behind_beside(device):
        total = square.sum()
    join_beside(device)
    if total.is_cuda:
        total.record_stream(torch.cuda.current_stream(device))
    assert float(total) == 4 * (1 << 16)
    with pytest.raises(ValueError, match="inside"), behind_beside(device):
        raise ValueError("inside")


def test_an_extension_of_other_sources_is_refused(monkeypatch, tmp_path):
    """Its codes would be others, and nobody would be told."""
    (tmp_path / "b.cpp").write_text("1")
    (tmp_path / "a.h").write_text("2")
    first = devices.sources_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not compiled")
    assert devices.sources_digest(tmp_path) == first
    (tmp_path / "a.h").write_text("3")
    assert devices.sources_digest(tmp_path) != first
    assert devices.sources_digest(tmp_path / "nothing") is None

    fresh = devices.native_kernels.__wrapped__
    for sources in ("0" * 64, None):
        module = SimpleNamespace(__file__="_kernels.so")
        if sources is not None:
            module.SOURCES = sources
        monkeypatch.setattr(devices, "import_module", lambda name, module=module: module)
        with pytest.raises(NativeUnavailableError, match="other sources"):
            fresh()
        # an installed package lies beside no sources
        with monkeypatch.context() as installed:
            installed.setattr(devices, "sources_digest", lambda folder: None)
            assert fresh() is module
