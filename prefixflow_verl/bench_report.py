"""A benchmark's record for people: machine, table, where reuse does not pay."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from prefixflow_verl.bench_settings import BASELINES, DENSE, OURS, SUFFIX_PHASE
from prefixflow_verl.config import PrefixFlowOptions


def describe_machine(device: torch.device, command: str) -> dict[str, Any]:
    """What a reader needs to judge or repeat the figures."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "verl")
        },
        "command": command,
    }


def describe(record: Mapping[str, Any]) -> list[str]:
    """Lines on the machine, the model and the settings that are not the default."""
    machine, settings = record["machine"], record["settings"]
    sizes = settings["sizes"]
    defaults = asdict(PrefixFlowOptions())
    changed = [
        f"`{name}={value}`"
        for name, value in settings["options"].items()
        if value != defaults.get(name)
    ]
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, device "
        f"{machine['device']}; torch {machine['torch']}, transformers {machine['transformers']}, "
        f"veRL {machine['verl']}.",
        f"Qwen3 with random weights: {sizes['layers']} layers, hidden {sizes['hidden']}, "
        f"{sizes['heads']} heads, {sizes['kv_heads']} key heads, vocabulary {sizes['vocab']}, "
        f"{settings['dtype']}, activation checkpointing "
        f"{'on' if settings['checkpointing'] else 'off'}.",
        *([f"Options of `{OURS}`: {', '.join(changed)}."] if changed else []),
    ]


def report(record: Mapping[str, Any], images: Sequence[str] = ()) -> str:
    """The record as Markdown: one table, where reuse does not pay, and `images` (file names)."""
    machine, settings = record["machine"], record["settings"]
    lines = [
        f"# {settings['what']}: prefix reuse against other ways to train",
        "",
        f"`{machine['command']}`",
        "",
        *describe(record),
        "",
        "A workload of equal lengths is given as prompt, response, group x prompts. "
        f"Seconds are medians of {settings['repeats']} runs (fastest to slowest); `x` is the "
        "speed-up of `prefixflow`; peak is of live tensor bytes above parameters and optimizer "
        "state, suffix peak the same outside forward and backward of cut prefixes.",
        "",
        "| workload | tokens logical / executed | arm | seconds | x "
        "| of the ideal | peak MiB | suffix peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        label = case["label"]
        tokens = f"{case['logical_tokens']} / {case['executed_tokens']}"
        for arm in (OURS, *BASELINES):
            if arm not in case["seconds"]:
                continue
            spread = case["seconds"][arm]
            speedup, part, suffix = "", "", ""
            if arm == OURS:
                suffix = mib(case["phase_bytes"][arm].get(SUFFIX_PHASE))
            else:
                speedup = f"{case['speedup'][arm]:.2f}"
            if arm == DENSE:
                part = f"{case['efficiency']:.2f} of {case['ideal']:.2f}"
            lines.append(
                f"| {label} | {tokens} | {arm} | {spread['median']:.3f} "
                f"({spread['min']:.3f} to {spread['max']:.3f}) | {speedup} | {part} "
                f"| {mib(case['peak_bytes'][arm])} | {suffix} |"
            )
            label = tokens = ""
    lines += ["", "## Where reuse does not pay", ""]
    words = {"same": "no faster or slower than", "slower": "slower than"}
    lines += [
        f"- {case['label']}: {words[found]} {arm} ({case['speedup'][arm]:.2f}x)"
        for case in record["cases"]
        for arm, found in case["verdict"].items()
        if found != "faster"
    ] or ["Nowhere in these cases."]
    lines += ["", *(f"![{Path(image).stem}]({image})" for image in images)]
    return "\n".join(lines).rstrip() + "\n"


def write_results(record: Mapping[str, Any], directory: Path) -> None:
    """Write `results.json`, `report.md` and the heat maps into `directory`, made if missing."""
    from prefixflow_verl.bench_plots import draw_heat_maps

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    images = draw_heat_maps(record, directory)
    (directory / "report.md").write_text(report(record, images), encoding="utf-8")


def mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
