/** What the view of a training run computes before it draws. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { formatFragment, parseFragment } from "../../src/scaledot/web/state.js";
import { alarmSentences, runNumber } from "../../src/scaledot/web/alarmwords.js";
import {
  alarmGroups, alarmsByRule, axisOfValues, grownLine, lossesOf, placeOfStep, quantileOf, stepsSummed,
  summedOf,
} from "../../src/scaledot/web/steps.js";
import { lostWords, settledTimeline } from "../../src/scaledot/web/timeline.js";

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
  assert.deepEqual(high.most, [5, 0, 2]);
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
  const both = axisOfValues([-1e6, 0, 1, 1, 2, 1e9]);
  assert.ok(both.log);
  assert.ok(both.ticks.includes(0) && both.ticks.includes(-10000));
  assert.ok(both.part(0) > 0.3 && both.part(0) < 0.5 && both.part(1e8) > 0.9);
  assert.equal(both.part(1e9), 1);
  for (const values of [[], [NaN], [0, 0], [3], [-2, -2]]) {
    const { part, ticks } = axisOfValues(values);
    assert.ok(part(values[0] ?? 0) >= 0 || Number.isNaN(values[0]), String(values));
    assert.ok(ticks.length < 12);
  }
});

test("the worst head of the last step is shown until another is chosen; beyond it is clamped", () => {
  const packed = Buffer.from(Float32Array.from([1, 2, 3, 9, 0, 0]).buffer).toString("base64");
  const line = { measures: [{ name: "max_score", low: false }], steps: [1, 2],
    layers: [{ heads: 1 }, { heads: 2 }], losses: { shape: [0, 1], float32: "" },
    values: { max_score: { shape: [2, 3], float32: packed } } };
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

/** A line, or an addition to one: values of two heads are 10·step + head, as "entropy" their negative. */
function lineOf(steps, more = {}) {
  const packed = (numbers, wide) => ({ shape: [numbers.length / wide, wide],
    float32: Buffer.from(Float32Array.from(numbers).buffer).toString("base64") });
  const values = steps.flatMap((x) => [10 * x, 10 * x + 1]);
  return { steps, losses: packed(steps.map((x) => x / 2), 1), nonfinite: steps.map(() => 0),
    values: { max_score: packed(values, 2), entropy: packed(values.map((x) => -x), 2) },
    alarms: [], notes: [], ...more };
}

const whole = (steps, more) => ({ layers: [{ heads: 2 }], mark: "a.1",
  measures: [{ name: "max_score", low: false }, { name: "entropy", low: true }],
  ...lineOf(steps, more) });

test("a line that grows is the line of all steps, whatever was summed up before", () => {
  const alarm = (step, rule) => ({ step, rule });
  const cases = [
    [[1, 2], [3, 4]], // goes on
    [[1, 2, 3, 4], [3, 4, 5]], // resumed: two steps come again
    [[1, 5], [2, 3]], // resumed from further back, the later step is still the old one
  ];
  for (const [before, came] of cases) {
    for (const known of [[], ["max_score"], ["max_score", "entropy"]]) {
      const line = whole(before, { alarms: before.map((x) => alarm(x, "old")) });
      for (const name of known) summedOf(line, name, name === "entropy");
      const told = lineOf(came, { mark: "a.9", alarms: came.map((x) => alarm(x, "new")) });
      const grown = grownLine(line, told);
      const all = [...new Set([...before, ...came])].sort((x, y) => x - y);
      assert.deepEqual(grown.steps, all);
      assert.equal(grown.mark, "a.9");
      assert.deepEqual(grown.alarms.map((x) => x.rule),
        all.map((x) => (came.includes(x) ? "new" : "old")));
      assert.deepEqual(lossesOf(grown), all.map((x) => x / 2));
      for (const name of ["max_score", "entropy"]) {
        const low = name === "entropy";
        assert.deepEqual(summedOf(grown, name, low), summedOf(whole(all), name, low));
      }
      assert.deepEqual(line.steps, before); // the line before is as it was
    }
  }
});

test("a line to which nothing came stays the same one; a note that came is there", () => {
  const line = whole([1, 2]);
  assert.equal(grownLine(line, { mark: "a.1", notes: [] }), line);
  const notes = [{ id: "torn", numbers: { line: 4 } }];
  const noted = grownLine(line, { mark: "a.2", notes });
  assert.deepEqual([noted.notes, noted.mark, noted.steps], [notes, "a.2", [1, 2]]);
  assert.deepEqual(lossesOf(noted), [0.5, 1]);
});

test("alarms of one step, or too near to be told apart, have one mark", () => {
  const groups = alarmGroups([1, 1, 2, 3, 30].map((step) => ({ step })), (x) => 4 * x, 9);
  assert.deepEqual(groups.map((x) => [x.x, x.alarms.map((y) => y.step)]),
    [[4, [1, 1, 2, 3]], [120, [30]]]);
});

test("a number with many places is a power of ten, others stay", () => {
  const shown = [977.23, 0.0486, 8.7e8, -2.5e-7, 0, 999999.9].map((x) => runNumber(x, 3));
  assert.deepEqual(shown, ["977", "0.0486", "8.70×10⁸", "−2.50×10⁻⁷", "0", "1000000"]);
  assert.equal(runNumber(Infinity, 3), "∞");
});

test("an alarm is said from its numbers; one without them says what the file says", () => {
  const words = { "timeline.alarm": "{rule}/{value}/{head}", "timeline.rule_doubles": "{measure}x{x}",
    "timeline.cause_grown": "{step}:{factors}", "timeline.norm_times": "{name}·{x}",
    "timeline.alignment_times": "a·{x}" };
  const t = (key, values = {}) =>
    (words[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name]);
  const alarm = { step: 5, rule: "entropy doubles within 9 steps", line: { doubles: 9 },
    measure: "entropy", value: 2, layer: 1, head: 3, path: "p", also: 0, action: "log",
    cause: { since: 1, grown: { query: 2, alignment: 1.5 } } };
  const [said] = alarmSentences({ t, language: "en" }, [alarm]);
  assert.deepEqual([said.words, said.why, said.more, said.lang],
    ["timeline.entropyx9/2.00/1.3", "1:‖q‖·2.00, a·1.50", [], null]);
  const [old] = alarmSentences({ t, language: "ja" },
    [{ ...alarm, cause: {}, why: "as it was", line: null, value: "Infinity" }]);
  assert.deepEqual([old.words, old.why, old.lang],
    ["entropy doubles within 9 steps/Infinity/1.3", "as it was", "en"]);
});

test("an error of the file is said by its id, another is left to the page", () => {
  const t = (key, { line }) => `${key} ${line}`;
  assert.equal(lostWords({ told: { id: "damaged", line: 7 } }, t), "timeline.lost_damaged 7");
  assert.equal(lostWords({ told: { error: "x" } }, t), null);
  assert.equal(lostWords(new TypeError("no network"), t), null);
});
