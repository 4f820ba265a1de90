"""Improves a table by small moves on its critical path, whichever rule made it.

Lives here: `improve_rows`. Imports `rows` only. Sources: adjacent swaps on the critical path are the moves that can
shorten a job shop's makespan (van Laarhoven and others, 1992); late acceptance (Burke and Bykov, 2017) leaves local
optima without a temperature to set.
"""

from __future__ import annotations

from random import Random

from parallel.pipeline.rows import TOLERANCE, Problem, Rows, ends_of, fits

HISTORY = 40
"""A move is kept where the makespan is no longer than the one this many moves ago."""


def improve_rows(problem: Problem, rows: Rows, evaluations: int, random: Random) -> tuple[float, Rows]:
    """The best table met in `evaluations` moves, and its makespan; `rows` must be legal and within the limit."""
    ends = ends_of(problem, rows)
    if ends is None:
        raise ValueError("only a table without deadlock can be improved")
    current = best = max(row[-1] for row in ends)
    best_rows = rows
    path = critical_pairs(problem, rows, ends)
    history = [current] * HISTORY
    slack = TOLERANCE * best
    for number in range(evaluations):
        if not path or best <= problem.lower_bound + slack:
            break
        rank, place = path[int(random.random() * len(path))]
        row = moved(problem, rows[rank], ends[rank], place, random)
        if row is None or not fits(problem, row):
            continue
        tried = [*rows[:rank], row, *rows[rank + 1 :]]
        tried_ends = ends_of(problem, tried)
        if tried_ends is None:
            continue
        found = max(row[-1] for row in tried_ends)
        if found <= current + slack or found <= history[number % HISTORY] + slack:
            rows, ends, current = tried, tried_ends, found
            path = critical_pairs(problem, rows, ends)
            if current < best - slack:
                best, best_rows = current, rows
        history[number % HISTORY] = current
    return best, best_rows


def critical_pairs(problem: Problem, rows: Rows, ends: list[list[float]]) -> list[tuple[int, int]]:
    """(rank, place) of each action on the critical path that holds up the next one of its rank without a gap."""
    source, time = problem.source, problem.time
    where: list[list[int]] = [[] for _ in source]
    occurrence = []
    for row in rows:
        numbers = []
        for place, action in enumerate(row):
            numbers.append(len(where[action]))
            where[action].append(place)
        occurrence.append(numbers)
    slack = TOLERANCE * problem.lower_bound
    rank = max(range(len(rows)), key=lambda r: ends[r][-1])
    place = len(rows[rank]) - 1
    pairs = []
    while True:
        action = rows[rank][place]
        start = ends[rank][place] - time[action]
        if place > 0 and ends[rank][place - 1] >= start - slack:
            place -= 1
            if rows[rank][place] != action:
                pairs.append((rank, place))
            continue
        needed = source[action]
        if needed < 0:
            return pairs
        n = occurrence[rank][place]
        rank, place = problem.rank[needed], where[needed][n]


def moved(problem: Problem, row: list[int], ends: list[float], place: int, random: Random) -> list[int] | None:
    """The row with the action at `place` and the next one swapped, or one of the two moved further; None: not allowed.

    A W that holds others up moves into one of the rank's gaps or to its end.
    """
    stages, time = problem.stages, problem.time
    action, following = row[place], row[place + 1]
    changed = row.copy()
    if action >= 2 * stages and random.random() < 0.7:
        slack = TOLERANCE * problem.lower_bound
        gaps = [i for i in range(1, len(row)) if ends[i] - time[row[i]] > ends[i - 1] + slack]
        to = (gaps + [len(row)])[int(random.random() * (len(gaps) + 1))]
        changed.pop(place)
        changed.insert(to - (to > place), action)
        return changed
    distance = 1 if random.random() < 0.6 else 1 + int(random.random() * 5)
    if random.random() < 0.5:  # the following one earlier
        to = max(0, place + 1 - distance)
        passed = row[to : place + 1]
        changed.insert(to, changed.pop(place + 1))
        mover = following
    else:  # the first one later
        to = min(len(row) - 1, place + distance)
        passed = row[place + 1 : to + 1]
        changed.insert(to, changed.pop(place))
        mover = action
    if not problem.own_channels and mover < 2 * stages:
        # What shares a channel must be sent and received in one order: F's of a rank keep theirs, and so do I's.
        if any(other != mover and other // stages == mover // stages for other in passed):
            return None
    return None if mover in passed else changed
