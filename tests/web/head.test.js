/**
 * The pure parts of the head and what-if levels: where keys lead, what controls mean, how numbers
 * are written. Run by `node --test tests/web/head.test.js`, and by tests/test_stages_golden.
 */

import assert from "node:assert/strict";
import { test } from "node:test";

import { cellAt, standsUpright } from "../../src/scaledot/web/draw.js";
import { scaleWords, shortNumber } from "../../src/scaledot/web/layout.js";
import { movedCell, tokenLabel } from "../../src/scaledot/web/matrix.js";
import { attentionUnder, scaleAxis, settingsOf } from "../../src/scaledot/web/whatif.js";
import { DEFAULTS } from "../../src/scaledot/web/state.js";

const LAYER = { scale: 0.125, d_k: 64, rule: { name: "1/√d_k", value: "1/√64" }, softcap: null,
  mask: { kind: "causal", window: null } };
const SIZES = { dModel: 576, keys: 13 };

test("keys move the cell inside the matrix", () => {
  const matrix = { rows: 13, keys: 13, seen: (q) => [0, q] };
  const at = (key, q, k) => movedCell(key, { q, k }, matrix);
  assert.deepEqual(at("ArrowUp", 0, 3), { q: 0, k: 3 });
  assert.deepEqual(at("ArrowDown", 8, 1), { q: 9, k: 1 });
  assert.deepEqual(at("ArrowLeft", 8, 0), { q: 8, k: 0 });
  assert.deepEqual(at("ArrowRight", 8, 12), { q: 8, k: 12 });
  assert.deepEqual(at("Home", 8, 5), { q: 8, k: 0 });
  assert.deepEqual(at("End", 8, 5), { q: 8, k: 8 });
  assert.deepEqual(at("PageDown", 8, 5), { q: 12, k: 5 });
  assert.deepEqual(at("PageUp", 8, 5), { q: 0, k: 5 });
  assert.equal(at("x", 8, 5), null);
});

test("a point is in the cell drawn there, or in none", () => {
  const grid = { x: 50, y: 20, cell: 14, high: 10, rows: 3, columns: 4 };
  assert.deepEqual(cellAt(grid, 50, 20), [0, 0]);
  assert.deepEqual(cellAt(grid, 50 + 4 * 14 - 0.1, 20 + 29.9), [2, 3]);
  assert.equal(cellAt(grid, 49.9, 25), null);
  assert.equal(cellAt(grid, 50 + 4 * 14, 25), null);
});

test("labels say the token, not how it is stored", () => {
  assert.equal(tokenLabel({ label: "␣cat", text: " cat" }), "cat");
  assert.equal(tokenLabel({ label: "␣", text: " " }), "␣");
  assert.equal(tokenLabel({ label: "<0xE7>", text: "猫", part: [1, 3], char: "猫" }), "猫 1/3");
  assert.equal(tokenLabel({ label: "\u202e", text: "\u202e" }), "U+202E");
  const split = (char) => tokenLabel({ label: "", text: "", part: [2, 3], char });
  assert.equal(split("\u20dd"), "◌\u20dd 2/3"); // a mark of three bytes, each a token
  assert.equal(split("\u202e"), "U+202E 2/3");
  assert.ok(standsUpright("東京") && standsUpright("ー") && !standsUpright("猫 1/3"));
});

test("a scale is a division where it is one", () => {
  assert.deepEqual(scaleWords(LAYER), { root: true, above: "÷ √64", below: "÷ 8" });
  assert.equal(scaleWords({ ...LAYER, scale: 1 / 64, rule: null }).above, "÷ 64");
  assert.equal(scaleWords({ ...LAYER, scale: 1, rule: { name: "none" } }).above, "· 1");
  assert.equal(scaleWords({ ...LAYER, scale: 0.0417, rule: null }).above, "· 0.0417");
  assert.equal(shortNumber(29 ** 0.5), "5.385");
  assert.equal(shortNumber(100), "100");
});

test("the state's controls become settings", () => {
  const own = settingsOf(DEFAULTS, LAYER, SIZES);
  assert.equal(own.changed, false);
  assert.equal(own.scale, 0.125);
  const none = settingsOf({ ...DEFAULTS, rule: "none" }, LAYER, SIZES);
  assert.deepEqual([none.scale, none.changed], [1, true]);
  const any = settingsOf({ ...DEFAULTS, rule: "custom", scale: 0.3, temp: 2 }, LAYER, SIZES);
  assert.deepEqual([any.scale, any.temperature], [0.3, 2]);
  assert.deepEqual(any.out, []);
  const far = settingsOf({ ...DEFAULTS, rule: "custom", scale: 1e308, temp: 1e-308, cap: 1e-300 },
    LAYER, SIZES);
  assert.deepEqual([far.scale, far.temperature, far.cap], [1e6, 1e-6, 1e-6]);
  assert.deepEqual(far.out, [[1e308, 1e6], [1e-300, 1e-6], [1e-308, 1e-6]]);
  assert.equal(settingsOf({ ...DEFAULTS, rule: "nonsense" }, LAYER, SIZES).scale, 0.125);
  const capped = { ...LAYER, softcap: 50 };
  assert.equal(settingsOf(DEFAULTS, capped, SIZES).cap, 50);
  assert.equal(settingsOf({ ...DEFAULTS, cap: 1e6 }, capped, SIZES).cap, null);
  const window = settingsOf({ ...DEFAULTS, mask: "window", window: 4 }, LAYER, SIZES);
  assert.deepEqual(window.mask, { kind: "window", window: 4 });
});

test("another mask than the model's own takes its dense mask away, its bias stays", () => {
  const attention = { hidden: {}, bias: {}, scale: 1, mask: { kind: "dense" } };
  const settings = { scale: 1, temperature: 2, cap: null, mask: { kind: "none" }, own: false };
  const under = attentionUnder(attention, settings);
  assert.deepEqual([under.hidden, under.bias === attention.bias, under.scale], [null, true, 0.5]);
});

test("the slider's axis holds every rule and the model's own factor", () => {
  const axis = scaleAxis(LAYER, SIZES);
  assert.deepEqual(axis.ticks.map((x) => x.rule), ["1/d_k", "1/sqrt_d_model", "1/sqrt_d_k", "none"]);
  assert.equal(axis.ticks.find((x) => x.own).rule, "1/sqrt_d_k");
  assert.ok(axis.low < 1 / 64 && axis.high > 1);
  const odd = scaleAxis({ ...LAYER, scale: 3 }, SIZES);
  assert.equal(odd.ticks.at(-1).rule, "model");
  assert.ok(odd.high > 3);
});
