"""From `--data-path` and `--split` to the train, valid and test samples.

May import `data.indexed`, `data.samples` and `data.blend` only.
Source: Megatron's BlendedMegatronDatasetBuilder; there are no index caches, so any number of processes may build at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.blend import SPLITS, Blend, parse_data_path, split_documents
from data.indexed import IndexedDataset, bin_path
from data.samples import PackedSamples

# Up to this size every token id is checked at the start; larger files are checked sample by sample as they are read.
CHECK_AT_START_BYTES = 256 << 20

Dataset = PackedSamples | Blend


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    vocab_size: int | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Open the token files and divide them.

    Args:
        data_path: one prefix, several (weighted by their tokens), or weight prefix weight prefix ...
        split: weights of train,valid,test by documents, such as "969,30,1"; the same for every dataset of a blend.
        seq_length: s; every `sample(i)` is int64 [s + 1].
        seed: of the order.
        train_samples, valid_samples, test_samples: `len` of each; where it is 0 the result is None and an empty split
            no error.
        vocab_size: number of ids the model embeds; ids beyond it are refused, naming the document: files up to 256
            MiB are checked here, larger ones as each sample is read.
    Returns: (train, valid, test)
    Raises: FileNotFoundError, ValueError as `IndexedDataset`; ValueError for a split without documents or without
        tokens.
    """
    prefixes, weights = parse_data_path(data_path)
    files = [IndexedDataset(prefix) for prefix in prefixes]
    if vocab_size is not None:
        for file in files:
            if bin_path(file.prefix).stat().st_size <= CHECK_AT_START_BYTES:
                file.check_token_ids(vocab_size)

    def one(number: int, samples: int) -> Dataset | None:
        if samples == 0:
            return None
        parts = []
        for file in files:
            documents = split_documents(split, file.num_documents)[number]
            if not documents:
                raise ValueError(
                    f"split {split} leaves 0 of the {file.num_documents} documents of {file.prefix} to "
                    f"{SPLITS[number]}, which needs {samples} samples: "
                    f"raise its share, add documents, or ask for 0 samples"
                )
            parts.append(PackedSamples(file, seq_length, seed, samples, documents.start, documents.stop, vocab_size))
        if len(parts) == 1:
            return parts[0]
        return Blend(parts, weights or [float(part.tokens_per_epoch) for part in parts], samples)

    return one(0, train_samples), one(1, valid_samples), one(2, test_samples)
