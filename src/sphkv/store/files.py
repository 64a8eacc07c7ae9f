# SPDX-License-Identifier: Apache-2.0
"""One sequence's cache in one safetensors file, checked before anything is allocated."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.errors import CacheFileError
from sphkv.store.layout import PageLayout, PageView
from sphkv.store.paging import MAX_POSITION, PositionMode
from sphkv.store.pool import EncodedPages, LayerChange, PagePool
from sphkv.store.sequence import OpenTail, SequenceState, page_groups
from sphkv.store.slabs import PoolKey

_FORMAT = "sphkv-cache-2"
_LABEL = "sphkv"
_PAGES = re.compile(r"pages\.(\d{1,3})\.([0-2])")
_OWNERS = re.compile(r"owners\.(\d{1,3})\.([0-2])")
_TAIL = re.compile(r"tail\.(\d{1,6})\.(keys|values)")


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """Everything a file holds of a sequence.

    Attributes:
        next_position: Position of each layer's next token.
        seal_tier_id: Tier of the pages that full tails become.
        pages: Bytes ``[pages, page_bytes]`` uint8 and owners ``[pages, 2]`` int32 (layer, then
            head), for each tier id and position mode.
        tails: Keys and values ``[heads, tokens, head_dim]`` bfloat16 of layers with a tail.
    """

    next_position: list[int]
    seal_tier_id: int
    pages: dict[PoolKey, tuple[Tensor, Tensor]]
    tails: dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What a file and the store that reads it must agree on.

    Attributes:
        geometry: Shape of the cache.
        tiers: Precision tiers.
        codec_hash: Names the codebooks that made the codes.
    """

    geometry: KVGeometry
    tiers: TierTable
    codec_hash: str

    def to_json(self) -> str:
        """Canonical text, stored in the file."""
        data = {
            "format": _FORMAT,
            "geometry": asdict(self.geometry),
            "tiers": json.loads(self.tiers.to_json()),
            "codec_hash": self.codec_hash,
        }
        return json.dumps(data, sort_keys=True)

    def check(self, text: str, path: Path) -> None:
        """Raise if the file's identity differs, naming what differs."""
        differences = _differences(_parse_json(text, path), json.loads(self.to_json()), "")
        if differences:
            raise CacheFileError(f"{path} differs from the store: " + "; ".join(differences))


def read_identity(path: Path) -> FileIdentity:
    """What a file says it belongs to, for those who have no store yet.

    Raises:
        CacheFileError: The file is damaged or says nothing that can be used.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text, _ = _read_label(path, file.metadata() or {})
        found = _parse_json(text, path)
        return FileIdentity(
            KVGeometry(**found["geometry"]),
            TierTable.from_json(json.dumps(found["tiers"])),
            str(found["codec_hash"]),
        )
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} cannot be read as a cache: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path} does not say what it belongs to: {error}") from error


def _differences(found: Any, expected: Any, name: str) -> list[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        return [
            text
            for key in sorted({*found, *expected})
            for text in _differences(
                found.get(key), expected.get(key), f"{name}.{key}" if name else key
            )
        ]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [
            text
            for index, (left, right) in enumerate(zip(found, expected, strict=True))
            for text in _differences(left, right, f"{name}[{index}]")
        ]
    return [] if found == expected else [f"{name} is {found!r}, not {expected!r}"]


def write_sequence(path: Path, saved: SavedSequence, identity: FileIdentity) -> None:
    """Write a file in one step: it is whole or it is not there.

    Args:
        path: File to create or replace.
        saved: The sequence.
        identity: Geometry, tiers and codec it belongs to.
    """
    tensors = {
        "next_position": torch.tensor(saved.next_position, dtype=torch.int64),
        "seal_tier": torch.tensor(saved.seal_tier_id, dtype=torch.int64),
    }
    for (tier_id, mode), (pages, owners) in saved.pages.items():
        tensors[f"pages.{tier_id}.{int(mode)}"] = pages
        tensors[f"owners.{tier_id}.{int(mode)}"] = owners
    for layer, (keys, values) in saved.tails.items():
        tensors[f"tail.{layer}.keys"] = keys
        tensors[f"tail.{layer}.values"] = values
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    text = identity.to_json()
    # One entry only: safetensors does not keep the order of several.
    label = {"cache": text, "sha256": _content_hash(text, tensors)}
    data = save(tensors, {_LABEL: json.dumps(label, sort_keys=True)})
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _content_hash(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        data: Any = tensor.flatten().view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()


def read_sequence(
    path: Path,
    identity: FileIdentity,
    *,
    layout_of: Callable[[PoolKey], PageLayout],
    check_room: Callable[[Mapping[PoolKey, int]], None],
) -> SavedSequence:
    """Read and check a file.

    Names, dtypes and shapes are checked first, then the room for them, then content hash,
    headers and owners.

    Args:
        path: File that ``write_sequence`` made.
        identity: What the reading store is.
        layout_of: Layout of each pool.
        check_room: Raises if so many pages of each pool have no room.

    Returns:
        The sequence, on the CPU.

    Raises:
        CacheFileError: The file is truncated, tampered with, or of another geometry, tier
            table or codec; the message names what differs.
        BudgetError: ``check_room`` refused.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text, expected_hash = _read_label(path, file.metadata() or {})
            identity.check(text, path)
            check_room(_check_shapes(path, file, identity, layout_of))
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise CacheFileError(f"{path} is truncated or no safetensors file: {error}") from error
    found = _content_hash(text, tensors)
    if found != expected_hash:
        raise CacheFileError(f"{path}: content hash is {found}, not {expected_hash}")
    saved = _parse(tensors)
    _check_content(path, saved, identity.geometry, layout_of)
    return saved


def _read_label(path: Path, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Identity text and content hash of a file."""
    if set(metadata) != {_LABEL}:
        raise CacheFileError(f"{path}: metadata keys are {sorted(metadata)}, not [{_LABEL!r}]")
    label = _parse_json(metadata[_LABEL], path)
    if not isinstance(label, dict) or set(label) != {"cache", "sha256"}:
        raise CacheFileError(f"{path}: metadata holds {label!r}")
    if not all(isinstance(value, str) for value in label.values()):
        raise CacheFileError(f"{path}: metadata holds {label!r}")
    return label["cache"], label["sha256"]


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CacheFileError(f"{path}: metadata is no JSON: {error}") from error


def _check_shapes(
    path: Path,
    file: Any,
    identity: FileIdentity,
    layout_of: Callable[[PoolKey], PageLayout],
) -> dict[PoolKey, int]:
    """Compare every tensor's name, dtype and shape; return the pages of each pool."""
    names = set(file.keys())
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    for name in ("next_position", "seal_tier"):
        if name not in names:
            raise CacheFileError(f"{path}: tensor {name} is missing")
    num_pages: dict[PoolKey, int] = {}
    for name in sorted(names):
        found = (file.get_slice(name).get_dtype(), shapes[name])
        expected = _expected(name, shapes[name], identity, layout_of)
        if expected is None:
            raise CacheFileError(f"{path}: tensor {name} {found} is none of this store's")
        dtype, shape, partner = expected
        if found != (dtype, shape):
            raise CacheFileError(
                f"{path}: tensor {name} is {found[0]} {found[1]}, not {dtype} {shape}"
            )
        if partner and (partner not in names or shapes[partner][:1] != shapes[name][:1]):
            raise CacheFileError(f"{path}: tensor {name} does not fit {partner}")
        if match := _PAGES.fullmatch(name):
            num_pages[int(match[1]), PositionMode(int(match[2]))] = shapes[name][0]
    return num_pages


def _expected(
    name: str,
    shape: tuple[int, ...],
    identity: FileIdentity,
    layout_of: Callable[[PoolKey], PageLayout],
) -> tuple[str, tuple[int, ...], str] | None:
    """Dtype and shape a tensor must have, and the tensor that must come with it."""
    geometry = identity.geometry
    if name == "next_position":
        return "I64", (geometry.num_layers,), ""
    if name == "seal_tier":
        return "I64", (), ""
    rows = shape[0] if shape else 0
    pages, owners, tail = (pattern.fullmatch(name) for pattern in (_PAGES, _OWNERS, _TAIL))
    if pages and 0 < int(pages[1]) < len(identity.tiers):
        layout = layout_of((int(pages[1]), PositionMode(int(pages[2]))))
        return "U8", (rows, layout.page_bytes), f"owners.{pages[1]}.{pages[2]}"
    if owners:
        return "I32", (rows, 2), f"pages.{owners[1]}.{owners[2]}"
    if tail and int(tail[1]) < geometry.num_layers:
        tokens = shape[1] if len(shape) == 3 else 0
        other = "values" if tail[2] == "keys" else "keys"
        dense = (geometry.num_kv_heads, tokens, geometry.head_dim)
        return "BF16", dense, f"tail.{tail[1]}.{other}"
    return None


def _parse(tensors: Mapping[str, Tensor]) -> SavedSequence:
    pages = {}
    tails = {}
    for name in tensors:
        if match := _PAGES.fullmatch(name):
            key = (int(match[1]), PositionMode(int(match[2])))
            pages[key] = (tensors[name], tensors[f"owners.{match[1]}.{match[2]}"])
        elif (match := _TAIL.fullmatch(name)) and match[2] == "keys":
            tails[int(match[1])] = (tensors[name], tensors[f"tail.{match[1]}.values"])
    return SavedSequence(tensors["next_position"].tolist(), int(tensors["seal_tier"]), pages, tails)


def _check_content(
    path: Path,
    saved: SavedSequence,
    geometry: KVGeometry,
    layout_of: Callable[[PoolKey], PageLayout],
) -> None:
    try:
        for position in saved.next_position:
            if not 0 <= position <= MAX_POSITION + 1:
                raise ValueError(f"next position {position} is out of range")
        for key, (pages, owners) in saved.pages.items():
            PageView(layout_of(key), pages).check()
            size = torch.tensor([geometry.num_layers, geometry.num_kv_heads])
            if bool(((owners < 0) | (owners >= size)).any()):
                raise ValueError(f"owners of tier {key[0]} name a layer or head out of range")
        for layer, (keys, values) in saved.tails.items():
            if keys.shape != values.shape or keys.shape[1] > saved.next_position[layer]:
                raise ValueError(f"tail of layer {layer} has shape {tuple(keys.shape)}")
            if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
                raise ValueError(f"tail of layer {layer} is not finite")
    except ValueError as error:
        raise CacheFileError(f"{path}: {error}") from error


def export_sequence(pool: PagePool, state: SequenceState) -> SavedSequence:
    """Copy the pages and tails of a sequence."""
    found: dict[PoolKey, list[tuple[Tensor, Tensor]]] = {}
    for layer, table in enumerate(state.tables):
        for group in page_groups(table, pool.layout):
            heads = group.head_ids().cpu().to(torch.int32)
            owners = torch.stack([torch.full_like(heads, layer), heads], dim=1)
            key = (group.layout.tier_id, group.layout.position_mode)
            found.setdefault(key, []).append((pool.allocator.gather(group.flat_ids()), owners))
    pages = {
        key: (torch.cat([page for page, _ in parts]), torch.cat([owner for _, owner in parts]))
        for key, parts in found.items()
    }
    tails = {
        layer: (tail.view().keys, tail.view().values)
        for layer, tail in enumerate(state.tails)
        if tail is not None and tail.num_tokens
    }
    return SavedSequence(list(state.next_position), state.seal_tier_id, pages, tails)


def import_sequence(
    pool: PagePool, saved: SavedSequence, codec: StateCodec | None
) -> tuple[SequenceState, list[LayerChange]]:
    """Prepare a sequence; its pages come with the commit of the changes.

    Args:
        pool: Pool that will own the pages.
        saved: The sequence, already checked.
        codec: Encoder of the sequence.

    Returns:
        The sequence with its tails and empty tables, and one change per layer.

    Raises:
        CacheFileError: A tail is longer than this store's tails, or sealed at a tier whose pages
            do not divide them.
    """
    tiers = pool.config.tiers
    try:
        state = SequenceState.blank(pool.config, codec, tiers[saved.seal_tier_id].name)
    except ValueError as error:
        raise CacheFileError(f"sequence cannot be sealed in this store: {error}") from error
    state.next_position = list(saved.next_position)
    for layer, (keys, values) in saved.tails.items():
        num_tokens, capacity = keys.shape[1], pool.config.tail_capacity
        if num_tokens > capacity:
            raise CacheFileError(
                f"tail of layer {layer} holds {num_tokens} states, this store's {capacity}"
            )
        tail = OpenTail.blank(pool.config, state.next_position[layer] - num_tokens)
        tail.append(keys, values)
        state.tails[layer] = tail
    changes = [
        LayerChange(table, pending=_pages_of_layer(pool, saved, layer))
        for layer, table in enumerate(state.tables)
    ]
    return state, changes


def _pages_of_layer(pool: PagePool, saved: SavedSequence, layer: int) -> list[EncodedPages]:
    found = []
    for key, (pages, owners) in saved.pages.items():
        mine = (owners[:, 0] == layer).nonzero()[:, 0]
        if mine.numel() == 0:
            continue
        heads = owners[mine, 1].to(torch.int64)
        order = heads.argsort(stable=True)
        view = PageView(pool.layout(key), pages[mine[order]].to(pool.device))
        kept = pool.allocator.to_slab(view.layout, view.pages)
        num_heads = pool.config.geometry.num_kv_heads
        found.append(EncodedPages.of(key, heads[order], view.counts(), kept, num_heads))
    return found
