"""The training loop and its surroundings: data in, steps, validation, metrics, checkpoints.

Lives here: what happens around `Engine.train_step`. May import every room below `tools`. One rank (rank 0) writes
metrics, TensorBoard and the terminal; every rank logs to its own file.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
from pathlib import Path
from typing import Any

import torch

from data.batches import Batches, MicroBatchTensors, ValidationSteps
from model.config import DeepSeekConfig
from model.flops import flops_per_token, parameter_count
from model.microbatch import MicroBatch
from parallel.comm import all_reduce_, gather_objects
from parallel.mesh import Mesh
from training import checkpoint
from training.advice import CommunicationWatch, CompressionWatch, Reduction
from training.arguments import Arguments
from training.command_line import to_yaml
from training.compression import (
    choose_kernels,
    compression_options,
    exchange_of,
    record_of,
    what_is_compressed,
)
from training.datasets import RunData, bigram_loss
from training.engine import Engine, StepResult
from training.failures import ConfigurationError
from training.load_map import load_map
from training.logs import RankLogs
from training.metrics import Meter, MetricsFile, TensorBoard
from training.pipeline import stages_in_words
from training.pipeline_profile import PipelineProfile
from training.precision import check_device
from training.progress import Progress
from training.run_directory import Start
from training.schedule import LearningRateSchedule, lr_at
from training.validate_compression import compression_warnings
from training.validate_zero import zero_warnings

logger = logging.getLogger(__name__)


class Trainer:
    """One run, from its first or its resumed step to the last. Building it is collective.

    config: the model with the flags' overrides applied; start: how the run directory was entered; logs: this rank's.
    """

    def __init__(
        self,
        arguments: Arguments,
        config: DeepSeekConfig,
        mesh: Mesh,
        data: RunData,
        start: Start,
        logs: RankLogs,
    ):
        self.arguments, self.config, self.mesh, self.data = arguments, config, mesh, data
        self.directory, self.logs = start.directory, logs
        self.writes = mesh.world.is_first
        self.schedule = LearningRateSchedule.from_arguments(arguments)
        if (slow := check_device(arguments.training.precision, mesh.device)) and self.writes:
            logger.warning("%s", slow)
        if options := compression_options(arguments.compression):
            choose_kernels(options, mesh.device)
        self.engine = Engine(config, arguments, mesh)
        self.done = self._load(start)
        self.train_batches, self.validation = self._batches()
        self.bigram_loss: float | None = None
        if arguments.data.bigram_baseline and self.writes and data.valid is not None:
            logger.info("fitting the bigram baseline on the run's training tokens")
            self.bigram_loss = bigram_loss(arguments, config, data)
        training = arguments.training
        self.meter = Meter(
            flops_per_token(config, training.seq_length), mesh.world_size, mesh.device, arguments.logging.peak_tflops
        )
        self.communication = self._communication_watch()
        codec = arguments.compression.grad_compression
        self.compression = CompressionWatch(codec) if self.writes and codec != "none" else None
        self.profile: PipelineProfile | None = None
        if arguments.logging.profile_pipeline:
            self.profile = PipelineProfile(
                self.engine.runtime, self.directory.pipeline, self.done.step, arguments, self._stages_in_words()
            )

    def run(self) -> None:
        """Train to --train-iters, validate, save; return when all is on disk. Collective."""
        training, checkpoints = self.arguments.training, self.arguments.checkpoint
        last = training.train_iters
        self._say_what_runs()
        metrics = MetricsFile(self.directory.metrics, self.done.step) if self.writes else None
        board = TensorBoard(self.directory.tensorboard, self.done.step) if self.writes else None
        if board is not None:
            board.text("configuration", to_yaml(self.arguments))
        interval = self.arguments.logging.log_interval
        # What exists now lives to the end: without it, collections of garbage took 6 % of a small model's step.
        gc.collect()
        gc.freeze()
        try:
            with Progress(last, self.done.step, interval, enabled=self.writes) as progress:
                for step in range(self.done.step + 1, last + 1):
                    self.logs.step = step
                    if self.profile is not None:
                        self.profile.before(step)
                    record, result = self._step(step)
                    if self.profile is not None:
                        self.profile.after(step)
                    if self.validation and (step % training.eval_interval == 0 or step == last):
                        record |= self._validate()
                    if metrics is not None and board is not None:
                        metrics.write(record)
                        board.write(record)
                        if step % interval == 0 or step == last:
                            self._show_loads(board, result, step)
                    progress.update(record)
                    logger.info("step %d: %s", step, _short(record), extra={"terminal": False})
                    if step == last or (checkpoints.save_interval and step % checkpoints.save_interval == 0):
                        self._save()
        finally:
            gc.unfreeze()
            self.train_batches.close()
            if metrics is not None and board is not None:
                metrics.close()
                board.close()

    def _step(self, step: int) -> tuple[dict[str, Any], StepResult]:
        self.meter.start()
        lr = lr_at(self.done.consumed_samples, self.schedule)
        result, overflows = self._until_taken(step, lr)
        training = self.arguments.training
        self.done = checkpoint.Position(step, self.train_batches.consumed_samples)
        loss = result.losses["lm"]
        tokens = training.global_batch_size * training.seq_length
        exposed, measured = self.engine.reducer.exposed_seconds, self.meter.stop(tokens)
        exchange = exchange_of(self.engine.reducer)
        said = None
        if exchange is None and self.communication:  # what it advises is for gradients in fp32
            said = self.communication.step(exposed, measured["step_seconds"])
        elif exchange and self.compression:
            said = self.compression.step(exchange)
        if said:
            logger.warning("%s", said)
        mtp = [value for name, value in result.losses.items() if name.startswith("mtp")]
        balance = self.engine.balance
        record = {
            "step": step,
            "loss": loss,
            **({"mtp_loss": sum(mtp) / len(mtp)} if mtp else {}),
            **{f"{name}_loss": result.losses[name] for name in balance.loss_names(self.config)},
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": self.done.consumed_samples * training.seq_length,
            "loss_tokens": int(result.tokens),
            **({"grad_reduce_exposed_seconds": exposed} if self.engine.reducer.messages else {}),
            **self._worst(measured),
            **({"expert_max_violation": max(result.max_violations)} if self.engine.moe_layers else {}),
            **({"expert_dropped_share": result.dropped_share} if balance.capacity_factor is not None else {}),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale, "overflows": overflows}),
            **record_of(self.engine.reducer),
            "sent_bytes": result.sent_bytes,
        }
        return record, result

    def _until_taken(self, step: int, lr: float) -> tuple[StepResult, int]:
        """Train on the next global batch, and on the same one again while that lowers fp16's loss scale: none is lost.

        Returns also how many attempts overflowed. Raises RuntimeError where the step can't be taken.
        """
        tensors, overflows = self.train_batches.next_step(), 0
        while True:
            result = self.engine.train_step(self._microbatches(tensors), lr)
            if result.taken:
                return result, overflows
            if not result.retry:
                raise RuntimeError(self._not_taken(step, result, lr))
            if self.writes:
                assert self.engine.loss_scale is not None
                logger.info(
                    "step %d: fp16 overflow at loss scale %.10g: nothing has changed, trying the same batch at %.10g",
                    step,
                    result.loss_scale,
                    self.engine.loss_scale.value,
                )
            overflows += 1

    def _not_taken(self, step: int, result: StepResult, lr: float) -> str:
        """What was not finite, and what to do."""
        losses = ", ".join(f"{name} {x}" for name, x in result.losses.items())
        why, fix = "", f"a lower --lr than {lr:.3g}"
        if self.engine.loss_scale is not None:
            fix += ", or --precision bf16"
            if all(map(math.isfinite, result.losses.values())):
                limit = self.engine.loss_scale.limit()
                why = f" at the loss scale {result.loss_scale:.10g}, which can't be lowered ({limit})"
            else:
                why = ", an activation being beyond fp16's largest number, 65504, whatever the loss scale"
        return (
            f"step {step}: losses {losses}, gradient norm {result.grad_norm}{why}: the step was not taken, parameters "
            "and optimizer are as they were before it; resume from "
            f"{checkpoint.newest(self.directory.checkpoints) or 'the start'} with {fix}"
        )

    def _show_loads(self, board: TensorBoard, result: StepResult, step: int) -> None:
        if layers := self.engine.moe_layers:
            names = [f"{layer} MTP" if layer >= self.config.num_hidden_layers else str(layer) for layer in layers]
            board.image("4_detail/expert_load", load_map(result.expert_loads.numpy(), names), step)

    def _communication_watch(self) -> CommunicationWatch | None:
        """On rank 0, where there is something to reduce."""
        reducer, arguments = self.engine.reducer, self.arguments
        if not (self.writes and reducer.messages):
            return None
        global_batch = arguments.training.global_batch_size
        return CommunicationWatch(
            Reduction(
                dp=self.mesh.dp.size,
                buckets=reducer.messages,
                mebibytes=reducer.message_bytes / 2**20,
                bucket_cap_mb=arguments.distributed.bucket_cap_mb,
                overlap=arguments.distributed.overlap_grad_reduce,
                micro_batches=global_batch // arguments.training.micro_batch_size // self.mesh.dp.size,
                global_batch_size=global_batch,
            )
        )

    def _worst(self, measured: dict[str, float]) -> dict[str, float]:
        """`measured`, with the memory of the rank that needs most. Collective."""
        memory = [measured["peak_memory_gib"], measured.get("memory_share", -1.0)]
        worst = torch.tensor(memory, dtype=torch.float64, device=self.mesh.device)
        all_reduce_(worst, self.mesh.world, op="max")
        peak, share = worst.tolist()
        return measured | {"peak_memory_gib": peak} | ({"memory_share": share} if share >= 0 else {})

    def _validate(self) -> dict[str, float]:
        assert self.validation is not None
        loss = tokens = 0.0
        for step in self.validation:
            losses, counted = self.engine.evaluate(self._microbatches(step))
            loss, tokens = loss + losses["lm"] * counted, tokens + counted
        record = {"valid_loss": loss / tokens}
        return record if self.bigram_loss is None else record | {"bigram_loss": self.bigram_loss}

    def _save(self) -> None:
        path = checkpoint.save(self.engine, self.directory.checkpoints, self.done, to_yaml(self.arguments))
        logger.info("saved %s", path, extra={"terminal": False})

    def _load(self, start: Start) -> checkpoint.Position:
        """From the run's newest checkpoint when resuming, else from --load or --pretrained-checkpoint, or nothing."""
        path = checkpoint.newest(self.directory.checkpoints) if start.resumed else None
        # Rank 0 decides: a rank that sees another newest one, or none, must not go another way.
        path = gather_objects(path, self.mesh.world)[0]
        if path is None and self.arguments.checkpoint.load:
            path = gather_objects(checkpoint.find(Path(self.arguments.checkpoint.load)), self.mesh.world)[0]
            if path is None:
                raise ConfigurationError(f"--load {self.arguments.checkpoint.load} holds no complete checkpoint")
        if path is None:
            if start.resumed:
                logger.info("the earlier run saved no checkpoint: starting from step 1")
            if self.arguments.checkpoint.pretrained_checkpoint:
                self._load_weights(Path(self.arguments.checkpoint.pretrained_checkpoint))
            return checkpoint.Position(0, 0)
        done = checkpoint.load(self.engine, path)
        logger.info("loaded %s: %d steps, %d sequences", path, done.step, done.consumed_samples)
        return done

    def _load_weights(self, given: Path) -> None:
        found: Path | str
        try:
            found = checkpoint.find_weights(given)
        except ConfigurationError as error:
            found = str(error)
        found = gather_objects(found, self.mesh.world)[0]
        if isinstance(found, str):
            raise ConfigurationError(f"--pretrained-checkpoint {found}")
        checkpoint.load_weights(self.engine, found)
        logger.info("loaded %s: the weights alone, at step 0", found)

    def _batches(self) -> tuple[Batches, ValidationSteps | None]:
        training, data = self.arguments.training, self.arguments.data
        common: dict[str, Any] = dict(
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            eod_id=self.data.eod_id,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
        train = Batches(self.data.train, consumed_samples=self.done.consumed_samples, **common)
        valid = None
        if self.data.valid is not None:
            valid = ValidationSteps(self.data.valid, training.eval_iters, **common)
        return train, valid

    def _microbatches(self, step: list[MicroBatchTensors]) -> list[MicroBatch]:
        return [MicroBatch(**tensors).to(self.mesh.device) for tensors in step]

    def _say_what_runs(self) -> None:
        layout, count = self.mesh.layout, parameter_count(self.config)
        sizes = {"tp": layout.tp, "pp": layout.pp, "dp": self.mesh.dp.size, "cp": layout.cp}
        split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no split"
        if layout.ep > 1:  # not a factor: experts read the same ranks anew
            split += f"; experts over {layout.ep}"
        training = self.arguments.training
        logger.info(
            "%s parameters (%s activated), %d ranks (%s) on %s, %d micro-batches of %d x %d tokens each",
            f"{count.total:,}",
            f"{count.activated:,}",
            self.mesh.world_size,
            split,
            self.mesh.device.type,
            training.global_batch_size // training.micro_batch_size // self.mesh.dp.size,
            training.micro_batch_size,
            training.seq_length,
        )
        if layout.pp > 1:
            logger.info("%s", self._stages_in_words())
        if said := what_is_compressed(self.engine.reducer):
            logger.info("%s", said)
        for warnings in (compression_warnings, zero_warnings) if self.writes else ():
            for warning in warnings(self.arguments, self.mesh.world_size):
                logger.warning("%s", warning)
        logger.info("torch %s, pipeline layers %s", torch.__version__, self._layers_here(), extra={"terminal": False})

    def _stages_in_words(self) -> str:
        return stages_in_words(self.engine.placement, self.engine.layer_counts, self.config.num_mtp_layers)

    def _layers_here(self) -> str:
        return ", ".join(itertools.chain.from_iterable(stage.layers.keys() for stage in self.engine.stages.values()))


def _short(record: dict[str, Any]) -> str:
    """The numbers of a record in one line; what has parts, as bytes by axis, is in metrics.jsonl."""
    numbers = {name: value for name, value in record.items() if name != "step" and not isinstance(value, dict)}
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
