# SPDX-License-Identifier: Apache-2.0
"""The controller's residency: bytes to the byte, the ceiling at every step, what it keeps."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, BatchRequest, DecodeRequest
from sphkv.cache.config import CacheConfig, RetentionConfig
from sphkv.cache.engine import CacheEngine
from sphkv.cache.files import load_engine, read_config, save_engine
from sphkv.cache.plan import parse_tiers, retention_tiers
from sphkv.cache.prompt import PromptDecision
from sphkv.cache.retention import RetentionResidency
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration import Calibration, Calibrator
from sphkv.core.budget import ByteBudget
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.errors import BudgetError
from sphkv.retention.gate import GateOptions
from sphkv.retention.measure import PromptWork
from sphkv.retention.notes import RunNotes
from sphkv.retention.policy import VARIANTS, BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.protection import ProtectionRule

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=32)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, GEOMETRY.head_dim)
OPTIONS = AttentionOptions(scale=GEOMETRY.head_dim**-0.5)


def make_states(layer: int, tokens: int, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of a layer; some tokens draw much more attention than others."""
    generator = torch.Generator().manual_seed(1000 * layer + start)
    positions = torch.arange(start, start + tokens)
    heads = (GEOMETRY.num_query_heads, GEOMETRY.num_kv_heads, GEOMETRY.num_kv_heads)
    q, k, v = (torch.randn(n, tokens, GEOMETRY.head_dim, generator=generator) for n in heads)
    pull = (torch.rand(heads[1], tokens, 1, generator=generator) < 0.1).float()
    return ROPE.apply(q + 1.0, positions), ROPE.apply(k + 2.0 * pull, positions), v


@cache
def make_calibration() -> Calibration:
    calibrator = Calibrator(GEOMETRY, (ROPE,) * GEOMETRY.num_layers, model_id="random")
    for layer in range(GEOMETRY.num_layers):
        query, keys, _ = make_states(layer, 256)
        calibrator.add_layer(layer, keys, query, torch.arange(256))
    return calibrator.finish()


class NoAttention(ReferenceBackend):
    """For tests of bytes alone, which attention would make slow."""

    name = "none"

    def attend(self, request: DecodeRequest) -> PartialAttention:
        return PartialAttention(request.query.float(), request.query[..., 0].float())

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        return PartialAttention(request.query.float(), request.query[..., 0].float())


def make_engine(
    budget: str = "40%",
    *,
    windows: tuple[int | None, ...] = (None, None),
    work: PromptWork | None = None,
    is_exact: bool = False,
    **changes: object,
) -> CacheEngine:
    retention = RetentionConfig(retention_tiers(GEOMETRY.head_dim), "k4v4")
    config = CacheConfig(
        GEOMETRY,
        (ROPE,) * 2,
        windows,
        parse_tiers(None, GEOMETRY.head_dim),
        budget=ByteBudget.parse(budget),
        retention=replace(retention, **changes),  # type: ignore[arg-type]
        is_retention_forced=True,
    )
    backend = ReferenceBackend() if is_exact else NoAttention()
    engine = CacheEngine(config, calibration=make_calibration(), backend=backend, work=work)
    engine.on_contract = Contracts()
    return engine


class Contracts(list[WriteContract]):
    """Keeps what the controller decides."""

    def __call__(self, contract: WriteContract) -> None:
        self.append(contract)


def contract_of(engine: CacheEngine) -> WriteContract:
    assert isinstance(engine.on_contract, Contracts)
    return engine.on_contract[-1]


def kept_bytes(held: object, seen: set[int]) -> int:
    """Bytes of all tensors that an object of this package, or a container, leads to."""
    if id(held) in seen:
        return 0
    seen.add(id(held))
    if isinstance(held, Tensor):
        return held.nbytes
    parts: list[object] = []
    if isinstance(held, dict):
        parts = list(held.values())
    elif isinstance(held, list | tuple | set):
        parts = list(held)
    elif type(held).__module__.startswith("sphkv"):
        names = [*getattr(held, "__dict__", {}), *getattr(type(held), "__slots__", ())]
        parts = [getattr(held, name, None) for name in names]
    return sum(kept_bytes(part, seen) for part in parts)


def run(engine: CacheEngine, tokens: int, rows: int = 1) -> list[Tensor]:
    """One pass of so many tokens; the outputs of every layer once the cache is coded."""
    start = engine.length
    positions = torch.arange(start, start + tokens).expand(rows, -1)
    engine.begin(StepTokens(torch.ones(rows, tokens, dtype=torch.bool), positions))
    outputs = []
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = (
            part.expand(rows, -1, -1, -1) for part in make_states(layer, tokens, start)
        )
        engine.update(layer, keys, values)
        if engine.is_dense_step:
            engine.end_layer(layer, query)
        else:
            outputs.append(
                engine.attend(layer, query, replace(OPTIONS, window=engine.window(layer)))
            )
    engine.finish()
    check_bytes(engine)
    return outputs


def check_bytes(engine: CacheEngine) -> None:
    """The ledger is what is alive, and the ceiling was held at every moment."""
    if engine.store is None:
        return
    live = sum(tensor.nbytes for tensor in engine.store.live_tensors())
    assert engine.store.live_bytes == live
    assert engine.ledger().total == engine.resident_bytes() >= live
    assert engine.peak_share <= 1.0


def residency_of(engine: CacheEngine, row: int = 0) -> RetentionResidency:
    residency = engine.rows[row].residency
    assert isinstance(residency, RetentionResidency)
    return residency


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("budget", ["40%", "70%"])
def test_a_prompt_fits_its_budget_with_room_for_the_first_page(variant, budget):
    engine = make_engine(budget, options=ControlOptions(variant=variant))
    run(engine, 640)
    limit = engine.limit_bytes()
    assert limit is not None
    assert engine.resident_bytes() <= limit
    assert len(contract_of(engine).tier_id.unique()) > 1


def test_shared_work_changes_nothing():
    work = PromptWork()
    alone, first, second = make_engine(), make_engine(work=work), make_engine(work=work)
    for engine in (alone, first, second):
        run(engine, 640)
    contracts = [contract_of(engine) for engine in (alone, first, second)]
    assert all(torch.equal(contracts[0].tier_id, other.tier_id) for other in contracts[1:])
    assert work.reused_s > 0


def test_nothing_is_kept_that_is_not_counted():
    """Every tensor that a row leads to, store and codebooks aside, is among its notes."""
    engine = make_engine("40%")
    engine.on_contract = None
    run(engine, 640)
    for _ in range(40):
        run(engine, 1)
    residency, row = residency_of(engine), engine.rows[0]
    shared = {id(row.store), id(engine.config), id(residency._ceiling)}
    assert 0 < residency.num_bytes <= kept_bytes(row, shared) <= residency.num_bytes + 256


@pytest.mark.parametrize(("step", "end"), [(1, 1250), (7, 1250), (40, 1600), (150, 1600)])
def test_the_ceiling_holds_while_the_sequence_grows(step, end):
    engine = make_engine("22%")
    run(engine, 900)
    while engine.length < end:
        run(engine, step)
    assert residency_of(engine).num_rebalances > 3
    assert engine.num_tokens == [engine.length]


def test_a_fixed_number_of_bytes_holds_too():
    limit = 640 * GEOMETRY.dense_bytes_per_token * 4 // 10
    engine = make_engine(f"{limit}B")
    run(engine, 640)
    for _ in range(200):
        run(engine, 1)
    assert engine.peak_bytes <= limit


def test_new_tokens_are_dense_then_coded_and_never_dropped_at_once():
    """The newest page of every head keeps all its states whatever the budget."""
    engine = make_engine("22%")
    run(engine, 900)
    store = engine.store
    assert store is not None
    first = store.tail(0, 0).first_position
    for _ in range(300):
        run(engine, 1)
        sealed = store.tail(0, 0).first_position
        if sealed == first:
            continue
        pages = store.page_list(0)
        newest = pages.first_runs == sealed // 16 - 2
        assert int(newest.sum()) == GEOMETRY.num_layers * GEOMETRY.num_kv_heads
        store.forget_page_list(0)
    assert sealed > first + 200


def test_more_bytes_come_closer_to_dense_attention():
    dense = make_engine("400%", is_exact=True)
    run(dense, 640)
    exact = torch.stack(run(dense, 1))
    errors = []
    for budget in ("25%", "45%", "90%"):
        engine = make_engine(budget, is_exact=True)
        run(engine, 640)
        errors.append(float((torch.stack(run(engine, 1)) - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05


def test_protected_states_stay_dense_for_ever():
    engine = make_engine("45%", protection=ProtectionRule(spans=((64, 96),)))
    run(engine, 640)
    contract = contract_of(engine)
    dense = engine.config.retention.tiers.dense_id  # type: ignore[union-attr]
    assert bool((contract.tier_id[..., 64:96] == dense).all())
    for _ in range(12):
        run(engine, 32)
    assert engine.store is not None
    pages = engine.store.page_list(0)
    kept = pages.select(pages.is_protected)
    for layer in range(GEOMETRY.num_layers):
        for head in range(GEOMETRY.num_kv_heads):
            mine = kept.runs[(kept.layer_ids == layer) & (kept.head_ids == head)].flatten().tolist()
            assert {0, 4, 5} <= set(mine)


def test_windowed_layers_keep_what_their_window_sees():
    engine = make_engine("60%", windows=(None, 96))
    run(engine, 640)
    for _ in range(200):
        run(engine, 1)
    assert engine.store is not None
    oldest = int(
        engine.store.page_list(0).select(engine.store.page_list(0).layer_ids == 1).first_runs.min()
    )
    margin = engine.plan.window_margin if engine.plan else 0
    assert engine.length - 96 - margin - 32 <= 16 * oldest <= engine.length - 96
    assert len(residency_of(engine).notes) == 1


def test_a_batch_holds_the_budgets_of_its_rows_and_rows_fork():
    engine = make_engine("45%")
    run(engine, 640, rows=2)
    for _ in range(70):
        run(engine, 1, rows=2)
    engine.select_rows(torch.tensor([1, 0, 1]))
    for _ in range(70):
        run(engine, 1, rows=3)
    fork = engine.fork()
    assert torch.equal(fork.is_real, engine.is_real)
    assert fork.resident_bytes() > 0


def test_crop_and_continue():
    engine = make_engine("60%", is_exact=True)
    run(engine, 640)
    run(engine, 20)
    engine.crop(640)
    again = make_engine("60%", is_exact=True)
    run(again, 640)
    # the newest 16 tokens of the prompt were sealed meanwhile, and are coded now
    one, other = torch.stack(run(engine, 1)), torch.stack(run(again, 1))
    assert 0 < float((one - other).norm() / other.norm()) < 0.1
    # into sealed pages, in the middle of a run; single steps until a tail has sealed again
    for _ in range(5):
        run(engine, 16)
    engine.crop(650)
    for _ in range(24):
        run(engine, 1)
    for _ in range(7):
        run(engine, 8)
    assert engine.num_tokens == [730]


def test_a_short_row_stays_dense_until_the_budget_can_hold():
    engine = make_engine("40%")
    start = engine.ceiling.holds_from
    assert start is not None
    run(engine, 1)
    while engine.length < start - 1:
        run(engine, min(64, start - 1 - engine.length))
        assert not engine.is_coded
    run(engine, 1)
    assert engine.is_coded
    for _ in range(100):
        run(engine, 1)


def tell_margin(engine: CacheEngine, margin: float) -> None:
    engine.see_logits(torch.tensor([[[margin, 0.0, -9.0]]]))


def sealed_tiers(engine: CacheEngine, first: int) -> set[int]:
    """Tiers of the pages that begin at a position or later."""
    assert engine.store is not None
    pages = engine.store.page_list(engine.rows[0].sequence)
    engine.store.forget_page_list(engine.rows[0].sequence)
    return set(pages.tier_ids[pages.first_runs * 16 >= first].tolist())


def test_the_gate_holds_bytes_back_and_seals_finer_with_them_when_on():
    engines = {
        name: make_engine("45%", gate=None if name == "none" else GateOptions(reserve_share=0.1))
        for name in ("none", "off", "on")
    }
    for engine in engines.values():
        run(engine, 640)
    assert engines["on"].resident_bytes() < engines["none"].resident_bytes()
    for _ in range(64):
        for name, engine in engines.items():
            tell_margin(engine, 0.0 if name == "on" else 1e6)
            run(engine, 1)
    gate, idle = residency_of(engines["on"]).gate, residency_of(engines["off"]).gate
    assert gate is not None
    assert idle is not None
    assert gate.num_on_steps == 64
    assert idle.num_on_steps == 0
    seal = retention_tiers(GEOMETRY.head_dim).id_of("k4v4")
    assert max(sealed_tiers(engines["off"], 640)) == seal
    assert max(sealed_tiers(engines["on"], 640)) > seal
    assert residency_of(engines["on"]).num_escalated > 0
    assert "tails sealed finer" in engines["on"].describe().setting
    assert engines["on"].resident_bytes() > engines["off"].resident_bytes()


@pytest.mark.parametrize("period", [1, 40])
def test_the_ceiling_holds_while_the_gate_goes_on_and_off(period):
    engine = make_engine("22%", gate=GateOptions(reserve_share=0.05, cooldown_steps=2))
    run(engine, 900)
    for step in range(300):
        tell_margin(engine, 0.0 if step // period % 2 else 1e9)
        run(engine, 1)
    gate = residency_of(engine).gate
    assert gate is not None
    assert gate.num_switches >= 1


def test_drift_follows_what_is_kept():
    drifts = {}
    for budget in ("22%", "45%", "80%"):
        engine = make_engine(budget, gate=GateOptions())
        run(engine, 900)
        residency = residency_of(engine)
        at_prompt = residency.drift
        for _ in range(200):
            run(engine, 1)
        assert residency.drift != at_prompt
        drifts[budget] = residency.drift
    assert drifts["22%"] > drifts["45%"] > drifts["80%"] > 0
    doubled = make_engine("80%", gate=GateOptions(), policy=RetentionPolicy(drift_scale=2.0))
    run(doubled, 900)
    for _ in range(200):
        run(doubled, 1)
    assert residency_of(doubled).drift == pytest.approx(2 * drifts["80%"])


def test_the_drift_of_a_contract_is_that_of_its_pages():
    engine = make_engine("40%", gate=GateOptions())
    run(engine, 640)
    residency = residency_of(engine)
    assert engine.store is not None
    pages = engine.store.page_list(engine.rows[0].sequence)
    notes = RunNotes.join(residency.notes)
    tier_id = residency._notes.run_tiers(pages, notes.num_runs)
    assert residency._notes.drift_of(notes, tier_id, 640) == pytest.approx(residency.drift)


def test_a_loaded_gate_goes_on_where_it_was(tmp_path):
    engine = make_engine("40%", gate=GateOptions(cooldown_steps=5))
    run(engine, 640)
    tell_margin(engine, 0.0)
    run(engine, 40)
    save_engine(engine, tmp_path / "saved")
    config = read_config(tmp_path / "saved", GEOMETRY, (ROPE,) * 2, (None, None))
    loaded = CacheEngine(config, backend=NoAttention())
    load_engine(loaded, tmp_path / "saved")
    ours, theirs = residency_of(engine), residency_of(loaded)
    assert ours.drift == theirs.drift > 0
    assert ours.gate is not None
    assert theirs.gate is not None
    for _ in range(8):
        for each in (engine, loaded):
            tell_margin(each, 1e9)
        assert torch.equal(ours.gate.state(), theirs.gate.state())
    assert not ours.gate.is_on


def test_a_budget_nothing_can_hold_is_refused_at_once():
    with pytest.raises(BudgetError, match="bytes"):
        make_engine("100B")


def tiers_held(engine: CacheEngine) -> Tensor:
    """``[pages]`` tiers of pages that hold nothing protected."""
    assert engine.store is not None
    pages = engine.store.page_list(engine.rows[0].sequence)
    engine.store.forget_page_list(engine.rows[0].sequence)
    return pages.tier_ids[~pages.is_protected]


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        (ControlOptions(variant="keepdrop", fixed_tier="max"), "40%"),
        (ControlOptions(variant="keepdrop", fixed_tier="k3v3"), "22%"),
        (ControlOptions(variant="keepdrop"), "22%"),
        (ControlOptions(variant="decoupled", keep_share=0.7), "30%"),
    ],
)
def test_a_variant_with_one_tier_keeps_to_it_while_decoding(options, budget):
    engine = make_engine(budget, options=options)
    run(engine, 900)
    for _ in range(200):
        run(engine, 1)
    assert residency_of(engine).num_rebalances > 0 or options.fixed_tier != "max"
    held = set(tiers_held(engine).tolist())
    if options.variant == "keepdrop":
        assert len(held) == 1
    if options.fixed_tier is not None:
        assert held == {retention_tiers(GEOMETRY.head_dim).id_of(options.fixed_tier)}


def test_quant_drops_nothing_while_decoding():
    engine = make_engine("40%", options=ControlOptions(variant="quant"))
    run(engine, 900)
    for _ in range(200):
        run(engine, 1)
    assert engine.describe().tiers["drop"] == 0


def test_uniform_heads_stay_uniform_while_decoding():
    options = ControlOptions(shapes=(BlockShape.RUNS,), uniform_heads=True)
    engine = make_engine("22%", options=options)
    run(engine, 900)
    for _ in range(200):
        run(engine, 1)
    assert residency_of(engine).num_rebalances > 0
    assert engine.store is not None
    pages = engine.store.page_list(engine.rows[0].sequence)
    heads = pages.layer_ids * GEOMETRY.num_kv_heads + pages.head_ids
    counts = [
        torch.bincount(pages.tier_ids[(heads == head) & ~pages.is_protected], minlength=10)
        for head in range(4)
    ]
    assert all(torch.equal(each, counts[0]) for each in counts[1:])


@pytest.mark.parametrize(("windows", "tokens"), [((None, None), 600), ((None, 64), 1200)])
def test_a_prompt_whose_layers_are_measured_together_is_decided_about_alike(
    monkeypatch, windows, tokens
):
    alone = make_engine(windows=windows)
    run(alone, tokens)
    monkeypatch.setattr("sphkv.cache.prompt.layers_together", lambda *_: 8)
    together = make_engine(windows=windows)
    run(together, tokens)
    one, two = contract_of(alone), contract_of(together)
    assert torch.equal(one.protected, two.protected)
    # last places decide how much of the budget the search leaves: two pages of 240 may differ
    assert float((one.tier_id != two.tier_id).float().mean()) < 0.03
    for mine, other in zip(alone.rows, together.rows, strict=True):
        assert isinstance(mine.residency, RetentionResidency)
        assert isinstance(other.residency, RetentionResidency)
        for left, right in zip(mine.residency.notes, other.residency.notes, strict=True):
            torch.testing.assert_close(left.tier_ratio, right.tier_ratio, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(left.bound, right.bound, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(
                left.log_importance, right.log_importance, rtol=1e-3, atol=2e-3
            )
    for engine in (alone, together):
        run(engine, 1)


def test_a_prompt_is_decided_about_with_its_last_layer(monkeypatch):
    engine, decide, found = make_engine(), PromptDecision.decide, Contracts()
    engine.on_contract = found
    run_steps = StepTokens(torch.ones(1, 600, dtype=torch.bool), torch.arange(600)[None])

    def give() -> None:
        engine.begin(run_steps)
        for layer in range(GEOMETRY.num_layers):
            query, keys, values = (part[None] for part in make_states(layer, 600))
            engine.update(layer, keys, values)
            engine.end_layer(layer, query)
        assert not found

    def refuse(self: PromptDecision, limit: int) -> WriteContract:
        raise BudgetError(2, 1, 1, "what must be kept")

    monkeypatch.setattr(PromptDecision, "decide", refuse)
    with pytest.raises(BudgetError, match="what must be kept"):
        give()
    engine.finish(is_failed=True)
    # nothing is left of the dense states, so nothing may go on, a copy no more than the original
    assert engine.resident_bytes() == 0
    for each in (engine, engine.fork()):
        with pytest.raises(RuntimeError, match="call reset"):
            each.begin(run_steps)
        with pytest.raises(RuntimeError, match="call reset"):
            each.export_state()
    engine.reset()
    monkeypatch.setattr(PromptDecision, "decide", decide)
    give()
    engine.finish()
    assert len(found) == 1
    check_bytes(engine)


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_are_decided_about_when_those_before_are_written(rows, monkeypatch):
    events: list[str] = []

    def listen(name: str) -> None:
        original = getattr(PromptDecision, name)

        def call(self: PromptDecision, *args: Any) -> Any:
            events.append(name)
            return original(self, *args)

        monkeypatch.setattr(PromptDecision, name, call)

    listen("decide")
    listen("write")
    engine = make_engine()
    positions = torch.arange(600).expand(rows, -1)
    engine.begin(StepTokens(torch.ones(rows, 600, dtype=torch.bool), positions))
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = (part.expand(rows, -1, -1, -1) for part in make_states(layer, 600))
        engine.update(layer, keys, values)
        engine.end_layer(layer, query)
    assert events == (["decide"] if rows == 1 else [])
    engine.finish()
    assert events == ["decide", "write"] * rows
    check_bytes(engine)
