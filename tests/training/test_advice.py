"""A run that mostly communicates is told so once, with its numbers and the flag that helps."""

from __future__ import annotations

import dataclasses

import pytest

from training.advice import WARM_UP, WINDOW, CommunicationWatch, Reduction, advice

LARGE = Reduction(
    dp=8, buckets=4, mebibytes=96.0, bucket_cap_mb=25.0, overlap=True, micro_batches=2, global_batch_size=64
)
FLAGS = ("--no-overlap-grad-reduce", "raise --bucket-cap-mb", "lower --bucket-cap-mb", "--global-batch-size")


def test_the_advice_has_the_numbers() -> None:
    text = advice(0.8, 1.29, LARGE)
    assert "took 62% of the last 5 steps (0.8 s of 1.29 s, 4 messages of 24 MiB, data parallel size 8)" in text
    assert "raise --global-batch-size (64 now, 2 micro-batches a rank)" in text


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, FLAGS[3:]),
        ({"overlap": False}, (FLAGS[0], FLAGS[3])),
        ({"buckets": 96, "bucket_cap_mb": 1.0}, (FLAGS[1], FLAGS[3])),
        ({"buckets": 96, "bucket_cap_mb": 1.0, "overlap": False}, (FLAGS[0], FLAGS[1], FLAGS[3])),
        ({"buckets": 1, "bucket_cap_mb": 100.0}, (FLAGS[2], FLAGS[3])),
        ({"buckets": 1, "mebibytes": 2.0}, FLAGS[3:]),
    ],
)
def test_the_flag_that_is_named_depends_on_the_numbers(changes: dict, flags: tuple[str, ...]) -> None:
    text = advice(0.8, 1.2, dataclasses.replace(LARGE, **changes))
    assert tuple(flag for flag in FLAGS if flag in text) == flags


def spoken(exposed: list[float]) -> list[int]:
    """The steps, from 1, at which something is said where each takes 1 s and is exposed for so long."""
    watch = CommunicationWatch(LARGE)
    return [step for step, seconds in enumerate(exposed, start=1) if watch.step(seconds, 1.0)]


def test_it_is_said_once_after_enough_steps_in_a_row() -> None:
    first = WARM_UP + WINDOW
    assert spoken([0.9] * 30) == [first]
    assert spoken([0.1] * WARM_UP + [0.51] * 30) == [first]
    assert spoken([0.9] * (first - 1) + [0.1] + [0.9] * 30) == [first + WINDOW]
    assert spoken([0.5] * 30) == [], "half of it is not most of it"
    assert spoken([0.9, 0.9, 0.9, 0.1] * 10) == []


def test_the_window_is_averaged() -> None:
    watch = CommunicationWatch(LARGE)
    said = [watch.step(*step) for step in [(9.0, 9.0)] * WARM_UP + [(0.6, 1.0)] * 4 + [(1.2, 2.0)]]
    assert said[:-1] == [None] * (WARM_UP + 4)
    assert said[-1] is not None and "took 60% of the last 5 steps (0.72 s of 1.2 s" in said[-1]
