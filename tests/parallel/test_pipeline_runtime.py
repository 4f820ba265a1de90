"""The pipeline on real ranks with toy stages: outputs and gradients are those of the stages in sequence on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel.buckets import Bucket
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.pipeline import runtime as runtime_module
from parallel.pipeline.catalogue import SCHEDULES
from parallel.pipeline.make import make_schedule
from parallel.pipeline.messages import plan_messages
from parallel.pipeline.runtime import PipelineRuntime
from parallel.pipeline.schedule import Action, Kind, Schedule
from parallel.sharding import Sharding
from parallel.weight_gradient import linear, will_add_its_gradient

RunRanks = Callable[..., list[Any]]
WIDTH = 5
SHAPE = torch.Size((3, 2, WIDTH))


class Toy(nn.Module):
    """One stage: tanh(x Wᵀ + b); the first starts from the micro-batch, the last ends in a scalar.

    W adds its gradient itself, so that it may be deferred; that of b comes by autograd's hook.
    """

    def __init__(self, seed: int, stage: int, last: bool):
        super().__init__()
        generator = torch.Generator().manual_seed(seed + stage)
        self.weight = will_add_its_gradient(nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5))
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH, generator=generator))
        for parameter in self.parameters():
            parameter.sharding = Sharding()  # type: ignore[attr-defined]
        self.last = last
        self.outputs: list[torch.Tensor] = []
        self.with_gradient: list[bool] = []

    def forward(self, x: torch.Tensor | None, microbatch: torch.Tensor) -> torch.Tensor:
        # Transposed: what a stage hands on need not be contiguous.
        y = (linear(microbatch if x is None else x, self.weight) + self.bias).tanh()
        y = y.transpose(0, 1).contiguous().transpose(0, 1)
        y = (y * microbatch.cos()).square().sum() if self.last else y
        self.outputs.append(y.detach().clone())
        self.with_gradient.append(torch.is_grad_enabled() and y.requires_grad)
        return y


def microbatches_of(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 + count)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def in_sequence(seed: int, stages: int, count: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Of the dense model: each stage's outputs and its parameters' gradients, in fp64."""
    toys = [Toy(seed, stage, stage == stages - 1).double() for stage in range(stages)]
    for microbatch in microbatches_of(seed, count):
        x = None
        for toy in toys:
            x = toy(x, microbatch.double())
        assert x is not None
        x.backward()
    return [toy.outputs for toy in toys], [[p.grad for p in toy.parameters()] for toy in toys]  # type: ignore[misc]


class NeverDone:
    """A send that looks unfinished until it is waited for."""

    def __init__(self, work: Any, waited: list[bool]):
        self.work, self.waited, self.number = work, waited, len(waited)
        waited.append(False)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.work.wait()
        self.waited[self.number] = True


def run_tables(seed: int, tables: list[Schedule]) -> list[dict[str, Any]]:
    """Every table in turn on one mesh, training, then evaluating, then training once more, by one runtime."""
    mesh = Mesh.create(Layout(pp=torch.distributed.get_world_size()))
    isend, waited = runtime_module.isend, list[bool]()
    found = []
    runtime, placement = None, None
    for table in tables:
        if table.placement != placement:
            placement = table.placement
            stages = {s: Toy(seed, s, s == table.stages - 1) for s in table.stages_of(mesh.pp.rank)}
            named = [(f"{s}.{name}", p) for s, toy in stages.items() for name, p in toy.named_parameters()]
            reducer = GradientReducer(named, mesh)
            runtime = PipelineRuntime(mesh, stages, torch.float32)
        assert runtime is not None
        microbatches = microbatches_of(seed, table.microbatches)
        evaluation = table.forward_only()
        record: dict[str, Any] = {"turns": {}}
        for turn in ("train", "evaluate", "train again"):
            reducer.zero()
            waited.clear()
            mesh.ledger.reset()
            for toy in stages.values():
                toy.outputs, toy.with_gradient = [], []
            if turn == "evaluate":
                runtime.run(evaluation, microbatches, SHAPE)
            else:
                if turn == "train again":  # edges are connected by now, so every send is one of the table's
                    runtime_module.isend = lambda *a: NeverDone(isend(*a), waited)  # type: ignore[assignment]
                    mesh.ledger.reset()
                runtime.run(table, microbatches, SHAPE, reducer)
                runtime_module.isend = isend
                record["launched"] = [bucket.launched for bucket in reducer.buckets]
                reducer.finish()
            record["turns"][turn] = {
                "outputs": {s: toy.outputs for s, toy in stages.items()},
                "gradients": {s: [p.main_grad.clone() for p in toy.parameters()] for s, toy in stages.items()},
                "with gradient": [flag for toy in stages.values() for flag in toy.with_gradient],
                "waited": list(waited),
                "sent": (mesh.ledger.calls("activations"), mesh.ledger.bytes("activations")),
                "sent back": (mesh.ledger.calls("gradients"), mesh.ledger.bytes("gradients")),
            }
        found.append(record)
    return found


def messages(table: Schedule, rank: int, kind: Kind) -> int:
    """How many a rank must send in that kind's direction: to another rank's stage, beyond neither end."""
    step = kind.hands_on
    owners = dict(enumerate(table.placement))
    return sum(a.kind.hands_on == step and owners.get(a.stage + step, rank) != rank for a in table.actions[rank])


TABLES = {
    2: [make_schedule(name, 2, m) for name in SCHEDULES for m in (1, 2, 5)],
    # Fewer micro-batches than ranks, too.
    4: [make_schedule(name, 4, m) for name in SCHEDULES for m in (1, 3, 6)],
}


@pytest.mark.parametrize("ranks", TABLES)
def test_every_table_computes_what_the_stages_compute_in_sequence(run_ranks: RunRanks, seed: int, ranks: int) -> None:
    results = run_ranks(ranks, run_tables, seed, TABLES[ranks], timeout=60.0)
    for number, table in enumerate(TABLES[ranks]):
        outputs, gradients = in_sequence(seed, table.stages, table.microbatches)
        for rank in range(ranks):
            for turn, seen in results[rank][number]["turns"].items():
                where = f"{table.name} of {table.microbatches}, rank {rank}, {turn}"
                assert tuple(seen["outputs"]) == table.stages_of(rank), where
                for stage, found in seen["outputs"].items():
                    torch.testing.assert_close([x.double() for x in found], outputs[stage], rtol=1e-4, atol=1e-5)
                    if turn == "evaluate":
                        assert not any(gradient.any() for gradient in seen["gradients"][stage]), where
                        continue
                    for gradient, expected in zip(seen["gradients"][stage], gradients[stage], strict=True):
                        error = (gradient - expected).norm() / expected.norm()
                        assert error < 1e-5, f"{where}: gradient of stage {stage} is off by {error:.1e}"
                assert set(seen["with gradient"]) == {turn != "evaluate"}, where


@pytest.mark.parametrize("ranks", TABLES)
def test_each_message_is_sent_once_and_waited_for(run_ranks: RunRanks, seed: int, ranks: int) -> None:
    """Between other ranks only; a rank that left with a send under way would close it under the receiver."""
    tables = TABLES[ranks][1::3]
    message = SHAPE.numel() * 4
    for rank, records in enumerate(run_ranks(ranks, run_tables, seed, tables)):
        for table, record in zip(tables, records, strict=True):
            forward, backward = (messages(table, rank, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
            last, evaluated = record["turns"]["train again"], record["turns"]["evaluate"]
            assert last["sent"] == (forward, forward * message), (rank, table.name)
            assert last["sent back"] == (backward, backward * message), (rank, table.name)
            assert last["waited"] == [True] * (forward + backward), (rank, table.name)
            assert evaluated["sent"] == last["sent"] and evaluated["sent back"] == (0, 0)


def test_buckets_are_on_their_way_when_the_last_backward_ends(run_ranks: RunRanks, seed: int) -> None:
    """The last backward of a stage launches its bucket, so that `finish` finds nothing left to launch."""
    for rank, records in enumerate(run_ranks(2, run_tables, seed, TABLES[2][2::3])):
        for table, record in zip(TABLES[2][2::3], records, strict=True):
            assert record["launched"] == [True], (rank, table.name)


def sends_and_waits(seed: int, table: Schedule) -> list[tuple[str, int]]:
    """In order: each send, each wait for one, and each computation, with the number of the send or action."""
    mesh = Mesh.create(Layout(pp=torch.distributed.get_world_size()))
    stages = {s: Toy(seed, s, s == table.stages - 1) for s in table.stages_of(mesh.pp.rank)}
    reducer = GradientReducer([(f"{s}.{n}", p) for s, toy in stages.items() for n, p in toy.named_parameters()], mesh)
    runtime = PipelineRuntime(mesh, stages, torch.float32)
    microbatches = microbatches_of(seed, table.microbatches)
    runtime.run(table, microbatches, SHAPE, reducer)  # connects
    reducer.finish()
    reducer.zero()
    happened: list[tuple[str, int]] = []
    compute, isend = runtime_module._Step._compute, runtime_module.isend

    class Send:
        def __init__(self, work: Any):
            self.work, self.number = work, sum(what == "send" for what, _ in happened)
            happened.append(("send", self.number))

        def is_completed(self) -> bool:
            return False

        def wait(self) -> None:
            happened.append(("wait", self.number))
            self.work.wait()

    def watched(step: Any, action: Action, incoming: Any) -> Any:
        happened.append(("compute", sum(what == "compute" for what, _ in happened)))
        return compute(step, action, incoming)

    runtime_module._Step._compute, runtime_module.isend = watched, lambda *a: Send(isend(*a))  # type: ignore
    try:
        runtime.run(table, microbatches, SHAPE, reducer)
    finally:
        runtime_module._Step._compute, runtime_module.isend = compute, isend  # type: ignore[method-assign]
    reducer.finish()
    return happened


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "gpipe"])
def test_no_rank_waits_for_its_send_before_it_must_have_been_received(
    run_ranks: RunRanks, seed: int, schedule: str
) -> None:
    table = make_schedule(schedule, 2, 4)
    plans = plan_messages(table)
    for rank, happened in enumerate(run_ranks(2, sends_and_waits, seed, table)):
        sent = sorted(plans[rank].sent)
        received = {sent.index(i): place for place, over in enumerate(plans[rank].over) for i in over}
        computed = -1
        for what, number in happened:
            computed = number if what == "compute" else computed
            if what == "wait":
                assert computed >= received.get(number, len(table.actions[rank]) - 1), (rank, number, computed)
        assert sum(what == "wait" for what, _ in happened) == len(sent)


def order_of_launches(seed: int, table: Schedule) -> list[tuple[str, list[str]]]:
    """For each bucket of this rank, when it was launched, after which action, and its parameters."""
    mesh = Mesh.create(Layout(pp=torch.distributed.get_world_size()))
    stages = {s: Toy(seed, s, s == table.stages - 1) for s in table.stages_of(mesh.pp.rank)}
    named = [(f"{s}.{name}", p) for s, toy in stages.items() for name, p in toy.named_parameters()]
    reducer = GradientReducer(named, mesh, bucket_cap_mb=1e-9)
    names = {p: name for name, p in named}
    launched: list[tuple[str, list[str]]] = []
    running = [""]
    compute, launch = runtime_module._Step._compute, Bucket.launch

    def watched_compute(step: Any, action: Action, incoming: Any) -> Any:
        running[0] = str(action)
        return compute(step, action, incoming)

    def watched_launch(bucket: Bucket, compress: bool) -> None:
        launched.append((running[0], [names[p] for p in bucket.parameters]))
        launch(bucket, compress)

    runtime_module._Step._compute, Bucket.launch = watched_compute, watched_launch  # type: ignore[method-assign]
    try:
        PipelineRuntime(mesh, stages, torch.float32).run(
            table, microbatches_of(seed, table.microbatches), SHAPE, reducer
        )
    finally:
        runtime_module._Step._compute, Bucket.launch = compute, launch  # type: ignore[method-assign]
    reducer.finish()
    return launched


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bucket_starts_with_the_last_gradient_of_its_parameters(
    run_ranks: RunRanks, seed: int, schedule: str
) -> None:
    """Not at the end of the table, and not before a weight gradient that still waits; buckets in one order."""
    table = make_schedule(schedule, 2, 4)
    for rank, launched in enumerate(run_ranks(2, order_of_launches, seed, table)):
        row = [str(action) for action in table.actions[rank]]
        assert len(launched) == 2 * len(table.stages_of(rank)), "one bucket a parameter"
        so_far = 0
        for action, names in launched:
            stage, name = names[0].split(".")
            kinds = "BW" if name == "weight" else "BI"
            last = max(i for i, a in enumerate(row) if a[0] in kinds and a[1:].startswith(f"{stage}."))
            # Buckets are launched in one order, so one may have to wait for those before it.
            so_far = max(so_far, last)
            assert row.index(action) == so_far, (rank, names, action)


def wrong_calls() -> list[str]:
    mesh = Mesh.create(Layout(pp=2))
    runtime = PipelineRuntime(mesh, {mesh.pp.rank: Toy(0, mesh.pp.rank, mesh.pp.rank == 1)}, torch.float32)
    legal = make_schedule("1f1b", 2, 2)
    swapped = Schedule("swapped", 2, (0, 1), (legal.actions[0], legal.actions[1][::-1]))
    errors = []
    for table, count in (
        (legal, 3),
        (swapped, 2),
        (make_schedule("gpipe", 4, 2), 2),
        (make_schedule("gpipe", 1, 2), 2),
    ):
        try:
            runtime.run(table, microbatches_of(0, count), SHAPE)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_wrong_tables_are_refused_before_anything_is_sent(run_ranks: RunRanks) -> None:
    for errors in run_ranks(2, wrong_calls):
        assert len(errors) == 4
        assert errors[0] == "1f1b is for 2 micro-batches, got 3"
        assert "swapped deadlocks" in errors[1]
        assert errors[2] == "gpipe is a table for 4 pipeline ranks, this pipeline has 2"
        assert errors[3] == "gpipe is a table for 1 pipeline ranks, this pipeline has 2"
