# SPDX-License-Identifier: Apache-2.0
"""Any task of lm-eval with our cache: ``python -m sphkv.integrations.lm_eval --model sphkv ...``.

lm-eval finds models in a registry and loads no plug-ins by itself, so this module registers
``sphkv`` and then runs lm-eval's own command line, with all its flags. A program that calls lm-eval
imports this module and passes ``model="sphkv"``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from transformers import DynamicCache

from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import CacheOptions, SphericalCache

_log = logging.getLogger(__name__)
_DENSE = "dense"
_ROLLING_TOKENS = 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RETENTION = {"auto": None, "always": True, "never": False}


@register_model("sphkv")
class SphericalLM(TemplateLM):  # type: ignore[misc]
    """A transformers model whose cache is ours.

    A context is read in one dense pass and coded; what comes after, a continuation that is scored
    or an answer, sees the codes. Contexts that are too short to calibrate on stay dense, as they do
    in the cache.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        budget: str = "25%",
        retention: str = "auto",
        calibration: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        backend: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        """Load a model.

        Args:
            pretrained: ``smollm2``, a local folder, a ``.gguf`` file or a hub name.
            budget: Ceiling of the cache, such as ``10%``; ``dense`` uses transformers' own cache.
            retention: ``auto``, ``always`` or ``never``: who decides what is kept.
            calibration: File of codebooks; fitted on every context if None.
            device: Where it runs. lm-eval asks for a GPU by itself; without one the processor is
                used, and a warning says so.
            dtype: ``float32``, ``bfloat16`` or ``float16``.
            backend: Decode backend.
            max_length: Most tokens; the model's if None.
            max_gen_toks: Most tokens of an answer where a task does not say.
            batch_size: 1; sequences are measured one at a time.
            max_batch_size: As lm-eval passes it; not used.
            tokenizer: As tasks that make prompts read it; the model's own is used.
        """
        super().__init__()
        if retention not in _RETENTION:
            raise ValueError(f"retention must be one of {sorted(_RETENTION)}, got {retention!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
        if str(batch_size) not in ("1", "auto"):
            raise ValueError(f"sequences are measured one at a time, got batch_size={batch_size!r}")
        model, self.tokenizer = load_model(pretrained, _DTYPES[dtype])
        self.model: Any = model
        torch.nn.Module.to(self.model, _find_device(device))
        self._device = self.model.device
        self._budget, self._retention, self._calibration = budget, retention, calibration
        self._options = CacheOptions(backend=backend, finds_calibration=False)
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", 2048)
        self.max_length = int(max_length or own)
        self.max_gen_toks = int(max_gen_toks)

    def new_cache(self) -> Any:
        """An empty cache for one sequence."""
        if self._budget == _DENSE:
            return DynamicCache()
        return SphericalCache.for_model(
            self.model,
            self._budget,
            retention=_RETENTION[self._retention],
            context=self.max_length,
            calibration=self._calibration,
            options=self._options,
        )

    @property
    def eot_token_id(self) -> int:
        """The model's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's own caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as text."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template in use; empty if none."""
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text."""
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, **given).input_ids
        return ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of continuations; neighbours with the same context share its cache."""
        found: list[tuple[float, bool]] = []
        for _, group in itertools.groupby(requests, key=lambda request: request[1]):
            parts = [(context, continuation) for _, context, continuation in group]
            found += self._scored(parts[0][0], [continuation for _, continuation in parts])
        return found

    def _scored(
        self, context: list[int], continuations: Sequence[list[int]]
    ) -> Iterator[tuple[float, bool]]:
        most = self.max_length - max(map(len, continuations))
        if len(context) > most:
            _log.warning("a context of %d tokens loses its first ones: %d fit", len(context), most)
            context = context[len(context) - most :]
        cache = self.new_cache()
        last = self._forward(cache, context)[-1:]
        for number, continuation in enumerate(continuations, 1):
            rows = [last]
            if len(continuation) > 1:
                own = cache if number == len(continuations) else _copy(cache)
                rows.append(self._forward(own, continuation[:-1]))
            yield _score(torch.cat(rows), continuation)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, read in parts through one cache."""
        found = []
        for request in requests:
            (text,) = request.args
            ids = [self.prefix_token_id, *self.tok_encode(text, add_special_tokens=False)]
            total = 0.0
            # a text that is longer than the model begins anew, one token shared
            for begin in range(0, max(1, len(ids) - 1), self.max_length - 1):
                total += self._rolled(ids[begin : begin + self.max_length])
            found.append(total)
        return found

    def _rolled(self, ids: Sequence[int]) -> float:
        cache, total = self.new_cache(), 0.0
        for at in range(0, len(ids) - 1, _ROLLING_TOKENS):
            part = ids[at : min(at + _ROLLING_TOKENS, len(ids) - 1)]
            rows = self._forward(cache, part)
            total += _score(rows, ids[at + 1 : at + 1 + len(part)])[0]
        return total

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut at the first stop."""
        return [self._answer(*request.args) for request in requests]

    @torch.no_grad()
    def _answer(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") or float(options.get("temperature") or 0.0) > 0.0:
            raise ValueError(f"answers are greedy, the task asks for {options}")
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        limit = int(options.get("max_gen_toks") or options.get("max_tokens") or self.max_gen_toks)
        ids = self.tok_encode(context)
        most = self.max_length - limit
        if len(ids) > most:
            _log.warning("a prompt of %d tokens loses its first ones: %d fit", len(ids), most)
            ids = ids[len(ids) - most :]
        given = torch.tensor([ids], device=self.model.device)
        output = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.new_cache(),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=self.eot_token_id,
            **({"stop_strings": stops, "tokenizer": self.tokenizer} if stops else {}),
        )
        text = str(self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
        for stop in stops:
            text = text.split(stop, 1)[0] if stop else text
        return text

    @torch.no_grad()
    def _forward(self, cache: Any, ids: Sequence[int]) -> Tensor:
        """Log-probabilities ``[tokens, vocabulary]`` after each token of a pass."""
        given = torch.tensor([ids], device=self.model.device)
        output = self.model(input_ids=given, past_key_values=cache, use_cache=True)
        return torch.log_softmax(output.logits[0].float(), -1)


def _find_device(name: str | None) -> torch.device:
    device = torch.device(name or "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        _log.warning("there is no %s here: the model runs on the processor", name)
        return torch.device("cpu")
    return device


def _copy(cache: Any) -> Any:
    """The same tokens in a cache of their own; coded pages are shared."""
    if isinstance(cache, SphericalCache):
        return cache.fork()
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copied.update(layer.keys.clone(), layer.values.clone(), index)
    return copied


def _score(rows: Tensor, ids: Sequence[int]) -> tuple[float, bool]:
    """Sum of log-probabilities of tokens, and whether each is the likeliest."""
    wanted = torch.tensor(ids, device=rows.device)
    total = rows.gather(1, wanted[:, None]).sum()
    return float(total), bool((rows.argmax(-1) == wanted).all())


def main() -> None:
    """lm-eval's command line, with ``sphkv`` among its models."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
