# SPDX-License-Identifier: Apache-2.0
"""Start-up check: the kernel against the float64 oracle on random pages of the real codebook."""

from __future__ import annotations

import torch

from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import PAGE_TOKENS, KernelShape
from sphkv.attention.cuda.page_lists import PageLists, PagePool
from sphkv.attention.cuda.synthetic import Oracle, random_pages, set_bases, set_counts, tier_layout
from sphkv.attention.request import AttentionOptions
from sphkv.codec.codebook import AngleCodebook
from sphkv.core.rope import RopeSpec
from sphkv.errors import KernelMismatchError
from sphkv.store.paging import PositionMode

# Relative error of the output: half-precision products and weights.
ERROR_FLOOR = 5e-3
_ROW_PAGES = 5


def self_test(
    codebook: AngleCodebook,
    rope: RopeSpec,
    *,
    value_bits: int,
    group: int,
    shape: KernelShape | None = None,
) -> float:
    """Run the kernel of one layer and tier on random pages.

    Args:
        codebook: Slots of the layer and tier, on the GPU.
        rope: The layer's rotary embedding.
        value_bits: Width of value codes.
        group: Query heads per KV head.
        shape: Kernel shape; the one that fits the codebook if None.

    Returns:
        Largest relative error over heads.

    Raises:
        KernelMismatchError: The error is above the floor or the output is not finite.
    """
    device = codebook.points.device
    heads, head_dim = codebook.points.shape[0], rope.head_dim
    layout = tier_layout(head_dim, codebook.num_slots, value_bits)
    pages = random_pages(layout, heads * _ROW_PAGES, device=device)
    counts = torch.full((len(pages),), PAGE_TOKENS, device=device)
    counts[_ROW_PAGES - 1 :: _ROW_PAGES] = PAGE_TOKENS // 2 + 1
    set_counts(pages, counts)
    set_bases(pages, layout, PAGE_TOKENS * torch.arange(_ROW_PAGES, device=device).repeat(heads))
    turns = TurnTable.build(rope, max_positions=PAGE_TOKENS * _ROW_PAGES, device=device)
    decoder = CudaDecode(
        codebook, rope, turns, value_bits=value_bits, group=group, max_batch=1, shape=shape
    )
    ids = torch.arange(len(pages), device=device).view(heads, 1, _ROW_PAGES)
    lists = PageLists.from_table(ids, torch.full((heads, 1), _ROW_PAGES, device=device), pages)
    query = torch.randn(1, heads * group, head_dim, device=device)
    result = decoder.empty_result(1)
    result.output.fill_(torch.nan)
    options = AttentionOptions(scale=head_dim**-0.5)
    decoder.attend(query, PagePool(pages, PositionMode.CONTIGUOUS), lists, options, result=result)
    oracle, worst = Oracle(codebook, rope, layout), 0.0
    for head in range(heads):
        rows = slice(head * group, (head + 1) * group)
        right = oracle.attend(query[0, rows], pages[ids[head, 0]], head, options).output
        gap = (result.output[0, rows].double() - right).norm() / right.norm().clamp(min=1e-6)
        worst = max(worst, gap.nan_to_num(torch.inf).item())
    if not worst < ERROR_FLOOR:
        raise KernelMismatchError(
            f"decode kernel {decoder.shape} is off by {worst:.1e}, more than {ERROR_FLOOR:.0e}"
        )
    return worst
