"""Batches: one order for every layout, resuming, masks; and a background thread that changes none of it."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import Batches, MicroBatchTensors, ValidationSteps, make_micro_batch
from data.prefetch import Prefetcher
from data.samples import SampleSource

S = 4


class Numbered:
    """Sample i is i·100, i·100 + 1, ...: a batch shows which samples it holds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> np.ndarray:
        return np.arange(index * 100, index * 100 + S + 1)


def batches(dataset: SampleSource, micro: int, total: int, rank: int = 0, size: int = 1, **options: object) -> Batches:
    arguments = {"seq_length": S, "prefetch_steps": 0, **options}
    return Batches(
        dataset,
        micro_batch_size=micro,
        global_batch_size=total,
        dp_rank=rank,
        dp_size=size,
        **arguments,  # type: ignore[arg-type]
    )


def held(step: list[MicroBatchTensors]) -> list[list[int]]:
    return [[int(row[0]) // 100 for row in micro_batch["tokens"]] for micro_batch in step]


def test_every_layout_takes_the_same_samples_in_each_step() -> None:
    for size in (1, 2, 4):
        for micro in (1, 2):
            ranks = [batches(Numbered(100), micro, 8, rank, size) for rank in range(size)]
            for number in range(5):
                steps = [held(rank.next_step()) for rank in ranks]
                assert all(len(step) == 8 // (micro * size) for step in steps)
                assert sorted(i for step in steps for m in step for i in m) == list(range(8 * number, 8 * number + 8))
    # Which rank takes which is Megatron's: micro-batches go round the ranks.
    assert held(batches(Numbered(100), 2, 8, 1, 2).next_step()) == [[2, 3], [6, 7]]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_resumed_run_continues_where_it_stopped_on_any_number_of_ranks(prefetch: int) -> None:
    first = [batches(Numbered(100), 1, 8, rank, 4, prefetch_steps=prefetch) for rank in range(4)]
    for _ in range(3):
        for rank in first:
            rank.next_step()
    consumed = first[0].consumed_samples
    assert consumed == 24  # what was delivered, whatever the thread has made ahead
    resumed = [
        batches(Numbered(100), 2, 8, rank, 2, consumed_samples=consumed, prefetch_steps=prefetch) for rank in (0, 1)
    ]
    for number in range(3, 6):
        seen = sorted(i for rank in resumed for micro in held(rank.next_step()) for i in micro)
        assert seen == list(range(8 * number, 8 * number + 8))
    for rank in first + resumed:
        rank.close()


def test_prefetching_changes_nothing() -> None:
    with batches(Numbered(100), 2, 4, prefetch_steps=3) as ahead:
        plain = batches(Numbered(100), 2, 4)
        for _ in range(20):
            for one, other in zip(ahead.next_step(), plain.next_step(), strict=True):
                assert torch.equal(one["tokens"], other["tokens"]) and torch.equal(one["labels"], other["labels"])
            assert ahead.consumed_samples == plain.consumed_samples


def test_a_ramp_up_follows_the_consumed_samples() -> None:
    with batches(Numbered(100), 1, lambda consumed: 2 if consumed < 6 else 4, prefetch_steps=2) as ramp:  # type: ignore[arg-type]
        assert [sum(map(len, held(ramp.next_step()))) for _ in range(5)] == [2, 2, 2, 4, 4]
        assert ramp.consumed_samples == 14


@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_masks_positions_and_documents_token_by_token(samples: list[list[int]]) -> None:
    eod = 0
    batch = make_micro_batch(np.array(samples), eod, True, True, True)
    for row, sample in enumerate(samples):
        position = document = 0
        assert batch["documents"] is not None
        for column, token in enumerate(sample[:-1]):
            assert batch["tokens"][row, column] == token and batch["labels"][row, column] == sample[column + 1]
            assert batch["positions"][row, column] == position and batch["documents"][row, column] == document
            assert batch["loss_mask"][row, column] == (token != eod)
            position, document = (0, document + 1) if token == eod else (position + 1, document)
    plain = make_micro_batch(np.array(samples), eod)
    assert plain["documents"] is None and bool((plain["loss_mask"] == 1).all())
    assert plain["positions"].tolist() == [list(range(6))] * len(samples)
    for both in (batch, plain):
        tensors = {key: value for key, value in both.items() if isinstance(value, torch.Tensor)}
        assert tensors.pop("loss_mask").dtype == torch.float32
        assert {tensor.dtype for tensor in tensors.values()} == {torch.int64}
        assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_no_tensor_is_a_view_of_another() -> None:
    batch = make_micro_batch(np.arange(10).reshape(2, 5))
    batch["tokens"].fill_(-1)
    batch["positions"][0].fill_(-1)
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]] and batch["positions"][1].tolist() == [0, 1, 2, 3]


def test_bad_sizes_are_refused_before_a_thread_starts() -> None:
    before = threading.active_count()
    data = Numbered(10)
    for match, arguments in (
        (
            r"global-batch-size 10 is not a multiple of micro-batch-size 2 x data-parallel size 3 = 6: take 6 or 12",
            (2, 10, 0, 3),
        ),
        (r"global-batch-size 1 is not .* = 2: take 2", (2, 1)),
        (r"data-parallel rank 2 is outside 0 .. 1", (1, 2, 2, 2)),
        (r"micro-batch-size 0 must be at least 1", (0, 2)),
    ):
        with pytest.raises(ValueError, match=match):
            batches(data, *arguments, prefetch_steps=2)
    with pytest.raises(ValueError, match="reset-position-ids, eod-mask-loss need the tokenizer's end-of-document id"):
        batches(data, 1, 2, reset_position_ids=True, eod_mask_loss=True, prefetch_steps=2)
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="samples have 5 tokens, seq-length 8 needs one more"):
        batches(data, 1, 2, seq_length=8).next_step()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_end_of_the_data_is_an_error_only_when_it_is_reached(prefetch: int) -> None:
    with batches(Numbered(10), 1, 4, prefetch_steps=prefetch) as short:
        assert held(short.next_step()) == [[0], [1], [2], [3]] and held(short.next_step())[-1] == [7]
        with pytest.raises(ValueError, match="8 of its 10 samples are consumed and the next step takes 4"):
            short.next_step()


def test_validation_is_the_same_each_time_and_the_same_for_any_ranks() -> None:
    options = {"seq_length": S, "micro_batch_size": 1, "global_batch_size": 4}
    alone = ValidationSteps(Numbered(12), 3, **options)  # type: ignore[arg-type]
    first, second = [held(step) for step in alone], [held(step) for step in alone]
    assert first == second == [[[4 * n + i] for i in range(4)] for n in range(3)] and len(alone) == 3
    pair = [list(ValidationSteps(Numbered(12), 3, dp_rank=r, dp_size=2, **options)) for r in (0, 1)]  # type: ignore[arg-type]
    for number in range(3):
        seen = sorted(i for rank in pair for micro in held(rank[number]) for i in micro)
        assert seen == list(range(4 * number, 4 * number + 4))
    with pytest.raises(ValueError, match="4 validation iterations of 4 sequences need 16 samples, the dataset has 12"):
        ValidationSteps(Numbered(12), 4, **options)  # type: ignore[arg-type]


def test_the_order_of_prefetched_items_does_not_depend_on_timing() -> None:
    def jittery() -> Iterator[int]:
        for number in range(60):
            time.sleep(random.random() * 0.002)
            yield number

    prefetcher = Prefetcher(jittery(), 4)
    seen = []
    for item in prefetcher:
        time.sleep(random.random() * 0.002)
        seen.append(item)
    prefetcher.close()
    assert seen == list(range(60))


def test_the_thread_runs_ahead_but_no_further_than_its_depth() -> None:
    made = []

    def counting() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    prefetcher = Prefetcher(counting(), 3)
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(made) == 3  # without anyone asking
    assert next(prefetcher) == 0
    prefetcher.close()
    assert len(made) <= 4


def test_an_error_in_the_thread_comes_out_in_its_place_with_its_traceback() -> None:
    class Broken(Numbered):
        def sample(self, index: int) -> np.ndarray:
            if index == 9:
                raise OSError("the file server went away")
            return super().sample(index)

    broken = batches(Broken(100), 1, 4, prefetch_steps=4)
    assert held(broken.next_step())[0] == [0] and held(broken.next_step())[0] == [4]
    for _ in range(2):  # it stays broken: no step is skipped by asking again
        with pytest.raises(OSError, match="the file server went away") as caught:
            broken.next_step()
        assert "in sample" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert broken.consumed_samples == 8
    broken.close()


def test_close_ends_the_thread_wherever_it_is() -> None:
    def alive() -> int:
        return sum(thread.name == "data-prefetch" for thread in threading.enumerate())

    before = alive()
    waiting = Prefetcher(iter(range(100)), 2)  # its queue is full
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        entered.set()
        leave.wait(10)
        yield 1

    working = Prefetcher(slow(), 2)  # it is making an item
    assert entered.wait(10)
    threading.Timer(0.05, leave.set).start()
    finished = Prefetcher(iter([1]), 2)  # it has ended
    assert list(finished) == [1]
    for prefetcher in (waiting, working, finished):
        prefetcher.close()
        prefetcher.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(prefetcher)
    assert alive() == before
