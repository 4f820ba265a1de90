"""Multi-head latent attention: small latents are gathered over tp and cp, heads are split over tp, queries over cp.

Lives here: MLA of DeepSeek-V2 (2405.04434, section 2.1), with and without q LoRA. May import `kernels` and `parallel`.
Shapes: s sequence, p = s/cp its part on the ranks of one tp group, l = p/tp this rank's, b batch, h hidden, n heads of
this rank, q latent of queries, c latent of keys and values, r rotated width, d qk_nope width, x = c + r, v value width.
With a cache, s are the rows of a step (see `latent_cache`) and b is 1; k sequences have a row each, S tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from kernels.attention import attention
from kernels.latent_heads import Heads, latent_heads, rotate
from kernels.matmul import product
from model.config import DeepSeekConfig
from model.latent_cache import LatentCache
from model.microbatch import MicroBatch
from parallel.comm import gather_sequences
from parallel.context import chunk_spans, context_part, gather_context
from parallel.mesh import Axis, Mesh
from parallel.recompute import discard, recomputed
from parallel.tensor import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, SequenceRMSNorm


class LatentAttention(nn.Module):
    """[l, b, h] -> [l, b, h]. Gathers latents over tp and then those of keys over cp; reduce-scatters output over tp.

    With q LoRA only q + c + r values a token are gathered over tp (V3: 1536 + 576 of 7168); without it queries need the
    hidden states. Over cp it is c + r values: every cp rank makes all keys from them and has its own queries only. That
    is exact and needs no ring, for about 20 % more work in a layer of V3 at cp 8. recompute: what is computed again in
    backward: "core_attn" attention itself, "mla_up_proj" queries, keys and values from the latents, "layernorm" the
    normed latents where they aren't gathered: gathered ones are kept, since they would have to travel again.

    Where the batch has a cache, latents and rotated keys of the rows are stored in it. Prompts attend as in training,
    each to itself; later tokens attend to the cache, in the space of the latents.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, layer: int, recompute: tuple[str, ...] = ()):
        super().__init__()
        self.layer = layer
        self.attend = partial(recomputed, attention) if "core_attn" in recompute else attention
        self.discard_heads = "mla_up_proj" in recompute
        self.discard_latents = "layernorm" in recompute and mesh.sequence.size == 1
        self.tp, self.cp = mesh.tp, mesh.cp
        self.heads = config.num_attention_heads // mesh.tp.size
        self.q_rank, self.kv_rank, self.rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
        self.nope = config.qk_nope_head_dim
        self.scale = config.softmax_scale
        hidden, all_heads = config.hidden_size, config.num_attention_heads
        if self.q_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, all_heads * config.qk_head_dim, mesh)
        else:
            self.q_a_proj = ReplicatedLinear(hidden, self.q_rank)
            self.q_a_layernorm = SequenceRMSNorm(self.q_rank, eps=1e-6)
            self.q_b_proj = ColumnParallelLinear(self.q_rank, all_heads * config.qk_head_dim, mesh)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden, self.kv_rank + self.rope)
        self.kv_a_layernorm = SequenceRMSNorm(self.kv_rank, eps=1e-6)
        self.kv_b_proj = ColumnParallelLinear(
            self.kv_rank, all_heads * (config.qk_nope_head_dim + config.v_head_dim), mesh
        )
        self.o_proj = RowParallelLinear(all_heads * config.v_head_dim, hidden, mesh)

    def forward(self, x_lbh: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        norms, k_pe = self._down_project(x_lbh)
        normed = [norm() for norm in norms]
        from_q = x_lbh if self.q_rank is None else normed[1]
        from_q, latent_sbc, k_pe_sbr = self._gather(from_q, normed[0], k_pe)
        if batch.cache is not None:
            return self.o_proj(self._with_cache(from_q, latent_sbc, k_pe_sbr, batch, batch.cache))
        up_project = partial(self._up_project, from_q, latent_sbc, k_pe_sbr, batch)
        heads = up_project()
        ends = [end for _, end in chunk_spans(latent_sbc.shape[0], self.cp.size, self.cp.rank)]
        out_pbm = self.attend(*heads, self.scale, batch.attention_mask, ends)
        if self.discard_latents:
            discard(normed, lambda: [norm() for norm in norms], consumed=out_pbm)
        if self.discard_heads:  # after the latents: they come back in this order, and heads are made of them
            discard(heads, up_project, consumed=out_pbm)
        return self.o_proj(out_pbm)

    def _down_project(self, x_lbh: torch.Tensor) -> tuple[list[Callable[[], torch.Tensor]], torch.Tensor]:
        """What makes the normed latents, of keys and values [l, b, c] and maybe of queries [l, b, q]; rotary key."""
        kv_latent, k_pe = self.kv_a_proj_with_mqa(x_lbh).split([self.kv_rank, self.rope], dim=-1)
        norms: list[Callable[[], torch.Tensor]] = [partial(self.kv_a_layernorm, kv_latent)]
        if self.q_rank is not None:
            norms.append(partial(self.q_a_layernorm, self.q_a_proj(x_lbh)))
        return norms, k_pe

    def _gather(self, from_q: torch.Tensor, kv_latent: torch.Tensor, k_pe: torch.Tensor) -> list[torch.Tensor]:
        """Of queries [p, b, q], or hidden states; of keys and values [s, b, c]; rotary key [s, b, r]."""
        from_q, kv_latent, k_pe = gather_sequences((from_q, kv_latent, k_pe), self.tp)
        return [from_q, *gather_context((kv_latent, k_pe), self.cp)]

    def _up_project(
        self, from_q: torch.Tensor, latent_sbc: torch.Tensor, k_pe_sbr: torch.Tensor, batch: MicroBatch
    ) -> Heads:
        """Rotated queries [p, b, n, d+r], keys [s, b, n, d+r] and values [s, b, n, v]; doesn't communicate."""
        assert batch.q_rotation is not None and batch.k_rotation is not None
        rotations = batch.q_rotation, batch.k_rotation
        return latent_heads(self._queries(from_q), self.kv_b_proj(latent_sbc), k_pe_sbr, *rotations, self.heads)

    def _queries(self, from_q: torch.Tensor) -> torch.Tensor:
        """Of this rank's heads, not yet rotated: [p, b, n·(d+r)]."""
        queries = self.q_proj if self.q_rank is None else self.q_b_proj
        return queries(from_q)

    def _with_cache(
        self,
        from_q: torch.Tensor,
        latent_sbc: torch.Tensor,
        k_pe_sbr: torch.Tensor,
        batch: MicroBatch,
        cache: LatentCache,
    ) -> torch.Tensor:
        """Store the step's rows and attend: [s, 1, n·v]. Rows that only fill up to a multiple of tp are zero."""
        assert batch.k_rotation is not None
        k_pe = rotate(k_pe_sbr.unsqueeze(2), batch.k_rotation).squeeze(2)
        cache.append(self.layer, torch.cat([latent_sbc, k_pe], dim=-1)[: cache.rows, 0])
        out_sbm = latent_sbc.new_zeros((*latent_sbc.shape[:2], self.o_proj.weight.shape[1]))
        if cache.is_prefill:
            q, k, v = self._up_project(from_q, latent_sbc, k_pe_sbr, batch)
            for start, end in cache.spans:
                out_sbm[start:end] = self.attend(q[start:end], k[start:end], v[start:end], self.scale)
        elif cache.rows:
            out_sbm[: cache.rows, 0] = self._attend_to_latents(from_q, batch, cache)
        return out_sbm

    def _attend_to_latents(self, from_q: torch.Tensor, batch: MicroBatch, cache: LatentCache) -> torch.Tensor:
        """One row of each sequence, [k, n·v], without making keys or values of heads (2405.04434, section 2.1.2).

        qᵀ(W_UK c) = (W_UKᵀ q)ᵀ c, and Σ pᵢ W_UV cᵢ = W_UV Σ pᵢ cᵢ: all heads attend to the same latents.
        """
        assert batch.q_rotation is not None
        q_sbny = self._queries(from_q).unflatten(-1, (self.heads, -1))
        q_pe_knr = rotate(q_sbny[..., self.nope :], batch.q_rotation)[: cache.rows, 0]
        q_nkd = q_sbny[: cache.rows, 0, :, : self.nope].transpose(0, 1)
        up_nyc = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        # 1. queries as the latents see them
        q_nkx = torch.cat([product(q_nkd, up_nyc[:, : self.nope]), q_pe_knr.transpose(0, 1)], dim=-1)
        # 2. attention of n heads to one shared head: they stand where queries do. Values are the keys' first c columns.
        shared_Sk1x = cache.read(self.layer).transpose(0, 1).unsqueeze(2)
        mask_k11S = cache.mask[:, None, None, :]
        out_nkx = self.attend(q_nkx.unsqueeze(2), shared_Sk1x, shared_Sk1x, self.scale, mask_k11S)
        # 3. values of each head
        return product(out_nkx[..., : self.kv_rank], up_nyc[:, self.nope :].transpose(1, 2)).transpose(0, 1).flatten(1)


def document_mask(documents_bs: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Causal attention within documents: bool [b, 1, s/cp, s], True where query (row, of this cp rank) may see key."""
    place_s = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    same = context_part(documents_bs, cp, dim=1).unsqueeze(2) == documents_bs.unsqueeze(1)
    causal = context_part(place_s, cp, dim=0).unsqueeze(1) >= place_s
    return (same & causal).unsqueeze(1)
