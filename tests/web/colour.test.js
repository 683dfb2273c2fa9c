/** colour.js against the visual specification: stops, contrast, order, domains. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  PALETTES, RAMP_STEPS, RAMP_STOPS, contrastOf, hexOf, luminanceOf, oklabOf, rampOf, rgbOf,
  roundedMaximum, sequentialStep, signedColour, signedStep, statisticColour, statisticStep,
  textColour, variancePart, weightColour,
} from "../../src/scaledot/web/colour.js";

const THEMES = ["light", "dark"];
const RAMPS = ["signed", "weights"];

/** Text on the page's colours, and the contrast that the specification promises. */
const PROMISED = {
  light: { ink: 17, ink2: 8, ink3: 5, row: 6.6, neg: 5.2, pos: 4.6, seq: 6.9, hatch: 3.1 },
  dark: { ink: 15.5, ink2: 9.4, ink3: 6.4, row: 8.1, neg: 7.8, pos: 8.1, seq: 8.3, hatch: 3.7 },
};

test("colours are read and written", () => {
  assert.deepEqual(rgbOf("#2B6CB3"), [43, 108, 179]);
  assert.equal(hexOf([43, 108, 179]), "#2B6CB3");
  assert.ok(Math.abs(luminanceOf([255, 255, 255]) - 1) < 1e-12);
  assert.ok(Math.abs(contrastOf([0, 0, 0], [255, 255, 255]) - 21) < 1e-12);
});

test("OKLab has the values that its author gives: white, and sRGB red", () => {
  const near = (found, wanted) =>
    found.forEach((x, c) => assert.ok(Math.abs(x - wanted[c]) < 1e-4, `${found}`));
  near(oklabOf([255, 255, 255]), [1, 0, 0]);
  near(oklabOf([255, 0, 0]), [0.62796, 0.22486, 0.12585]);
});

for (const name of RAMPS) {
  for (const theme of THEMES) {
    test(`${name}, ${theme}: ends and middle are the stops, neighbours are alike`, () => {
      const { hex, rgb } = rampOf(name, theme);
      const stops = RAMP_STOPS[name][theme];
      assert.equal(hex.length, RAMP_STEPS + 1);
      assert.deepEqual([hex[0], hex[RAMP_STEPS]], [stops[0], stops.at(-1)]);
      if (name === "signed") {
        stops.forEach((stop, s) => assert.equal(hex[(s * RAMP_STEPS) / (stops.length - 1)], stop));
      }
      for (let s = 1; s <= RAMP_STEPS; s++) {
        const [a, b] = [oklabOf(rgbOf(hex[s - 1])), oklabOf(rgbOf(hex[s]))];
        assert.ok(Math.hypot(...a.map((x, c) => x - b[c])) < 0.015, `a jump at ${s}`);
        assert.equal(hexOf(rgb.subarray(3 * s, 3 * s + 3)), hex[s]);
      }
      assert.equal(rampOf(name, theme), rampOf(name, theme));
    });

    test(`${name}, ${theme}: text has 4.58:1 or more on any cell`, () => {
      for (const hex of rampOf(name, theme).hex) {
        assert.ok(contrastOf(rgbOf(hex), rgbOf(textColour(hex))) >= 4.58, hex);
      }
    });

    test(`${name}, ${theme}: lightness alone orders magnitudes`, () => {
      const light = rampOf(name, theme).hex.map((hex) => oklabOf(rgbOf(hex))[0]);
      const halves = [light.slice(128), light.slice(0, 129).reverse()];
      const outwards = name === "weights" ? [light] : halves;
      for (const part of outwards) {
        for (let s = 8; s < part.length; s++) {
          const more = theme === "light" ? part[s - 8] - part[s] : part[s] - part[s - 8];
          assert.ok(more > 0, `step ${s}`);
        }
      }
    });
  }
}

test("palettes have the contrast that is promised", () => {
  for (const theme of THEMES) {
    const palette = PALETTES[theme];
    for (const [name, wanted] of Object.entries(PROMISED[theme])) {
      const found = contrastOf(rgbOf(palette[name]), rgbOf(palette.bg));
      assert.ok(found > wanted - 0.06, `${theme} ${name} ${found}`);
    }
    assert.ok(contrastOf(rgbOf(palette.ink), rgbOf(palette.rowbg)) > 12);
    assert.ok(contrastOf(rgbOf(palette.warn), rgbOf(palette.errbg)) > 7);
  }
});

test("zero has the middle colour, ends hold what is beyond, NaN has none", () => {
  const { hex } = rampOf("signed", "light");
  assert.equal(signedColour(0, 5, "light"), "#F4F4EF");
  assert.equal(signedColour(0, 0, "light"), "#F4F4EF");
  assert.deepEqual([signedStep(-5, 5), signedStep(5, 5), signedStep(9, 5)], [0, 256, 256]);
  assert.equal(signedColour(-Infinity, 5, "light"), hex[0]);
  assert.equal(signedColour(NaN, 5, "dark"), null);
  assert.equal(weightColour(0, "dark"), "#1B1E23");
  assert.equal(weightColour(1, "dark"), "#EDFBF0");
  assert.equal(weightColour(NaN, "dark"), null);
  assert.equal(weightColour(0.25, "light", true), weightColour(0.5, "light"));
  assert.equal(weightColour(0.125, "light", false, 0.25), weightColour(0.5, "light"));
  assert.equal(sequentialStep(0, 0), 0);
});

test("the model grid's domains: variance about 1 on a log axis, others from 0", () => {
  const parts = [1 / 16, 1, 128, 1 / 4, 1000, 0].map(variancePart);
  assert.deepEqual(parts, [-1, 0, 1, -0.5, 1, -1]);
  assert.equal(statisticColour("score_var", 1, "light"), "#F4F4EF");
  assert.equal(statisticColour("score_var_raw", 128, "light"), "#6E2E02");
  assert.equal(statisticColour("entropy", null, "light"), null);
  assert.deepEqual(statisticStep("normalised_entropy", 0.5), { ramp: "weights", step: 128 });
  assert.deepEqual(statisticStep("max_score", 25, 50), { ramp: "weights", step: 128 });
});

test("a maximum is rounded up to 1, 2 or 5", () => {
  const found = [[], [0.3], [1], [12, NaN, null], [21.4], [50], [99], [0.0071]].map(roundedMaximum);
  assert.deepEqual(found, [1, 0.5, 1, 20, 50, 50, 100, 0.01]);
});
