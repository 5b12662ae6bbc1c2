"""Part of the provenance link: what several requests sampled becomes one record per sequence.

verl's own clients and a scripted server in vLLM's place; test_vllm_stamps.py has the real one.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput  # noqa: E402
from verl.workers.rollout.llm_server import (  # noqa: E402
    FullyAsyncLLMServerClient,
    LLMServerClient,
)
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

from prefixflow_verl.provenance import PolicyRecord  # noqa: E402
from prefixflow_verl.trajectories import (  # noqa: E402
    _RecordingWorker,
    recording_client,
    recording_worker,
)

TURNS = [
    # token ids, spans (None: a server that does not stamp), stop reason
    ([5, 6, 7], [(3, 0, 0, True)], "completed"),
    ([8, 9], [(1, 0, 0, True), (1, 0, 1, True)], "completed"),
    ([3], [(1, 1, 1, True)], "completed"),
]


class ScriptedServer:
    """Answers each request with the next turn."""

    def __init__(self, turns: list[tuple]) -> None:
        self._turns = iter(turns)
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, **request: Any) -> TokenOutput:
        token_ids, spans, stop_reason = next(self._turns)
        fields = {"global_steps": 1} | ({"policy_spans": spans} if spans is not None else {})
        return TokenOutput(
            token_ids=token_ids,
            log_probs=[-1.0] * len(token_ids),
            stop_reason=stop_reason,
            extra_fields=fields,
        )


def client_of(client_class: type[LLMServerClient], turns: list[tuple]) -> LLMServerClient:
    """A client that finds one scripted server."""
    server = ScriptedServer(turns)

    class Client(client_class):
        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            return "server", server

        def _release_server(self, server_id: str, **extra: Any) -> None:
            pass

    rollout = SimpleNamespace(name="vllm", response_length=100)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = Client.__new__(Client)
    client.config = config
    client._only_hybrid = False
    return client


class PlainWorker:
    """verl's agent loop worker as far as recording goes: runs an agent, hands in outputs."""

    def __init__(self, config: Any, llm_client: LLMServerClient) -> None:
        self.llm_client = llm_client
        self.handed_in: list[AgentLoopOutput] = []

    async def _run_agent_loop(self, agent: Any, **kwargs: Any) -> None:
        output = await agent(self.llm_client)
        await self._agent_loop_postprocess(output, kwargs.pop("validate", False), **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        self.handed_in += output if isinstance(output, list) else [output]


class Worker(_RecordingWorker, PlainWorker):
    pass


def sequence(response_ids: list[int], response_mask: list[int]) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=response_ids,
        response_mask=response_mask,
        metrics=AgentLoopMetrics(),
    )


async def ask(client: LLMServerClient) -> TokenOutput:
    return await client.generate("request", prompt_ids=[1, 2], sampling_params={})


async def tool_agent(client: LLMServerClient) -> AgentLoopOutput:
    """Three turns with tool results between them."""
    response, mask = [], []
    for observation in ([50, 51], [52], []):
        sampled = (await ask(client)).token_ids
        response += [*sampled, *observation]
        mask += [1] * len(sampled) + [0] * len(observation)
    return sequence(response, mask)


def records(worker: PlainWorker) -> list[PolicyRecord]:
    return [PolicyRecord.from_wire(out.extra_fields["policy_record"]) for out in worker.handed_in]


def spans(record: PolicyRecord) -> list[tuple]:
    return [tuple(span) for span in record.to_wire()["spans"]]


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_turns_and_tool_results_of_one_trajectory(client_class):
    worker = Worker(None, client_of(client_class, TURNS))
    asyncio.run(worker._run_agent_loop(tool_agent, uid="u", session_id=4))
    (record,) = records(worker)
    assert (record.uid, record.session, record.output, record.key) == ("u", 4, 0, "u_4_0")
    # Version 0 is there, and so is what came after it.
    assert spans(record) == [
        (3, 0, 0, True),
        (2, None, None, False),
        (1, 0, 0, True),
        (1, 0, 1, True),
        (1, None, None, False),
        (1, 1, 1, True),
    ]


def test_a_resumed_request_has_the_spans_of_every_attempt(monkeypatch):
    async def no_wait(seconds: float) -> None:
        pass

    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", no_wait)
    turns = [
        ([5, 6], [(2, 0, 0, True)], "aborted"),
        ([], None, "aborted"),
        ([7, 8, 9], [(3, 2, 2, True)], "completed"),
    ]

    async def agent(client: LLMServerClient) -> AgentLoopOutput:
        output = await ask(client)
        assert output.token_ids == [5, 6, 7, 8, 9]
        return sequence(output.token_ids[:4], [1] * 4)

    worker = Worker(None, client_of(FullyAsyncLLMServerClient, turns))
    asyncio.run(worker._run_agent_loop(agent, uid="u", session_id=0))
    # Four of five: verl cuts long responses.
    assert spans(records(worker)[0]) == [(2, 0, 0, True), (2, 2, 2, True)]


def test_several_sequences_of_one_trajectory():
    async def agent(client: LLMServerClient) -> list[AgentLoopOutput]:
        return [
            sequence((output := await ask(client)).token_ids, [1] * len(output.token_ids))
            for _ in TURNS
        ]

    worker = Worker(None, client_of(LLMServerClient, TURNS))
    asyncio.run(worker._run_agent_loop(agent, uid="u", session_id=1))
    assert [record.key for record in records(worker)] == ["u_1_0", "u_1_1", "u_1_2"]
    assert [spans(record) for record in records(worker)] == [
        [tuple(span) for span in wire] for _, wire, _ in TURNS
    ]


def test_trajectories_that_run_at_once_do_not_mix():
    turns = [([i, i + 1], [(2, i, i, True)], "completed") for i in range(10)]

    async def agent(client: LLMServerClient) -> AgentLoopOutput:
        output = await ask(client)
        await asyncio.sleep(0)
        return sequence(output.token_ids, [1, 1])

    async def run() -> None:
        await asyncio.gather(
            *(worker._run_agent_loop(agent, uid=f"u{i}", session_id=0) for i in range(10))
        )

    worker = Worker(None, client_of(LLMServerClient, turns))
    asyncio.run(run())
    for output, record in zip(worker.handed_in, records(worker), strict=True):
        first = output.response_ids[0]
        assert spans(record) == [(2, first, first, True)]


def test_a_server_that_does_not_stamp_leaves_versions_unknown():
    async def agent(client: LLMServerClient) -> AgentLoopOutput:
        return sequence((await ask(client)).token_ids, [1, 1])

    worker = Worker(None, client_of(LLMServerClient, [([5, 6], None, "completed")]))
    asyncio.run(worker._run_agent_loop(agent, uid="u", session_id=0))
    assert spans(records(worker)[0]) == [(2, None, None, True)]


def test_validation_is_not_recorded():
    async def agent(client: LLMServerClient) -> AgentLoopOutput:
        return sequence((await ask(client)).token_ids, [1] * 3)

    worker = Worker(None, client_of(LLMServerClient, TURNS))
    asyncio.run(worker._run_agent_loop(agent, uid="u", session_id=0, validate=True))
    assert "policy_record" not in worker.handed_in[0].extra_fields


def test_the_users_client_stays_as_it_is():
    client = client_of(FullyAsyncLLMServerClient, [])
    before = type(client)
    recording = recording_client(client)
    assert type(client) is before and recording is not client
    assert isinstance(recording, before)


def test_any_agent_loop_worker_class_can_record():
    import ray

    class OwnWorker(PlainWorker):
        pass

    recorded = recording_worker(ray.remote(OwnWorker)).__ray_metadata__.modified_class
    assert issubclass(recorded, _RecordingWorker) and issubclass(recorded, OwnWorker)
