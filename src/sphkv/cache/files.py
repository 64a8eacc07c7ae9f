# SPDX-License-Identifier: Apache-2.0
"""A cache on disk: one folder with settings, states and calibration."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sphkv.cache.config import CacheConfig, ResidencyPlan, RetentionConfig
from sphkv.cache.engine import CacheEngine
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.core.budget import ByteBudget
from sphkv.core.configs import build_config, config_to_dict
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierTable
from sphkv.errors import CacheFileError
from sphkv.store.config import StoreConfig
from sphkv.store.files import read_identity
from sphkv.store.store import PageStore

FORMAT = "sphkv-cache-folder-3"
_ABOUT = "cache.json"
_STATE = "state.safetensors"
_CALIBRATION = "calibration.safetensors"
_SETTINGS = (
    *("tier", "is_retention_forced", "context"),
    *("sink_tokens", "recent_tokens", "min_calibration_tokens"),
)


def save_engine(engine: CacheEngine, folder: Path) -> None:
    """Write a cache to a folder, which appears whole or not at all.

    Args:
        engine: The cache, between two forward passes.
        folder: Folder to create; one that ``save_engine`` made is replaced.

    Raises:
        FileExistsError: The folder exists and holds something else.
    """
    if folder.exists() and not (folder / _ABOUT).is_file():
        raise FileExistsError(f"{folder} exists and is no saved cache")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(engine, made)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / "old")
            made.rename(folder)
            shutil.rmtree(old)
        else:
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(engine: CacheEngine, folder: Path) -> None:
    codec_hash = ""
    if engine.calibration is not None:
        save_calibration(engine.calibration, folder / _CALIBRATION)
        codec_hash = _hash(folder / _CALIBRATION)
    for index, row in enumerate(engine.rows):
        row.save(folder / f"sequence-{index}.safetensors", codec_hash=codec_hash)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in engine.export_state().items()}
    save_file(tensors, folder / _STATE)
    config = engine.config
    about = {
        "format": FORMAT,
        "tiers": config.tiers.to_json(),
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "windows": list(config.windows),
        "budget": None if config.budget is None else str(config.budget),
        "retention": None if config.retention is None else config_to_dict(config.retention),
        "plan": None if engine.plan is None else config_to_dict(engine.plan),
        "num_sequences": len(engine.rows),
        "first_kept": [row.first_kept for row in engine.rows],
        "codec_hash": codec_hash,
        "state_hash": _hash(folder / _STATE),
    }
    (folder / _ABOUT).write_text(json.dumps(about, indent=1, sort_keys=True), encoding="utf-8")


def read_config(
    folder: Path,
    geometry: KVGeometry,
    ropes: tuple[RopeSpec, ...],
    windows: tuple[int | None, ...],
    *,
    device: str = "cpu",
) -> CacheConfig:
    """Settings of a saved cache, for a model of this geometry.

    Raises:
        CacheFileError: The folder is no saved cache, damaged, or of another model.
    """
    about = _read_about(folder)
    if about["windows"] != list(windows):
        raise CacheFileError(f"{folder} has windows {about['windows']}, not {list(windows)}")
    try:
        budget = None if about["budget"] is None else ByteBudget.parse(about["budget"])
        retention = about["retention"]
        return CacheConfig(
            geometry,
            ropes,
            windows,
            TierTable.from_json(about["tiers"]),
            budget=budget,
            retention=None if retention is None else build_config(RetentionConfig, retention),
            device=device,
            **_checked(about["settings"]),
        )
    except (ValueError, TypeError) as error:
        raise CacheFileError(f"{folder / _ABOUT}: {error}") from error


def load_engine(engine: CacheEngine, folder: Path) -> None:
    """Fill an empty engine, made from ``read_config``, with a saved cache.

    Raises:
        CacheFileError: A file is missing, damaged, or belongs to another model.
    """
    about = _read_about(folder)
    if _hash(folder / _STATE) != about["state_hash"]:
        raise CacheFileError(f"{folder / _STATE} was changed: its hash differs")
    try:
        state: dict[str, Tensor] = load_file(folder / _STATE, device=engine.config.device)
        if about["codec_hash"]:
            if _hash(folder / _CALIBRATION) != about["codec_hash"]:
                raise CacheFileError(f"{folder / _CALIBRATION} was changed: its hash differs")
            geometry, ropes = engine.config.geometry, engine.config.ropes
            engine.use_calibration(
                load_calibration(folder / _CALIBRATION, geometry=geometry, ropes=ropes)
            )
        files = [
            folder / f"sequence-{index}.safetensors" for index in range(about["num_sequences"])
        ]
        plan = None if about["plan"] is None else build_config(ResidencyPlan, about["plan"])
        engine.import_state(state, files, codec_hash=about["codec_hash"], plan=plan)
    except (SafetensorError, KeyError, OSError) as error:
        raise CacheFileError(f"{folder} is damaged: {error}") from error
    except ValueError as error:
        raise CacheFileError(f"{folder}: {error}") from error
    for row, first_kept in zip(engine.rows, about["first_kept"], strict=True):
        row.first_kept = first_kept


def open_pages(folder: Path) -> PageStore:
    """The states of a saved cache without its model: to look at, not to decode from.

    Raises:
        CacheFileError: The folder is no saved cache, damaged, or was saved before it was coded.
    """
    about = _read_about(folder)
    files = [folder / f"sequence-{index}.safetensors" for index in range(about["num_sequences"])]
    if not files:
        raise CacheFileError(f"{folder} was saved while still dense: it has no pages to look at")
    identity = read_identity(files[0])
    try:
        tier = about["plan"]["tier"]
        store = PageStore(StoreConfig(identity.geometry, identity.tiers, tier))
    except (KeyError, TypeError, ValueError) as error:
        raise CacheFileError(f"{folder / _ABOUT}: {error}") from error
    for sequence, file in enumerate(files):
        store.load(sequence, file, codec_hash=about["codec_hash"])
    return store


def _checked(settings: Any) -> dict[str, Any]:
    if not isinstance(settings, dict) or set(settings) != set(_SETTINGS):
        raise ValueError(f"settings must have the keys {_SETTINGS}, got {settings!r}")
    return settings


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheFileError(f"{folder} is no saved cache: {error}") from error
    keys = {"tiers", "settings", "windows", "budget", "num_sequences", "first_kept"}
    keys |= {"format", "codec_hash", "state_hash", "retention", "plan"}
    if not isinstance(about, dict) or set(about) != keys or about["format"] != FORMAT:
        raise CacheFileError(f"{folder / _ABOUT} is not of format {FORMAT!r}")
    return about


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CacheFileError(f"{path} cannot be read: {error.strerror}") from error
