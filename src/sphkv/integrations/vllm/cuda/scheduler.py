# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, which also tells the managers of blocks what budget a request asks for."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sphkv.integrations.vllm.cuda.manager import request_shares
from sphkv.integrations.vllm.cuda.retain import request_share
from sphkv.integrations.vllm.options import ServeOptions

_log = init_logger("vllm.sphkv")


class SphericalScheduler(AsyncScheduler):  # type: ignore[misc]
    """Takes note of what requests ask for in ``extra_args``.

    vLLM's managers of blocks are told the name of a request and no more, and they run in the
    process of the scheduler; so this leaves a note for them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = ServeOptions.from_config(self.vllm_config.additional_config)
        self._budget = None if options is None else options.budget_bytes

    def add_request(self, request: Any) -> None:
        """Queue a request; one whose budget is no number of bytes has the server's."""
        if self._budget is not None:
            try:
                share = request_share(request.sampling_params, self._budget)
            except ValueError as error:
                _log.warning("request %s: %s", request.request_id, error)
                share = 1.0
            if share < 1.0:
                request_shares[request.request_id] = share
        super().add_request(request)

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)
        request_shares.pop(request.request_id, None)
