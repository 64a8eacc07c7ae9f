# SPDX-License-Identifier: Apache-2.0
"""What a way to store a prompt does to facts that are asked for later, told token by token.

``PYTHONPATH=src python3 benchmarks/gpu_facts.py MODEL --prompts RULER.jsonl --calibration FILE
--output FILE [--columns auto:25% joint:25%:coded=1 tier:k3v4 coded:k2v16/copy16=k16v16 ...]``

The question of a RULER prompt is hidden. The dense model answers; then every column stores the
text before the question and reads the question and that answer in one go. A fact counts if all
its tokens are still the most likely ones. That takes a tenth of the time of answers of its own
and does not depend on how a list is punctuated. Columns:

``tier:T``             one tier for all states
``auto:B``             the cache's own choice under a budget
``joint:B:name=x,...`` the controller; names: ``chance``, ``even``, ``coded`` of the prior of heads
                       that copy, ``tiers`` (``k2v2+k3v4``), ``variant``, ``shapes``, ``page``
``coded:T``            keys and values coded and decoded again, attention exact; 16 bits leave
                       a part as it is, ``/copy16=T`` gives the 16 heads that copy most another

``own:T``              the same with codebooks fitted on the text before the question

``--texts`` are books of which a stretch is stored and what follows is compared. One line of JSON
per column and prompt.
"""

import argparse
import itertools
import json
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DynamicCache

from sphkv.attention.api import get_backend
from sphkv.cache.config import PROMPT_CALIBRATION
from sphkv.codec.calibration import Calibrator
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import parse_tier
from sphkv.evaluation.harness.states import PromptStates, hidden_states, read_prompt
from sphkv.evaluation.harness.subject import EngineSubject, ProductSubject
from sphkv.evaluation.suites.columns import Bench
from sphkv.evaluation.suites.config import SuiteConfig
from sphkv.evaluation.suites.samples import is_settled, read_prompts, score_answer
from sphkv.integrations.transformers import cache as product
from sphkv.integrations.transformers.copying import copy_shares
from sphkv.integrations.transformers.listening import transformed_states
from sphkv.retention.policy import BlockShape, RetentionPolicy

MOST_NEW = 64
DENSE_FIRST, DENSE_LAST, PAGE, PART = 16, 32, 32, 1024


class PartSubject(ProductSubject):
    """Our cache without captured steps: text is fed in parts that no change of pages divides."""

    is_single = False

    def tokens_until_change(self):
        return 1 if PartSubject.is_single else EngineSubject.tokens_until_change(self)


def make_cache(bench, args, column):
    """The cache of a column ``tier:``, ``auto:`` or ``joint:``."""
    kind, first, *more = column.split(":")
    options = product.CacheOptions(backend=args.backend, cuda_graphs=False, finds_calibration=False)
    made = {"options": options, "calibration": bench._given}
    if kind == "tier":
        return product.SphericalCache.for_model(bench.model, tiers=first, **made)
    if kind == "auto":
        return product.SphericalCache.for_model(bench.model, first, **made)
    told = dict(part.split("=") for part in ",".join(more).split(",") if part)
    policy = None
    if {"chance", "even", "coded"} & set(told):
        shares = float(told.get("chance", 0.1)) * copy_shares(bench.model)
        policy = RetentionPolicy(
            surprise=tuple(map(tuple, shares.tolist())),
            surprise_even=float(told.get("even", 0.5)),
            surprise_coded=float(told.get("coded", 0)),
        )
    page = int(told["page"]) if "page" in told else None
    asked = product.RetentionOptions(policy=policy, page_tokens=page)
    tiers = told["tiers"].split("+") if "tiers" in told else None
    layout = product.describe_model(bench.model)
    backend = get_backend(args.backend, layout.device)
    config = product._plan_config(layout, first, asked, tiers, None, options, backend.page_order)
    config = product._expect_copies(bench.model, config, asked)
    control = config.retention.options
    if "variant" in told:
        control = replace(control, variant=told["variant"])
    if "shapes" in told:
        control = replace(control, shapes=tuple(map(BlockShape, told["shapes"].split("+"))))
    config = replace(config, retention=replace(config.retention, options=control))
    engine = product._make_engine(bench.model, config, bench._given, backend)
    return product.SphericalCache(bench.model, engine, cuda_graphs=False)


@torch.no_grad()
def rows_of(bench, keys_values, input_ids):
    """Logits ``[tokens, vocabulary]`` of tokens over exact attention to given states."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(keys_values):
        cache.update(keys[None], values[None], layer)
    return bench.model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[0].float()


@torch.no_grad()
def dense_answer(bench, sample, read):
    """Tokens of the dense model's greedy answer, the one that ends it included."""
    cache = DynamicCache()
    for layer, part in enumerate(read.states.layers):
        cache.update(
            part.keys[None].to(bench.model.dtype), part.values[None].to(bench.model.dtype), layer
        )
    row = bench.model.get_output_embeddings()(read.states.hidden[-1:].to(bench.model.dtype))[0]
    ids = []
    for _ in range(MOST_NEW):
        token = int(row.argmax())
        ids.append(token)
        text = bench.tokenizer.decode(ids, skip_special_tokens=True)
        if token in bench._end.end_ids or is_settled(sample, text):
            break
        given = torch.tensor([[token]], device=bench.model.device)
        row = bench.model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1]
    return ids


class Coded:
    """The states before the question after coding, by bits of keys and of values."""

    def __init__(self, bench, states, columns, calibration):
        self.states = states
        self.dtype = bench.model.dtype
        shares = copy_shares(bench.model)
        self.order = shares.flatten().argsort(descending=True).tolist()
        self.heads = shares.shape[1]
        wanted = {part for column in columns for part in self._tiers(column)}
        keys = sorted({tier.key_bits for tier in wanted if tier.key_bits < 16})
        values = sorted({tier.value_bits for tier in wanted if tier.value_bits < 16})
        pairs = list(itertools.zip_longest(keys, values))
        tiers = [
            parse_tier(f"k{key or 2.0:g}v{value or 2}", page_tokens=PAGE) for key, value in pairs
        ]
        codec = SphericalCodec(calibration)
        self.keys, self.values = {16.0: []}, {16: []}
        for layer, part in enumerate(states.layers):
            own_keys, own_values = part.keys.float(), part.values.float()
            self.keys[16.0].append(part.keys.to(self.dtype))
            self.values[16].append(part.values.to(self.dtype))
            whole = {
                **{("k", bits): own_keys.clone() for bits in keys},
                **{("v", bits): own_values.clone() for bits in values},
            }
            for at in self._parts(own_keys.shape[1]) if tiers else ():
                index = torch.arange(at.start, at.stop, device=own_keys.device)
                index = index.expand(len(own_keys), -1).contiguous()
                part_keys, part_values = (
                    own_keys[:, at].contiguous(),
                    own_values[:, at].contiguous(),
                )
                found = codec.recode((layer,), tiers, part_keys, part_values, index)
                for number, (key, value) in enumerate(pairs):
                    if key is not None:
                        whole["k", key][:, at] = found[0][number]
                    if value is not None:
                        whole["v", value][:, at] = found[1][number]
            for (kind, bits), states_of in whole.items():
                held = self.keys if kind == "k" else self.values
                held.setdefault(bits, []).append(states_of.to(self.dtype))

    @staticmethod
    def _parts(tokens):
        """Parts of one size, the last ones overlapping, so that a GPU sees one shape."""
        last = DENSE_FIRST + (tokens - DENSE_FIRST - DENSE_LAST) // PAGE * PAGE
        size = min(PART, last - DENSE_FIRST)
        starts = [*range(DENSE_FIRST, last - size, size), last - size]
        return [slice(start, start + size) for start in starts]

    @staticmethod
    def _tiers(column):
        first, *more = column.partition(":")[2].split("/")
        return [parse(first), *(parse(part.split("=")[1]) for part in more)]

    def of(self, column):
        """Keys and values of every layer as a column has them."""
        first, *more = column.partition(":")[2].split("/")
        chosen = {}
        for part in more:
            name, tier = part.split("=")
            for number in self.members(name):
                chosen[number] = parse(tier)
        base = parse(first)
        for layer in range(len(self.states.layers)):
            heads = [chosen.get(layer * self.heads + head, base) for head in range(self.heads)]
            yield (
                torch.stack([self.keys[t.key_bits][layer][h] for h, t in enumerate(heads)]),
                torch.stack([self.values[t.value_bits][layer][h] for h, t in enumerate(heads)]),
            )

    def members(self, name):
        """Heads: the ``copyN`` that copy most, the ``restN`` others, those of layers ``layA-B``."""
        if name.startswith("copy"):
            return self.order[: int(name[4:])]
        if name.startswith("rest"):
            return self.order[int(name[4:]) :]
        low, high = map(int, name.removeprefix("lay").split("-"))
        return range(low * self.heads, (high + 1) * self.heads)


def fit(bench, states):
    """Codebooks of a prompt's own keys and queries, as a cache fits them."""
    layout = product.describe_model(bench.model)
    calibrator = Calibrator(
        layout.geometry, layout.ropes, model_id="own", options=PROMPT_CALIBRATION
    )
    positions = torch.arange(states.num_tokens, device=bench.model.device)
    for layer, part in enumerate(states.layers):
        calibrator.add_layer(layer, part.keys.float(), part.query.float(), positions)
    return calibrator.finish()


class Bits:
    def __init__(self, key_bits, value_bits):
        self.key_bits, self.value_bits = key_bits, value_bits


def parse(name):
    key, value = name.removeprefix("k").split("v")
    return Bits(float(key), int(value))


def facts(bench, sample, ids):
    """Ranges of the tokens of every expected string in an answer; None of those it lacks."""
    ends = [
        len(bench.tokenizer.decode(ids[: n + 1], skip_special_tokens=True)) for n in range(len(ids))
    ]
    text = bench.tokenizer.decode(ids, skip_special_tokens=True).lower()
    found = []
    for answer in sample.answers:
        at = text.find(answer.lower())
        if at < 0:
            found.append(None)
            continue
        first = next(n for n, end in enumerate(ends) if end > at)
        last = next(n for n, end in enumerate(ends) if end >= at + len(answer))
        found.append((first, last + 1))
    return found


def needles(bench, sample, num_tokens):
    """Tokens of every expected string in the text, and of what stands before it in its line."""
    found = bench.tokenizer(
        sample.context, add_special_tokens=False, return_offsets_mapping=True
    ).offset_mapping
    shift, values, keys = num_tokens - len(found), [], []
    for answer in sample.answers:
        at = sample.context.find(answer)
        while at >= 0:
            begin = max(sample.context.rfind("\n", 0, at), sample.context.rfind(".", 0, at), 0)
            for number, (low, high) in enumerate(found):
                if high > at and low < at + len(answer):
                    values.append(number + shift)
                elif high > begin and low < at:
                    keys.append(number + shift)
            at = sample.context.find(answer, at + 1)
    return {"value": values, "key": keys}


@torch.no_grad()
def looked(bench, read, answer, spans, places):
    """Which heads look at needles while the dense model tells them.

    Returns:
        Per KV head, layer by layer, the mean square of the weight on values of needles.
    """
    first = len(read.ids.prompt) - 1
    at = [first + place for a, b in filter(None, spans) for place in range(a, b)]
    found, heads = [], read.states.layers[0].keys.shape[0]

    def watch(_, query, keys, values):
        own = query[:, at].float().unflatten(0, (heads, -1))
        logits = own @ keys.float()[:, None].transpose(-1, -2) / keys.shape[-1] ** 0.5
        order = torch.arange(keys.shape[1], device=keys.device)
        logits.masked_fill_(order > torch.tensor(at, device=keys.device)[:, None], -torch.inf)
        weight = logits.softmax(-1)[..., places["value"]].sum(-1)
        found.extend(weight.square().mean((1, 2)).tolist())
        return keys, values

    tokens = torch.tensor([[*read.ids.prompt, *answer[:-1]]], device=bench.model.device)
    with transformed_states(bench.model, watch):
        hidden_states(bench.model, tokens)
    return [round(each, 4) for each in found]


def kept_needles(bench, subject, places):
    """Share of the states of needles in the 16 heads that copy most, by tier."""
    decision = subject.decision()
    if decision is None:
        return {}
    tier_id = decision.contract.tier_id.flatten(0, 1)
    order = copy_shares(bench.model).flatten().argsort(descending=True)[:16]
    told = {}
    for name, tokens in places.items():
        each = tier_id[order][:, [t for t in tokens if t < tier_id.shape[1]]].flatten()
        counts = torch.bincount(each.long(), minlength=len(decision.tiers)).tolist()
        told[name] = {
            tier.name: round(count / max(1, len(each)), 3)
            for tier, count in zip(decision.tiers, counts, strict=True)
            if count
        }
    return {"needle": told}


def compare(spans, right, mine, ids):
    """How far the rows of a column are from the dense ones, and which facts are left."""
    goal = torch.tensor(ids, device=mine.device)
    p, q = right.log_softmax(-1), mine.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    is_same = mine.argmax(-1) == goal
    kept = [bool(is_same[a:b].all()) for a, b in filter(None, spans)]
    return {
        "facts": sum(kept) / max(1, len(spans)),
        "exact": bool(is_same.all()),
        "wrong": int((~is_same).sum()),
        "kl": round(float(kl.mean()), 5),
        "worst": round(float(kl.max()), 4),
        "fact_nll": round(
            sum(float(-q[a:b].gather(1, goal[a:b, None]).sum()) for a, b in filter(None, spans))
            / max(1, len(kept)),
            4,
        ),
    }


def feed(bench, subject, ids):
    """Logits of text that is fed in parts."""
    tokens, at, rows = torch.tensor([ids], device=bench.model.device), 0, []
    while at < len(ids):
        count = min(len(ids) - at, subject.tokens_until_change())
        rows.append(subject.feed(tokens[:, at : at + count]).hidden)
        at += count
    return torch.cat(rows)


def of_sample(bench, args, given, sample):
    """Records of every column on a prompt."""
    began = time.perf_counter()
    read = bench.read(sample, given.ids(bench.tokenizer, sample))
    answer = dense_answer(bench, sample, read)
    text = bench.tokenizer.decode(answer, skip_special_tokens=True)
    score, spans = score_answer(sample, text), facts(bench, sample, answer)
    head = {"sample": sample.sample_id, "task": sample.task, "length": sample.length}
    states = read.stored("hidden")
    places = needles(bench, sample, states.num_tokens)
    seen = looked(bench, read, answer, spans, places) if score >= args.least else []
    yield {**head, "column": "dense", "looked": seen,
           "facts": sum(s is not None for s in spans) / len(spans),
           "score": score, "answer": text, "tokens": states.num_tokens,
           "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip
    if score < args.least:
        return
    asked = [*read.ids.question, *answer[:-1]]
    coded = {"coded": bench._given}
    if any(column.startswith("own:") for column in args.columns):
        coded["own"] = fit(bench, states)
    coded = {
        kind: Coded(bench, states, [c for c in args.columns if c.startswith(kind + ":")], given)
        for kind, given in coded.items()
    }
    last, tokens = len(read.ids.question) - 1, torch.tensor([asked], device=bench.model.device)
    right = rows_of(bench, coded["coded"].of("coded:k16v16"), tokens)[last:]
    for column in args.columns:
        began = time.perf_counter()
        try:
            kind = column.partition(":")[0]
            if kind in ("coded", "own"):
                found, about = rows_of(bench, coded[kind].of(column), tokens)[last:], {}
            else:
                given_all = (bench, args, column, states, asked, last, places)
                try:
                    found, about = by_product(*given_all)
                except (RuntimeError, NotImplementedError):
                    bench.check_device()
                    if PartSubject.is_single:
                        raise
                    # a backend that takes single queries only
                    traceback.print_exc()
                    PartSubject.is_single = True
                    found, about = by_product(*given_all)
            told = compare(spans, right, found, answer)
        except Exception as error:
            told, about = {"error": f"{type(error).__name__}: {error}"[:300]}, {}
            if not isinstance(error, ValueError):
                traceback.print_exc()
                bench.check_device()
        yield {**head, "column": column, **told, **about,
               "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip


@torch.no_grad()
def of_text(bench, args, path):
    """KL of every column on what follows a stretch of a book."""
    ids = bench.tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, args.start : args.start + args.prompt + args.steps].to(bench.model.device)
    read = read_prompt(bench.model, ids, num_following=args.steps)
    asked = ids[0, args.prompt :].tolist()
    head = bench.model.get_output_embeddings()
    right = head(read.hidden[1:]).float().log_softmax(-1)
    for column in args.columns:
        if column.startswith(("coded:", "own:")):
            continue
        record = {"sample": path.stem, "task": "text", "length": args.prompt, "column": column}
        began = time.perf_counter()
        try:
            rows, about = by_product(bench, args, column, read, asked, 0)
            kl = torch.nn.functional.kl_div(
                rows.log_softmax(-1), right, reduction="none", log_target=True
            ).sum(-1)
            record |= {
                "kl": round(float(kl.mean()), 5),
                "worst": round(float(kl.max()), 4),
                **about,
            }
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"[:300]
            if not isinstance(error, ValueError):
                traceback.print_exc()
                bench.check_device()
        yield {**record, "seconds": round(time.perf_counter() - began, 2)}


@torch.no_grad()
def by_product(bench, args, column, states: PromptStates, asked, last, places=None):
    """Logits of a column that is our cache, and what it holds."""
    subject = PartSubject(bench.model, make_cache(bench, args, column), "joint")
    try:
        subject.store_prompt(states)
        needle = kept_needles(bench, subject, places) if places else {}
        hidden = feed(bench, subject, asked)[last:]
        told = subject.describe()
        dense = subject.geometry.dense_bytes_per_token * subject.num_tokens()
        logits = bench.model.get_output_embeddings()(hidden.to(bench.model.dtype)).float()
        return logits, {"share": round(subject.resident_bytes() / dense, 4),
                        "setting": told["setting"], "tiers": told["tiers"], **needle}  # fmt: skip
    finally:
        subject.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--start", type=int, default=14000)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--samples", type=int, nargs=2, default=(8, 20))
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--columns", nargs="+", required=True)
    parser.add_argument("--least", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    bench = Bench(
        SuiteConfig(args.model, ("dense",), ("10%",), device=args.device, dtype=dtype,
                    prompts=tuple(args.prompts or [Path("none")]), num_threads=1,
                    calibration=args.calibration)
    )  # fmt: skip
    low, high = args.samples
    chosen = []
    for number, path in enumerate(args.prompts):
        given = read_prompts(path)
        for sample in given.samples:
            index = int(sample.sample_id.rsplit("-", 1)[1])
            if low <= index < high and (not args.tasks or sample.task in args.tasks):
                chosen.append((index, number, sample.task, given, sample))
    # in rounds over tasks and lengths, so that a run that is cut has all alike
    chosen.sort(key=lambda each: each[:3])
    part, parts = args.shard
    done = set()
    if args.output.is_file():
        lines = args.output.read_text(encoding="utf-8").splitlines()
        done = {json.loads(line)["sample"] for line in lines}
    texts = [path for path in args.texts[part::parts] if path.stem not in done]
    work = [lambda path=path: of_text(bench, args, path) for path in texts]
    work += [
        lambda given=given, sample=sample: of_sample(bench, args, given, sample)
        for *_, given, sample in chosen[part::parts]
        if sample.sample_id not in done
    ]
    with args.output.open("a", encoding="utf-8") as out:
        for measure in work:
            if time.perf_counter() - began > args.seconds:
                break
            for record in measure():
                print(json.dumps(record), file=out, flush=True)
                print(f"[{time.perf_counter() - began:5.0f}]", record["sample"], record["column"],
                      record.get("facts"), record.get("kl"), record.get("share"),
                      record["seconds"], record.get("error", ""), flush=True)  # fmt: skip
            bench.free_memory()


if __name__ == "__main__":
    main()
