# SPDX-License-Identifier: Apache-2.0
"""What it costs that captured steps make room before pages seal: KL beside that of eager steps.

    python benchmarks/room_ahead.py --data DATA/pg19 --out results/cpu/room_ahead.json

On a GPU old pages are dropped beside the steps that come before a tail is full; layer by layer they
are dropped when it is. Both ways run here on a CPU, in the pages that a GPU has for short prompts:
the host stands for captured steps, so that nothing differs but when pages go. Texts are
development books, the codebooks' is a calibration book.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv import CacheOptions, RetentionOptions, SphericalCache, calibrate_model, load_model
from sphkv.attention.request import AttentionOptions, BatchRequest, DecodeBackend
from sphkv.cache.engine import CacheEngine
from sphkv.cache.plan import FAST_RETENTION_TIERS
from sphkv.codec.calibration import Calibration
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import PromptStates, log_probabilities, read_prompt
from sphkv.store.store import PageStore

CALIBRATION_TOKENS, PAGE_TOKENS = 4096, 64
TEXTS = ("10321:2000", "10356:9000", "7412:40000")


class HostSteps:
    """Stands for captured steps of a store; see ``StepGraph``."""

    max_tokens = 1 << 30

    def __init__(self, store: PageStore, sequences: Sequence[int], backend: DecodeBackend) -> None:
        self._store, self._sequences, self._backend = store, tuple(sequences), backend
        self.positions = torch.zeros(len(self._sequences), 1, dtype=torch.int64)

    def prepare(self, make_room: Callable[[], bool]) -> bool:
        """There are no lists to change."""
        make_room()
        return True

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Append the new states and attend."""
        tails = [self._store.tail(row, layer) for row in self._sequences]
        positions = torch.tensor([tail.first_position + tail.keys.shape[1] for tail in tails])
        for row, *states in zip(self._sequences, keys, values, strict=True):
            self._store.append(row, layer, *states)
        request = BatchRequest(
            self._store, self._sequences, layer, query[:, :, 0], positions, options
        )
        return self._backend.attend_rows(request).output.unsqueeze(2)

    def commit(self) -> None:
        """The store has counted."""


class HostDecoder:
    """Has every pass behind the prompt run on ``HostSteps``; see ``DecoderGraph``."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine

    def ask(self, _: dict[str, Any]) -> None:
        """No token is guessed."""

    def tell(self, _: None) -> None:
        """So none was right."""

    def expect(self, *_: Any) -> bool:
        engine = self._engine
        if engine.is_coded and engine.graph is None:
            engine.begin_graph(max_tokens=HostSteps.max_tokens)
        return engine.is_coded

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def forget(self) -> None:
        """Nothing was captured."""

    def attend(self, layer: int, *states: Any, sink_logits: Any) -> Tensor:
        graph: Any = self._engine.graph
        self._engine._fresh.pop(layer)
        return graph.attend(layer, *states)


@torch.no_grad()
def follow(
    model: Any,
    prompt: PromptStates,
    dense: Tensor,
    calibration: Calibration,
    budget: str,
    *,
    is_captured: bool,
) -> dict[str, Any]:
    """Decode what follows a prompt, token by token."""
    options = RetentionOptions(demotes=False, page_tokens=PAGE_TOKENS, refresh_share=1 / 32)
    began = time.perf_counter()
    with SphericalCache.for_model(
        model, budget, retention=options, tiers=FAST_RETENTION_TIERS, calibration=calibration,
        options=CacheOptions(cuda_graphs=False),
    ) as cache:  # fmt: skip
        engine = cache.engine
        if is_captured:
            backend: Any = engine.backend
            backend.capture = lambda store, rows, **_: HostSteps(store, rows, backend)
            cache._captured = HostDecoder(engine)  # type: ignore[assignment]
        model(input_ids=prompt.input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        shares, lengths, rows = [], [], []
        for token in prompt.following[0]:
            step = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
            rows.append(step.logits[0, -1].float().log_softmax(-1))
            shares.append(engine.resident_bytes() / (engine.limit_bytes() or 1))
            lengths.append(engine.rows[0].residency.num_rebalances)
        own = torch.stack(rows)
        kl = (dense.exp() * (dense - own)).sum(-1).double()
        drops = [at for at in range(1, len(lengths)) if lengths[at] > lengths[at - 1]]
        if is_captured and engine.graph is None:
            raise SystemExit("steps ran without the stand-in")
        return {
            "kl": float(kl.mean()), "kl_of_first_128": float(kl[:128].mean()),
            "mean_share_of_ceiling": sum(shares) / len(shares), "peak_share": engine.peak_share,
            "rebalanced_after_tokens": drops, "seconds": time.perf_counter() - began,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of books")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help="BOOK:FIRST_TOKEN")
    parser.add_argument("--budgets", nargs="+", default=["5%", "10%", "20%"])
    parser.add_argument("--steps", nargs="+", default=["eager", "captured"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--following", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)

    def tokens(name: str, first: int, count: int) -> Tensor:
        words = (args.data / f"{name}.txt").read_text(encoding="utf-8")
        ids: Tensor = tokenizer(words, return_tensors="pt").input_ids
        return ids[:, first : first + count]

    with torch.no_grad():
        ids = tokens("calibration/10046", 0, CALIBRATION_TOKENS)
        calibration = calibrate_model(model, ids, model_id=args.model)
    about = {
        "command": " ".join(["python benchmarks/room_ahead.py", *sys.argv[1:]]),
        "model": args.model, "prompt_tokens": args.prompt, "following": args.following,
        "page_tokens": PAGE_TOKENS, **describe_environment(),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for text in args.texts:
        name, first = text.split(":")
        ids = tokens(name, int(first), args.prompt + args.following)
        with torch.no_grad():
            prompt = read_prompt(model, ids, num_following=args.following)
            dense = torch.cat([part for _, part in log_probabilities(model, prompt.hidden[1:])])
        for budget in args.budgets:
            for steps in args.steps:
                found = follow(
                    model, prompt, dense, calibration, budget, is_captured=steps == "captured"
                )
                rows.append({"text": text, "budget": budget, "steps": steps, **found})
                print(json.dumps(rows[-1]), flush=True)
                args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
