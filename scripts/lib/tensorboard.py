"""TensorBoard beside a run, for TENSORBOARD=1 of scripts/pretrain_multinode.sh. Imports the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys


class TensorBoard:
    """A server of the run's curves on this host, at `port` or the next free one; `close()` ends it."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = next_free(port)
        self.url = f"http://localhost:{self.port}/"
        environment = os.environ | {"TENSORBOARD_PORT": str(self.port)}
        # A session of its own, as the ranks have: Ctrl-C ends the run first.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        print(f"TensorBoard is served at {self.url}", file=sys.stderr, flush=True)

    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def next_free(port: int) -> int:
    """The first port of this host from `port` on that nobody listens on."""
    for candidate in range(port, min(port + 100, 65536)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", candidate)):
            return candidate
    raise OSError(f"ports {port} to {port + 99} of this host are all in use: set TENSORBOARD_PORT")
