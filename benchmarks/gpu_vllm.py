# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU: stock caches and coded blocks on the same requests, random weights, no network.

python3 benchmarks/gpu_vllm.py time --kv auto,fp8,turboquant_k3v4_nc,sphkv --batch 8 --prompt 32000
python3 benchmarks/gpu_vllm.py text --kv auto,sphkv           # greedy text and logprobs, compared
python3 benchmarks/gpu_vllm.py loop --kv auto,fp8,sphkv       # clients that ask again and again
python3 benchmarks/gpu_vllm.py stress --kv sphkv              # many requests, cancelled at random

Every cache runs in a process of its own, so that a crash of one leaves the others. A line of JSON
per run goes to stdout and to the file ``--out`` names. ``--kv sphkv:k3v4`` names another tier, and
``--kv sphkv:b51`` a budget of 51 bytes per token and KV head that complete prompts are cut to.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

WORKER = "sphkv.integrations.vllm.worker.SphericalWorker"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen8b": _LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "gptoss": _LLAMA
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "tiny": _LLAMA
    | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
    },
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # the engine in its own process would hide tracebacks
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}


def model_folder(root: Path, name: str, layers: int | None, *, has_weights: bool) -> Path:
    """A folder with a config and, for small models, weights whose attention is not flat."""
    config = dict(MODELS[name])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if "sliding_window" in config:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[at % 2] for at in range(config["num_hidden_layers"])]
    path = root / f"{name}-{config['num_hidden_layers']}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = path / "model.safetensors"
    if has_weights and not weights.is_file():
        part = weights.with_suffix(f".{os.getpid()}")
        _save_weights(config, part)
        part.replace(weights)
    return path


def _save_weights(config: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        states = torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        return states.to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": matrix(config["vocab_size"], hidden, 3.0),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": matrix(heads * dim, hidden, 1.2),
            f"{at}self_attn.k_proj.weight": matrix(kv_heads * dim, hidden, 1.2),
            f"{at}self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, heads * dim),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
            f"{at}input_layernorm.weight": ones.clone(),
            f"{at}post_attention_layernorm.weight": ones.clone(),
        }
    save_file(tensors, str(path))


def engine_options(given: argparse.Namespace, kv: str) -> dict[str, Any]:
    """Arguments of ``LLM``."""
    has_weights = given.model == "tiny"
    folder = model_folder(Path(given.work), given.model, given.layers, has_weights=has_weights)
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs or max(16, given.batch),
        "gpu_memory_utilization": given.gpu_mem,
        "enable_prefix_caching": given.prefix,
        "seed": 0,
        "disable_log_stats": given.mode == "time",
    }
    if not has_weights:
        options["load_format"] = "dummy"
    if given.kv_bytes:
        options["kv_cache_memory_bytes"] = given.kv_bytes
    if given.batched_tokens:
        options["max_num_batched_tokens"] = given.batched_tokens
    if given.eager:
        options["enforce_eager"] = True
    else:
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, options["max_num_seqs"]})
        options["compilation_config"] = {
            "cudagraph_capture_sizes": [n for n in sizes if n <= options["max_num_seqs"]]
        }
    if kv.startswith("sphkv"):
        found = re.fullmatch(r"sphkv(?::k([\d.]+)v(\d+))?(?::b(\d+))?", kv)
        assert found is not None, kv
        chosen: dict[str, Any] = {"calibration_tokens": given.calibration_tokens}
        if found[1]:
            chosen |= {"key_bits": float(found[1]), "value_bits": int(found[2])}
        if found[3]:
            chosen["budget_bytes"] = int(found[3])
        options |= {"worker_cls": WORKER, "additional_config": {"sphkv": chosen}}
    else:
        options["kv_cache_dtype"] = kv
    return options


def use_flash_3() -> None:
    """TurboQuant asks for FlashAttention 2, which has no code for Hopper in the wheel."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = stock(self, *args, **kwargs)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = patched


def describe(llm: Any) -> dict[str, Any]:
    """What the engine chose."""
    config = llm.llm_engine.vllm_config
    layers = [
        layer
        for layer in config.compilation_config.static_forward_context.values()
        if hasattr(layer, "attn_backend")
    ]
    blocks, size = config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size
    return {
        "tokens_held": blocks * size,
        "block_size": size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "backends": sorted(
            {x.attn_backend.get_name() for x in layers if hasattr(x, "attn_backend")}
        ),
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def random_prompts(
    given: argparse.Namespace, count: int, length: int, seed: int
) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    high = min(MODELS[given.model]["vocab_size"], 30000)
    return [
        {"prompt_token_ids": [draw.randrange(10, high) for _ in range(length)]}
        for _ in range(count)
    ]


@contextmanager
def turn(given: argparse.Namespace) -> Iterator[None]:
    """Wait until all processes have loaded their engines, then for the GPU alone."""
    if not given.turns:
        yield
        return
    folder = Path(given.turns)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{os.getpid()}").touch()
    while time.time() < given.turn_until and len(list(folder.glob("ready-*"))) < given.turn_count:
        time.sleep(0.2)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_time(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Time to the first tokens, then milliseconds per step while all requests decode."""
    from vllm import SamplingParams

    engine = llm.llm_engine

    def timed(batch: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        prompts = random_prompts(given, batch, prompt, seed)
        begin = time.perf_counter()
        for at, one in enumerate(prompts):
            engine.add_request(f"{seed}-{at}", one, sampling)
        first: dict[str, float] = {}
        marks: list[float] = []
        is_full = True
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for one in outputs:
                if one.outputs[0].token_ids:
                    first.setdefault(one.request_id, now)
                is_full &= not one.finished
            if len(first) == batch and is_full and outputs:
                marks.append(now)
        gaps = sorted(b - a for a, b in pairwise(marks))
        mean = (marks[-1] - marks[0]) / max(1, len(marks) - 1)
        return {
            "batch": batch,
            "prompt": prompt,
            "ttft_first_s": round(min(first.values()) - begin, 4),
            "ttft_last_s": round(max(first.values()) - begin, 4),
            "ms_per_step": round(1e3 * mean, 3),
            "ms_per_step_p50": round(1e3 * gaps[len(gaps) // 2], 3) if gaps else None,
            "tokens_per_s": round(batch / mean, 1),
            "steps": len(marks),
        }

    timed(given.batch, 600, 8, 1)
    if given.batch > 1:
        timed(1, min(given.prompt, 4000), 8, 2)
    best: dict[str, Any] = {}
    for at in range(given.repeat):
        found = timed(given.batch, given.prompt, given.new, 10 + at)
        if not best or found["ms_per_step"] < best["ms_per_step"]:
            found["ttft_last_s"] = min(found["ttft_last_s"], best.get("ttft_last_s", 1e9))
            best = found
    return best


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
        rounds.append([_answer(one.outputs[0]) for one in found])
    alone = [
        _answer(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0])
        for prompt in prompts[:3]
    ]
    return {"lengths": lengths, "first": rounds[0], "again": rounds[1], "alone": alone}


def _answer(output: Any) -> dict[str, Any]:
    steps = output.logprobs or []
    return {
        "tokens": list(output.token_ids),
        "logprobs": [{str(k): round(v.logprob, 4) for k, v in step.items()} for step in steps],
    }


def compare_text(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text of each cache beside the first one's."""
    base, rows = results[0], []
    for result in results[1:]:
        for name in ("first", "again", "alone"):
            pairs = list(zip(base["first"], result[name], strict=False))
            same = [_same_tokens(a["tokens"], b["tokens"]) for a, b in pairs]
            gaps = [_gap(a, b) for a, b in pairs]
            rows.append(
                {
                    "kv": result["kv"],
                    "round": name,
                    "tokens_alike": same,
                    "of": [len(a["tokens"]) for a, _ in pairs],
                    "mean_logprob_gap": [round(gap, 4) for gap in gaps],
                    "first_logprob_gap": [round(_gap(a, b, 1), 4) for a, b in pairs],
                    "third_logprob_gap": [round(_gap(a, b, 3), 4) for a, b in pairs],
                }
            )
    return rows


def _same_tokens(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def _gap(one: dict[str, Any], other: dict[str, Any], most: int = 1 << 30) -> float:
    """Mean difference of logprobs of shared candidates up to the first other token."""
    until = min(most, _same_tokens(one["tokens"], other["tokens"]) + 1)
    gaps = [
        abs(a[key] - b[key])
        for a, b in zip(one["logprobs"][:until], other["logprobs"][:until], strict=False)
        for key in a
        if key in b
    ]
    return sum(gaps) / len(gaps) if gaps else 9.0


def run_loop(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Clients that each ask the next question when they have the answer to the last one.

    Answers of the first round are cut short at random, so that requests end one by one from the
    start. Time counts from the moment when as many requests run as ever will.
    """
    from vllm import SamplingParams

    engine, draw = llm.llm_engine, random.Random(0)
    load = _Load()

    def ask(count: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        prompt = [draw.randrange(10, 30000) for _ in range(given.prompt)]
        engine.add_request(load.begin(), {"prompt_token_ids": prompt}, sampling)

    for _ in range(given.clients):
        ask(draw.randrange(given.new // 8, given.new))
    started = time.perf_counter()
    while time.perf_counter() - started < given.seconds + given.warm_up:
        outputs = engine.step()
        if time.perf_counter() - started > given.warm_up:
            load.counts = True
        for _ in range(load.note(outputs)):
            ask(given.new)
    return {"clients": given.clients, "window_s": given.seconds, **load.summary()}


class _Load:
    """When requests got what; counts from a moment on."""

    def __init__(self) -> None:
        self.counts = False
        self._asked = 0
        self._begun: dict[str, float] = {}
        self._seen: dict[str, tuple[float, int]] = {}
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._marks: list[float] = []
        self._tokens = self._most = self._ended = 0

    def begin(self) -> str:
        """Name of a new request."""
        self._asked += 1
        name = f"loop-{self._asked}"
        self._begun[name] = time.perf_counter()
        return name

    def note(self, outputs: list[Any]) -> int:
        """Take note of a step; how many requests ended."""
        now, ended = time.perf_counter(), 0
        for one in outputs:
            name, count = one.request_id, len(one.outputs[0].token_ids)
            before, had = self._seen.get(name, (now, 0))
            if self.counts:
                self._tokens += count - had
                (self._gaps if had else self._first).append(
                    now - (before if had else self._begun[name])
                )
            self._seen[name] = (now, count)
            if one.finished:
                ended += 1
                del self._seen[name]
        self._most = max(self._most, len(self._seen))
        self._ended += ended * self.counts
        if self.counts:
            self._marks.append(now)
        return ended

    def summary(self) -> dict[str, Any]:
        """Throughput and latencies."""
        seconds = self._marks[-1] - self._marks[0] if len(self._marks) > 1 else 0.0
        return {
            "tokens_per_s": round(self._tokens / seconds, 1) if seconds else None,
            "requests_ended": self._ended,
            "ttft_p50_s": _quantile(self._first, 0.5),
            "gap_p50_ms": _quantile(self._gaps, 0.5, 1e3),
            "gap_p95_ms": _quantile(self._gaps, 0.95, 1e3),
            "gap_p99_ms": _quantile(self._gaps, 0.99, 1e3),
            "most_running": self._most,
        }


def _quantile(values: list[float], share: float, factor: float = 1.0) -> float | None:
    if not values:
        return None
    return round(factor * sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)


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
    cancelled = set()
    for at in range(given.requests):
        engine.add_request(f"r{at}", {"prompt_token_ids": prompt(at)}, sampling(at))
    begin = time.perf_counter()
    while engine.has_unfinished_requests() and time.perf_counter() - begin < given.seconds:
        for one in engine.step():
            if one.finished:
                texts[int(one.request_id[1:])] = _answer(one.outputs[0])
        if draw.random() < 0.05:
            at = draw.randrange(given.requests)
            if at not in texts and at not in cancelled:
                engine.abort_request([f"r{at}"])
                cancelled.add(at)
    seconds = time.perf_counter() - begin
    lost = [at for at in range(given.requests) if at not in texts and at not in cancelled]
    found = _check_alone(llm, texts, cancelled, prompt, sampling)
    return {
        "requests": given.requests,
        "finished": len(texts),
        "cancelled": len(cancelled),
        "lost": lost,
        "seconds": round(seconds, 1),
        **found,
    }


def _check_alone(
    llm: Any, texts: dict[int, Any], cancelled: set[int], prompt: Any, sampling: Any
) -> dict[str, Any]:
    """Ask some of the requests again, one by one."""
    checked = [at for at in sorted(texts) if at not in cancelled][:: max(1, len(texts) // 40)]
    same, gaps, margins = 0, [], []
    for at in checked:
        out = llm.generate([{"prompt_token_ids": prompt(at)}], sampling(at), use_tqdm=False)[0]
        alone, beside = _answer(out.outputs[0]), texts[at]
        differs = _same_tokens(alone["tokens"], beside["tokens"])
        same += differs == len(alone["tokens"])
        gaps.append(_gap(alone, beside))
        if differs < len(alone["tokens"]):
            chances, other = alone["logprobs"][differs], str(beside["tokens"][differs])
            # how much less likely the other token was: little, if rounding decided
            margins.append(max(chances.values()) - chances.get(other, -99.0))
    return {
        "checked": len(checked),
        "same_text": same,
        "largest_margin_of_a_difference": round(max(margins, default=0.0), 3),
        "mean_logprob_gap": round(sum(gaps) / max(1, len(gaps)), 4),
        "largest_logprob_gap": round(max(gaps, default=0.0), 4),
    }


RUNS = {"time": run_time, "text": run_text, "loop": run_loop, "stress": run_stress}


def run_child(given: argparse.Namespace) -> dict[str, Any]:
    kv = given.kv
    if kv.startswith("turboquant"):
        use_flash_3()
    begin = time.time()
    from vllm import LLM
    from vllm import __version__ as version

    imported = time.time()
    llm = LLM(**engine_options(given, kv))
    loaded = time.time()
    result = {"kv": kv, "mode": given.mode, "model": given.model, "batch": given.batch}
    result |= {"prompt": given.prompt, "new": given.new, "vllm": version, "eager": given.eager}
    result |= {"import_s": round(imported - begin, 1), "load_s": round(loaded - imported, 1)}
    result |= describe(llm)
    with turn(given):
        return _run_points(given, llm, result)


def _run_points(given: argparse.Namespace, llm: Any, result: dict[str, Any]) -> dict[str, Any]:
    for at, point in enumerate(given.points.split(",") if given.points else [""]):
        if point:
            given.batch, given.prompt = (int(part) for part in point.split("x"))
        found = {"batch": given.batch, "prompt": given.prompt, **RUNS[given.mode](given, llm)}
        if not given.points:
            return result | found
        result.setdefault("points", []).append(found)
        print("POINT " + json.dumps({"kv": given.kv, "at": at, **found}), flush=True)
    return result


def run_parent(given: argparse.Namespace) -> None:
    work = Path(given.work)
    work.mkdir(parents=True, exist_ok=True)
    rest = [part for part in sys.argv[1:] if part != "--child"]
    if "--kv" in rest:
        at = rest.index("--kv")
        del rest[at : at + 2]
    kinds = given.kv.split(",")
    logs = [
        work / f"{given.mode}-{given.model}-{kv.replace(':', '-')}-{os.getpid()}.log"
        for kv in kinds
    ]
    started, results = [], []
    for kv, log in zip(kinds, logs, strict=True):
        command = [sys.executable, __file__, *rest, "--kv", kv, "--child"]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env={**ENVIRONMENT, **os.environ}, stdout=file, stderr=subprocess.STDOUT
            )
        started.append(process)
        if not given.parallel:
            _wait(process, given.timeout)
    for kv, log, process in zip(kinds, logs, started, strict=True):
        code = _wait(process, given.timeout)
        result = _read_log(log, {"kv": kv, "mode": given.mode, "failed": code}, given.log_lines)
        results.append(result)
        _record(given, {k: v for k, v in result.items() if k not in ("first", "again", "alone")})
    if given.mode == "text" and all("first" in result for result in results):
        for row in compare_text(results):
            _record(given, row)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return -9


def _record(given: argparse.Namespace, row: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(row), flush=True)
    if given.out:
        with Path(given.out).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _read_log(log: Path, failed: dict[str, Any], log_lines: int) -> dict[str, Any]:
    """The result of a run; its log goes to stdout where it has none."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line[7:] for line in lines if line.startswith("RESULT ")]
    if not found:
        print("\n".join(lines[-log_lines:]), flush=True)
    for line in lines:
        if "sphkv serves" in line or line.startswith("POINT"):
            print(line, flush=True)
    return dict(json.loads(found[-1])) if found else failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mode", choices=sorted(RUNS))
    parser.add_argument("--kv", default="auto,fp8,turboquant_k3v4_nc,sphkv")
    parser.add_argument("--model", default="llama8b", choices=sorted(MODELS))
    parser.add_argument("--points", default="", help="batch x prompt, such as 8x32000,1x4000")
    parser.add_argument("--out", default=None)
    parser.add_argument("--work", default="/tmp/gpu_vllm")
    parser.add_argument("--gpu-mem", type=float, default=0.85)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prefix", action="store_true", help="keep prefixes of prompts")
    parser.add_argument("--turns", default="", help="folder by which processes take turns")
    parser.add_argument("--parallel", action="store_true", help="all caches at once, for checks")
    parser.add_argument("--child", action="store_true")
    for name, value in (
        ("batch", 8), ("prompt", 32000), ("new", 128), ("repeat", 2), ("layers", 0),
        ("max-model-len", 33000), ("max-num-seqs", 0), ("kv-bytes", 0), ("batched-tokens", 0),
        ("timeout", 420), ("clients", 64), ("requests", 128), ("seconds", 120),
        ("warm-up", 15), ("log-lines", 60), ("calibration-tokens", 512),
        ("turn-count", 0), ("turn-until", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if not given.child:
        run_parent(given)
        return
    try:
        print("RESULT " + json.dumps(run_child(given)), flush=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
