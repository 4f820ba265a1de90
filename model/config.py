"""The model's configuration: Hugging Face's `config.json` of a DeepSeek-V2 or -V3 model as a frozen dataclass.

May import the standard library only, so planning and launch code read a configuration without torch.
Source: the published configurations and DeepSeek's modelling code (docstrings name the formula they follow).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# Which router belongs to which model type: (scoring_func, the topk_methods that go with it).
ROUTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy")),
    "deepseek_v3": ("sigmoid", ("noaux_tc",)),
}

# Names that transformers 5 writes for fields which DeepSeek's files call otherwise.
_ALIASES = {"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"}

# `field: the only value that the model computes`. Checked wherever the file has the key, refused by name otherwise.
_FIXED: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "hidden_act": ("silu",),
    "rope_interleave": (True, None),
}

# What `n_routed_experts: null` means, as in DeepSeek's own code: every layer is dense. No other value here takes part.
_DENSE: dict[str, Any] = {
    "n_routed_experts": 1,
    "n_shared_experts": 0,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DENSE |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_intermediate_size": 1}


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(k) = 0.1·k·ln(factor) + 1, the attention temperature of YaRN; 1 where nothing is stretched (factor ≤ 1)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN, as in `rope_scaling` of the published files (https://arxiv.org/abs/2309.00071).

    `factor` stretches a context of `original_max_position_embeddings` tokens; dimensions that turn more than
    `beta_fast` times in it keep their frequency, those that turn less than `beta_slow` times are interpolated.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"rope_scaling factor {self.factor} would shrink the context: give at least 1")
        length = self.original_max_position_embeddings
        if length < 1:
            raise ValueError(f"rope_scaling original_max_position_embeddings {length} must be at least 1")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"rope_scaling needs 0 < beta_slow < beta_fast, not {self.beta_slow} and {self.beta_fast}")

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: m(mscale) / m(mscale_all_dim), 1 for every released model."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> YarnScaling | None:
        """Reads `rope_scaling` (key `type`) or transformers 5's `rope_parameters` (key `rope_type`); None if plain."""
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise ValueError(f"rope_scaling type {kind!r} isn't supported: use 'yarn', or null for plain RoPE")
        given = {k: v for k, v in values.items() if k not in ("type", "rope_type", "rope_theta") and v is not None}
        if given.get("truncate") is True:  # what YaRN does unless told otherwise
            del given["truncate"]
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"rope_scaling keys {', '.join(unknown)} aren't supported: remove them")
        if missing := sorted({"factor", "original_max_position_embeddings"} - given.keys()):
            raise ValueError(f"rope_scaling of type yarn lacks {', '.join(missing)}")
        return cls(**given)


@dataclass(frozen=True)
class DeepSeekConfig:
    """A DeepSeek-V2 or -V3 model. Field names and meanings are those of Hugging Face's `config.json`.

    A configuration that exists is valid: construction (also by `dataclasses.replace`) runs `validate`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    topk_method: str
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    max_position_embeddings: int
    n_group: int = 1
    topk_group: int = 1
    moe_layer_freq: int = 1
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    num_nextn_predict_layers: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Keys of the file that nothing here reads (token ids, torch_dtype, …): carried along for export."""

    def __post_init__(self) -> None:
        self.validate()

    # Reading and writing

    @classmethod
    def from_file(cls, path: str | Path) -> DeepSeekConfig:
        """Reads a `config.json`. Raises ValueError that starts with the path; FileNotFoundError where there is none."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("expected a JSON object with the keys of Hugging Face's config.json")
            return cls.from_dict(values)
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeepSeekConfig:
        """From the keys of a `config.json`, in DeepSeek's form or as transformers 5 writes it.

        `n_routed_experts: null` is a model without experts. Raises ValueError for another model type, for missing keys
        (all at once), for a key that misspells one of these, and as `validate` does.
        """
        given = {_ALIASES.get(name, name): value for name, value in values.items()}
        model_type = given.get("model_type")
        if model_type not in ROUTERS:
            raise ValueError(f"model_type {model_type!r} isn't a DeepSeek model: give one of {', '.join(ROUTERS)}")
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "extra"}
        for key in sorted(given.keys() - fields.keys()):
            if near := difflib.get_close_matches(key, sorted(fields.keys() - given.keys()), n=1, cutoff=0.85):
                raise ValueError(f"unknown key {key}: did you mean {near[0]}?")
        for name, allowed in _FIXED.items():
            if name in given and given[name] not in allowed:
                raise ValueError(f"{name} {given[name]!r} isn't supported by this model: set it to {allowed[0]!r}")
        heads, kv_heads = given.get("num_attention_heads"), given.get("num_key_value_heads")
        if kv_heads is not None and kv_heads != heads:
            raise ValueError(
                f"num_key_value_heads {kv_heads} differs from num_attention_heads {heads}: "
                "MLA has one key and one value per head, set them equal"
            )

        # transformers leaves the router's kind to the model type, and writes null for "no groups".
        scoring_func, topk_methods = ROUTERS[model_type]
        given.setdefault("scoring_func", scoring_func)
        given.setdefault("topk_method", topk_methods[0])
        given.update({name: 1 for name in ("n_group", "topk_group") if given.get(name) is None})
        if given.get("num_nextn_predict_layers") is None:
            given["num_nextn_predict_layers"] = 0
        given.update(_read_rope(given))

        if given.get("n_shared_experts", 0) is None:
            given["n_shared_experts"] = 0
        if given.get("n_routed_experts", 1) is None:
            given |= _DENSE | {"first_k_dense_replace": given.get("num_hidden_layers")}
            if given["num_nextn_predict_layers"]:
                raise ValueError(
                    f"num_nextn_predict_layers {given['num_nextn_predict_layers']} needs experts, which a block of "
                    "multi-token prediction has, and n_routed_experts is null: set one of them"
                )

        required = [name for name, f in fields.items() if f.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"missing keys: {', '.join(missing)}")
        extra = {k: v for k, v in given.items() if k not in fields and k != "rope_parameters"}
        return cls(**{k: v for k, v in given.items() if k in fields}, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The keys of a `config.json` that DeepSeek's code, vLLM and transformers load; `from_dict` reads them back.

        `quantization_config` is left out: it describes the file that was read, and what we write isn't quantised.
        """
        values = {name: value for name, value in self.extra.items() if name != "quantization_config"}
        values.update({f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"})
        if self.rope_scaling is not None:
            values["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(self.rope_scaling)}
        values["num_key_value_heads"] = self.num_attention_heads
        values.update(hidden_act="silu", tie_word_embeddings=False, attention_bias=False)
        return dict(sorted(values.items()))

    # Derived numbers

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without position, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-½ · m(mscale_all_dim)²: V2 and V3 0.135234, V2-Lite 0.114721."""
        yarn = self.rope_scaling
        return self.qk_head_dim**-0.5 * (yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else 1.0)

    @property
    def num_mtp_layers(self) -> int:
        """Depths of multi-token prediction; depth k (from 0) is layer num_hidden_layers + k."""
        return self.num_nextn_predict_layers

    @property
    def num_layers_with_mtp(self) -> int:
        """All blocks: the main model's layers, then one for each depth of multi-token prediction."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts, which are one MLP; 0 without them."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def has_router_bias(self) -> bool:
        """Whether experts are balanced by `e_score_correction_bias` (V3's auxiliary-loss-free way)."""
        return self.topk_method == "noaux_tc"

    @property
    def aux_loss_kind(self) -> Literal["none", "softmax", "normalized_sigmoid"]:
        """The scores whose mean over a sequence is Pᵢ in the balance loss α Σ fᵢPᵢ: V2's, or V3's sᵢ / Σⱼsⱼ."""
        if self.aux_loss_alpha == 0.0:
            return "none"
        return "softmax" if self.scoring_func == "softmax" else "normalized_sigmoid"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts: DeepSeek's rule for the main model; MTP blocks always have."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    # Checks

    def validate(self) -> None:
        """Raises ValueError, with the numbers and the fix, where the model can't be built as configured."""
        if self.model_type not in ROUTERS:
            raise ValueError(f"model_type {self.model_type!r} isn't a DeepSeek model: give one of {', '.join(ROUTERS)}")
        self._validate_types()
        self._validate_router()
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: RoPE turns pairs, give an even number")
        if not self.rope_theta > 1.0:
            raise ValueError(f"rope_theta {self.rope_theta} must be above 1 (the published models use 10000)")
        if self.aux_loss_alpha and not self.seq_aux:
            raise ValueError(
                f"seq_aux false with aux_loss_alpha {self.aux_loss_alpha}: a batch-wise auxiliary loss would depend on "
                "the micro-batch size; set seq_aux true or aux_loss_alpha 0"
            )

    def _validate_types(self) -> None:
        at_least_0 = ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), f.type  # annotations are strings in this file
            if kind == "int | None" and value is None:
                continue
            if kind in ("int", "int | None"):
                lowest = 0 if f.name in at_least_0 else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                    raise ValueError(f"{f.name} {value!r} must be a whole number of at least {lowest}")
            elif kind == "float":
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                    raise ValueError(f"{f.name} {value!r} must be a number of at least 0")
            elif kind == "bool" and not isinstance(value, bool):
                raise ValueError(f"{f.name} {value!r} must be true or false")

    def _validate_router(self) -> None:
        scoring_func, topk_methods = ROUTERS[self.model_type]
        if self.scoring_func != scoring_func:
            raise ValueError(f"scoring_func {self.scoring_func!r} isn't {self.model_type}'s: use {scoring_func!r}")
        if self.topk_method not in topk_methods:
            raise ValueError(
                f"topk_method {self.topk_method!r} isn't one of {self.model_type}'s: use {' or '.join(topk_methods)}"
            )
        experts, groups, kept = self.n_routed_experts, self.n_group, self.topk_group
        if self.topk_method == "greedy":  # looks at all experts, whatever the groups say
            groups = kept = 1
        if experts % groups:
            raise ValueError(f"n_routed_experts {experts} isn't divisible by n_group {groups}: change one of them")
        if kept > groups:
            raise ValueError(f"topk_group {kept} is above n_group {groups}: choose at most all groups")
        if self.num_experts_per_tok > kept * (experts // groups):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is above the {kept * (experts // groups)} experts "
                f"of topk_group {kept} out of n_group {groups} groups of {experts // groups}: "
                "lower it, or raise topk_group or n_routed_experts"
            )
        if self.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
            raise ValueError(
                f"n_group {groups} leaves {experts // groups} expert a group, but noaux_tc scores a group by its best "
                f"two: lower n_group to {experts // 2} or below"
            )


def _read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from DeepSeek's keys, or from transformers 5's one `rope_parameters`."""
    forms = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    thetas = [given["rope_theta"]] if given.get("rope_theta") is not None else []
    thetas += [form["rope_theta"] for form in forms if form.get("rope_theta") is not None]
    scalings = [YarnScaling.from_dict(form) for form in forms]
    if len(set(thetas)) > 1 or len(set(scalings)) > 1:
        raise ValueError("rope_scaling, rope_theta and rope_parameters contradict each other: keep one form")
    return {
        "rope_scaling": scalings[0] if scalings else None,
        "rope_theta": thetas[0] if thetas else 10000.0,
    }
