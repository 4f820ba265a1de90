"""Every table is checked before it runs: complete, in order of its dependencies, free of deadlock, within its memory.

Lives here: pure checks of a `Schedule`. Imports `schedule` only. What is checked: each action once and on its rank, no
wait for an action that never comes, and on every directed edge between ranks messages are received in the order they
are sent. That is enough while a pair of ranks exchanges activations in one direction and gradients in the other, each
with a communicator of its own; placements that send one kind both ways need more (NCCL queues a pair's operations).
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Kind, Schedule


def needs(action: Action, stages: int) -> list[Action]:
    """The actions that must have run before `action`."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage > 0 else []
    before = [Action(Kind.FORWARD, stage, microbatch)]
    if stage < stages - 1:
        before.append(Action(Kind.BACKWARD, stage + 1, microbatch))
    return before


def check(schedule: Schedule) -> None:
    """Raise ValueError, naming rank and action, unless the table is legal."""
    _check_complete(schedule)
    _check_progress(schedule)
    _check_edges(schedule)


def peak_activations(schedule: Schedule) -> list[int]:
    """For each rank the largest number of micro-batches (per stage) whose activations it keeps at once."""
    peaks = []
    for row in schedule.actions:
        kept = peak = 0
        for action in row:
            kept += 1 if action.kind is Kind.FORWARD else -1
            peak = max(peak, kept)
        peaks.append(peak)
    return peaks


def _check_complete(schedule: Schedule) -> None:
    training = any(a.kind is Kind.BACKWARD for row in schedule.actions for a in row)
    kinds = list(Kind) if training else [Kind.FORWARD]
    for stage, owner in enumerate(schedule.placement):
        if not 0 <= owner < schedule.ranks:
            raise ValueError(
                f"{schedule.name}: stage {stage} lies on rank {owner}, the table has {schedule.ranks} ranks"
            )
    for rank, row in enumerate(schedule.actions):
        expected = {
            Action(kind, stage, m)
            for kind in kinds
            for stage in schedule.stages_of(rank)
            for m in range(schedule.microbatches)
        }
        if len(row) != len(set(row)):
            twice = next(a for i, a in enumerate(row) if a in row[:i])
            raise ValueError(f"{schedule.name}: rank {rank} runs {twice} twice")
        if missing := expected - set(row):
            raise ValueError(f"{schedule.name}: rank {rank} never runs {min(missing, key=str)}")
        if extra := set(row) - expected:
            raise ValueError(f"{schedule.name}: rank {rank} runs {min(extra, key=str)}, which is not its own")


def _check_progress(schedule: Schedule) -> None:
    done: set[Action] = set()
    position = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                if any(before not in done for before in needs(action, schedule.stages)):
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(schedule.actions) if position[r] < len(row)]
    if stuck:
        raise ValueError(f"{schedule.name} deadlocks: {'; '.join(stuck)} wait for actions that never come")


def _check_edges(schedule: Schedule) -> None:
    """On every directed edge between ranks the order of sends is the order of receives."""
    sent: dict[tuple[Kind, int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[Kind, int, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for kind, stage, microbatch in row:
            step = 1 if kind is Kind.FORWARD else -1
            if 0 <= stage + step < schedule.stages and schedule.placement[stage + step] != rank:
                edge = (kind, rank, schedule.placement[stage + step])
                sent.setdefault(edge, []).append((stage + step, microbatch))
            if 0 <= stage - step < schedule.stages and schedule.placement[stage - step] != rank:
                edge = (kind, schedule.placement[stage - step], rank)
                received.setdefault(edge, []).append((stage, microbatch))
    for edge, messages in sent.items():
        if received.get(edge) != messages:
            kind, source, target = edge
            what = "activations" if kind is Kind.FORWARD else "gradients"
            raise ValueError(
                f"{schedule.name}: rank {source} sends {what} to rank {target} in another order than they are received"
            )
