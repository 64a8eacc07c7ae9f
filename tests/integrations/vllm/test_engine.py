# SPDX-License-Identifier: Apache-2.0
"""Engines without a server: text beside stock, prefix cache, chunks, ranks, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.conftest import START_SECONDS, Generation
from tests.integrations.vllm.prompts import long_prompt

WORKER = "sphkv.integrations.vllm.worker.SphericalWorker"
Generate = Callable[..., Generation]
pytestmark = pytest.mark.timeout(3 * START_SECONDS)
PROMPTS = [long_prompt(seed, 20) for seed in range(3)]
SHORT = "The capital of France is"


@pytest.fixture(scope="module")
def stock(generate: Generate, model_folder: Path) -> Generation:
    return generate(model_folder, [PROMPTS, [SHORT]])


def chunked(calibration_file: Path, bits: int = 4) -> dict[str, Any]:
    """Several blocks, and chunks that end inside one."""
    return {
        "worker_cls": WORKER,
        "block_size": 64,
        "max_num_batched_tokens": 1024,
        "long_prefill_token_threshold": 150,
        "additional_config": {
            "sphkv": {"calibration": str(calibration_file), "key_bits": bits, "value_bits": bits}
        },
    }


@pytest.fixture(scope="module")
def coded(generate: Generate, model_folder: Path, calibration_file: Path) -> Generation:
    return generate(model_folder, [PROMPTS, [SHORT], PROMPTS], **chunked(calibration_file))


def same_start(a: list[int], b: list[int]) -> int:
    """Tokens before two continuations differ."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def assert_alike(right: Generation, other: Generation, *, noise: float) -> None:
    """Logprobs differ by ``noise`` at most in the median, and only close decisions change.

    A greedy text hangs by its closest decisions, so two texts may part where the right one's best
    token was ahead by no more than the two candidates' logprobs differ elsewhere.
    """
    gaps, margins = [], []
    for a, b, p, q in zip(right.tokens, other.tokens, right.logprobs, other.logprobs, strict=True):
        same = same_start(a, b)
        for one, two in zip(p[: same + 1], q[: same + 1], strict=False):
            gaps.append(max(abs(one[key] - two[key]) for key in one if key in two))
        if same < min(len(a), len(b)):
            ahead = max(p[same].values()) - p[same].get(str(b[same]), -99.0)
            # the token that parts says nothing about the others
            margins.append((ahead, gaps.pop()))
    assert len(gaps) >= len(right.tokens), "texts part at once"
    own = sorted([*gaps, *(gap for _, gap in margins)])
    assert own[len(own) // 2] <= noise, own
    assert all(ahead <= 2 * max(gaps) for ahead, _ in margins), (margins, max(gaps))


def test_text_is_that_of_stock(stock: Generation, coded: Generation):
    # a sequence that never fills a block is dense
    assert coded.texts[3] == stock.texts[3]
    assert_alike(stock.part(3, 4), coded.part(3, 4), noise=0.02)
    assert_alike(stock.part(0, 3), coded.part(0, 3), noise=0.5)


def test_prefix_cache_holds(coded: Generation):
    assert coded.cached[:3] == [0] * 3
    assert all(count >= 192 and count % 64 == 0 for count in coded.cached[4:])
    assert_alike(coded.part(0, 3), coded.part(4, 7), noise=0.3)


def test_repeatable_text_does_not_depend_on_chunks_and_prefixes(
    generate: Generate, model_folder: Path, calibration_file: Path
):
    given = chunked(calibration_file)
    given["additional_config"]["sphkv"]["repeatable"] = True
    # chunks of 150 tokens; found by their prefixes; in one chunk, because nobody else asks
    first, found, alone = PROMPTS, PROMPTS, PROMPTS[:1]
    made = generate(model_folder, [first, found, alone], **given)
    assert made.cached[:3] == [0] * 3
    assert all(made.cached[3:])
    assert made.texts[3:6] == made.texts[:3]
    assert made.texts[6] == made.texts[0]
    # noise is that of sums in another order, and of codes that fall on the other side by it
    assert_alike(made.part(0, 3), made.part(3, 6), noise=0.02)
    assert_alike(made.part(0, 1), made.part(6, 7), noise=0.03)


def test_the_start_up_line_says_what_serves(coded: Generation):
    line = re.search(
        r"sphkv serves: backend native \(\w+\), tier k4v4 .* (\d+) bytes per token "
        r"\(bfloat16: 23040\), (\d+) tokens in (\d+) blocks",
        coded.log,
    )
    assert line is not None
    assert int(line[1]) == 30 * 3 * (-(-(64 + 64 * 66 + 64 + 4 * 256) // 64))
    assert int(line[2]) == 64 * int(line[3])


def test_tensor_parallel(
    generate: Generate, model_folder: Path, calibration_file: Path, coded: Generation
):
    # SmolLM2 has three KV heads; with the same chunks only the order of sums differs
    ranks = generate(
        model_folder,
        [PROMPTS],
        tensor_parallel_size=3,
        distributed_executor_backend="mp",
        **chunked(calibration_file),
    )
    assert_alike(coded.part(0, 3), ranks, noise=0.3)


def test_it_calibrates_itself(generate: Generate, model_folder: Path, stock: Generation):
    own = generate(
        model_folder,
        [PROMPTS[:2]],
        worker_cls=WORKER,
        block_size=64,
        additional_config={"sphkv": {"calibration_tokens": 512, "key_bits": 4.0, "value_bits": 4}},
    )
    assert_alike(stock.part(0, 2), own, noise=0.5)


def test_without_codes_the_text_is_that_of_stock(
    generate: Generate, model_folder: Path, calibration_file: Path, stock: Generation
):
    # bfloat16 pages take the same way through blocks, tails, chunks and kernels
    own = generate(
        model_folder,
        [PROMPTS, [SHORT]],
        **chunked(calibration_file, bits=16),
    )
    assert_alike(stock, own, noise=0.03)


def test_heads_share_a_budget(
    generate: Generate, model_folder: Path, calibration_file: Path, stock: Generation
):
    given = {
        "worker_cls": WORKER,
        "block_size": 64,
        "additional_config": {"sphkv": {"calibration": str(calibration_file), "budget_bytes": 44}},
    }
    own = generate(model_folder, [PROMPTS], enable_prefix_caching=False, **given)
    assert "by need, at most 44 bytes per head" in own.log
    assert_alike(stock.part(0, 3), own, noise=1.0)
