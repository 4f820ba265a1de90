#!/usr/bin/env bash
# Set up the environment and run the tests: bash scripts/test.sh [--full] [ANY OPTION OF pytest]
#
# PYTHON and VENV choose the environment: see scripts/lib/environment.sh.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"

prepare_environment dev
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
