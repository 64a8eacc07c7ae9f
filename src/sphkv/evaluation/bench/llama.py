# SPDX-License-Identifier: Apache-2.0
"""What a longer context costs a whole model step: coded and dense caches against llama.cpp."""

from __future__ import annotations

import copy
import ctypes
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from sphkv.cache.config import PROMPT_CALIBRATION
from sphkv.codec.calibration import Calibration
from sphkv.evaluation.environment import describe_environment
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import SphericalCache
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.stepping import encode_dense_cache, prefill, score

CACHE_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's numbers of the cache types compared."""

_PIECE_TOKENS = 512
_CALIBRATION_TOKENS = 1024
# Engines take turns. The first step of a turn is not timed: threads of the engine before may
# still be awake.
_TURN_STEPS = 4


@dataclass(frozen=True, slots=True)
class LlamaBenchConfig:
    """What to time.

    Attributes:
        gguf: Model file that both sides read.
        contexts: Tokens in the cache, rising; at least two.
        tier: Tier of the coded cache.
        threads: Threads of both sides.
        rounds: Turns of every engine at each context, of three timed steps each.
    """

    gguf: str
    contexts: tuple[int, ...] = (1024, 4096, 8000)
    tier: str = "k2v3"
    threads: int = 2
    rounds: int = 5

    def __post_init__(self) -> None:
        """Reject what cannot be timed."""
        if not Path(self.gguf).is_file():
            raise ValueError(f"gguf must be a model file, got {self.gguf!r}")
        for name in ("threads", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        gaps = [late - early for early, late in zip(self.contexts, self.contexts[1:], strict=False)]
        if not gaps or min(gaps) <= self.num_steps or self.contexts[0] < 1:
            raise ValueError(
                f"contexts must be two or more and rise by more than the timed steps, "
                f"got {list(self.contexts)}"
            )

    @property
    def num_steps(self) -> int:
        """Tokens that an engine appends at each context."""
        return self.rounds * _TURN_STEPS


class Engine(Protocol):
    """A model with a cache of its own."""

    def fill(self, context: int) -> None:
        """Hold the states of this many tokens, more than before."""

    def step(self, token: int) -> None:
        """Append one token."""


def import_llama_cpp() -> Any:
    """The package ``llama_cpp``.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module("llama_cpp")
    except (ImportError, OSError) as error:
        raise ImportError(
            "the comparison needs llama-cpp-python, built from source for this processor: "
            "pip install --no-binary llama-cpp-python llama-cpp-python"
        ) from error


def slope_ms_per_1k(contexts: Sequence[int], ms: Sequence[float]) -> float:
    """Milliseconds that 1,000 more tokens of context add, by least squares."""
    middle, mean = statistics.fmean(contexts), statistics.fmean(ms)
    rise = sum((c - middle) * (t - mean) for c, t in zip(contexts, ms, strict=True))
    return 1e3 * rise / sum((c - middle) ** 2 for c in contexts)


def first_tokens(cache: Any, num_tokens: int) -> Any:
    """A copy of a dense cache that ends after this many tokens."""
    part = copy.deepcopy(cache)
    if num_tokens < cache.get_seq_length():
        part.crop(num_tokens - cache.get_seq_length())
    return part


class _LlamaCpp:
    """llama.cpp, its cache filled with copies of the states of a few hundred tokens.

    Its prefill would take minutes. A copy is moved to the positions after the last: the keys are
    turned, and what a step reads and computes is the same.
    """

    def __init__(self, config: LlamaBenchConfig, ids: list[int], cache_type: str) -> None:
        self._lib = import_llama_cpp()
        self._model = self._lib.Llama(
            model_path=config.gguf,
            n_ctx=len(ids) + _PIECE_TOKENS,
            n_batch=_PIECE_TOKENS,
            n_threads=config.threads,
            n_threads_batch=config.threads,
            flash_attn=True,
            type_k=CACHE_TYPES[cache_type],
            type_v=CACHE_TYPES[cache_type],
            verbose=False,
        )
        self._model.eval(ids[:_PIECE_TOKENS])
        context = self._model.ctx
        self._piece = (ctypes.c_uint8 * self._lib.llama_state_seq_get_size(context, 0))()
        self._lib.llama_state_seq_get_data(context, self._piece, len(self._piece), 0)

    def fill(self, context: int) -> None:
        while self._model.n_tokens < context:
            self._append_piece()
        # eval forgets what lies behind
        self._model.n_tokens = context

    def _append_piece(self) -> None:
        lib, size = self._lib, len(self._piece)
        memory = lib.llama_get_memory(self._model.ctx)
        if lib.llama_state_seq_set_data(self._model.ctx, self._piece, size, 1) != size:
            raise RuntimeError(f"llama.cpp took no states after {self._model.n_tokens} tokens")
        lib.llama_memory_seq_add(memory, 1, 0, -1, self._model.n_tokens)
        lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        lib.llama_memory_seq_rm(memory, 1, -1, -1)
        self._model.n_tokens += _PIECE_TOKENS

    def step(self, token: int) -> None:
        self._model.eval([token])


class _Dense:
    """Torch attention over a dense cache, out of one prefill of the longest context."""

    def __init__(self, model: Any, prompt: Any) -> None:
        self._model = model
        self._prompt = prompt
        self._cache: Any = None

    def fill(self, context: int) -> None:
        self._cache = first_tokens(self._prompt, context)

    def step(self, token: int) -> None:
        score(self._model, self._cache, torch.tensor([[token]]))


class _Coded:
    """The coded cache, filled from the dense one's states."""

    def __init__(self, model: Any, tier: str, calibration: Calibration, prompt: Any) -> None:
        self._model = model
        self._prompt = prompt
        self._cache = SphericalCache.for_model(model, tiers=tier, calibration=calibration)

    def fill(self, context: int) -> None:
        self._cache.reset()
        encode_dense_cache(self._cache, first_tokens(self._prompt, context))

    def step(self, token: int) -> None:
        score(self._model, self._cache, torch.tensor([[token]]))


def time_steps(
    engines: Mapping[str, Engine], ids: list[int], config: LlamaBenchConfig
) -> dict[str, list[list[float]]]:
    """Milliseconds of the steps of every engine at each context, ``[contexts][steps]``."""
    times: dict[str, list[list[float]]] = {name: [] for name in engines}
    for context in config.contexts:
        for name, engine in engines.items():
            engine.fill(context)
            times[name].append([])
        for turn in range(config.rounds):
            at = context + turn * _TURN_STEPS
            for name, engine in engines.items():
                for step in range(_TURN_STEPS):
                    began = time.perf_counter()
                    engine.step(ids[at + step])
                    if step:
                        times[name][-1].append(1e3 * (time.perf_counter() - began))
    return times


def _make_engines(config: LlamaBenchConfig, ids: list[int]) -> dict[str, Engine]:
    model, _ = load_model(config.gguf)
    prompt = torch.tensor([ids[: config.contexts[-1]]])
    calibration = calibrate_model(
        model,
        prompt[:, :_CALIBRATION_TOKENS],
        model_id=Path(config.gguf).name,
        options=PROMPT_CALIBRATION,
        source="random ids",
    )
    dense, _ = prefill(model, prompt)
    engines: dict[str, Engine] = {
        f"sphkv {config.tier}": _Coded(model, config.tier, calibration, dense),
        "torch dense": _Dense(model, dense),
    }
    for cache_type in CACHE_TYPES:
        engines[f"llama.cpp {cache_type}"] = _LlamaCpp(config, ids, cache_type)
    return engines


def bench_llama(config: LlamaBenchConfig, *, command: str = "") -> dict[str, Any]:
    """One row per engine, and how many times steeper the cheapest llama.cpp cache is than ours."""
    llama_cpp = import_llama_cpp()
    generator = torch.Generator().manual_seed(3)
    num_ids = config.contexts[-1] + config.num_steps
    ids = torch.randint(100, 40_000, (num_ids,), generator=generator).tolist()
    previous = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        times = time_steps(_make_engines(config, ids), ids, config)
    finally:
        torch.set_num_threads(previous)
    rows: list[dict[str, Any]] = []
    for engine, steps in times.items():
        median, least = [statistics.median(some) for some in steps], [min(some) for some in steps]
        rows.append(
            {
                "engine": engine,
                "contexts": list(config.contexts),
                "median_ms": median,
                "least_ms": least,
                "ms_per_1k_tokens": slope_ms_per_1k(config.contexts, median),
                "least_ms_per_1k_tokens": slope_ms_per_1k(config.contexts, least),
            }
        )
    theirs = min(r["ms_per_1k_tokens"] for r in rows if r["engine"].startswith("llama.cpp"))
    return {
        "rows": rows,
        "lowest_llama_over_ours": theirs / rows[0]["ms_per_1k_tokens"],
        "llama_cpp": getattr(llama_cpp, "__version__", None),
        "environment": {
            **describe_environment(),
            "num_threads": config.threads,
            "command": command,
        },
    }
