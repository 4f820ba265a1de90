"""Schedules on a V: rank r holds stages r and 2·ranks-1-r, so the first rank holds the first stage and the last.

Lives here: pure functions from (ranks, micro-batches) to a `Schedule`. Imports `schedule` only. Sources: ZB-V
(2401.10241), V-Half and V-Min (controllable memory, 2405.15362), DualPipeV (DeepSeek-V3, 2412.19437, and DualPipe's
README), whose steady phase can run a forward together with a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction

from parallel.pipeline.schedule import Action, Kind, Schedule

DOWN, UP = 0, 1
"""A rank's two stages: on the way from the first rank to the last, and on the way back."""


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of each stage: down the V and up again."""
    return (*range(ranks), *reversed(range(ranks)))


class _Row:
    """One rank's row as it is written: each call takes the next micro-batch of that kind on that stage."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._waiting: deque[Action] = deque()
        self._next: dict[tuple[bool, int], int] = {}
        self.actions: list[Action] = []
        self.together: set[Action] = set()

    def _add(self, kind: Kind, side: int) -> Action:
        key = kind is Kind.FORWARD, side
        microbatch = self._next.get(key, 0)
        self._next[key] = microbatch + 1
        action = Action(kind, self._stages[side], microbatch)
        self.actions.append(action)
        return action

    def forward(self, side: int) -> None:
        self._add(Kind.FORWARD, side)

    def backward(self, side: int) -> None:
        self._add(Kind.BACKWARD, side)

    def forward_and_backward(self, forward: int, backward: int, together: bool) -> None:
        """F and B one after the other, or together."""
        self._add(Kind.FORWARD, forward)
        if together:
            self.together.add(self.actions[-1])
        self._add(Kind.BACKWARD, backward)

    def input_gradient(self, side: int) -> None:
        """I, whose W waits until `weight_gradient`."""
        action = self._add(Kind.INPUT_GRADIENT, side)
        self._waiting.append(action._replace(kind=Kind.WEIGHT_GRADIENT))

    def weight_gradient(self) -> None:
        """The W that waits longest."""
        self.actions.append(self._waiting.popleft())

    def all_weight_gradients(self) -> None:
        while self._waiting:
            self.weight_gradient()


def _by_phases(
    name: str, ranks: int, microbatches: int, fewest: int, peak: float, write: Callable[[_Row, int, int], None]
) -> Schedule:
    """The table whose rows `write(row, rank, microbatches)` writes.

    Phases are published for `fewest` micro-batches and more. A table stays legal when one of its micro-batches is left
    out everywhere, so fewer micro-batches take the table of `fewest` without the last ones.
    """
    rows, together = [], []
    for rank in range(ranks):
        row = _Row(rank, ranks)
        write(row, rank, max(microbatches, fewest))
        left = tuple(action for action in row.actions if action.microbatch < microbatches)
        pairs = zip(row.actions, row.actions[1:], strict=False)
        whole = {forward for forward, b in pairs if forward in row.together and b.microbatch < microbatches}
        rows.append(left)
        together.append(tuple(place for place, action in enumerate(left) if action in whole))
    promised = min(peak, microbatches)
    pairs_of_ranks = tuple(together) if any(together) else ()
    return Schedule(name, microbatches, v_placement(ranks), tuple(rows), promised, pairs_of_ranks)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """1F1B's memory, and no rank waits once it has begun where F, I and W take the same time."""

    def write(row: _Row, rank: int, count: int) -> None:
        ahead = 2 * (ranks - rank) - 1
        for _ in range(ahead):  # 1. until the first micro-batch is back from the last rank
            row.forward(DOWN)
        for _ in range(rank):  # 2. until it has passed the last stage and its gradient is here
            row.forward(UP)
            row.forward(DOWN)
        for _ in range(ranks - rank):  # 3. until a gradient is back on the way down
            row.forward(UP)
            row.input_gradient(UP)
            row.weight_gradient()
        for i in range(count - ranks):  # 4. steady, with a forward less when there are no more
            if ahead + rank + i < count:
                row.forward(DOWN)
            row.input_gradient(DOWN)
            row.weight_gradient()
            row.forward(UP)
            row.input_gradient(UP)
            row.weight_gradient()
        for _ in range(rank):  # 5. no forwards are left to fill gaps: weight gradients do, later
            row.input_gradient(DOWN)
            row.input_gradient(UP)
        for _ in range(ranks - rank):
            row.input_gradient(DOWN)
            row.weight_gradient()
        row.all_weight_gradients()  # 6. nobody waits for these

    return _by_phases("zb-v", ranks, microbatches, 2 * ranks - 1, ranks, write)


def dualpipe_v(ranks: int, microbatches: int, together: bool = False) -> Schedule:
    """DualPipe folded onto its first half, without a second copy of the parameters.

    W is split off where others wait for I: in the first and the last phases. In the steady phase a forward stands
    before each backward of another micro-batch. together: they run so, which hides the messages inside a stage; since
    a forward is handed on only when its backward ends, ranks idle (ranks - 1)/2 forwards of a rank longer.
    """

    def write(row: _Row, rank: int, count: int) -> None:
        after = ranks - rank - 1
        for _ in range(2 * after):  # 1.
            row.forward(DOWN)
        for _ in range(rank + 1):  # 2.
            row.forward(DOWN)
            row.forward(UP)
        for _ in range(after):  # 3.
            row.input_gradient(UP)
            row.weight_gradient()
            row.forward(UP)
        for i in range(count - 2 * ranks + rank + 1):  # 4. steady
            # The last rank's first backward is what all others wait for: it isn't held up by a forward.
            row.forward_and_backward(DOWN, UP, together and (rank < ranks - 1 or i > 0))
            row.forward_and_backward(UP, DOWN, together)
        for _ in range(after):  # 5.
            row.backward(UP)
            row.forward_and_backward(UP, DOWN, together)
        for i in range(2 * (rank + 1)):  # 6. up and down in turn: whole first, then split
            side = DOWN if i % 2 else UP
            if i <= rank:
                row.backward(side)
            else:
                row.input_gradient(side)
        for _ in range(after):  # 7.
            row.weight_gradient()
            row.input_gradient(DOWN)
        row.all_weight_gradients()  # 8.

    name = "dualpipe-v, overlapped" if together else "dualpipe-v"
    return _by_phases(name, ranks, microbatches, 2 * ranks, ranks + 0.5, write)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half of 1F1B's memory, at no more than half of its idle time where F, I and W take the same time.

    Forwards go down the V a rank a cell and up a rank in two, input gradients the same: what a rank keeps of its two
    stages adds up to as much on every rank.
    """
    # Where ranks are even, I down would fall on the cell of F up, a multiple of the period earlier: three cells later.
    delay = 0 if ranks % 2 else 3

    def cells(rank: int) -> tuple[int, int, int, int]:
        return rank, 3 * ranks - 2 - 2 * rank, 3 * ranks - 1 + rank, 6 * ranks - 2 - 2 * rank + delay

    return _squeezed("v-half", ranks, microbatches, Fraction(ranks, 2) + 1, cells)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of 1F1B's memory: every wave goes a rank a cell, the fastest there is."""
    # Where ranks divide by three, the waves' cells fall on each other, six cells being the period: two cells later.
    delay = 0 if ranks % 3 else 2

    def cells(rank: int) -> tuple[int, int, int, int]:
        return rank, 2 * ranks - 1 - rank, 2 * ranks + rank + delay, 4 * ranks - 1 - rank + delay

    return _squeezed("v-min", ranks, microbatches, Fraction(ranks + 4, 3), cells)


PERIOD = 6
"""Cells after which a pattern repeats with the next micro-batch: F, I and W of a rank's two stages."""


def _squeezed(
    name: str, ranks: int, microbatches: int, peak: Fraction, cells: Callable[[int], tuple[int, int, int, int]]
) -> Schedule:
    """The table of a repeating pattern, run as early as its order and its memory allow.

    cells(rank): when micro-batch 0 has its F down, F up, I up and I down on that rank, in cells of one action each; no
    two may be equal modulo the period. Their order is kept, but for an I that would wait for another rank: the other
    stage's next I may overtake it. Each W runs when its rank would wait for another one, or keeps as much as `peak`
    allows, in one rank's share of one micro-batch.
    """
    todo: list[list[deque[tuple[int, Action]]]] = []  # of each rank: forwards, I up, I down, each with its cell
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        f_down, f_up, i_up, i_down = cells(rank)
        forwards, i_ups, i_downs = [], [], []
        for m in range(microbatches):
            forwards.append((f_down + PERIOD * m, Action(Kind.FORWARD, down, m)))
            forwards.append((f_up + PERIOD * m, Action(Kind.FORWARD, up, m)))
            i_ups.append((i_up + PERIOD * m, Action(Kind.INPUT_GRADIENT, up, m)))
            i_downs.append((i_down + PERIOD * m, Action(Kind.INPUT_GRADIENT, down, m)))
        forwards.sort(key=lambda entry: entry[0])
        todo.append([deque(forwards), deque(i_ups), deque(i_downs)])
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    waiting: list[deque[Action]] = [deque() for _ in range(ranks)]
    kept = [0] * ranks
    done: set[Action] = set()

    def may_run(rank: int, action: Action) -> bool:
        if action.kind is Kind.FORWARD and kept[rank] == int(2 * peak):
            return False
        if action.kind is Kind.INPUT_GRADIENT and action._replace(kind=Kind.FORWARD) not in done:
            return False
        source = action.stage - action.kind.hands_on
        return not 0 <= source < 2 * ranks or action._replace(stage=source) in done

    def choose(rank: int) -> Action | None:
        """What a rank does in this cell."""
        in_order = sorted((queue for queue in todo[rank] if queue), key=lambda queue: queue[0][0])
        if in_order and in_order[0][0][1].kind is Kind.INPUT_GRADIENT:
            candidates = [queue for queue in in_order if queue[0][1].kind is Kind.INPUT_GRADIENT]
        else:
            candidates = in_order[:1]
        for queue in candidates:
            if may_run(rank, queue[0][1]):
                return queue.popleft()[1]
        return waiting[rank].popleft() if waiting[rank] else None

    while any(map(any, todo)) or any(waiting):
        chosen = [choose(rank) for rank in range(ranks)]  # by what was done before this cell
        assert any(chosen), f"{name}: {ranks} ranks stand still"
        for rank, action in enumerate(chosen):
            if action is None:
                continue
            rows[rank].append(action)
            done.add(action)
            if action.kind is Kind.FORWARD:
                kept[rank] += 1
            elif action.kind is Kind.INPUT_GRADIENT:
                waiting[rank].append(action._replace(kind=Kind.WEIGHT_GRADIENT))
            else:
                kept[rank] -= 1
    promised = min(float(peak), microbatches)
    return Schedule(name, microbatches, v_placement(ranks), tuple(map(tuple, rows)), promised_peak=promised)
