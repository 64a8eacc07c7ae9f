# SPDX-License-Identifier: Apache-2.0
"""Decisions as they were when every head was priced and planned by itself."""

from pathlib import Path
from typing import Any

import torch
from tests.retention.test_controller import BOTH, decide

from sphkv.codec.calibration import CalibrationOptions
from sphkv.codec.codebook import CodebookFit
from sphkv.retention.policy import VARIANTS, BlockShape, ControlOptions
from sphkv.retention.scores import SCORES

OPTIONS = {
    **{variant: ControlOptions(variant=variant, shapes=BOTH) for variant in VARIANTS},
    **{score: ControlOptions(score=score) for score in SCORES},
    "all shapes": ControlOptions(shapes=tuple(BlockShape)),
    "tokens": ControlOptions(shapes=(BlockShape.TOKENS,)),
    "value per byte": ControlOptions(solver="value-per-byte", shapes=BOTH),
    "uniform heads": ControlOptions(shapes=(BlockShape.RUNS,), uniform_heads=True),
}


def test_random_layers_get_the_same_tiers(golden):
    found = [decide(40_000, options)[1].tier_id for options in OPTIONS.values()]
    golden.check("decisions-random.bin", torch.stack(found).numpy().tobytes())


def test_a_book_gets_the_same_tiers(
    golden: Any, smollm2: tuple[Any, Any], shared_data: Path
) -> None:
    from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions, SphericalCache

    model, tokenizer = smollm2
    text = (shared_data / "pg19" / "10146.txt").read_text(encoding="utf-8")[20_000:40_000]
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :1024]
    # decisions are compared, not codebooks: these may be coarse
    effort = CalibrationOptions(max_tokens=256, fit=CodebookFit(iterations=3, refinements=2))
    options = CacheOptions(calibration=effort)
    calibration = None
    for percent in (20, 35):
        contracts: list[Any] = []
        with SphericalCache.for_model(
            model,
            f"{percent}%",
            retention=RetentionOptions(),
            calibration=calibration,
            options=options,
        ) as cache:
            cache.engine.on_contract = contracts.append
            with torch.no_grad():
                model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            # fitted on this prompt at the first budget
            calibration = cache.calibration
        runs = contracts[0].tier_id[..., ::16].contiguous()
        expected = golden.read(f"decisions-smollm2-{percent}.bin", runs.numpy().tobytes())
        before = torch.frombuffer(bytearray(expected), dtype=torch.uint8).view_as(runs)
        # codebooks are fitted by the processor at hand, whose rounding moves one decision in fifty
        assert float((runs == before).float().mean()) > 0.97
        assert abs(float(runs.float().mean() / before.float().mean()) - 1) < 0.01
