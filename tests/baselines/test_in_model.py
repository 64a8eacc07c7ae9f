# SPDX-License-Identifier: Apache-2.0
"""Baselines under a tiny random model: the nearer to dense, the nearer its hidden states."""

from typing import Any

import pytest
import torch

from sphkv.baselines.registry import BASELINES, make_baseline

transformers = pytest.importorskip(
    "transformers", reason="the extra sphkv[transformers] is not installed"
)
from sphkv.evaluation.harness.states import PromptStates, read_prompt  # noqa: E402
from sphkv.evaluation.harness.subject import MethodSubject  # noqa: E402
from sphkv.integrations.transformers.architecture import model_geometry, model_ropes  # noqa: E402

# relative error of the final hidden states: bfloat16, eight, two, and about eight bits
_BOUNDS = {
    "dense": 0.01,
    "retention": 0.01,
    "system": 0.01,
    "fp8": 0.03,
    "int2": 0.3,
    "bits": 0.12,
    "both": 0.25,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.06,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def prompt(model: Any) -> PromptStates:
    generator = torch.Generator().manual_seed(1)
    return read_prompt(model, torch.randint(3, 97, (1, 560), generator=generator), num_following=40)


@pytest.mark.parametrize("name", BASELINES)
def test_hidden_states_stay_near_dense(name: str, model: Any, prompt: PromptStates) -> None:
    family = BASELINES[name].family
    # with room for all, methods that drop tokens are exact
    budget = {"bits": 0.6, "retention": 2.0}.get(family, 1.0)
    method = make_baseline(name, model_geometry(model), model_ropes(model), budget, num_new=48)
    subject = MethodSubject(model, method, prompt.geometry)
    subject.store_prompt(prompt)
    hidden = subject.feed(prompt.following).hidden
    exact = prompt.hidden[1:]
    error = float((hidden - exact).norm() / exact.norm())
    assert error < _BOUNDS.get(name, _BOUNDS[family])
    assert method.num_tokens() == 560
    assert subject.feed(prompt.following[:, :1]).hidden.shape == (1, 64)
