# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, PLR0913
"""Models with random weights in the shape of known ones, built on the GPU."""

import torch
import triton
import triton.language as tl
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

SHAPES = {
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # without the biases of its queries, keys and values
    "Qwen2.5-14B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # full attention in all layers, and one dense block as wide as a token's four experts
    "gpt-oss-20b attention": {
        "hidden_size": 2880,
        "intermediate_size": 4 * 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
}
"""Sizes by name; all are built as a Llama is."""

_MAX_POSITIONS = 131072 + 4096


def build_model(shape, *, num_layers=None, seed=0, **changes):
    """A model in bfloat16 with fused norms, ready to decode.

    Args:
        shape: One of ``SHAPES``.
        num_layers: Layers to build; those of the shape by default.
        seed: Seed of the weights.
        changes: Other sizes, by the name of their field in the config.
    """
    sizes = {**SHAPES[shape], "max_position_embeddings": _MAX_POSITIONS, **changes}
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    torch.set_default_dtype(before)
    # one kernel each, as servers have them, for both caches alike
    modeling_llama.LlamaRMSNorm.forward = _fused_norm
    modeling_llama.apply_rotary_pos_emb = _fused_rotation
    modeling_llama.LlamaMLP.forward = _fused_mlp
    return model.requires_grad_(False)


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at, dim = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    weight = tl.load(weight_ptr + dim, mask=dim < WIDTH, other=0.0)
    tl.store(out_ptr + at + dim, x.to(tl.bfloat16) * weight, mask=dim < WIDTH)


def _fused_norm(self, hidden_states):
    width = hidden_states.shape[-1]
    hidden_states = hidden_states.contiguous()
    out = torch.empty_like(hidden_states)
    _norm_kernel[(hidden_states.numel() // width,)](
        hidden_states, self.weight, out, self.variance_epsilon,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _rotation_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_out, key_out, tokens, angles,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rows ``[batch, tokens, heads, 2 * HALF]`` in memory, ``[batch, heads, tokens, ...]`` out."""
    row, head = tl.program_id(0), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    dim = tl.arange(0, HALF)
    turn = (row % angles) * 2 * HALF + dim
    cos, sin = tl.load(cos_ptr + turn), tl.load(sin_ptr + turn)
    row = row.to(tl.int64)
    if head < QUERY_HEADS:
        source = query_ptr + (row * QUERY_HEADS + head) * 2 * HALF + dim
        place = (batch * QUERY_HEADS + head).to(tl.int64) * tokens + token
        target = query_out + place * 2 * HALF + dim
    else:
        head -= QUERY_HEADS
        source = key_ptr + (row * KEY_HEADS + head) * 2 * HALF + dim
        place = (batch * KEY_HEADS + head).to(tl.int64) * tokens + token
        target = key_out + place * 2 * HALF + dim
    x, y = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    tl.store(target, (x * cos - y * sin).to(tl.bfloat16))
    tl.store(target + HALF, (y * cos + x * sin).to(tl.bfloat16))


def _fused_rotation(q, k, cos, sin, unsqueeze_dim=1):
    """``q`` and ``k`` are ``[batch, heads, tokens, dim]`` views of rows by token."""
    batch, heads, tokens, dim = q.shape
    rows = [part.transpose(1, 2).contiguous() for part in (q, k)]
    out = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k)]
    angles = cos.shape[0] * tokens if cos.shape[0] == batch else tokens
    _rotation_kernel[(batch * tokens, heads + k.shape[1])](
        *rows, cos.contiguous(), sin.contiguous(), *out, tokens, angles,
        QUERY_HEADS=heads, KEY_HEADS=k.shape[1], HALF=dim // 2, num_warps=1,
    )  # fmt: skip
    return tuple(out)


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < size).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < size).to(tl.float32)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=at < size)


def _fused_mlp(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    out, block = torch.empty_like(gate), 1024
    _gate_kernel[(triton.cdiv(gate.numel(), block),)](gate, up, out, gate.numel(), BLOCK=block)
    return self.down_proj(out)
