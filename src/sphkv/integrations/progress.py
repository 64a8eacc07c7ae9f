# SPDX-License-Identifier: Apache-2.0
"""A progress bar over the layers of a long forward pass, for people at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from transformers import PreTrainedModel

_LONG_TOKENS = 512


@contextmanager
def layer_progress(model: PreTrainedModel, label: str, num_tokens: int) -> Iterator[None]:
    """Within the context the decoder layers move a bar on stderr.

    Nothing is drawn where stderr is no terminal, or for a pass so short that it would flicker.

    Args:
        model: The model whose passes are watched.
        label: What the pass is for.
        num_tokens: Tokens of the pass.
    """
    layers = getattr(model.base_model, "layers", None)
    if layers is None or num_tokens < _LONG_TOKENS or not sys.stderr.isatty():
        yield
        return
    with tqdm(total=len(layers), desc=f"{label}, {num_tokens} tokens", unit="layer") as bar:

        def advance(*_: object) -> None:
            bar.update()

        handles = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
