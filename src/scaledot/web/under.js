/** What stands under the text box: examples, errors, notes, and the model's facts. */

import { modelName, node, scaleText, symbol, translated } from "./words.js";

/** What the embedded sample knows: it was trained on the King James Bible and nothing else. */
const SAMPLE_EXAMPLE = "In the beginning God created the heaven and the earth.";
const EXAMPLES = [
  "The animal didn’t cross the street because it was too tired.",
  "私は東京でリンゴを食べました。",
  "def softmax(x): return exp(x) / exp(x).sum()",
];

/** What the model is, and the scale it really applies. `keep`: the link that follows, or null. */
export function factsOf(app, state, keep) {
  const { model } = app.document;
  const { rich, t, text } = app;
  const strong = (x) => node("b", {}, String(x));
  const item = (...children) => node("span", {}, ...children);
  const seen = text.layers.filter((x) => x.heads.length > 0);
  const own = text.layers[state.layer];
  const layer = own?.heads.length > 0 ? own : seen[0];
  const list = [item(strong(modelName(model, t)))];
  if (model.d_model) list.push(item(symbol("d", "model", true), " ", strong(model.d_model)));
  list.push(item(rich("shell.layers_fact", { n: strong(model.layers) })));
  list.push(
    model.kv_heads && model.kv_heads !== model.heads
      ? item(rich("shell.kv_fact", { n: strong(model.heads), kv: strong(model.kv_heads) }))
      : item(rich("shell.heads_fact", { n: strong(model.heads) })),
  );
  if (layer === undefined) return node("p", { class: "facts" }, list);
  list.push(item(symbol("d", "k"), " ", strong(layer.d_k)));
  const scales = new Set(seen.map((x) => x.scale));
  const one = state.view === "layer" || scales.size === 1;
  const scale = one ? scaleText(layer) : t("shell.differs");
  list.push(item(rich("shell.scale_fact", { scale: strong(scale) })));
  if (layer.softcap) list.push(item(rich("shell.cap_fact", { n: strong(layer.softcap) })));
  const kinds = new Set(seen.map((x) => x.mask.kind));
  const kind = state.view === "layer" || kinds.size === 1 ? layer.mask.kind : "differs";
  list.push(item(t(`shell.mask_${kind}`, { n: layer.mask.window ?? 0 })));
  return node("p", { class: "facts" }, list, keep);
}

/** What a reader must know of how a text was measured. */
export function notesOf({ absent, document, t, text }) {
  const { layers } = document.model;
  const done = text.layers.filter((x) => x.observed === true).length;
  return [
    text.left_out > 0 ? t("shell.left_out", { n: text.left_out.toLocaleString("en") }) : null,
    text.complete === false ? t("shell.partial", { n: done, total: layers }) : null,
    absent ? t("shell.text_not_in_report") : null,
    ...(text.measured ? measuredNotes(text.measured, t) : []),
  ].filter(Boolean);
}

/** What an audit was of, and how its text ran. */
function measuredNotes({ beyond, chunk, left_out: out, longest, tokens }, t) {
  const number = (x) => x.toLocaleString("en");
  const key = out.length > 0 ? "shell.parts_without" : "shell.parts";
  return [
    t("shell.measured_over", { n: number(tokens) }),
    beyond === null ? null : t("shell.beyond", { n: number(longest), made: number(beyond) }),
    chunk === null ? null : t(key, { n: number(chunk), names: out.join(", ") }),
  ];
}

/** Sentences of the server that the page says in the reader's language: errors, and reasons why a
 * layer is not there. */
const PROBLEMS = 8;
const REASONS = 5;
const problemKey = (i) => `error.sentence_${i}`;
const reasonKey = (i) => `shell.unobserved_${i}`;

/** A sentence of the server in the reader's language, else as it came; it begins and ends as one. */
function wordsOfServer({ english, t }, keyOf, most, sentence) {
  for (let i = 1; i <= most; i++) {
    const words = translated(english(keyOf(i)), t(keyOf(i)), sentence);
    if (words !== null) return { words: wholeSentence(words), lang: null };
  }
  return { words: wholeSentence(sentence), lang: /^[\x20-\x7e]+$/.test(sentence) ? "en" : null };
}

const wholeSentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}`
  .replace(/[\p{L}\p{N})"']$/u, "$&.");

/** An error: what and why; what was there stays. */
export function problemBox(app, sentence) {
  const { t, text } = app;
  const { words, lang } = wordsOfServer(app, problemKey, PROBLEMS, sentence);
  return node(
    "div",
    { class: "problem-place" },
    node("div", { class: "problem", role: "alert" }, node("p", { class: "strong", lang }, words)),
    text === null ? null : node("p", { class: "note" }, t("shell.stays")),
  );
}

/** Layers that were not observed, and why. */
export function unobservedBox(app, layers) {
  const { t, text } = app;
  const names = layers.map((x) => x.index).join(", ");
  const reasons = [...new Set(layers.map((x) => x.observed))]
    .map((x) => wordsOfServer(app, reasonKey, REASONS, x));
  return node(
    "div",
    { class: "problem" },
    node("p", { class: "strong" }, t("shell.not_observed", { layers: names })),
    reasons.map(({ words, lang }) => node("p", { lang }, words)),
    node("p", {}, t("shell.others_shown", { n: text.layers.length - layers.length })),
  );
}

/** What an empty page offers. `pick` is told the text. */
export function examplesBox({ document, t }, pick) {
  const { model } = document ?? {};
  return node(
    "div",
    { class: "examples" },
    node("h1", { class: "unseen" }, model ? modelName(model, t) : "scaledot"),
    node("p", {}, t("shell.examples")),
    [...(model?.embedded ? [SAMPLE_EXAMPLE] : []), ...EXAMPLES].map((x) =>
      node("p", {}, node("button", {
        type: "button", class: "link", lang: /[ぁ-ん]/.test(x) ? "ja" : "en",
        click: () => pick(x),
      }, x)),
    ),
  );
}
