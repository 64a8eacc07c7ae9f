# SPDX-License-Identifier: Apache-2.0
"""Kernels find and fit the points that torch does, of many rows, unequal weights and odd sizes."""

import pytest
import torch

from sphkv.codec import codebook, keys, native_points, point_kernels
from sphkv.codec.codebook import CodebookFit, PlaneCodebooks, fit_plane_codebooks, fit_points
from sphkv.core.devices import native_kernels, require_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPLIT = codebook._SPLIT_SCALE


def samples(rows, tokens, seed=0):
    """Clouds of unlike shapes, and weights some of which are zero."""
    draw = torch.Generator().manual_seed(seed)
    shape = torch.randn(rows, 2, 2, generator=draw)
    x = torch.randn(rows, tokens, 2, generator=draw) @ shape
    weight = (torch.rand(rows, tokens, generator=draw) - 0.1).clamp(min=0)
    return x.to(DEVICE), weight.to(DEVICE)


# where native code was not built, the tests that need it say so
BUILT = native_kernels()
VARIANTS = ["native"] if BUILT is None else BUILT.recoders()


@pytest.fixture(params=["triton", *VARIANTS])
def kernels(request, monkeypatch):
    """What finds and fits points, on a GPU and with every instruction set of a CPU."""
    if request.param == "triton":
        return point_kernels
    if DEVICE != "cpu":
        pytest.skip("native kernels are for CPUs, and the samples are on a GPU")
    require_kernels()
    monkeypatch.setattr(native_points, "native_variant", lambda: request.param)
    return native_points


@pytest.fixture
def by_torch(monkeypatch):
    """What a function of ``codebook`` gives without kernels, wherever its tensors are."""
    monkeypatch.setattr(codebook, "point_kernels_for", lambda _: None)


def mean_error(x, weight, sums):
    nearest = torch.cdist(x.double(), sums.double()).amin(-1).square()
    return (weight * nearest).sum(1) / weight.sum(1)


@pytest.mark.parametrize("levels", [1, 2, 4, 16, 64, 256])
def test_nearest_points(levels, kernels):
    x, _ = samples(3, 1037)
    points, _ = samples(3, levels, seed=1)
    found = kernels.find_nearest(x, points)
    distance = torch.cdist(x.double(), points.double())
    chosen = distance.gather(2, found[..., None])[..., 0]
    torch.testing.assert_close(chosen, distance.amin(2), rtol=1e-5, atol=1e-6)
    same = points[:, :1].expand(-1, levels, -1)
    assert not kernels.find_nearest(x, same).any()


@pytest.mark.parametrize("levels", [4, 256])
def test_sums_of_clusters_without_bins(levels, monkeypatch):
    monkeypatch.setattr(codebook, "_DEVICE_SCORES", 2 * levels * 333)
    columns, weight = samples(5, 333)
    index = (weight * levels).long().clamp(max=levels - 1)
    found = codebook._one_hot_sums(columns, index, levels)
    torch.testing.assert_close(found, codebook._bin_sums(columns, index, levels))


@pytest.mark.parametrize("levels", [1, 2, 4, 8])
def test_growing(levels, by_torch, kernels):
    x, weight = samples(5, 333)
    start = fit_points(x, weight, levels=levels, iterations=4)[levels]
    wanted = codebook._grow(x, weight, start, 4)
    found = kernels.grow_points(x, weight, start, 4, SPLIT)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_stages_in_turn(by_torch, kernels):
    x, weight = samples(4, 517)
    stages = codebook._principal_stages(x, weight)
    wanted = codebook._alternate(x, weight, stages, 3)
    found = kernels.alternate_stages(x, weight, stages, 3)
    for own, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3)
    # what was given is left as it is
    assert not torch.equal(found[0], stages[0])


@pytest.mark.parametrize("second", [4, 16])
def test_all_sums(second, by_torch, kernels):
    x, weight = samples(3, 700)
    first, _ = codebook._principal_stages(x, weight)
    other = fit_points(x - first.mean(1, keepdim=True), weight, levels=second, iterations=3)[second]
    stages = first, other / 8

    def refine(rounds):
        found = kernels.refine_stages(
            x, weight, stages, rounds, sweeps=codebook._SWEEPS, relaxation=codebook._RELAXATION
        )
        return found, codebook._refine_sums(x, weight, stages, rounds)

    # torch takes one of two sums that are almost as near, which moves the few points they share
    for own, right in zip(*refine(1), strict=True):
        assert float(((own - right).abs() > 1e-3).float().mean()) < 0.05
        torch.testing.assert_close(own, right, rtol=0.02, atol=0.02)
    # and rounds build on each other
    own, right = (mean_error(x, weight, codebook.sum_points(*each)) for each in refine(4))
    torch.testing.assert_close(own, right, rtol=0.01, atol=0)
    before = mean_error(x, weight, codebook.sum_points(*stages))
    assert bool((own < 0.9 * before).all())


def test_a_fit_by_kernels_is_as_good(monkeypatch, kernels):
    draw = torch.Generator().manual_seed(3)
    z = (torch.randn(1, 400, 2, 2, generator=draw) * torch.rand(2, 2, generator=draw)).to(DEVICE)
    metric = torch.eye(2, device=DEVICE).repeat(1, 2, 1, 1)
    fitted = []
    # the interpreter has one thread
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for each in (None, kernels):
        monkeypatch.setattr(codebook, "point_kernels_for", lambda _, each=each: each)
        fitted.append(fit_plane_codebooks(z, metric, CodebookFit(5, 5, 400)))
    right, own = fitted
    assert all(getattr(own, name).isfinite().all() for name in PlaneCodebooks.__slots__)
    # the last stages fit what little the first ones leave of few samples
    for classes, most in ((slice(0, 5), 0.02), (slice(5, 7), 0.1)):
        parts = (each.distortion[..., classes] for each in (own, right))
        torch.testing.assert_close(*parts, rtol=most, atol=1e-9)


def test_cells_of_all_classes(monkeypatch):
    draw = torch.Generator().manual_seed(4)
    z = torch.randn(2, 300, 3, 2, generator=draw) * torch.rand(2, 1, 3, 2, generator=draw)
    metric = torch.randn(2, 3, 2, 2, generator=draw)
    metric = metric @ metric.mT + 0.1 * torch.eye(2)
    planes = fit_plane_codebooks(z, metric, CodebookFit(3, 2, 300)).to(DEVICE)
    by_plane = z[:, :201].transpose(1, 2).to(DEVICE)
    found = point_kernels.code_cells(by_plane, planes)
    monkeypatch.setattr(codebook, "point_kernels_for", lambda _: None)
    monkeypatch.setattr(keys, "point_kernels_for", lambda _: None)
    wanted = keys._code_cells(by_plane, planes)
    # two points may be as near, up to rounding
    is_other = ((found - wanted).abs() > 1e-6).any(-1)
    assert is_other.float().mean() < 5e-3
    root = planes.metric_root[None, :, :, None]
    errors = [
        (root @ (each - by_plane[None])[..., None]).square().sum((-2, -1))
        for each in (found, wanted)
    ]
    torch.testing.assert_close(errors[0].sum(3), errors[1].sum(3), rtol=1e-4, atol=0)


def test_a_fit_on_a_cpu_is_native():
    x, weight = (each.cpu() for each in samples(2, 100))
    assert codebook.point_kernels_for(x) is native_points
    assert codebook.point_kernels_for(x.double()) is None
    with pytest.raises(ValueError, match="1 to 256"):
        native_points.grow_points(x, weight, torch.zeros(2, 256, 2), 1, SPLIT)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_fit(monkeypatch, threads):
    x, weight = (each.cpu() for each in samples(7, 203))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = codebook._fit_some_rows(x, weight, CodebookFit(3, 2, 100))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rows = [
        codebook._fit_some_rows(x[at : at + 1], weight[at : at + 1], CodebookFit(3, 2, 100))
        for at in range(7)
    ]
    for part, each in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(part, torch.cat(each), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_native_fits_do_not_depend_on_default_types(dtype):
    x, weight = (each.cpu() for each in samples(3, 200))
    fit = CodebookFit(2, 2, 100)
    wanted = codebook._fit_some_rows(x, weight, fit)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        grown = native_points.grow_points(x, weight, x[:, :2], 3, SPLIT)
        found = codebook._fit_some_rows(x, weight.round().to(torch.int64), fit)
    finally:
        torch.set_default_dtype(kept)
    assert torch.equal(grown, native_points.grow_points(x, weight, x[:, :2], 3, SPLIT))
    right = codebook._fit_some_rows(x, weight.round(), fit)
    assert all(each.dtype == torch.float32 for each in wanted)
    for one, two in zip(found[1:4], right[1:4], strict=True):
        torch.testing.assert_close(one.float(), two)
