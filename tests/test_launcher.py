"""What scripts/pretrain_multinode.sh refuses and says before anything starts, and the settings in scripts/env/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from training.run_lock import RunLock

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "pretrain_multinode.sh"
SETTINGS = sorted((ROOT / "scripts" / "env").glob("*.sh"))
# As NVIDIA's NCCL user guide (environment variables) and torch's gloo backend name them.
KNOWN = {
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"),
    *("NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_DISABLE"),
    *("NCCL_IB_QPS_PER_CONNECTION", "GLOO_SOCKET_IFNAME"),
}


def call(*flags: str, **variables: str) -> tuple[int, str]:
    """Exit code and stderr of the script, which must end at once."""
    clean = {name: value for name, value in os.environ.items() if name not in ("NNODES", "NODE_RANK", "MASTER_ADDR")}
    environment = clean | {"PYTHON": sys.executable, "PREPARE": "0"} | variables
    done = subprocess.run(["bash", str(SCRIPT), *flags], capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR isn't set"),
        ({"NNODES": "two"}, "NNODES is 'two'"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "h"}, "NODE_RANK is 2 with NNODES 2"),
        ({"NNODES": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"START_TIMEOUT": "0"}, "START_TIMEOUT is '0'"),
        ({"NETWORK": "token_ring"}, "it must be one of ethernet infiniband roce"),
        ({"NPROC_PER_NODE": "100000"}, "100000 processes need at least"),
        ({"PYTHON": "no_such_python"}, "no_such_python isn't installed"),
        ({"RUN_DIR": "/proc/run"}, "set RUN_DIR to a directory that can be written"),
    ],
)
def test_wrong_variables_are_refused_in_one_line(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    code, said = call(**({"RUN_DIR": str(tmp_path / "run")} | variables))
    assert code == 1
    assert said.startswith("error: ") or "\nerror: " in said
    assert message in said.splitlines()[-1], said


def test_an_empty_run_directory_is_refused() -> None:
    assert call("--run-dir=") == (1, "error: --run-dir is empty: name the run's directory, or leave the flag out\n")


def test_an_earlier_run_is_refused_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    code, said = call(RUN_DIR=str(tmp_path), PREPARE="1")
    assert code == 1 and "--resume goes on with it, --overwrite moves it aside" in said and len(said.splitlines()) == 1


def test_a_directory_that_a_run_is_using_is_refused_with_its_process_before_its_logs_are_touched(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    held = RunLock.acquire(tmp_path / "lock")
    code, said = call("--resume", RUN_DIR=str(tmp_path))
    assert code == 1 and f"is in use by another run (process {os.getpid()} on host" in said
    assert len(said.splitlines()) == 1 and not (tmp_path / "logs").exists()
    held.release()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [(("--resume",), "resuming the run in it"), (("--overwrite",), "starting anew"), ((), "a new run")],
)
def test_it_says_whether_it_resumes_or_starts_anew(flags: tuple[str, ...], wanted: str, tmp_path: Path) -> None:
    if flags:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    # Node 1, whose node 0 doesn't come: it ends after the start time-out.
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "START_TIMEOUT": "1"}
    code, said = call(*flags, RUN_DIR=str(tmp_path), **variables)
    assert code == 1 and wanted in said.splitlines()[0]
    assert "node 0 can't be reached at 127.0.0.1:1" in said.splitlines()[-1]


def test_a_corpus_that_a_killed_try_left_half_made_is_made_again(tmp_path: Path) -> None:
    part = tmp_path / "python_library.part"
    part.mkdir()
    (part / "corpus.jsonl").write_text("half a li")
    # The tools' place is taken by one that writes a file, so that the test takes no minute.
    script = f"""
        ROOT={ROOT}; PYTHON={sys.executable}; DATA_DIR={tmp_path}
        source "$ROOT/scripts/lib/environment.sh"; source "$ROOT/scripts/lib/corpus.sh"
        run_tool() {{ cat "$CORPUS.part/corpus.jsonl" 2>/dev/null || true; touch "$CORPUS.part/$1"; }}
        prepare_corpus; prepare_corpus
    """
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "half a li" not in done.stdout and done.stderr.count("making the corpus") == 1
    assert sorted(path.name for path in (tmp_path / "python_library").iterdir()) == [
        *("build_corpus", "preprocess_data", "recipe", "train_tokenizer")
    ]
    assert not part.exists()


@pytest.mark.skipif(subprocess.run(["which", "flock"], capture_output=True).returncode != 0, reason="no flock here")
def test_who_waits_for_a_lock_is_told_what_for(tmp_path: Path) -> None:
    source = f'ROOT={ROOT}; source "$ROOT/scripts/lib/environment.sh"; LOCK_PROGRESS=1;'
    hold = f"{source} with_lock {tmp_path}/lock 'installing torch' bash -c 'touch {tmp_path}/held; sleep 3'"
    holder = subprocess.Popen(["bash", "-euc", hold])
    while not (tmp_path / "held").exists():
        assert holder.poll() is None
    wait = f"{source} with_lock {tmp_path}/lock 'installing torch' true"
    waiter = subprocess.run(["bash", "-euc", wait], capture_output=True, text=True, timeout=30)
    assert holder.wait(10) == 0 and waiter.returncode == 0
    first, *more = waiter.stderr.splitlines()
    assert "waiting: installing torch, by process" in first and more and " s" in more[-1]


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.stem)
def test_settings_have_known_names_a_reason_each_and_leave_what_is_set(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    names = []
    for line in lines:
        match = re.fullmatch(r"export ([A-Z_]+)=\$\{\1:-(\S+)\} # \w.{10,}", line)
        assert match is not None, line
        names.append(match[1])
    assert names and set(names) <= KNOWN and len(set(names)) == len(names)
    show = f"set -eu; source {file}; env"
    default = subprocess.run(
        ["bash", "-c", show], capture_output=True, text=True, check=True, env={"PATH": "/bin:/usr/bin"}
    )
    assert all(f"\n{name}=" in f"\n{default.stdout}" for name in names)
    own = {name: "mine" for name in names} | {"PATH": "/bin:/usr/bin"}
    kept = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True, env=own)
    assert all(f"{name}=mine\n" in kept.stdout for name in names)
