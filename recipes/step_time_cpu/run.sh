#!/usr/bin/env bash
# Step time of two engines in verl's trainer, on a machine without an accelerator.
#
#   bash recipes/step_time_cpu/run.sh                         # long prompts, short responses
#   WORKLOAD=no_benefit bash recipes/step_time_cpu/run.sh     # short prompts, long responses
#
# Extra arguments go to verl as Hydra overrides, for both engines.
set -euo pipefail

WORKLOAD=${WORKLOAD:-long_prompt}       # long_prompt or no_benefit
ENGINES=${ENGINES:-prefixflow,fsdp2}    # A,B; figures above 1 mean that A is faster
ROUNDS=${ROUNDS:-2}                     # runs of each engine, in turns A B A B; 1 or more
STEPS=${STEPS:-6}                       # training steps of each run, the first is not timed; 2 or more

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OUT=${OUT:-$root/runs/step_time_cpu-$WORKLOAD}   # report, plots, runs; must not hold runs yet

# Every setting of a workload can be set from outside, as any other knob of scripts/train_cpu.sh.
case $WORKLOAD in
    long_prompt)
        PROMPT_LEN=${PROMPT_LEN:-1024}      # tokens of every prompt
        RESPONSE_LEN=${RESPONSE_LEN:-64}    # tokens of every response
        GROUP=${GROUP:-16}                  # responses per prompt
        PROMPTS=${PROMPTS:-4}               # prompts per step
        HIDDEN=${HIDDEN:-128}               # hidden size of the model
        LAYERS=${LAYERS:-4}
        ;;
    no_benefit)
        PROMPT_LEN=${PROMPT_LEN:-32}
        RESPONSE_LEN=${RESPONSE_LEN:-256}
        GROUP=${GROUP:-4}
        PROMPTS=${PROMPTS:-16}
        HIDDEN=${HIDDEN:-128}
        LAYERS=${LAYERS:-4}
        ;;
    *)
        echo "error: WORKLOAD=$WORKLOAD must be long_prompt or no_benefit" >&2
        exit 2
        ;;
esac
LEARNING_RATE=${LEARNING_RATE:-3e-4}
export PROMPT_LEN RESPONSE_LEN GROUP PROMPTS HIDDEN LAYERS LEARNING_RATE STEPS

bash "$root/scripts/environment.sh"
# Padded rows instead of packed ones: on a CPU the faster setting of verl's engine. prefixflow does
# not read it.
exec "$root/.venv/bin/python" "$root/scripts/compare_step_time.py" \
    --engines "$ENGINES" --rounds "$ROUNDS" --full-length --out "$OUT" \
    -- actor_rollout_ref.model.use_remove_padding=False "$@"
