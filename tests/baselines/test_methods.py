# SPDX-License-Identifier: Apache-2.0
"""What every baseline must satisfy: attention, bytes, budget, settings and crop."""

import importlib
import sys

import pytest
import torch
from torch import Tensor

from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions
from sphkv.baselines import registry
from sphkv.baselines.composed import ComposedCache
from sphkv.baselines.held_states import HeldStates, join_states
from sphkv.baselines.quantised import QuantisedCache
from sphkv.baselines.registry import BASELINES, make_baseline
from sphkv.baselines.settings import NUM_TRIALS, Baseline
from sphkv.cache.method import CacheMethod
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, num_query_heads=6, head_dim=32)
ROPES = tuple(RopeSpec(32, 32, tuple(10_000.0 ** (-i / 16) for i in range(16))) for _ in range(2))
OPTIONS = AttentionOptions(scale=32**-0.5)
# a few tokens past a block, so that short steps code nothing more
PROMPT = 520
NUM_NEW = 48
BUDGETS = {"dense": 1.0, "prefix_reuse": 1.0, "fp8": 0.6, "int4": 0.35, "int2": 0.25}
EXACT = ("dense", "prefix_reuse", "offload")
# tokens are coded one by one, or kept whole
DIVISIBLE = frozenset(
    [
        "dense",
        "offload",
        "prefix_reuse",
        "fp8",
        "int4",
        "int2",
        "turboquant",
        "rotatekv",
        "polarquant_recursive",
    ]
)


def make(name: str, budget: float | None = None, num_new: int = NUM_NEW) -> Baseline:
    """Under the reference backend, whose products are those of the tests."""
    share = BUDGETS.get(name, 0.5) if budget is None else budget
    return make_baseline(name, GEOMETRY, ROPES, share, num_new=num_new, backend=ReferenceBackend())


def states(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of one layer."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(6, tokens, 32, generator=generator)
    keys = torch.randn(2, tokens, 32, generator=generator) * torch.linspace(0.5, 2, 32)
    return query, keys, torch.randn(2, tokens, 32, generator=generator)


def filled(name: str, tokens: int = PROMPT) -> Baseline:
    method = make(name)
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = states(tokens, layer)
        method.prefill(layer, keys, values, query=query)
    return method


def plain_attention(query: Tensor, held: HeldStates, first: int) -> Tensor:
    """Softmax attention written out head by head, position by position."""
    output = torch.empty_like(query)
    for head in range(query.shape[0]):
        keys, values = held.keys[head // 3], held.values[head // 3]
        for index in range(query.shape[1]):
            position = held.positions[head // 3]
            seen = (position >= 0) & (position <= first + index)
            weight = torch.softmax(keys[seen] @ query[head, index] * OPTIONS.scale, 0)
            output[head, index] = weight @ values[seen]
    return output


def storage_bytes(method: Baseline) -> int:
    """Bytes that the method's tensors really keep alive, and page headers that are declared."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in method.live_tensors()}
    declared = 0
    if isinstance(method, QuantisedCache | ComposedCache):
        declared = method.metadata_bytes()
    return declared + sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", BASELINES)
def test_attention_is_that_of_what_is_stored(name: str) -> None:
    method = filled(name)
    # KIVI codes a value with every token, after the token has seen it
    num_new = 1 if name == "kivi" else 5
    for layer in range(2):
        query, keys, values = states(num_new, 10 + layer)
        before = method.read(layer)
        output = method.attend(layer, query, keys, values, OPTIONS)
        held = method.read(layer)
        if name == "kivi":
            last = HeldStates(held.keys[:, -1:], held.values[:, -1:], held.positions[:, -1:])
            held = join_states([before, last])
        assert torch.allclose(output, plain_attention(query, held, PROMPT), atol=1e-5)
        assert method.num_tokens(layer) == PROMPT + num_new


@pytest.mark.parametrize("name", BASELINES)
def test_new_tokens_are_seen(name: str) -> None:
    """A query equal to the newest key, both large, returns the newest value."""
    method = filled(name)
    _, keys, values = states(1, 20)
    keys = keys / keys.norm(dim=-1, keepdim=True) * 30
    output = method.attend(0, keys.repeat_interleave(3, 0), keys, values, OPTIONS)
    # a one-bit-per-entry code is the coarsest that must still tell them apart
    error = (output - values.repeat_interleave(3, 0)).norm() / values.norm()
    assert error < 0.75


@pytest.mark.parametrize("name", BASELINES)
def test_ledger_counts_every_live_tensor(name: str) -> None:
    method = filled(name)
    for steps in (0, 1, 40):
        for layer in range(2):
            query, keys, values = states(steps, 30 + steps)
            method.attend(layer, query, keys, values, OPTIONS)
        assert method.ledger().total == method.resident_bytes() == storage_bytes(method)
        assert min(method.ledger().to_dict().values()) >= 0
        assert method.peak_bytes() >= method.resident_bytes()


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"dense", "prefix_reuse"}))
def test_budget_holds_at_every_token(name: str) -> None:
    """After the prompt, after each new token, and after more of them than were announced."""
    method = filled(name)
    share = BUDGETS.get(name, 0.5)
    dense = GEOMETRY.dense_bytes_per_token
    assert method.ledger().total <= share * dense * PROMPT
    # a method that left most of what it may use would be compared unfairly
    assert method.ledger().total > 0.3 * share * dense * PROMPT
    announced = NUM_NEW if BASELINES[name].family == "bits" else NUM_NEW + 40
    for step in range(announced):
        for layer in range(2):
            query, keys, values = states(1, 100 + step)
            method.attend(layer, query, keys, values, OPTIONS)
        assert method.resident_bytes() <= share * dense * (PROMPT + step + 1)
        assert method.ledger().total == method.resident_bytes()


@pytest.mark.parametrize("name", [n for n, s in BASELINES.items() if s.family == "retention"])
def test_small_budgets_hold_for_every_trial(name: str) -> None:
    """A budget of which tails and tables are a large part, over two evictions."""
    share, prompt = 0.16, 1000
    for settings in BASELINES[name].settings().trials():
        method = make_baseline(name, GEOMETRY, ROPES, share, num_new=36, settings=settings)
        for layer in range(2):
            query, keys, values = states(prompt, layer)
            method.prefill(layer, keys, values, query=query)
        for step in range(36):
            for layer in range(2):
                query, keys, values = states(1, 100 + step)
                method.attend(layer, query, keys, values, OPTIONS)
            dense = GEOMETRY.dense_bytes_per_token * (prompt + 1 + step)
            assert method.resident_bytes() <= share * dense, (settings, step)


@pytest.mark.parametrize("name", BASELINES)
def test_a_budget_too_small_says_what_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match="at least"):
        make_baseline(name, GEOMETRY, ROPES, 0.001, num_tokens=PROMPT)


@pytest.mark.parametrize("name", BASELINES)
def test_crop_forgets_new_tokens(name: str) -> None:
    method = filled(name)
    before = method.read(0)
    query, keys, values = states(3, 40)
    for layer in range(2):
        method.attend(layer, query, keys, values, OPTIONS)
    method.crop(PROMPT)
    after = method.read(0)
    assert method.num_tokens() == PROMPT
    old, new = before.positions >= 0, after.positions >= 0
    assert torch.equal(after.positions[new], before.positions[old])
    assert torch.equal(after.keys[new], before.keys[old])
    # values that KIVI coded on the way stay coded
    if name != "kivi":
        assert torch.equal(after.values[new], before.values[old])
    assert method.ledger().total == storage_bytes(method)


@pytest.mark.parametrize("name", BASELINES)
def test_crop_into_the_prompt_works_or_is_refused(name: str) -> None:
    method = filled(name)
    if name not in DIVISIBLE:
        with pytest.raises(ValueError, match="cannot crop to 333"):
            method.crop(333)
        assert method.num_tokens(1) == PROMPT
        return
    method.crop(333)
    held = method.read(1)
    assert held.positions[held.positions >= 0].max() == 332
    assert method.ledger().total == storage_bytes(method)
    query, keys, values = states(2, 41)
    output = method.attend(1, query, keys, values, OPTIONS)
    assert torch.allclose(output, plain_attention(query, method.read(1), 333), atol=1e-5)


@pytest.mark.parametrize("name", [n for n, s in BASELINES.items() if s.family != "retention"])
def test_one_step_at_a_time_equals_a_chunk(name: str) -> None:
    """Decoding token by token and a chunk at once see the same states."""
    steps, chunk = filled(name, 764), filled(name, 764)
    query, keys, values = states(37, 50)
    whole = chunk.attend(0, query, keys, values, OPTIONS)
    single = torch.cat(
        [
            steps.attend(0, query[:, i : i + 1], keys[:, i : i + 1], values[:, i : i + 1], OPTIONS)
            for i in range(37)
        ],
        1,
    )
    assert torch.allclose(whole, single, atol=1e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_bad_calls_are_named(name: str) -> None:
    method = make(name)
    query, keys, values = states(PROMPT, 0)
    with pytest.raises(ValueError, match="no prompt"):
        method.attend(0, query, keys, values, OPTIONS)
    with pytest.raises(ValueError, match="31"):
        method.prefill(0, keys[..., :31], values, query=query)
    with pytest.raises(ValueError, match="finite"):
        method.prefill(0, keys * torch.nan, values, query=query)
    method.prefill(0, keys, values, query=query)
    with pytest.raises(ValueError, match="already"):
        method.prefill(0, keys, values, query=query)


@pytest.mark.parametrize("name", [n for n, s in BASELINES.items() if s.family in ("bits", "both")])
def test_keeping_what_was_rebuilt_changes_no_output(name: str) -> None:
    plain = make(name)
    keeping = make(name)
    assert isinstance(keeping, QuantisedCache | ComposedCache)
    query, keys, values = states(764, 0)
    for method in (plain, keeping):
        method.prefill(0, keys, values, query=query)
    keeping.keep_rebuilt()
    for seed in (1, 2, 3):
        query, keys, values = states(37, seed)
        outputs = [m.attend(0, query, keys, values, OPTIONS) for m in (plain, keeping)]
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    for method in (plain, keeping):
        method.crop(870)
    assert torch.equal(plain.read(0).keys, keeping.read(0).keys)
    assert keeping.resident_bytes() == plain.resident_bytes()


@pytest.mark.parametrize("name", BASELINES)
def test_bfloat16_states_and_an_odd_head_dim(name: str) -> None:
    """Twenty channels, twelve of them rotated, and states as a bfloat16 model gives them."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=3, num_query_heads=3, head_dim=20)
    rope = RopeSpec(20, 12, tuple(10.0**-i for i in range(6)), layout="interleaved")
    method: CacheMethod = make_baseline(name, geometry, [rope], 1.0, backend=ReferenceBackend())
    states = torch.randn(3, 300, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    method.prefill(0, states, states, query=states)
    new = states[:, :2]
    output = method.attend(0, new, new, new, AttentionOptions(scale=0.2))
    assert output.dtype == torch.float32
    assert bool(output.isfinite().all())
    assert method.num_tokens() == 302


@pytest.mark.parametrize("name", BASELINES)
def test_records_say_what_the_method_is(name: str) -> None:
    spec, method = BASELINES[name], filled(name)
    record = method.describe()
    assert record.name == method.name == spec.name == name
    assert record.realisation == spec.realisation
    assert sum(record.tiers.values()) == pytest.approx(1.0)
    assert min(record.tiers.values()) >= -1e-9
    assert record.residency
    assert spec.paper


@pytest.mark.parametrize("name", BASELINES)
def test_as_many_trials_for_every_method(name: str) -> None:
    """Six different settings, the default first; one where there is nothing to choose."""
    settings = BASELINES[name].settings()
    trials = settings.trials()
    assert len(set(trials)) == len(trials) == (1 if name in EXACT else NUM_TRIALS)
    labels = {make_baseline(name, GEOMETRY, ROPES, 1.0, settings=s).name for s in trials}
    assert labels == {name}


def test_registry_imports_only_what_is_asked_for() -> None:
    for module in [name for name in sys.modules if name.startswith("sphkv.baselines.turboquant")]:
        del sys.modules[module]
    importlib.reload(registry)
    assert "sphkv.baselines.turboquant" not in sys.modules
    registry.find("qjl").settings()
    assert "sphkv.baselines.turboquant" in sys.modules


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="no baseline 'snapvk'; did you mean snapkv"):
        make_baseline("snapvk", GEOMETRY, ROPES, 0.5)
    with pytest.raises(ValueError, match="known: adakv, cake"):
        registry.find("zzzzzzzz")
    assert registry.names()[0] == "dense"


def test_wrong_counts_and_settings_are_named() -> None:
    with pytest.raises(ValueError, match="1 rotary"):
        make_baseline("kivi", GEOMETRY, ROPES[:1], 0.5)
    with pytest.raises(ValueError, match="-1"):
        make_baseline("kivi", GEOMETRY, ROPES, -1.0)
    with pytest.raises(ValueError, match="num_new must not be negative, got -3"):
        make_baseline("kivi", GEOMETRY, ROPES, 0.5, num_new=-3)
    other = registry.find("h2o").settings()
    with pytest.raises(ValueError, match="settings of 'h2o' were given for 'snapkv'"):
        make_baseline("snapkv", GEOMETRY, ROPES, 0.5, settings=other)
