# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, PLR0913
"""Models with random weights in the shape of known ones, built on the GPU."""

import torch
import triton
import triton.language as tl
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_config(**changes):
    """Llama-3.1-8B, or a smaller one of the same build."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072 + 4096,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes}, rope_parameters=ROPE)


def build_llama(seed=0, **changes):
    """The model in bfloat16 with fused norms, ready to decode."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(llama_config(**changes)).eval()
    torch.set_default_dtype(before)
    # one kernel each, as servers have them, for both caches alike
    modeling_llama.LlamaRMSNorm.forward = _fused_norm
    modeling_llama.apply_rotary_pos_emb = _fused_rotation
    modeling_llama.LlamaMLP.forward = _fused_mlp
    return model.requires_grad_(False)


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, epsilon, WIDTH: tl.constexpr):
    at, dim = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at + dim).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    tl.store(out_ptr + at + dim, x.to(tl.bfloat16) * tl.load(weight_ptr + dim))


def _fused_norm(self, hidden_states):
    width = hidden_states.shape[-1]
    if width & (width - 1):
        shape = self.weight.shape
        return torch.nn.functional.rms_norm(
            hidden_states, shape, self.weight, self.variance_epsilon
        )
    hidden_states = hidden_states.contiguous()
    out = torch.empty_like(hidden_states)
    _norm_kernel[(hidden_states.numel() // width,)](
        hidden_states, self.weight, out, self.variance_epsilon, WIDTH=width, num_warps=8
    )
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
