# SPDX-License-Identifier: Apache-2.0
"""Models with random weights in the shape of known ones, built on the GPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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
    # one kernel instead of six, for both caches alike
    LlamaRMSNorm.forward = _fused_norm
    return model.requires_grad_(False)


def _fused_norm(self, hidden_states):
    return torch.nn.functional.rms_norm(
        hidden_states, self.weight.shape, self.weight, self.variance_epsilon
    )
