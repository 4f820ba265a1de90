"""--profile-pipeline: one step of a run is measured, and drawn beside its simulation.

Lives here: which step, and what is written about it. May import the rooms below; matplotlib where it is installed.
"""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

from parallel.pipeline.measured import Measured, beside_simulation, write_measured
from parallel.pipeline.plot import draw_texts
from parallel.pipeline.plot_png import draw_png
from parallel.pipeline.profile import ActionClock, measured_timeline
from parallel.pipeline.runtime import PipelineRuntime
from training.arguments import Arguments

logger = logging.getLogger(__name__)

WARM_UP = 4
"""Steps of a start before the measured one: the first ones allocate, connect and choose kernels."""

WIDTH = 120
"""Columns of the drawing."""


class PipelineProfile:
    """Measures one step of this start. before(), after(): around each step, on every rank.

    runtime: whose actions are timed; directory: where rank 0 writes; done: steps done before this start; stages: what
    is written of them.
    """

    def __init__(self, runtime: PipelineRuntime, directory: Path, done: int, arguments: Arguments, stages: str):
        self.runtime, self.directory, self.stages = runtime, directory, stages
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
            try:
                logger.info("%s", write_profile(self.directory, measured, self.stages))
            except OSError as error:  # a full disk is no reason to lose the run
                logger.warning("the pipeline of step %d can't be written to %s: %s", step, self.directory, error)


def write_profile(directory: Path, measured: Measured, stages: str) -> str:
    """Write the measured time line, its trace and its pictures; returns what to tell of it.

    stages: the line on the division of layers. Raises OSError where a file can't be written.
    """
    file, trace = write_measured(directory, measured)
    panels, costs = beside_simulation(measured)
    text = file.with_suffix(".txt")
    drawn = draw_texts(panels, costs, WIDTH, unit="ms")
    text.write_text(f"{drawn}\n\n{textwrap.fill(stages, WIDTH)}\n", encoding="utf-8")
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
