# SPDX-License-Identifier: Apache-2.0
"""How often each head turns to a token that nothing in a prompt predicts.

Some heads rest on the sinks for hundreds of tokens and then copy from one place. Dropping the runs
that such a head has not looked at seems free, and is not. What later queries lose beyond what was
predicted is measured on calibration texts. Derivation: docs/math/retention.md, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS
from sphkv.evaluation.harness.states import LayerStates, PromptStates
from sphkv.retention.features import (
    drop_losses,
    measure_features,
    pool_runs,
    surprise_shift,
    window_rows,
)
from sphkv.retention.measure import MeasureConfig, predict_rows, protected_states, row_share
from sphkv.retention.pricing import rank_units
from sphkv.retention.protection import widen_to_runs
from sphkv.retention.scores import unit_tokens


def head_surprise(
    config: MeasureConfig, texts: Iterable[PromptStates], *, num_later: int
) -> Tensor:
    """Part of the later queries of every head that turn to a token unforeseen, per factor of age.

    The less important half of a prompt's runs is dropped; what the queries after the prompt lose
    beyond the predicted loss is compared with what they would lose if every one of them turned to
    one token in each factor e of age.

    Args:
        config: Model, tiers and a policy that expects no surprise.
        texts: Texts whose last ``num_later`` tokens come after the prompt.
        num_later: Tokens after the prompt.

    Returns:
        ``[layers, heads]`` float32.
    """
    geometry = config.geometry
    total = torch.zeros(geometry.num_layers, geometry.num_kv_heads, 2)
    for text in texts:
        for layer, states in enumerate(text.layers):
            total[layer] += _excess(config, layer, states, num_later)
    excess, most = total.unbind(-1)
    return (excess / most.clamp(min=torch.finfo(torch.float32).tiny)).clamp(0, 1)


def _excess(config: MeasureConfig, layer: int, states: LayerStates, num_later: int) -> Tensor:
    """``[heads, 2]`` loss beyond what is predicted, and the most that surprise could cause."""
    query, keys, values = states.query, states.keys, states.values
    tokens = keys.shape[1] - num_later
    known = values[:, :tokens]
    _, rows = predict_rows(config, layer, query[:, :tokens], keys[:, :tokens])
    features = measure_features(
        rows, keys[:, :tokens], known, sinks=config.protection.sink_tokens, recent=RUN_TOKENS
    )
    later = window_rows(
        query[:, tokens:],
        torch.arange(tokens, keys.shape[1]),
        keys,
        scale=config.geometry.head_dim**-0.5,
        share=row_share(config, layer),
    )
    # what they give is known, however near to a token they stand
    later = replace(later, is_valid=torch.ones_like(later.is_valid))
    free = ~widen_to_runs(protected_states(config, features.radius))
    score, most = pool_runs(features, RUN_TOKENS).shift, surprise_shift(rows, known)
    coverage = rows.coverage()
    found = []
    for head in range(keys.shape[0]):
        runs = rank_units(score[head], free[head, ::RUN_TOKENS], block_units=1)
        gone = unit_tokens(runs[runs.shape[0] // 2 :], RUN_TOKENS, tokens).reshape(1, -1)
        predicted = drop_losses(rows, known, gone, head)[-1] * (1 / coverage[head, gone]).mean()
        lost = drop_losses(later, values, gone, head)[-1]
        found.append(torch.stack([lost - predicted, most[head, gone].sum()]))
    return torch.stack(found)
