"""Ranks that meet before the process group is made: who is missing, what is in the way. Ranks are threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from parallel.launch import Place, check_in, tell_waiting_ranks


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Rank(threading.Thread):
    """A rank in `check_in`; `end()` gives what it raised, or None."""

    def __init__(self, rank: int, world_size: int, port: int, seconds: float, address: str = "127.0.0.1") -> None:
        super().__init__(daemon=True)
        self.place = Place(rank, world_size, address, port, rank == 0)
        self.seconds, self.error, self.store = seconds, "still waiting", None
        self.start()

    def run(self) -> None:
        try:
            self.store = check_in(self.place, self.seconds)
            self.error = ""
        except ValueError as error:
            self.error = str(error)

    def end(self) -> str:
        self.join(20)
        return self.error


def test_ranks_that_are_all_there_share_the_store(port: int) -> None:
    ranks = [Rank(rank, 3, port, 10.0) for rank in (2, 1, 0)]  # rank 0, which serves it, comes last
    assert [rank.end() for rank in ranks] == ["", "", ""]
    first, *_, last = (rank.store for rank in ranks)
    assert first is not None and last is not None
    last.set("a", "b")
    assert first.get("a") == b"b"


def test_missing_ranks_are_named_to_all_that_have_come(port: int) -> None:
    ranks = [Rank(rank, 4, port, 1.0) for rank in (0, 2)]
    for rank in ranks:
        error = rank.end()
        assert f"2 of 4 ranks didn't come to 127.0.0.1:{port} within 1 s: rank 1, 3;" in error


def test_a_rank_that_failed_before_is_named_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    waiting = Rank(0, 2, port, 60.0)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    tell_waiting_ranks("--lr -1.0 must not be negative")
    assert waiting.end() == f"rank 1 on {socket.gethostname()} failed before joining: --lr -1.0 must not be negative"
    assert time.monotonic() - began < 20


def test_nobody_there_to_tell_is_no_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    tell_waiting_ranks("anything")


def test_a_wrong_address_is_named_within_the_time_out(port: int) -> None:
    error = Rank(1, 2, port, 0.5).end()
    assert f"rank 1 of 2 can't reach 127.0.0.1:{port}" in error and "connection refused" in error
    error = Rank(1, 2, port, 0.5, "no-such-host.invalid").end()
    assert f"no-such-host.invalid:{port}" in error and "name is not known" in error


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_a_taken_port_is_named(taken: int) -> None:
    error = Rank(0, 2, taken, 1.0).end()
    assert f"MASTER_PORT {taken} of this host is in use" in error


def test_another_services_port_is_told_apart(taken: int) -> None:
    assert "it may be another service's" in Rank(1, 2, taken, 1.0).end()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": "2"}, "RANK is 2 with WORLD_SIZE 2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_wrong_variables_are_named(changed: dict[str, str], message: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert Place.from_environment({}) is None
    assert Place.from_environment(variables) == Place(0, 2, "h", 1, True)
    assert Place.from_environment(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == Place(0, 2, "h", 1, False)
    with pytest.raises(ValueError, match=message):
        Place.from_environment(variables | changed)
