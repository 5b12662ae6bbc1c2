"""Training-time KV cache: keys and values of head packs, with gradient accumulators.

A cache holds leaf copies of what a head pack computed. Packs below read them; their attention
backward adds dK and dV into float32 accumulators here (bf16 sums over many responses lose bits).
The delayed backward of the head pack then takes the accumulated gradients as its roots' gradients.

[Note: a cache belongs to one weights version]
Keys and values are functions of the weights. After an optimizer step they are wrong, and nothing
else would notice: losses stay finite. `WeightsVersion` therefore counts in-place writes to the
parameters through PyTorch's own version counters, and every read compares. Fused optimizers write
without touching those counters, so a step of an optimizer that holds one of the parameters counts
too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STALE_MESSAGE = (
    "The weights changed (an optimizer step or a checkpoint load) while prefix keys and values "
    "computed with the old weights were still in use. Step the optimizer only after the whole "
    "mini-batch has run."
)


class StaleCacheError(RuntimeError):
    """A training-time KV cache was read after the weights it was computed with had changed, or for
    something else than it was computed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOrigin:
    """What cached keys and values are a function of."""

    weights_version: int
    """`WeightsVersion.current()` at the forward."""
    content: int
    """Digest of the pack's token ids, see `provenance.digest_tokens`."""
    dtype: torch.dtype | None
    """Of keys and values; None before any layer was stored."""
    backend: str
    """Name of the attention backend."""


class WeightsVersion:
    """Detects in-place changes of a fixed set of parameters.

    Writes through `parameter.data` outside an optimizer step go unseen.

    Args:
        parameters: the parameters as the optimizer sees them (under FSDP2 the sharded ones).
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._num_steps = 0
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            weights = reference()
            if weights is not None:
                weights._count_step(optimizer)

        # PyTorch's hook is global: it must neither keep this object alive nor outlive it.
        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def current(self) -> int:
        """A number that grows with every in-place write to a parameter and every optimizer step."""
        return self._num_steps + sum(parameter._version for parameter in self._parameters)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = (id(p) for group in optimizer.param_groups for p in group["params"])
        self._num_steps += any(parameter in self._ids for parameter in stepped)


class PackCache:
    """Keys and values of one head pack, per layer.

    Shapes: `keys[layer]`, `values[layer]` are [1, N_kv, T, D] in the model's dtype, detached;
        gradients are the same shape in `gradient_dtype`.

    Args:
        weights: guards against reading after an optimizer step.
        gradient_dtype: accumulator dtype; None accumulates in the keys' own dtype.
        content: digest of the pack's token ids.
        backend: name of the attention backend.
    """

    def __init__(
        self,
        weights: WeightsVersion,
        gradient_dtype: torch.dtype | None,
        *,
        content: int,
        backend: str,
    ) -> None:
        self._weights = weights
        self._version = weights.current()
        self._content = content
        self._backend = backend
        self._gradient_dtype = gradient_dtype
        self._dtype: torch.dtype | None = None
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._key_grads: dict[int, torch.Tensor] = {}
        self._value_grads: dict[int, torch.Tensor] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep detached K and V ([1, N_kv, T, D], after RoPE) of `layer`."""
        self._dtype = key.dtype
        self._keys[layer] = key.detach()
        self._values[layer] = value.detach()

    def read(
        self, layer: int, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions `[start, end)` of the pack's row: two [1, N_kv, end - start, D]
        views.

        Args:
            dtype: of the queries that will attend to them.

        Raises:
            StaleCacheError: parameters changed since the cache was made, or the keys have another
                dtype.
        """
        self.check_fresh()
        if dtype != self._dtype:
            raise StaleCacheError(
                f"Cached keys of dtype {self._dtype} were read by queries of dtype {dtype}: run "
                "prefix and suffixes under the same autocast and parameter dtype."
            )
        return self._keys[layer][:, :, start:end], self._values[layer][:, :, start:end]

    @property
    def origin(self) -> CacheOrigin:
        return CacheOrigin(
            weights_version=self._version,
            content=self._content,
            dtype=self._dtype,
            backend=self._backend,
        )

    def check_origin(self, *, content: int, backend: str) -> None:
        """Raise `StaleCacheError` unless this is the cache of that pack under today's weights.
        The dtype is checked by `read`."""
        self.check_fresh()
        origin = self.origin
        if (origin.content, origin.backend) != (content, backend):
            raise StaleCacheError(
                f"A training-time KV cache was read for other tokens or another attention backend "
                f"than it was computed for: it is of {asdict(origin)}, wanted is content "
                f"{content}, backend {backend}."
            )

    def check_fresh(self) -> None:
        """Raise `StaleCacheError` if parameters changed since the cache was made."""
        if self._weights.current() != self._version:
            raise StaleCacheError(STALE_MESSAGE)

    def add_gradient(
        self, layer: int, start: int, end: int, key_grad: torch.Tensor, value_grad: torch.Tensor
    ) -> None:
        """Add dK and dV ([1, N_kv, end - start, D]) of positions `[start, end)`."""
        for grads, source, grad in (
            (self._key_grads, self._keys, key_grad),
            (self._value_grads, self._values, value_grad),
        ):
            if layer not in grads:
                # A delayed backward still wants a gradient where no query was.
                grads[layer] = torch.zeros_like(source[layer], dtype=self._gradient_dtype)
            grads[layer][:, :, start:end] += grad

    def drop_keys(self) -> None:
        """Forget keys and values, not their gradients: nothing below will read any more."""
        self._keys.clear()
        self._values.clear()

    def gradients(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Accumulated (dK, dV) of `layer` in the keys' dtype; None if nothing read it."""
        if layer not in self._key_grads:
            return None
        return self._key_grads[layer].to(self._dtype), self._value_grads[layer].to(self._dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and accumulators now held."""
        stores = (self._keys, self._values, self._key_grads, self._value_grads)
        return sum(t.numel() * t.element_size() for store in stores for t in store.values())
