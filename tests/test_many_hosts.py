"""scripts/pretrain_multinode.sh on two hosts, which are network namespaces: the one-host loss, and ends that are told.

What the nodes say to each other is tested case by case, without training, in test_nodes.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated_hosts import SimulatedHosts, unavailable
from tests.test_nodes import wait_for
from tests.test_pretrain import FLAGS, ROOT, lines_of, workplace  # noqa: F401  (a fixture)
from tests.training.test_failures import hear_interrupts

reason = unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


class Nodes:
    """One call of the script on each host."""

    def __init__(self, hosts: SimulatedHosts, workplace: Path, run: Path) -> None:  # noqa: F811
        self.hosts, self.workplace, self.run = hosts, workplace, run
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, node: int, *flags: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment |= {"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "2", "PREPARE": "0"}
        environment |= {"MASTER_ADDR": self.hosts.addresses[0], "RUN_DIR": str(self.run), "PYTHON": sys.executable}
        common = ["--model", str(self.workplace / "config.json"), "--data-path", str(self.workplace / "text"), *FLAGS]
        script = ["bash", str(ROOT / "scripts" / "pretrain_multinode.sh"), *common, *flags]
        self.processes.append(
            subprocess.Popen(
                self.hosts.command(node, script),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment | variables,
                preexec_fn=hear_interrupts,
            )
        )

    def end(self, node: int, seconds: float) -> tuple[int, str]:
        """Exit code and terminal of a node, which must end within `seconds`."""
        said, _ = self.processes[node].communicate(timeout=seconds)
        return self.processes[node].returncode, said

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 240
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
            assert self.processes[0].poll() is None, self.end(0, 10)[1]
            assert time.monotonic() < deadline, "the run never started"
            time.sleep(0.1)


@pytest.fixture
def hosts() -> Iterator[SimulatedHosts]:
    with SimulatedHosts(2) as hosts:
        yield hosts


@pytest.fixture
def nodes(hosts: SimulatedHosts, workplace: Path, tmp_path: Path) -> Iterator[Nodes]:  # noqa: F811
    nodes = Nodes(hosts, workplace, tmp_path / "run")
    yield nodes
    for process in nodes.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


# Tensor 2 and pipeline 2 come from configs/runs/tiny_v3.yaml, which the script takes.
SHORT = ("--eval-iters", "0", "--no-bigram-baseline", "--lr-warmup-iters", "0", "--global-batch-size", "4")
TWO_STEPS = (*SHORT, "--train-iters", "2")
FOR_EVER = (*SHORT, "--train-iters", "100000", "--save-interval", "100000")


def test_two_hosts_train_as_one_does(nodes: Nodes, workplace: Path, tmp_path: Path) -> None:  # noqa: F811
    for node in (1, 0):  # in any order
        nodes.start(node, *TWO_STEPS)
    nodes.processes.reverse()
    for node in (0, 1):
        code, said = nodes.end(node, 240)
        assert code == 0, said
        assert "network interface to the other nodes: eth0" in said
    together = lines_of(nodes.run / "metrics.jsonl")

    alone = Nodes(nodes.hosts, workplace, tmp_path / "alone")
    alone.start(0, *TWO_STEPS, NNODES="1", NPROC_PER_NODE="4")
    code, said = alone.end(0, 240)
    assert code == 0, said
    wanted = [line["loss"] for line in lines_of(alone.run / "metrics.jsonl")]
    assert [line["loss"] for line in together] == pytest.approx(wanted, rel=1e-6) and len(wanted) == 2


def test_a_killed_host_ends_the_other_and_is_named(nodes: Nodes) -> None:
    for node in (0, 1):
        nodes.start(node, *FOR_EVER)
    nodes.wait_for_steps(2)
    nodes.hosts.kill(1)
    code, said = nodes.end(0, 15)
    assert code == 1
    assert "node 1 (host " in said.splitlines()[-1] and "has gone: its connection closed" in said.splitlines()[-1]


def test_an_unplugged_host_is_missed_by_both_sides(hosts: SimulatedHosts, tmp_path: Path) -> None:
    # No training, so that nothing else notices.
    run = f"touch {tmp_path}/started_$NODE; exec sleep 60"
    common = ["--nnodes", "2", "--address", hosts.addresses[0], "--port", "29500", "--start-timeout", "20"]
    script = ["bash", "-c", f"case $0 in run) {run} ;; esac", "PHASE"]
    processes = []
    for node in (0, 1):
        words = [*common, "--node", str(node), "--logs", str(tmp_path), "--", *script]
        command = hosts.command(node, [sys.executable, "-m", "scripts.lib.nodes", *words])
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True, **streams))  # type: ignore[call-overload]
    wait_for(tmp_path / "started_0")
    wait_for(tmp_path / "started_1")
    hosts.unplug(1)
    said_0, said_1 = (process.communicate(timeout=30)[0] for process in processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "node 1 (host " in said_0 and "nothing was heard of it for 10 s" in said_0
    assert f"node 0 ({hosts.addresses[0]}:29500) has gone: nothing was heard of it for 10 s" in said_1


def test_what_fails_on_one_node_only_ends_both_before_ranks_meet(nodes: Nodes) -> None:
    nodes.start(0, *TWO_STEPS)
    nodes.start(1, *TWO_STEPS, TORCH_DISTRIBUTED_BACKEND="nccl")  # the flags are the same, the hosts are not
    (code_0, said_0), (code_1, said_1) = nodes.end(0, 240), nodes.end(1, 240)
    assert (code_0, code_1) == (1, 1)
    assert "--distributed-backend nccl needs a GPU" in said_1
    # Node 0 hears it from node 1's supervisor, or its ranks hear it before from the rank that failed.
    last = said_0.splitlines()[-1]
    assert re.search(
        r"(node 1 \(host .* failed|rank [23] on .* failed before joining): --distributed-backend nccl", last
    )
