"""Multi-head latent attention: small latents are gathered over tp, heads are split over it.

Lives here: MLA of DeepSeek-V2 (2405.04434, section 2.1), with and without q LoRA. May import `kernels` and `parallel`.
Shapes: s sequence, l = s/tp this rank's part of it, b batch, h hidden, n heads of this rank, q latent of queries, c
latent of keys and values, r rotated width, d qk_nope width, v value width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from kernels.attention import attention
from kernels.latent_heads import Heads, latent_heads
from model.config import DeepSeekConfig
from model.microbatch import MicroBatch
from parallel.comm import gather_sequences
from parallel.mesh import Mesh
from parallel.recompute import discard, recomputed
from parallel.tensor import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, SequenceRMSNorm


class LatentAttention(nn.Module):
    """[s/tp, b, h] -> [s/tp, b, h]. Communicates over tp: one gather of the latents, one reduce-scatter of the output.

    With q LoRA only q + c + r values a token are gathered (V3: 1536 + 576 of 7168); without it queries need the hidden
    states. recompute: what is computed again in backward: "core_attn" attention itself, "mla_up_proj" queries, keys and
    values from the latents, "layernorm" the normed latents, unless they were gathered: those are kept, since making
    them again would communicate.
    """

    def __init__(self, config: DeepSeekConfig, mesh: Mesh, recompute: tuple[str, ...] = ()):
        super().__init__()
        self.attend = partial(recomputed, attention) if "core_attn" in recompute else attention
        self.discard_heads = "mla_up_proj" in recompute
        self.discard_latents = "layernorm" in recompute and mesh.tp.size == 1
        self.tp = mesh.tp
        self.heads = config.num_attention_heads // mesh.tp.size
        self.q_rank, self.kv_rank, self.rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
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
        assert batch.rotation is not None
        norms, k_pe = self._down_project(x_lbh)
        normed = [norm() for norm in norms]
        from_q = x_lbh if self.q_rank is None else normed[1]
        from_q, latent_sbc, k_pe_sbr = gather_sequences((from_q, normed[0], k_pe), self.tp)
        up_project = partial(self._up_project, from_q, latent_sbc, k_pe_sbr, batch.rotation)
        heads = up_project()
        out_sbm = self.attend(*heads, self.scale, batch.attention_mask)
        if self.discard_latents:
            discard(normed, lambda: [norm() for norm in norms], consumed=out_sbm)
        if self.discard_heads:  # after the latents: they come back in this order, and heads are made of them
            discard(heads, up_project, consumed=out_sbm)
        return self.o_proj(out_sbm)

    def _down_project(self, x_lbh: torch.Tensor) -> tuple[list[Callable[[], torch.Tensor]], torch.Tensor]:
        """What makes the normed latents, of keys and values [l, b, c] and maybe of queries [l, b, q]; rotary key."""
        kv_latent, k_pe = self.kv_a_proj_with_mqa(x_lbh).split([self.kv_rank, self.rope], dim=-1)
        norms: list[Callable[[], torch.Tensor]] = [partial(self.kv_a_layernorm, kv_latent)]
        if self.q_rank is not None:
            norms.append(partial(self.q_a_layernorm, self.q_a_proj(x_lbh)))
        return norms, k_pe

    def _up_project(
        self, from_q: torch.Tensor, latent_sbc: torch.Tensor, k_pe_sbr: torch.Tensor, rotation: torch.Tensor
    ) -> Heads:
        """Rotated queries [s, b, n, d+r], keys [s, b, n, d+r] and values [s, b, n, v]; doesn't communicate."""
        queries = self.q_proj if self.q_rank is None else self.q_b_proj
        return latent_heads(queries(from_q), self.kv_b_proj(latent_sbc), k_pe_sbr, rotation, self.heads)


def document_mask(documents_bs: torch.Tensor) -> torch.Tensor:
    """Causal attention within documents: bool [b, 1, s, s], True where query (row) may see key (column)."""
    length = documents_bs.shape[1]
    same = documents_bs.unsqueeze(2) == documents_bs.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents_bs.device).tril()
    return (same & causal).unsqueeze(1)
