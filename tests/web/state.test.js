/** state.js: what a fragment says, and what it must not break. `node --test tests/web/`. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  DEFAULTS, STAGES, STATISTICS, TEXT_LIMIT, VIEWS, changedState, firstLanguage, formatFragment,
  isStep, levelUp, parseFragment, settledState, wellFormed,
} from "../../src/scaledot/web/state.js";

const text = {
  tokens: Array(5).fill({}),
  layers: [
    { index: 0, heads: [{}, {}] },
    { index: 1, heads: [{}, {}, {}] },
    { index: 2, heads: [] },
  ],
  findings: [{ heads: [] }, { heads: [[1, 2], [0, 0]] }],
};

test("defaults are an empty fragment and an empty fragment is the defaults", () => {
  assert.equal(formatFragment(DEFAULTS), "");
  for (const nothing of ["", "#", "#=", "#view=&layer="]) {
    assert.deepEqual(parseFragment(nothing), { ...DEFAULTS });
  }
});

test("every field goes into the fragment and comes back", () => {
  const state = {
    view: "whatif", layer: 13, head: 8, q: 8, k: 1, stage: "scores", stat: "role", sort: "value",
    rule: "1/sqrt_d_k", scale: 0.25, temp: 1.5, cap: 30, mask: "window", window: 7, seed: 5, range: "one",
    centre: true, lang: "ja", theme: "dark", compare: "t2", measure: "entropy", step: 40,
    text: "猫と\"</script>#&=%+ 🐈\n👩‍💻 مرحبا",
  };
  assert.deepEqual(Object.keys(state).sort(), Object.keys(DEFAULTS).sort());
  for (const [name, value] of Object.entries(state)) assert.notEqual(value, DEFAULTS[name], name);
  assert.deepEqual(parseFragment(formatFragment(state)), state);
  for (const name of Object.keys(state)) {
    const one = { ...DEFAULTS, [name]: state[name] };
    assert.deepEqual(parseFragment(formatFragment(one)), one, name);
  }
});

test("the words of the fragment are the specification's", () => {
  const state = { ...DEFAULTS, layer: 3, head: 7, lang: "ja" };
  assert.equal(formatFragment(state), "#layer=3&head=7&lang=ja");
  for (const stage of STAGES) assert.equal(parseFragment(`stage=${stage}`).stage, stage);
  for (const stat of STATISTICS) assert.equal(parseFragment(`stat=${stat}`).stat, stat);
  for (const view of VIEWS) assert.equal(parseFragment(`#view=${view}`).view, view);
});

test("what is no value of a field is left out, whatever it is", () => {
  const hostile = [
    "view=admin", "layer=-1", "layer=1.5", "layer=1e3", "head=NaN", "q=Infinity", "k=99999999999",
    "scale=0", "scale=-1", "scale=", "scale=inf", "temp=NaN", "cap=-3", "window=0", "lang=fr", "seed=-1",
    "theme=javascript:alert(1)", "rule=<img>", "compare=../etc", "centre=0", "__proto__=1",
    "constructor=1", "toString=x", "text=",
  ];
  for (const fragment of hostile) {
    assert.deepEqual(parseFragment(fragment), { ...DEFAULTS }, fragment);
  }
  assert.equal({}.polluted, undefined);
});

test("a text that no fragment can hold is left out, the rest stays", () => {
  const fits = "a".repeat(TEXT_LIMIT);
  assert.equal(parseFragment(formatFragment({ ...DEFAULTS, text: fits })).text, fits);
  for (const text of [`${fits}a`, "lone \uD800", "\uDC00 lone", "\uDC00\uD800"]) {
    assert.equal(formatFragment({ ...DEFAULTS, text, layer: 2 }), "#layer=2", text.slice(-4));
  }
  assert.equal(parseFragment(`text=${fits}a`).text, null);
  assert.ok(wellFormed("🐈 猫"));
});

test("another head forgets the key, another text row and key", () => {
  const state = { ...DEFAULTS, layer: 1, head: 1, q: 3, k: 2 };
  assert.deepEqual(changedState(state, { head: 2 }), { ...state, head: 2, k: null });
  assert.deepEqual(changedState(state, { head: 1 }), state);
  assert.deepEqual(changedState(state, { layer: 0, k: 0 }), { ...state, layer: 0, k: 0 });
  assert.deepEqual(changedState(state, { text: "x" }), { ...state, text: "x", q: null, k: null });
  assert.deepEqual(changedState(state, { q: undefined }), state);
  assert.throws(() => changedState(state, { row: 1 }), /no such state: row/);
  assert.deepEqual(state, { ...DEFAULTS, layer: 1, head: 1, q: 3, k: 2 });
});

test("a level, a head, a cell and a text are steps of the history; controls are not", () => {
  const steps = { view: "head", layer: 1, head: 1, q: 2, k: 2, text: "x" };
  const controls = {
    stage: "output", stat: "role", sort: "value", rule: "none", scale: 2, temp: 2, cap: 5,
    mask: "none", window: 9, seed: 5, range: "one", centre: true, lang: "ja", theme: "dark", compare: "t1",
    measure: "entropy", step: 40,
  };
  for (const [name, value] of Object.entries(steps)) {
    assert.ok(isStep(DEFAULTS, { ...DEFAULTS, [name]: value }), name);
  }
  for (const [name, value] of Object.entries(controls)) {
    assert.ok(!isStep(DEFAULTS, { ...DEFAULTS, [name]: value }), name);
  }
  assert.deepEqual(
    [...Object.keys(steps), ...Object.keys(controls)].sort(), Object.keys(DEFAULTS).sort(),
  );
});

test("a settled state lies inside its text and starts at the first finding's head", () => {
  const settled = settledState(DEFAULTS, text);
  assert.deepEqual([settled.layer, settled.head, settled.q, settled.k], [1, 2, 4, null]);
  const far = settledState({ ...DEFAULTS, layer: 9, head: 9, q: 99, k: 99 }, text);
  assert.deepEqual([far.layer, far.head, far.q, far.k], [2, 0, 4, 4]);
  const own = settledState({ ...DEFAULTS, layer: 0 }, text);
  assert.deepEqual([own.layer, own.head], [0, 0]);
  const some = { ...text, layers: [{ index: 3, heads: [{}] }, { index: 7, heads: [{}, {}] }],
    findings: [{ heads: [[7, 1]] }] };
  const named = settledState(DEFAULTS, some);
  assert.deepEqual([named.layer, named.head], [1, 1]);
  const none = settledState(DEFAULTS, { ...text, findings: [] });
  assert.deepEqual([none.layer, none.head], [0, 0]);
  const empty = settledState(DEFAULTS, null);
  assert.deepEqual([empty.layer, empty.head, empty.q], [0, 0, 0]);
});

test("language and theme come from the surroundings until they are chosen", () => {
  const japanese = settledState(DEFAULTS, null, { languages: ["ja-JP", "en"], dark: true });
  assert.deepEqual([japanese.lang, japanese.theme], ["ja", "dark"]);
  const chosen = settledState({ ...DEFAULTS, lang: "en", theme: "light" }, null, {
    languages: ["ja"], dark: true,
  });
  assert.deepEqual([chosen.lang, chosen.theme], ["en", "light"]);
  assert.equal(firstLanguage(["de", "fr-FR", "ja", "en"]), "ja");
  assert.equal(firstLanguage(["de", "EN-gb", "ja"]), "en");
  assert.equal(firstLanguage([]), "en");
});

test("Esc leads from what if to the model", () => {
  const path = [];
  for (let view = "whatif"; view !== null; view = levelUp(view)) path.push(view);
  assert.deepEqual(path, ["whatif", "head", "layer", "model"]);
});
