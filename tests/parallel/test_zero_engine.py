"""ZeroEngine against torch's AdamW on the summed gradient: odd sizes, a shared weight, skipped steps, its state."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallel.mesh import Axis, Layout, Mesh
from parallel.sharding import Sharding
from parallel.zero_engine import ZeroEngine

LR, DECAY, CLIP, MICROBATCHES = 1e-2, 0.1, 0.5, 2


class Model(nn.Module):
    """Sizes that two ranks can't halve; `table` is used twice, as an embedding that MTP shares."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.norm, self.head = nn.Embedding(7, 5), nn.Linear(5, 1, bias=False), nn.Linear(5, 3)
        for parameter in self.parameters():
            parameter.sharding = Sharding()  # type: ignore[attr-defined]

    def forward(self, _: None, tokens: torch.Tensor) -> torch.Tensor:
        self.linear = F.linear
        hidden = torch.tanh(self.table(tokens) + self.norm(self.table(tokens.flip(0))))
        return F.cross_entropy(self.head(hidden), tokens % 3, reduction="sum") / (len(tokens) * MICROBATCHES)


def microbatches(step: int, rank: int) -> Iterator[torch.Tensor]:
    for i in range(MICROBATCHES):
        yield torch.randint(7, (9,), generator=torch.Generator().manual_seed(100 * step + 10 * rank + i))


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False)


class Reference:
    """The same on one rank: all ranks' micro-batches, one optimizer."""

    def __init__(self, model: Model, ranks: int):
        self.model, self.ranks = model, ranks
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        self.optimizer = adamw([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}])

    def step(self, step: int) -> tuple[float, float]:
        self.optimizer.zero_grad()
        total = 0.0
        for rank in range(self.ranks):
            for tokens in microbatches(step, rank):
                loss = self.model(None, tokens)
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total, norm.item()


class Subject:
    """The engine of a rank, and what is asked of it."""

    def __init__(self, seed: int, stage: int):
        self.mesh = Mesh.create(Layout())
        self.model = Model(seed)
        named = list(self.model.named_parameters())
        zero = {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 40,
            "stage3_param_persistence_threshold": 0,
        }
        # With the breakdown DeepSpeed stops timers of passes, which must then have been started.
        config = {"zero_optimization": zero, "gradient_clipping": CLIP, "wall_clock_breakdown": True}
        self.engine = ZeroEngine(self.model, named, self.mesh, config, adamw, DECAY)

    def accumulate(self, step: int) -> float:
        self.engine.zero()
        total = 0.0
        for tokens in microbatches(step, self.mesh.dp.rank):
            loss = self.engine(None, tokens)
            total += loss.item()
            self.engine.backward(loss)
        self.engine.finish()
        self.engine.clip()
        return total

    def step(self, step: int, finite: bool = True) -> tuple[float, bool]:
        self.accumulate(step)
        return self.engine.step(LR, finite)

    def state(self) -> dict[str, torch.Tensor]:
        kinds = (None, *self.engine.moments)
        return {f"{n} {kind}": self.engine.read(n, kind).clone() for n in self.engine.parameters for kind in kinds}

    def off(self, reference: Reference) -> float:
        """The largest difference of masters and moments."""
        differences = []
        for name, parameter in reference.model.named_parameters():
            differences.append((self.engine.read(name) - parameter).abs().max())
            for moment in self.engine.moments:
                found = self.engine.read(name, moment)
                differences.append((found - reference.optimizer.state[parameter][moment]).abs().max())
        return torch.stack(differences).max().item()


@dataclasses.dataclass
class Found:
    """Of one rank and stage. off_*: largest differences to the reference."""

    moments: tuple[str, ...]
    initial_moments: float
    off_trained: float
    off_norm: float
    off_written: float
    off_resumed: float
    kept: list[bool]
    norms: list[float]
    off_after_skips: float
    after_forgotten: float
    whole_values: int
    gathered: list[tuple[int, ...]]
    errors: list[str]
    sent: dict[str, int]
    replaced: list[str]
    linear: bool  # whether the model was computed with torch's


def torchs_own() -> dict[str, Any]:
    """What a library may be tempted to replace in torch, for the whole process."""
    places = (torch, F, torch.Tensor, nn.Module, nn.Linear, nn.Embedding, torch.autograd)
    return {f"{place.__name__}.{name}": value for place in places for name, value in vars(place).items()}


def deepspeed_has_what_is_only_written_to() -> bool:
    """Names that are read would be missed loudly."""
    from deepspeed import zero
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return isinstance(zero.Init.param_id, int) and "module.ds_id = " in inspect.getsource(DeepSpeedZeRoOffload)


def on_each_rank(seed: int, stage: int) -> Found:
    torch_before = torchs_own()
    subject = Subject(seed, stage)
    mesh, engine = subject.mesh, subject.engine
    assert deepspeed_has_what_is_only_written_to()
    reference = Reference(Model(seed), mesh.dp.size)
    initial = max(engine.read(name, m).abs().max().item() for name in engine.parameters for m in engine.moments)

    # 1. as torch's AdamW
    off_norm, sent = 0.0, mesh.ledger.bytes("dp_cp")
    for step in range(3):
        _, norm = reference.step(step)
        found, taken = subject.step(step)
        assert taken
        off_norm = max(off_norm, abs(found / norm - 1))
    sent = mesh.ledger.bytes("dp_cp") - sent
    off_trained, whole_values = subject.off(reference), sum(p.numel() for p in engine.parameters.values())

    # 2. a step that isn't taken changes nothing: a gradient that isn't finite on one rank, a loss that isn't
    kept, norms = [], []
    before = subject.state()
    name, parameter = next(iter(engine.parameters.items()))
    hook = parameter.register_hook(lambda gradient: gradient * (torch.nan if mesh.dp.is_last else 1.0))
    outcomes = [subject.step(7)]
    hook.remove()
    outcomes.append(subject.step(8, finite=False))
    for norm, taken in outcomes:
        norms.append(norm)
        kept.append(not taken)
    after = subject.state()
    kept.append(all(torch.equal(before[key], after[key]) for key in before))

    # 3. gradients that no step follows are forgotten
    subject.accumulate(9)
    _, norm = reference.step(3)
    found, _ = subject.step(3)
    after_forgotten, off_after_skips = abs(found / norm - 1), subject.off(reference)

    # 4. what is written is read, used, and gone on from
    other = Reference(Model(seed + 1), mesh.dp.size)
    for step in range(5):
        other.step(step)
    engine.prepare(5)
    for key, parameter in other.model.named_parameters():
        engine.write(key, parameter.detach())
        for moment in engine.moments:
            engine.write(key, other.optimizer.state[parameter][moment], moment)
    engine.written()
    off_written = subject.off(other)
    with torch.no_grad():
        tokens = next(microbatches(50, 0))
        off_written = max(off_written, abs(engine(None, tokens).item() - other.model(None, tokens).item()))
    other.step(5)
    subject.step(5)
    off_resumed = subject.off(other)

    # 5. what it refuses
    errors = []
    for misuse in (engine.no_sync, lambda: [engine(None, tokens) for _ in range(2)]):
        with pytest.raises(RuntimeError) as error:
            misuse()
        errors.append(str(error.value))
    engine.zero()
    return Found(
        engine.moments,
        initial,
        off_trained,
        off_norm,
        off_written,
        off_resumed,
        kept,
        norms,
        off_after_skips,
        after_forgotten,
        whole_values,
        [tuple(engine.read(key).shape) for key in engine.parameters],
        errors,
        {"dp_cp": sent},
        [name for name, value in torchs_own().items() if torch_before.get(name, value) is not value],
        subject.model.linear is F.linear,
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_trains_skips_and_resumes_as_torch(run_ranks: Callable[..., list[Found]], stage: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    shapes = [tuple(p.shape) for p in Model(seed).parameters()]
    values = sum(p.numel() for p in Model(seed).parameters())
    for found in run_ranks(2, on_each_rank, seed, stage, timeout=120.0):
        assert found.moments == ("exp_avg", "exp_avg_sq") and found.initial_moments == 0
        assert found.off_trained < 1e-6 and found.off_norm < 1e-5
        assert found.kept == [True, True, True]
        assert not torch.isfinite(torch.tensor(found.norms[0])) and found.norms[1] > 0
        assert found.off_after_skips < 1e-6 and found.after_forgotten < 1e-5
        assert found.off_written == 0 and found.off_resumed < 1e-6
        assert found.gathered == shapes
        assert found.replaced == [] and found.linear == (stage == 2)
        assert found.whole_values == (values if stage == 2 else 0), "stage 3 has no parameter whole between uses"
        assert all(f"ZeRO stage {stage}" in error for error in found.errors) and "no_sync" in found.errors[0]
        # All-reduce of fp32 gradients and a gather of parameters, or a reduce-scatter and two gathers.
        per_microbatch, per_step = (4 * 2, 4) if stage == 2 else (4 + 4 + 4, 0)
        assert found.sent["dp_cp"] == 3 * values * (MICROBATCHES * per_microbatch + per_step) // 2


@pytest.mark.parametrize(
    ("axis", "words"), [("pp", "a pipeline of 2 ranks"), ("ep", "expert parallelism over 2 ranks")]
)
def test_a_pipeline_and_expert_parallelism_are_refused(axis: str, words: str) -> None:
    axes = {"pp": Axis("pp", (0,), 0), "ep": Axis("ep", (0,), 0), axis: Axis(axis, (0, 1), 0)}
    config = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=f"ZeRO stage 3 doesn't go with {words}: take stage 1"):
        ZeroEngine(nn.Module(), [], SimpleNamespace(**axes), config, adamw, 0.0)  # type: ignore[arg-type]
