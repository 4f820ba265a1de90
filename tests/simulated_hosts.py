"""Hosts that are network namespaces of this machine, on one switch, with links of a chosen rate.

For tests and benchmarks. Standard library only. Needs Linux, root and iproute2's `ip` and `tc`; `unavailable()` says
what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


def unavailable() -> str | None:
    """Why this machine can't make hosts, for a test's skip, or None where it can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} isn't installed (Debian: iproute2)"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    entered = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)
    return f"network namespaces can't be entered here: {entered.stderr.strip()}" if entered.returncode else None


class SimulatedHosts:
    """`count` hosts, each with an address of its own and an interface `eth0` to one switch; a context manager.

    rate: of each link, both ways, in tc's words ("1gbit", "200mbit"); None: as fast as memory. Leaving the block ends
    what still runs in the hosts and removes them. They share this machine's files and processes, not its network.
    """

    interface = "eth0"

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.names = [f"host{os.getpid()}x{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self._switch = f"switch{os.getpid()}"
        self._rate = rate

    def __enter__(self) -> SimulatedHosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs in a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def processes(self, host: int) -> list[int]:
        """Process ids of what runs in a host."""
        return [int(word) for word in _ip("netns", "pids", self.names[host]).split()]

    def kill(self, host: int) -> None:
        """All processes of a host at once, as when its kernel panics but its network still answers."""
        for process in self.processes(host):
            try:
                os.kill(process, 9)
            except ProcessLookupError:
                pass

    def unplug(self, host: int) -> None:
        """Take a host's cable out: nothing that it sends arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host has put on its link, headers included."""
        counter = Path("/sys/class/net") / self.interface / "statistics/tx_bytes"
        # `ip netns exec` mounts a /sys of the namespace.
        read = subprocess.run(self.command(host, ["cat", str(counter)]), check=True, capture_output=True, text=True)
        return int(read.stdout)

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            # Made inside the namespaces, so that no name of the machine's own interfaces can clash.
            peer = ("peer", "name", f"port{i}", "netns", self._switch)
            _ip("-n", name, "link", "add", self.interface, "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", self.interface)
            _ip("-n", name, "link", "set", self.interface, "up")
            if self._rate is not None:
                for namespace, device in ((name, self.interface), (self._switch, f"port{i}")):
                    shape = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "400ms")
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)

    def _remove(self) -> None:
        present = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for host, name in enumerate(self.names):
            if name in present:
                self.kill(host)
                _ip("netns", "delete", name)
        if self._switch in present:
            _ip("netns", "delete", self._switch)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
