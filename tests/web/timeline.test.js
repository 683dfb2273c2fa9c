/** What the view of a training run computes before it draws. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { formatFragment, parseFragment } from "../../src/scaledot/web/state.js";
import {
  alarmsByRule, axisOfValues, placeOfStep, quantileOf, settledTimeline, stepsSummed,
} from "../../src/scaledot/web/timeline.js";

test("quantiles lie between neighbours", () => {
  assert.equal(quantileOf([1, 2, 4], 0.5), 2);
  assert.equal(quantileOf([1, 2, 4], 0.75), 3);
  assert.equal(quantileOf([7], 0.05), 7);
  assert.ok(Number.isNaN(quantileOf([], 0.5)));
});

test("the worst head is the largest, or the least where low is bad; heads without rows are none", () => {
  const data = Float32Array.from([1, 5, NaN, 3, NaN, NaN, NaN, NaN, 2, 2, Infinity, 0]);
  const high = stepsSummed(data, 4, false);
  assert.deepEqual(high.worst, [5, NaN, Infinity]);
  assert.deepEqual(high.at, [1, -1, 2]);
  assert.deepEqual(stepsSummed(data, 4, true).worst, [1, NaN, 0]);
  assert.equal(high.bands[2][0], 3);
});

test("a step that was not looked at is the one before it", () => {
  assert.equal(placeOfStep([1, 10, 20], null), 2);
  assert.equal(placeOfStep([1, 10, 20], 19), 1);
  assert.equal(placeOfStep([5, 10], 1), 0);
  assert.equal(placeOfStep([5, 10], 99), 1);
});

test("an axis is logarithmic where a positive measure spans decades, and holds any numbers", () => {
  const wide = axisOfValues([1, 1000, Infinity, NaN]);
  assert.ok(wide.log);
  assert.ok(Math.abs(wide.part(10) - 1 / 3) < 1e-12);
  assert.equal(wide.part(Infinity), 1);
  assert.ok(!axisOfValues([-1, 1000]).log);
  for (const values of [[], [NaN], [0, 0], [3], [-2, -2]]) {
    const { part, ticks } = axisOfValues(values);
    assert.ok(part(values[0] ?? 0) >= 0 || Number.isNaN(values[0]), String(values));
    assert.ok(ticks.length < 12);
  }
});

test("the worst head of the last step is shown until another is chosen; beyond it is clamped", () => {
  const packed = Buffer.from(Float32Array.from([1, 2, 3, 9, 0, 0]).buffer).toString("base64");
  const line = { measures: [{ name: "max_score", low: false }], steps: [1, 2],
    layers: [{ heads: 1 }, { heads: 2 }], values: { max_score: { shape: [2, 3], float32: packed } } };
  const settled = (fragment) => {
    const raw = parseFragment(fragment);
    const { layer, head } = settledTimeline(raw, raw, line);
    return [layer, head];
  };
  assert.deepEqual(settled(""), [0, 0]);
  assert.deepEqual(settled("#layer=1&head=1"), [1, 1]);
  assert.deepEqual(settled("#layer=9&head=9"), [1, 1]);
});

test("measure and step are in the address", () => {
  const state = parseFragment("#measure=entropy&step=1200");
  assert.equal(formatFragment(state), "#measure=entropy&step=1200");
  assert.equal(formatFragment(parseFragment("#measure=x&step=-1")), "");
});

test("alarms that repeat are one line", () => {
  const found = alarmsByRule([{ rule: "a", step: 1 }, { rule: "b", step: 1 }, { rule: "a", step: 9 }]);
  assert.deepEqual(found.map((x) => [x.first.step, x.last, x.times]), [[1, 9, 2], [1, 1, 1]]);
});
