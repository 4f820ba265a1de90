"""The hosts that network tests run on: they reach each other, their links have the rate asked for, nothing stays."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.simulated_hosts import SimulatedHosts, unavailable

reason = unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")

SEND = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000)); print("ready", flush=True)
connection, _ = listener.accept()
connection.sendall(bytes(int(sys.argv[2]))); connection.shutdown(socket.SHUT_WR); connection.recv(1)
"""
RECEIVE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=5); start = time.time(); count = 0
while part := connection.recv(1 << 20): count += len(part)
print(count, time.time() - start)
"""


def transfer(hosts: SimulatedHosts, size: int) -> tuple[int, float]:
    """Send `size` bytes from host 0 to host 1; (bytes received, seconds)."""
    words = [sys.executable, "-c", SEND, hosts.addresses[0], str(size)]
    sender = subprocess.Popen(hosts.command(0, words), stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None and sender.stdout.readline() == "ready\n"
    command = hosts.command(1, [sys.executable, "-c", RECEIVE, hosts.addresses[0]])
    received = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    sender.wait(10)
    return int(received[0]), float(received[1])


def test_hosts_send_at_the_rate_of_their_link_and_count_what_they_send():
    with SimulatedHosts(2, rate="200mbit") as hosts:
        size = 5_000_000
        received, seconds = transfer(hosts, size)
        assert received == size
        assert seconds > 0.8 * (size - 256e3) * 8 / 200e6  # never faster than the link
        assert size < hosts.sent_bytes(0) < 1.2 * size


def test_the_processes_of_hosts_end_with_them_and_nothing_stays():
    with SimulatedHosts(1) as hosts:
        sleeper = subprocess.Popen(hosts.command(0, ["sleep", "60"]))
        for _ in range(50):
            if hosts.processes(0):
                break
            time.sleep(0.1)
        assert hosts.processes(0) == [sleeper.pid]
        names = hosts.names
    assert sleeper.wait(5) == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)


def test_an_unplugged_host_is_silent():
    ping = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=1)"
    with SimulatedHosts(2) as hosts:
        words = [sys.executable, "-c", ping, hosts.addresses[0]]
        answered = subprocess.run(hosts.command(1, words), capture_output=True, text=True)
        assert "Connection refused" in answered.stderr
        hosts.unplug(0)
        silent = subprocess.run(hosts.command(1, words), capture_output=True, text=True)
        assert "timed out" in silent.stderr or "No route to host" in silent.stderr
