#!/usr/bin/env bash
# The Python environment of this checkout, made or brought up to date. Run it, or let
# train_cpu.sh and test.sh do so.
#
#   PYTHON                  interpreter for a new environment; Python 3.11 (default: python3.11)
#   PIP_EXTRA_INDEX_URL     where pip finds PyTorch's CPU build, if your index has only the CUDA
#                           one: the address of PyTorch's CPU wheel index
#
# Installs .venv from constraints-cpu.txt, and again only after that file or pyproject.toml or
# setup.cfg has changed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$root/.venv
stamp=$environment/installed.sha256
wanted=$(cd "$root" && cat constraints-cpu.txt pyproject.toml setup.cfg | sha256sum | cut -d' ' -f1)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

if [ ! -x "$environment/bin/python" ]; then
    python=${PYTHON:-python3.11}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        echo "error: PYTHON=$python is not Python 3.11, which the pinned packages need:" \
            "set PYTHON to such an interpreter" >&2
        exit 1
    fi
    "$python" -m venv "$environment"
fi

echo "environment: installing into $environment (about 3 GB the first time)"
"$environment/bin/python" -m pip install --quiet --quiet --no-deps -r "$root/constraints-cpu.txt"
"$environment/bin/python" -m pip install --quiet --quiet --no-deps -e "$root"

if ! "$environment/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "error: pip installed PyTorch's CUDA build. Remove $environment and run again with" \
        "PIP_EXTRA_INDEX_URL set to PyTorch's CPU wheel index" >&2
    exit 1
fi
echo "$wanted" > "$stamp"
