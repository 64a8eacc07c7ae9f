# SPDX-License-Identifier: Apache-2.0
"""The CUDA encoder without a GPU: which kernel a page gets, and what it takes."""

import shutil

import pytest
import torch

from sphkv.attention.cuda import encode
from sphkv.attention.cuda.compiler import compile_with_nvcc
from sphkv.attention.cuda.encode import CudaEncoder
from sphkv.attention.cuda.geometry import is_served
from sphkv.core.tiers import coded_tier
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode


def layout(mode, *, value_bits=4, page_tokens=128, head_dim=128):
    tier = coded_tier(2.0, value_bits, page_tokens=page_tokens)
    return PageLayout(1, tier, head_dim, mode)


def test_pages_of_another_size_get_shared_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(encode, "load_cubin", lambda *given: b"")
    monkeypatch.setattr(encode, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(encode, "Kernel", lambda *given, **sizes: sizes["shared_bytes"])
    encoder = CudaEncoder()
    sizes = [
        encoder._kernel(*encode.reorder_build(kind), kind.page_bytes, device=torch.device("cuda"))
        for kind in map(layout, PositionMode)
    ]
    assert sizes == [layout(mode).page_bytes for mode in PositionMode]
    assert len(set(sizes)) == 3


def test_it_takes_bfloat16_pages_on_a_gpu_only():
    states = (torch.zeros(1, 128, 128, dtype=torch.bfloat16),) * 2
    assert not CudaEncoder.takes(layout(PositionMode.CONTIGUOUS), states)
    pages = torch.zeros(1, layout(PositionMode.RUNS).page_bytes, dtype=torch.uint8)
    assert CudaEncoder().to_fragments(layout(PositionMode.RUNS), pages) is None
    assert is_served(layout(PositionMode.RUNS, page_tokens=64))
    assert not is_served(layout(PositionMode.RUNS, page_tokens=32))
    assert not is_served(layout(PositionMode.RUNS, head_dim=80))
    assert is_served(layout(PositionMode.TOKENS))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize("name", ["sphkv_encode_keys", "sphkv_encode_values"])
def test_sources_compile_and_ask_for_the_memory_they_use(name, page_tokens, monkeypatch):
    asked = []
    monkeypatch.setattr(encode, "load_cubin", lambda *given: asked.append(given))
    monkeypatch.setattr(encode, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(encode, "Kernel", lambda *given, **sizes: None)
    kind = layout(PositionMode.CONTIGUOUS, value_bits=3, head_dim=64, page_tokens=page_tokens)
    CudaEncoder()._encode_kernels(kind, torch.device("cuda"))
    given = {kernel: rest for kernel, *rest in asked}
    image = compile_with_nvcc(name, *given[name])
    assert image is not None
    assert image[:4] == b"\x7fELF"
