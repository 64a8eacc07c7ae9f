# SPDX-License-Identifier: Apache-2.0
"""Check and time the CUDA decode kernel; plain python3, prints a table and writes JSON rows.

Correctness comes first: fresh random codes, outputs filled with NaN, a float64 oracle on the same
codes. Timings are medians of CUDA-graph replays over page sets larger than the L2 cache, combine
included on both sides.
"""

import argparse
import json
import platform
import secrets
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_baselines import CONFIGS, PAGE_TOKENS, SPLITS, DensePaged
from gpu_rivals import rivals

from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import KernelShape
from sphkv.attention.cuda.kernel_cache import self_test
from sphkv.attention.cuda.pages import PageLists, PagePool
from sphkv.attention.cuda.synthetic import (
    Oracle,
    random_pages,
    set_bases,
    synthetic_codebook,
    tier_layout,
)
from sphkv.attention.request import AttentionOptions
from sphkv.store.paging import PositionMode
from sphkv.testing.decode_cases import case_rope, error_limit, relative_error, run_cases

DEVICE = torch.device("cuda")
SHORT_POINTS = ((1, 4096), (8, 4096))
POINTS = ((1, 131072), (8, 32768), (32, 8192), (8, 131072))


@dataclass(frozen=True)
class Model:
    """Attention shape of a model, and the slots per key of its 2-bit tier."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    nibbles: int

    @property
    def group(self):
        return self.query_heads // self.kv_heads

    def rope(self):
        return case_rope(self.head_dim)


MODELS = (
    Model("Llama-3.1-8B", 32, 8, 128, 64),
    Model("Qwen2.5-14B", 40, 8, 128, 64),
    Model("gpt-oss-20b", 64, 8, 64, 32),
)


def builds(base):
    """Kernel builds worth timing for a shape."""
    wanted = [base, replace(base, spread=not base.spread)]
    return [shape for shape in dict.fromkeys(wanted) if shape.is_feasible]


def median_us(run, launches, sets, repeats=9):
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % sets)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / launches * 1e3)
    return statistics.median(times)


def copy_bandwidth():
    """Bytes read plus written per second of a large copy, in TB/s."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    return 8 * source.numel() / median_us(lambda i: torch.mul(source, 2.0, out=target), 2, 1) / 1e6


class Workspace:
    """Pages of one model, value width and form of positions, with the lists of each point."""

    def __init__(self, model, value_bits, seed, mode=PositionMode.CONTIGUOUS):
        self.model, self.value_bits, self.mode = model, value_bits, mode
        heads, dim = model.kv_heads, model.head_dim
        self.rope = model.rope()
        self.book = synthetic_codebook(heads, dim // 2, model.nibbles, seed=seed, device=DEVICE)
        self.layout = tier_layout(dim, model.nibbles, value_bits, mode)
        self.total = max(b * t for b, t in POINTS) // PAGE_TOKENS * heads
        self.pages = random_pages(self.layout, self.total, device=DEVICE)
        longest = max(t for _, t in POINTS)
        self.turns = TurnTable.build(self.rope, max_positions=longest, device=DEVICE)
        self.options = AttentionOptions(scale=dim**-0.5)

    def decoder(self, shape):
        most = max(b for b, _ in POINTS)
        return CudaDecode(
            self.book, self.rope, self.turns, value_bits=self.value_bits,
            group=self.model.group, max_batch=most, shape=shape,
        )  # fmt: skip

    def query(self, batch):
        size = (batch, self.model.query_heads, self.model.head_dim)
        return torch.randn(size, device=DEVICE).bfloat16()

    def point(self, batch, context):
        """Random page lists of one operating point; sets rotate so that L2 serves none."""
        heads, per_row = self.model.kv_heads, context // PAGE_TOKENS
        per_set = batch * per_row * heads
        sets = max(1, min(6, self.total // per_set))
        order = torch.randperm(self.total, device=DEVICE)
        bases = torch.zeros(self.total, dtype=torch.int64, device=DEVICE)
        words = {PositionMode.RUNS: 8, PositionMode.TOKENS: PAGE_TOKENS}.get(self.mode, 1)
        tables = []
        for i in range(sets):
            ids = order[i * per_set : (i + 1) * per_set].view(heads, batch, per_row)
            bases[ids] = PAGE_TOKENS * torch.arange(per_row, device=DEVICE)
            tables.append(ids)
        if self.mode is not PositionMode.CONTIGUOUS:
            bases = bases[:, None] + PAGE_TOKENS // words * torch.arange(words, device=DEVICE)
        set_bases(self.pages, self.layout, bases)
        counts = torch.full((heads, batch), per_row, device=DEVICE)
        return tables, [PageLists.from_table(ids, counts, self.pages) for ids in tables]

    def expected(self, query, tables):
        """Float64 outputs of a few rows, what they may be off by, and the error of float32."""
        group, batch = self.model.group, query.shape[0]
        exact = Oracle(self.book, self.rope, self.layout)
        plain = replace(exact, dtype=torch.float32)
        right, limit, single = {}, {}, 0.0
        for b, h in {(0, 0), (batch - 1, self.model.kv_heads - 1), (batch // 2, 3)}:
            rows = slice(h * group, (h + 1) * group)
            case = (query[b, rows].float(), self.pages[tables[0][h, b]], h, self.options)
            right[b, h] = exact.attend(*case).output
            limit[b, h] = error_limit(exact.largest_logit(*case))
            single = max(single, relative_error(plain.attend(*case).output, right[b, h]))
        return right, limit, single


def time_ours(space, shapes, batch, context):
    """Best build: (us, error, float32 error, build)."""
    model = space.model
    tables, lists = space.point(batch, context)
    pool = PagePool(space.pages, space.mode)
    query = space.query(batch)
    launches = 4 if batch * context >= 1 << 20 else 12
    right, limit, single = space.expected(query, tables)
    best = None
    for shape in shapes:
        decoder = space.decoder(shape)
        result = decoder.empty_result(batch)
        result.output.fill_(torch.nan)
        result.lse.fill_(torch.nan)
        decoder.attend(query, pool, lists[0], space.options, result=result)
        errors = {
            (b, h): relative_error(result.output[b, h * model.group : (h + 1) * model.group], value)
            for (b, h), value in right.items()
        }
        error = max(errors.values())
        is_near = all(each < limit[at] for at, each in errors.items())
        if not is_near or not bool(result.output.isfinite().all()):
            raise SystemExit(f"wrong result: {shape} at {(batch, context)}: error {error}")
        us = median_us(
            lambda i, d=decoder, r=result: d.attend(query, pool, lists[i], space.options, result=r),
            launches,
            len(lists),
        )
        print(
            f"    {us:8.1f} us  teams {shape.teams} spread {shape.spread:d} "
            f"stages {shape.num_stages}  error {error:.1e}",
            flush=True,
        )
        if best is None or us < best[0]:
            best = (us, error, single, shape)
    return best


class DensePool:
    """Dense keys and values of the largest operating point."""

    def __init__(self, model, dtype):
        pages = max(b * t for b, t in POINTS) // PAGE_TOKENS
        size = pages * model.kv_heads * PAGE_TOKENS * model.head_dim
        chunk = torch.randn(1 << 24, device=DEVICE, dtype=torch.bfloat16).to(dtype)
        self.keys, self.values = (chunk.repeat(size // chunk.numel()) for _ in range(2))
        self.num_pages = pages


def time_dense(model, pool, batch, context):
    """Best time over splits and configurations, in us."""
    query = torch.randn(batch, model.query_heads, model.head_dim, device=DEVICE).bfloat16()
    per_set = batch * context // PAGE_TOKENS
    sets = max(1, min(6, pool.num_pages // per_set))
    order = torch.randperm(pool.num_pages, device=DEVICE).int()
    tables = [
        order[i * per_set : (i + 1) * per_set].view(batch, -1).contiguous() for i in range(sets)
    ]
    launches = 2 if batch * context >= 1 << 20 else 6
    scale, best = model.head_dim**-0.5, float("inf")
    for splits in SPLITS:
        blocks = batch * model.kv_heads * splits
        if context // splits < 256 or not 120 <= blocks <= 4096:
            continue
        for config in CONFIGS:
            kernel = DensePaged(query, pool.keys, pool.values, model.kv_heads, config, splits)
            best = min(
                best,
                median_us(
                    lambda i, k=kernel: k(tables[i], context, scale), launches, sets, repeats=5
                ),
            )
    return best


# What the profiler counts: (model, value bits, batch, context).
PROFILED = (
    *((0, 4, *point) for point in POINTS),
    (0, 2, 8, 32768),
    (1, 4, 8, 32768),
    (2, 4, 8, 32768),
)


def profile():
    """Launch each profiled case once; prints what it is and the bytes its pages hold."""
    for model, value_bits, batch, context in PROFILED:
        space = Workspace(MODELS[model], value_bits, seed=1)
        _, lists = space.point(batch, context)
        decoder = space.decoder(None)
        query = space.query(batch)
        result = decoder.empty_result(batch)
        pool = PagePool(space.pages, PositionMode.CONTIGUOUS)
        torch.empty(1 << 26, device=DEVICE).fill_(0)  # pushes the pages out of L2
        decoder.attend(query, pool, lists[0], space.options, result=result)
        torch.cuda.synchronize()
        ledger = lists[0].page_ids.numel() * space.layout.page_bytes
        print("CASE", MODELS[model].name, value_bits, batch, context, ledger, flush=True)


def dram_ratios(path):
    """DRAM bytes read over page bytes by case, from the profiler's output of ``--profile``.

    A case is one launch, or as many as its line says.
    """
    ratios = {}
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    reads, cases = [], []
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == ["dram__bytes_read.sum"]:
            reads.append(float(words[2].replace(",", "")) * scale[words[1]])
        if words[:1] == ["CASE"]:
            cases.append(words[1:])
    for name, bits, batch, context, ledger, *launches in cases:
        count = int(launches[0]) if launches else 1
        own, reads = reads[:count], reads[count:]
        if len(own) < count:
            raise ValueError(f"{path} has {len(own)} of {count} launches of {name} {bits}")
        ratios[name, int(bits), int(batch), int(context)] = sum(own) / int(ledger)
    if reads:
        raise ValueError(f"{path} has {len(reads)} launches of no case")
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="file for the JSON rows")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--value-bits", default="4,2")
    parser.add_argument("--positions", default="contiguous,runs,tokens", help="forms to measure")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--commit", help="revision to name in the rows")
    parser.add_argument("--dram", type=Path, help="output of the profiler on --profile")
    parser.add_argument("--profile", action="store_true", help="launch cases for a profiler")
    arguments = parser.parse_args()
    if arguments.profile:
        return profile()
    torch.manual_seed(arguments.seed)
    forms = arguments.positions.split(",")
    print(f"seed {arguments.seed}, small cases passed: {run_cases(DEVICE)}")
    copy = copy_bandwidth()
    print(f"copy bandwidth {copy:.2f} TB/s")
    dram = dram_ratios(arguments.dram) if arguments.dram else {}
    rows = []
    for model in [m for n in arguments.models.split(",") for m in MODELS if m.name == n]:
        dense = {}
        for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
            pool = DensePool(model, dtype)
            dense[name] = {
                point: time_dense(model, pool, *point) for point in (*SHORT_POINTS, *POINTS)
            }
            del pool
        torch.cuda.empty_cache()
        dense["rivals"] = {
            point: rivals(model, *point, median_us) for point in (*SHORT_POINTS, *POINTS)
        }
        widths = arguments.value_bits.split(",") if "contiguous" in forms else []
        for value_bits in map(int, widths):
            space = Workspace(model, value_bits, seed=1)
            error = self_test(space.book, space.rope, value_bits=value_bits, group=model.group)
            print(f"self-test of {model.name}, {value_bits} bits: error {error:.1e}")
            base = KernelShape.of_codebook(space.book, value_bits=value_bits, group=model.group)
            for point in (*SHORT_POINTS, *POINTS):
                rows.append(row(space, builds(base), point, dense, copy))
                rows[-1]["dram_over_ledger"] = dram.get((model.name, value_bits, *point))
                rows[-1] |= common(arguments.commit, copy)
            del space
            torch.cuda.empty_cache()
            write_rows(rows, arguments)
        if model is MODELS[0]:
            for mode in (PositionMode.RUNS, PositionMode.TOKENS):
                if mode.name.lower() not in forms:
                    continue
                space = Workspace(model, 4, seed=1, mode=mode)
                base = KernelShape.of_codebook(
                    space.book, value_bits=4, group=model.group, positions=mode
                )
                for point in (POINTS[0], POINTS[-1]):
                    rows.append(row(space, [base], point, dense, copy))
                    rows[-1] |= common(arguments.commit, copy)
                del space
                torch.cuda.empty_cache()
                write_rows(rows, arguments)


def write_rows(rows, arguments):
    """What is there so far."""
    if arguments.rows:
        arguments.rows.parent.mkdir(parents=True, exist_ok=True)
        arguments.rows.write_text(json.dumps(rows, indent=1) + "\n")


def common(commit, copy):
    """What all rows of a run share."""
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda,
                     "triton": triton.__version__, "python": platform.python_version()},
        "commit": commit,
        "command": "PYTHONPATH=src python3 -m sphkv bench decode --device cuda",
        "copy_tb_per_s": copy,
    }  # fmt: skip


def row(space, shapes, point, dense, copy):
    model, (batch, context) = space.model, point
    us, error, single, shape = time_ours(space, shapes, batch, context)
    keys = batch * context * model.kv_heads
    bytes_per_key = space.layout.page_bytes / PAGE_TOKENS
    speed = keys * bytes_per_key / us / 1e6
    bf16, fp8 = dense["bf16"][point], dense["fp8"][point]
    beside = dense["rivals"][point]
    print(
        f"{model.name:14s} {point!s:14s} {space.mode.name.lower()} V{space.value_bits} "
        f"{bytes_per_key:6.1f} B/key "
        f"{us:7.1f} us "
        f"{speed:.2f} TB/s ({speed / copy:.0%} of copy)  bf16 {bf16:.1f} us x{bf16 / us:.2f}  "
        f"fp8 {fp8:.1f} us x{fp8 / us:.2f}  error {error:.1e}  "
        + "  ".join(
            f"{name[:-3]} {value:.1f} us x{value / us:.2f}" for name, value in beside.items()
        ),
        flush=True,
    )
    return {
        "batch": batch, "context": context, "shape": model.name,
        "heads": [model.query_heads, model.kv_heads, model.head_dim],
        "positions": space.mode.name.lower(),
        "key_bits": 4 * model.nibbles / model.head_dim, "value_bits": space.value_bits,
        "bytes_per_key": bytes_per_key, "us": us, "tb_per_s": speed,
        "share_of_copy": speed / copy, "bf16_us": bf16, "fp8_us": fp8,
        "ratio_vs_bf16": bf16 / us, "ratio_vs_fp8": fp8 / us, "dram_over_ledger": None,
        "error": error, "float32_error": single, "build": asdict(shape),
        **beside, **{f"ratio_vs_{name[:-3]}": value / us for name, value in beside.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
