# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with coded blocks, or no server.

python -m sphkv.integrations.vllm.serve MODEL [--sphkv '{"key_bits": 2}'] [vLLM's own options]
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence

from sphkv.integrations.vllm.options import CONFIG_KEY, ServeOptions
from sphkv.integrations.vllm.plugin import WORKER_PATH

_FLAG = "--sphkv"
_OURS = ("--worker-cls", "--additional-config")


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of vLLM's server that make it serve from coded blocks.

    Args:
        arguments: The model, then ``--sphkv`` and vLLM's options in any order.

    Raises:
        ValueError: There is no model, or an option is malformed or set by us.
    """
    rest = list(arguments)
    if not rest or rest[0].startswith("-"):
        raise ValueError("the first argument must be the model")
    model, rest = rest[0], rest[1:]
    options: object = {}
    if _FLAG in rest:
        at = rest.index(_FLAG)
        text = rest[at + 1] if at + 1 < len(rest) else ""
        try:
            options = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_FLAG} must be a JSON object, got {text!r}: {error}") from error
        del rest[at : at + 2]
    for flag in _OURS:
        if any(part == flag or part.startswith(flag + "=") for part in rest):
            raise ValueError(f"{flag} is set by this command; use {_FLAG}")
    config = {CONFIG_KEY: options}
    parsed = ServeOptions.from_config(config)
    if parsed is not None and parsed.budget_bytes is not None:
        # what such a block holds depends on the queries that came after it
        rest.append("--no-enable-prefix-caching")
    return [
        *("--model", model, "--worker-cls", WORKER_PATH),
        *("--additional-config", json.dumps(config)),
        *rest,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server."""
    try:
        given = server_arguments(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        sys.exit(f"sphkv: {error}")
    sys.argv = ["vllm-server", *given]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
