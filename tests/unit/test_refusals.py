"""Settings that cannot be honoured are refused by name, before Ray or a model is started."""

import pytest
from omegaconf import OmegaConf

from prefixflow_verl.preflight import check_run
from prefixflow_verl.refusals import REFUSALS

REFUSED_VALUES = {
    "ulysses": 2,
    "router_replay": "R2",
}


@pytest.fixture
def run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": "prefixflow", "fsdp_config": {"strategy": "fsdp"}},
                "model": {"path": str(model)},
            },
            "trainer": {"device": "cuda"},
        }
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.setting)
def test_refused_by_name_with_the_remedy(run, refusal) -> None:
    check_run(run)
    value = REFUSED_VALUES.get(refusal.feature, True)
    OmegaConf.update(run, refusal.setting, value, force_add=True)
    with pytest.raises(ValueError) as error:
        check_run(run)
    assert f"{refusal.setting}={value}" in str(error.value)
    assert f"set it to {refusal.remedy}" in str(error.value)

    OmegaConf.update(
        run,
        "actor_rollout_ref.actor.fsdp_config.prefixflow.on_unsupported",
        "fallback",
        force_add=True,
    )
    run.actor_rollout_ref.actor.fsdp_config["_target_"] = (
        "prefixflow_verl.engine_config.PrefixFlowEngineConfig"
    )
    check_run(run)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.setting)
def test_other_strategies_are_left_alone(run, refusal) -> None:
    run.actor_rollout_ref.actor.strategy = "fsdp2"
    value = REFUSED_VALUES.get(refusal.feature, True)
    OmegaConf.update(run, refusal.setting, value, force_add=True)
    check_run(run)


def test_norm_without_a_scale_factor_is_refused(run) -> None:
    run.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-sum-norm"
    with pytest.raises(ValueError, match="loss_scale_factor to data.max_response_length"):
        check_run(run)
    run.actor_rollout_ref.actor.loss_scale_factor = 512
    check_run(run)


def test_a_loss_whose_scale_depends_on_packing_is_refused(run) -> None:
    OmegaConf.update(
        run, "actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean", force_add=True
    )
    with pytest.raises(ValueError, match="loss_mode=geo_mean averages inside each micro-batch"):
        check_run(run)


def test_options_without_the_class_that_reads_them(run) -> None:
    run.actor_rollout_ref.actor.fsdp_config["prefixflow"] = {"plan": "off"}
    with pytest.raises(ValueError, match="needs .*_target_=prefixflow_verl.engine_config"):
        check_run(run)


def test_fsdp1_is_refused_where_options_ask_for_reuse(run) -> None:
    engine = run.actor_rollout_ref.actor.fsdp_config
    engine["_target_"] = "prefixflow_verl.engine_config.PrefixFlowEngineConfig"
    engine["prefixflow"] = {"plan": "auto"}
    run.actor_rollout_ref.actor.strategy = "fsdp"
    with pytest.raises(ValueError, match="actor.strategy=fsdp is FSDP1.*strategy=prefixflow"):
        check_run(run)
