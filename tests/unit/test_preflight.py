"""Checks of a run's config: each mistake in one sentence with the setting's name and the remedy."""

import pandas
import pytest
from omegaconf import OmegaConf

from prefixflow_verl.preflight import check_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A config, with a model and data files that exist, as far as the checks look at it."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": ["1+1="]}).to_parquet(data)
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": "prefixflow", "fsdp_config": {"strategy": "fsdp"}},
                "model": {"path": str(model), "lora_rank": 0, "lora": {"merge": False}},
            },
            "critic": {"strategy": "fsdp2"},
            "data": {"train_files": str(data), "val_files": [str(data)]},
            "trainer": {"device": "cpu"},
        }
    )


def test_a_good_run_passes(run):
    check_run(run)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "actor_rollout_ref.actor.strategy",
            "prefix_flow",
            "actor_rollout_ref.actor.strategy=prefix_flow is not a strategy: use one of",
        ),
        ("actor_rollout_ref.actor.strategy", "fsdp", "cannot run on a CPU"),
        (
            "actor_rollout_ref.actor.fsdp_config.strategy",
            "prefixflow",
            "leave it out and set actor_rollout_ref.actor.strategy=prefixflow",
        ),
        ("actor_rollout_ref.model.path", "/no/such/model", "does not exist"),
        ("actor_rollout_ref.model.path", "./model", "does not exist"),
        ("actor_rollout_ref.model.path", None, "is not set"),
        ("actor_rollout_ref.model.lora_rank", 8, "model.lora.merge=True"),
        ("actor_rollout_ref.model.lora.rank", 8, "model.lora.merge=True"),
        ("critic.strategy", "prefixflow", "set critic.strategy=fsdp2"),
        ("data.train_files", "/no/such/file.parquet", "data.train_files=/no/such/file.parquet"),
        ("data.val_files", ["/no/such/file.parquet"], "data.val_files=/no/such/file.parquet"),
    ],
)
def test_mistake_is_named_with_its_remedy(run, setting, value, message):
    OmegaConf.update(run, setting, value)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check_run(run)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_parquet(run, tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    run.data.train_files = str(broken)
    with pytest.raises(ValueError, match="broken.parquet is not a readable parquet file"):
        check_run(run)


def test_directory_without_a_model(run, tmp_path):
    run.actor_rollout_ref.model.path = str(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        check_run(run)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "gpt2", "hdfs://cluster/model/path"])
def test_remote_models_are_left_to_verl(run, path):
    run.actor_rollout_ref.model.path = path
    check_run(run)


def test_cpu_run_needs_the_platform_variable(run, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    with pytest.raises(ValueError, match="VERL_PLATFORM=cpu"):
        check_run(run)


def test_a_run_that_did_not_ask_for_the_plugin_is_left_alone(run):
    run.trainer.device = "cuda"
    run.actor_rollout_ref.actor.strategy = "fsdp2"
    run.actor_rollout_ref.model.path = "/no/such/model"
    check_run(run)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("rollout.name", "sglang"), ("rollout.disaggregation.enabled", True)],
)
def test_a_rule_that_no_run_could_keep(run, setting, value):
    engine = "actor_rollout_ref.actor.fsdp_config"
    target = "prefixflow_verl.engine_config.PrefixFlowEngineConfig"
    OmegaConf.update(run, f"{engine}._target_", target)
    OmegaConf.update(run, "actor_rollout_ref.rollout.name", "vllm")
    OmegaConf.update(run, f"{engine}.prefixflow.provenance.on_missing", "error")
    check_run(run)
    OmegaConf.update(run, f"actor_rollout_ref.{setting}", value)
    with pytest.raises(ValueError, match=rf"on_missing=error with .*{setting}={value} would stop"):
        check_run(run)
    OmegaConf.update(run, f"{engine}.prefixflow.provenance.on_missing", "mask")
    check_run(run)


def test_mini_batches_divide_over_the_ranks(run):
    def with_sizes(prompts: int, responses: int, nodes: int, ranks: int):
        return OmegaConf.merge(
            run,
            {
                "actor_rollout_ref": {
                    "actor": {"ppo_mini_batch_size": prompts},
                    "rollout": {"n": responses},
                },
                "trainer": {"nnodes": nodes, "n_gpus_per_node": ranks},
            },
        )

    check_run(with_sizes(4, 6, 2, 4))
    with pytest.raises(ValueError, match="a mini-batch of 9 rollouts does not divide over 4 ranks"):
        check_run(with_sizes(3, 3, 1, 4))
    with pytest.raises(ValueError, match="rollout.n=3, trainer.nnodes=1"):
        check_run(with_sizes(3, 3, 1, 4))
