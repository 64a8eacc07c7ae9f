# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time; none of it needs a GPU."""

import shutil
from pathlib import Path

import pytest
import torch

from sphkv.attention.cuda import build, compiler
from sphkv.attention.cuda.geometry import PAGE_SIZES, KernelShape
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.cache.plan import FAST_RETENTION_TIERS
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import ladder
from sphkv.errors import CudaUnavailableError
from sphkv.store.paging import PositionMode

TARGET = "sm_90a"
SMOLLM2 = Path(__file__).parents[2] / "results/workloads/calibration-6385d03ee7d2cc38.safetensors"


def test_usual_builds_differ_and_fit():
    builds = list(build.usual_builds())
    names = {compiler.cubin_name(*each, TARGET) for each in builds}
    assert len(names) == len(builds) > 30
    llama = KernelShape(128, 64, 1, 1, 4, 4).fitted()
    assert ("sphkv_decode", llama.defines()) in builds


def test_what_a_real_model_needs_is_built():
    """SmolLM2's codebooks, in the runs of pages that a controller keeps."""
    codec, builds = SphericalCodec(load_calibration(SMOLLM2)), {*build.usual_builds()}
    kernels, shapes = DecodeKernels(torch.device("cpu")), set()
    for tokens in PAGE_SIZES:
        for tier in ladder(64, page_tokens=tokens, names=FAST_RETENTION_TIERS):
            if tier.is_coded:
                layers = range(codec.calibration.geometry.num_layers)
                shapes |= {
                    kernels._shape(codec, layer, tier, PositionMode.RUNS) for layer in layers
                }
    assert len(shapes) >= len(FAST_RETENTION_TIERS) * len(PAGE_SIZES)
    assert {("sphkv_decode", shape.defines()) for shape in shapes} <= builds


def test_loader_takes_what_was_built(tmp_path, monkeypatch):
    compiled = []

    def compile_once(kernel, defines, target):
        compiled.append((kernel, defines, target))
        return b"code of " + kernel.encode()

    monkeypatch.setattr(compiler, "compile_with_nvcc", compile_once)
    monkeypatch.setattr(compiler, "shipped_folder", lambda: tmp_path)
    one = ("sphkv_dense", ("-DSPHKV_HEAD_DIM=64", "-DSPHKV_GROUP=3", "-DSPHKV_ROWS=2"))
    (file,) = build.build(tmp_path, TARGET, [one])
    assert build.build(tmp_path, TARGET, [one]) == [file]  # not compiled again
    assert compiler.load_cubin(*one, TARGET) == b"code of sphkv_dense"
    assert compiled == [(*one, TARGET)]


def test_missing_compiler_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "compile_with_nvcc", lambda *_: None)
    with pytest.raises(CudaUnavailableError, match="nvcc is missing"):
        build.build(tmp_path, TARGET)
    assert build.main(["--folder", str(tmp_path)]) == 1
    assert "nvcc" in capsys.readouterr().err


def test_every_device_gets_code_of_its_kind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "compile_with_nvcc", lambda *given: given[2].encode())
    monkeypatch.setattr(compiler, "shipped_folder", lambda: tmp_path)
    kernel, defines = builds = ("sphkv_dense", ("-DSPHKV_HEAD_DIM=64",))
    monkeypatch.setattr(build, "usual_builds", lambda: [builds])
    assert build.main(["--folder", str(tmp_path)]) == 0
    assert "2 kernels" in capsys.readouterr().out
    for capability, target in (((9, 0), "sm_90a"), ((10, 0), "sm_100f"), ((10, 3), "sm_100f")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        chosen = compiler.architecture(torch.device("cuda"))
        assert compiler.load_cubin(kernel, defines, chosen) == target.encode()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(CudaUnavailableError, match=r"device has \(8, 0\)"):
        compiler.architecture(torch.device("cuda"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_sources_compile_for_blackwell(tmp_path):
    shape = KernelShape(64, 32, 1, 1, 4, 8).fitted()
    (file,) = build.build(tmp_path, "sm_100f", [("sphkv_decode", shape.defines())])
    assert file.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_sources_compile(tmp_path):
    shapes = [KernelShape(64, 32, 1, 1, bits, columns).fitted() for bits, columns in ((4, 8),)]
    builds = [("sphkv_decode", shape.defines()) for shape in shapes]
    # three queries a row: rows that lie side by side must stay aligned, which the source asserts
    builds.append(("sphkv_dense", ("-DSPHKV_HEAD_DIM=64", "-DSPHKV_GROUP=3", "-DSPHKV_ROWS=2")))
    for file in build.build(tmp_path, TARGET, builds):
        assert file.read_bytes()[:4] == b"\x7fELF"


def test_missing_kernels_are_prepared_together_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "compile_with_nvcc", lambda *given: given[0].encode())
    monkeypatch.setattr(compiler, "shipped_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path)
    builds = list(build.tier_builds(ladder(128, names=("k2v3", "k4v4")), 128))
    # keys and values in runs and in one piece, and a kernel that reorders
    assert len(builds) == 2 * (2 * 2 + 1)
    build.prepare_behind(builds[:3], TARGET).join()
    assert "compiling 3 kernels" in capsys.readouterr().err
    assert build.prepare(builds, TARGET) == len(builds) - 3
    assert build.prepare(builds, TARGET) == 0
    assert "7 kernels" in capsys.readouterr().err
    assert compiler.load_cubin(*builds[0], TARGET) == builds[0][0].encode()
