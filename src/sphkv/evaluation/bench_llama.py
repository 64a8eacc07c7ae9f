# SPDX-License-Identifier: Apache-2.0
"""What a longer context costs a whole model step: a coded cache against llama.cpp."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sphkv.evaluation.environment import describe_environment
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import SphericalCache

CACHE_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's numbers of the cache types compared."""

_CHUNK_TOKENS = 512
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class LlamaBenchConfig:
    """What to time.

    Attributes:
        gguf: Model file that both sides read.
        contexts: Tokens in the cache, rising; at least two.
        tier: Tier of the coded cache.
        threads: Threads of both sides.
        steps: Timed decode steps at each context.
    """

    gguf: str
    contexts: tuple[int, ...] = (1024, 2048, 4096, 6144, 8064)
    tier: str = "k2v3"
    threads: int = 2
    steps: int = 12

    def __post_init__(self) -> None:
        """Reject what cannot be timed."""
        if not Path(self.gguf).is_file():
            raise ValueError(f"gguf must be a model file, got {self.gguf!r}")
        gaps = [late - early for early, late in zip(self.contexts, self.contexts[1:], strict=False)]
        if not gaps or min(gaps) <= self.steps + _WARM_UP_STEPS or self.contexts[0] < 1:
            raise ValueError(
                f"contexts must be two or more and rise by more than the timed steps, "
                f"got {list(self.contexts)}"
            )
        for name in ("threads", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


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


def _time_steps(feed: Callable[[list[int]], Any], ids: list[int], config: LlamaBenchConfig) -> Any:
    """Median milliseconds of a step at each context; ``feed`` appends tokens to the cache."""
    ms, at = [], 0
    for context in config.contexts:
        while at < context:
            chunk = ids[at : min(context, at + _CHUNK_TOKENS)]
            feed(chunk)
            at += len(chunk)
        taken = []
        for step in range(_WARM_UP_STEPS + config.steps):
            began = time.perf_counter()
            feed([ids[at]])
            at += 1
            if step >= _WARM_UP_STEPS:
                taken.append(1e3 * (time.perf_counter() - began))
        ms.append(statistics.median(taken))
    return ms


def _llama_cpp(config: LlamaBenchConfig, ids: list[int], cache_type: str) -> list[float]:
    model = import_llama_cpp().Llama(
        model_path=config.gguf,
        n_ctx=len(ids),
        n_batch=_CHUNK_TOKENS,
        n_threads=config.threads,
        n_threads_batch=config.threads,
        flash_attn=True,
        type_k=CACHE_TYPES[cache_type],
        type_v=CACHE_TYPES[cache_type],
        verbose=False,
    )
    try:
        return list(_time_steps(model.eval, ids, config))
    finally:
        model.close()


def _coded(config: LlamaBenchConfig, ids: list[int]) -> list[float]:
    model, _ = load_model(config.gguf)
    cache = SphericalCache.for_model(model, tiers=config.tier)

    @torch.inference_mode()
    def feed(tokens: list[int]) -> Any:
        return model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)

    return list(_time_steps(feed, ids, config))


def bench_llama(config: LlamaBenchConfig, *, command: str = "") -> dict[str, Any]:
    """One row per engine, and how many times steeper the cheapest llama.cpp cache is than ours."""
    llama_cpp = import_llama_cpp()
    generator = torch.Generator().manual_seed(3)
    num_ids = config.contexts[-1] + config.steps + _WARM_UP_STEPS
    ids = torch.randint(100, 40_000, (num_ids,), generator=generator).tolist()
    previous = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        timed = {f"sphkv {config.tier}": _coded(config, ids)}
    finally:
        torch.set_num_threads(previous)
    for cache_type in CACHE_TYPES:
        timed[f"llama.cpp {cache_type}"] = _llama_cpp(config, ids, cache_type)
    slopes = {engine: slope_ms_per_1k(config.contexts, ms) for engine, ms in timed.items()}
    ours, *theirs = slopes.values()
    return {
        "rows": [
            {
                "engine": engine,
                "contexts": list(config.contexts),
                "ms": ms,
                "ms_per_1k_tokens": slopes[engine],
            }
            for engine, ms in timed.items()
        ],
        "lowest_llama_over_ours": min(theirs) / ours,
        "llama_cpp": getattr(llama_cpp, "__version__", None),
        "environment": {
            **describe_environment(),
            "num_threads": config.threads,
            "command": command,
        },
    }
