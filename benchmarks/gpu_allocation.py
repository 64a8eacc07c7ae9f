# SPDX-License-Identifier: Apache-2.0
"""What the controller decides about a real prompt on the GPU, and what that costs in KL.

``PYTHONPATH=src python3 benchmarks/gpu_allocation.py MODEL TEXT CALIBRATION_TEXT --output FILE``

For every ladder and budget the prompt goes through the public class, then the text goes on token
by token; KL is that of the dense model to ours. The decision about every run of 16 tokens is kept
in a file, which ``gpu_mixed.py`` times: that of the first ladder and setting in ``--output``, those
of others beside it, with their number. ``--ladders k2v2,k3v4 k2v4`` compares ladders, and
``--settings seal_tier=k4v8,demotes=1,refresh_share=0.0625`` what is done while decoding.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from gpu_end_to_end import environment
from safetensors.torch import save_file

from sphkv import SphericalCache, calibrate_model, load_model
from sphkv.cache.plan import FAST_RETENTION_TIERS
from sphkv.integrations.transformers.cache import RetentionOptions

RUN = 16
CALIBRATION_TOKENS = 4096


@torch.no_grad()
def dense_logits(model, tokens, prompt):
    """Log-probabilities of the continuation, in float32 on the GPU."""
    past = model(input_ids=tokens[:, :prompt], use_cache=True, logits_to_keep=1)
    rest = model(
        input_ids=tokens[:, prompt:-1], past_key_values=past.past_key_values, use_cache=True
    ).logits[0]
    return torch.cat([past.logits[0], rest]).float().log_softmax(-1)


def retention_options(text):
    """Options from ``name=value,...``; the defaults for ``default``."""
    kinds = {"seal_tier": str, "demotes": lambda x: x == "1", "refresh_share": float}
    pairs = [] if text == "default" else [part.split("=") for part in text.split(",")]
    return RetentionOptions(**{name: kinds[name](value) for name, value in pairs})


@torch.no_grad()
def measure(model, tokens, prompt, budget, ladder, settings, calibration, right):
    """The decision and a record of one ladder and setting at one budget."""
    found = []
    with SphericalCache.for_model(
        model, budget, retention=retention_options(settings), tiers=ladder, calibration=calibration
    ) as cache:
        cache.engine.on_contract = found.append
        began = time.perf_counter()
        given = model(
            input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        torch.cuda.synchronize()
        prompt_s = time.perf_counter() - began
        kl = []
        for at in range(prompt, tokens.shape[1]):
            mine = given.logits[0, -1].float().log_softmax(-1)
            row = right[at - prompt]
            kl.append((row.exp() * (row - mine)).sum())
            if at < tokens.shape[1] - 1:
                given = model(
                    input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True
                )
        tier_id = found[0].tier_id[..., : (prompt // RUN - 1) * RUN : RUN]
        tier_id = tier_id.to(torch.uint8).cpu().contiguous()
        names = [tier.name for tier in cache.engine.plan.tiers]
        kl = torch.stack(kl)
        record = {
            "budget": budget, "ladder": names, "settings": settings,
            "tiers": cache.describe().tiers,
            "kl": float(kl.mean()), "worst": float(kl.max()), "steps": len(kl),
            "kl_by_quarter": [float(part.mean()) for part in kl.chunk(4)],
            "refreshes": cache.engine.rows[0].residency.num_rebalances,
            "prompt_tokens": prompt, "prompt_s": prompt_s,
            "peak_share": cache.engine.peak_share,
            "is_captured": cache.engine.graph is not None,
            "seconds": time.perf_counter() - began,
        }  # fmt: skip
    return tier_id, names, record


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("calibration_text", type=Path)
    parser.add_argument("--ladders", nargs="+", default=[])
    parser.add_argument("--settings", nargs="+", default=["default"])
    parser.add_argument("--budgets", default="20,10,5")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--start", type=int, default=2000)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="JSON of what was measured")
    parser.add_argument("--commit")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    # weights alone: frequencies of the rotary embedding stay float32
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    model = model.cuda().eval()
    text = args.text.read_text(encoding="utf-8")
    end = args.start + args.prompt + args.steps
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, args.start : end].cuda()
    other = args.calibration_text.read_text(encoding="utf-8")[: 8 * CALIBRATION_TOKENS]
    other = tokenizer(other, return_tensors="pt").input_ids[:, :CALIBRATION_TOKENS].cuda()
    began = time.perf_counter()
    calibration = calibrate_model(model, other, model_id=Path(args.model).name)
    print(f"calibrated in {time.perf_counter() - began:.1f} s", flush=True)
    right = dense_logits(model, tokens, args.prompt)
    ladders = args.ladders or [",".join(FAST_RETENTION_TIERS)]
    words = ["benchmarks/gpu_allocation.py", *(Path(word).name for word in sys.argv[1:])]
    about = environment(args.commit) | {
        "text": args.text.name, "first_token": args.start,
        "calibration": args.calibration_text.name, "model": Path(args.model).name,
        "command": " ".join(["PYTHONPATH=src python3", *words]),
    }  # fmt: skip
    records = []
    for number, (ladder, settings) in enumerate(itertools.product(ladders, args.settings)):
        held = {}
        for budget in args.budgets.split(","):
            try:
                tier_id, names, record = measure(
                    model, tokens, args.prompt, f"{budget}%",
                    ladder.split(",") if args.ladders else None, settings, calibration, right,
                )  # fmt: skip
            except Exception as error:  # the others may still run
                print(f"{ladder} {budget}%: {type(error).__name__}: {error}", flush=True)
                continue
            held[budget] = tier_id
            records.append(record | about)
            print(json.dumps(record), flush=True)
            if args.record:
                args.record.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        if held:
            held["tiers"] = torch.tensor(list(",".join(names).encode()), dtype=torch.uint8)
            name = f"{args.output.stem}-{number}" if number else args.output.stem
            save_file(held, args.output.with_stem(name))


if __name__ == "__main__":
    main()
