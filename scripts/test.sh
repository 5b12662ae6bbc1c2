#!/usr/bin/env bash
# Lint and tests. Makes .venv first if it is missing or out of date.
#
#   bash scripts/test.sh                        everything that needs no GPU
#   bash scripts/test.sh tests/unit             arguments go to pytest
#   bash scripts/test.sh -m "not integration"   leaves out the runs of verl's trainer
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/environment.sh

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
.venv/bin/ruff check .
.venv/bin/python -m pytest -q --durations=10 "$@"
