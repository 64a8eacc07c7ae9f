# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 from GGUF: norms that count from one, two rotary bases, pieces of SentencePiece."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")
pytest.importorskip("gguf", reason="the extra sphkv[transformers] is not installed")

from gguf import GGUFWriter
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from sphkv.integrations.models import convert_gguf, load_model
from sphkv.integrations.transformers.architecture import describe_model

LAYERS, WINDOW = 7, 8
PARTS = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# pieces by falling score: "an" is merged before "na" and "ban" before both of them are extended
PIECES = ["▁", "a", "b", "n", "\n", "an", "ban", "na", "▁b", "ana"]


def make_model(
    path: Path, *, layers: int = LAYERS, space_prefix: bool = False
) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(SPECIAL + BYTES + PIECES),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    model: Gemma3ForCausalLM = Gemma3ForCausalLM(config)
    model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    writer = GGUFWriter(path, "gemma3")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_sliding_window(WINDOW)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    write_tokenizer(writer, space_prefix=space_prefix)
    write_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_tokenizer(writer: GGUFWriter, *, space_prefix: bool) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPECIAL + BYTES + PIECES)
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1] * len(PIECES))
    writer.add_token_scores([0.0] * 260 + [-float(rank) for rank in range(len(PIECES))])
    for name, token in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)


def write_weights(writer: GGUFWriter, model: Gemma3ForCausalLM) -> None:
    top = {"embed_tokens": "token_embd", "norm": "output_norm"}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = name.split(".")
        weight = tensor.numpy() + (1.0 if "norm" in parts[-2] else 0.0)
        is_layer = parts[1] == "layers"
        stored = f"blk.{parts[2]}.{PARTS[parts[-2]]}" if is_layer else top[parts[-2]]
        writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(weight, np.float32))


def test_a_converted_model_says_the_same(tmp_path: Path):
    expected = make_model(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    model, _ = load_model(str(tmp_path))
    assert isinstance(model, Gemma3ForCausalLM)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    layout = describe_model(model)
    assert layout.windows == (*[WINDOW] * 5, None, WINDOW)
    assert layout.ropes[5].inv_freq[1] == pytest.approx(5e4 ** (-1 / 8))
    assert layout.ropes[4].inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))


def test_pieces_are_merged_by_their_scores(tmp_path: Path):
    make_model(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    _, tokenizer = load_model(str(tmp_path))
    assert tokenizer.tokenize("banana ban ba") == ["ban", "ana", "▁", "ban", "▁b", "a"]
    assert tokenizer.tokenize("a é") == ["a", "▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer("banana é\n").input_ids
    assert ids[0] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "banana é\n"


@pytest.mark.parametrize(
    ("changes", "message"), [({"layers": 62}, "62 layers"), ({"space_prefix": True}, "a space")]
)
def test_what_would_not_carry_over_is_refused(tmp_path: Path, changes, message: str):
    make_model(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
