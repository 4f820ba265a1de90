"""How a process ends: what is on its terminal, in its files, and how soon. Every case is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.failures import ConfigurationError, first_error

START = "import sys, time, pathlib\nfrom training.failures import *\n"


def program(body: str, directory: Path | None = None, patience: float = 0.5) -> str:
    place = f"pathlib.Path({str(directory)!r})" if directory else None
    return f"{START}with FailureReport({place}, patience={patience}) as report:\n{textwrap.indent(body, '    ')}\n"


def hear_interrupts() -> None:
    """In a child: undo what a test run in a shell's background inherits, where Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """A started program, its clock and its output."""

    def __init__(self, source: str, **environ: str) -> None:
        self.started = time.monotonic()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
            preexec_fn=hear_interrupts,
        )

    def wait_ready(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def end(self) -> tuple[int, str, float]:
        """Exit code, stderr and seconds since the start."""
        _, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, err, time.monotonic() - self.started


@pytest.fixture
def start() -> Iterator[Any]:
    processes: list[Process] = []

    def begin(source: str, **environ: str) -> Process:
        processes.append(Process(source, **environ))
        return processes[-1]

    yield begin
    for process in processes:
        process.popen.kill()
        process.popen.wait()


def test_a_clean_end_says_nothing(start: Any) -> None:
    assert start(program("pass")).end()[:2] == (0, "")
    assert start(program("sys.exit(7)")).end()[0] == 7


def test_an_error_is_recorded_and_its_message_comes_last(start: Any, tmp_path: Path) -> None:
    source = program("raise ValueError('loss is nan at step 12')", tmp_path / "logs")
    code, shown, _ = start(source, RANK="3", LOCAL_RANK="3").end()
    assert code == 1
    assert shown.splitlines()[0].startswith("rank 3 on ")
    assert shown.splitlines()[-1] == "ValueError: loss is nan at step 12"
    assert shown.count("Traceback") == 1
    record = json.loads((tmp_path / "logs" / "error_rank_00003.json").read_text())
    assert record["rank"] == 3 and record["message"] == "ValueError: loss is nan at step 12"
    assert set(record) == {"time", "rank", "host", "message", "traceback", "cascade"}
    assert "raise ValueError" in record["traceback"] or "<string>" in record["traceback"]
    assert abs(record["time"] - time.time()) < 30


def test_threads_dont_keep_a_failed_process_alive(start: Any) -> None:
    body = "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('x')"
    code, _, seconds = start(program(body)).end()
    assert code == 1 and seconds < 10


def test_configuration_errors_have_no_traceback(start: Any, tmp_path: Path) -> None:
    body = "raise ConfigurationError('--lr 0 is too low', '--seed -1 must not be negative')"
    code, shown, _ = start(program(body, tmp_path / "logs")).end()
    assert code == 2
    assert shown == "2 errors:\n- --lr 0 is too low\n- --seed -1 must not be negative\n"
    assert not (tmp_path / "logs").exists()
    assert start(program("raise ConfigurationError('one')")).end()[:2] == (2, "error: one\n")


def test_the_same_configuration_error_on_all_ranks_is_shown_once(start: Any) -> None:
    source = program("print('ready', flush=True)\nraise ConfigurationError('wrong')", patience=10)
    first = start(source, RANK="0", LOCAL_RANK="0")
    others = [start(source, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in (1, 2)]
    assert first.end()[:2] == (2, "error: wrong\n")
    for other in others:  # as torchrun does when it sees rank 0 end
        other.wait_ready()
        time.sleep(0.2)
        other.popen.terminate()
        code, shown, seconds = other.end()
        assert (code, shown) == (143, "") and seconds < 10


def test_a_rank_that_no_launcher_ends_speaks_after_its_patience(start: Any) -> None:
    source = program("raise ConfigurationError('only here')", patience=0.3)
    code, shown, seconds = start(source, RANK="5", LOCAL_RANK="1").end()
    assert (code, shown) == (2, "error: only here\n")
    assert seconds > 0.6


def test_a_lost_connection_is_a_consequence(start: Any, tmp_path: Path) -> None:
    text = "[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1234"
    source = program(f"print('ready', flush=True)\nraise RuntimeError({text!r})", tmp_path, patience=10)
    ended = start(source, RANK="0", LOCAL_RANK="0")
    ended.wait_ready()
    time.sleep(0.2)
    ended.popen.terminate()
    assert ended.end()[:2] == (143, "")
    (tmp_path / "error_rank_00000.json").unlink()
    alone = start(program(f"raise RuntimeError({text!r})", tmp_path, patience=0.2), RANK="0")
    code, shown, _ = alone.end()
    assert code == 1 and "another rank has gone" in shown and "Traceback" not in shown
    assert json.loads((tmp_path / "error_rank_00000.json").read_text())["cascade"] is True


def test_the_same_error_on_a_later_rank_waits_for_the_first(start: Any, tmp_path: Path) -> None:
    assert start(program("raise ValueError('nan')", tmp_path), RANK="1", LOCAL_RANK="1").end()[0] == 1
    body = "report._started -= 3600\nprint('ready', flush=True)\nraise ValueError('nan')"
    later = start(program(body, tmp_path, patience=10), RANK="0", LOCAL_RANK="0")
    later.wait_ready()
    time.sleep(0.2)
    later.popen.terminate()
    assert later.end()[:2] == (143, "")


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, 130, "interrupted by Ctrl-C"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_signals_end_cleanly_with_one_line(start: Any, number: int, code: int, text: str) -> None:
    body = (
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "finally:\n    print('restored', file=sys.stderr, flush=True)"
    )
    ended = start(program(body, patience=5), RANK="0", LOCAL_RANK="0")
    ended.wait_ready()
    ended.popen.send_signal(number)
    got, shown, seconds = ended.end()
    assert got == code and seconds < 5
    assert shown.splitlines()[0] == "restored"
    assert len(shown.splitlines()) == 2 and text in shown.splitlines()[1]
    silent = start(program(body, patience=5), RANK="1", LOCAL_RANK="1")
    silent.wait_ready()
    silent.popen.send_signal(number)
    assert silent.end()[:2] == (code, "restored\n")


def test_a_main_thread_that_hangs_in_native_code_is_ended_too(start: Any) -> None:
    # A C call that restarts after every signal and never returns to Python: like a collective that waits for a peer.
    native = (
        "import ctypes, os\nsemaphore = ctypes.create_string_buffer(64)\nlibc = ctypes.CDLL(None)\n"
        "libc.pthread_mutex_lock(semaphore)\nprint('ready', flush=True)\nlibc.pthread_mutex_lock(semaphore)"
    )
    ended = start(program(native, patience=0.5), RANK="0")
    ended.wait_ready()
    ended.popen.terminate()
    code, shown, seconds = ended.end()
    assert code == 143 and "ended by SIGTERM" in shown and seconds < 10


def test_a_forked_workers_end_isnt_mistaken_for_a_signal(start: Any) -> None:
    body = (
        "import os, signal\nchild = os.fork()\n"
        "if child == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "time.sleep(0.2)\nos.kill(child, signal.SIGTERM)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\ntime.sleep(1.0)"
    )
    assert start(program(body, patience=0.1)).end()[:2] == (0, "")


def test_signals_work_as_before_after_the_block(start: Any) -> None:
    source = program("pass") + "print('ready', flush=True)\ntime.sleep(60)\n"
    ended = start(source)
    ended.wait_ready()
    ended.popen.terminate()
    assert ended.end()[0] == -signal.SIGTERM


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_torchrun_ends_all_ranks_and_shows_the_root_message_last(tmp_path: Path) -> None:
    body = (
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['RANK'] == '1': raise ValueError('the root cause')\n"
        "dist.barrier()"
    )
    script = tmp_path / "script.py"
    script.write_text(program(body, tmp_path / "logs", patience=2.0))
    began = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*TORCHRUN, str(script)], capture_output=True, text=True, timeout=100, env=environ)
    print(f"{time.monotonic() - began:.1f} s\n{done.stderr}")
    assert done.returncode != 0
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert "ValueError: the root cause" in root and "rank      : 1" in root
    assert "another rank has gone" not in done.stderr
    assert done.stderr.index("rank 1 on ") < done.stderr.index("Root Cause")
    found = first_error(tmp_path / "logs")
    assert found is not None and found["message"] == "ValueError: the root cause"


def test_first_error_prefers_a_cause_to_an_earlier_consequence(tmp_path: Path) -> None:
    assert first_error(tmp_path) is None
    for rank, moment, cascade in ((0, 1.0, True), (1, 3.0, False), (2, 2.0, False)):
        record = {"time": moment, "rank": rank, "host": "h", "message": f"m{rank}", "traceback": "", "cascade": cascade}
        (tmp_path / f"error_rank_{rank:05d}.json").write_text(json.dumps(record))
    (tmp_path / "error_rank_00009.json").write_text("{torn")
    (tmp_path / "error_rank_00007.20250101-000000.json").write_text(json.dumps({"time": 0.0, "cascade": False}))
    found = first_error(tmp_path)
    assert found is not None and found["rank"] == 2


def test_configuration_error_survives_the_way_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigurationError("a", "b")))
    assert error.errors == ("a", "b") and str(error) == "- a\n- b"


def test_the_launcher_can_ask_for_the_first_error_of_a_run(tmp_path: Path, start: Any) -> None:
    source = program("raise ValueError('the root cause')", tmp_path / "logs")
    assert start(source, RANK="2", LOCAL_RANK="2").end()[0] == 1
    ask = [sys.executable, "-m", "training.failures"]
    root = Path(__file__).parents[2]
    said = subprocess.run([*ask, str(tmp_path)], capture_output=True, text=True, timeout=30, cwd=root)
    assert said.returncode == 0
    assert said.stdout == f"rank 2 on {os.uname().nodename}: ValueError: the root cause\n"
    nothing = subprocess.run([*ask, str(tmp_path / "none")], capture_output=True, text=True, timeout=30, cwd=root)
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no record of an error" in nothing.stderr


def test_what_a_rank_did_is_told_when_sigterm_ends_it(tmp_path: Path, start: Any) -> None:
    """Such as the action in which it waited for a peer that is gone; also where the main thread can't react."""
    waits = "pipeline rank 1 waited for F1.3"
    for sleep in ("time.sleep(60)", "__import__('ctypes').CDLL(None).sleep(60)"):
        body = f"report.doing = lambda: {waits!r}\nprint('ready', flush=True)\n{sleep}"
        ended = start(program(body, tmp_path / "logs"), RANK="0", LOCAL_RANK="0")
        ended.wait_ready()
        ended.popen.terminate()
        code, shown, _ = ended.end()
        assert code == 143 and f"ended by SIGTERM; {waits}" in shown
