"""What the nodes of a run do for each other (scripts/lib/nodes.py), on loopback, with small commands for torchrun's."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.lib.coordination import only_different
from scripts.lib.memory import GIB, PER_PROCESS, available, shortage
from scripts.lib.nodes import interface_of
from scripts.lib.tensorboard import next_free
from tests.training.test_failures import hear_interrupts

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


class Node:
    """One node: scripts/lib/nodes.py with a shell script in the place of node.sh."""

    def __init__(self, directory: Path, rank: int, port: int, run: str, **options: str) -> None:
        words = {"nnodes": "2", "node": str(rank), "address": "127.0.0.1", "port": str(port), "start_timeout": "20"}
        words |= {"logs": str(directory), "same": "RUN_DIR=runs/a"} | options
        prepare = words.pop("prepare", "true")
        script = f"case $0 in prepare) {prepare} ;; run) {run} ;; *) echo $0 >&2 ;; esac"
        flags = [word for name, text in words.items() for word in (f"--{name.replace('_', '-')}", text)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.lib.nodes", *flags, "--", "bash", "-c", script, "PHASE"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_interrupts,
        )

    def end(self, seconds: float = 30.0) -> tuple[int, str]:
        """Exit code and everything that it said, within `seconds`."""
        said, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes = []

    def begin(*words: object, **options: str) -> Node:
        nodes.append(Node(tmp_path, *words, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield begin
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
            node.process.communicate(timeout=20)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.05)


def test_all_nodes_prepare_then_start_and_wait_for_each_others_end(start: Callable[..., Node], tmp_path: Path) -> None:
    port = free_port()
    prepared = f"sleep 0.5; touch {tmp_path}/prepared_1"
    first = start(0, port, f"test -e {tmp_path}/prepared_1 && echo port $RENDEZVOUS_PORT")
    second = start(1, port, f"echo port $RENDEZVOUS_PORT; sleep 1; touch {tmp_path}/late", prepare=prepared)
    (code_0, said_0), (code_1, said_1) = first.end(), second.end()
    assert (code_0, code_1) == (0, 0), said_0 + said_1
    assert (tmp_path / "late").exists() and "show-tensorboard" in said_0 and "show-tensorboard" not in said_1
    chosen = [line for line in (said_0 + said_1).splitlines() if line.startswith("port ")]
    assert len(chosen) == 2 and chosen[0] == chosen[1] and int(chosen[0].split()[1]) > port


def test_a_node_that_fails_ends_all_and_is_named_by_all(start: Callable[..., Node]) -> None:
    port = free_port()
    first = start(0, port, "exec sleep 60")
    second = start(1, port, "sleep 0.5; exit 7")
    (code_0, said_0), (code_1, said_1) = first.end(10), second.end(10)
    assert (code_0, code_1) == (1, 1)
    assert "error: node 1 (host " in said_0 and "could not start its processes" in said_0
    assert "could not start its processes" in said_1


def test_a_preparation_that_fails_is_told_to_all_with_its_message(start: Callable[..., Node]) -> None:
    port = free_port()
    first = start(0, port, "true", prepare="exec sleep 60")
    message = "printf 'no room on /data' >$ERROR_FILE; exit 1"
    second = start(1, port, "true", prepare=message)
    (code_0, said_0), (code_1, _) = first.end(10), second.end(10)
    assert (code_0, code_1) == (1, 1)
    assert "node 1 (host " in said_0 and "failed: no room on /data" in said_0


def test_a_consequence_waits_for_the_cause_on_another_node(start: Callable[..., Node], tmp_path: Path) -> None:
    record = '{"time": 9e9, "rank": %d, "host": "h", "message": "%s", "traceback": "", "cascade": %s}'
    lost, torn = record % (0, "peer has gone", "true"), record % (1, "shard is torn", "false")
    port = free_port()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = (f"echo '{text}' >error_rank_0000{rank}.json" for rank, text in enumerate((lost, torn)))
    first = start(0, port, f"cd {tmp_path}/a; {here}; exit 1", logs=str(tmp_path / "a"))
    second = start(1, port, f"cd {tmp_path}/b; sleep 1; {there}; exit 1", logs=str(tmp_path / "b"))
    (_, said_0), (_, said_1) = first.end(15), second.end(15)
    assert "rank 1 on h failed: shard is torn" in said_0 and "rank 1 on h failed: shard is torn" in said_1


def two_that_run(start: Callable[..., Node], directory: Path) -> list[Node]:
    """Two nodes whose commands have written their process ids to started_0 and started_1."""
    port = free_port()
    nodes = [start(rank, port, f"echo $$ > {directory}/started_{rank}; exec sleep 60") for rank in (0, 1)]
    for rank in (0, 1):
        wait_for(directory / f"started_{rank}")
    return nodes


@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_node_is_named_by_the_other(start: Callable[..., Node], tmp_path: Path, gone: int) -> None:
    nodes = two_that_run(start, tmp_path)
    nodes[gone].process.kill()
    code, said = nodes[1 - gone].end(10)
    assert code == 1 and f"node {gone} (" in said and "has gone: its connection " in said
    for rank in (0, 1):  # what the killed one had started doesn't go on unwatched either
        process, deadline = Path("/proc") / (tmp_path / f"started_{rank}").read_text().strip(), time.monotonic() + 10
        while process.exists() and "zombie" not in (process / "status").read_text():
            assert time.monotonic() < deadline, f"the command of node {rank} is still running"
            time.sleep(0.1)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_on_one_node_ends_all(start: Callable[..., Node], tmp_path: Path, interrupted: int) -> None:
    nodes = two_that_run(start, tmp_path)
    nodes[interrupted].process.send_signal(signal.SIGINT)
    assert nodes[interrupted].end(10)[0] == 130
    code, said = nodes[1 - interrupted].end(10)
    assert code == 1 and f"node {interrupted} (host " in said and "was interrupted" in said


def test_a_command_that_ignores_sigterm_is_killed(start: Callable[..., Node], tmp_path: Path) -> None:
    deaf = f"trap '' TERM; touch {tmp_path}/started; while true; do sleep 0.2; done"
    node = start(0, free_port(), deaf, nnodes="1")
    wait_for(tmp_path / "started")
    node.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    node.process.send_signal(signal.SIGINT)  # the second time at once
    code, said = node.end(5)
    assert code == 130 and "again: at once" in said


def test_a_missing_node_is_named_within_the_start_timeout(start: Callable[..., Node]) -> None:
    code, said = start(0, free_port(), "true", nnodes="3", start_timeout="1").end(10)
    assert code == 1 and "nodes 1, 2 of 3 didn't come within 1 s" in said and "START_TIMEOUT" in said


def test_a_node_0_that_isnt_there_is_named_within_the_start_timeout(start: Callable[..., Node]) -> None:
    port = free_port()
    code, said = start(1, port, "true", start_timeout="1").end(10)
    assert code == 1 and f"127.0.0.1:{port}" in said and "connection refused" in said and "MASTER_ADDR" in said
    code, said = start(1, port, "true", start_timeout="1", address="no-such-host.invalid").end(20)
    assert code == 1 and f"no-such-host.invalid:{port}" in said and "name is not known" in said


def test_a_taken_port_and_a_foreign_address_are_refused_at_once(start: Callable[..., Node]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = start(0, port, "true").end(10)
        assert code == 1 and f"port {port} of this host is in use" in said and "MASTER_PORT" in said
    code, said = start(0, free_port(), "true", address="192.0.2.1", start_timeout="1").end(15)
    assert code == 1 and "MASTER_ADDR 192.0.2.1 isn't an address of this host" in said


def test_an_address_where_something_else_answers_is_told_from_a_dead_node_0(start: Callable[..., Node]) -> None:
    with socket.create_server(("", 0)) as other:
        node = start(1, other.getsockname()[1], "true")
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            code, said = node.end(10)
    assert code == 1 and "isn't node 0" in said and "check MASTER_ADDR and MASTER_PORT" in said
    code, said = start(0, free_port(), "true", address="nosuch.invalid").end(10)
    assert code == 1 and "MASTER_ADDR nosuch.invalid is no known host name" in said


def test_of_two_long_values_only_what_differs_is_shown() -> None:
    common = "--train-iters 10 --model tiny.json --seed 3"
    assert only_different(f"{common} --lr 1 --split 9,1", f"{common} --lr 2 --split 9,1") == ("… --lr 1", "… --lr 2")
    assert only_different(f"{common} --bf16", common) == ("… 3 --bf16", "… 3")
    assert only_different("2", "3") == ("2", "3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"same": "flags=--lr 2"}, "flags is --lr 2 on node 1"),
        ({"node": "0"}, "NODE_RANK is 0"),
        ({"node": "5"}, "NODE_RANK is 5"),
    ],
)
def test_nodes_that_dont_fit_end_the_run_before_it_starts(
    start: Callable[..., Node], options: dict[str, str], message: str
) -> None:
    port = free_port()
    same = {"same": "flags=--lr 1"}
    first = start(0, port, "true", nnodes="3", **same)
    # A second node 0 is on another host: here the first one's port is taken, so it is greeted by hand.
    if options.get("node") == "0":
        time.sleep(1.0)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            hello = {"kind": "hello", "greeting": "pretrain-deepseek nodes 1", "node": 0, "host": "b", "same": {}}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            code, said = first.end(10)
    else:
        second = start(1, port, "true", nnodes="3", **(same | options))
        code, said = first.end(10)
        code_1, said_1 = second.end(10)
        assert code_1 == 1 and message in said_1
    assert code == 1 and message in said


def test_strangers_are_sent_away_and_the_run_goes_on(start: Callable[..., Node]) -> None:
    port = free_port()
    first = start(0, port, "echo trained")
    deadline = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as scanner:
                scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for half in ({}, {"node": 1, "host": "b", "same": []}, {"node": "1", "host": "b", "same": {}}, {"node": 1}):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    hello = {"kind": "hello", "greeting": "pretrain-deepseek nodes 1"} | half
                    stranger.sendall(json.dumps(hello).encode() + b"\n")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    code, said = start(1, port, "true", same="RUN_DIR=runs/b").end(10)
    assert code == 1 and "RUN_DIR is runs/b on node 1" in said
    second = start(1, port, "true")
    code, said = first.end(10)
    assert code == 0 and "trained" in said and "sent a node away: RUN_DIR is runs/b" in said
    assert second.end(10)[0] == 0


def test_the_interface_of_an_address_is_found() -> None:
    if not Path("/sys/class/net/lo").exists():
        pytest.skip("interfaces are named otherwise here")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_taken_port_of_tensorboard_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert next_free(port) > port


def test_too_little_memory_is_said_with_the_numbers(tmp_path: Path) -> None:
    assert shortage(8, None) is None and shortage(8, int(8 * PER_PROCESS)) is None
    text = shortage(8, int(1.5 * GIB))
    assert text is not None and "8 processes" in text and "1.5 GiB" in text and "NPROC_PER_NODE=" in text
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n")
    assert available(tmp_path) == 4 * GIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in (("memory.max", f"{GIB}"), ("memory.current", f"{GIB // 2}"), ("memory.stat", "inactive_file 5")):
        (group / name).write_text(text)
    assert available(tmp_path) == GIB // 2 + 5
    (group / "memory.max").write_text("max")
    assert available(tmp_path) == 4 * GIB
    assert available(tmp_path / "nowhere") is None
    (tmp_path / "proc/self").mkdir()  # a batch job's own group, below one without a limit
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7\n")
    job = group / "slurm/job_7"
    job.mkdir(parents=True)
    for name, text in (("memory.max", f"{2 * GIB}"), ("memory.current", f"{GIB}"), ("memory.stat", "")):
        (job / name).write_text(text)
    assert available(tmp_path) == GIB
