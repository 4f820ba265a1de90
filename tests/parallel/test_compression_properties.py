"""What holds for every compressed reduction, whatever the codec, transport, sizes, data and number of ranks.

Examples run on ranks that are threads, against the same sums on paper (`simulate`); a few on real gloo processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.compression.codecs import codec_of
from parallel.compression.compression import Compression
from parallel.compression.feedback import ErrorFeedback
from parallel.compression.lanes import run_inline
from parallel.compression.options import CODECS, CompressionOptions, ResidualName
from parallel.compression.reduction import Span
from parallel.gradients import GradientReducer
from parallel.mesh import Layout, Mesh
from parallel.sharding import Sharding
from tests.parallel.compression_cases import (
    Case,
    Outcome,
    gradients,
    residual_sum,
    run_case,
    simulate,
)
from tests.thread_ranks import run_threads

RunRanks = Callable[..., list[Any]]


@st.composite
def all_options(draw: st.DrawFn, name: Any, ranks: int) -> CompressionOptions:
    quantised = name not in ("topk", "powersgd")
    return CompressionOptions(
        name,
        block_size=draw(st.sampled_from([256, 512] if name == "1bit" else [32, 128])) if quantised else None,
        residual=draw(st.sampled_from(["fp32", "fp32", "fp32", "none", "bf16", "int8"])),
        decay=draw(st.sampled_from([1.0, 1.0, 1.0, 0.75])),
        density=draw(st.sampled_from([0.01, 0.2])),
        topk_transport=draw(st.sampled_from(["region", "gather"])),
        rank=draw(st.sampled_from([1, 3])),
        inner_size=draw(st.sampled_from([1, 2])) if quantised and ranks == 4 else 1,
    )


@st.composite
def all_cases(draw: st.DrawFn, name: Any) -> Case:
    ranks = draw(st.sampled_from([2, 3, 4]))
    options = draw(all_options(name, ranks))
    b = options.block
    matrices = [(24, 31), (40, 32), (3, 20, 16)]  # always one: examples tend to be small
    sizes = [*matrices, (), (0,), (1,), (b - 1,), (b,), (b + 1,), (4, 64)]
    shapes = [draw(st.sampled_from(matrices)), *draw(st.lists(st.sampled_from(sizes), max_size=2))]
    kinds = [draw(st.sampled_from(["normal", "heavy", "rows", "zero", "tiny", "huge"])) for _ in shapes]
    endings = draw(st.lists(st.sampled_from(["commit", "commit", "discard", "not finite"]), max_size=3))
    endings = ["commit", *endings]
    return Case(options, ranks, tuple(shapes), tuple(kinds), tuple(endings), draw(st.integers(0, 2**31)))  # type: ignore[arg-type]


def check(case: Case, outcomes: Sequence[Outcome]) -> None:
    """All that must hold of the ranks' outcomes."""
    n = outcomes[0].sums[0].numel()
    spans = outcomes[0].spans
    given_to = gradients(case, spans, n)
    finite = [i for i, ending in enumerate(case.endings) if ending != "not finite"]
    simulated = None if case.options.name == "powersgd" else simulate(case)

    for i in range(len(case.endings)):
        counts = [outcome.not_finite[i] for outcome in outcomes]
        assert counts == [int((~x.isfinite()).sum()) for x in given_to[i]], "counted on raw gradients, by rank"
        for outcome in outcomes if i in finite else ():
            assert torch.equal(outcome.sums[i], outcomes[0].sums[i]), "the same bits on all ranks"
        if simulated and i in finite:
            assert torch.equal(outcomes[0].sums[i], simulated[0][i]), "the sums on paper, bit for bit"
        for outcome in outcomes if case.endings[i] != "commit" else ():
            for name, x in outcome.kept[i].items():
                before = outcome.kept[i - 1][name] if i else torch.zeros_like(x)
                assert torch.equal(x, before), "what was kept before a skipped step is kept still"

    for outcome in outcomes:
        assert outcome.bytes_counted == outcome.bytes_promised
    if simulated:
        assert outcomes[0].bytes_promised == len(case.endings) * formula(case, n)

    for span, kind in zip(spans, case.kinds, strict=True):
        sums = [outcomes[0].sums[i][span.start : span.stop] for i in finite]
        if kind == "zero":
            assert all((x == 0).all() for x in sums), "zeros stay zero for ever"
            assert all((outcome.kept[-1].get(span.name, torch.zeros(1)) == 0).all() for outcome in outcomes)
        if kind == "rows" and len(span.shape) > 1 and span.shape[1:].numel() % 32 == 0:
            rows = [x.view(span.shape[0], -1)[::2] for x in sums]
            assert all((x == 0).all() for x in rows), "rows that nobody touches don't drift"

    if case.options.residual_dtype == "fp32" and case.options.decay == 1.0:
        check_nothing_is_lost(case, outcomes, spans, given_to, simulated)


def check_nothing_is_lost(
    case: Case, outcomes: Sequence[Outcome], spans: list[Span], given_to: torch.Tensor, simulated: Any
) -> None:
    """Σ decoded + Σ residuals = Σ gradients, over the steps that were taken."""
    n = outcomes[0].sums[0].numel()
    taken = [i for i, ending in enumerate(case.endings) if ending == "commit"]
    decoded = sum((outcomes[0].sums[i].double() for i in taken), torch.zeros(n, dtype=torch.float64))
    residuals = [residual_sum(outcome.kept[-1], spans, n) for outcome in outcomes]
    left = torch.stack(residuals).double().sum(0)
    if simulated:
        shots = simulated[1][-1]
        for mine, on_paper in zip(residuals, shots, strict=False):
            assert torch.equal(mine, on_paper), "of padding too, which no checkpoint keeps"
        later = shots[case.ranks :]  # of parts and regions, which lie one after the other
        while later:
            length, whole = 0, []
            while length < n:
                whole.append(later.pop(0))
                length += whole[-1].numel()
            if not n:
                break
            left += torch.cat(whole).double()
    wanted = given_to[taken].double().sum((0, 1))
    size = given_to[taken].abs().double().sum((0, 1))
    for span in spans:
        part = slice(span.start, span.stop)
        bound = 1e-5 * float(size[part].max()) if span.shape.numel() else 0.0
        assert ((decoded + left - wanted)[part].abs() <= bound).all(), "nothing is lost"


def formula(case: Case, n: int) -> int:
    """Bytes of a step by the formulas of one shot, two shots and two hops."""
    codec, ranks = codec_of(case.options), case.ranks
    if case.options.name == "topk" and case.options.topk_transport == "gather":
        return (ranks - 1) * codec.wire_bytes(n)
    inner = case.options.inner_size if case.options.inner_size < ranks else 1
    outer = ranks // inner
    there = (inner - 1) * codec.wire_bytes(n // inner) if inner > 1 else 0
    region = codec.wire_bytes(n // ranks)
    return there + 2 * (outer - 1) * region + (inner - 1) * outer * region


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=15)
@given(data=st.data())
def test_what_holds_for_every_codec_and_transport(name: str, data: st.DataObject) -> None:
    case = data.draw(all_cases(name))
    outcomes = run_threads(case.ranks, run_case, case)
    check(case, outcomes)
    if case.ranks == 2 and "not finite" not in case.endings and case.options.name != "powersgd":
        swapped = Case(**{**vars(case), "reverse": True})
        for mine, theirs in zip(outcomes[0].sums, run_threads(2, run_case, swapped)[0].sums, strict=True):
            assert torch.equal(mine, theirs), "who has which gradient changes nothing"


@pytest.mark.parametrize("name", CODECS)
def test_buckets_of_no_and_of_odd_sizes(name: Any, seed: int) -> None:
    options = CompressionOptions(name, density=0.1)
    b = options.block
    for shapes in ((), ((0,),), ((1,),), ((b - 1,),), ((b,),), ((b + 1,),), ((b + 1,), (), (0,), (1,))):
        case = Case(options, 3, shapes, ("normal",) * len(shapes), ("commit", "not finite", "commit"), seed)
        check(case, run_threads(3, run_case, case))


def cases_on_processes(cases: list[Case]) -> list[Outcome]:
    mesh = Mesh.create(Layout())  # its communicators serve all cases
    return [run_case(case, mesh) for case in cases]


def test_the_same_on_processes(run_ranks: RunRanks, seed: int) -> None:
    """Every codec and transport on four gloo ranks."""
    shapes, kinds = ((5, 64), (300,), (40, 32)), ("rows", "heavy", "normal")
    endings = ("commit", "not finite", "commit", "discard", "commit")
    options = [CompressionOptions(name, residual="fp32", density=0.1, rank=2) for name in CODECS]
    options += [CompressionOptions(name, residual="fp32", inner_size=2) for name in CODECS[:5]]
    options += [CompressionOptions("topk", topk_transport="gather"), CompressionOptions("int8", residual="int8")]
    cases = [Case(o, 4, shapes, kinds, endings, seed) for o in options]  # type: ignore[arg-type]
    found = run_ranks(4, cases_on_processes, cases)
    for i, case in enumerate(cases):
        check(case, [outcomes[i] for outcomes in found])


def rescaled(options: CompressionOptions, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two steps, and two of which the second's gradients come in another unit."""
    mesh = Mesh.create(Layout())
    results: list[list[torch.Tensor]] = []
    for factor in (1.0, 2.0**-7):
        compression = Compression(options, mesh)
        span = Span("w", torch.Size((64, 40)), 0)
        buffer = torch.zeros(compression.padded(span.stop, mesh.dp_cp))
        reduction = compression.add(buffer, [span], mesh.dp_cp)
        generator = torch.Generator().manual_seed(seed + mesh.rank)  # threads share the default one
        sums = []
        for unit in (1.0, factor):
            if unit != 1.0:
                compression.rescale(unit)
            buffer.zero_()
            buffer[: span.stop] = torch.randn(span.stop, generator=generator) * unit
            run_inline(reduction.phases)
            compression.commit()
            sums.append(buffer / unit)
        results.append(sums)
    return results[0], results[1]


@pytest.mark.parametrize("residual", ["fp32", "int8"])
@pytest.mark.parametrize("name", CODECS)
def test_a_new_loss_scale_rescales_the_residual(name: Any, residual: ResidualName, seed: int) -> None:
    for plain, other in run_threads(2, rescaled, CompressionOptions(name, residual=residual, density=0.1), seed):
        for a, b in zip(plain, other, strict=True):
            assert torch.equal(a, b) and (a != 0).any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "int3"}, "'int3' is not known: choose among bf16, fp8"),
        ({"residual": "fp16"}, "residual 'fp16' is not known: choose among none, fp32, bf16, int8"),
        ({"topk_transport": "regions"}, "'regions' is not known: choose among region, gather"),
        ({"density": 0.0}, "density 0.0"),
        ({"decay": 1.1}, "decay 1.1 must be above 0 and at most 1"),
        ({"rank": 0}, "rank 0 must be at least 1"),
        ({"inner_size": 0}, "inner size 0 must be at least 1"),
        ({"exclude": ("vectors",)}, "some of vector, router, embedding, head"),
        ({"exclude": "vector"}, "it is a tuple"),
        ({"name": "topk", "inner_size": 2}, "topk has no second hop"),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any], words: str) -> None:
    """Whoever has a loop of their own has no flags that are checked."""
    with pytest.raises(ValueError, match=words):
        CompressionOptions(**{"name": "int8", **wrong})


@pytest.mark.parametrize("n", [0, 256, 1024])
@pytest.mark.parametrize(("numbers", "error"), [("fp32", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127), ("none", 1.0)])
def test_residuals_in_every_kind_of_numbers(numbers: ResidualName, error: float, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    feedback = ErrorFeedback(n, numbers, torch.device("cpu"), decay=0.5)
    values = torch.randn(n)
    bound = error * 0.5 * float(values.abs().max()) * 1.001 if n else 0.0

    def write(x: torch.Tensor) -> None:
        _, new = feedback.open(1)
        if new is not None:
            new.copy_(x.view(1, -1))
        feedback.close()

    def off(x: torch.Tensor) -> float:
        return float((feedback.value() - x).abs().max()) if n else 0.0

    write(values)
    assert (feedback.value() == 0).all(), "not before the step is taken"
    feedback.discard()
    feedback.commit()
    assert (feedback.value() == 0).all()
    write(values)
    feedback.commit()
    assert off(0.5 * values) <= bound
    kept = feedback.value()
    write(3 * values)
    feedback.discard()
    assert torch.equal(feedback.value(), kept)
    feedback.rescale(0.25)
    assert off(0.125 * values) <= bound
    feedback.commit()
    assert off(0.125 * values) <= bound


def reduce_with_nan(seed: int, name: Any) -> dict[str, Any]:
    """A reducer's norm where the last rank's gradient, which the code may swallow, has a NaN; and the next step."""
    mesh = Mesh.create(Layout())
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    weight.sharding = Sharding()  # type: ignore[attr-defined]
    reducer = GradientReducer([("w", weight)], mesh, compression=CompressionOptions(name, density=0.1))
    found: dict[str, Any] = {"norms": []}
    for step in range(3):
        reducer.zero()
        factor = torch.randn(64, 64)
        if step == 1 and mesh.dp.is_last:
            factor[3, 5] = torch.nan
        (weight * factor).sum().backward()
        reducer.finish()
        norm = float(reducer.clip(1.0))
        found["norms"].append(norm)
        if math.isfinite(norm):
            reducer.commit()
        else:
            reducer.discard()
    found["compressed"] = reducer.compression_statistics() is not None
    before_clipping = weight.main_grad * max(1.0, norm)  # type: ignore[attr-defined]
    found["off"] = float((before_clipping - factor).norm() / factor.norm())
    return found


def nan_by_codec(seed: int) -> list[dict[str, Any]]:
    return [reduce_with_nan(seed, name) for name in CODECS]


def test_a_nan_on_the_last_rank_is_seen_by_all(run_ranks: RunRanks, seed: int) -> None:
    for found in zip(*run_ranks(2, nan_by_codec, seed), strict=True):
        for one in found:
            assert [math.isnan(norm) for norm in one["norms"]] == [False, True, False] and one["compressed"]
            assert one["norms"][::2] == found[0]["norms"][::2]


def test_one_rank_alone_is_not_compressed(seed: int) -> None:
    for name in CODECS:
        found = reduce_with_nan(seed, name)
        assert not found["compressed"] and found["off"] < 1e-5 and math.isnan(found["norms"][1])
