# SPDX-License-Identifier: Apache-2.0
"""What a board is built from: a TOML file that says which prompts, methods, budgets and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sphkv.core.budget import ByteBudget
from sphkv.core.configs import build_config, check_name, resolve_config
from sphkv.evaluation.runner.methods import DENSE, check_method
from sphkv.evaluation.suites.records import Mode
from sphkv.evaluation.suites.ruler import TASKS, RulerOptions

SuiteName = Literal["ruler", "longbench", "gsm8k"]
PRESETS = ("small-cpu", "small-gpu")
PRESS = "kvpress:"
QUANTIZED = "quantized:"


@dataclass(frozen=True, slots=True)
class MakeConfig:
    """A set of prompts to make or to take.

    Attributes:
        suite: ``ruler``, ``longbench`` (MiniLongBench) or ``gsm8k``.
        lengths: Tokens of made prompts; of GSM8K, prompts are filled with worked examples.
        tasks: Of the suite; all if empty.
        num_samples: Of every task and length; all of natural ones if 0.
        seed: Draws what is drawn.
        data: Folder of MiniLongBench's files; of GSM8K its file, found if None.
        essays: Folder of essays for RULER, found if None.
        is_chat: Whether to use the model's chat template.
    """

    suite: SuiteName
    lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    num_samples: int = 50
    seed: int = 0
    data: Path | None = None
    essays: Path | None = None
    is_chat: bool = False

    def ruler(self) -> RulerOptions:
        """The same for RULER."""
        return RulerOptions(
            self.lengths,
            self.tasks or TASKS,
            self.num_samples,
            self.seed,
            self.essays,
            self.is_chat,
        )


@dataclass(frozen=True, slots=True)
class SuiteConfig:
    """A board.

    Attributes:
        model: ``smollm2``, a local folder, a ``.gguf`` file or a hub name.
        methods: ``dense``, ours, baselines, ``kvpress:NAME`` or ``quantized:BACKEND-BITS``; with
            budgets of its own as ``kivi 25%`` or ``snapkv 10% 5%``.
        budgets: Byte budgets of methods without budgets of their own; ``dense`` ignores them.
        modes: Whether the question is visible to the compressor.
        prompts: Files that ``sphkv suite make`` wrote.
        make: Sets to make where no files are given.
        tasks: Only these; all if empty.
        lengths: Only these of made prompts; all if empty.
        num_samples: Most of each task and length; all if None.
        device: Where the model and all caches live.
        dtype: Type of the weights.
        calibration: File of codebooks; fitted on every prompt if None, as the cache does.
        backend: Decode backend of our caches.
        baseline_backend: Decode backend of methods with pages.
        cuda_graphs: Whether our caches capture single steps on a GPU.
        page_tokens: States of a coded page of ``joint``; None for the cache's own choice, which on
            a GPU are the large pages that its fastest kernels read.
        max_prompt_tokens: Longer prompts lose the middle of their context; None cuts none.
        max_new_tokens: Most tokens of any answer; None leaves the suite's own limits.
        num_threads: Of the processor; 0 leaves torch's choice.
        max_minutes: No new sample is begun after so many minutes; None for no end.
        shard: Part ``k`` of ``n`` of the samples as ``k/n``, counted from 0, so that several
            processes share a board, each with a record file of its own; all if empty.
    """

    model: str
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    modes: tuple[Mode, ...] = ("visible", "hidden")
    prompts: tuple[Path, ...] = ()
    make: tuple[MakeConfig, ...] = ()
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    num_samples: int | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    calibration: Path | None = None
    backend: str = "auto"
    baseline_backend: str = "auto"
    cuda_graphs: bool = True
    page_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    num_threads: int = 0
    max_minutes: float | None = None
    shard: str = ""

    def __post_init__(self) -> None:
        """Reject names and budgets that do not exist."""
        for method in self.methods:
            name, budgets = self.budgets_of(method)
            check_column(name)
            for budget in budgets:
                ByteBudget.parse(budget)
            if name != DENSE and not budgets:
                raise ValueError(f"{name} needs at least one budget")
        if not self.methods or not self.modes:
            raise ValueError("a board needs at least one method and one mode")
        parse_shard(self.shard)
        if not self.prompts and not self.make:
            raise ValueError("a board needs prompts, or sets to make")

    def budgets_of(self, method: str) -> tuple[str, tuple[str, ...]]:
        """Name and budgets of an entry of ``methods``."""
        name, *own = method.split()
        return name, tuple(own) or self.budgets

    def grid(self) -> list[tuple[Mode, str, str]]:
        """Mode, method and budget of every column.

        Dense comes once: to a cache that keeps everything it is the same when the question comes.
        """
        columns: list[tuple[Mode, str, str]] = []
        for method in self.methods:
            name, budgets = self.budgets_of(method)
            if name == DENSE:
                columns.append((self.modes[0], DENSE, "100%"))
                continue
            columns += [(mode, name, budget) for mode in self.modes for budget in budgets]
        return columns


def parse_shard(text: str) -> tuple[int, int]:
    """Part and number of parts of ``k/n``; ``(0, 1)`` if empty.

    Raises:
        ValueError: It is neither, or there is no such part.
    """
    if not text:
        return 0, 1
    part, _, count = text.partition("/")
    if not part.isdigit() or not count.isdigit() or int(part) >= int(count):
        raise ValueError(f"shard must be k/n with k from 0 to n - 1, got {text!r}")
    return int(part), int(count)


def check_column(name: str) -> str:
    """Name of a method of ours, of kvpress, or of a quantised cache of transformers.

    Raises:
        ValueError: There is none.
    """
    if name.startswith(PRESS):
        from sphkv.integrations.kvpress import PRESSES

        return PRESS + check_name("kvpress method", name.removeprefix(PRESS), PRESSES)
    if name.startswith(QUANTIZED):
        from sphkv.integrations.kvpress import parse_quantized

        parse_quantized(name.removeprefix(QUANTIZED))
        return name
    return check_method(name)


def load_suite_config(
    path: Path | None, preset: str | None, flags: Mapping[str, Any]
) -> SuiteConfig:
    """A config file or a preset, with flags over it.

    Raises:
        ValueError: Neither or both are given, or the content is wrong.
    """
    if (path is None) == (preset is None):
        raise ValueError("give a config file or --preset, not both and not neither")
    if preset is not None:
        check_name("preset", preset, PRESETS)
        path = Path(__file__).parent / "presets" / f"{preset}.toml"
    assert path is not None
    return resolve_config(SuiteConfig, path=path, flags=flags)


def make_config(**values: Any) -> MakeConfig:
    """A set to make, from plain values; what is None is left at its default."""
    given = {name: value for name, value in values.items() if value is not None}
    return build_config(MakeConfig, given)
