"""What happens to the activations of a prefix while its suffixes run.

    keep        the graph stays as it is
    offload     the graph stays, the tensors it saved wait on the CPU (pinned for a GPU)
    recompute   no graph is made; the prefix runs forward once more before its delayed backward

All three give the same gradients. On a CPU `offload` moves nothing: the tensors are there already.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import get_args

import torch

from prefixflow_verl.plan import PrefixActivations

ORDER: tuple[PrefixActivations, ...] = get_args(PrefixActivations)
"""By memory, most first: ranks agree on the last one that any of them needs."""


def saved_on_cpu() -> AbstractContextManager:
    """Tensors that autograd saves inside go to the CPU and come back for backward.

    Parameters stay: FSDP2 frees and refills their storage by itself.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_cpu, _from_cpu)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
    source = tensor if tensor._base is None else tensor._base
    if tensor.device.type == "cpu" or isinstance(source, torch.nn.Parameter):
        return tensor
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    # The copy is ordered before whatever reuses the tensor's memory on the same stream.
    return tensor.device, pinned.copy_(tensor, non_blocking=True)


def _from_cpu(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, pinned = packed
    return pinned.to(device, non_blocking=True)
