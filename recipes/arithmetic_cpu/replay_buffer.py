"""verl's replay buffers with a shorter poll: its 2 s are most of a tiny model's training step."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_INTERVAL_S = 0.1


class FastReplayBuffer(ReplayBuffer):
    """For `trainer.v1.trainer_mode=sync`."""

    def __init__(self, **settings: Any):
        super().__init__(poll_interval=POLL_INTERVAL_S, **settings)


class FastReplayBufferAsync(ReplayBufferAsync):
    """For the asynchronous trainer modes."""

    def __init__(self, **settings: Any):
        super().__init__(poll_interval=POLL_INTERVAL_S, **settings)
