# SPDX-License-Identifier: Apache-2.0
"""Error of attention over vLLM blocks with one tier and with a budget, on a real model's states.

    python benchmarks/vllm_budget.py --model smollm2 --calibration FILE --book FILE --output FILE

A prompt fills whole blocks, then tokens follow one by one, and every layer's output is compared
with dense attention. It needs the kernels and transformers, not vLLM.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult, attach
from sphkv.integrations.vllm.calibrate import built_in_text
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.runtime import Runtime
from sphkv.integrations.vllm.steps import plan_step

BLOCK, LEARNING_TOKENS = 128, 256
SETTINGS: dict[str, dict[str, Any]] = {
    "k2v3": {},
    "k1.5v2": {"key_bits": 1.5, "value_bits": 2},
    "budget 51": {"budget_bytes": 51},
    "budget 44": {"budget_bytes": 44},
    "budget 36": {"budget_bytes": 36},
}
States = tuple[Tensor, Tensor, Tensor]


class Keep:
    """Keeps queries, keys and values of every layer, ``[tokens, heads, head_dim]``."""

    needs_mask = True

    def __init__(self) -> None:
        self.states: dict[int, States] = {}

    def attend(self, call: AttentionCall) -> AttentionResult:
        query, keys, values = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        self.states[call.layer] = (query, keys, values)
        return call.dense()

    def finish(self, *, is_failed: bool) -> None:
        pass


def read_states(model: Any, ids: Tensor) -> dict[int, States]:
    layout = describe_model(model)
    keep = Keep()
    attachment = attach(model, layout)
    attachment.listen = lambda _, __: keep
    try:
        with torch.no_grad():
            layout.decoder(input_ids=ids, use_cache=False)
    finally:
        attachment.listen = None
        attachment.release(model)
    return keep.states


def layer_error(runtime: Runtime, layer: int, states: States, prompt: int) -> float:
    """Relative error of the outputs of the tokens after the prompt."""
    query, keys, values = states
    total, group = len(query), query.shape[1] // keys.shape[1]
    options = AttentionOptions(scale=query.shape[2] ** -0.5)
    pool = runtime.add_pool([str(layer)])
    blocks = -(-total // BLOCK)
    size = (blocks, keys.shape[1], BLOCK, runtime.block.content_bytes)
    kv_cache = torch.zeros(size, dtype=torch.uint8)

    def step(begin: int, end: int) -> Tensor:
        table = torch.arange(blocks)[None]
        plan = plan_step(pool, [0, end - begin], [end], table, BLOCK)
        new = (query[begin:end], keys[begin:end], values[begin:end])
        runtime.hold(layer, new[1:], plan)
        return runtime.attend(layer, new, kv_cache, plan, options)[0]

    step(0, prompt)
    wrong = right = 0.0
    wide = [x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values)]
    for at in range(prompt, total):
        output = step(at, at + 1)[0]
        logits = options.scale * query[at][:, None] @ wide[0][:, : at + 1].transpose(1, 2)
        exact = (logits.softmax(-1) @ wide[1][:, : at + 1])[:, 0]
        wrong += float((output - exact).square().sum())
        right += float(exact.square().sum())
    return float((wrong / right) ** 0.5)


def run(
    given: dict[str, Any],
    calibration: Calibration,
    states: dict[int, States],
    learnt: dict[int, States],
    prompt: int,
) -> dict[str, Any]:
    """Errors of one setting; ``learnt`` are states of the text that a server learns from."""
    geometry = calibration.geometry
    runtime = Runtime(
        ServeOptions(**given),
        block_tokens=BLOCK,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        max_sequences=1,
    )
    runtime.layer_ids.update({str(layer): layer for layer in states})
    runtime.use(calibration)
    errors = []
    for layer, kept in states.items():
        if runtime.retention is not None:
            query, keys, values = (x.transpose(0, 1) for x in learnt[layer])
            scale = geometry.head_dim**-0.5
            runtime.learn(layer, (query, keys, values), scale=scale)
        errors.append(layer_error(runtime, layer, kept, prompt))
    return {
        "bytes_per_token_and_head": runtime.block.content_bytes,
        "mean_relative_error": sum(errors) / len(errors),
        "by_layer": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--book", required=True)
    parser.add_argument("--offset", type=int, default=20_000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    total = arguments.prompt_tokens + arguments.new_tokens
    ids = read_tokens(tokenizer, arguments.book, total, offset=arguments.offset)
    calibration = load_calibration(arguments.calibration)
    states = read_states(model, ids)
    built_in = tokenizer(built_in_text(), return_tensors="pt").input_ids[:, :LEARNING_TOKENS]
    learnt = read_states(model, built_in)
    record: dict[str, Any] = {
        "command": "python benchmarks/vllm_budget.py " + shlex.join(sys.argv[1:]),
        "environment": describe_environment(),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "settings": {},
    }
    for name, given in SETTINGS.items():
        record["settings"][name] = run(given, calibration, states, learnt, arguments.prompt_tokens)
        print(name, record["settings"][name]["mean_relative_error"], flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
