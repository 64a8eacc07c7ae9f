# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from functools import cache

import pytest
import torch
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig, retention_tiers
from sphkv.cache.retained_engine import RetainedEngine
from sphkv.cache.retained_index import PageIndex
from torch import Tensor

from sphkv.attention.cuda.pages import FragmentOrder
from sphkv.attention.partial import PartialAttention
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.cache.method import CacheMethod
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration import Calibrator
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.errors import BudgetError
from sphkv.retention.gate import GateOptions
from sphkv.retention.measure import PromptWork
from sphkv.retention.policy import VARIANTS, BlockShape, ControlOptions
from sphkv.retention.protection import ProtectionRule
from sphkv.testing.fake_gpu import DEVICE, GpuTensor, fake_gpu

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
def make_codec() -> SphericalCodec:
    calibrator = Calibrator(GEOMETRY, (ROPE,) * GEOMETRY.num_layers, model_id="random")
    for layer in range(GEOMETRY.num_layers):
        query, keys, _ = make_states(layer, 256)
        calibrator.add_layer(layer, keys, query, torch.arange(256))
    return SphericalCodec(calibrator.finish())


def make_config(budget: str = "30%", **changes: object) -> RetainedConfig:
    config = RetainedConfig(GEOMETRY, (ROPE,) * GEOMETRY.num_layers, ByteBudget.parse(budget))
    return replace(config, **changes)  # type: ignore[arg-type]


class NoAttention:
    """For tests of bytes alone, which attention would make slow."""

    name = "none"

    def attend(self, request: DecodeRequest) -> PartialAttention:
        return PartialAttention(request.query, request.query[..., 0])


def fill(
    config: RetainedConfig,
    tokens: int = 520,
    backend: DecodeBackend | None = None,
    measured: PromptWork | None = None,
) -> RetainedSequence:
    backend = backend or ReferenceBackend()
    sequence = RetainedSequence(config, make_codec(), backend, measured=measured)
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = make_states(layer, tokens)
        sequence.prefill(layer, keys, values, query=query)
    return sequence


def step(sequence: RetainedSequence, count: int = 1) -> list[Tensor]:
    start = sequence.num_tokens()
    outputs = []
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = make_states(layer, count, start)
        outputs.append(sequence.attend(layer, query, keys, values, OPTIONS))
    return outputs


def check_bytes(sequence: RetainedSequence) -> None:
    live = sum(tensor.nbytes for tensor in sequence.store.live_tensors())
    assert sequence.store.live_bytes == live
    assert sequence.ledger().total == sequence.resident_bytes() >= live
    assert sequence.resident_bytes() <= sequence.limit_bytes()


def test_is_a_cache_method():
    sequence: CacheMethod = fill(make_config())
    assert sequence.num_tokens() == 520


class Aligned(ReferenceBackend):
    """Slabs as a GPU keeps them: each costs a page more."""

    order = FragmentOrder()


@pytest.mark.parametrize("page_tokens", [32, 128])
def test_budget_holds_with_aligned_slabs(page_tokens):
    config = make_config("40%", tiers=retention_tiers(page_tokens))
    sequence = fill(config, tokens=2000, backend=Aligned())
    check_bytes(sequence)
    assert sequence.config.is_aligned
    assert sequence.resident_bytes() > 0.85 * sequence.limit_bytes()
    for _ in range(20):
        step(sequence, 20)
        check_bytes(sequence)
    assert sequence.refresher.num_rebalances > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("budget", ["25%", "40%"])
def test_prompt_fits_the_budget_exactly(variant, budget):
    options = ControlOptions(variant=variant, fixed_tier=None)
    sequence = fill(make_config(budget, options=options))
    step(sequence)
    check_bytes(sequence)
    if variant in ("joint", "keepdrop"):
        # a page of 32 states is about one percent of this small budget
        assert sequence.resident_bytes() > 0.93 * sequence.limit_bytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_work_changes_nothing(variant):
    """A budget after other budgets and variants of the same prompt."""
    work = PromptWork()
    for options in (ControlOptions(variant="decoupled"), ControlOptions(use_segments=False)):
        fill(make_config("40%", options=options), measured=work)
    config = make_config("25%", options=ControlOptions(variant=variant))
    fill(replace(config, budget=ByteBudget.parse("30%")), measured=work)
    alone, shared = fill(config), fill(config, measured=work)
    assert alone.contract is not None
    assert shared.contract is not None
    assert torch.equal(alone.contract.tier_id, shared.contract.tier_id)
    for _ in range(2):
        outputs = zip(step(alone, 40), step(shared, 40), strict=True)
        assert all(torch.equal(a, b) for a, b in outputs)
    assert alone.resident_bytes() == shared.resident_bytes()
    assert work.reused_s > 0


@pytest.mark.parametrize(
    "shapes",
    [
        (BlockShape.RUNS,),
        (BlockShape.TOKENS,),
        (BlockShape.WHOLE, BlockShape.RUNS, BlockShape.TOKENS),
    ],
)
def test_predicted_bytes_are_the_stores(shapes):
    sequence = fill(make_config("25%", options=ControlOptions(shapes=shapes)))
    check_bytes(sequence)
    step(sequence)
    check_bytes(sequence)


@pytest.mark.parametrize("shapes", [ControlOptions().shapes, tuple(BlockShape)])
def test_protected_states_stay_dense(shapes):
    rule = ProtectionRule(spans=((100, 120),))
    options = ControlOptions(shapes=shapes)
    sequence = fill(make_config(protection=rule, options=options), backend=NoAttention())
    assert sequence.contract is not None
    dense = sequence.config.tiers.dense_id
    assert bool((sequence.contract.tier_id[..., :16] == dense).all())
    assert bool((sequence.contract.tier_id[..., 96:128] == dense).all())
    for _ in range(100):
        step(sequence)
    kept = {
        int(position)
        for group in sequence.store.pages(0, 0)
        if group.layout.tier_id == dense
        for position in sequence.store.view(group).positions()[sequence.store.view(group).flags()]
    }
    assert set(range(16)) | set(range(96, 128)) <= kept


def test_budget_holds_while_the_sequence_grows_tenfold():
    sequence = fill(make_config("50%"), 128, NoAttention())
    limit = sequence.limit_bytes()
    for _ in range(9 * 128):
        step(sequence)
        assert sequence.resident_bytes() <= sequence.limit_bytes()
    check_bytes(sequence)
    assert sequence.num_tokens() == 1280
    assert sequence.limit_bytes() == 10 * limit


def test_a_fixed_number_of_bytes_holds_too():
    sequence = fill(make_config("60KiB"), 512, NoAttention())
    for _ in range(300):
        step(sequence)
        assert sequence.resident_bytes() <= 60 * 1024
    check_bytes(sequence)
    assert sequence.refresher.num_rebalances > 0


def test_missing_bytes_are_named():
    with pytest.raises(BudgetError, match=r"by \d+ bytes") as error:
        fill(make_config("1%"))
    assert error.value.missing > 0


def test_more_bytes_come_closer_to_dense_attention():
    def error(budget: str) -> float:
        sequence = fill(make_config(budget))
        total = 0.0
        for layer, output in enumerate(step(sequence)):
            query, keys, values = (
                torch.cat([a, b], 1)
                for a, b in zip(make_states(layer, 520), make_states(layer, 1, 520), strict=True)
            )
            exact = torch.nn.functional.scaled_dot_product_attention(
                query[:, -1:], keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
            )
            total += float((output - exact).square().sum())
        return total

    losses = [error(budget) for budget in ("20%", "30%", "60%", "120%")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]


def test_chunks_and_single_tokens_meet_the_budget_alike():
    one, many = (fill(make_config(), backend=NoAttention()) for _ in range(2))
    for _ in range(96):
        step(one)
    step(many, 96)
    assert one.num_tokens() == many.num_tokens() == 616
    check_bytes(one)
    check_bytes(many)


def test_crop_and_continue():
    sequence = fill(make_config())
    step(sequence, 40)
    sequence.crop(530)
    assert sequence.num_tokens() == 530
    step(sequence, 70)
    check_bytes(sequence)


@pytest.mark.parametrize("shapes", [(BlockShape.RUNS,), tuple(BlockShape)])
def test_the_index_of_pages_says_what_reading_all_of_them_would(shapes):
    options = ControlOptions(shapes=shapes)
    sequence = fill(make_config("20%", options=options), 400, backend=NoAttention())
    refresher = sequence.refresher
    for at in range(120):
        step(sequence)
        if at == 90:
            sequence.crop(450)
        if at % 30:
            continue
        known, read = (
            index.decided(refresher.notes, refresher.fresh_from)
            for index in (refresher.index, PageIndex(sequence.store, 0))
        )
        assert known[0].num_pages > 0
        assert torch.equal(known[0].page_ids, read[0].page_ids)
        assert torch.equal(known[1], read[1])
    assert refresher.num_rebalances > 1


def test_gate_holds_bytes_back_and_gives_them_when_on():
    gate = GateOptions(reserve_share=0.1)
    sequence = fill(make_config(gate=gate))
    assert sequence.resident_bytes() <= 0.9 * sequence.limit_bytes()
    assert not sequence.refresher.observe_margin(1e6)
    assert sequence.refresher.drift > 0
    assert sequence.refresher.observe_margin(0.0)
    for _ in range(64):
        step(sequence)
        check_bytes(sequence)


def test_layers_must_come_in_order_with_queries():
    sequence = RetainedSequence(make_config(), make_codec(), ReferenceBackend())
    query, keys, values = make_states(0, 128)
    with pytest.raises(ValueError, match="needs the layer's queries"):
        sequence.prefill(0, keys, values)
    with pytest.raises(ValueError, match="layer 1 is out of order"):
        sequence.prefill(1, keys, values, query=query)


def test_short_prompts_are_refused():
    sequence = RetainedSequence(make_config(), make_codec(), ReferenceBackend())
    query, keys, values = make_states(0, 40)
    with pytest.raises(ValueError, match="at least 48 tokens, got 40"):
        sequence.prefill(0, keys, values, query=query)


def test_live_probe_logs_the_drift_of_the_dense_tail():
    gate = GateOptions(probe_every=4)
    sequence = fill(make_config("40%", gate=gate), backend=NoAttention())
    for _ in range(16):
        step(sequence)
    drifts = sequence.refresher.drifts
    assert {sample.layer for sample in drifts} == {0, 1}
    assert all(0 < sample.quantiles[0] <= sample.quantiles[2] for sample in drifts)


class AlignedByCodec(ReferenceBackend):
    """Leaves encoding to the codec, as for states the kernel does not take."""

    order = FragmentOrder()


def run_gpu_pass(engine: RetainedEngine, is_real: Tensor, positions: Tensor) -> list[Tensor | None]:
    """A forward pass of two rows that see the same states; attention of each layer, if any."""
    engine.begin(StepTokens(GpuTensor(is_real), GpuTensor(positions)))
    is_prompt, tokens, start = engine.is_dense_step, is_real.shape[1], engine.length
    found: list[Tensor | None] = []
    for layer in range(GEOMETRY.num_layers):
        one = make_states(layer, tokens, start)
        query, keys, values = (GpuTensor(part[None].repeat(2, 1, 1, 1)) for part in one)
        engine.update(layer, keys, values)
        if is_prompt:
            engine.settle(layer, query)
            found.append(None)
        else:
            found.append(engine.attend(layer, query, OPTIONS))
    engine.finish()
    return found


@pytest.mark.parametrize(
    ("backend", "page_tokens"),
    [(ReferenceBackend(), 32), (AlignedByCodec(), 128)],
)
def test_a_batch_on_a_gpu_keeps_its_budgets(backend, page_tokens):
    config = make_config(
        "40%",
        device=str(DEVICE),
        gate=GateOptions(probe_every=4),
        tiers=retention_tiers(page_tokens),
    )
    engine = RetainedEngine(config, backend, make_codec().calibration)
    tokens = 10 * page_tokens + 100
    is_real = torch.ones(2, tokens, dtype=torch.bool)
    is_real[1, :40] = False
    with fake_gpu():
        run_gpu_pass(engine, is_real, (is_real.cumsum(1) - 1).clamp(min=0))
        for step in range(0, 40, 5):
            at = torch.arange(step, step + 5) + torch.tensor([[tokens], [tokens - 40]])
            outputs = run_gpu_pass(engine, torch.ones(2, 5, dtype=torch.bool), at)
            engine.see_logits(GpuTensor(torch.randn(2, 1, 50)))
            assert all(row.resident_bytes() <= row.limit_bytes() for row in engine.rows)
        assert all(isinstance(output, GpuTensor) for output in outputs)
        row = engine.rows[0]
        assert row.store.tail(0, 0).keys.device == DEVICE
        assert all(not part.is_cuda for notes in row.refresher.notes for part in notes.tensors())
        assert page_tokens > 32 or row.refresher.drifts
        engine.crop(tokens + 8)
        engine.select_rows(GpuTensor(torch.tensor([1, 0])))
    assert engine.length == tokens + 8


def test_devices_that_meet_are_noticed():
    with fake_gpu():
        one, other = GpuTensor(torch.ones(3)), torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            _ = one + other
        assert isinstance(one + other.to(one), GpuTensor)
        assert isinstance(torch.arange(3, device=DEVICE), GpuTensor)
        assert (one * 2).cpu().tolist() == [2.0, 2.0, 2.0]
