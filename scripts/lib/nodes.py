"""Runs this node's part of a run: meets the other nodes, prepares, starts torchrun, and ends with them.

Called by scripts/pretrain_multinode.sh. Imports the standard library and `training.failures`, since it runs before
anything is installed. `coordination.py` is node 0's other part: it knows all nodes and says when to start and to end.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.lib.children import GRACE, Children
from scripts.lib.coordination import GREETING, PROGRESS, Coordinator, Gone, Link, describe, readable
from scripts.lib.report_failure import Failure, find_failure
from scripts.lib.tensorboard import TensorBoard

ROOT = Path(__file__).resolve().parent.parent.parent


class Refused(Exception):
    """The run can't start, or has ended: the text is all that there is to say."""


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that has gone must not keep processes from being ended
        print(text, file=sys.stderr, flush=True)


class Supervisor:
    """One node's life, from the first connection to the last line on its terminal."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.host = socket.gethostname()
        self.same = dict(pair.split("=", 1) for pair in options.same)
        self.children = Children()
        self.phase = "meeting"
        self.welcomed = False
        self.signals: list[int] = []
        self.failure: Failure | None = None
        self.link: Link | None = None
        self.coordinator: Coordinator | None = None
        self.board: TensorBoard | None = None
        self._grace_until: float | None = None
        self._error_file = Path(tempfile.mkdtemp(prefix="pretrain-")) / "error"

    def run(self) -> int:
        """The exit code: 0 where all nodes ended well, 1, or 128 + the signal that ended this node."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs want it
                signal.signal(number, self._on_signal)
        try:
            self._connect()
            return self._follow()
        except Refused as refused:
            say(f"error: {refused}")
            return 128 + self.signals[0] if self.signals else 1
        finally:
            self._end_children()
            if self.link is not None:
                self.link.close()
            if self.coordinator is not None:
                self.coordinator.join()
            if self.board is not None:
                self.board.close()
            self._error_file.unlink(missing_ok=True)
            self._error_file.parent.rmdir()

    # ---- Meeting

    def _connect(self) -> None:
        """To node 0, for up to the start time-out. Raises Refused."""
        options = self.options
        port = options.port
        if options.node == 0:
            try:
                self.coordinator = Coordinator(options.address, port, options.nnodes, self.same, options.start_timeout)
            except ConnectionError as error:
                raise Refused(str(error)) from error
            except socket.gaierror as error:
                raise Refused(f"MASTER_ADDR {options.address} is no known host name or address") from error
            port = self.coordinator.port
        began = told = time.monotonic()
        while self.link is None:
            left = began + options.start_timeout - time.monotonic()
            try:
                connection = socket.create_connection((options.address, port), timeout=max(0.1, min(5.0, left)))
                self.link = Link(connection)
                continue
            except OSError as error:
                reason, advice = explain(error)
            if options.node == 0:
                raise Refused(
                    f"MASTER_ADDR {options.address} isn't an address of this host, node 0 ({reason}): {advice}"
                )
            waited = time.monotonic() - began
            if left <= 0:
                raise Refused(
                    f"node 0 can't be reached at {options.address}:{port} since {waited:.0f} s ({reason}): {advice}"
                )
            if time.monotonic() - told > PROGRESS:
                told = time.monotonic()
                say(
                    f"node 0 can't be reached yet at {options.address}:{port} ({reason}; {waited:.0f} s of "
                    f"{options.start_timeout:.0f} s)"
                )
            self._pause(0.5)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self.signals:
            raise Refused("interrupted before the nodes met")

    # ---- The run

    def _follow(self) -> int:
        """Do what node 0 says and tell it what happens here, until all is over."""
        link = self.link
        assert link is not None
        greeted = False
        while True:
            try:
                if not greeted:
                    link.send("hello", greeting=GREETING, node=self.options.node, host=self.host, same=self.same)
                    greeted = True
                for message in link.receive() if readable([link], 0.1) else []:
                    code = self._obey(message)
                    if code is not None:
                        return code
                link.keep_alive()
                self._watch()
            except Gone as gone:
                return self._left_alone(gone)
            if self.signals:
                return self._interrupted()

    def _obey(self, message: dict[str, Any]) -> int | None:
        """An exit code where the run is over."""
        kind = message.get("kind")
        if kind == "welcome":
            self.welcomed = True
        elif kind == "say":
            say(message["text"])
        elif kind == "refused":
            raise Refused(message["text"])
        elif kind == "prepare":
            self.phase = "preparing"
            self.children.start(self.options.node, self._command("prepare"), self._environment())
        elif kind == "start":
            self._start(message["port"])
        elif kind == "finished":
            self._show_board()
            return 0
        elif kind == "stop":
            return self._stop(message)
        return None

    def _command(self, phase: str) -> list[str]:
        """The command line with its word PHASE replaced."""
        words = self.options.command
        place = words.index("PHASE")
        return [*words[:place], phase, *words[place + 1 :]]

    def _call(self, phase: str) -> None:
        subprocess.run(self._command(phase), env=os.environ | self._environment())

    def _environment(self) -> dict[str, str]:
        return {"ERROR_FILE": str(self._error_file)}

    def _start(self, port: int) -> None:
        options = self.options
        self.phase, self.children, self.started = "running", Children(), time.time()
        environment = self._environment() | {"RENDEZVOUS_PORT": str(port)}
        assert self.link is not None
        if options.nnodes > 1 and (interface := interface_of(self.link.socket.getsockname()[0])):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if not os.environ.get(variable):
                    environment[variable] = interface
            say(f"network interface to the other nodes: {os.environ.get('GLOO_SOCKET_IFNAME') or interface}")
        if options.node == 0:
            self._call("show-tensorboard")
            if options.tensorboard is not None:
                self.board = TensorBoard(self._command("serve-tensorboard"), options.tensorboard)
        for node in options.local_nodes:
            self.children.start(node, self._command("run"), environment | {"NODE": str(node)})

    def _watch(self) -> None:
        """Look after this phase's processes and tell node 0 when they have ended."""
        assert self.link is not None
        running = self.children.running()
        failed = self.children.first_failed
        if failed is not None and running:  # others of this host notice by themselves that one has gone; if not:
            self._grace_until = self._grace_until or time.monotonic() + GRACE
            if time.monotonic() > self._grace_until:
                self.children.end()
                self.children.press()
        if running or self.phase not in ("preparing", "running"):
            return
        if failed is None:
            self.link.send("ready" if self.phase == "preparing" else "ended")
            self.phase = "waiting"
            return
        self.failure = self._why(*failed)
        self.phase = "waiting"
        self.link.send("failed", message=self.failure.message, root=self.failure.root)

    def _why(self, node: int, code: int) -> Failure:
        if self._error_file.exists():  # what the bash side told and wrote down, before torchrun
            return Failure(self._error_file.read_text(encoding="utf-8"), told=True)
        if self.phase == "preparing":
            return Failure(f"its preparation ended with exit code {code}", told=False)
        return find_failure(self.options.logs, self.started, self.options.local_nodes, node, code)

    # ---- The end

    def _stop(self, message: dict[str, Any]) -> int:
        """Node 0 says that the run is over, and why. This node's own story comes in full, another's in a line."""
        if message["culprit"] == self.options.node and self.failure is not None:
            self._tell_failure(self.failure)
        else:
            self._end_children()
            say(f"error: {message['text']}")
        return 1

    def _tell_failure(self, failure: Failure) -> None:
        if failure.detail:
            say(failure.detail)
        if not failure.told:
            say(failure.message)

    def _left_alone(self, gone: Gone) -> int:
        """The connection to node 0 is lost: its message, if it had one, may still have come."""
        self._end_children()
        if self.signals:
            return 128 + self.signals[0]
        if self.failure is not None:
            self._tell_failure(self.failure)
        options = self.options
        place = f"{options.address}:{options.port}"
        if self.welcomed or self.coordinator is not None:
            say(f"error: node 0 ({place}) has gone: {gone}")
        else:
            say(f"error: what answers at {place} isn't node 0 ({gone}): check MASTER_ADDR and MASTER_PORT")
        return 1

    def _interrupted(self) -> int:
        say("ending the run (again: at once)")
        assert self.link is not None
        with contextlib.suppress(Gone):
            self.link.send("interrupted")
        self._end_children()
        return 128 + self.signals[0]

    def _end_children(self) -> None:
        """End this phase's processes and wait for them; a second signal kills them."""
        if self.children.running():
            self.children.end()
        before = len(self.signals)
        while self.children.running():
            self.children.press()
            if len(self.signals) > max(before, 1):
                self.children.kill()
            time.sleep(0.05)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def _show_board(self) -> None:
        if self.options.node != 0:
            return
        self._call("show-tensorboard")
        if self.board is not None and sys.stdin.isatty():
            say(f"TensorBoard stays at {self.board.url} until Ctrl-C")
            while not self.signals and self.board.running():
                time.sleep(0.2)


def explain(error: OSError) -> tuple[str, str]:
    """Why a connection to node 0 could not be made, and what to look at."""
    if isinstance(error, socket.gaierror):
        return "its name is not known here", "check MASTER_ADDR, or give the IP address of node 0"
    if isinstance(error, ConnectionRefusedError):
        return describe(error), "check that node 0 is started, and that MASTER_ADDR and MASTER_PORT are its own"
    return describe(error), "check MASTER_ADDR, the network and firewalls between the hosts"


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where it can't be told."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query, contextlib.suppress(OSError):
            request = struct.pack("256s", name[:15].encode())
            answer = fcntl.ioctl(query.fileno(), 0x8915, request)  # SIOCGIFADDR, of Linux
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def code_digest() -> str:
    """A short digest of the source that all ranks run."""
    rooms = ("kernels", "parallel", "model", "data", "training", "scripts")
    digest = hashlib.sha256((ROOT / "pretrain_deepseek.py").read_bytes())
    for file in sorted(file for room in rooms for file in (ROOT / room).rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--local-nodes", type=int, nargs="+", help="numbers of torchrun's nodes on this host")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--start-timeout", type=float, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--tensorboard", type=int, help="serve TensorBoard on this port, or the next free one")
    parser.add_argument("--same", action="append", default=[], help="NAME=VALUE that must be alike on all nodes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND PHASE WORDS, of scripts/lib/node.sh")
    options = parser.parse_args(words)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    options.local_nodes = options.local_nodes or [options.node]
    return options


if __name__ == "__main__":
    chosen = parse()
    chosen.same.append(f"the code's digest={code_digest()}")
    try:
        sys.exit(Supervisor(chosen).run())
    except KeyboardInterrupt:
        say("interrupted before the nodes met")
        sys.exit(130)
