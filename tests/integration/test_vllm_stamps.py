"""Provenance link, at the source: a real vLLM whose weights change while it generates.

One server, one CheckpointEngineWorker with verl's own `ServerAdapter`, real weight transfers. Runs
in a process of its own, because Ray and verl's platform are chosen once per process; the tests read
what it found. That clean tokens are clean is not taken from the labels: their log-probs are
computed again with the weights they are said to come from.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
NUM_TOKENS = 600
VERSIONS_SYNCED = (50, 100, 150, 200)

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("stamps")
    maker = REPOSITORY / "recipes" / "arithmetic_cpu" / "make_assets.py"
    sizes = ["--prompt-len", "256", "--response-len", str(NUM_TOKENS)]
    command = [sys.executable, str(maker), "--out", str(directory / "assets"), *sizes]
    subprocess.run(command, check=True, timeout=120)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "prefixflow_verl.register",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    result = directory / "found.json"
    with (directory / "log.txt").open("w") as log:
        finished = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.integration.test_vllm_stamps",
                str(directory / "assets"),
                str(result),
            ],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=400,
        )
    assert finished.returncode == 0, (directory / "log.txt").read_text()[-6000:]
    return json.loads(result.read_text())


def spans_of(found: dict[str, Any], name: str) -> list[list[Any]]:
    return [span[:3] for span in found[name]["spans"]]


def test_version_zero_is_a_version(found):
    assert spans_of(found, "version_0") == [[24, 0, 0]]


def test_weights_that_arrive_during_a_request_split_it(found):
    clean, mixed = spans_of(found, "during")
    assert clean[1:] == [0, 0] and mixed[1:] == [0, 1]
    assert clean[0] > 0 and mixed[0] > 0 and clean[0] + mixed[0] == NUM_TOKENS
    # verl reads its version when the generation has ended: all of it would count as version 1.
    assert found["during"]["verl"] == 1


def test_clean_tokens_were_sampled_by_the_weights_they_name(found):
    errors = found["during"]["log_prob_errors"]
    (num_clean, *_), _ = found["during"]["spans"]
    assert max(errors["0"][:num_clean]) < 1e-3
    assert max(errors["1"][:num_clean]) > 0.1, "the two versions differ"
    # By the last token the new weights have long been there, over keys of the old ones: neither
    # version alone explains it.
    assert min(max(errors[version][-50:]) for version in errors) > 1e-3


def test_a_request_that_starts_before_the_label_changes_is_not_clean(found):
    assert spans_of(found, "between") == [[8, 1, 2]]
    assert found["between"]["verl"] == 1


def test_no_key_of_another_version_is_reused(found):
    assert found["cached"]["same_version"] > 0
    # The old request held its blocks over the update, so vLLM could not empty its cache.
    assert found["cached"]["vllm_reset_under_load"] is False
    assert found["cached"]["next_version"] == 0


def test_rollouts_name_the_synced_version_not_the_step(found):
    last = VERSIONS_SYNCED[-1]
    assert spans_of(found, "synced") == [[8, last, last]]


def test_weights_changed_behind_the_servers_back_are_unknown(found):
    assert spans_of(found, "foreign") == [[8, None, None]]


def test_an_aborted_request_keeps_what_it_sampled(found):
    (aborted,) = spans_of(found, "aborted")
    assert 0 < aborted[0] < NUM_TOKENS
    assert aborted[1:] == [VERSIONS_SYNCED[-1]] * 2


async def _study(assets: str) -> dict[str, Any]:
    import ray
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils.config import omega_conf_to_dataclass

    from prefixflow_verl.vllm_stamps import StampingReplica, StampingServer
    from tests.integration.test_configs_compose import compose_run

    class ProbedServer(StampingServer):
        """Lets the test do to vLLM what this plugin never does."""

        async def reset_prefix_cache_now(self) -> bool:
            return await self.engine.reset_prefix_cache()

        async def rename_weights_now(self, label: str) -> None:
            await self.engine.update_weight_version(label)

    config = compose_run(
        "prefixflow_verl.configs",
        "prefixflow_grpo_cpu",
        Path(assets),
        "data.max_prompt_length=256",
        f"data.max_response_length={NUM_TOKENS}",
        f"actor_rollout_ref.rollout.max_model_len={256 + NUM_TOKENS}",
        "actor_rollout_ref.rollout.max_num_batched_tokens=4096",
    )
    rollout = config.actor_rollout_ref.rollout
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    replica = StampingReplica(0, rollout, model_config, gpus_per_node=1)
    replica.server_class = ray.remote(ProbedServer)
    await replica.init_standalone()
    server, (worker,) = replica.server_handle, replica.workers

    model = AutoModelForCausalLM.from_pretrained(f"{assets}/model", dtype=torch.float32)
    prompt = torch.randint(5, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    weights: dict[int, dict[str, torch.Tensor]] = {}
    num_requests = 0

    def make_version(version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        weights[version] = {
            name: value + 0.05 * version * torch.randn(value.shape, generator=generator)
            for name, value in model.state_dict().items()
        }

    async def sync(version: int) -> None:
        if version not in weights:
            make_version(version)
        named = list(weights[version].items())
        await worker.__ray_call__.remote(_hand_over, named)
        await worker.update_weights.remote(global_steps=version)

    async def generate(num_tokens: int, request_id: str | None = None) -> Any:
        nonlocal num_requests
        num_requests += 1
        sampling = {"temperature": 1.0, "logprobs": True, "max_tokens": num_tokens}
        return await server.generate.remote(
            prompt_ids=prompt,
            sampling_params={**sampling, "ignore_eos": True},
            request_id=request_id or f"request-{num_requests}",
        )

    def describe(output: Any) -> dict[str, Any]:
        fields = output.extra_fields
        return {"spans": fields.get("policy_spans"), "verl": fields["global_steps"]}

    def log_prob_errors(output: Any, version: int) -> list[float]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(weights[version])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(output.token_ids)])).logits[0]
        model.load_state_dict(state)
        log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
        own = log_probs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        return (own - torch.tensor(output.log_probs)).abs().tolist()

    found: dict[str, Any] = {}
    await sync(0)
    found["version_0"] = describe(await generate(24))

    make_version(1)
    running = asyncio.ensure_future(generate(NUM_TOKENS))
    await asyncio.sleep(0.5)
    await sync(1)
    output = await running
    errors = {str(version): log_prob_errors(output, version) for version in (0, 1)}
    found["during"] = describe(output) | {"log_prob_errors": errors}

    await server.begin_weight_update.remote(2)
    found["between"] = describe(await generate(8))
    await sync(2)

    await generate(1)
    same_version = (await generate(1)).extra_fields["num_cached_tokens"]
    running = asyncio.ensure_future(generate(NUM_TOKENS))
    await asyncio.sleep(0.3)
    was_reset = await server.reset_prefix_cache_now.remote()
    await sync(3)
    next_version = (await generate(1)).extra_fields["num_cached_tokens"]
    await running
    found["cached"] = {
        "same_version": same_version,
        "vllm_reset_under_load": was_reset,
        "next_version": next_version,
    }

    for version in VERSIONS_SYNCED:
        weights[version] = weights[1]
        await sync(version)
    found["synced"] = describe(await generate(8))

    running = asyncio.ensure_future(generate(NUM_TOKENS))
    await asyncio.sleep(0.3)
    await server.abort_all_requests.remote()
    found["aborted"] = describe(await running)
    await server.resume_generation.remote()

    await server.rename_weights_now.remote("somebody else's")
    found["foreign"] = describe(await generate(8))
    return found


def _hand_over(worker: Any, named: list) -> None:
    worker.checkpoint_engine.weights = iter(named)


def _main(assets: str, result: str) -> None:
    import ray

    with tempfile.TemporaryDirectory(prefix="prefixflow-ray.", dir="/tmp") as directory:
        ray.init(
            num_cpus=8,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=200_000_000,
            _temp_dir=directory,
        )
        try:
            found = asyncio.run(_study(assets))
        finally:
            ray.shutdown()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
