# SPDX-License-Identifier: Apache-2.0
"""What expecting copies brings: answers to hidden questions and KL on text, by prior and budget.

``PYTHONPATH=src python3 benchmarks/gpu_copying.py MODEL --calibration FILE --output FILE
[--prompts RULER.jsonl --samples 16 19] [--texts BOOK.txt ...] [--priors 0,0,0 0.1,0.5,0 ...]``

A prior is ``chance,even,coded`` of ``RetentionPolicy``: the surprise of a head that only copies,
the part of it that is the same for all tokens, and how much errors of codes count. Prompts are
those of ``sphkv suite make``; ``--samples`` takes a range of each task, so that others stay unseen.
One line of JSON per answer and per text.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from sphkv import SphericalCache
from sphkv.evaluation.harness.subject import ProductSubject
from sphkv.evaluation.suites.columns import Bench
from sphkv.evaluation.suites.config import SuiteConfig
from sphkv.evaluation.suites.samples import read_prompts, score_answer
from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions
from sphkv.integrations.transformers.copying import copy_shares
from sphkv.retention.policy import RetentionPolicy

PRIORS = ("0,0,0", "0.1,0,1", "0.1,1,1", "0.1,0.5,1", "0.1,0.5,0", "0.03,0.5,0")
MOST_NEW = 64


def make_cache(bench, args, prior, budget):
    """A cache whose controller expects copies as the prior says."""
    chance, even, coded = map(float, prior.split(","))
    shares = (chance * copy_shares(bench.model)).tolist()
    policy = RetentionPolicy(
        surprise=tuple(map(tuple, shares)), surprise_even=even, surprise_coded=coded
    )
    return SphericalCache.for_model(
        bench.model,
        budget,
        retention=RetentionOptions(policy=policy),
        calibration=args.calibration,
        options=CacheOptions(finds_calibration=False),
    )


def answers(bench, args):
    """Scores of every prior on prompts whose question comes later."""
    for path in args.prompts:
        given = read_prompts(path)
        low, high = args.samples
        chosen = [s for s in given.samples if low <= int(s.sample_id.rsplit("-", 1)[1]) < high]
        for sample in chosen:
            read = bench.read(sample, given.ids(bench.tokenizer, sample))
            dense = bench.answer(read, "hidden", "dense", "100%", max_new_tokens=MOST_NEW)
            score = score_answer(sample, dense.text)
            yield {"sample": sample.sample_id, "prior": "dense", "score": score}
            for budget, prior in itertools.product(args.budgets, args.priors):
                subject = ProductSubject(
                    bench.model, make_cache(bench, args, prior, budget), "joint"
                )
                try:
                    found = bench._answer(read, read.stored("hidden"), "hidden", subject, MOST_NEW)
                finally:
                    subject.close()
                yield {
                    "sample": sample.sample_id, "prior": prior, "budget": budget,
                    "score": score_answer(sample, found.text),
                    "share": found.bytes["dense_share"], "tiers": found.bytes["tiers"],
                }  # fmt: skip


@torch.no_grad()
def losses(bench, args):
    """KL of every prior on what follows a stretch of text, token by token."""
    model = bench.model
    for path in args.texts:
        tokens = bench.tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        tokens = tokens[:, args.start : args.start + args.prompt + args.steps].to(model.device)
        given = model(input_ids=tokens[:, : args.prompt], use_cache=True, logits_to_keep=1)
        rest = model(
            input_ids=tokens[:, args.prompt : -1], past_key_values=given.past_key_values,
            use_cache=True,
        ).logits[0]  # fmt: skip
        right = torch.cat([given.logits[0], rest]).float().log_softmax(-1)
        for budget, prior in itertools.product(args.budgets, args.priors):
            with make_cache(bench, args, prior, budget) as cache:
                kl, part = [], tokens[:, : args.prompt]
                for row in right:
                    said = model(
                        input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1
                    )
                    mine = said.logits[0, -1].float().log_softmax(-1)
                    kl.append((row.exp() * (row - mine)).sum())
                    at = args.prompt + len(kl) - 1
                    part = tokens[:, at : at + 1]
                each = torch.stack(kl)
                yield {
                    "text": path.stem, "prior": prior, "budget": budget,
                    "kl": float(each.mean()), "worst": float(each.max()),
                    "tiers": cache.describe().tiers,
                }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--samples", type=int, nargs=2, default=(16, 19))
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--priors", nargs="+", default=list(PRIORS))
    parser.add_argument("--budgets", nargs="+", default=["10%", "5%"])
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--start", type=int, default=14000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    bench = Bench(
        SuiteConfig(args.model, ("dense",), ("10%",), device=args.device, dtype=dtype,
                    prompts=tuple(args.prompts), calibration=args.calibration)
    )  # fmt: skip
    with args.output.open("a", encoding="utf-8") as out:
        for record in itertools.chain(losses(bench, args), answers(bench, args)):
            print(json.dumps(record), file=out, flush=True)
            print(record.get("sample") or record["text"], record["prior"], record.get("budget"),
                  round(record.get("score", record.get("kl")), 4), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
