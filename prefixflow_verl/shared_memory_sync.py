"""A verl checkpoint engine that hands weights over through a file in shared memory.

verl's `separate_async` mode needs a checkpoint engine between trainer and rollout, and the ones it
ships want GPUs or RDMA. This one is for a single machine without an accelerator. Chosen by

    actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=prefixflow_verl.shared_memory_sync
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

POLL_INTERVAL_S = 0.02


@CheckpointEngineRegistry.register("shared_memory")
class SharedMemoryCheckpointEngine(CheckpointEngine):
    """Trainer rank 0 writes all weights to one file; every rollout worker reads it.

    Args:
        bucket_size: verl's transfer granularity, in bytes; unused, the file holds everything.
        is_master: whether this is trainer rank 0; unused, verl passes the rank again later.
        directory: where the file goes; room for one copy of the weights.
        timeout_s: how long a rollout worker waits for the file, in seconds.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        directory: str = "/dev/shm",
        timeout_s: float = 300.0,
    ):
        self._directory = Path(directory)
        self._timeout_s = timeout_s
        self._rank: int | None = None
        self._file: Path | None = None

    def prepare(self) -> dict[str, str]:
        return {"name": uuid.uuid4().hex}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer ranks count from 0; every rollout worker is None and only reads."""
        name = metadata[0]["name"]
        trainer = {"rank": list(range(actor_wg_world_size)), "name": [name] * actor_wg_world_size}
        rollout = {"rank": [None] * rollout_world_size, "name": [name] * rollout_world_size}
        return trainer, rollout

    def init_process_group(self, rank: int | None, name: str) -> None:
        self._rank = rank
        self._file = self._directory / f"prefixflow-weights-{name}.pt"

    def finalize(self) -> None:
        if self._rank == 0:
            self._file.unlink(missing_ok=True)

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> dict[str, float]:
        """Writes the weights. Every rank must call it: producing them is a collective."""
        started = time.monotonic()
        kept = {}
        for name, weight in weights:
            if self._rank == 0:
                kept[name] = weight.detach().clone()
        if self._rank == 0:
            # Readers wait for the name, so it must not exist before the content is complete.
            unfinished = self._file.with_suffix(".unfinished")
            torch.save(kept, unfinished)
            unfinished.rename(self._file)
        return {"checkpoint_engine/send_s": time.monotonic() - started}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields every parameter of the file once it is there.

        Raises:
            TimeoutError: the trainer wrote no file within `timeout_s`.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights at {self._file} after {self._timeout_s:.0f} s")
            await asyncio.sleep(POLL_INTERVAL_S)
        weights = torch.load(self._file, map_location="cpu", weights_only=True)
        for name, weight in weights.items():
            yield name, weight
