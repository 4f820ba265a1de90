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
#   MASTER_PORT         port on it (default 29500); the next free one after it is used too
#   NPROC_PER_NODE      processes on this node (default: its GPUs, or 1)
#   START_TIMEOUT       seconds in which all nodes must be there, before they prepare (default 300)
#   NETWORK             infiniband, roce or ethernet: takes the settings in scripts/env/NETWORK.sh
#   RUN_DIR             the run's directory (default runs/tiny_v3-TIME; with NNODES above 1 runs/multinode)
#   DATA_DIR            where the default corpus is kept (default .cache/data)
#   PREPARE=0           install nothing and make no corpus
#   VENV, PYTHON        the environment: see scripts/lib/environment.sh
#   TENSORBOARD=1       serve TensorBoard on node 0 while it trains, at TENSORBOARD_PORT (default 6006) or the next free one
#
# The flags come after those of configs/runs/tiny_v3.yaml and win over them; with --config that file isn't used, and
# with --data-path or --config no corpus is made. A run in a directory that has one needs --resume or --overwrite.
#
# This file reads what was asked and checks what can be checked at once. scripts/lib/nodes.py, which it becomes, meets
# the other nodes, and has scripts/lib/node.sh prepare and run torchrun.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/asked.sh
source "$ROOT/scripts/lib/asked.sh"

FLAGS=("$@")

choose_nodes() {
  mapfile -t GPUS < <(visible_gpus)
  START_TIMEOUT=${START_TIMEOUT:-300}
  require_number START_TIMEOUT "$START_TIMEOUT" 1
  if [[ -n ${MASTER_PORT:-} ]]; then require_number MASTER_PORT "$MASTER_PORT" 1 65535; fi
  if [[ -z ${NNODES:-}${NODE_RANK:-}${MASTER_ADDR:-}${NPROC_PER_NODE:-} ]]; then
    ONE_HOST=1 NNODES=2 NODE_RANK=0 NPROC_PER_NODE=4 MASTER_ADDR=127.0.0.1
    return
  fi
  ONE_HOST=0 NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
  NPROC_PER_NODE=${NPROC_PER_NODE:-$((${#GPUS[@]} > 0 ? ${#GPUS[@]} : 1))}
  require_number NNODES "$NNODES" 1
  require_number NODE_RANK "$NODE_RANK" 0
  require_number NPROC_PER_NODE "$NPROC_PER_NODE" 1
  ((10#$NODE_RANK < 10#$NNODES)) ||
    die "NODE_RANK is $NODE_RANK with NNODES $NNODES: it must be from 0 to $((NNODES - 1))"
  if ((NNODES > 1)); then
    [[ -n ${MASTER_ADDR:-} ]] || die "NNODES is $NNODES and MASTER_ADDR isn't set: set it, on all nodes, to the address of node 0"
    MASTER_PORT=${MASTER_PORT:-29500}
  fi
  MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
}

check_network() {
  [[ -z ${NETWORK:-} || -f $ROOT/scripts/env/$NETWORK.sh ]] ||
    die "NETWORK is '$NETWORK': it must be one of $(cd "$ROOT/scripts/env" && printf '%s ' *.sh | sed 's/\.sh//g')"
}

choose_run_directory() {
  if has_flag run-dir; then
    RUN_DIR=$(flag_value run-dir)
    [[ -n $RUN_DIR ]] || die "--run-dir is empty: name the run's directory, or leave the flag out"
  elif [[ -z ${RUN_DIR:-} ]]; then
    RUN_DIR=runs/tiny_v3-$(date +%Y%m%d-%H%M%S)
    if ((NNODES > 1 && !ONE_HOST)); then RUN_DIR=runs/multinode; fi # the nodes' clocks differ
  fi
  LOGS=$RUN_DIR/logs
}

# Whether it goes on or starts anew, known before anything is prepared. The program checks again, with every flag read.
say_how_it_starts() {
  local checkpoints=$RUN_DIR/checkpoints asked="" config held
  held=$(PYTHONPATH=$ROOT "$BASE_PYTHON" -m training.run_lock "$RUN_DIR" 2>&1) || die "$held"
  if has_flag save; then checkpoints=$(flag_value save); fi
  config=$(flag_value config)
  if has_flag resume || { [[ -f $config ]] && grep -Eiq '^ *resume *: *(true|yes|on)\b' "$config"; }; then
    asked=resume
  elif has_flag overwrite || { [[ -f $config ]] && grep -Eiq '^ *overwrite *: *(true|yes|on)\b' "$config"; }; then
    asked=overwrite
  fi
  if [[ ! -e $RUN_DIR/metrics.jsonl && -z $(ls -A "$checkpoints" 2>/dev/null) ]]; then
    say "run directory: $RUN_DIR (a new run)"
  elif [[ $asked == resume ]]; then
    say "run directory: $RUN_DIR (resuming the run in it)"
  elif [[ $asked == overwrite ]]; then
    say "run directory: $RUN_DIR (starting anew; the run in it is moved aside)"
  else
    die "$RUN_DIR holds an earlier run: --resume goes on with it, --overwrite moves it aside and starts anew"
  fi
  mkdir -p "$LOGS" 2>/dev/null || die "$LOGS can't be made: set RUN_DIR to a directory that can be written"
  [[ -w $LOGS ]] || die "$LOGS can't be written: set RUN_DIR to a directory that can be"
}

check_memory() {
  local processes=$((NPROC_PER_NODE * (ONE_HOST ? NNODES : 1)))
  ((${#GPUS[@]} >= processes)) || PYTHONPATH=$ROOT "$BASE_PYTHON" -m scripts.lib.memory "$processes" || exit 1
}

main() {
  if has_flag help || has_flag help-compositions || [[ ${FLAGS[0]:-} == -h ]]; then
    if [[ ${PREPARE:-1} != 0 ]]; then prepare_environment run; else find_environment; fi
    if has_flag help-compositions; then FLAGS=(--help-compositions); else FLAGS=(--help); fi
    exec "$PYTHON" "$ROOT/pretrain_deepseek.py" "${FLAGS[@]}"
  fi
  choose_nodes
  check_network
  choose_run_directory
  find_base_python
  check_memory
  say_how_it_starts
  DATA_DIR=${DATA_DIR:-$ROOT/.cache/data}
  export ONE_HOST NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR RUN_DIR LOGS DATA_DIR START_TIMEOUT

  local options=(--node "$NODE_RANK" --address "$MASTER_ADDR" --port "${MASTER_PORT:-0}" --logs "$LOGS"
    --start-timeout "$START_TIMEOUT" --same "NNODES=$NNODES" --same "NPROC_PER_NODE=$NPROC_PER_NODE"
    --same "RUN_DIR=$RUN_DIR" --same "the list of flags=${FLAGS[*]-}")
  if ((ONE_HOST)); then
    options+=(--nnodes 1 --local-nodes 0 1) # one host for nodes.py, two nodes for torchrun
    say "starting two nodes of $NPROC_PER_NODE processes on this host"
  else
    options+=(--nnodes "$NNODES")
    say "starting node $NODE_RANK of $NNODES: $NPROC_PER_NODE processes, node 0 at $MASTER_ADDR${MASTER_PORT:+:$MASTER_PORT}"
    ((NODE_RANK == 0)) || say "progress is shown on node 0; the output of this node's ranks is in $LOGS"
  fi
  if [[ ${TENSORBOARD:-0} != 0 ]]; then
    require_number TENSORBOARD_PORT "${TENSORBOARD_PORT:=6006}" 1 65535
    options+=(--tensorboard "$TENSORBOARD_PORT")
  fi
  PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "$BASE_PYTHON" -m scripts.lib.nodes "${options[@]}" \
    -- bash "$ROOT/scripts/lib/node.sh" PHASE ${FLAGS[@]+"${FLAGS[@]}"}
}

main
