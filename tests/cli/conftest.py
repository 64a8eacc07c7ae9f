# SPDX-License-Identifier: Apache-2.0
"""A tiny random model with a tokenizer, in a folder, for commands that load a model."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A two-layer Llama over bytes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    import torch

    folder = Path(tmp_path_factory.mktemp("model"))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, **{char: 2 + at for at, char in enumerate(alphabet)}}
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", bos_token="<s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A plain text of some thousand bytes."""
    path = Path(tmp_path_factory.mktemp("text")) / "text.txt"
    lines = [f"Line {number} tells of {number * 37 % 101} ships.\n" for number in range(120)]
    path.write_text("".join(lines), encoding="utf-8")
    return path
