"""What the installed DeepSpeed reads from a file, as JSON on the standard output; configurations on the standard input.

Run by test_deepspeed_config in a process of its own, as DeepSpeed takes seconds to import. A line of input is a
configuration that DeepSpeed must take.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ASKED: set[str] = set()


class Asked(dict):  # type: ignore[type-arg]
    """Tells which keys it is asked for; DeepSpeed copies it, so all tell to the same set."""

    def __contains__(self, key: object) -> bool:
        ASKED.add(str(key))
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        ASKED.add(str(key))
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def fields(model: Any) -> dict[str, str]:
    """Each key of a pydantic model as a file writes it -> its type, in words."""
    kinds = {bool: "bool", int: "int", float: "float"}
    return {
        field.alias or name: kinds.get(field.annotation, str(field.annotation))
        for name, field in model.model_fields.items()
    }


def main() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    DeepSpeedConfig(Asked({"train_batch_size": 1}))
    for line in sys.stdin:
        taken = DeepSpeedConfig(json.loads(line))
        assert (taken.train_micro_batch_size_per_gpu, taken.gradient_accumulation_steps) == (1, 1)
    models = {
        "ZERO": DeepSpeedZeroConfig,
        "OFFLOAD_OPTIMIZER": DeepSpeedZeroOffloadOptimizerConfig,
        "OFFLOAD_PARAM": DeepSpeedZeroOffloadParamConfig,
        "FP16": DeepSpeedFP16Config,
        "BF16": DeepSpeedBF16Config,
        "COMMS_LOGGER": CommsLoggerConfig,
        "THROUGHPUT": DeepSpeedThroughputTimerConfig,
    }
    found: dict[str, Any] = {name: fields(model) for name, model in models.items()}
    found["AIO"] = dict.fromkeys(AIO_DEFAULT_DICT, "")
    found["TOP_LEVEL"] = dict.fromkeys(ASKED, "")
    print("KEYS " + json.dumps(found))


if __name__ == "__main__":
    main()
