# SPDX-License-Identifier: Apache-2.0
"""Saved caches: exact round trips, and a named reason for every file that is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.errors import BudgetError, CacheFileError
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore

Edit = Callable[[dict[str, Tensor], dict[str, str]], None]


@pytest.fixture
def config(geometry: KVGeometry, tiers: TierTable) -> StoreConfig:
    return StoreConfig(geometry, tiers, seal_tier="k2v2", recent_tokens=4)


@pytest.fixture
def store(config: StoreConfig, codec: Any, tiers: TierTable) -> PageStore:
    """A store whose sequence 0 has several tiers, modes and a tail."""
    store = PageStore(config, codec)
    store.create(0)
    generator = torch.Generator().manual_seed(5)
    for layer in range(2):
        keys, values = codec.dense(torch.arange(200).reshape(2, 100) + 1000 * layer)
        tier_id = torch.randint(0, len(tiers), (2, 100), generator=generator).to(torch.uint8)
        contract = LayerContract(tier_id, tier_id == tiers.dense_id)
        store.write(0, layer, contract, keys, values, torch.arange(100))
    store.append(0, 1, *codec.numbered(65))
    return store


@pytest.fixture
def path(store: PageStore, tmp_path: Path) -> Path:
    path = tmp_path / "cache.safetensors"
    store.save(0, path, codec_hash="abc")
    return path


def rewrite(path: Path, edit: Edit) -> None:
    """Change tensors or metadata of a file without mending its hash."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    edit(tensors, metadata)
    save_file(tensors, path, metadata)


def test_round_trip(store: PageStore, path: Path, config: StoreConfig, codec: Any) -> None:
    other = PageStore(config, codec)
    other.load(9, path, codec_hash="abc")
    for layer in range(2):
        assert other.num_tokens(9, layer) == store.num_tokens(0, layer)
        assert torch.equal(other.tail(9, layer).keys, store.tail(0, layer).keys)
        assert torch.equal(other.tail(9, layer).values, store.tail(0, layer).values)
        for mine, theirs in zip(other.pages(9, layer), store.pages(0, layer), strict=True):
            assert torch.equal(mine.num_pages, theirs.num_pages)
            assert torch.equal(other.view(mine).pages, store.view(theirs).pages)
    other.append(9, 1, *codec.numbered(40))
    assert sum(t.nbytes for t in other.live_tensors()) == other.live_bytes


def test_same_cache_same_bytes(store: PageStore, path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    store.save(0, again, codec_hash="abc")
    assert again.read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == [again.name, path.name]


def test_empty_sequence_round_trips(config: StoreConfig, tmp_path: Path) -> None:
    store = PageStore(config)
    store.create(0)
    store.save(0, tmp_path / "empty")
    store.load(1, tmp_path / "empty")
    assert store.num_tokens(1, 0) == 0
    assert store.pages(1, 0) == []


def test_failed_save_leaves_the_old_file(
    store: PageStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = path.read_bytes()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        store.save(0, path, codec_hash="other")
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_geometry_is_named(path: Path, config: StoreConfig, codec: Any) -> None:
    for change in ({"num_layers": 3}, {"num_kv_heads": 1}, {"head_dim": 16}):
        name, value = next(iter(change.items()))
        geometry = replace(config.geometry, **change)
        other = PageStore(replace(config, geometry=geometry), codec)
        found = getattr(config.geometry, name)
        with pytest.raises(CacheFileError, match=rf"geometry\.{name} is {found}, not {value}"):
            other.load(0, path, codec_hash="abc")
        assert other.sequences == ()
        assert other.live_tensors() == []


def test_another_tier_table_or_codec_is_named(
    path: Path, config: StoreConfig, tiers: TierTable, codec: Any
) -> None:
    changed = replace(tiers, tiers=(*tiers.tiers[:2], replace(tiers[2], value_bits=4), tiers[3]))
    other = PageStore(replace(config, tiers=changed), codec)
    with pytest.raises(CacheFileError, match=r"tiers\.tiers\[2\]\.value_bits is 3, not 4"):
        other.load(0, path, codec_hash="abc")
    shorter = replace(tiers, tiers=(*tiers.tiers[:2], tiers[3]))
    with pytest.raises(CacheFileError, match="tiers"):
        PageStore(replace(config, tiers=shorter), codec).load(0, path, codec_hash="abc")
    with pytest.raises(CacheFileError, match="codec_hash is 'abc', not 'xyz'"):
        PageStore(config, codec).load(0, path, codec_hash="xyz")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_files_are_refused(
    path: Path, config: StoreConfig, codec: Any, keep: float
) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    store = PageStore(config, codec)
    with pytest.raises(CacheFileError, match="truncated"):
        store.load(0, path, codec_hash="abc")
    assert store.live_tensors() == []


def test_every_flipped_byte_is_noticed(path: Path, config: StoreConfig, codec: Any) -> None:
    data = path.read_bytes()
    store = PageStore(config, codec)
    generator = torch.Generator().manual_seed(1)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(0, header, 37), *torch.randint(header, len(data), (40,), generator=generator)]
    for place in map(int, places):
        spoiled = bytearray(data)
        spoiled[place] ^= 0x10
        path.write_bytes(spoiled)
        with pytest.raises(CacheFileError, match="cache"):
            store.load(0, path, codec_hash="abc")
    assert store.live_tensors() == []


def drop_owners(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["owners.1.2"]


def cut_owners(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["owners.1.2"] = tensors["owners.1.2"][:-1].clone()


def widen_pages(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["pages.1.2"] = torch.zeros((4, 999), dtype=torch.uint8)


def change_dtype(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["tail.1.keys"] = tensors["tail.1.keys"].float()


def add_tensor(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["pages.0.0"] = torch.zeros((1, 64), dtype=torch.uint8)


def add_layer(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["tail.7.keys"] = tensors["tail.1.keys"].clone()


def forget_length(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    del tensors["next_position"]


def change_value(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["next_position"] += 1


def drop_metadata(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()


def change_format(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    label = json.loads(metadata["sphkv"])
    label["cache"] = json.dumps({**json.loads(label["cache"]), "format": "other"})
    metadata["sphkv"] = json.dumps(label)


def spoil_metadata(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["sphkv"] = "{"


def empty_metadata(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata["sphkv"] = "{}"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_owners, r"pages\.1\.2 does not fit owners\.1\.2"),
        (cut_owners, r"does not fit"),
        (widen_pages, r"pages\.1\.2 is U8 \(4, 999\)"),
        (change_dtype, r"tail\.1\.keys is F32"),
        (add_tensor, r"pages\.0\.0.*none of this"),
        (add_layer, r"tail\.7\.keys.*none of this"),
        (forget_length, r"next_position is missing"),
        (change_value, r"content hash"),
        (drop_metadata, r"metadata keys"),
        (change_format, r"format is 'other'"),
        (spoil_metadata, r"no JSON"),
        (empty_metadata, r"metadata holds"),
    ],
)
def test_tampered_files_name_what_differs(
    path: Path, config: StoreConfig, codec: Any, edit: Edit, message: str
) -> None:
    rewrite(path, edit)
    store = PageStore(config, codec)
    with pytest.raises(CacheFileError, match=message):
        store.load(0, path, codec_hash="abc")
    assert store.sequences == ()
    assert store.live_tensors() == []


def test_headers_are_checked_behind_a_valid_hash(
    store: PageStore, path: Path, config: StoreConfig, codec: Any
) -> None:
    """A file that a program made on purpose still cannot bring an impossible page."""
    page = int(store.table(0, 0).all_ids()[0])
    slab = next(slab for slab in store.allocator.slabs() if slab.refcounts[0])
    slab.data[:, 4:6] = 255
    assert page >= 0
    store.save(0, path, codec_hash="abc")
    with pytest.raises(CacheFileError, match="count outside"):
        PageStore(config, codec).load(0, path, codec_hash="abc")


def test_load_respects_limit_and_tail_size(path: Path, config: StoreConfig, codec: Any) -> None:
    small = PageStore(replace(config, max_bytes=2_000), codec)
    with pytest.raises(BudgetError):
        small.load(0, path, codec_hash="abc")
    assert small.live_tensors() == []
    short = PageStore(replace(config, recent_tokens=0), codec)
    with pytest.raises(CacheFileError, match="tail of layer 1 holds 33 states, this store's 32"):
        short.load(0, path, codec_hash="abc")
    dense = PageStore(replace(config, seal_tier="max"), codec)
    with pytest.raises(CacheFileError, match="must store 16 states in whole pages, got 'k2v2'"):
        dense.load(0, path, codec_hash="abc")
    roomy = PageStore(config, codec)
    roomy.load(0, path, codec_hash="abc")
    with pytest.raises(ValueError, match="exists"):
        roomy.load(0, path, codec_hash="abc")


def test_the_seal_tier_of_a_sequence_is_kept(
    config: StoreConfig, codec: Any, tmp_path: Path
) -> None:
    store = PageStore(config, codec)
    store.create(0, seal_tier="max")
    store.save(0, tmp_path / "one", codec_hash="abc")
    store.load(1, tmp_path / "one", codec_hash="abc")
    store.fork(1, 2)
    assert [store.seal_tier(row) for row in range(3)] == ["max"] * 3
    with pytest.raises(ValueError, match="must store 32 states in whole pages, got 'k3v3'"):
        store.create(3, seal_tier="k3v3")


def test_missing_file(config: StoreConfig, codec: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PageStore(config, codec).load(0, tmp_path / "none", codec_hash="")
