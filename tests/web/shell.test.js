/** What the shell computes before it draws: words, tokens, the grid's order and axes. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { bytesOf, decodeArray, decodeHead, recent } from "../../src/scaledot/web/data.js";
import { headColumns } from "../../src/scaledot/web/layer.js";
import { movedHead, orderedHeads } from "../../src/scaledot/web/model.js";
import { axisOf, axisPart, medianOf, statisticOf } from "../../src/scaledot/web/strip.js";
import { mayPart, shownRuns, tokenRuns } from "../../src/scaledot/web/textbox.js";
import {
  fixed, message, scaleText, significant, tokenInWords, translated, visiblePieces, weightDigits,
} from "../../src/scaledot/web/words.js";

const token = (text, part = null, char = null) => ({ label: text, text, part, char, lang: null });

test("numbers have the page's minus, digits and words", () => {
  assert.equal(fixed(-12.125, 2), "−12.13");
  assert.equal(fixed(-0.001, 2), "0.00");
  assert.equal(fixed(NaN, 2), "NaN");
  assert.equal(fixed(-Infinity, 2), "−∞");
  const cells = [[129.96, "130"], [14.4, "14"], [2.08, "2.1"], [0.6, "0.60"], [0.996, "1.0"],
    [0.00131, "0.0013"], [0, "0"], [-2.008, "−2.0"], [null, "NaN"], [9.96, "10"], [99.6, "100"]];
  for (const [value, words] of cells) assert.equal(significant(value, 2), words);
  assert.equal(weightDigits(0.0004), "< .001");
  assert.equal(weightDigits(0.0005), "0.001");
  assert.equal(weightDigits(0), "0.000");
});

test("a message takes its values and shows a hole as a hole", () => {
  const messages = { a: "{x} of {y}", b: "{x}{x}" };
  assert.equal(message(messages, "a", { x: 1, y: "</b>" }), "1 of </b>");
  assert.equal(message(messages, "b", { x: "{y}", y: 2 }), "{y}{y}");
  assert.equal(message(messages, "a"), "{x} of {y}");
  assert.equal(message(messages, "toString"), "toString");
});

test("a sentence is translated by its pattern, or not at all", () => {
  const from = "Scores are wider than theory in {m} of {n} heads";
  const to = "{n} 個中 {m} 個のヘッド";
  assert.equal(translated(from, to, "Scores are wider than theory in 9 of 16 heads"),
    "16 個中 9 個のヘッド");
  assert.equal(translated(from, to, "Scores are narrower than theory in 9 of 16 heads"), null);
  assert.equal(translated("a (b) {x}.", "{x}", "a (b) 1.5."), "1.5");
});

test("the scale is the rule's number, or the number alone", () => {
  const layer = { scale: 32 ** -0.5, rule: { name: "1/√d_k", value: "1/√32" } };
  assert.equal(scaleText(layer), "1/√32 = 0.1768");
  assert.equal(scaleText({ scale: 0.3, rule: null }), "0.3000");
  assert.equal(scaleText({ scale: 1, rule: { name: "none", value: "1" } }), "1");
});

test("controls and lone surrogates become code points; joiners and scripts stay", () => {
  assert.deepEqual(visiblePieces("a\u202Eb"), [
    { text: "a", code: false }, { text: "U+202E", code: true }, { text: "b", code: false },
  ]);
  assert.deepEqual(visiblePieces("\uD800"), [{ text: "U+D800", code: true }]);
  assert.deepEqual(visiblePieces("\0"), [{ text: "U+0000", code: true }]);
  for (const text of ["猫🐈مرحبا", "👩\u200D💻", "می\u200Cخواهم", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"]) {
    assert.deepEqual(visiblePieces(text), [{ text, code: false }]);
  }
  assert.deepEqual(visiblePieces("a\nb\t"), [{ text: "a↵b⇥", code: false }]);
});

test("byte tokens of one character are one piece of the text box", () => {
  const tokens = [token(" a"), token("�", [1, 3], "猫"), token("�", [2, 3], "猫"),
    token("�", [3, 3], "猫"), token(" ")];
  assert.deepEqual(tokenRuns(tokens).map((x) => [x.first, x.last, x.space, x.text]), [
    [0, 0, " ", "a"], [1, 3, "", "猫"], [4, 4, " ", "␣"],
  ]);
});

test("a long text is shown around the chosen token", () => {
  const runs = tokenRuns(Array.from({ length: 300 }, (_, i) => token(` ${i}`)));
  assert.deepEqual(shownRuns(runs.slice(0, 5), 0, 8).runs.length, 5);
  const start = shownRuns(runs, 0, 10);
  assert.deepEqual([start.runs[0].first, start.runs.length, start.before, start.after],
    [0, 10, false, true]);
  const end = shownRuns(runs, 299, 10);
  assert.ok(end.runs.some((x) => x.first === 299));
  assert.deepEqual([end.before, end.after], [true, false]);
});

test("a token that is all marks is quoted within a sentence", () => {
  const t = (key, { token }) => `${key} ${token}`;
  for (const label of ["it", "猫 1/3", "3", "[SEP]"]) assert.equal(tokenInWords(label, t), label);
  for (const label of [".", "。", "↵"]) assert.equal(tokenInWords(label, t), `shell.quoted ${label}`);
});

test("a line ends between tokens, but not within a word nor before what closes it", () => {
  for (const [before, after] of [["た", "。"], ["lea", "ve"], ["earth", "."], ["д", "а"]]) {
    assert.equal(mayPart(before, after), false, before + after);
  }
  for (const [before, after] of [["食", "べ"], ["</", "script"], ["Cl", "(=O)"], ["a", "私"]]) {
    assert.equal(mayPart(before, after), true, before + after);
  }
});

const head = (index, score_var, role = null) => ({ index, score_var, role });
const grid = {
  layers: [
    { index: 0, heads: [head(0, 1), head(1, 130), head(2, null)] },
    { index: 1, heads: [] },
    { index: 2, heads: [head(0, 3), head(1, 2, { strength: 0.5 }), head(2, 4)] },
  ],
};

test("heads are ordered by number or by value, those without a number last", () => {
  assert.deepEqual(orderedHeads(grid.layers[0], "variance", "index"), [0, 1, 2]);
  assert.deepEqual(orderedHeads(grid.layers[0], "variance", "value"), [1, 0, 2]);
  assert.equal(statisticOf(grid.layers[2].heads[1], "role"), 0.5);
  assert.ok(Number.isNaN(statisticOf(grid.layers[0].heads[2], "variance")));
  assert.equal(medianOf([3, NaN, 1]), 2);
  assert.ok(Number.isNaN(medianOf([])));
});

test("keys move in the order that is seen, over layers without heads", () => {
  const at = (layer, head, sort = "index") => ({ layer, head, stat: "variance", sort });
  assert.deepEqual(movedHead(grid, at(0, 1), "ArrowRight"), { layer: 0, head: 2 });
  assert.deepEqual(movedHead(grid, at(0, 2), "ArrowRight"), { layer: 0, head: 2 });
  assert.deepEqual(movedHead(grid, at(0, 1, "value"), "ArrowRight"), { layer: 0, head: 0 });
  assert.deepEqual(movedHead(grid, at(0, 0), "PageDown"), { layer: 2, head: 0 });
  assert.deepEqual(movedHead(grid, at(0, 0), "ArrowDown"), { layer: 2, head: 0 });
  assert.deepEqual(movedHead(grid, at(2, 1), "ArrowUp"), { layer: 0, head: 1 });
  assert.deepEqual(movedHead(grid, at(0, 1), "End"), { layer: 0, head: 2 });
  assert.equal(movedHead(grid, at(0, 1), "x"), null);
});

test("the variance axis holds theory in every case; others run from 0", () => {
  for (const values of [[], [1], [0.001, 5], [3e5], [NaN, 0]]) {
    const axis = axisOf("variance", values);
    assert.ok(axis.ticks.includes(1));
    assert.equal(axis.theory, 1);
    for (const x of values.filter((x) => x > 0)) assert.ok(axis.low <= x && x <= axis.high);
    assert.ok(axis.ticks.every((x, i) => i === 0 || x > axis.ticks[i - 1]));
  }
  assert.ok(Math.abs(axisPart(axisOf("variance", []), 8) - 0.5) < 1e-12);
  assert.deepEqual(axisOf("max_score", [30.1]).high, 50);
  assert.ok(axisOf("max_score", [-2, 5]).low <= -2);
  assert.equal(axisPart(axisOf("entropy", []), 0.25), 0.25);
});

test("heads share a line in whole kv groups and never overflow", () => {
  for (const width of [328, 700, 1216, 1824]) {
    for (const [heads, perGroup] of [[1, 1], [4, 1], [9, 3], [12, 1], [32, 4], [64, 64]]) {
      const phone = width < 400;
      const columns = headColumns(width, heads, perGroup, phone);
      const groups = columns.gap > 8 ? Math.ceil(columns.perLine / perGroup) : 1;
      const used = columns.label + columns.perLine * columns.column
        + (columns.perLine - groups) * 8 + (groups - 1) * columns.gap;
      assert.ok(used <= width, `${heads} heads in ${width}`);
      assert.ok(columns.column >= 60 && columns.perLine >= 1);
      if (groups > 1) assert.equal(columns.perLine % perGroup, 0);
    }
  }
});

test("arrays are decoded as written, and a short one is an error", () => {
  const bytes = Buffer.from(new Float32Array([1, -2.5, NaN, 0]).buffer).toString("base64");
  const found = decodeArray({ shape: [2, 2], float32: bytes });
  assert.deepEqual([...found.data], [1, -2.5, NaN, 0]);
  assert.equal(decodeArray(null), null);
  assert.throws(() => decodeArray({ shape: [3, 2], float32: bytes }), /3×2 came with 16 bytes/);
});

test("what is kept is bounded by its bytes, the latest in any case", () => {
  const kept = recent(100);
  for (const key of ["a", "b", "c"]) {
    kept.set(key, key);
    kept.weigh(key, key, 40);
  }
  assert.deepEqual(["a", "b", "c"].map(kept.get), [undefined, "b", "c"]);
  kept.get("b");
  kept.set("d", "d");
  kept.weigh("d", "d", 60);
  assert.deepEqual(["b", "c", "d"].map(kept.get), ["b", undefined, "d"]);
  kept.set("e", "e");
  kept.weigh("e", "e", 1000);
  assert.deepEqual(["b", "d", "e"].map(kept.get), [undefined, undefined, "e"]);
  // What was forgotten, or replaced, while it was loaded is not counted.
  kept.set("f", "new");
  kept.weigh("f", "old", 1000);
  kept.weigh("gone", "gone", 1000);
  assert.equal(kept.get("f"), "new");
  assert.equal(kept.get("gone"), undefined);
  kept.delete("e");
  for (const key of ["g", "h"]) {
    kept.set(key, key);
    kept.weigh(key, key, 50);
  }
  assert.deepEqual(["f", "g", "h"].map(kept.get), ["new", "g", "h"]);
});

test("a head weighs what its arrays take", () => {
  const array = { shape: [2, 1], float32: btoa("\0".repeat(8)) };
  const head = decodeHead({ query: array, key: array, value: null });
  assert.equal(bytesOf(head), 16);
  assert.equal(bytesOf({ contributions: null }), 0);
});
