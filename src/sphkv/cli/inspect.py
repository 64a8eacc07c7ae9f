# SPDX-License-Identifier: Apache-2.0
"""Commands that look and change nothing: ``sphkv ls``, ``validate``, ``inspect`` and ``plan``.

They show what can be named, whether record files hold what they must, what a cache holds, and what
a budget would keep of a prompt at which tier.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sphkv.cli.generate import add_prompt_flags
from sphkv.cli.output import check_writable, format_table, write_bytes, write_json, write_text

KINDS = ("methods", "workloads", "backends", "tiers", "splits")
_MOST_SHOWN = 40


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``ls``, ``validate``, ``inspect`` and ``plan``."""
    _add_ls(commands)
    _add_validate(commands)
    _add_inspect(commands)
    _add_plan(commands)


def _add_ls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``ls``."""
    parser = commands.add_parser(
        "ls", help="methods, workloads, backends, tiers or splits", allow_abbrev=False
    )
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.set_defaults(run=_run_ls)


def _run_ls(args: argparse.Namespace) -> int:
    """Print one table."""
    from sphkv.core.configs import check_name
    from sphkv.evaluation.inspect import list_names

    rows = list_names(check_name("list", args.kind, KINDS))
    print(format_table(tuple(rows[0]), rows))
    return 0


def _add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``validate``."""
    parser = commands.add_parser(
        "validate", help="check record files field by field; exit 1 at a fault", allow_abbrev=False
    )
    parser.add_argument("records", nargs="+", help="record files of sweeps and comparisons")
    parser.set_defaults(run=_run_validate)


def _run_validate(args: argparse.Namespace) -> int:
    """Name every fault by file, line and field."""
    from sphkv.evaluation.validate import validate_file

    is_bad = False
    for name in args.records:
        faults = validate_file(Path(name))
        for fault in faults[:_MOST_SHOWN]:
            print(f"{name}, {fault}")
        if len(faults) > _MOST_SHOWN:
            print(f"{name}: and {len(faults) - _MOST_SHOWN} more")
        if not faults:
            print(f"{name}: valid")
        is_bad |= bool(faults)
    return int(is_bad)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``inspect``."""
    parser = commands.add_parser(
        "inspect",
        help="ledger, tier histogram and tier map of a saved cache or of a prompt's",
        allow_abbrev=False,
    )
    add_prompt_flags(parser, is_required=False)
    parser.add_argument("--cache", help="folder of a saved cache, instead of model and prompt")
    parser.add_argument("--map", help="PNG file for the tier map (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_inspect)


def _run_inspect(args: argparse.Namespace) -> int:
    """Open a saved cache, or fill one with a prompt, and describe it."""
    check_writable(args.map)
    found = _look(args)
    if args.map:
        from sphkv.evaluation.inspect import draw_tier_map

        write_bytes(args.map, draw_tier_map(found["tier_map"]))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    more = found["num_sequences"] - 1
    print(f"{found['tokens']} tokens{f' and {more} more sequences' if more else ''}, "
          f"{found['b_kv']:.0f} bytes per token, "
          f"dense {found['dense_b_kv']}")  # fmt: skip
    ledger = [
        {"kind": kind, "bytes": size, "share": f"{100 * size / found['ledger']['total']:.1f}%"}
        for kind, size in found["ledger"].items()
    ]
    print(format_table(("kind", "bytes", "share"), ledger))
    print()
    print(format_table(("layer", "head", *found["tiers"]), found["histogram"]))
    return 0


def _look(args: argparse.Namespace) -> dict[str, Any]:
    from sphkv.evaluation.generate import GenerateConfig
    from sphkv.evaluation.inspect import inspect_folder, inspect_prompt

    if args.cache is not None:
        given = [name for name in ("model", "prompt", "prompt_file") if getattr(args, name)]
        if given:
            raise ValueError(f"give --cache or --{given[0].replace('_', '-')}, not both")
        return inspect_folder(args.cache)
    if args.model is None:
        raise ValueError("give --cache FOLDER, or --model with --prompt or --prompt-file")
    return inspect_prompt(
        GenerateConfig(
            model=args.model,
            prompt=args.prompt,
            prompt_file=args.prompt_file,
            budget=args.budget,
            tier=args.tier,
            calibration=args.calibration,
            backend=args.backend,
        )
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``plan``."""
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
    parser.set_defaults(run=_run_plan)


def _run_plan(args: argparse.Namespace) -> int:
    """Plan one prompt."""
    for path in (args.png, args.html, args.out):
        check_writable(path)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.inspect import PlanConfig, draw_plan, plan_html, plan_retention

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
