"""verl's vLLM server, which stamps every token with the policy version that sampled it.

verl's own label is the server's `global_steps`, read when a generation has ended. Weights that
arrive meanwhile, or between the last weight and `set_global_steps`, go unseen. Here the server is
told before weights move (`begin_weight_update`), keeps vLLM's own weight version in step with that,
and splits each request's tokens at the moment of the move; see version_stamps.py [Note: weights
move under running requests].

[Note: no keys of another version]
vLLM reuses cached keys for equal prompts. verl empties that cache after a weight sync, but vLLM
declines while a request holds blocks, and says so only in its return value. So prompts are salted
with the number of weight moves so far: a request finds only keys that were computed since the last
one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.sampling_params import RequestOutputKind

from prefixflow_verl.provenance import SPANS_KEY, spans_to_wire
from prefixflow_verl.version_stamps import RequestStamp, VersionTracker

WEIGHT_UPDATE_METHODS = frozenset(
    {
        "update_weights_from_ipc",
        "start_weight_update",
        "update_weights",
        "update_verl_delta_weights",
        "reload_weights",
        "load_weights",
    }
)
"""vLLM worker methods that change weights; calling one begins a move if none was announced."""


class StampingServer(vLLMHttpServer):
    """`vLLMHttpServer` whose `generate` adds `extra_fields["policy_spans"]`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracker = VersionTracker()
        # Of requests that came through `generate`; vLLM's own HTTP routes have nobody to tell.
        self._stamps: dict[str, RequestStamp | None] = {}
        self._known_labels: set[str | None] = {None}

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self._known_labels.add(await self._engine_label())
        self._generate_unstamped = self.engine.generate
        self.engine.generate = self._generate_stamped

    async def begin_weight_update(self, version: int | None) -> None:
        """Say that weights are about to move to `version` (None: not known)."""
        self._tracker.begin(version)
        await self._tell_engine()

    async def set_global_steps(self, global_steps: int) -> None:
        """Say that all weights are those of version `global_steps`."""
        await super().set_global_steps(global_steps)
        self._tracker.finish(int(global_steps))
        await self._tell_engine()

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        if method in WEIGHT_UPDATE_METHODS and not self._tracker.is_moving:
            await self.begin_weight_update(None)
        await super().collective_rpc(method, *args, **kwargs)

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> TokenOutput:
        self._stamps[request_id] = None
        try:
            output = await super().generate(*args, request_id=request_id, **kwargs)
        finally:
            stamp = self._stamps.pop(request_id)
        spans = stamp.spans() if stamp is not None else ()
        if sum(span.num_tokens for span in spans) == len(output.token_ids):
            output.extra_fields[SPANS_KEY] = spans_to_wire(spans)
        return output

    async def _generate_stamped(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The engine's `generate`, with the prompt salted and every output seen by a stamp."""
        labels = [await self._engine_label()]
        stamp = RequestStamp(self._tracker)
        if request_id in self._stamps:
            self._stamps[request_id] = stamp
        if isinstance(prompt, Mapping):
            salt = f"{prompt.get('cache_salt') or ''}weights-{self._tracker.num_changes}"
            prompt = {**prompt, "cache_salt": salt}
        num_tokens = 0
        async for output in self._generate_unstamped(
            prompt, sampling_params, request_id, *args, **kwargs
        ):
            if output.outputs:
                num_new = len(output.outputs[0].token_ids)
                is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
                num_tokens = num_tokens + num_new if is_delta else num_new
                stamp.saw(num_tokens)
            if output.finished:
                labels.append(await self._engine_label())
                if not self._known_labels.issuperset(labels):
                    stamp.distrust()
            yield output

    async def _engine_label(self) -> str | None:
        """The engine's own name for its weights; None if this vLLM keeps none."""
        read = getattr(self.engine, "get_weight_version", None)
        return await read() if read is not None else None

    async def _tell_engine(self) -> None:
        write = getattr(self.engine, "update_weight_version", None)
        if write is not None:
            label = self._tracker.label
            self._known_labels.add(label)
            await write(label)


class StampingReplica(vLLMReplica):
    """`vLLMReplica` with a `StampingServer` on every node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(StampingServer)
