"""--profile-pipeline: one step of a run is measured, and drawn beside its simulation.

Lives here: which step, and what is written about it. May import the rooms below; matplotlib where it is installed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from parallel.pipeline.measured import Measured, beside_simulation, write_measured
from parallel.pipeline.plot import draw_text
from parallel.pipeline.plot_png import draw_png
from parallel.pipeline.profile import ActionClock, measured_timeline
from parallel.pipeline.runtime import PipelineRuntime
from training.arguments import Arguments

logger = logging.getLogger(__name__)

WARM_UP = 4
"""Steps of a start before the measured one: the first ones allocate, connect and choose kernels."""


class PipelineProfile:
    """Measures one step of this start. before(), after(): around each step, on every rank.

    runtime: whose actions are timed; directory: where rank 0 writes; done: steps done before this start.
    """

    def __init__(self, runtime: PipelineRuntime, directory: Path, done: int, arguments: Arguments):
        self.runtime, self.directory = runtime, directory
        self.step = min(done + 1 + WARM_UP, arguments.training.train_iters)

    def before(self, step: int) -> None:
        """Take a clock to the step that is measured."""
        if step == self.step:
            self.runtime.clock = ActionClock(self.runtime.mesh.device)

    def after(self, step: int) -> None:
        """Gather, write and tell what was measured. Collective over the pipeline that rank 0 is in; others go on.

        The other pipelines, of other data-parallel and tensor-parallel ranks, compute the same table on other data.
        """
        clock, self.runtime.clock = self.runtime.clock, None
        axis = self.runtime.mesh.pp
        if clock is None or axis.ranks[0] != 0:
            return
        measured = measured_timeline(clock, axis, step)
        if axis.is_first:
            logger.info("%s", write_profile(self.directory, measured))


def write_profile(directory: Path, measured: Measured) -> str:
    """Write the measured time line, its trace and its pictures; returns what to tell of it."""
    file, trace = write_measured(directory, measured)
    panels, costs = beside_simulation(measured)
    until = max(timeline.makespan for _, timeline in panels)
    text = file.with_suffix(".txt")
    drawn = [draw_text(timeline, costs, 120, title=title, until=until, unit="ms") for title, timeline in panels]
    text.write_text("\n\n".join(drawn) + "\n", encoding="utf-8")
    picture = file.with_suffix(".png")
    try:
        draw_png(picture, panels, costs, "ms")
        files = f"{text}, {picture.name}, {file.name} and {trace.name}"
    except ModuleNotFoundError:
        files = f"{text}, {file.name} and {trace.name} (no PNG: matplotlib isn't installed)"
    (_, real), (_, simulated) = panels
    return (
        f"pipeline of step {measured.step}: idle {real.idle_share:.1%} measured, {simulated.idle_share:.1%} simulated "
        f"with the same times; see {files}"
    )
