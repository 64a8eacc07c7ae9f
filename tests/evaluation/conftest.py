# SPDX-License-Identifier: Apache-2.0
"""A tiny random model in a folder of its own, with a tokenizer of single bytes."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads with ``load_model``; its 'words' are bytes."""
    transformers = pytest.importorskip("transformers", reason="sphkv[transformers] not installed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny") / "model"
    vocabulary = {symbol: number for number, symbol in enumerate(_byte_symbols(), start=1)}
    vocabulary["<end>"] = 0
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _byte_symbols() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
