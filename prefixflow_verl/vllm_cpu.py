"""Weight sync into vLLM's CPU build.

On a CPU vLLM repacks the weight of every linear layer for its kernels and leaves an empty parameter
behind, so verl's `model.load_weights` has nothing to load into. vLLM's own `reload_weights`
restores the parameters, loads, and packs again.

Chosen by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
"""

from __future__ import annotations

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's vLLM worker extension with a weight sync that vLLM's CPU build can carry out."""

    def update_weights_from_ipc(
        self,
        peft_config: dict | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        """Receives every parameter from the trainer and reloads the model with them.

        Raises:
            ValueError: the trainer sends LoRA adapters instead of full weights.
        """
        if peft_config is not None:
            raise ValueError(
                "vLLM's CPU build cannot load LoRA adapters during training: set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        received: list[tuple[str, torch.Tensor]] = []

        def keep(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # The bucket is shared memory that the sender fills again.
            received.extend((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(received))
