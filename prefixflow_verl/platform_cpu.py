"""A verl platform for machines without an accelerator: FSDP2 on gloo, rollouts by vLLM's CPU build.

verl ships platforms for NVIDIA, AMD and Ascend devices and falls back to NVIDIA. Importing this
module adds one named `cpu`; `register.py` does so only in processes started with
`VERL_PLATFORM=cpu`. It never takes part in verl's auto-detection, so a machine with GPUs cannot end
up on it by accident.

Linux only, as is vLLM's CPU build: memory figures come from `/proc`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Answers verl's device questions for the CPU."""

    _device_module: types.ModuleType | None = None

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        if CpuPlatform._device_module is None:
            CpuPlatform._device_module = _make_device_module()
        return CpuPlatform._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # chosen by VERL_PLATFORM=cpu, never detected

    def current_device(self) -> str:
        # verl writes x.to(get_device_id()), and the integer 0 would mean an accelerator there.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Operations on the CPU are complete when they return."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has no such settings."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

    def ray_resource_name(self) -> str:
        # verl's resource pools count "GPU" or "NPU" only. Ray's GPUs are logical: a recipe offers
        # one per rank with ray_kwargs.ray_init.num_gpus.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _make_device_module() -> types.ModuleType:
    """`torch.cpu` plus the names of `torch.cuda` that verl calls unconditionally.

    "Device memory" is this process's resident memory, in bytes.
    """
    device = types.ModuleType("prefixflow_verl.cpu_device")
    device.__dict__.update(
        {name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")}
    )

    def ignore(*args: object, **kwargs: object) -> None:
        """Has no meaning on a CPU."""

    for name in (
        "empty_cache",
        "ipc_collect",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    ):
        setattr(device, name, ignore)
    device.current_device = lambda: "cpu"
    device.get_device_name = lambda *args, **kwargs: "CPU"
    device.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    device.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    device.manual_seed = torch.manual_seed
    device.manual_seed_all = torch.manual_seed
    device.memory_allocated = lambda *args, **kwargs: _status_bytes("VmRSS")
    device.memory_reserved = lambda *args, **kwargs: _status_bytes("VmRSS")
    device.max_memory_allocated = lambda *args, **kwargs: _status_bytes("VmHWM")
    device.max_memory_reserved = lambda *args, **kwargs: _status_bytes("VmHWM")
    device.reset_peak_memory_stats = lambda *args, **kwargs: _reset_peak_resident_memory()
    device.mem_get_info = lambda *args, **kwargs: (
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    return device


def _status_bytes(field: str) -> int:
    """A size in `/proc/self/status`; the kernel reports it in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(f"/proc/self/status has no field {field}")


def _reset_peak_resident_memory() -> None:
    # "5" resets VmHWM to the present size (man 5 proc, clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
