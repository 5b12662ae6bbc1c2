"""A process with Ray and verl's TransferQueue in it, for tests of what the trainer's process does.

A process of its own, because Ray is started once per process. A test module calls
`run_in_queue(__name__, directory)` and serves its own main function under `__name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]


def run_in_queue(module: str, directory: Path) -> dict[str, Any]:
    """Run `module` as a process and return what its main function found."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {
        "VERL_PLATFORM": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with (directory / "log.txt").open("w") as log:
        finished = subprocess.run(
            [sys.executable, "-m", module, str(directory)],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    assert finished.returncode == 0, (directory / "log.txt").read_text()[-6000:]
    return json.loads((directory / "found.json").read_text())


def serve(main: Callable[[Path], dict[str, Any]]) -> None:
    """Start Ray and the queue, call `main` with the directory, leave what it found there."""
    import ray
    import transfer_queue as tq
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    import prefixflow_verl.register  # noqa: F401

    directory = Path(sys.argv[1])
    with initialize_config_module("prefixflow_verl.configs", version_base=None):
        config = compose("prefixflow_grpo_cpu")
    with tempfile.TemporaryDirectory(prefix="prefixflow-ray.", dir="/tmp") as ray_directory:
        ray.init(num_cpus=8, include_dashboard=False, _temp_dir=ray_directory)
        tq.init(OmegaConf.merge(config.transfer_queue, {"enable": True}))
        try:
            found = main(directory)
        finally:
            ray.shutdown()
    (directory / "found.json").write_text(json.dumps(found))
