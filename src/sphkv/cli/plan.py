# SPDX-License-Identifier: Apache-2.0
"""``sphkv plan``: what a budget would keep of a prompt, at which tier."""

from __future__ import annotations

import argparse
import json

from sphkv.cli.output import check_writable, format_table, write_bytes, write_json, write_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "plan", help="show what a budget keeps of a prompt, without decoding", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--prompt-file", required=True, help="UTF-8 text file")
    parser.add_argument("--budget", required=True, help="10%%, 512B/token, 64MiB or bytes")
    parser.add_argument("--max-tokens", type=int, help="read so many tokens of the prompt at most")
    parser.add_argument("--policy", help="policy file; default: equal weights")
    parser.add_argument("--calibration", help="calibration file; default: the prompt itself")
    parser.add_argument("--page-tokens", type=int, default=32, help="states of a coded page")
    parser.add_argument("--png", help="file for the budget bar and the token x head tier map")
    parser.add_argument("--html", help="file for the same with all tables")
    parser.add_argument("--out", help="file for the JSON record")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan one prompt."""
    for path in (args.png, args.html, args.out):
        check_writable(path)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.retention.figure import draw_plan, plan_html
    from sphkv.evaluation.retention.plan import PlanConfig, plan_retention

    config = PlanConfig(
        model=args.model,
        prompt_file=args.prompt_file,
        budget=args.budget,
        policy=args.policy,
        calibration=args.calibration,
        max_tokens=args.max_tokens,
        page_tokens=args.page_tokens,
    )
    record, decision = plan_retention(config)
    if args.out:
        write_json(args.out, record)
    if args.png or args.html:
        image = draw_plan(record, decision)
        if args.png:
            write_bytes(args.png, image)
        if args.html:
            write_text(args.html, plan_html(record, image))
    if args.json:
        print(json.dumps(record, indent=2))
        return 0
    used = 100 * record["bytes"] / record["limit_bytes"]
    print(f"{record['bytes']} of {record['limit_bytes']} bytes ({used:.1f}%), "
          f"{record['num_tokens']} tokens")  # fmt: skip
    tiers = [
        {"tier": name, "states": count, "bytes": record["bytes_by_tier"][name]}
        for name, count in record["tiers"].items()
    ]
    print("\n" + format_table(("tier", "states", "bytes"), tiers))
    segments = [{"segment": name, **row} for name, row in record["segments"].items()]
    print("\n" + format_table(("segment", "tokens", "rho", "bytes"), segments))
    heads = sorted(record["heads"], key=lambda row: -row["bytes_per_token"])[:10]
    columns = ("layer", "head", "bytes_per_token", *record["tiers"])
    print(f"\nheads by bytes (entropy {record['head_entropy']:.3f}, "
          f"Gini {record['head_gini']:.3f})")  # fmt: skip
    print(format_table(columns, heads))
    return 0
