# SPDX-License-Identifier: Apache-2.0
"""A calibration on disk: safetensors, with geometry, rotary parameters and a content hash."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import CELL_BITS, PlaneCodebooks
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

FORMAT = "sphkv-calibration-2"
_MAX_BYTES = 1 << 32
# Elements of each weight that tell models apart.
_SAMPLED = 64
_KEY_LENGTH = 32
# Calibrations that stay in memory for the next cache, with all tables that were made of them.
_MOST_RECENT = 1
_RECENT: OrderedDict[tuple[Path, KVGeometry, tuple[RopeSpec, ...]], Calibration] = OrderedDict()


def model_key(about: str, weights: Iterable[Tensor]) -> str:
    """A name for a model that another one, or the same with other weights, does not have.

    Args:
        about: Text that tells its shape, such as its configuration.
        weights: Some of its weights, always in the same order; of each 64 evenly spaced elements
            are read, so that a change of others is not seen.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256(about.encode())
    samples = []
    for weight in weights:
        flat = weight.detach().reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].float())
        digest.update(str(tuple(weight.shape)).encode())
    if samples:
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:_KEY_LENGTH]


def calibration_folder() -> Path:
    """Where calibrations that caches make are kept: below ``SPHKV_CACHE``, or the user's cache."""
    given = os.environ.get("SPHKV_CACHE")
    if given:
        return Path(given) / "calibrations"
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sphkv" / "calibrations"


def keep_calibration(calibration: Calibration, key: str) -> Path:
    """Save a calibration so that ``find_calibration`` finds it; replaces an older one.

    Args:
        calibration: Codebooks of all layers.
        key: What ``model_key`` says of the model.
    """
    path = _kept_path(key)
    save_calibration(replace(calibration, source="kept"), path)
    _RECENT.pop((path, calibration.geometry, calibration.ropes), None)
    return path


def find_calibration(
    key: str, *, geometry: KVGeometry, ropes: tuple[RopeSpec, ...]
) -> Calibration | None:
    """A calibration that was kept for a model; None without one that is whole and fits.

    The last one stays in memory, and with it the tables that a device made of it.

    Args:
        key: What ``model_key`` says of the model.
        geometry: What the model has.
        ropes: Rotary embeddings of its layers.
    """
    path = _kept_path(key)
    recent = (path, geometry, ropes)
    if recent not in _RECENT:
        try:
            found = load_calibration(path, geometry=geometry, ropes=ropes)
        except (OSError, ValueError):
            # a file that cannot be read is as good as none
            return None
        _RECENT[recent] = found
        while len(_RECENT) > _MOST_RECENT:
            _RECENT.popitem(last=False)
    return _RECENT[recent]


def _kept_path(key: str) -> Path:
    if len(key) != _KEY_LENGTH or set(key) - set("0123456789abcdef"):
        raise ValueError(f"a model key is {_KEY_LENGTH} hexadecimal digits, got {key!r}")
    return calibration_folder() / f"{key}.safetensors"


def save_calibration(calibration: Calibration, path: Path | str) -> None:
    """Write a calibration; the file appears whole or not at all."""
    tensors = _tensors(calibration.planes)
    about = {
        "format": FORMAT,
        "model_id": calibration.model_id,
        "source": calibration.source,
        "num_tokens": calibration.num_tokens,
        "geometry": asdict(calibration.geometry),
        "ropes": _unique_ropes(calibration.ropes),
    }
    text = json.dumps(about, sort_keys=True)
    metadata = {"sphkv": text, "sha256": _content_hash(text, tensors)}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(save(tensors, metadata))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_calibration(
    path: Path | str,
    *,
    geometry: KVGeometry | None = None,
    ropes: tuple[RopeSpec, ...] | None = None,
) -> Calibration:
    """Read a calibration and refuse it unless it is whole and fits.

    Args:
        path: The file.
        geometry: What the model has; a difference raises and is named.
        ropes: Rotary embeddings of the model's layers; a difference raises and is named.

    Raises:
        ValueError: If the file is damaged, foreign, or made for another model.
        FileNotFoundError: If it does not exist.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no calibration file at {source}")
    if source.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{source} has {source.stat().st_size} bytes, more than {_MAX_BYTES}")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            about = _parse_about(source, metadata)
            found = KVGeometry(**about["geometry"])
            _check_shapes(source, file, found)
            tensors = {name: file.get_tensor(name) for name in _shapes(found)}
    except SafetensorError as error:
        raise ValueError(f"{source} is no whole safetensors file: {error}") from error
    if _content_hash(metadata["sphkv"], tensors) != metadata.get("sha256"):
        raise ValueError(f"{source} was changed: its content does not match its sha256")
    _check_finite(source, tensors)
    found_ropes = _expand_ropes(source, about["ropes"], found)
    _check_match(source, found, geometry, found_ropes, ropes)
    return Calibration(
        geometry=found,
        ropes=found_ropes,
        planes=PlaneCodebooks(**tensors),
        model_id=about["model_id"],
        source=about["source"],
        num_tokens=about["num_tokens"],
    )


def _tensors(planes: PlaneCodebooks) -> dict[str, Tensor]:
    return {
        name: getattr(planes, name).detach().to("cpu", torch.float32).contiguous()
        for name in PlaneCodebooks.__slots__
    }


def _shapes(geometry: KVGeometry) -> dict[str, tuple[int, ...]]:
    lead = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim // 2)
    return {
        "metric_root": (*lead, 2, 2),
        "mean": (*lead, 2),
        "pair": (*lead, 4, 2),
        "single": (*lead, 16, 2),
        "joint": (*lead, 16, 2),
        "halves": (*lead, 2, 4, 2),
        "stages": (*lead, 3, 16, 2),
        "distortion": (*lead, len(CELL_BITS)),
    }


def _content_hash(about: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _unique_ropes(ropes: tuple[RopeSpec, ...]) -> dict[str, object]:
    unique: list[RopeSpec] = []
    for rope in ropes:
        if rope not in unique:
            unique.append(rope)
    return {
        "specs": [rope.to_json() for rope in unique],
        "layers": [unique.index(rope) for rope in ropes],
    }


def _expand_ropes(
    path: Path, stored: dict[str, list[object]], geometry: KVGeometry
) -> tuple[RopeSpec, ...]:
    specs = [RopeSpec.from_json(spec) for spec in stored["specs"]]  # type: ignore[arg-type]
    layers = stored["layers"]
    if len(layers) != geometry.num_layers:
        raise ValueError(f"{path} names ropes of {len(layers)} layers, not {geometry.num_layers}")
    for index in layers:
        if not isinstance(index, int) or not 0 <= index < len(specs):
            raise ValueError(f"{path} names rope {index!r} of {len(specs)}")
    return tuple(specs[index] for index in layers if isinstance(index, int))


_ABOUT_TYPES = {
    "format": str,
    "model_id": str,
    "source": str,
    "num_tokens": int,
    "geometry": dict,
    "ropes": dict,
}


def _parse_about(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if "sphkv" not in metadata:
        raise ValueError(f"{path} is no calibration file: it has no 'sphkv' metadata")
    try:
        about = json.loads(metadata["sphkv"])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has damaged metadata: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise ValueError(f"{path} has format {found!r}, expected {FORMAT!r}")
    for name, kind in _ABOUT_TYPES.items():
        if not isinstance(about.get(name), kind):
            raise ValueError(
                f"{path}: metadata {name!r} is {about.get(name)!r}, not {kind.__name__}"
            )
    fields = set(KVGeometry.__slots__)
    if set(about["geometry"]) != fields:
        raise ValueError(f"{path}: geometry has keys {sorted(about['geometry'])}")
    if set(about["ropes"]) != {"specs", "layers"}:
        raise ValueError(f"{path}: ropes has keys {sorted(about['ropes'])}")
    return about


def _check_shapes(path: Path, file: Any, geometry: KVGeometry) -> None:
    """Compare shapes before any tensor is read, so that no wrong size is ever allocated."""
    expected = _shapes(geometry)
    if set(file.keys()) != set(expected):
        raise ValueError(f"{path} holds tensors {sorted(file.keys())}, not {sorted(expected)}")
    for name, shape in expected.items():
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape or view.get_dtype() != "F32":
            raise ValueError(
                f"{path}: {name} is {view.get_dtype()} {tuple(view.get_shape())}, "
                f"geometry needs F32 {shape}"
            )


def _check_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {name} holds values that are not finite")


def _check_match(
    path: Path,
    found: KVGeometry,
    geometry: KVGeometry | None,
    found_ropes: tuple[RopeSpec, ...],
    ropes: tuple[RopeSpec, ...] | None,
) -> None:
    if geometry is not None and found != geometry:
        differing = [
            f"{name} {getattr(found, name)} instead of {getattr(geometry, name)}"
            for name in KVGeometry.__slots__
            if getattr(found, name) != getattr(geometry, name)
        ]
        raise ValueError(f"{path} is for another geometry: {', '.join(differing)}")
    if ropes is None:
        return
    for layer, (mine, wanted) in enumerate(zip(found_ropes, ropes, strict=True)):
        for name in RopeSpec.__slots__:
            if getattr(mine, name) != getattr(wanted, name):
                raise ValueError(f"{path}: rope of layer {layer} differs in {name}")
