# The Python environment of all scripts. To be sourced, with ROOT set to the checkout.
#
#   prepare_environment run|dev   sets PYTHON to an interpreter that has all requirements, installing what is missing
#   find_environment              sets PYTHON to that interpreter and changes nothing
#   with_lock FILE WHAT COMMAND... runs a command that only one process at a time may run, on all hosts that share FILE;
#                                 who waits is told WHAT is done, by whom, and for how long it waits
#
# Read from the environment:
#   PYTHON   interpreter to start from (default python3)
#   VENV     virtual environment to use, made where missing (default: none where PYTHON imports torch, else .venv)
#   pip's own variables, such as PIP_INDEX_URL

say() { printf '%s\n' "$*" >&2; }

die() { # ERROR_FILE, where set: the text for the other nodes (scripts/lib/nodes.py)
  say "error: $*"
  [[ -z ${ERROR_FILE:-} ]] || printf '%s' "$*" >"$ERROR_FILE"
  exit 1
}

with_lock() { # with_lock FILE WHAT COMMAND...
  local file=$1 what=$2 lock waited=0
  shift 2
  mkdir -p "$(dirname "$file")" || die "$(dirname "$file") can't be made: make it writable, or free space there"
  if ! command -v flock >/dev/null; then # not part of macOS, where nobody shares the directory with other hosts
    "$@"
    return
  fi
  exec {lock}>>"$file" || die "$file can't be written: make its directory writable"
  until flock --timeout "${LOCK_PROGRESS:-10}" "$lock"; do
    ((waited += ${LOCK_PROGRESS:-10}))
    say "waiting: $(tail -n 1 "$file") ($waited s)"
  done
  printf '%s, by process %s on host %s\n' "$what" "$$" "$(uname -n)" >"$file"
  "$@"
  exec {lock}>&-
}

imports_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; }

missing_requirements() { "$PYTHON" "$ROOT/scripts/lib/requirements.py" missing "$1"; }

# Where PYTHON has torch it is used as it is, so that a container keeps its build. Elsewhere, or with VENV set, it is a
# virtual environment, which sees the torch of the interpreter that it was made from.
find_environment() {
  find_base_python
  PYTHON=$BASE_PYTHON
  VENV_IN_USE=${VENV:-}
  if [[ -z $VENV_IN_USE ]] && ! imports_torch "$BASE_PYTHON"; then VENV_IN_USE=$ROOT/.venv; fi
  if [[ -n $VENV_IN_USE ]]; then PYTHON=$VENV_IN_USE/bin/python; fi
}

find_base_python() {
  BASE_PYTHON=${PYTHON:-python3}
  command -v "$BASE_PYTHON" >/dev/null || die "$BASE_PYTHON isn't installed: install Python 3.10 or newer, or set PYTHON"
  "$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$BASE_PYTHON" --version) is too old: Python 3.10 or newer is needed; set PYTHON"
}

prepare_environment() {
  find_environment
  if [[ -n $VENV_IN_USE ]] && ! usable_venv; then with_lock "$ROOT/.cache/environment.lock" "making $VENV_IN_USE" make_venv; fi
  local missing
  missing=$(missing_requirements "$1")
  if [[ -n $missing ]]; then
    with_lock "$ROOT/.cache/environment.lock" "installing ${missing//$'\n'/ }" install_missing "$1"
  fi
}

usable_venv() { "$PYTHON" -m pip --version >/dev/null 2>&1; }

make_venv() {
  ! usable_venv || return 0 # made while this process waited for the lock
  say "making the virtual environment $VENV_IN_USE"
  local options=() # never --clear: VENV may be someone's directory. What a killed try left is completed.
  if imports_torch "$BASE_PYTHON"; then options+=(--system-site-packages); fi
  "$BASE_PYTHON" -m venv ${options[@]+"${options[@]}"} "$VENV_IN_USE" ||
    die "$BASE_PYTHON can't make it: install its venv module (Debian: python3-venv), or set VENV to an environment"
}

install_missing() {
  local missing extra=""
  missing=$(missing_requirements "$1")
  [[ -n $missing ]] || return 0 # installed while this process waited for the lock
  say "installing into $("$PYTHON" -c 'import sys; print(sys.prefix)'): ${missing//$'\n'/ }"
  if ! imports_torch "$PYTHON"; then
    say "to download: 0.3 GB with a CPU build of torch, 3 GB with a CUDA build, whichever the package index has"
  fi
  if [[ $1 != run ]]; then extra="[$1]"; fi
  local versions
  versions=$(mktemp)
  "$PYTHON" "$ROOT/scripts/lib/requirements.py" constraints >"$versions"
  # deepspeed is a source package whose setup.py imports torch. pip's isolated build would download a second torch for
  # it, the newest one, so it is built here, with torch and the build tools in place before.
  local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint "$versions")
  if "${pip[@]}" setuptools wheel torch numpy &&
    "${pip[@]}" --no-build-isolation --editable "$ROOT$extra"; then
    rm -f "$versions"
  else
    rm -f "$versions"
    die "pip could not install the requirements (its message is above). Calling again goes on from here." \
      "Without a network, set VENV to an environment that has them; PIP_INDEX_URL chooses another package index."
  fi
}
