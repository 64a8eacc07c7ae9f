# SPDX-License-Identifier: Apache-2.0
"""What is remembered of one sequence's runs, and what that says about its pages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig
from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.retention.notes import RunNotes
from sphkv.store.page_list import PageList
from sphkv.store.store import PageStore


class SequenceNotes:
    """Notes of all layers with full attention, in step with the pages of a sequence.

    Layers of a prompt are noted as they come. Once it is decided about, notes of all of them are
    joined and kept where pages are listed.

    Attributes:
        drift: Predicted move of the model's logits by what is coded and gone; as of the prompt, or
            of the last ``predict_drift``.
    """

    def __init__(self, config: CacheConfig, store: PageStore, sequence: int) -> None:
        """Nothing is noted yet.

        Args:
            config: The cache; has a retention part.
            store: Pages and tails.
            sequence: Id in the store.
        """
        assert config.retention is not None
        self._config = config
        self._retention = config.retention
        self._store = store
        self._sequence = sequence
        # of the layers of a prompt as they come, some joined; then of all of them in one
        self._layers: list[RunNotes] = []
        self._joined: RunNotes | None = None
        # ages of runs that follow, to be noted when somebody asks for notes
        self._unnoted: list[int] = []
        self.drift = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, with all runs noted."""
        missing = len(self._unnoted) * self.run_bytes
        return sum(tensor.nbytes for tensor in self.tensors()) + missing

    @property
    def run_bytes(self) -> int:
        """Bytes that notes grow by with a run."""
        joined = self._joined
        return 0 if joined is None else joined.born.itemsize + 4 * len(joined.bound)

    def tensors(self) -> list[Tensor]:
        """Everything that is kept alive."""
        held = self._layers if self._joined is None else [self._joined]
        return [tensor for notes in held for tensor in notes.tensors()]

    def layers(self) -> list[RunNotes]:
        """Notes of each layer with full attention."""
        joined = self.joined()
        held = self._layers if joined is None else [joined]
        heads = self._config.geometry.num_kv_heads
        return [notes for each in held for notes in each.split(heads)]

    def joined(self) -> RunNotes | None:
        """Notes of all layers in one, once those are written down that were put off.

        None before the prompt is decided about, and where no layer has full attention.
        """
        if self._joined is not None and self._unnoted:
            ages, self._unnoted = torch.tensor(self._unnoted), []
            self._joined.extend_at(ages, scale=self._retention.new_run_scale)
        return self._joined

    @property
    def is_measured(self) -> bool:
        """Whether a layer of a prompt was noted that is not decided about yet."""
        return bool(self._layers)

    def add_layers(self, notes: RunNotes) -> None:
        """Note the next measured layers of a prompt, joined."""
        self._layers.append(notes)

    def keep_prompt(self, tier_id: Tensor, num_tokens: int) -> None:
        """Keep what was noted of runs that are in pages now, and predict their drift.

        Args:
            tier_id: ``[layers with full attention, heads, runs]`` tier of each such run.
            num_tokens: Length of the prompt.
        """
        joined = RunNotes.join(self._layers)
        joined.crop(tier_id.shape[2] * RUN_TOKENS)
        self.drift = self.drift_of(joined, tier_id, num_tokens)
        self._keep(joined)

    def keep_unmeasured(self, tiers: TierTable) -> None:
        """Go on from a prompt of which nothing was measured."""
        if self._config.full_layers:
            heads = self._config.geometry.num_kv_heads * len(self._config.full_layers)
            self._keep(RunNotes.unmeasured(heads, tiers))

    def _keep(self, joined: RunNotes | None) -> None:
        device = self._store.config.device if self._store.allocator.has_copier else "cpu"
        self._joined = None if joined is None else joined.to(device)
        self._layers, self._unnoted = [], []

    def note_until(self, position: int) -> None:
        """Note runs before a position that were decoded, as runs of their age usually are.

        On a device that is put off until notes are read, because pages seal beside a step there.
        """
        if self._joined is None:
            return
        tokens = self._store.num_tokens(self._sequence)
        noted = self._joined.num_runs + len(self._unnoted)
        runs = range(noted, position // RUN_TOKENS)
        self._unnoted += [tokens - run * RUN_TOKENS - RUN_TOKENS // 2 for run in runs]
        if not self._store.allocator.has_copier:
            self.joined()

    def crop(self, num_tokens: int) -> None:
        """Forget runs that begin at ``num_tokens`` or later."""
        joined = self.joined()
        if joined is not None:
            joined.crop(num_tokens)

    def predict_drift(self) -> float:
        """How far what is coded and gone may move the model's logits, by the pages as they are."""
        notes = self.joined()
        if notes is not None and notes.num_runs:
            pages = self._store.page_list(self._sequence)
            tokens = self._store.num_tokens(self._sequence)
            self.drift = self.drift_of(notes, self.run_tiers(pages, notes.num_runs), tokens)
            self._store.forget_page_list(self._sequence)
        return self.drift

    def drift_of(self, notes: RunNotes, tier_id: Tensor, num_tokens: int) -> float:
        """Predicted move of the model's logits.

        Args:
            notes: Those of all layers, joined.
            tier_id: ``[layers with full attention, heads, runs]``.
            num_tokens: Length of the sequence.
        """
        squares = notes.squared_drift(tier_id.flatten(0, 1), num_tokens).double().sum()
        return self._retention.policy.drift_scale * math.sqrt(2 * float(squares))

    def new_drifts(self, tier_id: int) -> list[float]:
        """What new runs at a tier would add to the squared drift, for each full-attention layer."""
        joined = self.joined()
        assert joined is not None
        layers = joined.to("cpu").split(self._config.geometry.num_kv_heads)
        return [notes.new_drift(tier_id) for notes in layers]

    def run_tiers(self, pages: PageList, runs: int) -> Tensor:
        """``[layers with full attention, heads, runs]`` uint8 tier of every run that was noted."""
        full, heads = self._config.full_layers, self._config.geometry.num_kv_heads
        place = self.places(pages)[:, None]
        is_noted = (pages.runs >= 0) & (pages.runs < runs) & (place >= 0)
        at = place * runs + pages.runs
        tier_id = torch.zeros(len(full) * heads * runs, dtype=torch.uint8, device=at.device)
        own = pages.tier_ids[:, None].expand_as(at)
        tier_id[at[is_noted]] = own[is_noted].to(torch.uint8)
        return tier_id.view(len(full), heads, runs)

    def places(self, pages: PageList) -> Tensor:
        """``[pages]`` int64: each page's head among those of the joined notes, below 0 if none."""
        full, heads = self._config.full_layers, self._config.geometry.num_kv_heads
        first = torch.full((self._config.geometry.num_layers,), -heads)
        first[list(full)] = heads * torch.arange(len(full))
        return first.to(pages.layer_ids.device)[pages.layer_ids] + pages.head_ids

    def page_losses(self, pages: PageList) -> Tensor:
        """``[pages, tiers]`` float32: what the runs of each page would lose at every tier now.

        Args:
            pages: Pages of layers with full attention.
        """
        tokens = self._store.num_tokens(self._sequence)
        notes = self.joined()
        assert notes is not None
        losses = notes.losses(tokens)
        at = self.places(pages)[:, None]
        runs = pages.runs.long()
        each = losses[at, runs.clamp(0, losses.shape[1] - 1)]
        # runs past a page's last one point to the first run, whose loss may be infinite
        return torch.where((runs >= 0)[..., None], each, 0.0).sum(1)

    def copy_from(self, other: SequenceNotes) -> None:
        """Begin with what was noted of a sequence that this one is a copy of."""
        joined = other.joined()
        self._joined = None if joined is None else joined.copy()
        self.drift = other.drift

    def state(self) -> dict[str, Tensor]:
        """Drift and notes of every layer, by name."""
        state = {"drift": torch.tensor([self.drift], dtype=torch.float64)}
        for index, notes in enumerate(self.layers()):
            for name, tensor in notes.state().items():
                state[f"notes.{index}.{name}"] = tensor
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        self.drift = float(state["drift"])
        layers = []
        for index in range(len(self._config.full_layers)):
            lead = f"notes.{index}."
            own = {
                name.removeprefix(lead): tensor.cpu()
                for name, tensor in state.items()
                if name.startswith(lead)
            }
            layers.append(RunNotes.from_state(own))
        self._keep(RunNotes.join(layers) if layers else None)
