"""Import layers: planning needs numpy alone, training torch and transformers, the rest verl."""

import subprocess
import sys
import textwrap

import pytest

PURE = (
    "forest",
    "plan",
    "packing",
    "accounting",
    "balance",
    "balance_search",
    "config",
    "lengths",
    "provenance",
    "simulate",
    "version_stamps",
)
TORCH = (
    "activations",
    "attention",
    "failures",
    "kv_cache",
    "lockstep",
    "log_probs",
    "memory",
    "model_hook",
    "phases",
    "verify",
)
HOST_PACKAGES = ("verl", "ray", "vllm", "tensordict", "hydra", "omegaconf")

IMPORT_ONLY = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            if {blocked}:
                raise ImportError(f"{{name}} is out of reach of this layer")

    sys.meta_path.insert(0, Blocker())
    import {module}
"""


def import_only(module: str, blocked: str) -> subprocess.CompletedProcess:
    """Import `module` in a fresh interpreter where top-level packages with `blocked` true do not
    exist."""
    code = textwrap.dedent(IMPORT_ONLY).format(module=module, blocked=blocked)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def modules(names: tuple[str, ...]) -> str:
    return ", ".join(["prefixflow_verl", *(f"prefixflow_verl.{name}" for name in names)])


def test_the_pure_layer_needs_numpy_alone():
    beyond = "top not in sys.stdlib_module_names | {'numpy', 'prefixflow_verl'}"
    finished = import_only(modules(PURE), beyond)
    assert finished.returncode == 0, finished.stderr


def test_the_torch_layer_knows_nothing_of_the_host():
    finished = import_only(modules(TORCH), f"top in {HOST_PACKAGES}")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "module, blocked", [("numpy", "top == 'numpy'"), ("prefixflow_verl.phases", "top == 'torch'")]
)
def test_the_block_blocks(module, blocked):
    finished = import_only(module, blocked)
    assert "out of reach" in finished.stderr


def test_public_names_resolve():
    import prefixflow_verl

    for name in prefixflow_verl.__all__:
        assert getattr(prefixflow_verl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefixflow_verl.nothing  # noqa: B018
