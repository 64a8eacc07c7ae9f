# SPDX-License-Identifier: Apache-2.0
"""What engines of ``gpu_vllm.py`` answer: text, memory, quality, load and failures."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_vllm_engines import (
    LOGPROBS,
    MODELS,
    answer,
    gap,
    random_prompts,
    same_tokens,
    text_pieces,
)


def run_text(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Greedy text with the five best logprobs of every token, and with a prefix that is found."""
    from vllm import SamplingParams

    draw = random.Random(3)
    high = MODELS[given.model]["vocab_size"]
    lengths = [5, 127, 128, 129, 300, 517, 1030, given.prompt][: given.batch]
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, high) for _ in range(length)]}
        for length in lengths
    ]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.new, ignore_eos=True, detokenize=False, logprobs=5
    )
    rounds = []
    for _ in range(2):
        found = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([answer(one.outputs[0]) for one in found])
    alone = [
        answer(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0])
        for prompt in prompts[:3]
    ]
    return {"lengths": lengths, "first": rounds[0], "again": rounds[1], "alone": alone}


def compare_text(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text of each cache beside the first one's."""
    base, rows = results[0], []
    for result in results[1:]:
        for name in ("first", "again", "alone"):
            pairs = list(zip(base["first"], result[name], strict=False))
            same = [same_tokens(a["tokens"], b["tokens"]) for a, b in pairs]
            gaps = [gap(a, b) for a, b in pairs]
            rows.append(
                {
                    "kv": result["kv"],
                    "round": name,
                    "tokens_alike": same,
                    "of": [len(a["tokens"]) for a, _ in pairs],
                    "mean_logprob_gap": [round(gap, 4) for gap in gaps],
                    "first_logprob_gap": [round(gap(a, b, 1), 4) for a, b in pairs],
                    "third_logprob_gap": [round(gap(a, b, 3), 4) for a, b in pairs],
                }
            )
    return rows


def run_stress(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Requests with shared prefixes, some cancelled; texts must be those of requests alone."""
    from vllm import SamplingParams

    engine, draw = llm.llm_engine, random.Random(1)
    high = MODELS[given.model]["vocab_size"]
    prefixes = [[draw.randrange(10, high) for _ in range(400)] for _ in range(5)]

    def prompt(at: int) -> list[int]:
        own = random.Random(at)
        tail = [own.randrange(10, high) for _ in range(own.randrange(1, 300))]
        return prefixes[at % 5][: own.choice([0, 128, 256, 400])] + tail

    def sampling(at: int) -> Any:
        count = random.Random(at).randrange(1, given.new)
        return SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=5
        )

    texts: dict[int, Any] = {}
    cancelled, ways = set(), _Ways(llm)
    free, watch = free_blocks(llm), BlockWatch(llm) if given.watch else None
    for at in range(given.requests):
        engine.add_request(f"r{at}", {"prompt_token_ids": prompt(at)}, sampling(at))
    begin = time.perf_counter()
    while engine.has_unfinished_requests() and time.perf_counter() - begin < given.seconds:
        for one in engine.step():
            ways.note_output(one)
            if one.finished:
                texts[int(one.request_id[1:])] = answer(one.outputs[0])
        ways.look()
        if watch is not None:
            watch.look()
        if draw.random() < 0.05:
            at = draw.randrange(given.requests)
            if at not in texts and at not in cancelled:
                engine.abort_request([f"r{at}"])
                cancelled.add(at)
    seconds = time.perf_counter() - begin
    lost = [at for at in range(given.requests) if at not in texts and at not in cancelled]
    everyone = range(given.requests)
    prompts = [{"prompt_token_ids": prompt(at)} for at in everyone]
    kept = {at: text for at, text in texts.items() if at not in cancelled}
    found = _ask_alone(
        llm, prompts, [sampling(at) for at in everyone], kept, given.alone, ways.of_request
    )
    return {
        "requests": given.requests,
        "finished": len(texts),
        "cancelled": len(cancelled),
        "lost": lost,
        "seconds": round(seconds, 1),
        "blocks": free,
        "blocks_free_at_end": free_blocks(llm),
        "not_numbers": sum(map(count_not_numbers, texts.values())),
        "ways": ways.summary(),
        **(watch.summary() if watch is not None else {}),
        **found,
    }


class _Ways:
    """What requests met on their way: chunks, prefixes that were found, preemptions."""

    def __init__(self, llm: Any) -> None:
        self._scheduler = scheduler_of(llm)
        self._met: dict[int, set[str]] = {}

    def note_output(self, output: Any) -> None:
        """Take note of a prefix."""
        if output.num_cached_tokens:
            self._add(output.request_id, "prefix")

    def look(self) -> None:
        """Take note of prompts that are read in part, and of requests that lost their blocks."""
        for one in self._scheduler.running:
            if 0 < one.num_computed_tokens < one.num_prompt_tokens:
                # whether its first chunk ended here or a prefix did
                self._add(one.request_id, "chunks")
        for one in self._scheduler.requests.values():
            if one.num_preemptions:
                self._add(one.request_id, "preempted")

    def _add(self, name: str, way: str) -> None:
        # vLLM adds a word of its own to a request's name
        self._met.setdefault(int(name[1:].split("-")[0]), set()).add(way)

    def of_request(self, at: int) -> str:
        """What one request met."""
        return "+".join(sorted(self._met.get(at, ()))) or "plain"

    def summary(self) -> dict[str, int]:
        """Requests that met each."""
        return dict(Counter(way for met in self._met.values() for way in met))


def _ask_alone(
    llm: Any,
    prompts: Sequence[dict[str, Any]],
    samplings: Sequence[Any],
    texts: dict[int, Any],
    count: int,
    way_of: Callable[[int], str] = lambda at: "plain",
) -> dict[str, Any]:
    """Ask some of the requests again, one by one, with no prefix to be found."""
    checked = sorted(texts)[:: max(1, len(texts) // count)]
    groups: dict[str, _Comparison] = {}
    total = _Comparison()
    for at in checked:
        llm.reset_prefix_cache()
        out = llm.generate([prompts[at]], samplings[at], use_tqdm=False)[0]
        alone = answer(out.outputs[0])
        for group in (total, groups.setdefault(way_of(at), _Comparison())):
            group.add(alone, texts[at])
    ways = {name: group.summary() for name, group in sorted(groups.items())}
    return {**total.summary(), "alone_by_way": ways}


class _Comparison:
    """Answers to the same requests, alone and among others."""

    def __init__(self) -> None:
        self._same = self._asked = 0
        self._gaps: list[float] = []
        self._noise: list[float] = []
        self._margins: list[float] = []

    def add(self, alone: dict[str, Any], beside: dict[str, Any]) -> None:
        """One request."""
        differs = same_tokens(alone["tokens"], beside["tokens"])
        self._asked += 1
        self._same += differs == len(alone["tokens"])
        self._gaps.append(gap(alone, beside))
        # of every token that had the same ones before it
        for one, other in zip(
            alone["logprobs"][: differs + 1], beside["logprobs"][: differs + 1], strict=False
        ):
            shared = [abs(one[key] - other[key]) for key in one if key in other]
            self._noise.append(max(shared, default=9.0))
        if differs < len(alone["tokens"]):
            chances, other = alone["logprobs"][differs], str(beside["tokens"][differs])
            # how much less likely the other token was: little, if rounding decided
            self._margins.append(max(chances.values()) - chances.get(other, -99.0))

    def summary(self) -> dict[str, Any]:
        """How many texts are alike, and by how much logprobs of tokens differ."""
        noise = sorted(self._noise) or [0.0]
        return {
            "asked_alone": self._asked,
            "same_text_alone": self._same,
            "largest_margin_of_a_difference": round(max(self._margins, default=0.0), 3),
            "margins": [round(margin, 3) for margin in sorted(self._margins)[-8:]],
            "mean_logprob_gap_alone": _mean(self._gaps),
            "largest_logprob_gap_alone": round(max(self._gaps, default=0.0), 4),
            "tokens_compared": len(self._noise),
            "noise_of_a_token": {
                str(share): round(noise[min(len(noise) - 1, int(share * len(noise)))], 4)
                for share in (0.5, 0.9, 0.99, 1.0)
            },
        }


def scheduler_of(llm: Any) -> Any:
    """VLLM's scheduler, of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> int:
    """Blocks that nobody holds."""
    return int(scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def run_held(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Requests that all ask at once: how many run at the same time in the memory that is given."""
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    if given.folder:
        pieces = text_pieces(llm, Path(given.data), [given.prompt] * given.requests)
        prompts = [{"prompt_token_ids": tokens} for _, tokens in pieces]
    else:
        prompts = random_prompts(given, given.requests, given.prompt, 5)
    common = {"temperature": 0.0, "max_tokens": given.new, "min_tokens": given.new}
    common |= {"ignore_eos": True, "detokenize": False, "logprobs": 5}
    samplings = [SamplingParams(**common) for _ in prompts]
    if given.request_budget:
        # every second request asks for less than the server gives
        for sampling in samplings[1::2]:
            sampling.extra_args = {"sphkv_budget_bytes": given.request_budget}
    free = free_blocks(llm)
    for at, prompt in enumerate(prompts):
        engine.add_request(f"h{at}", prompt, samplings[at])
    texts: dict[int, Any] = {}
    most: dict[str, int] = {"decoding_at_once": 0}
    preempted: dict[str, int] = {}
    begin = time.perf_counter()
    while engine.has_unfinished_requests() and time.perf_counter() - begin < given.seconds:
        for one in engine.step():
            if one.finished:
                texts[int(one.request_id[1:])] = answer(one.outputs[0])
        running = [x for x in scheduler.running if x.num_computed_tokens > x.num_prompt_tokens]
        if len(running) > most["decoding_at_once"]:
            most = {
                "decoding_at_once": len(running),
                "tokens_of_these": sum(x.num_computed_tokens for x in running),
                "blocks_in_use": free - free_blocks(llm),
            }
        preempted |= {x.request_id: x.num_preemptions for x in scheduler.requests.values()}
    seconds = time.perf_counter() - begin
    alone = _ask_alone(llm, prompts, samplings, texts, 4)
    return {
        **most,
        "requests": given.requests,
        "finished": len(texts),
        "preemptions": sum(preempted.values()),
        "seconds": round(seconds, 1),
        "blocks": free,
        "blocks_free_at_end": free_blocks(llm),
        "not_numbers": sum(map(count_not_numbers, texts.values())),
        **alone,
        "texts": [texts.get(at) for at in range(given.requests)],
    }


def compare_held(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests at once and text of each cache beside the first one's."""
    base, rows = results[0], []
    for result in results[1:]:
        pairs = [(a, b) for a, b in zip(base["texts"], result["texts"], strict=True) if a and b]
        rows.append(
            {
                "kv": result["kv"],
                "times_at_once": round(result["decoding_at_once"] / base["decoding_at_once"], 2),
                "compared": len(pairs),
                "mean_tokens_alike": _mean(
                    [same_tokens(a["tokens"], b["tokens"]) for a, b in pairs]
                ),
                "mean_logprob_gap": _mean([gap(a, b) for a, b in pairs]),
            }
        )
    return rows


def run_quality(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Logprobs of true continuations, token by token through the decode path."""
    from vllm import SamplingParams

    draw = random.Random(7)
    lengths = [draw.randint(given.prompt // 4, given.prompt) for _ in range(given.requests)]
    pieces = text_pieces(llm, Path(given.data), [length + given.new for length in lengths])
    prompts = [{"prompt_token_ids": tokens[: -given.new]} for _, tokens in pieces]
    samplings = [
        SamplingParams(
            temperature=0.0,
            max_tokens=given.new,
            detokenize=False,
            logprobs=LOGPROBS,
            trace_decode_token_ids=tokens[-given.new :],
        )
        for _, tokens in pieces
    ]
    begin = time.perf_counter()
    found = llm.generate(prompts, samplings, use_tqdm=False)
    seconds = time.perf_counter() - begin
    size = (given.requests, given.new, LOGPROBS)
    ids, logprobs = np.full(size, -1, dtype=np.int32), np.full(size, -np.inf, dtype=np.float32)
    own = np.zeros(size[:2])
    for at, (one, (_, tokens)) in enumerate(zip(found, pieces, strict=True)):
        assert list(one.outputs[0].token_ids) == tokens[-given.new :]
        for step, candidates in enumerate(one.outputs[0].logprobs):
            own[at, step] = candidates[tokens[step - given.new]].logprob
            best = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:LOGPROBS]
            ids[at, step, : len(best)] = [token for token, _ in best]
            logprobs[at, step, : len(best)] = [value.logprob for _, value in best]
    path = Path(given.work) / f"quality-{given.kv.replace(':', '-')}-{os.getpid()}.npz"
    np.savez_compressed(path, ids=ids, logprobs=logprobs, own=own)
    return {
        "requests": given.requests,
        "lengths": lengths,
        "kinds": [kind for kind, _ in pieces],
        "seconds": round(seconds, 1),
        "perplexity": round(float(np.exp(-own.mean())), 4),
        "not_numbers": int(np.isnan(logprobs).sum()),
        "file": str(path),
    }


def compare_quality(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divergence of every cache from the first one, token by token."""
    base, rows = np.load(results[0]["file"]), []
    kinds, lengths = np.array(results[0]["kinds"]), np.array(results[0]["lengths"])
    halves = lengths > np.median(lengths)
    for result in results[1:]:
        other = np.load(result["file"])
        kl = divergence(base["ids"], base["logprobs"], other["ids"], other["logprobs"])
        alike = base["ids"][..., 0] == other["ids"][..., 0]
        # what no cache can help: the first token comes from the prompt's own step
        late = kl[:, 1:]
        rows.append(
            {
                "kv": result["kv"],
                "kl_mean": round(float(kl.mean()), 5),
                "kl_median": round(float(np.median(kl)), 5),
                "kl_p99": round(float(np.quantile(kl, 0.99)), 4),
                "kl_first_token": round(float(kl[:, 0].mean()), 5),
                "kl_later_tokens": round(float(late.mean()), 5),
                "kl_standard_error": round(float(kl.mean(1).std() / len(kl) ** 0.5), 5),
                "greedy_agreement": round(float(alike.mean()), 4),
                "nats_lost": round(float((base["own"] - other["own"]).mean()), 5),
                **{f"kl_{kind}": round(float(kl[kinds == kind].mean()), 5) for kind in set(kinds)},
                "kl_short_prompts": round(float(kl[~halves].mean()), 5),
                "kl_long_prompts": round(float(kl[halves].mean()), 5),
                "tokens": int(kl.size),
            }
        )
    return rows


def divergence(ids: Any, logprobs: Any, other_ids: Any, other_logprobs: Any) -> Any:
    """Kullback-Leibler divergence in nats, over the first one's best candidates and the rest.

    Args:
        ids: ``[requests, tokens, candidates]`` candidates of the cache that is right.
        logprobs: Their logprobs, best first.
        other_ids: Candidates of another cache.
        other_logprobs: Theirs. One that is missing there counts as its last candidate.

    Returns:
        ``[requests, tokens]``.
    """
    best = 20
    kl = np.zeros(ids.shape[:2])
    for at in np.ndindex(*kl.shape):
        there = dict(zip(other_ids[at].tolist(), other_logprobs[at].tolist(), strict=True))
        last = float(other_logprobs[at][-1])
        p = logprobs[at][:best].astype(np.float64)
        q = np.array([there.get(token, last) for token in ids[at][:best].tolist()])
        rest_p = max(1e-6, 1.0 - float(np.exp(p).sum()))
        rest_q = max(1e-6, 1.0 - float(np.exp(q).sum()))
        kl[at] = (np.exp(p) * (p - q)).sum() + rest_p * np.log(rest_p / rest_q)
    return kl


def count_not_numbers(text: dict[str, Any]) -> int:
    """Logprobs of an answer that are not numbers."""
    return sum(math.isnan(value) for step in text["logprobs"] for value in step.values())


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


class BlockWatch:
    """Finds blocks that change after others may share them.

    A block is shared from the moment when it can be found by its prefix. Then its bytes in all
    layers, and the dense first tokens that belong to it, stay what they are until the block is
    given to someone else.
    """

    def __init__(self, llm: Any) -> None:
        self._pool = scheduler_of(llm).kv_cache_manager.block_pool
        self._llm = llm
        self._seen: dict[int, tuple[Any, int]] = {}
        self.looked = self.shared = 0
        self.changed: list[int] = []

    def look(self) -> None:
        """Compare all shared blocks with what they were; waits for the device."""
        sums = self._llm.collective_rpc(_block_sums)[0]
        self.looked += 1
        for block in self._pool.blocks:
            key = block.block_hash
            if key is None:
                self._seen.pop(block.block_id, None)
                continue
            now = sums[block.block_id]
            before = self._seen.get(block.block_id)
            if before is None or before[0] != key:
                self._seen[block.block_id] = (key, now)
                self.shared += 1
            elif before[1] != now:
                self.changed.append(block.block_id)
                self._seen[block.block_id] = (key, now)

    def summary(self) -> dict[str, Any]:
        """What was found."""
        return {
            "looks_at_blocks": self.looked,
            "blocks_shared": self.shared,
            "blocks_changed_after": len(self.changed),
        }


def _block_sums(worker: Any) -> list[int]:
    """A sum over the bytes of every block, all layers and its dense first tokens."""
    import torch

    runtime, total = worker._runtime, None
    torch.cuda.synchronize()
    for layer, cache in runtime._caches.items():
        part = (2 * layer + 1) * cache.view(torch.int64).flatten(1).sum(1)
        total = part if total is None else total + part
    assert total is not None
    for group in runtime.groups.values():
        rows = group.ledger._row_of
        if rows:
            sums = group._sinks.view(torch.int16).long().sum((0, 2, 3))
            where = torch.tensor([list(rows.keys()), list(rows.values())], device=sums.device)
            total.index_add_(0, where[0], sums[where[1]])
    return list(total.tolist())


def run_failures(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """A prompt beyond the limit, a pool that is too small, and states that are not numbers."""
    found: dict[str, Any] = {}
    for name, run in (
        ("long_prompt", _ask_too_much),
        ("full_pool", _fill_pool),
        # the last one: the engine ends with it
        ("not_a_number", _poison),
    ):
        try:
            found[name] = run(given, llm)
        except Exception:
            found[name] = {"failed": traceback.format_exc()[-2000:]}
        print("POINT " + json.dumps({name: found[name]}), flush=True)
    return found


def _ask_too_much(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    before = llm.generate(random_prompts(given, 1, 300, 1), sampling, use_tqdm=False)
    error = None
    try:
        long = random_prompts(given, 1, given.max_model_len + 7, 2)
        llm.generate(long, sampling, use_tqdm=False)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:400]
    after = llm.generate(random_prompts(given, 1, 300, 1), sampling, use_tqdm=False)
    same = before[0].outputs[0].token_ids == after[0].outputs[0].token_ids
    return {"error": error, "next_request_is_served": same}


def _fill_pool(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """More requests than blocks: all are answered, some in several attempts."""
    held = argparse.Namespace(**vars(given))
    held.folder, held.requests, held.prompt, held.new = "", 24, 900, 200
    result = run_held(held, llm)
    del result["texts"]
    return result


def _poison(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """One weight that is not a number: the engine must stop and say so."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    llm.apply_model(_break_weight)
    try:
        texts = llm.generate(random_prompts(given, 2, 300, 3), sampling, use_tqdm=False)
    except Exception as raised:
        return {"stopped_with": f"{type(raised).__name__}: {raised}"[:400]}
    return {"stopped_with": None, "tokens": [len(one.outputs[0].token_ids) for one in texts]}


def _break_weight(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.data[5] = math.nan
