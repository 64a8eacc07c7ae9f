# SPDX-License-Identifier: Apache-2.0
"""What ``additional_config["sphkv"]`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sphkv.core.tiers import (
    CODED_PAGE_MULTIPLE,
    DENSE_BITS,
    MAX_PAGE_TOKENS,
    TierSpec,
    coded_tier,
)

CONFIG_KEY = "sphkv"
SCHEDULER_PATH = "sphkv.integrations.vllm.cuda.scheduler.SphericalScheduler"
"""What vLLM's ``scheduler_cls`` must be for requests on a GPU to have budgets of their own."""

BLOCK_SIZES = tuple(range(CODED_PAGE_MULTIPLE, MAX_PAGE_TOKENS + 1, CODED_PAGE_MULTIPLE))
"""Tokens of a vLLM block that one coded page can hold."""

_LEAST_CALIBRATION_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a server stores its cache.

    Attributes:
        key_bits: Code bits per key element, radius not counted; 16 with 16 value bits for
            bfloat16.
        value_bits: Bits per value element: 2, 3, 4, 8 or 16; 3 on CPUs, 4 on GPUs if not given.
        sink_tokens: First tokens of a sequence that stay dense, inside their own block.
        budget_bytes: Bytes of a token and KV head, on average. On CPUs the heads of a block share
            them by need, and ``key_bits`` and ``value_bits`` are not used; on GPUs complete prompts
            are cut to them. None for one tier everywhere and whole prompts.
        repeatable: Whether tokens of a prompt read everything before their own block as stored,
            also where it came in the same chunk. Then what is computed depends on the tokens alone,
            not on chunks, prefixes that were found and preemptions, up to rounding.
        calibration: File that ``sphkv calibrate`` wrote; None to calibrate at start-up.
        calibration_tokens: Tokens of the built-in text that a calibration at start-up reads.
    """

    key_bits: float = 2.0
    value_bits: int = 3
    sink_tokens: int = 4
    budget_bytes: int | None = None
    repeatable: bool = False
    calibration: str | None = None
    calibration_tokens: int = 1024

    def __post_init__(self) -> None:
        """Reject values that no page can hold."""
        self.tier(MAX_PAGE_TOKENS)
        _check_integer("sink_tokens", self.sink_tokens, 0, 16)
        if self.budget_bytes is not None:
            _check_integer("budget_bytes", self.budget_bytes, 1)
        if not isinstance(self.repeatable, bool):
            raise ValueError(f"repeatable must be true or false, got {self.repeatable!r}")
        if self.repeatable and self.budget_bytes is not None:
            raise ValueError(
                f"repeatable does not go with a budget of {self.budget_bytes} bytes: what is kept "
                "depends on queries that come later"
            )
        _check_integer("calibration_tokens", self.calibration_tokens, _LEAST_CALIBRATION_TOKENS)
        if self.calibration is not None and not isinstance(self.calibration, str):
            raise ValueError(f"calibration must be a path, got {self.calibration!r}")

    def tier(self, block_tokens: int) -> TierSpec:
        """The tier of a page; bfloat16 at 16 key bits, which shows what is not the codes' doing."""
        if self.key_bits == DENSE_BITS:
            return TierSpec("dense", "dense", DENSE_BITS, self.value_bits, block_tokens)
        return coded_tier(self.key_bits, self.value_bits, page_tokens=block_tokens)

    @classmethod
    def from_config(cls, additional_config: object, **defaults: int) -> ServeOptions | None:
        """Read vLLM's ``additional_config``; None where it does not name us.

        Args:
            additional_config: What the server was given.
            defaults: Options where it names none, other than those of this class.

        Raises:
            ValueError: An option is unknown or out of range.
        """
        if not isinstance(additional_config, Mapping) or CONFIG_KEY not in additional_config:
            return None
        given: Any = additional_config[CONFIG_KEY]
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config['{CONFIG_KEY}'] must be an object, got {given!r}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"unknown options {unknown} of sphkv; known are {sorted(known)}")
        return cls(**{**defaults, **given})


def _check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):  # type: ignore[operator]
        top = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be an integer of at least {least}{top}, got {value!r}")


def check_block_size(block_size: int) -> int:
    """The block size if a coded page can hold one block.

    Raises:
        ValueError: It cannot.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block size must be one of {BLOCK_SIZES} for coded pages, got {block_size}"
        )
    return block_size
