"""A run that mostly communicates, or whose codec costs more than it saves, is told so once, with numbers and flag."""

from __future__ import annotations

import dataclasses

import pytest

from training.advice import (
    WARM_UP,
    WINDOW,
    CommunicationWatch,
    CompressionWatch,
    Exchange,
    Reduction,
    advice,
    break_even,
    compression_advice,
)

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


MIB = 2.0**20
# 4 MiB instead of 16 on a link of 1 GiB/s: 12 ms saved, 30 ms spent.
DEAR = Exchange(sent=4 * MIB, fp32=16 * MIB, wire=4 / 1024, codec=0.030)
CHEAP = dataclasses.replace(DEAR, codec=0.010)


def test_the_link_at_which_a_codec_breaks_even() -> None:
    assert break_even(DEAR) == pytest.approx(12 * MIB / 0.030)
    assert break_even(dataclasses.replace(DEAR, codec=0.0)) == float("inf")
    # On a link of just that speed both take the same time, codec included.
    link = break_even(DEAR)
    assert DEAR.sent / link + DEAR.codec == pytest.approx(DEAR.fp32 / link)


def test_advice_on_a_codec_names_what_fp32_and_bf16_would_have_taken() -> None:
    text = compression_advice("int8", DEAR)
    assert "--grad-compression int8 costs more than it saves: 0.03 s of encoding and decoding and 0.00391 s" in text
    assert "4 MiB, where an fp32 all-reduce would send 16 MiB in about 0.0156 s at the 8.59 Gbit/s of this link" in text
    assert "It pays on links below 3.36 Gbit/s" in text
    assert "leave --grad-compression out, or take bf16 (about 0.00781 s and" in text
    assert "bf16 (" not in compression_advice("bf16", DEAR)
    more = compression_advice("topk", dataclasses.replace(DEAR, sent=17 * MIB))
    assert "It pays on no link, since it sends more: leave" in more and "links below" not in more
    assert "below 400 Mbit/s" in compression_advice("int4", Exchange(sent=1e6, fp32=6e6, wire=0.01, codec=0.1))


def told(steps: list[Exchange]) -> list[int]:
    watch = CompressionWatch("int8")
    return [place for place, step in enumerate(steps, start=1) if watch.step(step)]


def test_a_codec_that_costs_more_is_spoken_of_once_after_enough_steps_in_a_row() -> None:
    first = WARM_UP + WINDOW
    assert told([DEAR] * 30) == [first]
    assert told([CHEAP] * 30) == []
    assert told([DEAR] * (first - 1) + [CHEAP] + [DEAR] * 30) == [first + WINDOW]
    assert told([CHEAP] * WARM_UP + [DEAR] * 30) == [first]
    even = dataclasses.replace(DEAR, codec=DEAR.wire * 3)
    assert told([even] * 30) == [], "as long as fp32 is not longer"


def test_the_window_of_a_codec_is_averaged() -> None:
    watch = CompressionWatch("int8")
    steps = [CHEAP] * WARM_UP + [DEAR] * (WINDOW - 1) + [dataclasses.replace(DEAR, codec=0.055)]
    (text,) = filter(None, map(watch.step, steps))
    assert ": 0.035 s of encoding" in text
