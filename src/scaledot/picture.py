"""A layer × head picture of one value of every head, in the page's colours, as pixels.

Layers downwards from 0, heads to the right. Colours are those of web/colour.js, which
tests/test_picture.py holds these to: piecewise linear in OKLab (Ottosson 2020), no value near the
paper's colour, so that ink means magnitude. A variance is drawn about 1, on a log axis, blue below
and orange above; anything else from 0 to the smallest of 1, 2, 5, 10 … that no head exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

STOPS = {
    "signed": (
        "#08336B", "#2B6CB3", "#7DAEDC", "#CFE0EF", "#F4F4EF", "#F6DDC2", "#E3A265", "#B9570F",
        "#6E2E02",
    ),
    "weights": ("#F4F4EF", "#CBE3DD", "#84BDB6", "#3A8D90", "#115C69", "#052B38"),
}  # fmt: skip
STEPS = 256
PAPER, NOTHING = "#FBFBF8", "#8B9097"
"""Around the cells, and for a head without a value."""
VARIANCE_DOMAIN = (1 / 16, 128)
SIDE = 512
"""Pixels of a picture's longer side, about; a cell has 4 … 24."""

_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.793617785, -0.0040720468],
        [1.9779984951, -2.428592205, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.808675766],
    ]
)
_FROM_LAB = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.291485548],
    ]
)
_FROM_LMS = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.707614701],
    ]
)


def heads_picture(name: str, layers: Sequence[Tensor]) -> UInt8[np.ndarray, "height width 3"]:
    """One value of each head (heads,) of each layer, NaN for none."""
    width = max(len(x) for x in layers)
    cell = min(max(SIDE // max(width, len(layers)), 4), 24)
    grid = np.empty((len(layers), width, 3), dtype=np.uint8)
    grid[:] = _rgb(PAPER)
    most = rounded_maximum([x for layer in layers for x in layer.tolist()])
    for row, layer in zip(grid, layers, strict=True):
        for place, x in enumerate(layer.tolist()):
            row[place] = colour(name, x, most)
    return grid.repeat(cell, 0).repeat(cell, 1)


def colour(name: str, x: float, most: float) -> np.ndarray:
    """(3,) red, green and blue, 0 … 255, of a value; most: where its scale ends."""
    if math.isnan(x):
        return _rgb(NOTHING)
    if name == "score_var_within":
        low, high = (math.log(end) for end in VARIANCE_DOMAIN)
        nats = math.log(x) if x > 0 else -math.inf
        part = max(min(-nats / low if nats < 0 else nats / high, 1.0), -1.0)
        return ramp("signed")[math.floor(STEPS / 2 * (1 + part) + 0.5)]
    part = max(min(x / (1.0 if name == "gradient" else most), 1.0), 0.0)
    return ramp("weights")[math.floor(STEPS * part + 0.5)]


def rounded_maximum(values: Sequence[float]) -> float:
    """The smallest of 1, 2, 5, 10, 20 … that no finite value exceeds; 1 for none above 0."""
    most = max((x for x in values if math.isfinite(x)), default=0.0)
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next((x * unit for x in (1, 2, 5, 10) if x * unit >= most), 20 * unit)


@cache
def ramp(name: str) -> UInt8[np.ndarray, "steps 3"]:
    """The colours of a scale, `STEPS` + 1 of them."""
    srgb = np.stack([_rgb(stop) for stop in STOPS[name]]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    stops = np.cbrt(linear @ _TO_LMS.T) @ _TO_LAB.T
    place = np.arange(STEPS + 1) / STEPS * (len(stops) - 1)
    lab = np.stack([np.interp(place, np.arange(len(stops)), x) for x in stops.T], -1)
    linear = ((lab @ _FROM_LAB.T) ** 3 @ _FROM_LMS.T).clip(0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.floor(255 * srgb + 0.5).astype(np.uint8)


def _rgb(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.uint8)
