"""The run's data, opened before ranks meet: what is wrong with it is said before any process waits for another.

Lives here: from the flags to the samples of the data room. May import `data` and `model.config`; free of torch groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.bigram import bigram_baseline
from data.build import Dataset, build_datasets
from data.tokenizer import load_tokenizer
from model.config import DeepSeekConfig
from training.arguments import Arguments
from training.failures import ConfigurationError


@dataclass(frozen=True)
class RunData:
    """Training and validation samples (None where --eval-iters is 0), and the end-of-document id if it is known."""

    train: Dataset
    valid: Dataset | None
    eod_id: int | None


def open_data(arguments: Arguments, config: DeepSeekConfig) -> RunData:
    """Raises ConfigurationError for damaged files, ids beyond the vocabulary, an empty split, a foreign tokenizer."""
    training, data = arguments.training, arguments.data
    try:
        train, valid, _ = build_datasets(
            data.data_path,
            data.split,
            training.seq_length,
            arguments.run.seed,
            train_samples=training.train_iters * training.global_batch_size,
            valid_samples=training.eval_iters * training.global_batch_size,
            test_samples=0,
            vocab_size=config.vocab_size,
        )
        eod_id = None
        if data.tokenizer_model is not None:
            eod_id = load_tokenizer(data.tokenizer_model, config.vocab_size).eod_id
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    needs_eod = [
        name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, name)
    ]
    if needs_eod and eod_id is None:
        flags = ", ".join("--" + name.replace("_", "-") for name in needs_eod)
        raise ConfigurationError(f"{flags} need the end-of-document id: give --tokenizer-model")
    assert train is not None
    return RunData(train, valid, eod_id)


def bigram_loss(arguments: Arguments, config: DeepSeekConfig, data: RunData) -> float:
    """Validation loss of a smoothed bigram model fitted on exactly the run's training tokens (each counted once)."""
    assert data.valid is not None
    # Text that is trained on again teaches a bigram model nothing new, and repeats would spoil its discounts.
    once = min(len(data.train), data.train.samples_per_epoch)
    eod_id = data.eod_id if arguments.data.eod_mask_loss else None
    train, valid = (
        map(part.sample, range(count)) for part, count in ((data.train, once), (data.valid, len(data.valid)))
    )
    return bigram_baseline(train, valid, config.vocab_size, eod_id)
