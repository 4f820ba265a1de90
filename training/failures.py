"""How a process ends when something goes wrong: promptly, with one message, on record, the root cause last on screen.

May import the standard library only. `python -m training.failures RUN` prints the first error of a run that has ended.
The JSON for torchrun is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

ERROR_FILES = "error_rank_" + 5 * "[0-9]" + ".json"
"""Pattern of the error files of this attempt; those of attempts before a resume carry a time stamp."""

EXIT_ERROR, EXIT_CONFIGURATION, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143

# What gloo, NCCL and the store say on the ranks that didn't fail themselves: a consequence, never a root cause.
_PEER_GONE = re.compile(
    r"Connection (was )?(closed|reset|refused) by (remote )?peer|Broken pipe|remote process exited|"
    r"Failed to recv, got 0 bytes|Connection reset|NCCL communicator was aborted"
)


class ConfigurationError(ValueError):
    """Something the user can mend in flags or files. `errors` holds every problem that was found, one text each."""

    def __init__(self, *errors: str) -> None:
        self.errors = errors
        super().__init__(errors[0] if len(errors) == 1 else "\n".join(f"- {error}" for error in errors))

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, ...]]:
        return type(self), self.errors


class _Terminated(BaseException):
    """SIGTERM, raised in the main thread so that `finally` blocks run."""


class FailureReport:
    """Context manager around a process's main: whatever leaves the block ends the process, and peers notice in seconds.

    - Any exception: RUN/logs/error_rank_00003.json once `directory` is set, torchrun's error file if it asked for one,
      the traceback with the message last on stderr, exit code 1.
    - ConfigurationError: no traceback, exit code 2. It usually is the same on all ranks, so rank 0 says it at once and
      the others only if the launcher hasn't ended them `patience` seconds later.
    - A lost connection: a peer has failed and says why itself; this rank likewise waits before it says anything.
    - Before ranks have met, `tell_peers` (where set) gets the message of a rank other than 0 that failed by itself.
    - Ctrl-C and SIGTERM: one line a host, none where a peer's error is the reason; exit codes 130 and 143. A main
      thread that hangs in a collective and can't react is ended after `patience` seconds.

    SystemExit passes through.
    """

    def __init__(
        self, directory: Path | None = None, environ: Mapping[str, str] | None = None, patience: float = 2.0
    ) -> None:
        environ = os.environ if environ is None else environ
        self.directory = directory
        """Where error files go: RUN/logs, set once the run directory is this run's."""
        self.tell_peers: Callable[[str], None] | None = None
        """Lets ranks that wait for this one know why it doesn't come; None once all have met."""
        self.doing: Callable[[], str | None] | None = None
        """What this rank does at a moment, told when a signal or a lost peer ends it; None as long as nothing knows."""
        self.rank = int(environ.get("RANK", "0"))
        self._speaks_for_host = int(environ.get("LOCAL_RANK", "0")) == 0
        self._record_name = f"error_rank_{self.rank:05d}.json"
        self._torchrun_file = environ.get("TORCHELASTIC_ERROR_FILE")
        self._patience = patience
        self._host = socket.gethostname()
        self._started = time.time()
        self._waiting = False
        self._signal: int | None = None
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> FailureReport:
        if threading.current_thread() is threading.main_thread():
            self._watch_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._end(error)
        self._restore.close()

    def _end(self, error: BaseException) -> None:
        """Report `error` and end the process. Never returns."""
        try:
            if isinstance(error, KeyboardInterrupt | _Terminated) or self._signal is not None:
                self._end_by_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else self._signal)
            elif isinstance(error, ConfigurationError):
                self._end_by_configuration(error)
            else:
                self._end_by_error(error)
        except KeyboardInterrupt:
            self._exit(EXIT_INTERRUPTED)
        except _Terminated:  # the launcher ends this rank while it waits: someone else has told
            self._exit(EXIT_TERMINATED)
        finally:
            self._exit(EXIT_ERROR)

    def _end_by_configuration(self, error: ConfigurationError) -> None:
        if self.rank != 0:
            self._let_others_speak()
        self._write_for_torchrun(str(error), str(error))
        self._say(f"error: {error}" if len(error.errors) == 1 else f"{len(error.errors)} errors:\n{error}")
        self._tell_peers(str(error))
        self._exit(EXIT_CONFIGURATION)

    def _end_by_error(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        cascade = isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None
        if cascade and (doing := self._doing()) and doing not in message:
            message += f"; {doing}"
        told = self._peer_failed()
        self._write_record(message, stack, cascade)
        _log(logging.CRITICAL, message, error)
        if cascade or told:
            self._let_others_speak()
        self._write_for_torchrun(message, stack)
        if cascade:
            self._say(f"rank {self.rank} on {self._host}: another rank has gone ({message})")
        else:
            self._say(f"rank {self.rank} on {self._host} failed:\n{stack}")
        self._tell_peers(message)
        self._exit(EXIT_ERROR)

    def _end_by_signal(self, number: int | None) -> None:
        interrupted = number == signal.SIGINT
        text = "interrupted by Ctrl-C" if interrupted else "ended by SIGTERM"
        if not interrupted and (doing := self._doing()):
            text += f"; {doing}"
        _log(logging.WARNING, text)
        if self._speaks_for_host and not self._waiting and not self._peer_failed():
            self._say(f"rank {self.rank} on {self._host} {text}")
        self._exit(EXIT_INTERRUPTED if interrupted else EXIT_TERMINATED)

    def _doing(self) -> str | None:
        with contextlib.suppress(Exception):
            return None if self.doing is None else self.doing()
        return None

    def _exit(self, code: int) -> None:
        leave(code)

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # a live progress bar hides the cursor
                sys.stdout.flush()
            sys.stderr.write(text.rstrip() + "\n")
            sys.stderr.flush()

    def _tell_peers(self, message: str) -> None:
        if self.tell_peers is not None and self.rank != 0:  # what rank 0 runs into, most others do too
            with contextlib.suppress(Exception):
                self.tell_peers(message)

    def _let_others_speak(self) -> None:
        """Wait for the launcher to end this rank because another failed; a host's first rank waits less than others."""
        self._waiting = True
        time.sleep(self._patience * (1 if self._speaks_for_host else 2))
        self._waiting = False

    def _write_record(self, message: str, stack: str, cascade: bool) -> None:
        if self.directory is None:
            return
        record = {
            "time": time.time(),
            "rank": self.rank,
            "host": self._host,
            "message": message,
            "traceback": stack,
            "cascade": cascade,
        }
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_json(self.directory / self._record_name, record)

    def _write_for_torchrun(self, message: str, stack: str) -> None:
        """torchrun shows `py_callstack` of the smallest timestamp as the root cause of its summary."""
        if self._torchrun_file is None:
            return
        details = {"py_callstack": stack.rstrip(), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            _write_json(Path(self._torchrun_file), {"message": {"message": message, "extraInfo": details}})

    def _peer_failed(self) -> bool:
        """Whether another rank of this host, or of this file system, has already recorded why it ended."""
        files = set(self.directory.glob(ERROR_FILES)) if self.directory else set()
        files -= {self.directory / self._record_name} if self.directory else set()
        if self._torchrun_file:  # .../attempt_0/LOCAL_RANK/error.json
            files |= set(Path(self._torchrun_file).parent.parent.glob("*/error.json")) - {Path(self._torchrun_file)}
        with contextlib.suppress(OSError):
            # A second of slack for file systems with coarse times.
            return any(file.stat().st_mtime >= self._started - 1 for file in files)
        return False

    def _watch_signals(self) -> None:
        """SIGTERM raises in the main thread; a watcher sees signals at once and ends a main thread that can't react."""
        receive, send = socket.socketpair()
        send.setblocking(False)

        def terminate(number: int, frame: FrameType | None) -> None:
            raise _Terminated

        before = signal.signal(signal.SIGTERM, terminate)
        before_fd = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(before_fd)
            signal.signal(signal.SIGTERM, before)
            send.close()  # ends the watcher

        def release_child() -> None:
            # A forked worker shares the socket: ending the worker would look like a signal to this process.
            if signal.getsignal(signal.SIGTERM) is terminate:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def watch() -> None:
            with receive:
                while numbers := receive.recv(16):
                    for number in numbers:
                        if number in (signal.SIGINT, signal.SIGTERM):
                            self._signal = number
                            time.sleep(self._patience)
                            if not self._waiting:
                                self._end_by_signal(number)

        os.register_at_fork(after_in_child=release_child)
        threading.Thread(target=watch, name="signal-watcher", daemon=True).start()
        self._restore.callback(restore)


def leave(code: int = 0) -> NoReturn:
    """End the process now, what was said and logged being out.

    Not sys.exit: threads and pending collectives would keep a failing process, and with it every peer, alive; and at a
    good end Python takes seconds to take torch's modules apart, on every rank.
    """
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def first_error(logs: Path) -> dict[str, Any] | None:
    """The error record that explains a failed run: the earliest that isn't a lost connection to a failed peer."""
    records = []
    for file in sorted(logs.glob(ERROR_FILES)):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            records.append(json.loads(file.read_text(encoding="utf-8")))
    return min(records, key=lambda record: (record["cascade"], record["time"]), default=None)


def _log(level: int, text: str, error: BaseException | None = None) -> None:
    """To this rank's log file. The terminal gets it from `_say`, and without handlers logging would print it too."""
    if logging.getLogger().handlers:
        logger.log(level, text, exc_info=error, extra={"terminal": False})


def _write_json(path: Path, content: object) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    found = first_error(Path(sys.argv[1]) / "logs")
    if found is not None:
        print(f"rank {found['rank']} on {found['host']}: {found['message']}")
    else:
        text = f"{sys.argv[1]} has no record of an error: a signal ended its ranks, or it didn't fail; see its logs"
        print(text, file=sys.stderr)
