# SPDX-License-Identifier: Apache-2.0
"""The cache in a tiny random model: runs in seconds, needs no weights."""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import sphkv


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(3, 97, (1, 1500))
    following = torch.randint(3, 97, (1, 1))
    with torch.no_grad(), sphkv.SphericalCache.for_model(model, budget="30%") as cache:
        dense = DynamicCache()
        model(tokens, past_key_values=dense)
        expected = model(following, past_key_values=dense).logits.log_softmax(-1)
        model(tokens, past_key_values=cache)
        found = model(following, past_key_values=cache).logits.log_softmax(-1)
        divergence = float((expected.exp() * (expected - found)).sum())
        print(cache)
        print(f"budget holds from {cache.holds_from} tokens on")
        print(f"KL to the dense cache: {divergence:.2e} nats")


if __name__ == "__main__":
    main()
