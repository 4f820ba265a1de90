"""Real gloo ranks for tests: processes that are forked once and serve every test of the run.

Imports torch and the standard library only. A fork server imports torch once and forks each worker from that in some
milliseconds; a test hands the pool a module-level function and a world size, and gets one result a rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

MAX_WORLD_SIZE = 16

# Imported once, in the fork server, so that no rank spends seconds on them: an optimizer's first step imports dynamo.
PRELOAD = ("torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "numpy", "pytest")
# These only where the test run has loaded them, as then a test module, which the ranks import, is likely to want them.
PRELOAD_WHERE_LOADED = ("hypothesis", "transformers", "megatron.core", "safetensors.torch", "tensorboard", "tyro")

# After the first failure the other ranks get this long to report theirs: a peer's "Connection closed" may
# arrive before the death that caused it is seen.
GRACE_SECONDS = 0.3


class RankFailure(Exception):
    """What happened on a rank: its traceback and output. The cause of the exception that `run_ranks` raises."""


class RankTimeout(RankFailure):
    """Ranks were not done in time; the message holds the stack of each of them."""


@dataclass(frozen=True)
class Task:
    """One call, as a worker gets it. The function travels as module and name: a worker imports it."""

    number: int
    rank: int
    world_size: int
    store_port: int
    module: str
    name: str
    arguments: bytes
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """A rank's answer: the pickled result, or where `traceback` is set the pickled exception (None: it won't)."""

    value: bytes | None
    traceback: str | None = None


# ---- In a worker


def worker_main(connection: Connection, log_path: str, stacks_path: str) -> None:
    """Serve calls until the pool hangs up. Output goes to `log_path`, stacks (on SIGUSR1) to `stacks_path`."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    stacks = open(stacks_path, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's: it ends the pool.
    torch.set_num_threads(1)
    store: dist.TCPStore | None = None
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if store is None:
            store = dist.TCPStore("127.0.0.1", task.store_port, is_master=False, wait_for_workers=False)
        # The pool ends a rank that is late. Where the test run itself was killed, the rank ends by itself.
        faulthandler.dump_traceback_later(task.timeout + 60.0, exit=True, file=stacks)
        outcome = run_task(task, store)
        connection.send_bytes(pickle.dumps(outcome))
        if outcome.traceback is not None:
            # The groups stay as they are: no peer fails because of this rank's clean-up, and the pool kills them all.
            signal.pause()
        faulthandler.cancel_dump_traceback_later()


def run_task(task: Task, store: dist.Store) -> Outcome:
    """Call the function in a fresh world, and leave the process as it was before."""
    environment = dict(os.environ)
    try:
        os.environ.update(
            RANK=str(task.rank),
            WORLD_SIZE=str(task.world_size),
            LOCAL_RANK=str(task.rank),
            LOCAL_WORLD_SIZE=str(task.world_size),
        )
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        function = getattr(importlib.import_module(task.module), task.name)
        arguments = pickle.loads(task.arguments)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(task.number), store),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout + 30.0),
        )
        value = pickle.dumps(function(*arguments))
    except BaseException as error:  # SystemExit too: whatever ends a rank is the test's to see.
        return Outcome(pickled_exception(error), traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(environment)
    # A rank that is done early must not close connections that a slower peer is still reading from.
    dist.barrier()
    dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports half of torch's compiler: 2 s
        torch.use_deterministic_algorithms(False)
    return Outcome(value)


def pickled_exception(error: BaseException) -> bytes | None:
    """The exception where it survives the trip (its constructor may want other arguments), else None."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return None


# ---- In the test run


@dataclass
class Worker:
    """One rank's process as the test run sees it."""

    process: BaseProcess
    connection: Connection
    log: Path
    stacks: Path
    log_start: int = 0  # where the output of the present call begins

    def output(self) -> str:
        """What the rank printed during the present call, its last 4,000 characters."""
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace")
        return text[-4000:]


class ProcessPool:
    """Workers that are started as they are needed and kept. World size N uses the first N of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[Worker] = []
        self._calls = 0
        self._started = 0
        self._directory = Path(tempfile.mkdtemp(prefix="process_pool_"))
        self._store: dist.TCPStore | None = None

    def run_ranks(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(*args)` on `world_size` gloo ranks at once, torch.distributed initialised in each.

        Returns each rank's result, in rank order (whatever pickles; tensors are copied). Where a rank raises, its
        exception is raised here, with a RankFailure (rank, traceback, output) as its cause. RankFailure itself is
        raised where a rank dies, RankTimeout (with the stacks of the late ranks) after `timeout` seconds. After any of
        the three all ranks are killed, and the next call forks new ones.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world size {world_size} is outside 1..{MAX_WORLD_SIZE}")
        module, name = function.__module__, function.__qualname__
        if getattr(sys.modules.get(module), name, None) is not function:
            raise ValueError(f"{module}.{name} can't be imported by a rank: run_ranks needs a module-level function")
        arguments = pickle.dumps(args)
        while len(self._workers) < world_size:
            self._workers.append(self._start_worker())
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls += 1
        workers = self._workers[:world_size]
        try:
            for rank, worker in enumerate(workers):
                worker.log_start = worker.log.stat().st_size if worker.log.exists() else 0
                task = Task(self._calls, rank, world_size, self._store.port, module, name, arguments, timeout)
                with contextlib.suppress(BrokenPipeError):  # it died between two calls: seen below, with its signal
                    worker.connection.send_bytes(pickle.dumps(task))
            outcomes = self._collect(workers, timeout)
            return [pickle.loads(outcomes[rank].value or b"") for rank in range(world_size)]
        except BaseException:
            self.kill()
            raise

    def _start_worker(self) -> Worker:
        self._started += 1
        log, stacks = (self._directory / f"{self._started}.{kind}" for kind in ("log", "stacks"))
        here, there = self._context.Pipe()
        process = self._context.Process(target=worker_main, args=(there, str(log), str(stacks)), daemon=True)
        loaded = [name for name in PRELOAD_WHERE_LOADED if name in sys.modules]
        self._context.set_forkserver_preload([*PRELOAD, *loaded])
        process.start()
        there.close()
        return Worker(process, here, log, stacks)

    def _collect(self, workers: list[Worker], timeout: float) -> dict[int, Outcome]:
        """Wait for all ranks; raise for the first that failed, the dead before the living."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        dead: list[int] = []
        failed: list[int] = []  # in the order of their reports
        while len(outcomes) + len(dead) < len(workers) and (left := deadline - time.monotonic()) > 0:
            waiting: dict[Any, int] = {
                handle: rank
                for rank, worker in enumerate(workers)
                if rank not in outcomes and rank not in dead
                for handle in (worker.connection, worker.process.sentinel)
            }
            for handle in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[handle]
                if rank in outcomes or rank in dead:
                    continue
                try:
                    outcomes[rank] = pickle.loads(workers[rank].connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    dead.append(rank)
                    continue
                if outcomes[rank].traceback is not None:
                    failed.append(rank)
            if (dead or failed) and deadline > time.monotonic() + GRACE_SECONDS:
                deadline = time.monotonic() + GRACE_SECONDS
        if dead:
            raise RankFailure(describe_death(dead[0], workers))
        if failed:
            self._raise_rank_error(failed[0], outcomes[failed[0]], workers)
        late = [rank for rank in range(len(workers)) if rank not in outcomes]
        if late:
            raise RankTimeout(describe_late(late, workers, timeout))
        return outcomes

    def _raise_rank_error(self, rank: int, outcome: Outcome, workers: list[Worker]) -> None:
        failure = RankFailure(f"rank {rank} of {len(workers)}\n{outcome.traceback}{output_of(workers[rank])}")
        if outcome.value is None:
            raise failure
        raise pickle.loads(outcome.value) from failure

    def kill(self) -> None:
        """End all workers, by process id. The next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
            worker.log.unlink(missing_ok=True)
            worker.stacks.unlink(missing_ok=True)
        self._workers.clear()

    def close(self) -> None:
        """End the pool for good."""
        self.kill()
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def process_ids(self) -> list[int]:
        """The workers' process ids, in rank order."""
        return [worker.process.pid or 0 for worker in self._workers]


def output_of(worker: Worker) -> str:
    text = worker.output()
    return f"\n--- its output ---\n{text}" if text else ""


def describe_death(rank: int, workers: list[Worker]) -> str:
    workers[rank].process.join(1.0)
    code = workers[rank].process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return f"rank {rank} of {len(workers)} died: {how}{output_of(workers[rank])}"


def describe_late(ranks: list[int], workers: list[Worker], timeout: float) -> str:
    """Ask each late rank for its stacks (faulthandler answers from C, even where Python is blocked)."""
    for rank in ranks:
        os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
    until = time.monotonic() + 2.0
    texts: dict[int, str] = {}
    for rank in ranks:
        # The dump of the main thread comes last.
        while "worker_main" not in (text := workers[rank].stacks.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        texts[rank] = text
    stacks = "\n".join(f"--- stacks of rank {rank} ---\n{texts[rank]}{output_of(workers[rank])}" for rank in ranks)
    return f"ranks {ranks} of {len(workers)} were not done after {timeout} s\n{stacks}"
