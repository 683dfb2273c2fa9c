"""The picture's colours are the page's."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import torch

from scaledot.picture import NOTHING, PAPER, colour, heads_picture, ramp, rounded_maximum

WEB = Path(__file__).parents[1] / "src" / "scaledot" / "web" / "colour.js"
VALUES = [0.0, 0.03, 0.0625, 0.4, 1.0, 1.7, 9.0, 50.0, 127.0, 1e4]


def page(expression: str) -> object:
    code = (
        f"import * as c from {json.dumps(WEB.as_uri())}; console.log(JSON.stringify({expression}))"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_ramps_are_the_pages_to_the_byte():
    for name in ("signed", "weights"):
        theirs = page(f'[...c.rampOf("{name}", "light").rgb]')
        assert ramp(name).flatten().tolist() == theirs


def test_a_value_has_the_colour_that_the_page_gives_it():
    for ours, theirs in (("score_var_within", "score_var_within"), ("max_score", "max_score"),
                         ("gradient", "collision")):  # fmt: skip
        found = page(f'{VALUES}.map((x) => c.statisticColour("{theirs}", x, "light", 20))')
        assert ["#{:02X}{:02X}{:02X}".format(*colour(ours, x, 20.0)) for x in VALUES] == found


def test_an_axis_ends_where_the_pages_does():
    cases = [[0.0], [3.0, 0.2], [5.0], [5.1], [99.0], [101.0, math.nan], [-3.0], [math.inf, 0.07]]
    shown = json.dumps([[None if not math.isfinite(x) else x for x in c] for c in cases])
    assert [rounded_maximum(c) for c in cases] == page(f"{shown}.map(c.roundedMaximum)")


def test_layers_go_down_and_heads_to_the_right():
    layers = [torch.tensor([0.0, 10.0, math.nan]), torch.tensor([5.0, 0.0])]
    picture = heads_picture("entropy", layers)
    assert (picture.shape, picture.dtype) == ((2 * 24, 3 * 24, 3), np.uint8)
    cells = picture[12::24, 12::24]

    def rgb(text: str) -> list[int]:
        return [int(text[i : i + 2], 16) for i in (1, 3, 5)]

    assert cells[0, 0].tolist() == cells[1, 1].tolist() == ramp("weights")[0].tolist()
    assert cells[0, 1].tolist() == ramp("weights")[-1].tolist()
    assert cells[1, 0].tolist() == ramp("weights")[128].tolist()
    assert cells[0, 2].tolist() == rgb(NOTHING)
    assert cells[1, 2].tolist() == rgb(PAPER)
    assert (picture[:24, 24:48] == cells[0, 1]).all()
