"""A picture of how evenly a model's experts are used: a row for each layer, a column for each expert.

Imports nothing of ours but Pillow, which TensorBoard brings. The colour is an expert's load over its layer's mean, on
one scale for all pictures, so that those of different steps compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_UNUSED, _LOW, _MEAN, _HIGH = np.array([[0, 0, 0], [33, 102, 172], [247, 247, 247], [178, 24, 43]], dtype=float)
_MARGIN, _LEGEND, _BAR = 8, 50, 320


def load_map(loads: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """uint8 [height, width, 3] from loads [layers, experts]; names: of the rows.

    White is the mean, full red four times it or more, full blue a quarter or less, black an expert without a token.
    """
    from PIL import Image, ImageDraw  # only the writing rank pays

    layers, experts = loads.shape
    wide, high = max(4, min(40, 1024 // experts)), max(13, min(32, 640 // layers))  # of a cell; a name is 13 high
    picture = Image.new("RGB", (1, 1))
    left = 2 * _MARGIN + round(max(ImageDraw.Draw(picture).textlength(name) for name in (*names, "layer")))
    top = _LEGEND + 16
    size = (left + max(wide * experts, _BAR + 120) + _MARGIN, top + high * layers + _MARGIN)
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)

    # 1. The legend: load over mean, from a quarter to four times.
    scale = _colours(2.0 ** np.linspace(-2, 2, _BAR))[None].repeat(12, 0)
    picture.paste(Image.fromarray(scale), (left, 6))
    draw.rectangle((left + _BAR + 40, 6, left + _BAR + 52, 17), fill=(0, 0, 0))
    draw.text((left + _BAR + 57, 12), "no token", fill="black", anchor="lm")
    for value, text in ((-2, "1/4 or less"), (-1, "1/2"), (0, "load = mean"), (1, "2"), (2, "4 or more")):
        draw.text((left + (value + 2) * _BAR / 4, 19), text, fill="black", anchor="ma" if value > -2 else "la")

    # 2. Names of rows, every few columns the number of the expert.
    draw.text((left - _MARGIN, top - 3), "layer", fill="black", anchor="rd")
    draw.text((left, top - 16), "expert", fill="black", anchor="ld")
    for row, name in enumerate(names):
        draw.text((left - _MARGIN, top + (row + 0.5) * high), name, fill="black", anchor="rm")
    apart = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if step * wide >= 28)
    for expert in range(0, experts, apart):
        draw.text((left + (expert + 0.5) * wide, top - 3), str(expert), fill="black", anchor="md")

    # 3. The cells, with a line of white between rows.
    mean = np.maximum(loads.mean(-1, keepdims=True), 1e-9)
    cells = _colours(loads / mean).repeat(high, 0).repeat(wide, 1)
    cells[high - 1 :: high] = 255
    picture.paste(Image.fromarray(cells), (left, top))
    return np.asarray(picture)


def _colours(ratios: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] of loads over their mean."""
    place = np.clip(np.log2(np.maximum(ratios, 1e-9)) / 2, -1, 1)[..., None]
    colours = _MEAN + np.abs(place) * (np.where(place > 0, _HIGH, _LOW) - _MEAN)
    return np.where(ratios[..., None] > 0, colours, _UNUSED).round().astype(np.uint8)
