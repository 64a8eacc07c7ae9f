# SPDX-License-Identifier: Apache-2.0
"""The open tail: the newest states of a layer, dense until a page of them seals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.store.config import StoreConfig


@dataclass(frozen=True, slots=True, eq=False)
class TailView:
    """Dense states a kernel reads beside the pages.

    Attributes:
        keys: ``[heads, tokens, head_dim]`` bfloat16, after rotary embedding.
        values: ``[heads, tokens, head_dim]`` bfloat16.
        first_position: Position of the first state; the others follow it.
    """

    keys: Tensor
    values: Tensor
    first_position: int

    @classmethod
    def empty(cls, config: StoreConfig, first_position: int) -> "TailView":
        """A tail without states."""
        shape = (config.geometry.num_kv_heads, 0, config.geometry.head_dim)
        none = torch.empty(shape, dtype=torch.bfloat16, device=config.device)
        return cls(none, none, first_position)

    @property
    def num_tokens(self) -> int:
        """States of each head."""
        return self.keys.shape[1]


class OpenTail:
    """Dense buffer for the newest states of one layer of one sequence.

    Attributes:
        states: ``[2, heads, capacity, head_dim]`` bfloat16, keys then values.
        keys: ``[heads, capacity, head_dim]``, the first half.
        values: ``[heads, capacity, head_dim]``, the second half.
        first_position: Position of the oldest state.
        num_tokens: States in use.
    """

    def __init__(self, states: Tensor, first_position: int, num_tokens: int) -> None:
        """Take over a buffer ``[2, heads, capacity, head_dim]`` of keys and values."""
        self.states = states
        self.keys, self.values = states
        self.first_position = first_position
        self.num_tokens = num_tokens

    @classmethod
    def blank(cls, config: StoreConfig, first_position: int) -> "OpenTail":
        """An empty buffer of the configured capacity."""
        shape = (2, config.geometry.num_kv_heads, config.tail_capacity, config.geometry.head_dim)
        states = torch.zeros(shape, dtype=torch.bfloat16, device=config.device)
        return cls(states, first_position, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.states.nbytes

    def tensors(self) -> tuple[Tensor]:
        """Everything the tail keeps alive."""
        return (self.states,)

    def view(self) -> TailView:
        """The states in use, without a copy."""
        live = slice(0, self.num_tokens)
        return TailView(self.keys[:, live], self.values[:, live], self.first_position)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add states; they must fit.

        Args:
            keys: ``[heads, tokens, head_dim]``.
            values: ``[heads, tokens, head_dim]``.
        """
        live = slice(self.num_tokens, self.num_tokens + keys.shape[1])
        self.keys[:, live] = keys
        self.values[:, live] = values
        self.num_tokens += keys.shape[1]

    def restart(self, first_position: int) -> None:
        """Forget all states and begin at another position."""
        self.first_position = first_position
        self.num_tokens = 0

    def forget_oldest(self, num_tokens: int) -> None:
        """Give up the oldest states and move the rest to the front."""
        left = self.num_tokens - num_tokens
        rest = self.states[:, :, num_tokens : self.num_tokens]
        # a copy inside a buffer must not read what it has written
        self.states[:, :, :left] = rest if left <= num_tokens else rest.clone()
        self.first_position += num_tokens
        self.num_tokens = left

    def crop(self, num_tokens: int) -> None:
        """Forget states at positions from ``num_tokens`` on."""
        if num_tokens < self.first_position:
            self.restart(num_tokens)
        else:
            self.num_tokens = min(self.num_tokens, num_tokens - self.first_position)

    def copy(self) -> "OpenTail":
        """A tail of its own with the same states and capacity."""
        return OpenTail(self.states.clone(), self.first_position, self.num_tokens)
