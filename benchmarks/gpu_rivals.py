# SPDX-License-Identifier: Apache-2.0
"""Decode attention of FlashAttention 3 and FlashInfer, where they are installed.

Both read paged caches of bfloat16 or fp8; a function returns None where its library is missing.
FlashAttention 3 is the build that comes with vLLM.
"""

import os

import torch

DEVICE = torch.device("cuda")
BLOCK = 128


class DenseBlocks:
    """Keys and values of a batch in blocks of 128 tokens, and sets of block tables."""

    def __init__(self, heads, head_dim, dtype, batch, context):
        per_set = batch * context // BLOCK
        self.sets = 1 if batch * context >= 1 << 20 else 3
        size = (self.sets * per_set, BLOCK, heads, head_dim)
        part = torch.randn(min(size[0], 64), *size[1:], device=DEVICE, dtype=torch.bfloat16)
        repeats = -(-size[0] // len(part))
        self.keys = part.to(dtype).repeat(repeats, 1, 1, 1)[: size[0]].contiguous()
        self.values = self.keys.flip(0).contiguous()
        order = torch.randperm(size[0], device=DEVICE).int()
        self.tables = [
            order[i * per_set : (i + 1) * per_set].view(batch, -1).contiguous()
            for i in range(self.sets)
        ]


def time_flash_attention(model, batch, context, dtype, median_us):
    """Microseconds of one layer with FlashAttention 3; None where it is not installed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    heads, dim = model.kv_heads, model.head_dim
    blocks = DenseBlocks(heads, dim, dtype, batch, context)
    query = torch.randn(batch, model.query_heads, dim, device=DEVICE).bfloat16()
    starts = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    used = torch.full((batch,), context, device=DEVICE, dtype=torch.int32)
    options = {}
    if dtype is torch.float8_e4m3fn:
        ones = torch.ones(batch, heads, device=DEVICE)
        options = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        query = query.to(dtype)

    def run(i):
        flash_attn_varlen_func(
            query, blocks.keys, blocks.values, 1, starts, context, seqused_k=used,
            softmax_scale=dim**-0.5, causal=True, block_table=blocks.tables[i % blocks.sets],
            fa_version=3, **options,
        )  # fmt: skip

    return median_us(run, 6, blocks.sets)


def time_flashinfer(model, batch, context, dtype, median_us):
    """Microseconds of one layer with FlashInfer; None where it is not installed."""
    if os.environ.get("SPHKV_NO_FLASHINFER"):
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    heads, dim = model.kv_heads, model.head_dim
    blocks = DenseBlocks(heads, dim, dtype, batch, context)
    query = torch.randn(batch, model.query_heads, dim, device=DEVICE).bfloat16()
    pages = context // BLOCK
    space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrappers = []
    for table in blocks.tables:
        starts = pages * torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            space, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=table.flatten(),
            paged_kv_last_page_len_buffer=torch.full((batch,), BLOCK, device=DEVICE).int(),
        )  # fmt: skip
        wrapper.plan(
            starts, table.flatten(), torch.full((batch,), BLOCK, device=DEVICE).int(),
            model.query_heads, heads, dim, BLOCK, q_data_type=torch.bfloat16, kv_data_type=dtype,
        )  # fmt: skip
        wrappers.append(wrapper)
    # a plan lives in the workspace: only the last one is whole
    return median_us(lambda _: wrappers[-1].run(query, (blocks.keys, blocks.values)), 6, 1)


def rivals(model, batch, context, median_us):
    """Microseconds by name; those that cannot run are left out, with a line that says why."""
    found = {}
    for name, time in (("fa3", time_flash_attention), ("flashinfer", time_flashinfer)):
        for kind, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
            try:
                us = time(model, batch, context, dtype, median_us)
            except Exception as error:  # other projects' code
                print(f"    {name} {kind} at {(batch, context)}: {error!r}"[:300], flush=True)
                continue
            if us is not None:
                found[f"{name}_{kind}_us"] = us
            torch.cuda.empty_cache()
    return found
