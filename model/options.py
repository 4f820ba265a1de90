"""How a model is trained, as far as it isn't its shape: what the stage and its layers are told.

Lives here: one frozen dataclass. May import `model.balance`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from model.balance import Balance


@dataclass(frozen=True)
class ModelOptions:
    """Of all layers alike.

    recompute: "full" keeps a block's input and runs its forward again in backward, "selective" does so with parts of a
    block, recompute_modules (the names in training/arguments.py); mtp_loss_scaling_factor: λ of the MTP losses;
    mtp_hidden: whether MTP starts from the last hidden states after or before the final norm; balance: of experts.
    """

    recompute: Literal["none", "full", "selective"] = "none"
    recompute_modules: tuple[str, ...] = ()
    mtp_loss_scaling_factor: float = 0.3
    mtp_hidden: Literal["after-norm", "before-norm"] = "after-norm"
    balance: Balance = field(default_factory=Balance)

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """The parts of a block that are computed again in backward, by name."""
        return self.recompute_modules if self.recompute == "selective" else ()
