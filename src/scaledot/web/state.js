/**
 * Everything the page remembers, and its form in the URL's fragment: `#layer=3&head=7&lang=ja`.
 *
 * Pure functions: the page is a picture of (document, state), so a fragment restores it. Defaults
 * are left out. A value that a fragment cannot hold (a letter for a number, an unknown view) counts
 * as left out: a fragment is typed by anybody.
 */

/**
 * @typedef {object} State
 * @property {"model"|"layer"|"head"|"whatif"} view
 * @property {number|null} layer  null: the layer of the first finding, else 0
 * @property {number|null} head  null: the head of the first finding, else 0
 * @property {number|null} q  the chosen query row; null: the last token
 * @property {number|null} k  the chosen key column; null: the heaviest key of the row
 * @property {"scores"|"scaled"|"masked"|"weights"|"output"} stage
 * @property {string} stat  one of STATISTICS
 * @property {"index"|"value"} sort  heads by number, or by the statistic within their layer
 * @property {string} rule  a scale rule, "model": what the model applies, "custom": state.scale
 * @property {number|null} scale  the factor itself, where rule is "custom"
 * @property {number} temp  temperature
 * @property {number|null} cap  soft-cap; null: the model's own
 * @property {"model"|"causal"|"none"|"window"} mask
 * @property {number} window  keys that a window keeps
 * @property {number|null} seed  of the random q and k; null: the first one
 * @property {"stage"|"one"} range  colours: a range for each stage, or one for all three
 * @property {boolean} centre  each row's mean is taken off, which softmax cannot see
 * @property {"en"|"ja"|null} lang  null: what the browser asks for
 * @property {"light"|"dark"|null} theme  null: what the system asks for
 * @property {string} measure  of a time line: one of MEASURES
 * @property {number|null} step  of a time line: the step of the grid; null: the last
 * @property {string|null} compare  id of a second text, beside the first in the model view
 * @property {string|null} text  null: the text the page opened with
 */

export const VIEWS = ["model", "layer", "head", "whatif"];
export const STAGES = ["scores", "scaled", "masked", "weights", "output"];
export const STATISTICS = [
  "variance",
  "entropy",
  "largest",
  "gradient",
  "max_score",
  "role",
];
export const MEASURES = ["max_score", "entropy", "score_var_within", "top_margin", "gradient"];
export const TEXT_LIMIT = 2000;

/** @type {Readonly<State>} */
export const DEFAULTS = Object.freeze({
  view: "model",
  layer: null,
  head: null,
  q: null,
  k: null,
  stage: "weights",
  stat: "variance",
  sort: "index",
  rule: "model",
  scale: null,
  temp: 1,
  cap: null,
  mask: "model",
  window: 4,
  seed: null,
  range: "stage",
  centre: false,
  lang: null,
  theme: null,
  measure: "max_score",
  step: null,
  compare: null,
  text: null,
});

/** How each field is read; undefined means "not a value of this field". */
const READERS = {
  view: oneOf(VIEWS),
  layer: count,
  head: count,
  q: count,
  k: count,
  stage: oneOf(STAGES),
  stat: oneOf(STATISTICS),
  sort: oneOf(["index", "value"]),
  rule: (word) => (/^[\w/]{1,40}$/.test(word) ? word : undefined),
  scale: positive,
  temp: positive,
  cap: positive,
  mask: oneOf(["model", "causal", "none", "window"]),
  window: (word) => count(word) || undefined,
  seed: whole,
  range: oneOf(["stage", "one"]),
  centre: (word) => (word === "1" || word === "true" ? true : undefined),
  lang: oneOf(["en", "ja"]),
  theme: oneOf(["light", "dark"]),
  measure: oneOf(MEASURES),
  step: (word) => (/^\d{1,12}$/.test(word) ? Number(word) : undefined),
  compare: (word) => (/^\w{1,20}$/.test(word) ? word : undefined),
  text: (word) => (word.length > 0 && word.length <= TEXT_LIMIT ? word : undefined),
};

function oneOf(words) {
  return (word) => (words.includes(word) ? word : undefined);
}

function count(word) {
  return /^\d{1,7}$/.test(word) ? Number(word) : undefined;
}

function whole(word) {
  const number = /^\d{1,16}$/.test(word) ? Number(word) : NaN;
  return Number.isSafeInteger(number) ? number : undefined;
}

function positive(word) {
  const number = Number(word);
  return word !== "" && Number.isFinite(number) && number > 0 ? number : undefined;
}

/**
 * The state a fragment stands for, with or without its "#".
 *
 * @param {string} fragment
 * @returns {State}
 */
export function parseFragment(fragment) {
  const state = { ...DEFAULTS };
  for (const [name, word] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    const value = Object.hasOwn(READERS, name) ? READERS[name](word) : undefined;
    if (value !== undefined) state[name] = value;
  }
  return state;
}

/**
 * The fragment of a state, "" for the defaults. A text over TEXT_LIMIT characters or with a lone
 * surrogate, which no URL can carry, is left out.
 *
 * @param {State} state
 * @returns {string}
 */
export function formatFragment(state) {
  const words = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    const value = state[name];
    if (value === DEFAULTS[name] || value === null || value === undefined) continue;
    if (name === "text" && !fitsAddress(value)) continue;
    words.set(name, value === true ? "1" : String(value));
  }
  const fragment = words.toString();
  return fragment && `#${fragment}`;
}

/** Whether a fragment can hold a text. */
export function fitsAddress(text) {
  return text.length <= TEXT_LIMIT && wellFormed(text);
}

/** Whether a text holds no lone surrogate. */
export function wellFormed(text) {
  return !/[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?:^|[^\uD800-\uDBFF])[\uDC00-\uDFFF]/.test(text);
}

/**
 * A new state; undefined changes are ignored, unknown names are an error of the caller.
 *
 * Another layer or head keeps the row but not the key, whose default is the row's heaviest;
 * another text keeps neither.
 *
 * @param {State} state
 * @param {Partial<State>} changes
 * @returns {State}
 */
export function changedState(state, changes) {
  const next = { ...state };
  for (const [name, value] of Object.entries(changes)) {
    if (!Object.hasOwn(DEFAULTS, name)) throw new Error(`no such state: ${name}`);
    if (value !== undefined) next[name] = value;
  }
  const moved = (name) => next[name] !== state[name];
  if ((moved("layer") || moved("head")) && changes.k === undefined) next.k = null;
  if (moved("text")) {
    if (changes.q === undefined) next.q = null;
    if (changes.k === undefined) next.k = null;
  }
  return next;
}

/**
 * Whether Back should return to `before`: a level, a head, a pinned cell or a text is a step;
 * a slider, a statistic, a language is not.
 *
 * @param {State} before
 * @param {State} after
 */
export function isStep(before, after) {
  return ["view", "layer", "head", "q", "k", "text"].some((x) => before[x] !== after[x]);
}

/**
 * The state with every choice made and inside the document: layer, head and q are numbers,
 * lang and theme are words. k stays null where the view is to take the row's heaviest key.
 *
 * @param {State} state
 * @param {{tokens: object[], layers: {index: number, heads: object[]}[], findings: object[]} | null} text
 * @param {{languages?: readonly string[], dark?: boolean}} surroundings
 * @returns {State}
 */
export function settledState(state, text, surroundings = {}) {
  const settled = { ...state };
  settled.lang = state.lang ?? firstLanguage(surroundings.languages ?? []);
  settled.theme = state.theme ?? (surroundings.dark ? "dark" : "light");
  if (text === null || text.layers.length === 0) {
    return { ...settled, layer: state.layer ?? 0, head: state.head ?? 0, q: state.q ?? 0 };
  }
  const [index, shown] = text.findings.flatMap((x) => x.heads ?? [])[0] ?? [null, 0];
  // A report may hold some layers only: a finding names the layer, not its place.
  const named = Math.max(0, text.layers.findIndex((x) => x.index === index));
  settled.layer = Math.min(state.layer ?? named, text.layers.length - 1);
  const heads = text.layers[settled.layer].heads.length;
  const own = state.layer === null || state.layer === named ? shown : 0;
  settled.head = Math.max(0, Math.min(state.head ?? own, heads - 1));
  const last = Math.max(0, text.tokens.length - 1);
  settled.q = Math.min(state.q ?? last, last);
  settled.k = state.k === null ? null : Math.min(state.k, last);
  return settled;
}

/** "ja" where the first language the page speaks, in the reader's order, is Japanese. */
export function firstLanguage(languages) {
  for (const language of languages) {
    const root = language.toLowerCase().split("-")[0];
    if (root === "ja" || root === "en") return root;
  }
  return "en";
}

/** The level above, where Esc leads; null for the highest. */
export function levelUp(view) {
  return { whatif: "head", head: "layer", layer: "model", model: null }[view];
}
