"""Puts a policy record on every sequence that verl's agent loops hand in.

A trajectory is one or more requests: verl resumes aborted ones, and agents generate again after
every tool result. verl keeps one version label for all of them. Here the client notes the spans of
each request (vllm_stamps.py) in a list of the trajectory, and the worker turns the list into a
record of each training sequence just before verl stores it.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from prefixflow_verl.provenance import (
    RECORD_KEY,
    SPANS_KEY,
    Generation,
    PolicyRecord,
    PolicySpan,
    digest_tokens,
    spans_from_wire,
    spans_of_response,
)

_GENERATIONS: ContextVar[list[Generation] | None] = ContextVar("generations", default=None)
"""Of the trajectory that the current task, or one it was started by, is running."""


class RecordingClient(LLMServerClient):
    """`LLMServerClient` that notes what each request sampled, and under which versions."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await super().generate(*args, **kwargs)
        wire = output.extra_fields.pop(SPANS_KEY, None)
        generations = _GENERATIONS.get()
        if generations is not None and output.token_ids:
            unknown = (PolicySpan(num_tokens=len(output.token_ids)),)
            spans = spans_from_wire(wire) if wire is not None else unknown
            if sum(span.num_tokens for span in spans) != len(output.token_ids):
                # A client cut the response after the server had labelled it.
                spans = unknown
            generations.append(Generation(token_ids=tuple(output.token_ids), spans=spans))
        return output


def recording_client(client: LLMServerClient) -> LLMServerClient:
    """A copy of `client` that is also a `RecordingClient`.

    `RecordingClient` goes between the client's class and `LLMServerClient`, so that a client which
    calls its parent once per attempt, as verl's resuming client does, is recorded per attempt.
    """
    recording = copy.copy(client)
    own = type(client)
    if own is LLMServerClient:
        recording.__class__ = RecordingClient
    else:
        recording.__class__ = type(f"Recording{own.__name__}", (own, RecordingClient), {})
    return recording


class _RecordingWorker:
    """Goes in front of an agent loop worker's class."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, recording_client(llm_client), *args, **kwargs)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        token = _GENERATIONS.set([])
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        finally:
            _GENERATIONS.reset(token)

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> Any:
        sequences = output if isinstance(output, list) else [output]
        # Only verl's V1 trainer names its sequences.
        if not validate and "session_id" in kwargs:
            for index, sequence in enumerate(sequences):
                record = _record(sequence, kwargs["uid"], kwargs["session_id"], index)
                sequence.extra_fields[RECORD_KEY] = record.to_wire()
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


def recording_worker(worker_class: Any) -> Any:
    """A Ray actor class that does what `worker_class`, an agent loop worker's, does, and records.

    Args:
        worker_class: made by `ray.remote`.
    """
    modified = worker_class.__ray_metadata__.modified_class
    original = getattr(modified, "__ray_actor_class__", modified)
    return ray.remote(type(f"Recording{original.__name__}", (_RecordingWorker, original), {}))


def _record(sequence: AgentLoopOutput, uid: Any, session: Any, output: int) -> PolicyRecord:
    return PolicyRecord(
        uid=str(uid),
        session=int(session),
        output=output,
        digest=digest_tokens(sequence.response_ids),
        spans=spans_of_response(
            sequence.response_ids, sequence.response_mask, _GENERATIONS.get() or []
        ),
    )
