# SPDX-License-Identifier: Apache-2.0
"""What decoding under a budget adds to the loss of the prompt's decision.

The same stretches as a record of ``sphkv sweep``, at the same budgets: the controller decides about
the prompt, then the decision stands, new tokens stay dense and no budget holds them. Its divergence
beside the recorded one, which was measured token by token under the budget:

python benchmarks/untouched_decision.py results/decoding/smollm2-4096-test.jsonl --model smollm2
    --data DATA --policy results/retention/policy-smollm2.json --split test --purpose test --log LOG
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sphkv.codec.states import SphericalCodec
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import DenseReference, PromptStates
from sphkv.evaluation.harness.subject import Decision, MethodSubject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.records import load_records
from sphkv.evaluation.runner.session import Placement, ReadCase, Session
from sphkv.evaluation.splits import open_split

METHOD = "joint"


def as_decided(states: PromptStates, decision: Decision, codec: SphericalCodec) -> DenseReference:
    """A prompt's states as the decision leaves them, new tokens exact."""
    method = DenseReference(states, capacity=states.following.shape[1])
    for layer, part in enumerate(states.layers):
        tier_id = decision.contract.tier_id[layer]  # [heads, tokens that were decided about]
        heads, count = tier_id.shape
        at = torch.arange(count).expand(heads, -1)
        keys, values = part.keys.clone(), part.values.clone()
        for number in tier_id.unique().tolist():
            tier = decision.tiers[number]
            if not tier.is_coded:
                continue
            given = part.keys[:, :count], part.values[:, :count]
            coded = codec.decode(layer, tier, codec.encode(layer, tier, *given, at), at)
            is_here = (tier_id == number)[..., None]
            for held, code in zip((keys, values), coded, strict=True):
                held[:, :count] = torch.where(is_here, code, held[:, :count])
        kept = torch.ones(keys.shape[:2], dtype=torch.bool)
        kept[:, :count] = tier_id != 0
        method.change(layer, keys, values, kept=kept)
    return method


def untouched_kl(session: Session, read: ReadCase, budget: str) -> float:
    """Mean divergence over the text behind a prompt whose decision stands."""
    states, case = read.states, read.case
    num_new = len(case.following_ids)
    subject: Any = session.factory.make(
        METHOD, budget, context=case.context, num_new=num_new, work=read.work
    )
    subject.store_prompt(states)
    codec = SphericalCodec(session.calibration)
    method = as_decided(states, subject.decision(), codec)
    hidden = MethodSubject(session.model, method, states.geometry).feed(states.following).hidden
    return float(token_divergence(session.model, read.reference, hidden).kl.mean())


def main() -> None:
    """Measure what a record has, with the decision untouched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="record file of sphkv sweep")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--split", default="development")
    parser.add_argument("--purpose", default="development")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--keep", type=Path, help="folder with the calibration of the records")
    parser.add_argument("--prefill-device", default="cpu")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = [r for r in load_records([args.records]) if r["method"] == METHOD and r["quality"]]
    calibration = points[0]["setup"]["calibration"]
    session = Session(
        args.model,
        calibration_text=args.data / calibration["text"],
        calibration_tokens=calibration["tokens"],
        keep=args.keep,
        policy=args.policy,
        place=Placement(prefill_device=args.prefill_device),
    )
    note = f"untouched decisions {points[0]['context']}"
    split = open_split(args.split, args.data, purpose=args.purpose, log=args.log, note=note)
    cases = split.stretches(
        session.tokenizer,
        length=points[0]["context"],
        num_following=points[0]["num_following"],
        part=slice(args.skip, args.skip + args.count if args.count else None),
    )
    rows = []
    for case in cases:
        here = [point for point in points if point["case"] == case.case_id]
        read = session.reader.read(case) if here else None
        for point in here:
            assert read is not None
            kl = untouched_kl(session, read, point["budget"])
            row = {"case": case.case_id, "budget": point["budget"]}
            rows.append({**row, "kl": point["quality"]["kl"], "untouched": kl})
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(_told(args, rows), encoding="utf-8")


def _told(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """The record: every point, and the ratio of the means at every budget."""
    ratios = {}
    for budget in sorted({row["budget"] for row in rows}, key=lambda text: float(text[:-1])):
        here = [row for row in rows if row["budget"] == budget]
        means = fmean(row["kl"] for row in here), fmean(row["untouched"] for row in here)
        ratios[budget] = {
            "kl": means[0], "untouched": means[1], "ratio": means[0] / means[1], "texts": len(here)
        }  # fmt: skip
    environment = describe_environment()
    told = {
        "records": args.records.name,
        "budgets": ratios,
        "points": rows,
        "environment": environment,
    }
    return json.dumps(told, indent=1) + "\n"


if __name__ == "__main__":
    main()
