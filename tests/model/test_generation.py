"""Generation with the cache of latents: the tokens of a forward pass without it, of transformers, and of any layout."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import DeepSeekConfig
from model.generation import ENDED, Decoder, check_prompts, generate
from model.latent_cache import LatentCache
from model.microbatch import MicroBatch
from model.sampling import Sampling
from parallel.comm import gather_objects
from parallel.mesh import Layout, Mesh
from tests.model.hf_oracle import YARN, random_weights, save_exported, tiny_config
from training.inference import Model, ModelSource, load_model

RunRanks = Callable[..., list[Any]]
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
SHAPES = {
    "v3": tiny_config("deepseek_v3", rope_scaling=YARN),
    "v2": tiny_config("deepseek_v2", **V2_GROUPS, routed_scaling_factor=4.0),
    "v2-lite": tiny_config("deepseek_v2", q_lora_rank=None, rope_scaling=YARN, n_shared_experts=2),
}
NEW = 12
ONE, GREEDY = Layout(), Sampling()
DRAWN = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=11)


def exported(config: DeepSeekConfig, directory: Path) -> Path:
    """A Hugging Face directory of random weights, fresh each time."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    save_exported(random_weights(config, seed), config, directory)
    return directory


def loaded(directory: Path, layout: Layout = ONE, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(ModelSource.find(directory), Mesh.create(layout), dtype)


def decoder_of(model: Model) -> Decoder:
    return Decoder(model.config, model.stage, model.mesh, model.dtype)


def some_prompts(config: DeepSeekConfig, lengths: tuple[int, ...] = (7, 1, 19)) -> list[list[int]]:
    return [[random.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def continued(
    decoder: Decoder, prompts: list[list[int]], sampling: Sampling = GREEDY, eod_id: int | None = None
) -> list[list[int]]:
    steps = list(generate(decoder, prompts, NEW, sampling, eod_id))
    return [[step[i] for step in steps if step[i] != ENDED] for i in range(len(prompts))]


@torch.no_grad()
def without_cache(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits after the last token by training's forward pass of the whole sequence: [V]."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids)).unsqueeze(0)
    batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape), positions)
    return model.stage.lm_head(model.stage.norm(model.stage.hidden(None, batch)))[-1, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_without_a_cache_and_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = SHAPES[name]
    model = loaded(exported(config, tmp_path))
    decoder, prompts = decoder_of(model), some_prompts(config)

    cache = decoder.new_cache(len(prompts), 19 + NEW)
    feed, ids = prompts, [list(prompt) for prompt in prompts]
    for _ in range(NEW):
        logits = decoder.step(cache, feed)
        expected = torch.stack([without_cache(model, one) for one in ids])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        chosen = expected.argmax(-1).tolist()
        feed = [[token] for token in chosen]
        ids = [[*one, token] for one, token in zip(ids, chosen, strict=True)]
    # What is kept of a token, counted in bytes: one latent and one rotated key, for all heads together.
    per_token = (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert cache.nbytes == config.num_hidden_layers * len(prompts) * (19 + NEW) * per_token

    ours = continued(decoder, prompts)
    assert [[*prompt, *new] for prompt, new in zip(prompts, ours, strict=True)] == ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    theirs.generation_config.eos_token_id = None
    for prompt, new in zip(prompts, ours, strict=True):
        tokens = torch.tensor([prompt])
        # With its own mask transformers leaves out tokens that look like padding.
        asked = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
        whole = theirs.generate(tokens, max_new_tokens=NEW, **asked)
        assert whole[0, len(prompt) :].tolist() == new


def on_layouts(directory: str, prompts: list[list[int]], eod_id: int, layouts: list[Layout]) -> list[Any]:
    """On every rank, for each layout: greedy and drawn tokens, and where a prompt ends early; all ranks must agree."""
    results = []
    for layout in layouts:
        decoder = decoder_of(loaded(Path(directory), layout))
        found = (
            continued(decoder, prompts),
            continued(decoder, prompts, DRAWN),
            continued(decoder, prompts, eod_id=eod_id),
            continued(decoder, prompts[:1]),  # with data parallelism, ranks without a prompt
        )
        assert gather_objects(found, decoder.mesh.world).count(found) == decoder.mesh.world_size
        results.append(found)
    return results


def compare(run_ranks: RunRanks, directory: Path, config: DeepSeekConfig, ranks: int, layouts: list[Layout]) -> None:
    exported(config, directory)
    prompts = some_prompts(config, (7, 1, 19, 4))
    one = decoder_of(loaded(directory))
    greedy = continued(one, prompts)
    eod_id = greedy[1][4]  # ends the second prompt's text at its fifth token or before, others maybe too
    ended = continued(one, prompts, eod_id=eod_id)
    assert ended[1] == greedy[1][: greedy[1].index(eod_id) + 1]
    for new, whole in zip(ended, greedy, strict=True):
        assert new == (whole[: whole.index(eod_id) + 1] if eod_id in whole else whole)
    expected = greedy, continued(one, prompts, DRAWN), ended, greedy[:1]
    assert expected[1] != greedy
    for found in run_ranks(ranks, on_layouts, str(directory), prompts, eod_id, layouts):
        for layout, result in zip(layouts, found, strict=True):
            assert result == expected, layout


def test_any_layout_of_two_ranks_gives_the_same_tokens(run_ranks: RunRanks, tmp_path: Path) -> None:
    # A vocabulary that tp doesn't divide, MTP in the files, group-limited routing with a bias.
    config = tiny_config("deepseek_v3", num_nextn_predict_layers=1)
    layouts = [Layout(tp=2), Layout(pp=2), Layout(ep=2), Layout(tp=2, ep=2), Layout()]
    compare(run_ranks, tmp_path, config, 2, layouts)


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, [Layout(tp=2), Layout(pp=2), Layout(ep=2), Layout(tp=2, ep=2), Layout()]),
        (4, [Layout(tp=2, pp=2), Layout(tp=4, ep=2), Layout(pp=2, ep=2), Layout(ep=4), Layout(tp=2, pp=2, ep=2)]),
        (8, [Layout(tp=2, pp=2, ep=4), Layout(tp=2, pp=2, ep=2), Layout(tp=4, pp=2), Layout(pp=2, ep=4)]),
    ],
    ids=["2", "4", "8"],
)
def test_products_of_layouts_give_the_same_tokens(
    run_ranks: RunRanks, tmp_path: Path, name: str, ranks: int, layouts: list[Layout]
) -> None:
    config = dataclasses.replace(SHAPES[name], intermediate_size=92)  # four ranks divide it
    compare(run_ranks, tmp_path, config, ranks, layouts)


def test_sixteen_bits_stay_near_and_the_cache_has_them(tmp_path: Path) -> None:
    config = SHAPES["v3"]
    exported(config, tmp_path)
    whole, half = decoder_of(loaded(tmp_path)), decoder_of(loaded(tmp_path, dtype=torch.bfloat16))
    prompts = some_prompts(config)
    for step in range(2):
        if step == 0:
            caches = [decoder.new_cache(3, 20) for decoder in (whole, half)]
        feed = prompts if step == 0 else [[5], [6], [7]]
        expected, found = (d.step(cache, feed) for d, cache in zip((whole, half), caches, strict=True))
        assert found.dtype == torch.bfloat16
        # Routing may change with the last bits of a score: most values are near, not all.
        assert (found.float() - expected).abs().median() < 0.1 * expected.abs().median()
    assert caches[1].nbytes * 2 == caches[0].nbytes


def test_a_sequence_that_ends_leaves_the_cache(tmp_path: Path) -> None:
    config = SHAPES["v2-lite"]
    decoder = decoder_of(loaded(exported(config, tmp_path)))
    prompts = some_prompts(config, (3, 9, 5))
    alone, together = decoder.new_cache(1, 12), decoder.new_cache(3, 12)
    decoder.step(alone, prompts[2:])
    decoder.step(together, prompts)
    before = together.nbytes
    together.keep([2])
    assert together.nbytes * 3 == before and together.lengths == [5]
    torch.testing.assert_close(decoder.step(together, [[8]]), decoder.step(alone, [[8]]), rtol=1e-5, atol=1e-5)


def test_the_cache_refuses_steps_that_do_not_suit_it() -> None:
    cache = LatentCache([0], 2, 4, 3, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="holds 2 sequences, the step brings tokens of 1"):
        cache.begin([3])
    with pytest.raises(ValueError, match="5 tokens is beyond the cache's 4 places"):
        cache.begin([3, 5])
    cache.begin([3, 4])
    with pytest.raises(ValueError, match="one token a sequence, not"):
        cache.begin([1, 2])
    with pytest.raises(ValueError, match="5 tokens is beyond the cache's 4 places"):
        cache.begin([1, 1])


def test_prompts_without_room_or_sense_are_refused_before_there_is_a_cache(tmp_path: Path) -> None:
    config = SHAPES["v3"]
    check_prompts([[1] * 100, [1]], 28, config)
    for prompts, new, said in (
        ([[1], [1] * 101], 28, "prompt 2 has 101 tokens, with 28 new ones 129: the model has 128 positions.*by 1 tok"),
        ([[1], []], 5, "prompt 2 of 2 is empty"),
        ([[1], [2, 203]], 5, "prompt 2 has the token id 203 and the model's vocab_size is 203"),
        ([[-1]], 5, "token id -1"),
        ([], 5, "no prompt"),
        ([[1]], 0, "0 new tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            check_prompts(prompts, new, config)
    decoder = decoder_of(loaded(exported(config, tmp_path)))
    decoder.new_cache = None  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="128 positions"):
        next(generate(decoder, [[1] * 128], 1, Sampling()))


def split_context() -> str:
    model_mesh = Mesh.create(Layout(cp=2))
    try:
        Decoder(None, None, model_mesh, torch.float32)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def test_context_parallelism_is_refused_with_the_reason(run_ranks: RunRanks) -> None:
    assert all("context parallel size 2 splits a sequence" in said for said in run_ranks(2, split_context))


def test_losses_of_balance_and_prediction_layers_are_left_out(tmp_path: Path) -> None:
    config = dataclasses.replace(SHAPES["v3"], num_nextn_predict_layers=1, aux_loss_alpha=0.01)
    model = loaded(exported(config, tmp_path))
    names = [name for name, _ in model.stage.named_parameters()]
    assert not [name for name in names if name.startswith(f"layers.{config.num_hidden_layers}.")]
    assert not any(parameter.requires_grad for parameter in model.stage.parameters())
    decoder = decoder_of(model)
    continued(decoder, some_prompts(config))
    assert not decoder.mesh.ledger.entries  # one rank: nothing was sent
