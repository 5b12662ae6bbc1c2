"""Real process groups for tests: spawned gloo ranks with file rendezvous."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(rank, world_size, *args)` on every rank; returns the ranks' results in order.

    The function must be importable. A rank that raises fails the caller with its traceback.
    """
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_entry, args=(world_size, directory, function, args), nprocs=world_size, join=True)
        return [
            pickle.loads((Path(directory) / f"result_{rank}").read_bytes())
            for rank in range(world_size)
        ]


def _entry(
    rank: int, world_size: int, directory: str, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "cpu:gloo",
        init_method=f"file://{Path(directory) / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        result = function(rank, world_size, *args)
        (Path(directory) / f"result_{rank}").write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
