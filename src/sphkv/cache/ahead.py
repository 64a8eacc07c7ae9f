# SPDX-License-Identifier: Apache-2.0
"""A decode step that a GPU begins before anyone has asked for it.

It runs on a stream of its own, behind all that was queued when it was launched and beside all that
is queued later. It reads the cache and writes behind its tails, so whatever changes the cache, or
runs another of its steps, first has to come behind it: ``StepAhead.join``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

# Threads with caches of their own share the stream, on which steps are captured as well.
AHEAD_LOCK = threading.RLock()


@functools.cache
def ahead_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of steps that are launched ahead, which are also captured there.

    A captured product has the workspace of the stream that it was captured on. Those of this one
    are shared by such steps alone, of which one runs at a time.
    """
    return torch.cuda.Stream(device)


class StepAhead:
    """The one step of a cache that may be under way before it is asked for."""

    def __init__(self) -> None:
        """There is none."""
        self._behind: torch.cuda.Stream | None = None

    @property
    def is_launched(self) -> bool:
        """Whether there is one that nothing was made to wait for."""
        return self._behind is not None

    def launch(self, replay: Callable[[], None], device: torch.device) -> None:
        """Queue a step behind all that the current stream has; that stream does not wait for it."""
        side, behind = ahead_stream(device), torch.cuda.current_stream(device)
        with AHEAD_LOCK:
            side.wait_stream(behind)
            self._behind = behind
            _LAUNCHED.add(self)
            with torch.cuda.stream(side):
                replay()

    def join(self) -> None:
        """What is queued from now on comes after the step; the host does not wait."""
        with AHEAD_LOCK:
            behind = self._behind
            if behind is None:
                return
            side, current = ahead_stream(behind.device), torch.cuda.current_stream(behind.device)
            # what the cache gives up is used again by the stream that it was made on
            behind.wait_stream(side)
            if current != behind:
                current.wait_stream(side)
            self._behind = None
            _LAUNCHED.discard(self)

    def __del__(self) -> None:
        """A cache that is let go gives up memory that the step may still write to."""
        # nobody asked for this now: the current stream may be one that captures
        if self._behind is not None and not sys.is_finalizing():
            self._behind.wait_stream(ahead_stream(self._behind.device))


_LAUNCHED: WeakSet[StepAhead] = WeakSet()


def join_all() -> None:
    """What is queued from now on comes after the steps that any cache has launched ahead.

    Captured steps share workspaces, so two of them must not run side by side.
    """
    for step in list(_LAUNCHED):
        step.join()
