"""The reducer's gradients of the whole DeepSeek model are those of torch's DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from model.microbatch import MicroBatch, set_denominators
from parallel.mesh import Layout
from tests.layouts import Job, microbatches_of_step
from tests.parallel.test_gradients_of_model import SMALL, engine_of

RunRanks = Callable[..., list[Any]]


def off_from_ddp(seed: int, micro_batches: int, flags: dict[str, Any]) -> tuple[dict[str, float], float]:
    """By parameter, how far the reducer is off from DDP on the same batches, relative to the gradient's norm."""
    overrides = {**SMALL, "num_nextn_predict_layers": 1, "aux_loss_alpha": 0.01}
    job = Job(Layout(), overrides=overrides, flags={"seed": seed, **flags}, length=24)
    engine = engine_of(job)
    mesh, (stage,) = engine.mesh, engine.stages.values()
    ddp = DistributedDataParallel(copy.deepcopy(stage), bucket_cap_mb=0.01)  # the copy has no hooks
    job = Job(Layout(), overrides=overrides, global_batch=micro_batches * mesh.world_size, length=24)

    def batches() -> list[MicroBatch]:
        return microbatches_of_step(job, seed % 1000, job.model().vocab_size, mesh.dp.rank, mesh.dp.size)

    engine.forward_backward(batches())
    theirs = batches()
    set_denominators(theirs, job.model().num_mtp_layers, mesh)
    for batch in theirs:
        with nullcontext() if batch is theirs[-1] else ddp.no_sync():
            ddp(None, batch).backward()
    off = {}
    expected = dict(ddp.module.named_parameters())
    for name, parameter in engine.named_parameters():
        gradient = expected[name].grad * mesh.world_size  # type: ignore[operator]  # DDP's is the mean over ranks
        off[name] = float((parameter.main_grad - gradient).norm() / gradient.norm())  # type: ignore[operator]
    return off, float(engine.reducer.norm())


@pytest.mark.parametrize("bucket_cap_mb", [0.02, 25.0])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 3), (4, 2)])
def test_gradients_of_the_model_equal_ddp(
    run_ranks: RunRanks, seed: int, ranks: int, micro_batches: int, bucket_cap_mb: float
) -> None:
    found = run_ranks(ranks, off_from_ddp, seed, micro_batches, {"bucket_cap_mb": bucket_cap_mb})
    for off, norm in found:
        worst = max(off, key=off.__getitem__)
        assert off[worst] <= 1e-6, f"gradient of {worst} is off by {off[worst]:.1e}"
        assert norm == found[0][1] > 0
