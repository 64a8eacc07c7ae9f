# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions
from sphkv.cache.config import CacheConfig, ResidencyPlan, RetentionConfig, allowed_bytes
from sphkv.cache.engine import CacheEngine
from sphkv.cache.files import load_engine, read_config, save_engine
from sphkv.cache.plan import (
    Ceiling,
    choose_residency,
    parse_tiers,
    retention_tiers,
    sequence_bytes,
    uniform_holds_from,
)
from sphkv.cache.residency import UniformResidency
from sphkv.cache.sequence import CacheSequence
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration import default_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierTable, coded_tier
from sphkv.errors import BudgetError, CacheFileError
from sphkv.store.store import PageStore

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=32)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, GEOMETRY.head_dim)
OPTIONS = AttentionOptions(scale=GEOMETRY.head_dim**-0.5)


def make_config(
    tiers: str | list[str] | None = "max", windows: tuple[int | None, ...] = (None, None)
) -> CacheConfig:
    table = parse_tiers(tiers, GEOMETRY.head_dim)
    coded = [tier.name for tier in table if tier.is_coded]
    name = coded[-1] if coded else "max"
    return CacheConfig(GEOMETRY, (ROPE,) * 2, windows, table, name)


def make_states(tokens: int, seed: int = 0, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of one layer; keys have a mean, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(start, start + tokens)
    drawn = [
        torch.randn(heads, tokens, GEOMETRY.head_dim, generator=generator)
        for heads in (GEOMETRY.num_query_heads, GEOMETRY.num_kv_heads, GEOMETRY.num_kv_heads)
    ]
    query, keys = ROPE.apply(drawn[0], positions), ROPE.apply(drawn[1] + 0.5, positions)
    return query, keys, drawn[2]


def make_plan(config: CacheConfig) -> ResidencyPlan:
    assert config.tier is not None
    return ResidencyPlan("uniform", config.tiers, config.tier, config.recent_tokens)


def make_sequence(config: CacheConfig) -> tuple[PageStore, CacheSequence]:
    codec = SphericalCodec(default_calibration(GEOMETRY, config.ropes))
    plan = make_plan(config)
    store = PageStore(plan.store_config(config, 1), codec)
    store.create(0)
    residency = UniformResidency(config, plan, store, 0)
    return store, CacheSequence(config, plan, store, 0, ReferenceBackend(), residency)


def store_prompt(sequence: CacheSequence, layer: int, keys: Tensor, values: Tensor) -> None:
    """A layer of a prompt; one tier decides nothing by queries."""
    sequence.take_prompt(layer, keys[:0], keys, values)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries at ``first`` on over keys at 0 on, in float64."""
    group = GEOMETRY.group_size
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    logits = query.double() @ keys.transpose(1, 2) * OPTIONS.scale
    distance = (first + torch.arange(query.shape[1]))[:, None] - torch.arange(keys.shape[1])
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return logits.softmax(-1) @ values
    column = sinks.double()[:, None, None].expand(-1, query.shape[1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ values


@pytest.mark.parametrize("num_new", [1, 32, 33, 150])
@pytest.mark.parametrize("window", [None, 40])
def test_sequence_equals_dense_attention_at_the_dense_tier(num_new, window):
    config = make_config("max", windows=(window, None))
    _, sequence = make_sequence(config)
    query, keys, values = (x.bfloat16().float() for x in make_states(300 + num_new))
    store_prompt(sequence, 0, keys[:, :300], values[:, :300])
    options = replace(OPTIONS, window=window)
    sinks = torch.linspace(2, 6, GEOMETRY.num_query_heads)
    new = slice(300, 300 + num_new)
    output = sequence.attend(
        0, query[:, new], keys[:, new], values[:, new], options, sink_logits=None
    )
    expected = dense_attention(query[:, new], keys, values, 300, window)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert sequence.num_tokens(0) == 300 + num_new
    sequence.crop(300)
    again = sequence.attend(
        0, query[:, new], keys[:, new], values[:, new], options, sink_logits=sinks
    )
    expected = dense_attention(query[:, new], keys, values, 300, window, sinks)
    torch.testing.assert_close(again.double(), expected, atol=1e-5, rtol=0)


def test_sequence_with_codes_is_close_to_dense_attention():
    _, sequence = make_sequence(make_config("k4v4"))
    query, keys, values = make_states(700)
    store_prompt(sequence, 0, keys[:, :640], values[:, :640])
    new = slice(640, 700)
    output = sequence.attend(0, query[:, new], keys[:, new], values[:, new], OPTIONS)
    expected = dense_attention(query[:, new], keys, values, 640)
    error = (output - expected).norm() / expected.norm()
    assert 0 < error < 0.2


def test_window_layers_keep_only_their_window():
    config = make_config("k2v3", windows=(None, 200))
    store, sequence = make_sequence(config)
    states = [make_states(1000 + 20 * 32, seed=layer) for layer in range(2)]
    for layer, (_, keys, values) in enumerate(states):
        store_prompt(sequence, layer, keys[:, :1000], values[:, :1000])
    most = 200 + make_plan(config).window_margin + make_plan(config).spec.page_tokens
    for at in range(1000, 1640, 32):
        new = slice(at, at + 32)
        for layer, (query, keys, values) in enumerate(states):
            options = replace(OPTIONS, window=config.windows[layer])
            sequence.attend(layer, query[:, new], keys[:, new], values[:, new], options)
        sequence.forget_outside_windows()
        held = sum(int(store.view(group).counts().sum()) for group in store.pages(0, 1))
        assert held <= GEOMETRY.num_kv_heads * most
    full = sum(int(store.view(group).counts().sum()) for group in store.pages(0, 0))
    assert full > GEOMETRY.num_kv_heads * 1400
    sequence.check_crop(1630)
    with pytest.raises(ValueError, match="window of 200"):
        sequence.crop(1200)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 36, 37, 163, 164, 165, 292, 1000, 5000])
@pytest.mark.parametrize("tiers", ["max", "k2v3"])
@pytest.mark.parametrize("windows", [(None, None), (None, 96)])
def test_planned_bytes_bound_the_ledger(tokens, tiers, windows):
    config = make_config(tiers, windows)
    store, sequence = make_sequence(config)
    _, keys, values = make_states(tokens)
    for layer in range(2):
        store_prompt(sequence, layer, keys, values)
    planned = sequence_bytes(config, make_plan(config), tokens)
    assert store.live_bytes <= planned
    if tokens >= 1000 and windows[1] is None:
        assert planned <= 1.08 * store.live_bytes


def test_planned_bytes_bound_the_ledger_while_it_grows():
    config = make_config("k2v3", (None, 96))
    store, sequence = make_sequence(config)
    query, keys, values = make_states(1040)
    for layer in range(2):
        store_prompt(sequence, layer, keys[:, :400], values[:, :400])
    for at in range(400, 1040, 32):
        new = slice(at, at + 32)
        for layer in range(2):
            options = replace(OPTIONS, window=config.windows[layer])
            sequence.attend(layer, query[:, new], keys[:, new], values[:, new], options)
        sequence.forget_outside_windows()
        assert store.live_bytes <= sequence_bytes(config, make_plan(config), at + 32)


def budget_config(budget: str | int, **changes) -> CacheConfig:
    table = parse_tiers(None, GEOMETRY.head_dim)
    parsed = ByteBudget.parse(budget)
    return CacheConfig(GEOMETRY, (ROPE,) * 2, (None, None), table, budget=parsed, **changes)


def test_budget_picks_the_highest_tier_that_fits():
    names = []
    for share in ("15%", "25%", "40%", "100%", "200%"):
        config = budget_config(share)
        plan = choose_residency(config, 32_768)
        assert plan is not None
        names.append(plan.tier)
        limit = Ceiling.of(config).bytes_at(32_768)
        assert limit is not None
        assert sequence_bytes(config, plan, 32_768) <= limit
        for tier in config.tiers.tiers[config.tiers.id_of(plan.tier) + 1 :]:
            above = replace(plan, tier=tier.name)
            assert sequence_bytes(config, above, 32_768 + tier.page_tokens) > limit
    order = [config.tiers.id_of(name) for name in names]
    assert order == sorted(order)
    assert len(set(names)) == 5 or names[-2] != "max"
    assert names[-1] == "max"


def test_one_tier_only_where_four_bits_fit():
    retention = RetentionConfig(retention_tiers(GEOMETRY.head_dim))
    plans = {}
    for share in ("10%", "20%", "25%", "40%", "60%"):
        plan = choose_residency(budget_config(share, retention=retention), 32_768)
        assert plan is not None
        plans[share] = plan
        alone = choose_residency(budget_config(share), 32_768)
        is_fine = alone is not None and min(alone.spec.key_bits, alone.spec.value_bits) >= 4
        assert plan.is_retention == (not is_fine)
        assert plan.is_retention or plan == alone
    assert plans["25%"].is_retention
    assert not plans["40%"].is_retention


def test_budget_kinds_agree():
    dense = GEOMETRY.dense_bytes_per_token
    by_share = choose_residency(budget_config("25%"), 8192)
    by_token = choose_residency(budget_config(f"{dense // 4}B/token"), 8192)
    by_total = choose_residency(budget_config(8192 * dense // 4, context=8192), 100)
    assert by_share == by_token
    assert by_share is not None
    assert by_total is not None
    assert by_total.max_bytes == 8192 * dense // 4
    assert by_total.tier == by_share.tier


def test_share_of_a_windowed_model_is_of_its_windowed_dense_cache():
    config = make_config("k2v3", (None, 96))
    budget = ByteBudget.parse("50%")
    state = GEOMETRY.num_kv_heads * GEOMETRY.dense_state_bytes
    assert allowed_bytes(budget, config, 1000) == state * (1000 + 96) // 2


def test_a_budget_that_one_tier_cannot_hold_keeps_a_sequence_dense():
    assert choose_residency(budget_config("25%"), 200) is None
    assert choose_residency(budget_config("64KiB", context=8192), 8192) is None
    with pytest.raises(BudgetError, match="a sequence of 8192 tokens with one tier"):
        Ceiling.of(budget_config("64KiB", context=8192))
    with pytest.raises(BudgetError, match="with one tier"):
        Ceiling.of(budget_config("3%"))


def test_budget_holds_from_the_stated_length_on():
    config = replace(budget_config("25%"), tiers=parse_tiers("k2v3", GEOMETRY.head_dim))
    start = uniform_holds_from(config, "k2v3")
    assert start is not None
    assert config.budget is not None
    assert Ceiling.of(config).holds_from == start
    plan = ResidencyPlan("uniform", config.tiers, "k2v3", config.recent_tokens)
    for tokens in (start, start + 1, start + 127, start + 128, 4 * start, 64 * start):
        allowed = allowed_bytes(config.budget, config, tokens)
        assert sequence_bytes(config, plan, tokens) <= allowed
    assert sequence_bytes(config, plan, start) > allowed_bytes(config.budget, config, start - 128)


def test_user_tiers():
    table = parse_tiers(["k2v3", coded_tier(4.0, 8)], 32)
    assert [tier.name for tier in table] == ["drop", "k2v3", "k4v8", "max"]
    assert parse_tiers(table, 32) is table
    assert isinstance(parse_tiers("max", 32), TierTable)
    with pytest.raises(ValueError, match="k2v3"):
        parse_tiers("small", 32)


def run_pass(engine: CacheEngine, states: list[tuple[Tensor, ...]], is_real: Tensor) -> Tensor:
    """One forward pass: states of each layer are query, keys, values ``[batch, ...]``."""
    held = engine.is_real.sum(1, keepdim=True) if engine.length else 0
    step = StepTokens(is_real, held + is_real.cumsum(1) - 1)
    engine.begin(step)
    outputs = []
    for layer, (query, keys, values) in enumerate(states):
        engine.update(layer, keys, values)
        if engine.is_dense_step:
            engine.end_layer(layer, query)
            outputs.append(torch.zeros_like(query))
        else:
            outputs.append(engine.attend(layer, query, OPTIONS))
    engine.finish()
    return torch.stack(outputs)


def batch_states(tokens: int, start: int = 0, batch: int = 1) -> list[tuple[Tensor, ...]]:
    rows = [
        [make_states(tokens, 10 * b + layer, start) for layer in range(2)] for b in range(batch)
    ]
    return [
        tuple(torch.stack([rows[b][layer][part] for b in range(batch)]) for part in range(3))
        for layer in range(2)
    ]


def all_real(tokens: int, batch: int = 1) -> Tensor:
    return torch.ones(batch, tokens, dtype=torch.bool)


def test_engine_is_dense_until_it_can_calibrate():
    engine = CacheEngine(replace(make_config("k2v3"), min_calibration_tokens=150))
    run_pass(engine, batch_states(100), all_real(100))
    assert not engine.is_coded
    assert engine.calibration is None
    assert engine.ledger().total == 2 * 2 * 2 * 100 * 32 * 4
    run_pass(engine, batch_states(1, 100), all_real(1))
    assert engine.num_tokens == [101]
    run_pass(engine, batch_states(60, 101), all_real(60))
    assert engine.is_coded
    assert engine.calibration is not None
    assert engine.calibration.source == "prompt"
    assert engine.store is not None
    assert engine.ledger().total == sum(t.nbytes for t in engine.store.live_tensors())
    calibration = engine.calibration
    engine.reset()
    assert engine.calibration is calibration
    run_pass(engine, batch_states(10), all_real(10))
    assert engine.is_coded


def test_moments_of_single_steps_equal_those_of_one_pass():
    config = replace(make_config("k2v3"), min_calibration_tokens=80)
    at_once, stepwise = CacheEngine(config), CacheEngine(config)
    run_pass(at_once, batch_states(90), all_real(90))
    whole = batch_states(90)
    for at in range(90):
        part = [tuple(x[:, :, at : at + 1] for x in layer) for layer in whole]
        if stepwise.is_coded:
            break
        run_pass(stepwise, part, all_real(1))
    assert stepwise.num_tokens == [80]
    cut = CacheEngine(config)
    run_pass(cut, [tuple(x[:, :, :80] for x in layer) for layer in whole], all_real(80))
    assert cut.calibration is not None
    assert stepwise.calibration is not None
    torch.testing.assert_close(
        cut.calibration.planes.distortion,
        stepwise.calibration.planes.distortion,
        rtol=2e-2,
        atol=2e-5,
    )


def test_padding_is_not_stored():
    engine = CacheEngine(make_config("max"))
    real = all_real(50, 2)
    real[1, :20] = False
    run_pass(engine, batch_states(50, batch=2), real)
    assert engine.num_tokens == [50, 30]
    assert [row.num_tokens() for row in engine.rows] == [50, 30]
    # a chunk in which one row is all padding
    more = all_real(3, 2)
    more[0] = False
    output = run_pass(engine, batch_states(3, 50, batch=2), more)
    assert [row.num_tokens() for row in engine.rows] == [50, 33]
    assert bool((output[:, 0] == 0).all())
    assert bool((output[:, 1] != 0).any())
    engine.crop(51)
    assert [row.num_tokens() for row in engine.rows] == [50, 31]


def test_wrong_positions_and_batches_are_refused():
    engine = CacheEngine(make_config("max"))
    with pytest.raises(ValueError, match="expected \\[0, 1, 2, 3\\]"):
        engine.begin(StepTokens(all_real(5), torch.arange(3, 8)[None]))
    run_pass(engine, batch_states(5), all_real(5))
    with pytest.raises(ValueError, match="holds 1 sequences, the step has 2"):
        engine.begin(StepTokens(all_real(1, 2), torch.tensor([[5], [5]])))


def test_failed_pass_leaves_no_trace():
    engine = CacheEngine(make_config("max"))
    run_pass(engine, batch_states(60), all_real(60))
    layers = batch_states(2, 60)
    engine.begin(StepTokens(all_real(2), torch.tensor([[60, 61]])))
    engine.update(0, *layers[0][1:])
    engine.attend(0, layers[0][0], OPTIONS)
    engine.finish(is_failed=True)
    assert [row.num_tokens(0) for row in engine.rows] == [60]
    first = run_pass(engine, layers, all_real(2))
    other = CacheEngine(make_config("max"))
    run_pass(other, batch_states(60), all_real(60))
    assert torch.equal(first, run_pass(other, layers, all_real(2)))


def test_failed_pass_of_a_dense_cache_teaches_nothing():
    config = replace(make_config("k2v3"), min_calibration_tokens=150)
    retention = RetentionConfig(retention_tiers(GEOMETRY.head_dim), "k4v4")
    config = replace(config, tier=None, budget=ByteBudget.parse("60%"), retention=retention)
    engine, other = CacheEngine(config), CacheEngine(config)
    for each in (engine, other):
        run_pass(each, batch_states(40), all_real(40))
    layers = batch_states(7, 40)
    engine.begin(StepTokens(all_real(7), torch.arange(40, 47)[None]))
    engine.update(0, *layers[0][1:])
    engine.end_layer(0, layers[0][0])
    engine.finish(is_failed=True)
    before, right = engine.export_state(), other.export_state()
    assert before.keys() == right.keys()
    assert all(torch.equal(before[name], right[name]) for name in right)
    for each in (engine, other):
        run_pass(each, layers, all_real(7))
    again, right = engine.export_state(), other.export_state()
    assert all(torch.equal(again[name], right[name]) for name in right)


def test_failed_coding_pass_asks_for_a_reset():
    engine = CacheEngine(make_config("max"))
    engine.begin(StepTokens(all_real(60), torch.arange(60)[None]))
    engine.finish(is_failed=True)
    with pytest.raises(RuntimeError, match="reset"):
        run_pass(engine, batch_states(60), all_real(60))
    engine.reset()
    run_pass(engine, batch_states(60), all_real(60))


def test_an_interrupted_coding_pass_is_noticed_at_once():
    engine = CacheEngine(replace(make_config("k2v3"), min_calibration_tokens=150))
    run_pass(engine, batch_states(100), all_real(100))
    step = StepTokens(all_real(60), torch.arange(100, 160)[None])
    engine.begin(step)
    layers = batch_states(60, 100)
    engine.update(0, *layers[0][1:])
    engine.end_layer(0, layers[0][0])
    # nobody could say that the pass has failed
    with pytest.raises(RuntimeError, match="reset"):
        engine.begin(step)


@pytest.mark.parametrize("tiers", ["max", "k2v3"])
def test_selected_and_forked_rows_behave_like_their_source(tiers):
    config = replace(make_config(tiers), min_calibration_tokens=80)
    engine = CacheEngine(config)
    run_pass(engine, batch_states(300, batch=2), all_real(300, 2))
    fork = engine.fork()
    engine.select_rows(torch.tensor([1, 1, 0]))
    assert engine.store is not None
    assert len(engine.store.sequences) == 5
    new = batch_states(1, 300, batch=2)
    picked = [tuple(x[[1, 1, 0]] for x in layer) for layer in new]
    output = run_pass(engine, picked, all_real(1, 3))
    expected = run_pass(fork, new, all_real(1, 2))
    assert torch.equal(output, expected[:, [1, 1, 0]])
    engine.reset()
    assert fork.store is not None
    assert len(fork.store.sequences) == 2
    run_pass(fork, batch_states(1, 301, batch=2), all_real(1, 2))


def test_total_budget_is_a_hard_limit():
    config = make_config("k2v3")
    limit = sequence_bytes(config, make_plan(config), 700)
    limited = replace(
        config, tier=None, budget=ByteBudget.parse(limit), context=700, min_calibration_tokens=80
    )
    engine = CacheEngine(limited)
    run_pass(engine, batch_states(600), all_real(600))
    assert engine.plan is not None
    assert engine.plan.max_bytes == limit
    with pytest.raises(BudgetError):
        run_pass(engine, batch_states(300, 600), all_real(300))
    # the failed pass was undone on the next begin
    run_pass(engine, batch_states(20, 600), all_real(20))
    assert engine.num_tokens == [620]
    assert engine.ledger().total <= limit


@pytest.mark.parametrize("phase", ["dense", "coded", "windowed"])
def test_save_and_load(tmp_path: Path, phase):
    windows = (None, 96) if phase == "windowed" else (None, None)
    least = 600 if phase == "dense" else 80
    config = replace(make_config("k2v3", windows), min_calibration_tokens=2 * least)
    engine = CacheEngine(config, model_id="tiny")
    run_pass(engine, batch_states(500, batch=2), all_real(500, 2))
    folder = tmp_path / "saved"
    save_engine(engine, folder)
    save_engine(engine, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    loaded_config = read_config(folder, GEOMETRY, config.ropes, windows)
    assert loaded_config == config
    loaded = CacheEngine(loaded_config)
    load_engine(loaded, folder)
    assert loaded.num_tokens == engine.num_tokens
    assert loaded.ledger().payload == engine.ledger().payload
    assert engine.is_coded == (phase != "dense")
    more = batch_states(130, 500, batch=2)
    for cache in (engine, loaded):
        run_pass(cache, more, all_real(130, 2))
    last = batch_states(1, 630, batch=2)
    step = all_real(1, 2)
    assert torch.equal(run_pass(engine, last, step), run_pass(loaded, last, step))


def read_engine(folder: Path, config: CacheConfig) -> None:
    load_engine(CacheEngine(read_config(folder, GEOMETRY, config.ropes, (None, None))), folder)


def test_damaged_folders_are_refused(tmp_path: Path):
    config = replace(make_config("k2v3"), min_calibration_tokens=80)
    engine = CacheEngine(config)
    run_pass(engine, batch_states(300), all_real(300))
    names = ("cache.json", "state.safetensors", "calibration.safetensors", "sequence-0.safetensors")
    for name in names:
        folder = tmp_path / name
        save_engine(engine, folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(CacheFileError):
            read_engine(folder, config)
    with pytest.raises(CacheFileError, match="no saved cache"):
        read_config(tmp_path, GEOMETRY, config.ropes, (None, None))
    with pytest.raises(FileExistsError):
        save_engine(engine, tmp_path)


def shared_prompt(budget: ByteBudget, tokens: int = 600) -> CacheEngine:
    config = replace(make_config("k2v3"), tier=None, budget=budget, min_calibration_tokens=80)
    engine = CacheEngine(replace(config, context=tokens + 100))
    run_pass(engine, batch_states(tokens), all_real(tokens))
    return engine


def test_a_fork_that_nobody_holds_gives_its_pages_back():
    engine = CacheEngine(replace(make_config("k2v3"), min_calibration_tokens=80))
    run_pass(engine, batch_states(300), all_real(300))
    alone = engine.ledger().total
    for _ in range(3):
        fork = engine.fork()
        run_pass(fork, batch_states(40, 300), all_real(40))
        assert engine.ledger().total > alone
        del fork
    assert engine.ledger().total == engine.resident_bytes() == alone
    assert engine.store is not None
    assert len(engine.store.sequences) == 1


def test_every_copy_of_a_sequence_has_its_own_part_of_a_total_budget():
    config = make_config("k2v3")
    plan = make_plan(config)
    limit = sequence_bytes(config, plan, 700)
    engine = shared_prompt(ByteBudget.parse(limit))
    assert engine.limit_bytes() == limit
    # each copy has a tail of its own, for which one budget has no room
    engine.select_rows(torch.zeros(8, dtype=torch.int64))
    assert engine.limit_bytes() == 8 * limit
    run_pass(engine, batch_states(30, 600, batch=8), all_real(30, 8))
    assert engine.peak_share <= 1
    engine.select_rows(torch.tensor([0]))
    with pytest.raises(BudgetError):
        run_pass(engine, batch_states(300, 630), all_real(300))


def test_bytes_of_a_fork_are_held_against_its_own_ceiling():
    engine = shared_prompt(ByteBudget.parse("60%"))
    share, fork = engine.peak_share, engine.fork()
    for cache in (fork, engine):
        run_pass(cache, batch_states(1, 600), all_real(1))
    assert 0 < engine.peak_share <= 1
    assert fork.peak_share <= 1
    fork.reset()
    run_pass(engine, batch_states(1, 601), all_real(1))
    assert engine.peak_share <= max(1.0, share)


def test_a_short_row_beside_a_long_one_meets_its_own_ceiling():
    """The tier is chosen for the shortest row: a long one may have room for a higher."""
    config = replace(budget_config("40%"), min_calibration_tokens=80)
    engine = CacheEngine(config)
    real = all_real(4000, 2)
    real[1, :3000] = False
    run_pass(engine, batch_states(4000, batch=2), real)
    longest, shortest = (choose_residency(config, tokens) for tokens in (4000, 1000))
    assert longest is not None
    assert engine.plan == shortest != longest
    assert engine.peak_share <= 1


def test_a_cropped_sequence_says_from_which_length_its_tier_holds():
    engine = CacheEngine(replace(budget_config("100%"), min_calibration_tokens=80))
    before = engine.ceiling.holds_from
    run_pass(engine, batch_states(3000), all_real(3000))
    assert engine.plan is not None
    start = uniform_holds_from(engine.config, engine.plan.tier)
    assert before is not None
    assert start is not None
    assert engine.ceiling.holds_from == start > before
    engine.crop(start + 1)
    run_pass(engine, batch_states(1, start + 1), all_real(1))
    engine.reset()
    assert engine.ceiling.holds_from == before


def test_a_crop_gives_slabs_back():
    engine = CacheEngine(replace(make_config("k2v3"), min_calibration_tokens=80))
    run_pass(engine, batch_states(8000), all_real(8000))
    before = engine.ledger()
    engine.crop(600)
    # what is left of a pool is less than one slab more than its pages
    assert engine.ledger().total < 0.4 * before.total
    run_pass(engine, batch_states(1, 600), all_real(1))
    assert engine.resident_bytes() == engine.ledger().total


@pytest.mark.parametrize("windows", [(260, 260), (None, 260), (70, 500)])
@pytest.mark.parametrize("budget", ["40%", "60%", "100%"])
def test_budget_of_windows_holds_at_every_length_from_the_stated_one_on(windows, budget):
    """A dense window stops growing before one that is kept in pages does."""
    config = replace(budget_config(budget), windows=windows)
    assert config.budget is not None
    for tier in ("k1v2", "k5v4", "max"):
        start = uniform_holds_from(config, tier)
        plan = ResidencyPlan("uniform", config.tiers, tier, config.recent_tokens)
        if start is None:
            far = 1 << 20
            assert sequence_bytes(config, plan, far) > allowed_bytes(config.budget, config, far)
            continue
        for tokens in range(start, start + 1500, 37):
            allowed = allowed_bytes(config.budget, config, tokens)
            assert sequence_bytes(config, plan, tokens) <= allowed
