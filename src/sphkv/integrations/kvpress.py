# SPDX-License-Identifier: Apache-2.0
"""Caches by others, run by their own code beside ours: kvpress's presses, transformers' quantised.

kvpress is no dependency: it pins a transformers older than ours, because newer ones no longer hand
``cache_position`` to attention layers, which its hooks read. Given that argument explicitly it runs
unchanged, so it is installed with ``pip install --no-deps kvpress``. It is imported on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sphkv.core.budget import ByteBudget
from sphkv.integrations.transformers.architecture import model_geometry
from sphkv.integrations.transformers.attachment import ATTENTION_NAME

PRESSES = {
    "snapkv": "SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
    "h2o": "ObservedAttentionPress",
    "pyramidkv": "PyramidKVPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "lagkv": "LagKVPress",
    "kvzip": "KVzipPress",
    "random": "RandomPress",
    "adakv-snapkv": "SnapKVPress",
    "adakv-expected_attention": "ExpectedAttentionPress",
}
"""kvpress's methods by the names we call them."""

_PRESS, _QUANTIZED = "kvpress:", "quantized:"
_ADAPTIVE = "adakv-"
# its score is a sum of attention weights, which only the plain implementation returns
_NEEDS_WEIGHTS = "h2o"
# its layers differ in length, which a mask of several queries cannot have
_SINGLE_STEPS = "pyramidkv"
_BACKENDS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
_GROUP, _RESIDUAL = 64, 128
_DENSE_BYTES = 2


class OutsideBytes(TypedDict):
    """Bytes that a method of others would take in bfloat16, counted from the states it keeps.

    Attributes:
        stored: After the prompt.
        peak: At the last token.
        limit: What the budget allows there.
        dense: Of a dense cache there.
        setting: Kept states or bits.
        realisation: ``kernel-realized`` if the cache is really as small, else ``format-only``.
    """

    stored: int
    peak: int
    limit: int
    dense: int
    setting: str
    realisation: str


class OutsideTimes(TypedDict):
    """Seconds; see the records of suites."""

    prefill_s: float
    store_s: float
    question_s: float
    decode_s: float


class OutsideAnswer(TypedDict):
    """What a method of others said.

    Attributes:
        text: The answer.
        num_tokens: Its tokens.
        bytes: What it kept.
        times: Seconds.
    """

    text: str
    num_tokens: int
    bytes: OutsideBytes
    times: OutsideTimes


def make_press(name: str, ratio: float) -> Any:
    """A press of kvpress.

    Args:
        name: A key of ``PRESSES``.
        ratio: Share of the states that is dropped.

    Raises:
        ImportError: kvpress is not installed.
    """
    package = _load_kvpress()
    press = getattr(package, PRESSES[name])(compression_ratio=ratio)
    return package.AdaKVPress(press) if name.startswith(_ADAPTIVE) else press


@torch.no_grad()
def press_scores(
    model: PreTrainedModel,
    name: str,
    ids: Sequence[int],
    share: float,
    settings: Mapping[str, Any],
) -> list[Tensor]:
    """Scores by which a press ranks the states of a prompt.

    Args:
        model: The model.
        name: A key of ``PRESSES`` whose press scores states one by one.
        ids: Tokens of the prompt.
        share: Share of the states it is to keep, which some scores depend on.
        settings: Other settings of the press.

    Returns:
        ``[kv_heads, tokens]`` float32 of every layer, on the CPU.
    """
    press = make_press(name, 1.0 - share)
    for field, value in settings.items():
        setattr(press, field, value)
    found: list[Tensor] = []
    score = press.score

    def listen(*args: Any, **kwargs: Any) -> Tensor:
        scores: Tensor = score(*args, **kwargs)
        found.append(scores[0].float().cpu())
        return scores

    press.score = listen
    outside = OutsideCaches(model, None)
    with outside.attention_for(name), press(model):
        outside.read(DynamicCache(), ids)
    return found


@functools.cache
def _load_kvpress() -> Any:
    """The package. Its import wraps every attention function; ours is put back as it was."""
    ours = dict(ALL_ATTENTION_FUNCTIONS).get(ATTENTION_NAME)
    try:
        package = importlib.import_module("kvpress")
    except ImportError as error:
        raise ImportError(
            "methods of kvpress need it: pip install --no-deps kvpress==0.5.5 'cachetools<6' "
            f"accelerate fire termcolor peft ({error})"
        ) from error
    if ours is not None:
        # by index, as kvpress does: such entries stand before registered ones
        ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = ours
    return package


def parse_quantized(name: str) -> tuple[str, int]:
    """Backend and bits of transformers' quantised cache: ``quanto-4``.

    Raises:
        ValueError: There is no such backend, or not with so many bits.
    """
    backend, _, bits = name.partition("-")
    if backend not in _BACKENDS or not bits.isdigit() or int(bits) not in _BACKENDS[backend]:
        known = [f"{key}-{count}" for key, counts in _BACKENDS.items() for count in counts]
        raise ValueError(f"no quantised cache {name!r}; known: {', '.join(known)}")
    return backend, int(bits)


class OutsideCaches:
    """Answers with caches by others inside one model, greedily, one sequence at a time."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        """Take the model; nothing is changed between answers."""
        self._model: Any = model
        self._tokenizer = tokenizer
        self._geometry = model_geometry(model)

    @torch.no_grad()
    def answer(
        self,
        method: str,
        budget: str,
        context: Sequence[int],
        question: Sequence[int],
        *,
        max_new_tokens: int,
        is_done: Callable[[str], bool],
    ) -> OutsideAnswer:
        """Store the context, read the question, answer.

        Question and answer stay dense, as these methods leave them; a press therefore keeps so
        many states of the context that the budget holds at the last token.

        Args:
            method: ``kvpress:NAME`` or ``quantized:BACKEND-BITS``.
            budget: Byte budget at the last token.
            context: Tokens that are compressed.
            question: Tokens after them; may be empty.
            max_new_tokens: Most tokens of the answer.
            is_done: Told the answer so far; true ends it.

        Raises:
            ValueError: The budget leaves no states of the context.
        """
        after = len(question) + max_new_tokens
        cache, name, ratio = self._prepare(method, budget, len(context), after)
        began = time.perf_counter()
        with self._pressed(name, ratio):
            last = self._forward(cache, context, 0)
        stored, stored_at = self._states(cache), time.perf_counter()
        self._check_peak(method, budget, cache, len(context), after)
        place = len(context)
        steps = [[token] for token in question] if name == _SINGLE_STEPS else [list(question)]
        for part in steps if question else ():
            last = self._forward(cache, part, place)
            place += len(part)
        asked_at = time.perf_counter()
        ids = self._greedy(cache, last, place, max_new_tokens, is_done)
        total = place + len(ids)
        return {
            "text": self._tokenizer.decode(ids, skip_special_tokens=True),
            "num_tokens": len(ids),
            "bytes": {
                "stored": self._bytes(stored, method),
                "peak": self._bytes(self._states(cache), method),
                "limit": ByteBudget.parse(budget).resolve(self._geometry, total),
                "dense": self._geometry.dense_bytes_per_token * total,
                "setting": method if name is None else f"{name}, {1 - ratio:.3f} kept",
                "realisation": "format-only" if _is_rebuilt(name) else "kernel-realized",
            },
            "times": {
                "prefill_s": 0.0,
                "store_s": stored_at - began,
                "question_s": asked_at - stored_at,
                "decode_s": time.perf_counter() - asked_at,
            },
        }

    def _prepare(
        self, method: str, budget: str, count: int, after: int
    ) -> tuple[Any, str | None, float]:
        """An empty cache, and the press and share dropped where there is one."""
        if method.startswith(_QUANTIZED):
            backend, bits = parse_quantized(method.removeprefix(_QUANTIZED))
            config = self._model.config
            sizes = {"q_group_size": _GROUP, "residual_length": _RESIDUAL}
            return QuantizedCache(backend, config, nbits=bits, **sizes), None, 0.0
        allowed = ByteBudget.parse(budget).resolve(self._geometry, count + after)
        kept = allowed // self._geometry.dense_bytes_per_token - after
        if kept < 1:
            raise ValueError(
                f"{budget} of {count + after} tokens is less than the {after} that stay dense"
            )
        return DynamicCache(), method.removeprefix(_PRESS), max(0.0, 1.0 - kept / count)

    @contextlib.contextmanager
    def _pressed(self, name: str | None, ratio: float) -> Iterator[None]:
        if name is None:
            yield
            return
        with self.attention_for(name), make_press(name, ratio)(self._model):
            yield

    @contextlib.contextmanager
    def attention_for(self, name: str) -> Iterator[None]:
        """Within the context the model returns attention weights, if a press needs them."""
        if name != _NEEDS_WEIGHTS:
            yield
            return
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self._model.set_attn_implementation(before)

    def read(self, cache: Any, ids: Sequence[int]) -> None:
        """Fill an empty cache with a prompt."""
        self._forward(cache, ids, 0)

    def _forward(self, cache: Any, ids: Sequence[int], begin: int) -> Tensor:
        """Logits ``[vocabulary]`` after the last token of a pass."""
        device = self._model.device
        places = torch.arange(begin, begin + len(ids), device=device)
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=places[None],
            cache_position=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _greedy(
        self,
        cache: Any,
        logits: Tensor,
        place: int,
        limit: int,
        is_done: Callable[[str], bool],
    ) -> list[int]:
        end, ids = self._tokenizer.eos_token_id, list[int]()
        while len(ids) < limit:
            token = int(logits.argmax())
            if token == end:
                break
            ids.append(token)
            if is_done(self._tokenizer.decode(ids, skip_special_tokens=True)):
                break
            logits = self._forward(cache, [token], place)
            place += 1
        return ids

    def _states(self, cache: Any) -> tuple[int, int]:
        """States that are kept in all layers and heads: coded ones and dense ones."""
        coded = dense = 0
        heads = self._geometry.num_kv_heads
        for layer, module in zip(cache.layers, self._model.base_model.layers, strict=True):
            keys = layer.keys
            held = keys.shape[1] * keys.shape[2] if keys.dim() == 4 else 0
            if isinstance(cache, QuantizedCache):
                dense += held
                coded += heads * layer.cumulative_length - held
                continue
            masked = getattr(module.self_attn, "masked_key_indices", None)
            dense += held - (0 if masked is None else len(masked[0]))
        return coded, dense

    def _bytes(self, states: tuple[int, int], method: str) -> int:
        coded, dense = states
        each = 2 * self._geometry.head_dim
        total = dense * each * _DENSE_BYTES
        if method.startswith(_QUANTIZED):
            bits = parse_quantized(method.removeprefix(_QUANTIZED))[1]
            # a scale and a zero point of two bytes each per group
            total += coded * each * bits // 8 + coded * each // _GROUP * 4
        return total

    def _check_peak(self, method: str, budget: str, cache: Any, count: int, after: int) -> None:
        """A quantised cache has one size; refuse a budget that is smaller."""
        if not method.startswith(_QUANTIZED):
            return
        coded, dense = self._states(cache)
        heads = self._geometry.num_kv_heads * self._geometry.num_layers
        most = self._bytes((coded, dense + min(after, _RESIDUAL) * heads), method)
        limit = ByteBudget.parse(budget).resolve(self._geometry, count + after)
        if most > limit:
            raise ValueError(f"{method} takes {most} bytes, {budget} allows {limit}")


def _is_rebuilt(name: str | None) -> bool:
    """Whether decode reads more than is counted: whole states rebuilt, or masked and not freed."""
    return name is None or name.startswith(_ADAPTIVE) or name == "kvzip"
