"""Hugging Face checkpoints: our global names and shapes, theirs, and reading a directory into one rank's shards.

May import torch, safetensors, `parallel.sharding`, `parallel.mesh` and `model.config`.
Source: the published DeepSeek-V2/V3 directories (names, MTP layer, FP8 blocks) and safetensors' index format.

Our names are theirs without "model."; gate and up projections are one tensor, experts one tensor for all of them:
    layers.3.mlp.shared_experts.gate_up_proj.weight [2, I, H]   layers.3.mlp.experts.gate_up_proj [E, 2I, H]
    layers.3.mlp.gate.e_score_correction_bias [E] (a buffer)    layers.3.mlp.experts.down_proj    [E, H, I]
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model.config import DeepSeekConfig
from parallel.mesh import Mesh
from parallel.sharding import Sharding, global_slice, valid_part

Index = tuple[int | slice, ...]
Shape = tuple[int, ...]

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_SCALE = "_scale_inv"  # "X.weight_scale_inv" holds the block scales of an FP8 "X.weight"
_FP8 = "F8_E4M3"
_READ_AS = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, _FP8: torch.float32}
)
_FP8_BLOCK = (128, 128)
_CHUNK_BYTES = 64 << 20
"""What is read at a time, so that importing needs no second copy of an embedding (1.9 GB in V3)."""
_LISTED = 50
"""Names listed for each kind of problem; a directory of another model would fill screens."""


# --------------------------------------------------------------------------------------------------- names and shapes


class Piece(NamedTuple):
    """One tensor of Hugging Face's, and the part of our whole tensor that it is (leading dimensions; () is all)."""

    hf_name: str
    where: Index


@functools.lru_cache(maxsize=8)
def global_shapes(config: DeepSeekConfig) -> Mapping[str, Shape]:
    """Every tensor of the model by its global name, in the order of the layers: parameters and the router's bias."""
    hidden, heads, experts = config.hidden_size, config.num_attention_heads, config.n_routed_experts
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, hidden)}

    def add_mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_up_proj.weight"] = (2, width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(config.num_layers_with_mtp):
        prefix, attention, mlp = f"layers.{layer}", f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        is_mtp = layer >= config.num_hidden_layers
        if is_mtp:
            shapes[f"{prefix}.enorm.weight"] = shapes[f"{prefix}.hnorm.weight"] = (hidden,)
            shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        queries = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            shapes[f"{attention}.q_proj.weight"] = (queries, hidden)
        else:
            shapes[f"{attention}.q_a_proj.weight"] = (config.q_lora_rank, hidden)
            shapes[f"{attention}.q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes[f"{attention}.q_b_proj.weight"] = (queries, config.q_lora_rank)
        latent = config.kv_lora_rank
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (latent + config.qk_rope_head_dim, hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (latent,)
        shapes[f"{attention}.kv_b_proj.weight"] = (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * config.v_head_dim)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.is_moe_layer(layer):
            shapes[f"{mlp}.gate.weight"] = (experts, hidden)
            if config.has_router_bias:
                shapes[f"{mlp}.gate.e_score_correction_bias"] = (experts,)
            shapes[f"{mlp}.experts.gate_up_proj"] = (experts, 2 * config.moe_intermediate_size, hidden)
            shapes[f"{mlp}.experts.down_proj"] = (experts, hidden, config.moe_intermediate_size)
            if config.n_shared_experts:
                add_mlp(f"{mlp}.shared_experts", config.shared_intermediate_size)
        else:
            add_mlp(mlp, config.intermediate_size)
        if is_mtp:
            shapes[f"{prefix}.shared_head.norm.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return MappingProxyType(shapes)


def hf_tensors(global_name: str, config: DeepSeekConfig) -> list[Piece]:
    """The tensors of Hugging Face's that make up ours. Raises ValueError where the model has no such tensor."""
    shape = global_shapes(config).get(global_name)
    if shape is None:
        raise ValueError(f"{global_name} isn't a tensor of this {config.model_type} configuration")
    name = global_name if global_name.startswith("lm_head.") else f"model.{global_name}"
    stem, _, last = name.rpartition(".experts.")
    if last == "gate_up_proj":
        width = shape[1] // 2
        halves = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
        return [Piece(f"{stem}.experts.{e}.{half}.weight", (e, at)) for e in range(shape[0]) for half, at in halves]
    if last == "down_proj":
        return [Piece(f"{stem}.experts.{e}.down_proj.weight", (e,)) for e in range(shape[0])]
    if name.endswith(".gate_up_proj.weight"):
        stem = name.removesuffix("gate_up_proj.weight")
        return [Piece(f"{stem}gate_proj.weight", (0,)), Piece(f"{stem}up_proj.weight", (1,))]
    return [Piece(name, ())]


def hf_repeats(config: DeepSeekConfig) -> dict[str, str]:
    """Tensors that a Hugging Face directory repeats in each MTP layer: their name there, and whose copy they are."""
    repeats = {}
    for layer in range(config.num_hidden_layers, config.num_layers_with_mtp):
        repeats[f"model.layers.{layer}.embed_tokens.weight"] = "embed_tokens.weight"
        repeats[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return repeats


def hf_shapes(config: DeepSeekConfig) -> dict[str, Shape]:
    """Every tensor of the model's Hugging Face directory and its shape, without the repeats of the MTP layers."""
    return {
        piece.hf_name: _indexed_shape(shape, piece.where)
        for global_name, shape in global_shapes(config).items()
        for piece in hf_tensors(global_name, config)
    }


def to_hf(tensors: Iterable[tuple[str, Tensor]], config: DeepSeekConfig) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under our global names, one by one, as Hugging Face's (views; the MTP layers' repeats included).

    Raises ValueError for a name that the model doesn't have or a shape that isn't the whole one.
    """
    repeats = defaultdict(list)
    for repeat, global_name in hf_repeats(config).items():
        repeats[global_name].append(repeat)
    for global_name, tensor in tensors:
        pieces = hf_tensors(global_name, config)
        if tuple(tensor.shape) != (shape := global_shapes(config)[global_name]):
            raise ValueError(f"{global_name} is {list(tensor.shape)}, the whole tensor is {list(shape)}")
        for piece in pieces:
            yield piece.hf_name, tensor[piece.where]
        for repeat in repeats[global_name]:
            yield repeat, tensor


def _indexed_shape(shape: Shape, index: Index) -> Shape:
    """The shape of `tensor[index]`: whole numbers drop their dimension, slices (with both ends) shorten it."""
    sizes = [at.stop - at.start for at in index if isinstance(at, slice)]
    return (*sizes, *shape[len(index) :])


# ------------------------------------------------------------------------------------------------- reading a directory


class Part(NamedTuple):
    """The `part` of a tensor of Hugging Face's that a rank holds, and where: a view of its shard."""

    hf_name: str
    part: tuple[slice, ...]
    view: Tensor


class HFDirectory:
    """A directory of safetensors, checked against a configuration from the files' headers alone.

    Raises FileNotFoundError where there are no safetensors, and one ValueError that lists everything that is wrong:
    missing shard files, missing tensors, wrong shapes or dtypes, unknown names.
    """

    def __init__(self, directory: str | Path, config: DeepSeekConfig) -> None:
        self.directory, self.config = Path(directory), config
        quantization = config.extra.get("quantization_config") or {}
        self._block: tuple[int, int] = tuple(quantization.get("weight_block_size") or _FP8_BLOCK)
        self._files: dict[str, str] = {}  # of each tensor
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        problems: dict[str, list[str]] = defaultdict(list)
        promised = self._read_headers(problems)
        self._compare(promised, problems)
        if problems:
            lines = [f"{self.directory} doesn't hold the model of its configuration:", *_listed(problems)]
            mtp = tuple(f"model.layers.{i}." for i in range(config.num_hidden_layers, config.num_layers_with_mtp))
            if mtp and not any(name.startswith(mtp) for name in (*self._shapes, *promised)):
                lines.append(
                    "  it has no layer for multi-token prediction: set num_nextn_predict_layers 0 in its config.json"
                )
            raise ValueError("\n".join(lines))

    def file_of(self, hf_name: str) -> str:
        """The file, relative to the directory, that holds a tensor."""
        return self._files[hf_name]

    def shape_of(self, hf_name: str) -> Shape:
        """Of a tensor, as its file has it."""
        return self._shapes[hf_name]

    def dtype_of(self, hf_name: str) -> torch.dtype:
        """In which `read` gives a tensor: its own, fp32 where that is FP8."""
        return _READ_AS[self._dtypes[hf_name]]

    @property
    def repeats(self) -> dict[str, str]:
        """Copies of the embedding and the head that the MTP layers have here: their names, and the originals'."""
        originals = {name: hf_tensors(owner, self.config)[0].hf_name for name, owner in hf_repeats(self.config).items()}
        return {name: original for name, original in originals.items() if name in self._files}

    def read(self, hf_name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the `part` of it (one slice with both ends a dimension), on the CPU.

        FP8 values come de-quantised, in fp32: each times the scale of its block, as DeepSeek's own conversion does.
        """
        with safe_open(self.directory / self._files[hf_name], framework="pt") as file:
            return self.read_from(file, hf_name, part)

    def read_from(self, file: Any, hf_name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """`read` through the already opened `file_of(hf_name)`."""
        part = part or tuple(slice(0, size) for size in self._shapes[hf_name])
        values = file.get_slice(hf_name)[part]
        if self._dtypes[hf_name] != _FP8:
            return values
        blocks = tuple(slice(at.start // size, -(-at.stop // size)) for at, size in zip(part, self._block, strict=True))
        scale = hf_name + _SCALE
        scales = (
            file.get_slice(scale)[blocks] if self._files[scale] == self._files[hf_name] else self.read(scale, blocks)
        )
        for dim, (at, block, size) in enumerate(zip(part, blocks, self._block, strict=True)):
            first = at.start - block.start * size
            scales = scales.repeat_interleave(size, dim).narrow(dim, first, at.stop - at.start)
        return values.float() * scales

    @torch.no_grad()
    def fill(self, parts: Iterable[Part]) -> None:
        """Copy all of these from the files into their views, in the views' dtype; each file is opened once."""
        plan: dict[str, list[Part]] = defaultdict(list)
        for part in parts:
            plan[self.file_of(part.hf_name)].append(part)
        for name, wanted in plan.items():
            with safe_open(self.directory / name, framework="pt") as file:
                for hf_name, rows, view in itertools.chain.from_iterable(map(_chunks, wanted)):
                    view.copy_(self.read_from(file, hf_name, rows))

    def _read_headers(self, problems: dict[str, list[str]]) -> set[str]:
        """Fills the tables; returns the names that the index promises in files that can't be read."""
        index, single = self.directory / _INDEX_FILE, self.directory / _SINGLE_FILE
        weight_map: dict[str, str] = {}
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index} isn't an index of safetensors: {error!r}") from error
        elif not single.exists():
            raise FileNotFoundError(f"{self.directory} has neither {_INDEX_FILE} nor {_SINGLE_FILE}")
        for name in sorted(set(weight_map.values())) or [_SINGLE_FILE]:
            path = self.directory / name
            if not path.exists():
                problems["missing shard files"].append(name)
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    for hf_name in file.keys():
                        header = file.get_slice(hf_name)
                        self._files[hf_name] = name
                        self._shapes[hf_name] = tuple(header.get_shape())
                        self._dtypes[hf_name] = header.get_dtype()
            except SafetensorError as error:  # an interrupted download
                if not weight_map:
                    raise ValueError(f"{path} can't be read: {error}") from error
                problems["unreadable files"].append(f"{name} ({error})")
        unreadable = set(weight_map.values()) - set(self._files.values())
        return {hf_name for hf_name, name in weight_map.items() if name in unreadable}

    def _compare(self, promised: set[str], problems: dict[str, list[str]]) -> None:
        expected, repeats = hf_shapes(self.config), self.repeats
        for hf_name, shape in expected.items():
            if hf_name in self._shapes:
                self._compare_one(hf_name, shape, promised, problems)
            elif hf_name not in promised:
                problems["missing tensors"].append(hf_name)
        for repeat, original in repeats.items():
            self._compare_one(repeat, expected[original], promised, problems)
        for hf_name in self._shapes:
            owner = hf_name.removesuffix(_SCALE)
            is_scale = owner != hf_name and self._dtypes.get(owner) == _FP8
            ignored = owner in repeats or hf_name.endswith(".rotary_emb.inv_freq")  # a constant that old files hold
            if hf_name not in expected and not is_scale and not ignored:
                problems["unknown tensors"].append(hf_name)

    def _compare_one(self, hf_name: str, shape: Shape, promised: set[str], problems: dict[str, list[str]]) -> None:
        found, dtype = self._shapes[hf_name], self._dtypes[hf_name]
        if found != shape:
            problems["wrong shapes"].append(f"{hf_name} is {list(found)}, the configuration makes it {list(shape)}")
        elif dtype == _FP8 and len(shape) == 2:
            scale = hf_name + _SCALE
            blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
            if scale not in self._shapes:
                if scale not in promised:
                    problems["missing tensors"].append(scale)
            elif self._shapes[scale] != blocks:
                problems["wrong shapes"].append(
                    f"{scale} is {list(self._shapes[scale])}, blocks of {list(self._block)} make it {list(blocks)}"
                )
        elif dtype not in _READ_AS or dtype == _FP8:
            problems["wrong dtypes"].append(f"{hf_name} is {dtype}, not one of {', '.join(_READ_AS)}")


def _listed(problems: Mapping[str, list[str]]) -> Iterator[str]:
    for kind, entries in problems.items():
        yield f"  {kind} ({len(entries)}):"
        yield from (f"    {entry}" for entry in entries[:_LISTED])
        if len(entries) > _LISTED:
            yield f"    … and {len(entries) - _LISTED} more"


@torch.no_grad()
def load_hf_directory(directory: str | Path, stage_module: nn.Module, config: DeepSeekConfig, mesh: Mesh) -> None:
    """Fill a stage's parameters and router biases with this rank's part of a Hugging Face directory, in their dtype.

    Names and shapes of the whole directory are checked first: on any error no parameter has changed. No communication:
    every rank reads its own slices. Padding rows become zero. Raises as `HFDirectory` does, and ValueError where the
    module was built from another configuration.
    """
    source = HFDirectory(directory, config)
    shapes = global_shapes(config)
    buffers = {name: buffer for name, buffer in stage_module.named_buffers() if name in shapes}
    held = {**dict(stage_module.named_parameters()), **buffers}
    parts: list[Part] = []
    for global_name, tensor in held.items():
        sharding = getattr(tensor, "sharding", Sharding())
        if global_name not in shapes or sharding.global_shape(tensor.shape) != shapes[global_name]:
            raise ValueError(
                f"the stage's {global_name} is {list(sharding.global_shape(tensor.shape))}, its configuration makes it "
                f"{list(shapes.get(global_name, ()))}: it was built from another one"
            )
        parts += parts_of_block(global_name, tensor.detach(), sharding, config, mesh)
    for tensor in held.values():
        sharding = getattr(tensor, "sharding", Sharding())
        if valid_part(tensor, sharding, mesh).shape != tensor.shape:
            tensor.zero_()
    source.fill(parts)


def parts_of_block(
    global_name: str, tensor: Tensor, sharding: Sharding, config: DeepSeekConfig, mesh: Mesh
) -> Iterator[Part]:
    """What one of this rank's tensors holds: each piece, cut by the rank's block of the split dimension."""
    held = [slice(0, size) for size in global_shapes(config)[global_name]]
    if sharding.split_dim is not None:
        held[sharding.split_dim] = global_slice(sharding, mesh)
    yield from parts_of_box(global_name, valid_part(tensor, sharding, mesh), held, config)


def parts_of_box(global_name: str, box: Tensor, held: Sequence[slice], config: DeepSeekConfig) -> Iterator[Part]:
    """The same of any `box` of the global tensor. held: where it lies, a slice with both ends a dimension."""
    shape = global_shapes(config)[global_name]
    for hf_name, index in hf_tensors(global_name, config):
        part: list[slice] = []  # of Hugging Face's tensor
        inside: list[int | slice] = []  # of the box
        whole = (slice(0, size) for size in shape[len(index) :])
        for at, mine in zip((*index, *whole), held, strict=True):
            if isinstance(at, int):
                if not mine.start <= at < mine.stop:
                    break
                inside.append(at - mine.start)
            else:
                start, stop = max(at.start, mine.start), min(at.stop, mine.stop)
                if start >= stop:
                    break
                part.append(slice(start - at.start, stop - at.start))
                inside.append(slice(start - mine.start, stop - mine.start))
        else:
            yield Part(hf_name, tuple(part), box[tuple(inside)])


def _chunks(whole: Part) -> Iterator[Part]:
    """The same in blocks of rows of at most `_CHUNK_BYTES` in fp32."""
    rows, *others = whole.part
    height = max(1, _CHUNK_BYTES // (4 * math.prod(at.stop - at.start for at in others)))
    for start in range(rows.start, rows.stop, height):
        stop = min(start + height, rows.stop)
        yield Part(whole.hf_name, (slice(start, stop), *others), whole.view[start - rows.start : stop - rows.start])
