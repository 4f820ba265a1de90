#!/usr/bin/env bash
# Pretrain a DeepSeek model on one or many nodes.
#
#   bash scripts/pretrain_multinode.sh [FLAGS OF pretrain_deepseek.py]
#
# With nothing set: installs what is missing, makes a corpus and a tokenizer, and trains a tiny DeepSeek-V3 with tensor,
# pipeline and data parallelism of 2 each, as two nodes of four processes on this host.
#
# One node of many (run it on each; the flags and RUN_DIR must be the same on all):
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 RUN_DIR=runs/first bash scripts/pretrain_multinode.sh --config my.yaml
#
#   NNODES, NODE_RANK   number of nodes, and which one this is (default 1 and 0)
#   MASTER_ADDR         address of node 0 that all nodes reach (needed for more than one node)
#   MASTER_PORT         port on it (default 29500)
#   NPROC_PER_NODE      processes on this node (default: its GPUs, or 1)
#   RUN_DIR             the run's directory (default runs/tiny_v3-TIME; with NNODES above 1 runs/multinode)
#   DATA_DIR            where the default corpus is kept (default .cache/data)
#   PREPARE=0           install nothing and make no corpus
#   VENV, PYTHON        the environment: see scripts/lib/environment.sh
#
# The flags come after those of configs/runs/tiny_v3.yaml and win over them; with --config that file isn't used, and
# with --data-path or --config no corpus is made. A run in a directory that has one needs --resume or --overwrite.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/corpus.sh
source "$ROOT/scripts/lib/corpus.sh"

FLAGS=("$@")
NODE_PIDS=()     # torchrun's process of each node on this host, in the order of LOCAL_NODES
FIRST_FAILED=""  # the node whose torchrun failed first, and its exit code
FIRST_CODE=""
INTERRUPTED=""   # exit code for the signal that ended the run

# ---- What was asked for

has_flag() { # has_flag NAME: whether FLAGS has --NAME, with dashes or underscores, as "--name value" or "--name=value"
  local flag
  for flag in ${FLAGS[@]+"${FLAGS[@]}"}; do
    flag=${flag%%=*}
    if [[ ${flag//_/-} == "--$1" ]]; then return 0; fi
  done
  return 1
}

flag_value() { # flag_value NAME: the value of the last --NAME in FLAGS
  local i flag
  for ((i = ${#FLAGS[@]} - 1; i >= 0; i--)); do
    flag=${FLAGS[i]%%=*}
    if [[ ${flag//_/-} == "--$1" ]]; then
      if [[ ${FLAGS[i]} == *=* ]]; then printf '%s' "${FLAGS[i]#*=}"; else printf '%s' "${FLAGS[i + 1]:-}"; fi
      return
    fi
  done
}

require_number() { # require_number NAME VALUE MINIMUM
  if [[ ! $2 =~ ^[0-9]+$ ]] || ((10#$2 < $3)); then die "$1 is '$2': it must be a whole number of at least $3"; fi
}

visible_gpus() { # one device number a line
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^$/d'
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p'
  fi
}

choose_nodes() {
  mapfile -t GPUS < <(visible_gpus)
  if [[ -z ${NNODES:-}${NODE_RANK:-}${MASTER_ADDR:-}${NPROC_PER_NODE:-} ]]; then
    ONE_HOST=1 NNODES=2 NPROC_PER_NODE=4 MASTER_ADDR=127.0.0.1
    LOCAL_NODES=(0 1)
    return
  fi
  ONE_HOST=""
  NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
  NPROC_PER_NODE=${NPROC_PER_NODE:-$((${#GPUS[@]} > 0 ? ${#GPUS[@]} : 1))}
  require_number NNODES "$NNODES" 1
  require_number NODE_RANK "$NODE_RANK" 0
  require_number NPROC_PER_NODE "$NPROC_PER_NODE" 1
  ((NODE_RANK < NNODES)) || die "NODE_RANK is $NODE_RANK with NNODES $NNODES: it must be from 0 to $((NNODES - 1))"
  if ((NNODES > 1)); then
    [[ -n ${MASTER_ADDR:-} ]] || die "NNODES is $NNODES and MASTER_ADDR isn't set: set it, on all nodes, to the address of node 0"
    MASTER_PORT=${MASTER_PORT:-29500}
  fi
  if [[ -n ${MASTER_PORT:-} ]]; then
    require_number MASTER_PORT "$MASTER_PORT" 1
    ((10#$MASTER_PORT < 65536)) || die "MASTER_PORT is $MASTER_PORT: it must be below 65536"
  fi
  MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
  LOCAL_NODES=("$NODE_RANK")
}

choose_run_directory() {
  if has_flag run-dir; then
    RUN_DIR=$(flag_value run-dir)
  elif [[ -z ${RUN_DIR:-} ]]; then
    RUN_DIR=runs/tiny_v3-$(date +%Y%m%d-%H%M%S)
    if ((NNODES > 1)) && [[ -z $ONE_HOST ]]; then RUN_DIR=runs/multinode; fi # the nodes' clocks differ
  fi
  LOGS=$RUN_DIR/logs
}

# ---- Before the start

prepare() {
  DATA_DIR=${DATA_DIR:-$ROOT/.cache/data}
  if [[ ${PREPARE:-1} != 0 ]]; then prepare_environment run; else find_environment; fi
  COMMAND=("$PYTHON" "$ROOT/pretrain_deepseek.py")
  if ! has_flag config; then
    COMMAND+=(--config "$ROOT/configs/runs/tiny_v3.yaml")
    # The file names the model relative to the checkout, and this may be called from anywhere.
    if ! has_flag model; then COMMAND+=(--model "$ROOT/configs/models/tiny_v3.json"); fi
    if ! has_flag data-path; then
      CORPUS=$DATA_DIR/python_library
      if [[ ${PREPARE:-1} != 0 ]]; then prepare_corpus; fi
      COMMAND+=(--data-path "$CORPUS/corpus_text_document")
      if ! has_flag tokenizer-model; then COMMAND+=(--tokenizer-model "$CORPUS/tokenizer.model"); fi
    fi
  fi
  if ! has_flag run-dir; then COMMAND+=(--run-dir "$RUN_DIR"); fi
  COMMAND+=(${FLAGS[@]+"${FLAGS[@]}"})
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

set_defaults_of_processes() {
  MASTER_PORT=${MASTER_PORT:-$(free_port)}
  local processes=$((NPROC_PER_NODE * ${#LOCAL_NODES[@]})) cores
  cores=$(getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  if ((NNODES == ${#LOCAL_NODES[@]})) && [[ -d /sys/class/net/lo ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # a host name that resolves to 127.0.1.1 stops gloo
  fi
  if [[ -n $ONE_HOST ]] && ((${#GPUS[@]} > 0 && ${#GPUS[@]} < processes)); then
    say "this host has ${#GPUS[@]} GPUs for $processes processes: training on the CPU"
    GPUS=()
    export CUDA_VISIBLE_DEVICES=""
  fi
}

# ---- The run

start_node() { # start_node INDEX NODE: torchrun for one node, in the background, its own messages in a file
  if [[ -n $ONE_HOST ]] && ((${#GPUS[@]} > 0)); then # each of the nodes on this host gets GPUs of its own
    local IFS=,
    export CUDA_VISIBLE_DEVICES="${GPUS[*]:$1 * NPROC_PER_NODE:NPROC_PER_NODE}"
  fi
  # A process group of its own: Ctrl-C reaches this script only, which ends torchrun with the one signal that it passes
  # on in an orderly way.
  set -m
  "$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$2" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
    --no-python bash "$ROOT/scripts/lib/rank.sh" "$LOGS" "${COMMAND[@]}" 2>"$LOGS/torchrun_node_$2.log" &
  NODE_PIDS[$1]=$!
  set +m
}

alive() { kill -0 "$1" 2>/dev/null; }

on_signal() { # on_signal CODE: end the run; a second time, at once
  local pid
  for pid in ${NODE_PIDS[@]+"${NODE_PIDS[@]}"}; do
    if [[ -z $INTERRUPTED ]]; then
      kill -TERM "$pid" 2>/dev/null || true
    else
      kill_node "$pid"
    fi
  done
  [[ -n $INTERRUPTED ]] || say "ending the run (again: at once)"
  INTERRUPTED=$1
  ((${#NODE_PIDS[@]} > 0)) || exit "$1"
}

kill_node() { # kill_node PID: torchrun and the ranks that it started
  local ranks
  ranks=$(pgrep -P "$1" || true)
  # shellcheck disable=SC2086
  kill -KILL "$1" $ranks 2>/dev/null || true
}

wait_for_nodes() { # returns 0 when all nodes ended well
  local index code status=0
  local -A left=()
  for index in "${!NODE_PIDS[@]}"; do left[$index]=1; done
  while ((${#left[@]} > 0)); do
    for index in "${!left[@]}"; do
      if ! alive "${NODE_PIDS[index]}"; then
        code=0
        wait "${NODE_PIDS[index]}" || code=$?
        unset "left[$index]"
        if ((code != 0 && status == 0)); then FIRST_FAILED=${LOCAL_NODES[index]} FIRST_CODE=$code status=1; fi
      fi
    done
    if ((status != 0 && ${#left[@]} > 0)); then end_others "${!left[@]}"; fi
    sleep 0.2 & # in the background, so that a signal is handled at once
    wait $! || true
  done
  return $status
}

end_others() { # end_others INDEX...: they notice by themselves that a node has gone; if not, they are told
  local index deadline=$((SECONDS + 5))
  while ((SECONDS < deadline)); do
    local running=""
    for index in "$@"; do if alive "${NODE_PIDS[index]}"; then running=1; fi; done
    [[ -n $running ]] || return 0
    sleep 0.2 || true
  done
  for index in "$@"; do kill -TERM "${NODE_PIDS[index]}" 2>/dev/null || true; done
}

# ---- At the end

report_failure() {
  PYTHONPATH=$ROOT "$PYTHON" "$ROOT/scripts/lib/report_failure.py" "$LOGS" "$STARTED" "$FIRST_FAILED" "$FIRST_CODE"
}

show_tensorboard() {
  local command="$PYTHON -m tensorboard.main"
  [[ ! -x ${PYTHON%/*}/tensorboard ]] || command=${PYTHON%/*}/tensorboard
  say "look at it with: ${command#"$PWD/"} --logdir ${RUN_DIR#"$PWD/"}/tensorboard"
}

main() {
  if has_flag help || [[ ${FLAGS[0]:-} == -h ]]; then
    if [[ ${PREPARE:-1} != 0 ]]; then prepare_environment run; else find_environment; fi
    exec "$PYTHON" "$ROOT/pretrain_deepseek.py" --help
  fi
  choose_nodes
  choose_run_directory
  prepare
  mkdir -p "$LOGS" 2>/dev/null || die "$LOGS can't be made: set RUN_DIR to a directory that can be written"
  set_defaults_of_processes
  STARTED=$(date +%s)

  trap 'on_signal 130' INT
  trap 'on_signal 143' TERM
  say "run directory: $RUN_DIR"
  if [[ -n $ONE_HOST ]]; then
    say "starting two nodes of $NPROC_PER_NODE processes on this host"
  else
    say "starting node $NODE_RANK of $NNODES: $NPROC_PER_NODE processes, node 0 at $MASTER_ADDR:$MASTER_PORT"
    ((NODE_RANK == 0)) || say "progress is shown on node 0; the output of this node's ranks is in $LOGS"
  fi
  local index status=0
  for index in "${!LOCAL_NODES[@]}"; do start_node "$index" "${LOCAL_NODES[index]}"; done
  wait_for_nodes || status=1
  [[ -z $INTERRUPTED ]] || exit "$INTERRUPTED"
  if ((status != 0)); then
    report_failure
    exit 1
  fi
  show_tensorboard
}

main
