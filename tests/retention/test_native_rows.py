# SPDX-License-Identifier: Apache-2.0
"""Losses of dropping in native code are those of torch and of float64, at odd sizes."""

import pytest
import torch

from sphkv.core.devices import native_kernels, require_kernels
from sphkv.retention import rows as rows_module
from sphkv.retention.rows import LEAST_MASS, AttentionRows, native_drop_losses


def make(heads, num_rows, tokens, dim, units, granularity):
    """Rows some of which do not count, values, and blocks of unlike numbers of units."""
    draw = torch.Generator().manual_seed(tokens + dim)
    weight = (2 * torch.randn(heads, num_rows, tokens, generator=draw)).softmax(-1)
    share = torch.rand(heads, num_rows, generator=draw)
    is_valid = torch.rand(num_rows, tokens, generator=draw) < 0.9
    values = torch.randn(heads, tokens, dim, generator=draw) + 0.5
    count = -(-tokens // granularity)
    # three quarters of the units go; the last block is not full
    order = torch.stack([torch.randperm(count, generator=draw) for _ in range(heads)])
    order = order[:, : max(1, 3 * count // 4)]
    pad = -order.shape[1] % units
    blocks = torch.nn.functional.pad(order, (0, pad), value=-1).view(heads, -1, units)
    return AttentionRows(weight, share, is_valid), values, blocks


def by_hand(rows, values, blocks, granularity):
    """Float64, block after block."""
    weight = (rows.weight * rows.is_valid).double()
    values, output = values.double(), rows.output(values).double()
    heads, tokens = weight.shape[0], weight.shape[2]
    is_gone = torch.zeros(heads, tokens, dtype=torch.bool)
    losses = [torch.zeros(heads, dtype=torch.float64)]
    for block in blocks.flip(1).unbind(1):
        for head, units in enumerate(block):
            for unit in units[units >= 0].tolist():
                is_gone[head, unit * granularity : (unit + 1) * granularity] = True
        own = weight * is_gone[:, None]
        gone = own.sum(-1, keepdim=True)
        move = (own @ values - gone * output).square().sum(-1)
        left = (1 - gone[..., 0]).clamp(min=LEAST_MASS)
        losses.append((move / left.square() * rows.share).sum(1))
    return torch.stack(losses, 1)


CASES = [
    (1, 1, 5, 4, 1, 1),
    (2, 17, 203, 48, 3, 16),
    (3, 33, 160, 64, 2, 16),
    (2, 16, 97, 130, 24, 1),
    (2, 18, 97, 96, 5, 16),
    (1, 19, 65, 80, 2, 16),
]
# where native code was not built, the test says so
BUILT = native_kernels()
VARIANTS = ["native"] if BUILT is None else BUILT.recoders()


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_losses(sizes, variant, monkeypatch):
    require_kernels()
    monkeypatch.setattr(rows_module, "native_variant", lambda: variant)
    granularity = sizes[-1]
    rows, values, blocks = make(*sizes)
    wanted = by_hand(rows, values, blocks, granularity)
    found = rows.drop_losses(values, blocks, granularity=granularity)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(rows_module, "native_kernels", lambda: None)
    by_torch = rows.drop_losses(values, blocks, granularity=granularity)
    torch.testing.assert_close(by_torch.double(), wanted, rtol=1e-4, atol=1e-6)


def test_threads_add_in_one_order(monkeypatch):
    rows, values, blocks = make(*CASES[1])
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(rows.drop_losses(values, blocks, granularity=16))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_unknown_instruction_set_is_named(monkeypatch):
    monkeypatch.setattr(rows_module, "native_variant", lambda: "mmx")
    rows, values, blocks = make(*CASES[0])
    with pytest.raises(ValueError, match="mmx"):
        rows.drop_losses(values, blocks, granularity=1)


def test_the_default_type_does_not_matter():
    rows, values, blocks = make(*CASES[1])
    wanted = rows.drop_losses(values, blocks, granularity=16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = rows.drop_losses(values, blocks, granularity=16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def test_what_native_code_cannot_read_is_left_to_torch():
    rows, values, blocks = make(*CASES[0])
    output = rows.output(values)
    assert native_drop_losses(rows, values, blocks, output, 1) is not None
    assert native_drop_losses(rows, values.requires_grad_(), blocks, output, 1) is None
