# SPDX-License-Identifier: Apache-2.0
"""``SphericalCache``: the ``past_key_values`` of a transformers model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.attention.api import get_backend
from sphkv.attention.request import DecodeBackend
from sphkv.cache.config import PROMPT_CALIBRATION, CacheConfig, RetentionConfig
from sphkv.cache.engine import CacheEngine
from sphkv.cache.files import load_engine, read_config, save_engine
from sphkv.cache.method import MethodRecord
from sphkv.cache.plan import (
    choose_residency,
    choose_seal_tier,
    is_fast,
    long_tiers,
    parse_tiers,
    refresh_shares,
    retention_tiers,
)
from sphkv.codec.calibration import Calibration, CalibrationOptions
from sphkv.codec.calibration_file import (
    find_calibration,
    keep_calibration,
    load_calibration,
    model_key,
)
from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import TierSpec, TierTable
from sphkv.errors import UnsupportedModelError
from sphkv.integrations.transformers.architecture import ModelLayout, describe_model
from sphkv.integrations.transformers.attached import AttachedCache
from sphkv.integrations.transformers.copying import copying_policy
from sphkv.integrations.transformers.forward import CachePass, DecoderGraph, read_step
from sphkv.retention.gate import GateOptions
from sphkv.retention.policy import ControlOptions, RetentionPolicy, load_policy
from sphkv.retention.protection import ProtectionRule, SegmentSpans
from sphkv.store.ledger import ByteLedger
from sphkv.store.order import PageOrder

DEFAULT_BUDGET = "25%"
Span = tuple[int, int]
Tiers = TierTable | TierSpec | str | Sequence[TierSpec | str]

COPY_CHANCE = 0.1
"""How often a head that only copies asks for what nobody asked for, see ``RetentionOptions``."""

# A budget that one tier holds at this length leaves the controller the shortest prompts at most.
_SHORT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a cache that rarely change.

    Attributes:
        sink_tokens: First tokens that stay dense with one tier.
        recent_tokens: Newest tokens that stay dense with one tier.
        min_calibration_tokens: Tokens seen before the cache calibrates itself; until then it
            is dense.
        calibration: How it does.
        backend: What runs decode attention, see ``sphkv.attention.api``.
        cuda_graphs: Whether single steps on a GPU are captured once and replayed, where the
            backend can.
        steps_ahead: Whether such a step is launched before it is asked for, once the most likely
            token has proved to be the one that comes: what lies between two steps of a greedy
            ``generate`` then costs a GPU no time. Never with a stability gate.
        finds_calibration: Whether a cache that is given no calibration takes the one that was kept
            for its model.
    """

    sink_tokens: int = 4
    recent_tokens: int = 32
    min_calibration_tokens: int = 512
    calibration: CalibrationOptions = field(default_factory=lambda: PROMPT_CALIBRATION)
    backend: str = "auto"
    cuda_graphs: bool = True
    steps_ahead: bool = True
    finds_calibration: bool = True


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """How the controller keeps, demotes and drops.

    Attributes:
        protect: Token ranges ``(start, stop)`` of the prompt that stay bfloat16: instructions,
            tool schemas, evidence.
        retrieved: Token ranges of retrieved passages, which the policy weighs by themselves.
        policy: Weights, or a file that ``sphkv fit-policy`` wrote; equal weights if None, and
            what the model's heads that copy may ask for, see ``copying``.
        copying: Part of later queries of a head that does nothing but copy which ask for a token
            that no query of the prompt asked for, per factor e of its age; 0 expects none. Such
            heads are found by a short pass of the model. Without a policy only.
        score: What values states, a name of ``sphkv.retention.scores.SCORES``.
        gate: Stability gate, told the margin of the two best tokens of every pass; off if None.
        page_tokens: States of a coded page, a multiple of 32. If None, what suits the prompt's
            length: 64, and 128 from 32,768 tokens on, where a GPU's kernels read them; else 32.
        seal_tier: Tier at which new states leave the dense tail; the budget chooses if None.
        refresh_share: Part of the ceiling that is freed at once when old pages must give way, if
            the next pages to seal find room in it; as suits the backend if None.
        demotes: Whether pages at the seal tier may be coded again at a lower one before they are
            dropped; without it every page stays as it is or goes. If None, with small pages only.
    """

    protect: Sequence[Span] = ()
    retrieved: Sequence[Span] = ()
    policy: RetentionPolicy | Path | str | None = None
    copying: float = COPY_CHANCE
    score: str = "attention"
    gate: GateOptions | None = None
    page_tokens: int | None = None
    seal_tier: str | None = None
    refresh_share: float | None = None
    demotes: bool | None = None

    def __post_init__(self) -> None:
        """Reject a chance that is none."""
        if not 0 <= self.copying <= 1:
            raise ValueError(f"copying must be in 0..1, got {self.copying!r}")


class SphericalCache(AttachedCache):
    """A KV cache of packed angle codes, made by ``for_model`` and given to ``generate``.

    The first prompt is attended to densely, then coded; decoding reads the codes. Every method
    of transformers' ``Cache`` that makes sense works: ``crop``, ``reset``, ``reorder_cache``,
    ``batch_repeat_interleave``, ``batch_select_indices``.

    Attributes:
        engine: The cache itself, free of transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: CacheEngine,
        *,
        cuda_graphs: bool = True,
        steps_ahead: bool = True,
    ) -> None:
        """Attach an engine to a model; users call ``for_model``."""
        layout = describe_model(model)
        super().__init__(model, layout)
        self.engine = engine
        self._has_new_logits = False
        retention = engine.config.retention
        has_gate = retention is not None and retention.gate is not None
        self._has_graphs, self._has_steps_ahead = cuda_graphs, steps_ahead
        self._captured = DecoderGraph(engine) if cuda_graphs else None
        self._unwatch = None
        if has_gate:
            # by these logits a gate decides about pages, before which no step may begin
            self._unwatch = _watch_logits(self, model)
        elif cuda_graphs and steps_ahead and layout.device.type == "cuda":
            self._unwatch = _watch_output(self, model)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        budget: str | int | ByteBudget | None = None,
        *,
        retention: bool | RetentionOptions | None = None,
        tiers: Tiers | None = None,
        context: int | None = None,
        calibration: Calibration | Path | str | None = None,
        options: CacheOptions | None = None,
    ) -> SphericalCache:
        """Make a cache for a model and route the model's attention through it.

        Args:
            model: A causal language model. Its attention implementation is switched to
                ``"sphkv"`` until ``detach``; without one of these caches it computes as before.
            budget: Ceiling of one sequence at every step from ``holds_from`` tokens on:
                ``"25%"`` of a dense bfloat16 cache (the default), ``"512B/token"``, ``"64MiB"``
                or whole bytes, with sinks, tails, page headers, tables and slack charged. One
                tier for all tokens where ``k4v4`` or better fits, else the controller keeps,
                demotes and drops per token and head.
            retention: True or options: the controller decides at any budget; False: never.
            tiers: Tiers to choose from: a table, tiers, or names such as ``"k2v3"``. Without a
                budget the highest one is used; ``"max"`` is bfloat16.
            context: Tokens at which a budget of total bytes must hold with one tier; the
                model's longest by default.
            calibration: Codebooks or a file of them; if None, those that ``keep_calibration``
                kept for this model, or else fitted on the prompt.
            options: Settings that rarely change.

        Raises:
            UnsupportedModelError: The model cannot be served; the message says why.
            ValueError: The budget is infeasible, or the calibration or policy belongs to
                another model.
        """
        options = options or CacheOptions()
        layout = describe_model(model)
        if calibration is None and options.finds_calibration:
            calibration = find_calibration(
                _model_key(model, layout), geometry=layout.geometry, ropes=layout.ropes
            )
        backend = get_backend(options.backend, layout.device)
        order = backend.page_order
        config = _plan_config(layout, budget, retention, tiers, context, options, order)
        config = _expect_copies(model, config, retention)
        engine = _make_engine(model, config, calibration, backend)
        return cls(model, engine, cuda_graphs=options.cuda_graphs, steps_ahead=options.steps_ahead)

    @property
    def config(self) -> CacheConfig:
        """Tiers, budget and sizes in use."""
        return self.engine.config

    @property
    def budget(self) -> ByteBudget | None:
        """The byte budget it was made for; None if tiers were given."""
        return self.engine.config.budget

    @property
    def backend_name(self) -> str:
        """What runs decode attention."""
        return self.engine.backend_name

    @property
    def residency(self) -> str:
        """``"dense"`` until the cache is coded, then ``"uniform"`` or ``"retention"``."""
        return "dense" if self.engine.plan is None else self.engine.plan.kind

    @property
    def tier(self) -> TierSpec | None:
        """Tier at which pages seal; None while the budget has not chosen it."""
        config, plan = self.engine.config, self.engine.plan
        if plan is not None:
            return plan.spec
        return None if config.tier is None else config.tiers[config.tier]

    @property
    def calibration(self) -> Calibration | None:
        """The codebooks; None until the cache has them."""
        return self.engine.calibration

    def keep_calibration(self) -> Path:
        """Keep the codebooks for later caches of the same model, in the user's cache folder.

        ``SPHKV_CACHE`` names another folder. Caches made without a calibration find it there.

        Raises:
            ValueError: The cache has no codebooks yet, or outlived its model.
        """
        if self.calibration is None:
            raise ValueError("the cache has no calibration yet: it is fitted on the first prompt")
        model = self._model()
        if model is None:
            raise ValueError("the model of the cache is gone")
        return keep_calibration(self.calibration, _model_key(model, self._layout))

    @property
    def holds_from(self) -> int | None:
        """Shortest length from which on the budget is a ceiling; None without a budget."""
        return self.engine.ceiling.holds_from

    def ledger(self) -> ByteLedger:
        """Resident bytes of the whole batch, by kind; the controller's notes are tags."""
        return self.engine.ledger()

    def describe(self) -> MethodRecord:
        """What is in use, for a record: residency, setting, share of states by tier."""
        return self.engine.describe()

    def __repr__(self) -> str:
        """Residency, budget and how much it holds."""
        tier = "" if self.tier is None else f", tier={self.tier.name!r}"
        return (
            f"SphericalCache({self.residency}{tier}, budget={str(self.budget)!r}, "
            f"tokens={self.engine.num_tokens}, bytes={self.ledger().total})"
        )

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachePass:
        """Called by the hook on the decoder before each forward pass that uses this cache."""
        self._check_inference()
        captured = self._captured
        guessed = None if captured is None else captured.ask(kwargs)
        step = read_step(args, kwargs, self.engine, also=guessed)
        if captured is not None:
            captured.tell(guessed)
            if not captured.expect(step, args, kwargs):
                captured = None
        self.engine.begin(step)
        return CachePass(self.engine, captured=captured, on_end=self._expect_logits)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer; see ``CacheEngine.update``."""
        self._check_attached()
        return self.engine.update(layer_idx, key_states, value_states)

    def _expect_logits(self) -> None:
        """A pass of this cache has ended: the next logits are its own."""
        self._has_new_logits = True

    def see_logits(self, logits: Tensor) -> None:
        """Tell the gates how close the decisions after a pass of this cache are."""
        if self._has_new_logits:
            self._has_new_logits = False
            self.engine.see_logits(logits)

    def see_output(self, output: Any, *, of: Any) -> None:
        """What the model gave after a pass of the cache ``of``; if it is this one, go on."""
        logits = getattr(output, "logits", None)
        if of is not self or self._captured is None:
            return
        if isinstance(logits, Tensor) and logits.dim() == 3:
            self._captured.guess(logits)

    def detach(self) -> None:
        """Let go of the model; the last cache to do so gives it back as it was."""
        if self._captured is not None:
            self._captured.forget()
        super().detach()
        if self._unwatch is not None:
            self._unwatch()

    @property
    def length(self) -> int:
        """Places of the padded batch, as mask and positions count them."""
        return self.engine.length

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; -1 while the cache is empty."""
        return self.engine.batch_size or -1

    def _crop_to(self, length: int) -> None:
        self.engine.crop(length)

    def reset(self) -> None:
        """Forget all tokens; the calibration stays."""
        self.engine.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``i`` a copy of row ``beam_idx[i]``; pages are shared."""
        self.engine.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        index = torch.arange(self.engine.batch_size).repeat_interleave(repeats)
        self.engine.select_rows(index)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.engine.select_rows(indices)

    def fork(self) -> SphericalCache:
        """A cache of its own with the same tokens; coded pages are shared, not copied."""
        model = self._attached_model()
        return SphericalCache(
            model,
            self.engine.fork(),
            cuda_graphs=self._has_graphs,
            steps_ahead=self._has_steps_ahead,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SphericalCache:
        """As ``fork``: what reusing a prompt's cache for several continuations needs."""
        return self.fork()

    def save(self, folder: Path | str) -> None:
        """Write the cache to a folder: pages, tails, notes, calibration and settings."""
        save_engine(self.engine, Path(folder))

    @classmethod
    def load(
        cls, folder: Path | str, model: PreTrainedModel, *, backend: str = "auto"
    ) -> SphericalCache:
        """Read a cache that ``save`` wrote, for the same model.

        Raises:
            CacheFileError: The folder is damaged or belongs to another model.
        """
        layout = describe_model(model)
        config = read_config(
            Path(folder), layout.geometry, layout.ropes, layout.windows, device=str(layout.device)
        )
        engine = _make_engine(model, config, None, get_backend(backend, layout.device))
        load_engine(engine, Path(folder))
        return cls(model, engine)

    def _attached_model(self) -> PreTrainedModel:
        model = self._model()
        self._check_attached()
        assert model is not None
        return model


def _plan_config(
    layout: ModelLayout,
    budget: str | int | ByteBudget | None,
    retention: bool | RetentionOptions | None,
    tiers: Tiers | None,
    context: int | None,
    options: CacheOptions,
    order: PageOrder | None,
) -> CacheConfig:
    """From what a user asks for to a config; raises where the parts exclude each other."""
    table = parse_tiers(tiers, layout.geometry.head_dim)
    is_forced = retention is True or isinstance(retention, RetentionOptions)
    parsed = None
    if budget is not None or tiers is None:
        parsed = ByteBudget.parse(DEFAULT_BUDGET if budget is None else budget)
    if is_forced and parsed is None:
        raise ValueError("retention decides under a budget: pass one")
    control = None
    # behind sliding windows alone there is nothing to decide
    has_choice = retention is None and tiers is None and None in layout.windows
    if is_forced or has_choice:
        asked = retention if isinstance(retention, RetentionOptions) else RetentionOptions()
        assert parsed is not None
        own = table if tiers is not None else None
        control = _retention_config(layout, parsed, asked, own, order)
    return CacheConfig(
        layout.geometry,
        layout.ropes,
        layout.windows,
        table,
        None if parsed is not None else _highest(table),
        budget=parsed,
        retention=control,
        is_retention_forced=is_forced,
        context=context or layout.max_tokens,
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        min_calibration_tokens=options.min_calibration_tokens,
        calibration=options.calibration,
        device=str(layout.device),
    )


def _retention_config(
    layout: ModelLayout,
    budget: ByteBudget,
    asked: RetentionOptions,
    table: TierTable | None,
    order: PageOrder | None,
) -> RetentionConfig:
    policy = asked.policy
    if isinstance(policy, Path | str):
        policy = load_policy(Path(policy))
    tiers = retention_tiers(layout.geometry.head_dim, asked.page_tokens, table, order=order)
    seal = asked.seal_tier or choose_seal_tier(tiers, budget, layout.geometry, order=order)
    has_fast_pages, shares = is_fast(tiers, order), refresh_shares(tiers, order)
    if asked.refresh_share is not None:
        shares = asked.refresh_share, asked.refresh_share
    larger = None if asked.page_tokens else long_tiers(tiers, order, layout.geometry.head_dim)
    return RetentionConfig(
        tiers,
        seal,
        larger,
        policy=policy or RetentionPolicy(),
        options=ControlOptions(score=asked.score, may_be_dense=not has_fast_pages),
        protection=ProtectionRule(spans=tuple(asked.protect)),
        segments=SegmentSpans(tuple(asked.retrieved)),
        gate=asked.gate,
        refresh_share=shares[0],
        long_refresh_share=shares[1],
        demotes=not has_fast_pages if asked.demotes is None else asked.demotes,
    )


def _expect_copies(
    model: PreTrainedModel, config: CacheConfig, retention: bool | RetentionOptions | None
) -> CacheConfig:
    """The config, knowing which heads copy, if the controller may decide without a policy."""
    asked = retention if isinstance(retention, RetentionOptions) else RetentionOptions()
    if config.retention is None or asked.policy is not None or asked.copying == 0:
        return config
    assert config.budget is not None
    # a total is spent by long prompts, which then fall to the controller
    if not config.is_retention_forced and config.budget.kind != "total":
        plan = choose_residency(config, _SHORT_TOKENS)
        if plan is not None and not plan.is_retention:
            return config
    policy = copying_policy(model, asked.copying)
    return replace(config, retention=replace(config.retention, policy=policy))


def _make_engine(
    model: PreTrainedModel,
    config: CacheConfig,
    calibration: Calibration | Path | str | None,
    backend: DecodeBackend,
) -> CacheEngine:
    if isinstance(calibration, Path | str):
        calibration = load_calibration(calibration, geometry=config.geometry, ropes=config.ropes)
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return CacheEngine(
        config,
        calibration=calibration,
        backend=backend,
        model_id=Path(name).name,
    )


def _model_key(model: PreTrainedModel, layout: ModelLayout) -> str:
    """Names a model by its shape and a sample of what makes its keys, wherever it comes from."""
    where = ("dtype", "torch_dtype", "transformers_version")
    about = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in where and not name.startswith("_")
    }
    weights = (weight for module in layout.attentions for weight in module.parameters())
    return model_key(json.dumps(about, sort_keys=True, default=str), weights)


def _highest(table: TierTable) -> str:
    """Name of the highest coded tier, or of the dense one where there is none."""
    coded = [tier.name for tier in table if tier.is_coded]
    return coded[-1] if coded else table[table.dense_id].name


def _watch_logits(
    cache: SphericalCache, model: PreTrainedModel
) -> weakref.finalize[[], SphericalCache]:
    """Show a cache what the language-model head says, for as long as the cache lives."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head, whose margins a gate needs"
        )
    watcher = weakref.ref(cache)

    def look(_: torch.nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
        if (watching := watcher()) is not None:
            watching.see_logits(logits)

    return _remove_with(cache, head.register_forward_hook(look))


def _watch_output(
    cache: SphericalCache, model: PreTrainedModel
) -> weakref.finalize[[], SphericalCache]:
    """Show a cache what its model gives after each of its passes, for as long as it lives."""
    watcher = weakref.ref(cache)

    def look(_: torch.nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (watching := watcher()) is not None:
            watching.see_output(output, of=kwargs.get("past_key_values"))

    return _remove_with(cache, model.register_forward_hook(look, with_kwargs=True))


def _remove_with(
    cache: SphericalCache, handle: torch.utils.hooks.RemovableHandle
) -> weakref.finalize[[], SphericalCache]:
    """Remove a hook when its cache is gone, or when the result is called."""
    release = weakref.finalize(cache, handle.remove)
    release.atexit = False
    return release
