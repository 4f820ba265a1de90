#!/usr/bin/env bash
# What torchrun starts for each rank: rank.sh LOGS COMMAND...  (from scripts/pretrain_multinode.sh)
#
# Rank 0 writes to the terminal, its stderr too: torchrun's own stderr, which it would inherit, goes to a file. The
# output of every other rank goes to LOGS/output_rank_00003.log.
set -euo pipefail

logs=$1
shift
if ((RANK == 0)); then
  exec "$@" 2>&1
fi
exec "$@" >"$logs/output_rank_$(printf %05d "$RANK").log" 2>&1
