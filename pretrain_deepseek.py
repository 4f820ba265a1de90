"""The front door: parse, build, train.

    torchrun --nproc-per-node 8 pretrain_deepseek.py --model configs/models/tiny_v3.json --data-path PREFIX --run-dir
    RUN

`python pretrain_deepseek.py --help` lists every flag; `scripts/pretrain_multinode.sh` does the launching.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from datetime import timedelta

from training.command_line import parse
from training.deepspeed_config import completed
from training.failures import ConfigurationError, FailureReport, leave
from training.validate import read_model_config, validate


def without_local_rank(words: list[str]) -> list[str]:
    """Flags without the --local-rank=N that `python -m torch.distributed.launch` adds; LOCAL_RANK says the same."""
    return [word for word in words if not re.fullmatch(r"--local[-_]rank=\d+", word)]


def tell_waiting_ranks(message: str) -> None:
    """To those that wait for this rank, which has failed before it could join them."""
    from parallel import launch  # imports torch

    launch.tell_waiting_ranks(message)


def main() -> None:
    """One rank's life. Every error ends the process with one clear message, see `training.failures`."""
    with FailureReport() as report:
        report.tell_peers = tell_waiting_ranks
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        arguments, notices = completed(parse(without_local_rank(sys.argv[1:])), world_size)
        config = read_model_config(arguments)

        # torch is imported from here on, so that --help and wrong flags answer at once.
        from parallel.launch import destroy, gpu_count, init_distributed

        validate(arguments, config, world_size, gpu_count())
        if arguments.compression.kernels is not None:
            os.environ["KERNELS"] = arguments.compression.kernels  # kernels/backend.py reads it

        from training.datasets import open_data

        data = open_data(arguments, config)

        from parallel.mesh import Layout, Mesh
        from training.logs import RankLogs
        from training.rng import check_agreement, set_seed
        from training.run_directory import prepare
        from training.trainer import Trainer

        try:
            distributed = arguments.distributed
            device = init_distributed(
                distributed.distributed_backend,
                distributed.distributed_timeout_minutes,
                distributed.distributed_start_timeout_seconds,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        report.tell_peers = None  # all have met: they notice by themselves
        timeout = timedelta(minutes=distributed.distributed_timeout_minutes)
        world = Mesh.create(Layout(), device, timeout).world
        set_seed(arguments.run.seed, world)
        # Before the real mesh: ranks that disagree on the layout would never find each other in it.
        check_agreement(arguments, world)

        parallel = arguments.parallel
        layout = Layout(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
        )
        mesh = Mesh.create(layout, device, timeout)
        start = prepare(arguments, mesh.world)
        report.directory = start.directory.logs
        with RankLogs(start.directory.logs, mesh.rank, mesh.coordinates()) as logs:
            for note in (*start.notes, *notices):
                logging.getLogger(__name__).info(note)
            trainer = Trainer(arguments, config, mesh, data, start, logs)
            report.doing = trainer.engine.runtime.doing
            trainer.run()
        destroy()


if __name__ == "__main__":
    main()
    leave()
