"""How the nodes of one run know of each other: who is there, when to start, who has failed or gone, when all is done.

Lives here: the messages (JSON lines over TCP) and node 0's side of them. Imports the standard library only.
`nodes.py` is the other side, the same on every node.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GREETING = "pretrain-deepseek nodes 1"
"""First field of a node's first message: a port scanner, or a checkout with other messages, is told apart by it."""

HEARTBEAT = 1.0
"""Seconds between two signs of life, both ways."""

SILENCE = 10.0
"""A node that has given no sign for so many seconds counts as gone: its host hangs, or its cable is out."""

PATIENCE = 3.0
"""Seconds that a failure which may be the consequence of another one waits for that to be reported."""

PROGRESS = 10.0
"""Seconds between two lines about who is waited for."""

LINGER = 5.0
"""Seconds that node 0 stays to pass on why the run ends."""

MAX_MESSAGE = 1 << 20


class Gone(Exception):
    """The other side of a link isn't there any more; the text says how that was seen."""


class Link:
    """One end of a connection between two nodes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)  # of a send; what is received is waited for by select
        self.socket = connection
        self._received = b""
        self._heard = self._beat = time.monotonic()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Raises Gone."""
        try:
            self.socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as error:
            raise Gone(f"its connection is lost ({describe(error)})") from error

    def receive(self) -> list[dict[str, Any]]:
        """What has come, signs of life left out; to be called when the socket can be read. Raises Gone."""
        try:
            part = self.socket.recv(65536)
        except OSError as error:
            raise Gone(f"its connection is lost ({describe(error)})") from error
        if not part:
            raise Gone("its connection closed")
        self._heard = time.monotonic()
        *lines, self._received = (self._received + part).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._received) > MAX_MESSAGE or not all(isinstance(message, dict) for message in messages):
            raise Gone("it doesn't speak as a node does")
        return [message for message in messages if message.get("kind") != "alive"]

    def keep_alive(self) -> None:
        """Give a sign of life when it is time; raises Gone where the other side has given none for too long."""
        now = time.monotonic()
        if now - self._beat >= HEARTBEAT:
            self._beat = now
            self.send("alive")
        if now - self._heard > SILENCE:
            raise Gone(f"nothing was heard of it for {SILENCE:.0f} s: its host hangs or its network is down")

    def close(self) -> None:
        self.socket.close()


def describe(error: OSError) -> str:
    """An error of the network in words, without Python's number."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return "no answer"
    return (error.strerror or str(error)).lower()


def readable(links: list[Any], seconds: float) -> list[Any]:
    """Those of `links` (anything with a fileno) that can be read within `seconds`."""
    try:
        return select.select(links, [], [], seconds)[0]
    except InterruptedError:
        return []


@dataclass
class Node:
    """A node as node 0 sees it; `rank` is None until it has said hello."""

    link: Link
    address: str
    rank: int | None = None
    host: str = ""
    ready: bool = False
    ended: bool = False
    failure: str | None = None

    def __str__(self) -> str:
        return f"node {self.rank} (host {self.host}, {self.address})"


class Coordinator:
    """Node 0's part, in a thread: every node, node 0 too, connects to it and stays connected while the run lasts.

    A node sends `hello` and then `ready`, `ended`, `failed` or `interrupted`. It gets `prepare` when all are there,
    `start` when all are ready, `finished` when all have ended well; `stop` with the reason as soon as one has failed,
    was interrupted or is gone; `refused` where it doesn't belong here; `say` with a line for its terminal.

    same: what must be alike on all nodes, name -> value, as node 0 has it.
    """

    def __init__(self, address: str, port: int, nnodes: int, same: Mapping[str, str], start_timeout: float) -> None:
        """Binds `port` (0: a free one). Raises ConnectionError where it is taken, gaierror for an unknown address."""
        self._nnodes, self._same, self._start_timeout = nnodes, dict(same), start_timeout
        try:
            self._listener = listen(address, port)
        except socket.gaierror:
            raise
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConnectionError(f"port {port} of this host can't be opened: {describe(error)}") from error
            raise ConnectionError(
                f"port {port} of this host is in use by another process (see `ss -ltnp`): end that, or set MASTER_PORT "
                "to a free port, on all nodes"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._nodes: list[Node] = []
        self._began = self._told = time.monotonic()
        self._phase = "meeting"
        self._own_node_came = False
        self._end: dict[str, Any] = {}  # the message that ends the run, for nodes that come after it
        self._pending: tuple[float, Node] | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when all nodes know that the run has ended, or `LINGER` seconds later."""
        self._thread.join(LINGER)

    def _run(self) -> None:
        try:
            self._coordinate()
        finally:  # also where this program has a fault: the nodes must notice
            for connection in [self._listener, *(node.link for node in self._nodes)]:
                connection.close()

    def _coordinate(self) -> None:
        over_at = None
        while over_at is None or (self._is_wanted() and time.monotonic() < over_at + LINGER):
            for source in readable([self._listener, *(node.link for node in self._nodes)], 0.1):
                if source is self._listener:
                    self._accept()
                else:
                    self._hear(next(node for node in self._nodes if node.link is source))
            for node in list(self._nodes):
                try:
                    node.link.keep_alive()
                except Gone as gone:
                    self._lose(node, gone)
            self._decide()
            if self._phase == "over" and over_at is None:
                over_at = time.monotonic()

    def _is_wanted(self) -> bool:
        """Whether there is someone to tell the end to: a connected node, or node 0, which may not have come yet."""
        return bool(self._nodes) or not self._own_node_came

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it went while it waited
            return
        self._nodes.append(Node(Link(connection), address[0].removeprefix("::ffff:")))

    def _hear(self, node: Node) -> None:
        try:
            messages = node.link.receive()
        except Gone as gone:
            self._lose(node, gone)
            return
        for message in messages:
            if node in self._nodes:
                self._handle(node, message)

    def _send(self, node: Node, kind: str, **fields: Any) -> None:
        try:
            node.link.send(kind, **fields)
        except Gone as gone:
            self._lose(node, gone)

    def _lose(self, node: Node, gone: Gone) -> None:
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        node.link.close()
        if node.rank is not None and self._phase != "over":
            self._stop(f"{node} has gone: {gone}", node)

    def _handle(self, node: Node, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if node.rank is None:
            self._greet(node, message)
        elif kind == "ready":
            node.ready = True
        elif kind == "ended":
            node.ended = True
        elif kind == "interrupted":
            self._stop(f"{node} was interrupted", node)
        elif kind == "failed":
            node.failure = f"{node} failed: {message.get('message')}"
            if message.get("root", True):
                self._stop(node.failure, node)
            elif self._pending is None:
                self._pending = (time.monotonic() + PATIENCE, node)

    def _greet(self, node: Node, message: dict[str, Any]) -> None:
        """The first message of a connection. A stranger is sent away; a node that can't fit in ends the run."""
        rank, host, same = (message.get(name) for name in ("node", "host", "same"))
        speaks = message.get("kind") == "hello" and message.get("greeting") == GREETING
        if not (speaks and isinstance(rank, int) and isinstance(host, str) and isinstance(same, dict)):
            self._refuse(node, f"node 0 runs another version of this project than {node.address}: use one on all nodes")
            return
        node.host = host
        taken = {other.rank: other for other in self._nodes if other.rank is not None}
        error = ""
        if rank in taken:
            error = f"NODE_RANK is {rank} on host {node.host} ({node.address}) and is taken by {taken[rank]}"
        elif not 0 <= rank < self._nnodes:
            error = f"NODE_RANK is {rank} on host {node.host} ({node.address}) with NNODES={self._nnodes} on node 0"
        for name, value in self._same.items():
            if (other := same.get(name)) != value and not error:
                where = f"node {rank} (host {node.host}, {node.address})"
                there, here = only_different(str(other), value)
                error = f"{name} is {there} on {where} and {here} on node 0: it must be the same on all nodes"
                if name == "RUN_DIR":  # a node of another run may come by: no reason to end this one
                    self._refuse(node, error)
                    self._tell(f"sent a node away: {error}")
                    return
        if error:
            self._refuse(node, error)
            self._stop(error, None)
            return
        node.rank = rank
        self._own_node_came = self._own_node_came or rank == 0
        self._send(node, "welcome")
        if self._phase == "over" and self._end:
            self._send(node, "stop", **self._end)

    def _refuse(self, node: Node, text: str) -> None:
        try:
            node.link.send("refused", text=text)
        except Gone:
            pass
        self._nodes.remove(node)
        node.link.close()

    def _decide(self) -> None:
        """What follows from who is there and how far they are."""
        present = [node for node in self._nodes if node.rank is not None]
        if self._phase == "meeting":
            self._meet(present)
        elif self._phase == "preparing":
            if all(node.ready for node in present):
                self._phase = "running"
                self._send_all("start", port=free_port(self.port + 1))
            elif len(present) > 1:
                names = ", ".join(str(node) for node in present if not node.ready)
                self._tell_now_and_then(f"waiting for {names} to prepare")
        elif self._phase == "running":
            if self._pending is not None:
                deadline, node = self._pending
                if time.monotonic() > deadline or all(other.failure for other in present):
                    self._stop(node.failure or "", node)
            elif all(node.ended for node in present):
                self._phase = "over"
                self._send_all("finished")

    def _meet(self, present: list[Node]) -> None:
        if len(present) == self._nnodes:
            self._phase = "preparing"
            self._send_all("prepare")
            return
        missing = sorted(set(range(self._nnodes)) - {node.rank for node in present})
        names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self._nnodes}"
        waited = time.monotonic() - self._began
        if waited > self._start_timeout:
            self._stop(
                f"{names} didn't come within {self._start_timeout:.0f} s: start each with the same MASTER_ADDR and "
                "MASTER_PORT and its own NODE_RANK, see what its terminal says, or set START_TIMEOUT to more seconds",
                None,
            )
        self._tell_now_and_then(f"waiting for {names} ({waited:.0f} s of {self._start_timeout:.0f} s)")

    def _tell_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._told > PROGRESS and self._phase != "over":
            self._told = time.monotonic()
            self._tell(text)

    def _tell(self, text: str) -> None:
        self._send_all("say", text=text)

    def _stop(self, text: str, culprit: Node | None) -> None:
        if self._phase != "over":
            self._phase = "over"
            self._end = {"text": text, "culprit": None if culprit is None else culprit.rank}
            self._send_all("stop", **self._end)

    def _send_all(self, kind: str, **fields: Any) -> None:
        for node in list(self._nodes):
            if node.rank is not None:
                self._send(node, kind, **fields)


def only_different(there: str, here: str) -> tuple[str, str]:
    """Two values without the words that both have, since a command line is long: "… --lr 1" and "… --lr 2"."""
    words, others = there.split(), here.split()
    if len(words) + len(others) < 6:
        return there or "empty", here or "empty"
    start = 0
    while start < min(len(words), len(others)) and words[start] == others[start]:
        start += 1
    end = 0
    while end < min(len(words), len(others)) - start and words[-1 - end] == others[-1 - end]:
        end += 1
    start = max(0, start - 1)  # a flag's name with its value
    texts = [" ".join(x[start : len(x) - end]) or "nothing" for x in (words, others)]
    return f"… {texts[0]}", f"… {texts[1]}"


def listen(address: str, port: int) -> socket.socket:
    """A listener on `port` of all interfaces, of the kind (IPv4, IPv6) that `address` has. Raises OSError."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    if family == socket.AF_INET6 and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=family, dualstack_ipv6=True)
    return socket.create_server(("", port))


def free_port(first: int) -> int:
    """The first free port from `first` on, for torchrun: near MASTER_PORT, so that few must be open between hosts."""
    for port in range(first, min(first + 100, 65536)):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
