#!/usr/bin/env bash
# GRPO on a machine without an accelerator: verl's own trainer, rollouts by vLLM's CPU build, FSDP2
# on gloo, and a tiny random model that answers sums. Needs Linux and Python 3.11, nothing else: makes
# .venv, the model and the data on the first run and reuses them afterwards.
#
#   bash scripts/train_cpu.sh
#   ENGINE=fsdp2 STEPS=5 bash scripts/train_cpu.sh
#   RANKS=2 bash scripts/train_cpu.sh actor_rollout_ref.actor.optim.lr=5e-4
#
# Extra arguments go to verl as Hydra overrides. Running it again with the same RUN_DIR resumes from
# the last checkpoint there.
set -euo pipefail

ENGINE=${ENGINE:-prefixflow}        # actor_rollout_ref.actor.strategy: prefixflow, or fsdp2 (verl's own engine)
MODE=${MODE:-sync}                  # verl's trainer mode: sync, colocate_async or separate_async
STEPS=${STEPS:-30}                  # training steps, counted from the start of the run, 1 or more
PROMPTS=${PROMPTS:-8}               # prompts per step, 1 or more; an even number in separate_async
GROUP=${GROUP:-8}                   # responses per prompt, 2 or more
PROMPT_LEN=${PROMPT_LEN:-256}       # tokens per prompt, 6 or more; worked examples fill it
RESPONSE_LEN=${RESPONSE_LEN:-8}     # most tokens per response, 1 or more
HIDDEN=${HIDDEN:-128}               # hidden size of the model, a multiple of 64
LAYERS=${LAYERS:-2}                 # decoder layers of the model, 1 or more
RANKS=${RANKS:-1}                   # trainer ranks, each with its own vLLM: 1 or more, divides PROMPTS*GROUP
LEARNING_RATE=${LEARNING_RATE:-1e-3}
SEED=${SEED:-0}                     # seed of weights, data order and sampling
SAVE_FREQ=${SAVE_FREQ:-10}          # steps between checkpoints; -1 saves none
TIMEOUT_S=${TIMEOUT_S:-1800}        # seconds after which the run is stopped
VERBOSE=${VERBOSE:-0}               # 1 prints everything the run writes, not only its progress

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
recipe=$root/recipes/arithmetic_cpu
RUN_DIR=${RUN_DIR:-$root/runs/arithmetic_cpu-$ENGINE-$MODE}   # logs, metrics and checkpoints
ASSETS_DIR=${ASSETS_DIR:-$root/runs/assets}                   # model, tokenizer and data

fail() {
    echo "error: $1" >&2
    exit 2
}
case $MODE in
    sync) replay_buffer=FastReplayBuffer ;;
    colocate_async | separate_async) replay_buffer=FastReplayBufferAsync ;;
    *) fail "MODE=$MODE is not supported: use sync, colocate_async or separate_async" ;;
esac
for knob in STEPS PROMPTS GROUP PROMPT_LEN RESPONSE_LEN HIDDEN LAYERS RANKS TIMEOUT_S; do
    [[ ${!knob} =~ ^[1-9][0-9]*$ ]] || fail "$knob=${!knob} must be an integer of 1 or more"
done
[ $((HIDDEN % 64)) -eq 0 ] || fail "HIDDEN=$HIDDEN must be a multiple of 64"

bash "$root/scripts/environment.sh"
python=$root/.venv/bin/python
mkdir -p "$RUN_DIR/logs" "$RUN_DIR/metrics"
RUN_DIR=$(cd "$RUN_DIR" && pwd)
"$python" "$recipe/make_assets.py" --out "$ASSETS_DIR" \
    --prompt-len "$PROMPT_LEN" --response-len "$RESPONSE_LEN" --hidden "$HIDDEN" \
    --layers "$LAYERS" --seed "$SEED"
ASSETS_DIR=$(cd "$ASSETS_DIR" && pwd)
cp "$ASSETS_DIR/settings.json" "$RUN_DIR/assets.json" # what this run trained and trained on

# Unix sockets need a short path, and a directory of its own keeps Ray from joining a running cluster.
ray_dir=$(mktemp -d /tmp/prefixflow-ray.XXXXXX)
trap 'rm -rf "$ray_dir"' EXIT

# An empty value would hide Ray's logical GPUs.
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || unset CUDA_VISIBLE_DEVICES
unset RAY_ADDRESS
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=prefixflow_verl.register
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind # GiB; no pinning to cores
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0
export PYTHONUNBUFFERED=1

launch=$(date +%Y%m%d-%H%M%S)
export VERL_FILE_LOGGER_PATH=$RUN_DIR/metrics/$launch.jsonl
mini_batch=$PROMPTS
mode_settings=()
if [ "$MODE" = separate_async ]; then
    # A vLLM of its own beside the trainer's ranks; weights go to it after every second update.
    [ $((PROMPTS % 2)) -eq 0 ] || fail "PROMPTS=$PROMPTS must be even with MODE=separate_async"
    mini_batch=$((PROMPTS / 2))
    checkpoint_engine=actor_rollout_ref.rollout.checkpoint_engine
    mode_settings=(
        actor_rollout_ref.hybrid_engine=False
        actor_rollout_ref.rollout.nnodes=1
        actor_rollout_ref.rollout.n_gpus_per_node=1
        trainer.v1.separate_async.parameter_sync_step=2
        "$checkpoint_engine.backend=shared_memory"
        "$checkpoint_engine.custom_backend_module=prefixflow_verl.shared_memory_sync"
        "ray_kwargs.ray_init.num_gpus=$((RANKS + 1))"
    )
fi
sequence_len=$((PROMPT_LEN + RESPONSE_LEN))
budget=$((4 * sequence_len))

cd "$RUN_DIR"
status=0
"$python" "$root/scripts/watch_run.py" --log "$RUN_DIR/logs/$launch.log" --timeout-s "$TIMEOUT_S" \
    --verbose "$VERBOSE" -- "$python" -m verl.trainer.main_ppo \
    --config-path=pkg://prefixflow_verl.configs --config-name=prefixflow_grpo_cpu \
    hydra.run.dir="$RUN_DIR/logs/hydra" \
    actor_rollout_ref.actor.strategy="$ENGINE" \
    actor_rollout_ref.model.path="$ASSETS_DIR/model" \
    actor_rollout_ref.actor.optim.lr="$LEARNING_RATE" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$mini_batch" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$budget" \
    actor_rollout_ref.rollout.n="$GROUP" \
    actor_rollout_ref.rollout.seed="$SEED" \
    actor_rollout_ref.rollout.max_model_len="$sequence_len" \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((8 * sequence_len))" \
    data.train_files="$ASSETS_DIR/train.parquet" \
    data.val_files="$ASSETS_DIR/val.parquet" \
    data.train_batch_size="$PROMPTS" \
    data.max_prompt_length="$PROMPT_LEN" \
    data.max_response_length="$RESPONSE_LEN" \
    data.seed="$SEED" \
    reward.custom_reward_function.path="$recipe/reward.py" \
    trainer.v1.trainer_mode="$MODE" \
    trainer.v1.sampler.custom_sampler.path="$recipe/replay_buffer.py" \
    trainer.v1.sampler.custom_sampler.name="$replay_buffer" \
    trainer.n_gpus_per_node="$RANKS" \
    trainer.total_training_steps="$STEPS" \
    trainer.total_epochs=1000000 \
    trainer.save_freq="$SAVE_FREQ" \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.default_local_dir="$RUN_DIR/checkpoints" \
    trainer.resume_mode=auto \
    trainer.logger='[console,file]' \
    trainer.project_name=arithmetic_cpu \
    trainer.experiment_name="$ENGINE-$MODE" \
    +ray_kwargs.ray_init._temp_dir="$ray_dir" \
    "${mode_settings[@]}" "$@" || status=$?

if [ "$status" -ne 0 ]; then
    exit "$status"
fi
"$python" "$root/scripts/summarize_run.py" "$RUN_DIR"
