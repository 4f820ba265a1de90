"""The run's data, opened before ranks meet: a tokenizer that isn't the model's is told before anything is built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.indexed import IndexedWriter
from tests.hf_directories import USER, write_tokenizer
from tests.layouts import Job
from training.arguments import Arguments
from training.datasets import open_data
from training.failures import ConfigurationError


def test_a_tokenizer_is_taken_for_its_end_of_document_and_refused_where_it_is_too_large(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "text", vocab_size=300) as writer:
        writer.add_document(np.arange(64))
    write_tokenizer(tmp_path / "tokenizer", eos_token=USER)
    arguments = Arguments().replace(
        data_path=(str(tmp_path / "text"),),
        tokenizer_model=str(tmp_path / "tokenizer"),
        eod_mask_loss=True,
        split="1,0,0",
        seq_length=8,
        train_iters=2,
        global_batch_size=2,
        eval_iters=0,
    )
    assert open_data(arguments, Job(overrides={"vocab_size": 300}).model()).eod_id == 299
    with pytest.raises(ConfigurationError, match="tokenizer.json has 300 ids, the model's vocab_size is 299: use the"):
        open_data(arguments, Job(overrides={"vocab_size": 299}).model())
