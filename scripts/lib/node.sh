#!/usr/bin/env bash
# What one node does on its host, one phase a call, for scripts/lib/nodes.py:
#
#   node.sh prepare FLAGS             installs what is missing and makes the default corpus
#   node.sh run FLAGS                 becomes torchrun of node NODE, which meets the others at MASTER_ADDR:RENDEZVOUS_PORT
#   node.sh show-tensorboard FLAGS    prints the command that shows this run's curves
#   node.sh serve-tensorboard FLAGS   becomes TensorBoard at TENSORBOARD_PORT
#
# FLAGS are those of pretrain_deepseek.py; the rest comes from scripts/pretrain_multinode.sh as variables.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/asked.sh
source "$ROOT/scripts/lib/asked.sh"
# shellcheck source=scripts/lib/corpus.sh
source "$ROOT/scripts/lib/corpus.sh"

PHASE=$1
FLAGS=("${@:2}")
CORPUS=$DATA_DIR/python_library

uses_default_corpus() { ! has_flag config && ! has_flag data-path; }

prepare() {
  if [[ ${PREPARE:-1} != 0 ]]; then
    prepare_environment run
    if uses_default_corpus; then prepare_corpus; fi
  fi
  mkdir -p "$LOGS" || die "$LOGS can't be made: set RUN_DIR to a directory that can be written"
  local wrong
  find_environment
  compose_command
  wrong=$(PYTHONPATH=$ROOT "$PYTHON" -m training.validate $((NNODES * NPROC_PER_NODE)) "${COMMAND[@]:2}" 2>&1 >/dev/null) ||
    die "$wrong"
}

compose_command() { # COMMAND: what each rank executes
  COMMAND=("$PYTHON" "$ROOT/pretrain_deepseek.py")
  if ! has_flag config; then
    COMMAND+=(--config "$ROOT/configs/runs/tiny_v3.yaml")
    # The file names the model relative to the checkout, and this may be called from anywhere.
    if ! has_flag model; then COMMAND+=(--model "$ROOT/configs/models/tiny_v3.json"); fi
    if ! has_flag data-path; then
      COMMAND+=(--data-path "$CORPUS/corpus_text_document")
      if ! has_flag tokenizer-model; then COMMAND+=(--tokenizer-model "$CORPUS/tokenizer.model"); fi
    fi
  fi
  if ! has_flag run-dir; then COMMAND+=(--run-dir "$RUN_DIR"); fi
  COMMAND+=(${FLAGS[@]+"${FLAGS[@]}"})
}

set_defaults_of_processes() {
  local nodes_here=$((ONE_HOST ? NNODES : 1)) cores gpus
  local processes=$((NPROC_PER_NODE * nodes_here))
  cores=$(getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  if ((NNODES == nodes_here)) && [[ -d /sys/class/net/lo ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # a host name that resolves to 127.0.1.1 stops gloo
  fi
  if ((ONE_HOST)); then # each of the nodes on this host gets GPUs of its own, or all train on the CPU
    mapfile -t gpus < <(visible_gpus)
    if ((${#gpus[@]} >= processes)); then
      local IFS=,
      export CUDA_VISIBLE_DEVICES="${gpus[*]:NODE * NPROC_PER_NODE:NPROC_PER_NODE}"
    elif ((${#gpus[@]} > 0)); then
      ((NODE > 0)) || say "this host has ${#gpus[@]} GPUs for $processes processes: training on the CPU"
      export CUDA_VISIBLE_DEVICES=""
    fi
  fi
  if [[ -n ${NETWORK:-} ]]; then
    # shellcheck source=/dev/null
    source "$ROOT/scripts/env/$NETWORK.sh"
  fi
}

run() {
  find_environment
  compose_command
  set_defaults_of_processes
  exec "$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$RENDEZVOUS_PORT" --rdzv-conf "timeout=$START_TIMEOUT" --max-restarts 0 \
    --no-python bash "$ROOT/scripts/lib/rank.sh" "$LOGS" "${COMMAND[@]}" 2>"$LOGS/torchrun_node_$NODE.log"
}

choose_tensorboard() { # TENSORBOARD_COMMAND, for this run
  find_environment
  local curves=$RUN_DIR/tensorboard
  if has_flag tensorboard-dir; then curves=$(flag_value tensorboard-dir); fi
  TENSORBOARD_COMMAND=("$PYTHON" -m tensorboard.main --logdir "${curves#"$PWD/"}")
}

case $PHASE in
  prepare) prepare ;;
  run) run ;;
  show-tensorboard)
    choose_tensorboard
    say "look at it with: ${TENSORBOARD_COMMAND[*]#"$PWD/"}"
    ;;
  serve-tensorboard)
    choose_tensorboard
    exec "${TENSORBOARD_COMMAND[@]}" --port "$TENSORBOARD_PORT" >"$LOGS/tensorboard.log" 2>&1
    ;;
  *) die "node.sh has no phase '$PHASE'" ;;
esac
