# SPDX-License-Identifier: Apache-2.0
"""Heads that copy are found, and the controller keeps what they may be asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv import SphericalCache
from sphkv.integrations.transformers import copying
from sphkv.integrations.transformers.cache import RetentionOptions
from sphkv.integrations.transformers.copying import copy_shares
from sphkv.retention.policy import RetentionPolicy


def test_a_head_that_looks_at_the_copy_or_behind_it_copies():
    count = dim = 24
    each = torch.eye(dim)
    first = 40.0 * torch.cat([each, each])
    same, behind, other = each, each.roll(-1, 0), each.roll(-5, 0)
    keys = first.expand(3, -1, -1).clone()
    # only the first of two equal keys is looked at
    keys[:, count:] = 0
    query = torch.stack([torch.cat([each, part]) for part in (same, behind, other)])
    call: Any = SimpleNamespace(
        query=query[None], key=keys[None], options={"scaling": 1.0}, previous="eager"
    )
    found = copying._looked_back(call)
    assert found.shape == (3,)
    assert float(found[0]) > 0.95
    # the last token of the first copy has the second copy behind it
    assert float(found[1]) > 0.9
    assert float(found[2]) < 0.1
    # a sink as strong as the copy takes half of every query, a cap makes all tokens alike
    call.options["s_aux"] = torch.full((3,), 40.0)
    assert float(copying._looked_back(call)[0]) == pytest.approx(0.25, abs=0.01)
    call.options["s_aux"] = None
    call.options["softcap"] = 0.01
    assert float(copying._looked_back(call)[0]) < 0.01


def test_modules_keep_their_modes_and_broken_models_their_own_errors(tiny_model):
    import copy

    model = copy.deepcopy(tiny_model("llama3"))
    model.train()
    first, second = model.model.layers
    first.eval()
    copy_shares(model)
    assert model.training
    assert second.training
    assert not first.training
    broken = copy.deepcopy(tiny_model("llama3"))
    broken.model.layers[1].self_attn.k_proj.weight.data.fill_(torch.inf)
    assert bool(copy_shares(broken).isfinite().all())


def test_windows_copy_nothing_and_the_model_is_as_before(tiny_model):
    model = tiny_model("gpt-oss")
    before = model.config._attn_implementation
    found = copy_shares(model)
    assert found.shape == (2, 2)
    assert bool((found[0] == 0).all())
    assert bool((found[1] > 0).all())
    assert bool((found <= 1).all())
    assert model.config._attn_implementation == before
    assert copy_shares(model) is found


def test_a_controller_without_a_policy_expects_copies(tiny_model):
    model = tiny_model("llama3")

    def policy(budget: str, retention: bool | RetentionOptions | None = None) -> RetentionPolicy:
        with SphericalCache.for_model(model, budget, retention=retention) as cache:
            assert cache.config.retention is not None
            return cache.config.retention.policy

    found = policy("60%", RetentionOptions(copying=0.5)).surprise
    assert found is not None
    assert torch.allclose(torch.tensor(found), 0.5 * copy_shares(model))
    assert policy("8%").surprise is not None
    # one tier holds this budget, and nobody will decide
    assert policy("60%").surprise is None
    # a total of bytes is spent by long prompts
    assert policy("2MiB").surprise is not None
    assert policy("60%", RetentionOptions(copying=0.0)).surprise is None
    with pytest.raises(ValueError, match=r"copying must be in 0\.\.1, got 50\.0"):
        RetentionOptions(copying=50.0)
    assert policy("60%", RetentionOptions(policy=RetentionPolicy())).surprise is None


def test_the_heads_of_a_real_model_that_copy(smollm2):
    found = copy_shares(smollm2[0])
    best = found.flatten().topk(4).indices.tolist()
    # the same heads that later text surprised most when the policy was fitted on books
    assert {(17, 1), (18, 2)} <= {(at // 3, at % 3) for at in best}
    assert float(found.median()) < 0.02 * float(found.max())
