"""Engine link of the proof chain, over time and under verl's settings.

Each study builds verl's FSDP2 engine and `prefixflow` with the same extra setting on two gloo
ranks, copies the weights from one to the other, and compares several updates.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import run_ranks
from tests.engines import (
    make_rows,
    make_worker,
    parameters_of,
    response_values,
    save_tiny_model,
    set_loss,
    tokens,
    use_cpu_platform,
)

CACHE_BYTES = 40_000
"""Holds keys, values and gradients of a prompt of 24 tokens, but not its activations as well."""

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def _rollouts(seed: int, groups: int = 2, size: int = 4):
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for _ in range(groups):
        prompt = tokens(generator, 24)
        for _ in range(size):
            count = int(torch.randint(1, 16, (1,), generator=generator))
            rollouts.append((prompt, tokens(generator, count)))
    return rollouts


def _copy_weights(source, target) -> None:
    with torch.no_grad():
        pairs = zip(
            source.engine.module.named_parameters(),
            target.engine.module.named_parameters(),
            strict=True,
        )
        for (source_name, value), (target_name, parameter) in pairs:
            assert source_name == target_name
            parameter.to_local().copy_(value.to_local())


def _largest_difference(ours, truth) -> float:
    """Largest relative difference of a parameter between two workers."""
    ours, truth = parameters_of(ours), parameters_of(truth)
    return max(
        ((ours[name] - truth[name]).norm() / truth[name].norm().clamp_min(1e-6)).item()
        for name in truth
    )


def _update(worker, rollouts, **settings: Any) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    rows = make_rows(rollouts, global_batch_size=2 * len(rollouts), **settings)
    return tu.get(worker.train_batch(rows), "metrics")


def _twenty_steps(rank: int, path: str, directory: str) -> dict[str, Any]:
    dense, ours = make_worker(path, "fsdp2"), make_worker(path, "prefixflow")
    for step in range(20):
        for worker in (dense, ours):
            _update(worker, _rollouts(2 * step + rank), max_token_len_per_gpu=96, seed=step)
    return {"difference": _largest_difference(ours, dense)}


def _mini_batches_and_epochs(rank: int, path: str, directory: str) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu

    workers = make_worker(path, "fsdp2"), make_worker(path, "prefixflow")
    metrics = []
    for worker in workers:
        rollouts = _rollouts(rank, groups=4)
        rows = make_rows(
            rollouts,
            global_batch_size=16,
            mini_batch_size=16,
            epochs=2,
            seed=7,
            dataloader_kwargs={"shuffle": True},
        )
        metrics.append(tu.get(worker.train_mini_batch(rows), "metrics"))
    return {
        "difference": _largest_difference(workers[1], workers[0]),
        "grad_norms": [metric["grad_norm"] for metric in metrics],
        "pg_losses": [metric["actor/pg_loss"] for metric in metrics],
        # verl flattens ranks and mini-batches into one list.
        "num_updates": len(metrics[1]["prefixflow/reuse_ratio"]) // 2,
    }


def _setting(engine: dict[str, Any] | None = None, model: dict[str, Any] | None = None):
    def study(rank: int, path: str, directory: str) -> dict[str, Any]:
        dense = make_worker(path, "fsdp2", engine=engine, model=model)
        ours = make_worker(path, "prefixflow", engine=engine, model=model)
        _copy_weights(dense, ours)
        before = parameters_of(ours)
        for step in range(2):
            for worker in (dense, ours):
                rollouts = _rollouts(step + rank, size=6)
                metrics = _update(worker, rollouts, max_token_len_per_gpu=56)
        after = parameters_of(ours)
        return {
            "difference": _largest_difference(ours, dense),
            "changed": sum(not torch.equal(before[name], after[name]) for name in before),
            "cut_edges": metrics["prefixflow/cut_edges"][0][0],
            "fallback": metrics["prefixflow/fallback"][0][0],
        }

    return study


def _checkpoint_and_export(rank: int, path: str, directory: str) -> dict[str, Any]:
    ours, dense = make_worker(path, "prefixflow"), make_worker(path, "fsdp2")
    _copy_weights(ours, dense)
    _update(ours, _rollouts(rank))
    ours.save_checkpoint(directory, global_step=1)
    saved = parameters_of(ours)
    _update(ours, _rollouts(10 + rank))
    straight = parameters_of(ours)
    # verl's own engine continues from our checkpoint as we do.
    results = {}
    for name, worker in (("prefixflow", ours), ("fsdp2", dense)):
        worker.load_checkpoint(directory)
        loaded = parameters_of(worker)
        results[f"{name}_loaded"] = max((loaded[k] - saved[k]).abs().max().item() for k in saved)
        _update(worker, _rollouts(10 + rank))
        resumed = parameters_of(worker)
        results[f"{name}_resumed"] = max(
            (resumed[k] - straight[k]).abs().max().item() for k in straight
        )
    exported = dict(ours.engine.get_per_tensor_param()[0])
    held = parameters_of(ours)
    results["exported"] = max((exported[k] - held[k]).abs().max().item() for k in held)
    return results


def _ratio_is_one(rank: int, path: str, directory: str) -> dict[str, Any]:
    """Old log-probs under one budget, the first update under another."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric

    ours = make_worker(path, "prefixflow")
    # The KL metric is verl's masked mean of old - new log-probs; 0 where every ratio is 1.
    kls, clipped = [], []
    rollouts = _rollouts(rank)
    for infer_budget, train_budget in ((300, 40), (40, 300), (40, 64), (300, 300)):
        rows = make_rows(rollouts, max_token_len_per_gpu=infer_budget, temperature=0.7)
        output = ours.infer_batch(rows)
        shifted = response_values(tu.get(output, "log_probs"), rows)
        lengths = [len(response) for _, response in rollouts]
        old = list(shifted.split(lengths))
        set_loss(ours)
        # A learning rate of zero keeps the weights; AdamW with weight decay 0.01 * 0 as well.
        for parameters in ours.engine.optimizer.param_groups:
            parameters["lr"] = 0.0
        metrics = _update(
            ours, rollouts, old_log_probs=old, max_token_len_per_gpu=train_budget, temperature=0.7
        )
        kls.append(abs(Metric.aggregate_dp(metrics["actor/ppo_kl"])))
        clipped.append(Metric.aggregate_dp(metrics["actor/pg_clipfrac"]))
    return {"kl": max(kls), "clipped": max(clipped)}


def _bf16(rank: int, path: str, directory: str) -> dict[str, Any]:
    """Log-probs in bf16: our distance from fp32 against that of verl's engine."""
    from verl.utils import tensordict_utils as tu

    engine = {"mixed_precision": BF16}
    values = {}
    for name, strategy, settings in (
        ("truth", "fsdp2", {}),
        ("dense", "fsdp2", {"engine": engine}),
        ("ours", "prefixflow", {"engine": engine}),
    ):
        worker = make_worker(path, strategy, **settings)
        errors = []
        for seed in range(4):
            rows = make_rows(_rollouts(seed), max_token_len_per_gpu=64)
            errors.append(response_values(tu.get(worker.infer_batch(rows), "log_probs"), rows))
        values[name] = torch.cat(errors)
        values[f"{name}_norm"] = _update(worker, _rollouts(rank), max_token_len_per_gpu=64)[
            "grad_norm"
        ]
    truth = values["truth"]
    return {
        "dense": (values["dense"].float() - truth).norm().item(),
        "ours": (values["ours"].float() - truth).norm().item(),
        "norms": [values["truth_norm"], values["dense_norm"], values["ours_norm"]],
    }


def _fallback(rank: int, path: str, directory: str) -> dict[str, Any]:
    """Positions that do not start at 0, on one rank only: both ranks run densely."""
    ours = make_worker(path, "prefixflow", options={"on_unsupported": "fallback"})
    dense = make_worker(path, "fsdp2")
    _copy_weights(dense, ours)
    metrics = []
    for worker in (dense, ours):
        rows = make_rows(_rollouts(rank), global_batch_size=16)
        if rank == 1:
            positions = [row + 3 for row in rows["position_ids"].unbind()]
            rows["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
        from verl.utils import tensordict_utils as tu

        metrics.append(tu.get(worker.train_batch(rows), "metrics"))
    reasons = [key for key in metrics[1] if key.startswith("prefixflow/fallback_reason/")]
    strict = make_worker(path, "prefixflow")
    try:
        strict.infer_batch(rows)
        message = ""
    except ValueError as error:
        message = str(error)
    return {
        "difference": _largest_difference(ours, dense),
        "fallback": metrics[1]["prefixflow/fallback"][0][0],
        "reasons": reasons,
        "message": message,
    }


def _count(counter: Counter, *_: Any) -> None:
    counter["forward"] += 1


def _options(rank: int, path: str, directory: str) -> dict[str, Any]:
    """Every option changes what is executed, none of them the update."""
    reference = make_worker(path, "fsdp2")
    rollouts = _rollouts(rank, groups=2, size=6)
    norm = _update(reference, rollouts)["grad_norm"]
    found = {}
    for name, options in (
        ("default", {}),
        ("plan_off", {"plan": "off"}),
        ("plan_cut", {"plan": "cut"}),
        ("plan_fused", {"plan": "fused", "max_tokens_per_pack": 40}),
        ("max_tokens_per_pack", {"max_tokens_per_pack": 40}),
        ("max_cache_bytes", {"max_tokens_per_pack": 40, "max_cache_bytes": 1}),
        ("kept", {"max_tokens_per_pack": 40, "prefix_activations": "keep"}),
        ("offloaded", {"max_tokens_per_pack": 40, "prefix_activations": "offload"}),
        ("recomputed", {"max_tokens_per_pack": 40, "prefix_activations": "recompute"}),
        ("auto_recomputed", {"max_tokens_per_pack": 40, "max_cache_bytes": CACHE_BYTES}),
        (
            "kept_for_less_sharing",
            {
                "max_tokens_per_pack": 40,
                "max_cache_bytes": CACHE_BYTES,
                "prefix_activations": "keep",
            },
        ),
        ("min_shared_tokens", {"min_shared_tokens": 1000}),
        ("cut_overhead_tokens", {"max_tokens_per_pack": 40, "cut_overhead_tokens": 10_000}),
        ("reference", {"attention_backend": "reference"}),
        ("param_dtype", {"max_tokens_per_pack": 40, "cache_grad_dtype": "param"}),
    ):
        worker = make_worker(path, "prefixflow", options=options)
        forwards = Counter()
        worker.engine.module.register_forward_pre_hook(partial(_count, forwards))
        metrics = _update(worker, rollouts)
        found[name] = {
            key.removeprefix("prefixflow/"): value[0][0]
            for key, value in metrics.items()
            if key.startswith("prefixflow/")
        }
        found[name]["num_forwards"] = forwards.total()
        found[name]["norm_error"] = abs(metrics["grad_norm"] - norm) / norm
        found[name]["backend"] = worker.engine._runner.backend.name
    return found


def _model_refused(rank: int, path: str, directory: str) -> dict[str, Any]:
    """A model with attention dropout: refused while it is built, or trained densely."""
    dropout = {"override_config": {"attn_implementation": "sdpa", "attention_dropout": 0.1}}
    try:
        make_worker(path, "prefixflow", model=dropout)
        message = ""
    except ValueError as error:
        message = str(error)
    worker = make_worker(path, "prefixflow", model=dropout, options={"on_unsupported": "fallback"})
    metrics = _update(worker, _rollouts(rank))
    return {
        "message": message,
        "metrics": {
            key: value[0][0] for key, value in metrics.items() if key.startswith("prefixflow/")
        },
    }


def _settings_refused(rank: int, path: str, directory: str) -> dict[str, str]:
    """Settings that an engine refuses before it builds a model, whoever made its config."""
    refused = {
        "ulysses_sequence_parallel_size": {"engine": {"ulysses_sequence_parallel_size": 2}},
        "pad_to_length": {"engine": {"pad_to_length": True}},
        "use_fused_kernels": {"model": {"use_fused_kernels": True}},
        "enable_activation_offload": {"model": {"enable_activation_offload": True}},
    }
    messages = {}
    for name, settings in refused.items():
        try:
            make_worker(path, "prefixflow", **settings)
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
    return messages


STUDIES = {
    "twenty_steps": _twenty_steps,
    "mini_batches_and_epochs": _mini_batches_and_epochs,
    "gradient_checkpointing": _setting(model={"enable_gradient_checkpointing": True}),
    "lora": _setting(model={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "lora_checkpointing": _setting(
        model={
            "lora_rank": 4,
            "target_modules": "all-linear",
            "enable_gradient_checkpointing": True,
        }
    ),
    "offload": _setting(engine={"param_offload": True, "optimizer_offload": True}),
    "sync_every_backward": _setting(engine={"use_no_sync_for_gradient_accumulation": False}),
    "no_reshard": _setting(engine={"reshard_after_forward": False}),
    "remove_padding_flag": _setting(model={"use_remove_padding": True}),
    "checkpoint_and_export": _checkpoint_and_export,
    "ratio_is_one": _ratio_is_one,
    "bf16": _bf16,
    "fallback": _fallback,
    "model_refused": _model_refused,
    "settings_refused": _settings_refused,
    "options": _options,
}


def _run_studies(rank: int, world_size: int, path: str, directory: str) -> dict[str, Any]:
    use_cpu_platform()
    return {name: study(rank, path, str(Path(directory) / name)) for name, study in STUDIES.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), tied=False)
    return run_ranks(_run_studies, 2, path, str(tmp_path_factory.mktemp("studies")))[0]


def test_twenty_steps_stay_together(results) -> None:
    assert results["twenty_steps"]["difference"] < 1e-4


def test_mini_batches_and_epochs(results) -> None:
    result = results["mini_batches_and_epochs"]
    assert result["difference"] < 1e-5
    assert result["num_updates"] == 4
    assert result["grad_norms"][1] == pytest.approx(result["grad_norms"][0], rel=1e-5)
    assert result["pg_losses"][1] == pytest.approx(result["pg_losses"][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "gradient_checkpointing",
        "lora",
        "lora_checkpointing",
        "offload",
        "sync_every_backward",
        "no_reshard",
    ],
)
def test_verl_settings(results, name: str) -> None:
    result = results[name]
    assert result["fallback"] == 0
    assert result["cut_edges"] > 0
    assert result["changed"] > 0
    assert result["difference"] < 2e-5


def test_checkpoint_resume_and_weight_export(results) -> None:
    result = results["checkpoint_and_export"]
    assert result["prefixflow_loaded"] == result["fsdp2_loaded"] == 0
    assert result["prefixflow_resumed"] == 0
    assert result["fsdp2_resumed"] < 1e-5
    assert result["exported"] == 0


def test_ratio_is_one_whatever_the_budgets(results) -> None:
    assert results["ratio_is_one"]["kl"] < 1e-6
    assert results["ratio_is_one"]["clipped"] == 0


def test_bf16_error_is_at_most_twice_that_of_dense(results) -> None:
    result = results["bf16"]
    assert result["dense"] > 0
    assert result["ours"] <= 2 * result["dense"]
    truth, dense, ours = result["norms"]
    assert abs(ours - truth) <= 2 * abs(dense - truth) + 0.01 * truth


def test_fallback_is_agreed_visible_and_dense(results) -> None:
    result = results["fallback"]
    assert result["difference"] == 0
    assert result["fallback"] == 1
    # Rank 0 reports the reason that only rank 1 has.
    assert result["reasons"] == ["prefixflow/fallback_reason/position_ids"]
    assert "position_ids are not 0, 1, 2" in result["message"]


def test_a_model_that_cannot_be_reproduced_is_refused_or_trained_densely(results) -> None:
    result = results["model_refused"]
    assert "attention_dropout=0.1 in the model config: set it to 0" in result["message"]
    assert result["metrics"] == {
        "prefixflow/fallback": 1.0,
        "prefixflow/fallback_reason/dropout": 1.0,
    }


def test_settings_are_refused_by_the_engine_too(results) -> None:
    for setting, message in results["settings_refused"].items():
        assert f"{setting}=" in message and "set it to" in message, setting


def test_every_option_changes_the_executed_path(results) -> None:
    found = results["options"]
    for name, metrics in found.items():
        assert metrics["norm_error"] < 1e-5, name
    assert found["default"]["reuse_ratio"] > 1.5
    assert found["default"]["cut_edges"] == 0
    assert found["plan_off"]["reuse_ratio"] == 1
    assert found["plan_cut"]["cut_edges"] > 0
    assert found["plan_fused"]["cut_edges"] == 0
    assert found["max_tokens_per_pack"]["cut_edges"] > 0
    assert found["max_tokens_per_pack"]["packs"] > found["default"]["packs"]
    assert found["max_cache_bytes"]["dissolved_trees"] > 0
    assert found["max_cache_bytes"]["cache_bytes"] == 0
    num_packs = found["kept"]["num_forwards"]
    assert found["recomputed"]["num_forwards"] > num_packs == found["offloaded"]["num_forwards"]
    assert found["recomputed"]["prefixes_recomputed"] == 1
    assert found["kept"]["prefixes_recomputed"] == found["offloaded"]["prefixes_recomputed"] == 0
    assert found["auto_recomputed"]["prefixes_recomputed"] == 1
    assert found["auto_recomputed"]["dissolved_trees"] == 0
    assert 0 < found["auto_recomputed"]["cache_bytes"] <= CACHE_BYTES
    assert found["kept_for_less_sharing"]["dissolved_trees"] > 0
    assert found["min_shared_tokens"]["reuse_ratio"] == 1
    assert found["cut_overhead_tokens"]["dissolved_trees"] > 0
    assert found["reference"]["backend"] == "reference"
    assert found["default"]["backend"] == "sdpa_cpu"
    assert found["param_dtype"]["cut_edges"] > 0
