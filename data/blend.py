"""Several datasets mixed by weight, and one dataset divided into train, valid and test.

May import numpy, `data.indexed` and `data.samples` only.
Source: Megatron's BlendedDataset, `--data-path` and `--split`; the order of a blend is Webster's (Sainte-Laguë's)
method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data.indexed import Int64Array
from data.samples import PackedSamples

SPLITS = ("train", "valid", "test")
PERIOD = 1 << 20


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """`--data-path`: one prefix, several prefixes, or weight prefix weight prefix ...

    Returns: (prefixes, weights or None where none are given)
    Raises: ValueError for an empty list, numbers in odd places, weights that are not positive and finite.
    """

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    numbers = [number(item) for item in data_path]
    if not data_path:
        raise ValueError("data-path is empty: give a prefix, several, or weight prefix weight prefix ...")
    if all(value is None for value in numbers):
        return list(data_path), None
    weights = [value for value in numbers[0::2] if value is not None]
    if len(data_path) % 2 or len(weights) * 2 != len(data_path) or any(value is not None for value in numbers[1::2]):
        raise ValueError(
            f"data-path {' '.join(data_path)}: weights must stand before every prefix or before none "
            f"(0.3 data/a 0.7 data/b, or data/a data/b)"
        )
    prefixes = list(data_path[1::2])
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f"data-path: weight {weight} of {prefix} must be positive: leave the dataset out or raise it"
            )
    return prefixes, weights


def parse_split(split: str) -> tuple[float, float, float]:
    """`--split 969,30,1` → the shares of train, valid and test, summing to 1; missing ones are 0."""
    try:
        values = [float(part) for part in re.split(r"[,/\s]+", split.strip())]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 3 or not all(0 <= value < math.inf for value in values) or sum(values) == 0:
        raise ValueError(f"split {split!r} must be one to three numbers ≥ 0 for train,valid,test, such as 969,30,1")
    values += [0.0] * (3 - len(values))
    total = sum(values)
    return values[0] / total, values[1] / total, values[2] / total


def split_documents(split: str, num_documents: int) -> list[range]:
    """Contiguous document ranges of train, valid and test, rounded as Megatron rounds them; together all documents."""
    shares = parse_split(split)
    bounds = [0]
    for share in np.cumsum(shares):
        bounds.append(int(round(float(share) * num_documents)))
    return [range(first, last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def blend_order(weights: Sequence[float], period: int = PERIOD) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """The order in which a blend draws from its datasets; it repeats after `period` samples.

    The k-th sample of a dataset with m samples a period is due at (k + ½)/m of the period, and the datasets are
    served in the order of these times: always the one that lags behind its share most. That is Webster's
    apportionment, so after n samples a dataset with fraction w of the period was drawn w·n ± (½ + w·D/2) times
    (D datasets), and exactly w·n times after each whole period. Weights are rounded to 1/period. One sort of exact
    fractions: no error accumulates.

    Returns: (dataset int16 [period], how often that dataset came before in the period int32 [period])
    Raises: ValueError for a weight that rounds to no sample a period.
    """
    shares = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    # Largest remainders get the samples that rounding down left over; the stable sort breaks ties by position.
    counts[np.argsort(counts - shares, kind="stable")[: period - int(counts.sum())]] += 1
    if counts.min() < 1:
        bad = int(np.argmin(counts))
        raise ValueError(
            f"weight {weights[bad]} of dataset {bad} is below 1/{period} of the sum {math.fsum(weights)}: raise it"
        )
    dataset = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(period) - np.repeat(np.cumsum(counts) - counts, counts)
    # Equal fractions round to equal doubles and unequal ones don't meet (denominators below 2^21), so ties are exact.
    order = np.argsort((2 * rank + 1) / (2 * counts[dataset]), kind="stable")
    return dataset[order].astype(np.int16), rank[order].astype(np.int32)


class Blend:
    """Samples drawn from several datasets in the order of `blend_order`; each dataset is read in its own order.

    Args:
        datasets: at least two, all of one seq_length.
        weights: positive, any scale; the share of the samples that each contributes.
        num_samples: what `len` says; `sample(i)` is defined for every i ≥ 0.
    """

    def __init__(
        self, datasets: Sequence[PackedSamples], weights: Sequence[float], num_samples: int, period: int = PERIOD
    ) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} datasets have {len(weights)} weights")
        self.datasets = list(datasets)
        self.num_samples = num_samples
        self._dataset, self._rank = blend_order(weights, period)
        self._per_period = np.bincount(self._dataset, minlength=len(datasets))

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of all datasets together, once each."""
        return sum(dataset.tokens_per_epoch for dataset in self.datasets)

    @property
    def samples_per_epoch(self) -> int:
        """The first so many samples draw no dataset past its first epoch."""
        share = self._per_period / len(self._dataset)
        bound = 0.5 + share * len(self.datasets) / 2
        fits = [(d.samples_per_epoch - b) / w for d, b, w in zip(self.datasets, bound, share, strict=True)]
        return max(1, int(min(fits)))

    def __len__(self) -> int:
        return self.num_samples

    def locate(self, index: int) -> tuple[int, int]:
        """Sample `index` of the blend → (number of the dataset, sample of that dataset)."""
        if index < 0:
            raise IndexError(f"sample {index} is negative")
        periods, place = divmod(index, len(self._dataset))
        dataset = int(self._dataset[place])
        return dataset, periods * int(self._per_period[dataset]) + int(self._rank[place])

    def sample(self, index: int) -> Int64Array:
        """Token ids of the `index`-th sample that training consumes, int64 [seq_length + 1]."""
        dataset, local = self.locate(index)
        return self.datasets[dataset].sample(local)
