# SPDX-License-Identifier: Apache-2.0
"""Geometry, tiers, budgets, contracts and errors: exact bytes and clear refusals."""

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from sphkv.core.budget import ByteBudget
from sphkv.core.contract import EncodedStates, LayerContract, WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import (
    DENSE,
    DROP,
    LADDER,
    TierSpec,
    TierTable,
    coded_tier,
    ladder,
    parse_tier,
    tier_table,
)

GEOMETRY = KVGeometry(num_layers=30, num_kv_heads=3, num_query_heads=9, head_dim=64)


def test_geometry_sizes() -> None:
    assert GEOMETRY.group_size == 3
    assert GEOMETRY.dense_state_bytes == 256
    assert GEOMETRY.dense_bytes_per_token == 30 * 3 * 256


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 63),
        ("head_dim", 64.0),
        ("num_query_heads", 10),
        ("num_layers", True),
    ],
)
def test_geometry_names_the_bad_size(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        replace(GEOMETRY, **{field: value})


@pytest.mark.parametrize(
    ("name", "head_dim", "key_bytes", "value_bytes"),
    [
        # codes + radius, codes + scale
        ("k1v2", 64, 8 + 1, 16 + 1),
        ("k1.5v2", 64, 12 + 1, 16 + 1),
        ("k2v3", 64, 16 + 1, 24 + 1),
        ("k3v4", 128, 48 + 1, 64 + 1),
        ("k4v4", 80, 40 + 1, 40 + 1),
        ("k1.5v2", 80, 15 + 1, 20 + 1),
        ("max", 128, 256, 256),
        ("drop", 128, 0, 0),
    ],
)
def test_tier_bytes(name: str, head_dim: int, key_bytes: int, value_bytes: int) -> None:
    tier = parse_tier(name)
    assert tier.key_bytes(head_dim) == key_bytes
    assert tier.value_bytes(head_dim) == value_bytes
    assert tier.state_bytes(head_dim) == key_bytes + value_bytes
    assert tier.key_bits_stored(head_dim) == 8 * key_bytes / head_dim


def test_stored_bits_count_the_radius() -> None:
    tier = parse_tier("k2v3")
    assert tier.key_bits_stored(64) == 2.125
    assert tier.value_bits_stored(64) == 3.125


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_ladder_is_ordered_at_every_head_dim(head_dim: int) -> None:
    table = ladder(head_dim)
    table.check_head_dim(head_dim)
    assert [tier.name for tier in table] == ["drop", *LADDER, "max"]
    assert all(tier.key_nibbles(head_dim) % 2 == 0 for tier in table)
    sizes = table.state_bytes(head_dim)
    assert sizes == tuple(sorted(sizes))
    assert sizes[table.id_of("k2v4")] == sizes[table.id_of("k3v3")]


def test_subsets_are_put_in_order_and_pages_have_one_size() -> None:
    table = ladder(64, page_tokens=32, names=("k3v4", "max", "k1v2", "k2.25v8"))
    assert [tier.name for tier in table] == ["drop", "k1v2", "k3v4", "k2.25v8", "max"]
    assert {tier.page_tokens for tier in table if tier.is_coded} == {32}
    with pytest.raises(ValueError, match="tier 'v2k3' is not known"):
        ladder(64, names=("v2k3",))
    # at eight elements a key of one bit has the two slots that one of 1.5 bits has
    names = [tier.name for tier in ladder(8, names=("k1v2", "k1.01v2", "k2v2"))]
    assert names == ["drop", "k1v2", "k2v2", "max"]
    assert len(tier_table([coded_tier(8.0, 16)], 1)) == 2


def test_an_odd_number_of_slots_is_exact_by_the_page() -> None:
    tier = coded_tier(2.0625, 3)
    assert tier.key_nibbles(64) == 33
    assert tier.key_code_bytes(64, 128) == 33 * 64
    assert tier.key_bits_stored(64) == 2.1875
    assert tier.key_bytes(64) == 17 + 1


def test_bf16_values_have_no_scale() -> None:
    tier = coded_tier(2.0, 16)
    assert tier.value_bytes(64) == 128
    assert not tier.has_value_codes


def test_values_below_a_byte_round_up() -> None:
    tier = coded_tier(2.0, 3)
    assert tier.value_code_bytes(10) == 4
    assert tier.value_code_bytes(10, 128) == 480


def test_odd_slot_counts_share_a_byte_between_tokens() -> None:
    tier = coded_tier(1.0625, 2)
    assert tier.key_nibbles(64) == 17
    assert tier.key_code_bytes(64) == 9
    assert tier.key_code_bytes(64, 128) == 17 * 64
    assert tier.key_bits_stored(64) == (4 * 17 + 8) / 64


def test_lookups() -> None:
    table = ladder(64)
    assert table.id_of("k2v3") == 4
    assert table[4] is table["k2v3"]
    assert (table.drop_id, table.dense_id) == (0, len(table) - 1)
    with pytest.raises(ValueError, match="no tier 'k9v9'"):
        table.id_of("k9v9")
    with pytest.raises(ValueError, match="got -1"):
        table[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_bits": 0.0}, "key_bits"),
        ({"key_bits": float("nan")}, "key_bits"),
        ({"key_bits": "2"}, "key_bits"),
        ({"value_bits": 5}, "value_bits"),
        ({"value_bits": 4.0}, "value_bits"),
        ({"page_tokens": 48}, "page_tokens"),
        ({"page_tokens": 256}, "page_tokens"),
        ({"kind": "huge"}, "huge"),
        ({"kind": "dense"}, "key_bits of dense tier"),
        ({"name": ""}, "name"),
    ],
)
def test_bad_tiers_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(coded_tier(2.0, 4), **change)


def test_tables_out_of_order_are_refused() -> None:
    low, high = coded_tier(1.0, 2), coded_tier(2.0, 2)
    for tiers in ((low, DENSE), (DROP, low), (DROP, DENSE, low), (DROP,)):
        with pytest.raises(ValueError, match="tier"):
            TierTable(tiers)
    with pytest.raises(ValueError, match="differ"):
        TierTable((DROP, low, replace(high, name=low.name), DENSE))
    with pytest.raises(ValueError, match=r"'k2v2', 'k1v2', 'max'\] at head_dim 64"):
        TierTable((DROP, high, low, DENSE)).check_head_dim(64)
    with pytest.raises(ValueError, match="must rise"):
        TierTable((DROP, coded_tier(8.0, 16), DENSE)).check_head_dim(1)


def test_json_round_trip_is_strict() -> None:
    table = ladder(64)
    text = table.to_json()
    assert TierTable.from_json(text) == table
    data = json.loads(text)
    data["tiers"][1]["colour"] = "red"
    with pytest.raises(ValueError, match="colour"):
        TierTable.from_json(json.dumps(data))
    del data["tiers"][1]["colour"], data["tiers"][1]["value_bits"]
    with pytest.raises(ValueError, match="value_bits"):
        TierTable.from_json(json.dumps(data))
    for bad in ("{", "[]", '{"tiers": 3}', '{"tiers": [3]}'):
        with pytest.raises(ValueError, match="tier"):
            TierTable.from_json(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25%", 30 * 3 * 256 * 1000 // 4),
        ("12.5%", 30 * 3 * 256 * 1000 // 8),
        ("512B/token", 512_000),
        ("0.5KiB/token", 512_000),
        ("64MiB", 64 * 2**20),
        ("1000000", 1_000_000),
        (1_000_000, 1_000_000),
    ],
)
def test_budgets(text: str | int, expected: int) -> None:
    budget = ByteBudget.parse(text)
    assert budget.resolve(GEOMETRY, 1000) == expected
    assert ByteBudget.parse(str(budget)) == budget
    assert ByteBudget.parse(budget) is budget


def test_budget_rounds_down_exactly() -> None:
    budget = ByteBudget("share", Fraction(1, 3))
    assert budget.resolve(GEOMETRY, 1) == 30 * 3 * 256 // 3
    assert ByteBudget.parse("0.1%").resolve(GEOMETRY, 1) == 23
    assert budget.resolve(GEOMETRY, 0) == 0


@pytest.mark.parametrize("text", ["", "-3", "25 percent", "0%", 0, "1.5", "512/token", True, 2.5])
def test_bad_budgets_are_named(text: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        ByteBudget.parse(text)  # type: ignore[arg-type]


def test_contract_validates() -> None:
    table = ladder(64)
    contract = WriteContract.uniform(GEOMETRY, 40, tier_id=2, granularity=16)
    contract.check(table, GEOMETRY)
    assert contract.num_tokens == 40
    counts = contract.state_counts(len(table))
    assert counts[0, 0].tolist() == [0, 0, 40, *[0] * (len(table) - 3)]
    layer = contract.layer(3)
    layer.check(table, GEOMETRY, 40)
    with pytest.raises(ValueError, match="shape"):
        layer.check(table, GEOMETRY, 41)
    with pytest.raises(ValueError, match="layer must be"):
        contract.layer(30)


def test_contract_refuses_bad_decisions() -> None:
    table = ladder(64)
    tier_id = torch.full((3, 40), 2, dtype=torch.uint8)
    protected = torch.zeros((3, 40), dtype=torch.bool)
    with pytest.raises(ValueError, match="uint8"):
        LayerContract(tier_id.int(), protected)
    with pytest.raises(ValueError, match="protected must be bool"):
        LayerContract(tier_id, protected[:2])
    with pytest.raises(ValueError, match=r"granularity.*8"):
        LayerContract(tier_id, protected, 8)
    with pytest.raises(ValueError, match="tier id 99"):
        LayerContract(torch.full_like(tier_id, 99), protected).check(table, GEOMETRY, 40)
    with pytest.raises(ValueError, match="dense tier"):
        LayerContract(tier_id, ~protected).check(table, GEOMETRY, 40)
    tier_id[1, 17] = 3
    LayerContract(tier_id, protected, 1)
    with pytest.raises(ValueError, match="run of 16"):
        LayerContract(tier_id, protected, 16)
    # A last run that is cut short may differ from the run before it.
    tier_id[1, 17], tier_id[1, 32:] = 2, 3
    LayerContract(tier_id, protected, 16)


def test_empty_contract_is_fine() -> None:
    WriteContract.uniform(GEOMETRY, 0, tier_id=1, granularity=16).check(ladder(64), GEOMETRY)


def test_encoded_states_check_names_the_field() -> None:
    tier, rows = coded_tier(2.0, 3, page_tokens=32), 2
    good = EncodedStates(
        torch.zeros((rows, 32, 32), dtype=torch.uint8),
        torch.zeros((rows, 32), dtype=torch.uint8),
        torch.zeros(rows),
        torch.zeros(rows),
        torch.zeros((rows, 32, 64), dtype=torch.uint8),
        torch.zeros((rows, 32), dtype=torch.uint8),
        torch.zeros(rows),
        torch.zeros(rows),
    )
    good.check(tier, 64)
    bad = {
        "radius_lo": torch.tensor([0.0, float("nan")]),
        "scale_step": torch.zeros(3),
        "key_codes": good.key_codes + 16,
        "value_codes": good.value_codes + 8,
        "scale_code": good.scale_code.int(),
    }
    for name, tensor in bad.items():
        with pytest.raises(ValueError, match=name):
            replace(good, **{name: tensor}).check(tier, 64)
    with pytest.raises(ValueError, match="value_codes"):
        good.check(replace(tier, value_bits=16), 64)


def test_tier_names_follow_bits() -> None:
    for name in LADDER:
        tier = parse_tier(name)
        assert isinstance(tier, TierSpec)
        assert tier.name == name == f"k{tier.key_bits:g}v{tier.value_bits}"
    assert (parse_tier("max"), parse_tier("drop")) == (DENSE, DROP)
