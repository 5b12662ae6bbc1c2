"""The ledger of patches: complete, applied where it should be and nowhere else, and effective."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
import types
from types import SimpleNamespace

import pytest
import torch

from prefixflow_verl import compat
from prefixflow_verl.after_import import after_import

PATCHES = {patch.name: patch for patch in compat.LEDGER}


def run_python(code: str, **environment: str) -> str:
    """Runs `code` in a fresh interpreter; returns its output. Fails the test if it fails."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES")
    }
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_every_entry_says_what_why_and_until_when():
    assert len(PATCHES) == len(compat.LEDGER), "names are unique"
    for patch in compat.LEDGER:
        assert all((patch.name, patch.module, patch.what, patch.why, patch.remove_when))


def test_installed_verl_is_supported():
    compat.check_verl_version()


def test_unsupported_verl_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(compat.UnsupportedHostError) as error:
        compat.check_verl_version()
    assert "supports verl 0.9.1, but verl 0.8.0 is installed" in str(error.value)
    assert "pip install verl==0.9.1" in str(error.value)


def test_registration_logs_an_error_before_it_raises(monkeypatch, caplog):
    from prefixflow_verl import register

    monkeypatch.setattr(compat, "SUPPORTED_VERL", ("0.0.1",))
    with pytest.raises(compat.UnsupportedHostError):
        register.register()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_after_import_acts_at_once_on_a_loaded_module():
    seen = []
    after_import("textwrap", seen.append)
    assert seen == [textwrap]


def test_after_import_waits_for_a_module(tmp_path, monkeypatch):
    (tmp_path / "module_to_await.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import("module_to_await", lambda module: seen.append(module.value))
    after_import("module_to_await", lambda module: setattr(module, "value", 2))
    assert seen == []
    module = __import__("module_to_await")
    assert (seen, module.value) == ([1], 2)
    monkeypatch.delitem(sys.modules, "module_to_await")


@pytest.mark.slow
def test_on_an_accelerator_machine_only_the_general_entries_apply():
    """Without VERL_PLATFORM=cpu: our engine, no CPU platform, verl's own strategies as they were.

    The platform is forced to verl's own, so that the test means the same on every machine.
    """
    output = run_python(
        """
        import importlib.metadata, sys
        import torch.distributed
        version, init = importlib.metadata.version, torch.distributed.init_process_group
        import verl
        assert "verl.workers.engine" not in sys.modules, "import verl stays light"
        import prefixflow_verl.register
        prefixflow_verl.register.register()
        assert importlib.metadata.version is version
        assert torch.distributed.init_process_group is init
        from verl.plugin.platform import PlatformRegistry
        assert PlatformRegistry.get("cpu") is None
        from verl.workers.engine import EngineRegistry
        engines = EngineRegistry._engines["language_model"]
        assert sorted(engines["prefixflow"]) == ["cpu", "cuda"]
        assert "cpu" not in engines["fsdp2"]
        print(engines["prefixflow"]["cuda"].__name__)
        """,
        VERL_PLATFORM="nvidia",
        VERL_USE_EXTERNAL_MODULES="prefixflow_verl.register",
    )
    assert output.split()[-1] == "PrefixFlowEngine"


@pytest.mark.slow
def test_on_the_cpu_platform_both_engines_are_found():
    output = run_python(
        """
        import verl
        import prefixflow_verl.register
        prefixflow_verl.register.register()
        from verl.utils.device import get_device_id, get_device_name, get_torch_device
        from verl.workers.engine import EngineRegistry
        assert (get_device_name(), get_device_id()) == ("cpu", "cpu")
        device = get_torch_device()
        allocated = device.memory_allocated()
        assert device.max_memory_allocated() >= allocated > 0
        for strategy in ("prefixflow", "fsdp2"):
            print(EngineRegistry.get_engine_cls("language_model", strategy).__name__)
        print(EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__)
        """,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="prefixflow_verl.register",
    )
    assert output.split()[-3:] == [
        "PrefixFlowEngine",
        "FSDPEngineWithLMHead",
        "FSDPEngineWithValueHead",
    ]


@pytest.mark.slow
def test_entry_point_alone_makes_the_strategy_known():
    output = run_python(
        """
        import verl
        from verl.workers.engine import EngineRegistry
        print("prefixflow" in EngineRegistry._engines["language_model"])
        """,
        VERL_PLATFORM="cpu",
    )
    assert output.split()[-1] == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["engine", "engine_config", "platform_cpu", "preflight", "register", "vllm_cpu"],
)
def test_any_module_may_be_imported_before_verl(module):
    output = run_python(
        f"""
        import prefixflow_verl.{module}
        from verl.plugin.platform import get_platform
        from verl.workers.engine import EngineRegistry
        print(get_platform().device_name)
        print(EngineRegistry.get_engine_cls("language_model", "prefixflow").__name__)
        """,
        VERL_PLATFORM="cpu",
    )
    assert output.split()[-2:] == ["cpu", "PrefixFlowEngine"]


def test_vllm_version_is_answered_by_the_cpu_distribution():
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.27.1"
        raise importlib.metadata.PackageNotFoundError(name)

    metadata = types.SimpleNamespace(
        version=version, PackageNotFoundError=importlib.metadata.PackageNotFoundError
    )
    PATCHES["vllm-cpu-version"].apply(metadata)
    assert metadata.version("vllm") == "0.27.1+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        metadata.version("no-such-distribution")


@pytest.mark.parametrize(
    ("given", "used"),
    [("cpu:gloo,cpu:gloo", "cpu:gloo"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")],
)
def test_process_group_backend(given, used):
    calls = []
    distributed = types.SimpleNamespace(
        init_process_group=lambda backend=None, **kwargs: calls.append((backend, kwargs))
    )
    PATCHES["gloo-twice"].apply(distributed)
    distributed.init_process_group(backend=given, rank=0)
    assert calls == [(used, {"rank": 0})]


def test_saved_shards_do_not_follow_the_parameters():
    parameter = torch.zeros(3)
    fsdp_utils = types.SimpleNamespace(
        fsdp2_sharded_save_to_cpu=lambda model: ({"weight": (parameter, "spec")}, "global")
    )
    PATCHES["saved-shards-are-copies"].apply(fsdp_utils)
    shards, global_spec = fsdp_utils.fsdp2_sharded_save_to_cpu(None)
    parameter.add_(1)
    assert shards["weight"][0].tolist() == [0, 0, 0]
    assert (shards["weight"][1], global_spec) == ("spec", "global")


def test_offload_policy_does_not_pin():
    from torch.distributed.fsdp import CPUOffloadPolicy

    engine = types.SimpleNamespace(CPUOffloadPolicy=CPUOffloadPolicy)
    PATCHES["unpinned-offload"].apply(engine)
    assert engine.CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy(pin_memory=False)


def test_logger_accepts_flush():
    messages = []
    trainer = types.SimpleNamespace(logger=types.SimpleNamespace(info=messages.append))
    PATCHES["logger-flush"].apply(trainer)
    trainer.logger.info("ready", flush=True)
    assert messages == ["ready"]


def test_detach_actor_worker_saves_ours_as_fsdp2_and_leaves_others(monkeypatch):
    from verl.utils import fsdp_utils

    class Worker:
        def __init__(self, strategy: str):
            self.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))

        def _get_strategy_handlers(self):
            return "verl's own"

    PATCHES["detach-actor-worker"].apply(types.SimpleNamespace(DetachActorWorker=Worker))
    restored = []
    monkeypatch.setattr(
        fsdp_utils, "fsdp2_sharded_load_from_cpu", lambda *arguments: restored.append(arguments)
    )
    save, restore = Worker("prefixflow")._get_strategy_handlers()
    assert save is fsdp_utils.fsdp2_sharded_save_to_cpu
    # verl hands over what the save handler returned, as one argument.
    restore("model", ("shards", "spec"))
    assert restored == [("model", "shards", "spec")]
    assert Worker("megatron")._get_strategy_handlers() == "verl's own"


def test_run_is_checked_before_verl_validates():
    validated = []
    config_module = types.SimpleNamespace(
        validate_config=lambda config, **kwargs: validated.append(config)
    )
    PATCHES["check-run"].apply(config_module)
    from omegaconf import OmegaConf

    wrong = OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": "prefixflw"}}})
    with pytest.raises(ValueError, match="actor_rollout_ref.actor.strategy=prefixflw"):
        config_module.validate_config(wrong)
    assert validated == []
