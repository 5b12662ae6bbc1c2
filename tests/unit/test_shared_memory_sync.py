"""Weights that trainer rank 0 sends are the weights every rollout worker receives."""

import asyncio

import pytest
import torch

from prefixflow_verl.shared_memory_sync import SharedMemoryCheckpointEngine


def make_engines(directory, *, num_trainers: int, num_rollouts: int, timeout_s: float = 5.0):
    engines = [
        SharedMemoryCheckpointEngine(bucket_size=1, directory=str(directory), timeout_s=timeout_s)
        for _ in range(num_trainers + num_rollouts)
    ]
    metadata = [engine.prepare() for engine in engines]
    trainer, rollout = SharedMemoryCheckpointEngine.build_topology(
        num_trainers, num_rollouts, metadata
    )
    for i, engine in enumerate(engines[:num_trainers]):
        engine.init_process_group(**{key: values[i] for key, values in trainer.items()})
    for i, engine in enumerate(engines[num_trainers:]):
        engine.init_process_group(**{key: values[i] for key, values in rollout.items()})
    return engines[:num_trainers], engines[num_trainers:]


async def receive(engine: SharedMemoryCheckpointEngine) -> dict[str, torch.Tensor]:
    return {name: weight async for name, weight in engine.receive_weights()}


def test_every_rollout_worker_receives_what_rank_0_sent(tmp_path):
    trainers, rollouts = make_engines(tmp_path, num_trainers=2, num_rollouts=2)

    async def transfer():
        received = [asyncio.create_task(receive(engine)) for engine in rollouts]
        for rank, engine in enumerate(trainers):
            await engine.send_weights(iter([("weight", torch.full((3,), float(rank)))]))
        return await asyncio.gather(*received)

    for weights in asyncio.run(transfer()):
        assert weights["weight"].tolist() == [0.0, 0.0, 0.0]
    for engine in [*rollouts, *trainers]:
        engine.finalize()
    assert list(tmp_path.iterdir()) == []


def test_missing_weights_time_out_with_the_file_name(tmp_path):
    _, [rollout] = make_engines(tmp_path, num_trainers=1, num_rollouts=1, timeout_s=0.05)
    with pytest.raises(TimeoutError, match="no weights at .*prefixflow-weights-"):
        asyncio.run(receive(rollout))
