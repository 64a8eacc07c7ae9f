# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from sphkv.cli.main import main
from sphkv.codec.calibration import CalibrationOptions
from sphkv.codec.calibration_file import save_calibration
from sphkv.codec.codebook import CodebookFit
from sphkv.evaluation.demo.run import hidden_facts, make_document
from sphkv.evaluation.lm import (
    COORDINATES,
    CoordinateMethod,
    comparison_method,
    shared_bits,
    tier_for_bits,
)
from sphkv.integrations.transformers.calibrate import calibrate_model


def test_bits_are_met_from_below():
    for key_bits in (1.25, 2.25, 3.25, 4.25):
        tier = tier_for_bits(key_bits, 16, 64)
        stored = tier.key_bits_stored(64) + shared_bits(64)
        assert key_bits - 0.1 < stored <= key_bits
    assert tier_for_bits(2.25, 3.25, 64).value_bits == 3
    assert tier_for_bits(2.25, 3.1, 64).value_bits == 2
    assert tier_for_bits(2.25, 16, 64).value_bits == 16
    assert tier_for_bits(2.25, 4.25, 128).value_bits == 4
    with pytest.raises(ValueError, match=r"key_bits 0\.1"):
        tier_for_bits(0.1, 16, 64)
    with pytest.raises(ValueError, match="value_bits 2"):
        tier_for_bits(2.25, 2, 64)


def test_comparison_codecs_are_met_from_below():
    method = comparison_method("rotation-lloyd", 2.3, 16, head_dim=64, dense_tokens=4)
    assert method.key_bits == 2.25
    assert method.value_codec is None
    with pytest.raises(ValueError, match="per-channel-int needs at least 2 key bits"):
        comparison_method("per-channel-int", 1.5, 16, head_dim=64, dense_tokens=4)


@pytest.mark.parametrize("name", COORDINATES)
def test_coordinates_of_the_paper_pay_for_every_angle(name):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 400, 16, generator=generator)
    values = torch.randn(2, 400, 16, generator=generator)

    def method(bits: float, value_bits: float = 16) -> CoordinateMethod:
        return CoordinateMethod(name, bits, value_bits, calibration_keys=[keys], dense_tokens=4)

    made = method(5.5)
    # fifteen angles of 4 bits and a float16 radius; five bits each would need 5.6875
    assert made.angle_bits == 4
    assert made.key_bits == pytest.approx((15 * 4 + 16) / 16 + shared_bits(16))
    assert made.table_bytes == 2 * 15 * 16 * 4
    restored, same = made(0, keys, keys, values)
    assert torch.equal(same, values)
    assert torch.equal(restored[:, :4], keys[:, :4])
    errors = [
        float((method(bits)(0, keys, keys, values)[0] - keys).norm() / keys.norm())
        for bits in (3.5, 5.5, 8.0)
    ]
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 0.15
    coded = method(5.5, 5.5)
    assert coded.value_bits == pytest.approx(4 + 8 / 16 + shared_bits(16))
    assert not torch.equal(coded(0, keys, keys, values)[1][:, 4:], values[:, 4:])
    with pytest.raises(ValueError, match=f"{name} needs at least"):
        method(1.5)


def test_document_hides_every_fact_once():
    facts = hidden_facts()
    document = make_document(300, facts)
    for fact in facts:
        assert document.count(fact.sentence) == 1
        assert fact.answer in fact.sentence
    assert document == make_document(300, hidden_facts())


def measure(tmp_path, text, *extra):
    out = tmp_path / "record.json"
    argv = ["eval", "lm", "--model", "smollm2", "--text", str(text), "--context", "448"]
    assert main([*argv, "--out", str(out), *extra]) == 0
    return json.loads(out.read_text())


def test_real_model_loses_little_and_less_than_a_rotation_codec(smollm2, tmp_path):
    """A short run of the real harness: figures of a tiny text, so bounds are loose."""
    text = tmp_path / "text.txt"
    text.write_text(make_document(120, hidden_facts()), encoding="utf-8")
    model, tokenizer = smollm2
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :448]
    # far fewer steps than the usual fit, and still far ahead
    effort = CalibrationOptions(max_tokens=256, fit=CodebookFit(iterations=3, refinements=2))
    made = calibrate_model(model, ids, model_id="smollm2", options=effort)
    save_calibration(made, tmp_path / "codebooks.safetensors")
    fitted = ("--calibration", str(tmp_path / "codebooks.safetensors"))
    ours = measure(tmp_path, text, "--key-bits", "2.25", "--value-bits", "4.25", *fitted)
    other = measure(
        tmp_path, text, "--key-bits", "2.25", "--value-bits", "4.25", "--method", "rotation-lloyd"
    )
    assert ours["key_bits"] <= 2.25
    assert 0 < ours["kl"] < 0.25
    assert ours["kl"] < 0.5 * other["kl"]
    ledger = ours["ledger"]
    kinds = ("codes", "radii", "values", "positions", "headers", "ptr", "tags", "prot", "frag")
    assert ledger["total"] == sum(ledger[kind] for kind in kinds)
    assert ours["b_kv"] == pytest.approx(ledger["total"] / 448)
    with pytest.raises(AssertionError):
        measure(tmp_path, text, "--context", "100000")
