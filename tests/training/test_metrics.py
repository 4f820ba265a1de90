"""metrics.jsonl, TensorBoard and the meter. TensorBoard is read back by its own reader."""

from __future__ import annotations

import ast
import json
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training.metrics
import training.trainer
from parallel.compression.compression import CompressionStatistics
from training.compression import record_of
from training.load_map import load_map
from training.metrics import Meter, MetricsFile, TensorBoard, known_peak_tflops, memory_share, peak_memory_bytes


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_step_is_a_line_that_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"loss": 2.5, "step": 1, "tokens": 128})
    assert path.read_text() == '{"step": 1, "loss": 2.5, "tokens": 128}\n'
    file.write({"step": 2, "loss": float("nan"), "grad_norm": float("inf")})
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "loss": None, "grad_norm": None}
    with pytest.raises(KeyError):
        file.write({"loss": 1.0})


@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo', "\0\0\0\0", '{"step": 6}\n{"step": 7}\n'])
def test_no_step_of_a_resumed_run_appears_twice(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.write({"step": step, "loss": 1.0 / step})
    file.close()
    with path.open("a") as end:
        end.write(torn)
    resumed = MetricsFile(path, resumed_step=3)
    resumed.write({"step": 4, "loss": 9.0})
    assert steps(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 9.0


def test_resuming_after_the_last_step_keeps_all_but_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    MetricsFile(path, resumed_step=10).write({"step": 11})
    assert steps(path) == [1, 2, 11]


def test_a_run_that_starts_anew_has_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path).write({"step": 1, "loss": 3.0})
    assert path.read_text() == '{"step": 1, "loss": 3.0}\n'


def events_of(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_of(directory)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_groups_answer_questions_and_lose_nothing(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    record = {"step": 4, "loss": 2.0, "tokens_per_second": 10, "peak_memory_gib": 0.5, "own": 1.0, "note": "text"}
    board.write(record)
    board.close()
    assert scalars(tmp_path) == {
        "1_learn/loss": [(4, 2.0)],
        "2_speed/tokens_per_second": [(4, 10.0)],
        "3_fit/memory_peak_gib": [(4, 0.5)],
        "5_more/own": [(4, 1.0)],
    }


def test_the_configuration_is_shown_as_it_is(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.text("configuration", "lr: 1\n<b>")
    board.close()
    (tensor,) = events_of(tmp_path).Tensors("configuration/text_summary")
    assert tensor.tensor_proto.string_val[0].decode() == "    lr: 1\n    <b>"


def test_one_page_of_tensorboard_answers_learning_speed_and_memory(tmp_path: Path) -> None:
    """Its charts name tags that exist, several curves share one, and none is empty where a measurement is missing."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    board = TensorBoard(tmp_path)
    first = {"loss": 5.0, "grad_norm": 1.0, "tokens_per_second": 9.0, "step_seconds": 1.0, "tflops_per_device": 0.1}
    board.write({"step": 1, **first, "peak_memory_gib": 0.5, "memory_share": 0.25})
    board.write({"step": 2, "loss": 4.0, "valid_loss": 4.5, "bigram_loss": 4.2, "grad_reduce_exposed_seconds": 0.1})
    board.close()
    (tensor,) = events_of(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["does it learn", "how fast is it", "does it fit"]
    charts = [[tag.strip("^$") for tag in chart.multiline.tag] for page in layout.category for chart in page.chart]
    assert sorted(tag for chart in charts for tag in chart) == sorted(scalars(tmp_path))
    assert charts[0] == ["1_learn/loss", "1_learn/loss_validation", "1_learn/loss_validation_of_bigrams"]


def test_everything_that_a_step_measures_has_a_place_of_its_own(tmp_path: Path) -> None:
    """Read from the trainer's source: a new name of a record without a tag would hide in "5_more"."""
    names = {"step_seconds", "tokens_per_second", "tflops_per_device", "mfu"}  # Meter's
    names |= {"valid_loss", "bigram_loss", "memory_share", "peak_memory_gib"}
    names |= {f"{name}_loss" for name in ("aux", "device", "communication", "z")}
    names |= names_of_compression()
    source = ast.parse(Path(training.trainer.__file__).read_text())
    (step,) = (x for x in ast.walk(source) if isinstance(x, ast.FunctionDef) and x.name == "_step")
    keys = (node.keys for node in ast.walk(step) if isinstance(node, ast.Dict))
    names |= {key.value for found in keys for key in found if isinstance(key, ast.Constant)} - {"step"}
    assert {"loss", "mtp_loss", "lr", "tokens", "expert_dropped_share", "sent_bytes"} <= names
    board = TensorBoard(tmp_path)
    board.write({"step": 1, **dict.fromkeys(names, 1.0)})
    board.close()
    assert len(scalars(tmp_path)) == len(names)
    assert [tag for tag in scalars(tmp_path) if tag.startswith("5_more")] == []


def names_of_compression() -> set[str]:
    """What a step records of compressed gradients."""
    statistics = CompressionStatistics(1, 4.0, 0.1, 0.2, 0.3, 0.4)
    reducer = types.SimpleNamespace(compression=object(), buckets=[], compression_statistics=lambda: statistics)
    names = set(record_of(reducer))  # type: ignore[arg-type]
    reducer.compression_statistics = lambda: None
    reducer.buckets = [types.SimpleNamespace(parameters=[torch.ones(3)], axis=types.SimpleNamespace(size=2))]
    in_fp32 = record_of(reducer)  # type: ignore[arg-type]
    assert set(in_fp32) == names and len(names) == 6
    assert in_fp32["grad_sent_bytes"] == 12 and in_fp32["grad_compression_ratio"] == 1.0
    return names


def test_whether_compression_pays_has_charts_where_it_runs(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write({"step": 1, "loss": 2.0, **dict.fromkeys(names_of_compression(), 1.0)})
    board.close()
    (tensor,) = events_of(tmp_path).Tensors("custom_scalars__config__")
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["does it learn", "does compression pay"]
    tags = {tag.strip("^$") for chart in layout.category[1].chart for tag in chart.multiline.tag}
    assert {tag for tag in scalars(tmp_path) if tag.startswith("3_wire/")} - tags == {"3_wire/times_fewer_than_fp32"}
    assert tags < set(scalars(tmp_path))


def test_what_has_parts_gets_a_chart_for_each(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write({"step": 3, "sent_bytes": {"tp": 7, "pp": 2**40}})
    board.close()
    assert scalars(tmp_path) == {
        "4_detail/sent_bytes_of_tp": [(3, 7.0)],
        "4_detail/sent_bytes_of_pp": [(3, 2.0**40)],
    }
    assert training.trainer._short({"step": 3, "loss": 2.5, "sent_bytes": {"tp": 7}}) == "loss 2.5"


def test_loads_are_a_picture_whose_colours_are_the_load_over_the_layers_mean(tmp_path: Path) -> None:
    loads = np.array([[100, 100, 100, 100, 100], [800, 100, 0, 50, 50]])
    pixels = load_map(loads, ["3", "61 MTP"])
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3

    # The cells are the last 2 x 32 rows of pixels above the margin, 40 wide.
    cells = pixels[-8 - 64 :: 32][:2, :, :]
    middle = cells[:, np.arange(5) * 40 + 20 + pixels.shape[1] - 8 - 440]
    white, red, blue, black = [247, 247, 247], [178, 24, 43], [33, 102, 172], [0, 0, 0]
    assert middle[0].tolist() == [white] * 5
    assert middle[1, 0].tolist() == red and middle[1, 2].tolist() == black and middle[1, 3].tolist() == blue
    assert middle[1, 1].tolist() not in (white, blue) and middle[1, 1, 2] > middle[1, 1, 0]  # half: light blue

    big = load_map(np.random.default_rng().integers(0, 99, (58, 256)), [str(layer) for layer in range(58)])
    assert big.shape[0] < 900 and big.shape[1] < 1200

    board = TensorBoard(tmp_path)
    board.image("4_detail/expert_load", pixels, 5)
    board.close()
    (image,) = events_of(tmp_path).Images("4_detail/expert_load")
    assert (image.step, image.height, image.width) == (5, *pixels.shape[:2])


def test_tensorboard_hides_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in range(1, 6):
        first.write({"step": step, "loss": 1.0})
    first.close()
    time.sleep(1.1)  # event files are ordered by the second in their names
    second = TensorBoard(tmp_path, resumed_step=3)
    second.write({"step": 4, "loss": 2.0})
    second.close()
    assert scalars(tmp_path)["1_learn/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_found_by_whole_words(name: str, peak: float | None) -> None:
    assert known_peak_tflops(name) == peak


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the meter reads, to be set by hand."""
    now = [100.0]
    monkeypatch.setattr(training.metrics.time, "perf_counter", lambda: now[0])
    return now


def measure(clock: list[float], seconds: float, **more: Any) -> dict[str, float]:
    meter = Meter(flops_per_token=5e9, devices=4, device=torch.device("cpu"), **more)
    clock[0] += 7.0
    meter.start()
    clock[0] += seconds
    return meter.stop(tokens=8000)


def test_meter_counts_tokens_of_all_ranks_and_flops_of_one(clock: list[float]) -> None:
    measured = measure(clock, 2.0, peak_tflops=50.0)
    assert measured["step_seconds"] == pytest.approx(2.0)
    assert measured["tokens_per_second"] == pytest.approx(4000.0)
    assert measured["tflops_per_device"] == pytest.approx(5.0)
    assert measured["mfu"] == pytest.approx(0.1)


def test_without_a_known_peak_there_is_no_mfu(clock: list[float]) -> None:
    assert "mfu" not in measure(clock, 2.0)


def test_peak_memory_of_a_cpu_rank_is_the_processs_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert 2**26 < peak_memory_bytes(cpu) < 2**40  # a process with torch: some hundred MB
    monkeypatch.setattr(training.metrics.sys, "platform", "linux")
    usage = types.SimpleNamespace(ru_maxrss=3 * 2**20)
    monkeypatch.setattr(training.metrics.resource, "getrusage", lambda who: usage)
    assert peak_memory_bytes(cpu) == 3 * 2**30
    assert Meter(1.0, 1, cpu).stop(1)["peak_memory_gib"] == pytest.approx(3.0)


def test_memory_share_of_a_cpu_host_is_what_isnt_available(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "MemTotal:       8000 kB\nMemFree:         500 kB\nMemAvailable:   6000 kB\nHugePages_Total:       0\n"
    monkeypatch.setattr(training.metrics.Path, "read_text", lambda self, encoding: told)
    assert memory_share(torch.device("cpu")) == pytest.approx(0.25)
    assert Meter(1.0, 1, torch.device("cpu")).stop(1)["memory_share"] == pytest.approx(0.25)


def test_without_knowledge_of_the_hosts_memory_there_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, encoding: str) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(training.metrics.Path, "read_text", missing)
    assert "memory_share" not in Meter(1.0, 1, torch.device("cpu")).stop(1)
