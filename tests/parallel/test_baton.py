"""Two computations take turns at their waits: exactly one runs, errors end both, and no thread is left."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

import pytest

from parallel.baton import Baton
from parallel.mesh import Axis


def test_copies_of_modules_take_turns_with_their_rank() -> None:
    axis = Axis("ep", (0,), 0)
    axis.baton.together(lambda: None, lambda: None)
    assert copy.deepcopy([axis])[0] is axis


def test_exactly_one_runs_and_they_change_at_their_waits_alone() -> None:
    baton, happened, running = Baton(), list[str](), threading.Lock()

    def work(name: str, waits: int) -> Callable[[], str]:
        def run() -> str:
            for i in range(waits + 1):
                assert running.acquire(blocking=False), "the other one runs too"
                happened.append(f"{name}{i}")
                time.sleep(0.001)
                running.release()
                if i < waits:
                    baton.pass_on()
            return name

        return run

    baton.pass_on()  # alone it does nothing
    for _ in range(3):
        happened.clear()
        assert baton.together(work("f", 1), work("b", 3)) == ("f", "b")
        assert happened == ["b0", "f0", "b1", "f1", "b2", "b3"]
        happened.clear()
        assert baton.together(work("f", 3), work("b", 0)) == ("f", "b")
        assert happened == ["b0", "f0", "f1", "f2", "f3"]
    assert sum(thread.name == "beside" for thread in threading.enumerate()) == 1


@pytest.mark.parametrize("failing", ["here", "beside"])
def test_the_first_error_is_raised_and_the_other_is_unwound(failing: str) -> None:
    baton, unwound = Baton(), list[str]()

    def fails() -> None:
        baton.pass_on()
        raise RuntimeError("peer is gone")

    def waits() -> None:
        try:
            while True:
                baton.pass_on()
        finally:
            unwound.append("the other")

    works = (fails, waits) if failing == "here" else (waits, fails)
    with pytest.raises(RuntimeError, match="peer is gone"):
        baton.together(*works)
    assert unwound == ["the other"]
    assert baton.together(lambda: 1, lambda: 2) == (1, 2), "it goes on"


def test_an_error_before_the_other_has_begun_keeps_it_from_beginning() -> None:
    baton, began = Baton(), list[int]()

    def fails() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        baton.together(lambda: began.append(1), fails)
    assert not began


def test_the_thread_ends_with_its_baton() -> None:
    before = set(threading.enumerate())
    baton = Baton()

    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        baton.together(lambda: None, fails)
    (thread,) = set(threading.enumerate()) - before
    del baton
    thread.join(5)
    assert not thread.is_alive()
