"""A rank that fails says why, and the others stop instead of waiting for it.

[Note: a rank that fails alone]
A rank that raises leaves the others in a collective that never ends, until a timeout of its own
(often half an hour) reports a symptom. So it first puts its message where the others look, in the
store through which the process group was made. A rank whose collective breaks looks there and
reports that message; one that stays blocked is ended after a while by a thread that watches the
store, because nothing can wake it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a process that was ended because another rank had failed."""

POLL_S = 0.5
GRACE_S = 3.0
"""How long a rank whose collective broke waits for another one's message."""

_KEY = "failure"


class RankFailedError(RuntimeError):
    """Another rank failed; the message says which one and why."""


class FailureBoard:
    """Where the ranks of a process group tell each other that they have failed.

    Args:
        timeout_s: a rank that is blocked this long after another one has failed is ended.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        # A client of its own: the watching thread must not wait for the main thread.
        store = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore("prefixflow", store)
        self._inside = threading.Event()
        threading.Thread(target=self._watch, name="prefixflow-failures", daemon=True).start()

    @contextmanager
    def watched(self, common: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Run a block that meets other ranks in collectives.

        Args:
            common: errors that all ranks raise together, and may go on after.

        Raises:
            RankFailedError: a collective broke because another rank failed or is gone.
        """
        self._inside.set()
        try:
            yield
        except common:
            raise
        except Exception as error:
            if not _is_of_collective(error):
                self._post(error)
                raise
            raise RankFailedError(self._cause(error)) from error
        finally:
            self._inside.clear()

    def _post(self, error: Exception) -> None:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = (
            f"rank {self._rank} on {socket.gethostname()}: {type(error).__name__}: {error}{notes}"
        )
        logger.error("prefixflow: %s", text)
        try:
            self._store.compare_set(_KEY, "", text)
        except RuntimeError as store_error:
            logger.error("prefixflow: the other ranks cannot be told: %s", store_error)

    def _read(self) -> str | None:
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except RuntimeError:
            # The rank that keeps the store is gone.
            return None

    def _cause(self, error: Exception) -> str:
        deadline = time.monotonic() + GRACE_S
        while (found := self._read()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if found is not None:
            return f"another rank failed, {found}"
        where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        return (
            f"another rank is gone (killed, out of memory on its host, or unreachable): a "
            f"collective broke{where}"
        )

    def _watch(self) -> None:
        while True:
            self._inside.wait()
            found = self._read()
            if found is None:
                time.sleep(POLL_S)
                continue
            deadline = time.monotonic() + self._timeout_s
            while self._inside.is_set() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if self._inside.is_set():
                sys.stderr.write(f"prefixflow: stopped, another rank failed, {found}\n")
                sys.stderr.flush()
                os._exit(EXIT_STATUS)
            return


def _is_of_collective(error: Exception) -> bool:
    """Whether `error` comes from a backend that lost its peers or waited for them too long."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("/gloo/" in text or "NCCL" in text)
