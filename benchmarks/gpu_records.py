# SPDX-License-Identifier: Apache-2.0
"""The records of ``results/gpu`` at one commit, job after job, in as many calls as it takes.

``PYTHONPATH=src python3 benchmarks/gpu_records.py --commit COMMIT --output FOLDER --seconds 540``

Every job is a script of this folder with the arguments of its record. One that does not fit into
what is left of ``--seconds`` is stopped, and none is begun after it; what a script had written by
then stays. ``log.json`` in the folder says what ran, how long and how it ended; jobs that it calls
done are left out in the next call. ``--list`` prints the commands. Jobs that need texts or a model
are left out unless these are given.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = "results/gpu"


@dataclass(frozen=True)
class Job:
    """A script and its arguments; ``{...}`` stands for an option of this one.

    Attributes:
        record: File that it writes.
        command: Script and arguments, but for those that name record and commit.
        threads: Threads of the host; all cores if None.
        output: How the script is told the record.
    """

    record: str
    command: str
    threads: int | None = None
    output: str = "--output"

    @property
    def needs(self) -> set[str]:
        """Options without which it does not run."""
        names = ("model", "text", "calibration")
        return {name for name in names if f"{{{name}}}" in self.command}


ALLOCATION = f"{RESULTS}/allocation-qwen2.5-coder-1.5b.safetensors"
LONG = "--shapes Llama-3.1-8B --points 32768x8 131072x1 131072x7"
# what says whether the others are worth anything comes first
JOBS = {
    "check": Job("check.json", "gpu_check.py --skip table"),
    "mixed": Job("mixed.json", f"gpu_mixed.py --allocation {ALLOCATION} --page-tokens 128"),
    "first-dense": Job("first_prompt-dense.json", "gpu_first_prompt.py --side dense", 4),
    "first-codes": Job("first_prompt-codes.json", "gpu_first_prompt.py --side codes --pairs 2", 4),
    "controller": Job(
        "end_to_end-retention.json",
        f"gpu_end_to_end.py {LONG} --copies 131072x64 --budget 10% --steps 1000 --no-prefill "
        "--quick-dense",
        2,
    ),
    "one-tier": Job("end_to_end.json", f"gpu_end_to_end.py {LONG} --quick-dense", 2),
    "decode": Job("decode.json", "gpu_decode.py", output="--rows"),
    "mixed-64": Job(
        "mixed-pages64.json", f"gpu_mixed.py --allocation {ALLOCATION} --page-tokens 64"
    ),
    "encode": Job("encode.json", "gpu_encode.py"),
    "stages": Job("stages.json", "gpu_stages.py"),
    "decisions": Job(
        "decisions.json",
        "gpu_decisions.py {model} {text} --calibration-text {calibration} --steps {steps}",
    ),
}


def command_of(job, args):
    """Words of a job's command."""
    record = args.output.resolve() / job.record
    script, *words = (word.format(**vars(args)) for word in job.command.split())
    words = [*words, job.output, str(record), "--commit", args.commit]
    return [sys.executable, str(HERE / script), *words]


def run(job, args, limit):
    """Run a job for at most so many seconds: its exit status, None if it was stopped."""
    folder = HERE.parent
    paths = [str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if job.threads is not None:
        around["OMP_NUM_THREADS"] = str(job.threads)
    try:
        done = subprocess.run(
            command_of(job, args), cwd=folder, env=around, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="revision to name in the records")
    parser.add_argument("--output", type=Path, default=Path("gpu-records"), help="folder")
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all jobs")
    parser.add_argument("--model", help="folder or .gguf file, for decisions")
    parser.add_argument("--text", help="book that decisions are about")
    parser.add_argument("--calibration", help="book that codebooks are fitted on")
    parser.add_argument("--steps", type=int, default=512, help="tokens after a decision")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    args = parser.parse_args()
    if args.list:
        for name in ("commit", "model", "text", "calibration"):
            setattr(args, name, getattr(args, name) or name.upper())
    elif args.commit is None:
        parser.error("--commit must name the revision that is measured")
    return args


def main():
    args = read_arguments()
    began = time.monotonic()
    log_file = args.output.resolve() / "log.json"
    log = json.loads(log_file.read_text()) if log_file.is_file() and not args.list else {}
    done = [name for name, each in log.items() if (each["commit"], each["rc"]) == (args.commit, 0)]
    failed = []
    for name in args.only:
        job = JOBS[name]
        missing = sorted(each for each in job.needs if getattr(args, each) is None)
        if args.list:
            print(f"{name}: {shlex.join(command_of(job, args)[1:])}")
            continue
        if missing or name in done:
            print(f"-- {name}: {'needs ' + ', '.join(missing) if missing else 'done'}", flush=True)
            continue
        limit = args.seconds - (time.monotonic() - began)
        if limit <= 0:
            break
        args.output.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        rc = run(job, args, None if limit == float("inf") else limit)
        seconds = round(time.monotonic() - start, 1)
        print(f"-- {name}: {'stopped' if rc is None else f'exit {rc}'}, {seconds} s", flush=True)
        log[name] = {"record": job.record, "seconds": seconds, "rc": rc, "commit": args.commit}
        log_file.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
        failed += [] if rc in (0, None) else [name]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
