"""Text from the model: prompts through the pipeline once, then a token of each sequence at a time.

Lives here: one step on any layout, and the loop around it. May import `parallel`. A step's rows, the new tokens of all
sequences one after the other, stand where training has a sequence: they are split over tp as that is, filled up to a
multiple of it, so layers, routing and experts are training's own. Shapes: R rows, b sequences here, h hidden, V
vocabulary, v its part on this tp rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from model.config import DeepSeekConfig
from model.deepseek import DeepSeekStage
from model.latent_cache import LatentCache
from model.microbatch import MicroBatch
from model.sampling import Sampling
from parallel.comm import all_gather, all_reduce_, gather_sequence
from parallel.mesh import Mesh
from parallel.pipeline.make import make_schedule
from parallel.pipeline.runtime import PipelineRuntime

ENDED = -1
"""Stands for the next token of a sequence that has ended."""


class Decoder:
    """The stage of this rank, made to continue sequences. Every method is collective over the stage and the pipeline.

    stage: in eval mode, on a mesh without context parallelism; dtype: of its activations and of the cache.
    """

    def __init__(self, config: DeepSeekConfig, stage: DeepSeekStage, mesh: Mesh, dtype: torch.dtype):
        if mesh.cp.size > 1:
            raise ValueError(
                f"context parallel size {mesh.cp.size} splits a sequence over ranks, and a step brings one token of "
                "each: use 1"
            )
        self.config, self.stage, self.mesh, self.dtype = config, stage, mesh, dtype
        self.runtime = PipelineRuntime(mesh, {mesh.pp.rank: self._forward}, dtype)
        self._schedule = make_schedule("1f1b", mesh.pp.size, 1).forward_only()
        self._logits: torch.Tensor | None = None

    def new_cache(self, sequences: int, places: int) -> LatentCache:
        """Room for so many sequences of so many tokens in this rank's layers."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        layers = [int(name) for name in self.stage.layers]
        return LatentCache(layers, sequences, places, width, self.dtype, self.mesh.device)

    def step(self, cache: LatentCache, tokens: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Run the new tokens of each sequence: prompts in the first step, one token each in the others.

        Returns logits of what follows each sequence's last token, [b, V] in the activations' dtype, on every rank of
        the last stage; None elsewhere. Without sequences here the rank takes part all the same, for its experts.
        """
        cache.begin([len(ids) for ids in tokens])
        tp = self.mesh.tp.size
        rows = max(-(-cache.rows // tp), 1) * tp
        tokens_1R = torch.zeros((1, rows), dtype=torch.int64)
        tokens_1R[0, : cache.rows] = torch.tensor([i for ids in tokens for i in ids], dtype=torch.int64)
        positions_1R = torch.zeros((1, rows), dtype=torch.int64, device=self.mesh.device)
        positions_1R[0, : cache.rows] = cache.positions
        tokens_1R = tokens_1R.to(self.mesh.device)
        # Labels and mask are a loss's, and there is none.
        batch = MicroBatch(tokens_1R, tokens_1R, torch.zeros(tokens_1R.shape), positions_1R, cache=cache)
        self._logits = None
        self.runtime.run(self._schedule, [batch], torch.Size((rows // tp, 1, self.config.hidden_size)))
        return self._logits

    def _forward(self, x_l1h: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """What the pipeline runs: this stage's blocks, and on the last stage the head for each sequence's last row."""
        assert batch.cache is not None
        stage, tp = self.stage, self.mesh.tp
        x_l1h = stage.hidden(x_l1h, batch)
        if stage.last:
            last = torch.tensor([end - 1 for _, end in batch.cache.spans], dtype=torch.int64, device=x_l1h.device)
            x_b1h = gather_sequence(stage.norm(x_l1h), tp)[last]
            logits_vb = stage.lm_head.of_whole(x_b1h).squeeze(1).t()
            if tp.size > 1:
                block = stage.lm_head.weight.shape[0]  # with padding: gathered parts are of one size
                padded_vb = logits_vb.new_zeros((block, logits_vb.shape[1]))
                padded_vb[: logits_vb.shape[0]] = logits_vb
                logits_vb = all_gather(padded_vb, tp)[: self.config.vocab_size]
            self._logits = logits_vb.t()
        return x_l1h


def check_prompts(prompts: Sequence[Sequence[int]], new_tokens: int, config: DeepSeekConfig) -> None:
    """Raises ValueError, before anything is computed, for no or empty prompts, ids beyond the vocabulary, no room."""
    if new_tokens < 1:
        raise ValueError(f"{new_tokens} new tokens: ask for at least 1")
    if not prompts:
        raise ValueError("there is no prompt: give at least one")
    longest = config.max_position_embeddings
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {number} of {len(prompts)} is empty: give at least one token to go on from")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"prompt {number} has the token id {max(prompt) if min(prompt) >= 0 else min(prompt)} and the model's "
                f"vocab_size is {config.vocab_size}: use the tokenizer that the model was trained with"
            )
        if len(prompt) + new_tokens > longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, with {new_tokens} new ones {len(prompt) + new_tokens}: the "
                f"model has {longest} positions (max_position_embeddings); shorten the prompt by "
                f"{len(prompt) + new_tokens - longest} tokens, or ask for fewer new ones"
            )


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    eod_id: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[list[int]]:
    """Yields after each step the token that each prompt got, `ENDED` for one that had its last before. Collective.

    The first step runs the prompts. A sequence ends with `eod_id`, which is yielded, or after `new_tokens`. vocabulary:
    only ids below it are chosen, where the tokenizer has fewer than the model. All ranks get all tokens, also of the
    prompts of other data-parallel ranks, over which these are dealt out in turn. Raises ValueError as `check_prompts`.
    """
    check_prompts(prompts, new_tokens, decoder.config)
    mesh = decoder.mesh
    live = list(range(mesh.dp.rank, len(prompts), mesh.dp.size))
    feed = [list(prompts[i]) for i in live]
    # The last token of all is chosen and never run.
    cache = decoder.new_cache(len(live), max((len(ids) for ids in feed), default=1) + new_tokens - 1)
    for step in range(new_tokens):
        logits_bv = decoder.step(cache, feed)
        # Ids are chosen in one place, whatever the last bits of other ranks' logits; +1, since 0 is what others add.
        chosen = torch.zeros(len(prompts), dtype=torch.int64, device=mesh.device)
        if logits_bv is not None and mesh.tp.is_first and live:
            ids = sampling.choose(logits_bv[:, :vocabulary], live, step)
            chosen[live] = torch.tensor(ids, device=mesh.device) + 1
        all_reduce_(chosen, mesh.world)
        tokens = [i - 1 for i in chosen.tolist()]
        yield tokens
        if all(token in (ENDED, eod_id) for token in tokens):
            return
        kept = [row for row, i in enumerate(live) if tokens[i] != eod_id]
        if len(kept) < len(live):
            cache.keep(kept)
            live = [live[row] for row in kept]
        feed = [[tokens[i]] for i in live]
