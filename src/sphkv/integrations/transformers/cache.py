# SPDX-License-Identifier: Apache-2.0
"""``SphericalCache``: the ``past_key_values`` of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.attention.api import get_backend
from sphkv.cache.engine import CacheEngine
from sphkv.cache.files import load_engine, read_config, save_engine
from sphkv.cache.plan import (
    DEFAULT_CONTEXT,
    PROMPT_CALIBRATION,
    CacheConfig,
    holds_from,
    parse_tiers,
    plan_cache,
)
from sphkv.codec.calibration import Calibration, CalibrationOptions
from sphkv.codec.calibration_file import load_calibration
from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import TierSpec, TierTable
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attached import AttachedCache
from sphkv.integrations.transformers.forward import CachePass, read_step
from sphkv.store.ledger import ByteLedger

DEFAULT_BUDGET = "25%"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a cache that rarely change.

    Attributes:
        sink_tokens: First tokens that stay dense.
        recent_tokens: Newest tokens that stay dense.
        min_calibration_tokens: Tokens seen before the cache calibrates itself; until then it
            is dense.
        calibration: How it does.
        backend: What runs decode attention, see ``sphkv.attention.api``.
    """

    sink_tokens: int = 4
    recent_tokens: int = 32
    min_calibration_tokens: int = 512
    calibration: CalibrationOptions = field(default_factory=lambda: PROMPT_CALIBRATION)
    backend: str = "auto"


class SphericalCache(AttachedCache):
    """A KV cache of packed angle codes, made by ``for_model`` and given to ``generate``.

    The first prompt is attended to densely, then coded; decoding reads the codes. Every method
    of transformers' ``Cache`` that makes sense works: ``crop``, ``reset``, ``reorder_cache``,
    ``batch_repeat_interleave``, ``batch_select_indices``.

    Attributes:
        engine: The cache itself, free of transformers.
        budget: The byte budget it was made for; None if tiers were given.
    """

    def __init__(
        self, model: PreTrainedModel, engine: CacheEngine, *, budget: ByteBudget | None = None
    ) -> None:
        """Attach an engine to a model; users call ``for_model``."""
        super().__init__(model, describe_model(model))
        self.engine = engine
        self.budget = budget

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        budget: str | int | ByteBudget | None = None,
        *,
        tiers: TierTable | TierSpec | str | Sequence[TierSpec | str] | None = None,
        context: int | None = None,
        calibration: Calibration | Path | str | None = None,
        options: CacheOptions | None = None,
    ) -> SphericalCache:
        """Make a cache for a model and route the model's attention through it.

        Args:
            model: A causal language model. Its attention implementation is switched to
                ``"sphkv"`` until ``detach``; without one of these caches it computes as before.
            budget: Ceiling of one sequence: ``"25%"`` of a dense bfloat16 cache (the default),
                ``"512B/token"``, ``"64MiB"`` or whole bytes. The highest tier that fits is
                taken, with sinks, recent tokens, page headers, tables and slack charged.
            tiers: Tiers to choose from: a table, tiers, or names such as ``"k2v3"``. Without a
                budget the highest one is used; ``"max"`` is bfloat16.
            context: Tokens at which the budget must hold; the model's longest by default.
            calibration: Codebooks or a file of them; fitted on the prompt if None.
            options: Settings that rarely change.

        Raises:
            UnsupportedModelError: The model cannot be served; the message says why.
            ValueError: The budget is infeasible (the message says how many bytes are missing)
                or the calibration belongs to another model.
        """
        options = options or CacheOptions()
        layout = describe_model(model)
        table = parse_tiers(tiers, layout.geometry.head_dim)
        config = CacheConfig(
            layout.geometry,
            layout.ropes,
            layout.windows,
            table,
            _highest(table),
            sink_tokens=options.sink_tokens,
            recent_tokens=options.recent_tokens,
            min_calibration_tokens=options.min_calibration_tokens,
            calibration=options.calibration,
            device=str(layout.device),
        )
        parsed = None
        if budget is not None or tiers is None:
            parsed = ByteBudget.parse(DEFAULT_BUDGET if budget is None else budget)
            config = plan_cache(config, parsed, context or layout.max_tokens or DEFAULT_CONTEXT)
        engine = _make_engine(model, config, calibration, options.backend)
        return cls(model, engine, budget=parsed)

    @property
    def config(self) -> CacheConfig:
        """Tiers and sizes in use."""
        return self.engine.config

    @property
    def backend_name(self) -> str:
        """What runs decode attention."""
        return self.engine.backend_name

    @property
    def tier(self) -> TierSpec:
        """Tier of sealed pages."""
        return self.engine.config.spec

    @property
    def calibration(self) -> Calibration | None:
        """The codebooks; None until the cache has them."""
        return self.engine.calibration

    @property
    def holds_from(self) -> int | None:
        """Shortest context from which on a share or per-token budget holds; else None."""
        if self.budget is None or self.budget.kind == "total":
            return None
        return holds_from(self.budget, self.config)

    def ledger(self) -> ByteLedger:
        """Resident bytes of the whole batch, by kind."""
        return self.engine.ledger()

    def __repr__(self) -> str:
        """Tier, budget and how much it holds."""
        phase = "coded" if self.engine.is_coded else "dense"
        return (
            f"SphericalCache(tier={self.tier.name!r}, budget={str(self.budget)!r}, "
            f"tokens={self.engine.num_tokens}, {phase}, bytes={self.ledger().total})"
        )

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachePass:
        """Called by the hook on the decoder before each forward pass that uses this cache."""
        self._check_inference()
        self.engine.begin(read_step(args, kwargs, self.engine))
        return CachePass(self.engine)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer; see ``CacheEngine.update``."""
        self._check_attached()
        return self.engine.update(layer_idx, key_states, value_states)

    @property
    def length(self) -> int:
        """Slots of the padded batch, as mask and positions count them."""
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
        return SphericalCache(self._attached_model(), self.engine.fork(), budget=self.budget)

    def __deepcopy__(self, memo: dict[int, Any]) -> SphericalCache:
        """As ``fork``: what reusing a prompt's cache for several continuations needs."""
        return self.fork()

    def save(self, folder: Path | str) -> None:
        """Write the cache to a folder: pages, tails, calibration and settings."""
        save_engine(self.engine, Path(folder), budget=self.budget)

    @classmethod
    def load(
        cls, folder: Path | str, model: PreTrainedModel, *, backend: str = "auto"
    ) -> SphericalCache:
        """Read a cache that ``save`` wrote, for the same model.

        Raises:
            CacheFileError: The folder is damaged or belongs to another model.
        """
        layout = describe_model(model)
        device = str(layout.device)
        config, budget = read_config(
            Path(folder), layout.geometry, layout.ropes, layout.windows, device=device
        )
        engine = _make_engine(model, config, None, backend)
        load_engine(engine, Path(folder))
        return cls(model, engine, budget=budget)

    def _attached_model(self) -> PreTrainedModel:
        model = self._model()
        self._check_attached()
        assert model is not None
        return model


def _make_engine(
    model: PreTrainedModel,
    config: CacheConfig,
    calibration: Calibration | Path | str | None,
    backend: str,
) -> CacheEngine:
    if isinstance(calibration, Path | str):
        calibration = load_calibration(calibration, geometry=config.geometry, ropes=config.ropes)
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return CacheEngine(
        config,
        calibration=calibration,
        backend=get_backend(backend, config.device),
        model_id=Path(name).name,
    )


def _highest(table: TierTable) -> str:
    """Name of the highest coded tier, or of the dense one where there is none."""
    coded = [tier.name for tier in table if tier.is_coded]
    return coded[-1] if coded else table[table.dense_id].name
