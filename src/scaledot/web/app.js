/**
 * The page's shell: it loads data, keeps the state, and hands both to one view at a time.
 *
 * A view is one exported function, `renderHead(root, context)`. It is called with its own empty
 * <div> at first and with the same <div> after each change of state, and builds what it shows anew
 * or mends what it built. What it returns, if anything, is called before another view takes its
 * place or the same one is called again (to end listeners and timers). It never stores state of its
 * own that a reader would miss after reloading.
 *
 * @typedef {object} Context
 * @property {object} document  the page document: `model`, `texts`, …
 * @property {object} text  the text shown: `tokens`, `layers`, `findings`, `next`
 * @property {object[]} texts  the texts kept, for comparison
 * @property {import("./state.js").State} state  settled: `layer`, `head` and `q` are numbers inside
 *     the document (`layer` is the place in `text.layers`); `k` may be null: the row's heaviest key
 * @property {(changes: object, how?: "drag"|"replace"|"step") => void} set  changes the
 *     state. A level, a head, a cell or a text becomes a step of the history, the rest replaces the last one. With
 *     "drag" nothing becomes a step and no view is called: for a slider that is still moving or a
 *     cell that follows the arrow keys; its view draws that itself. "replace" calls the view and
 *     makes no step; "step" forces one.
 * @property {(key: string, values?: object) => string} t  a message
 * @property {(key: string, values?: object) => DocumentFragment} rich  a message whose values may
 *     be nodes
 * @property {(key: string) => string} english  the English message: the pattern of a finding
 * @property {"light"|"dark"} theme
 * @property {"en"|"ja"} language
 * @property {boolean} still  the reader asks for reduced motion
 * @property {(sentence: string) => void} announce  says it to a screen reader
 * @property {(text: object, layer: number, head: number) => Promise<object>} loadHead  query, key,
 *     value, hidden, bias as {shape, data: Float32Array} or null, sink as a number or null.
 *     Rejects with a sentence to show.
 * @property {(text: object, layer: number) => Promise<object>} loadLayer  `contributions` likewise
 * @property {(text: object, layer: number, first: number, last: number) => Promise<object>}
 *     loadResult  what W_O gives for the queries first … last − 1: `result` likewise, `largest` of
 *     all queries, `biased`; `missing`: why there is none
 * @property {(cell: {q: number|null, k: number|null}|null) => void} point  the pointer is on this
 *     cell, on none: the text box marks it, listeners of `onPoint` hear it
 * @property {(listener: (cell: object|null) => void) => void} onPoint  hears of pointing until the
 *     view is called again: from the text box too, where k is null
 * @property {(copied: () => string) => void} onCopy  what the key "c" copies
 * @property {(saved: () => object) => void} onSave  what "Save picture" saves:
 *     {title, name, picture}, picture being draw.js's; the shell frames it with model, text and settings
 *
 * An element with `data-focus="name"` that had the focus gets it back after the view was called.
 * A view's messages have keys under its own prefix: "head.", "whatif.", "model.", "layer.".
 */


import { decodeArray, decodeHead, ask, bytesOf, inlined, recent } from "./data.js";
import { downloadFile, framePicture, paletteOf, pictureFile } from "./draw.js";
import { renderHead } from "./head.js";
import { headerParts } from "./header.js";
import { showKeys } from "./keys.js";
import { renderLayer } from "./layer.js";
import { renderModel } from "./model.js";
import { showMeasuring } from "./progress.js";
import { DEFAULTS, STAGES, changedState, fitsAddress, formatFragment, isStep, levelUp, parseFragment, settledState } from "./state.js";
import { makeTextBox, tokenRuns } from "./textbox.js";
import { examplesBox, factsOf, notesOf, problemBox, unobservedBox } from "./under.js";
import { offeredView } from "./views.js";
import { renderWhatIf } from "./whatif.js";
import { message, messageNodes, modelName, node, shortText, visibleNodes, visiblePieces } from "./words.js";

const RENDERERS = {
  model: renderModel,
  layer: renderLayer,
  head: renderHead,
  whatif: renderWhatIf,
};
const HEAD_BYTES = 64e6;
const LAYER_BYTES = 16e6;
const NARROWEST_PAGE = 160; // pixels
const ADDRESS_PAUSE = 200; // milliseconds between two writings of the address while dragging
const FOLLOW_PAUSE = 5000; // milliseconds between two readings of a time line
const PROGRESS_PAUSE = 300; // milliseconds between two looks at a measurement
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const stillSystem = matchMedia("(prefers-reduced-motion: reduce)");
const printing = matchMedia("print");

/** What the page holds besides its state: the data, what is waited for, the elements. */
const page = {
  document: null,
  /** Server or report: whether a new text can be measured. */
  served: true,
  /** The text shown, and those kept beside it. */
  text: null,
  kept: [],
  /** The first text's own words, which a fragment without a text stands for. */
  opening: null,
  state: DEFAULTS,
  messages: { en: {}, ja: {} },
  heads: recent(HEAD_BYTES),
  layers: recent(LAYER_BYTES),
  /** Texts that were sent once more, by the id that the server no longer knew. */
  resent: recent(Infinity),
  waiting: null,
  problem: null,
  /** The error with which a time line could not be read on. */
  lost: null,
  /** Whether a fragment asks a report for a text that it does not hold. */
  absent: false,
  textBox: null,
  rendered: { view: null, root: null, end: null },
  unwritten: undefined,
  pointing: [],
  copied: null,
  saved: null,
};

const place = (id) => document.getElementById(id);

// ------------------------------------------------------------------------------------ words

function settled() {
  const surroundings = {
    languages: navigator.languages ?? [navigator.language],
    dark: darkSystem.matches && !printing.matches,
  };
  const first = settledState(page.state, page.text, surroundings);
  const state = followed() ? offeredView("timeline").settled(first, page.state, followed()) : first;
  if (printing.matches) state.theme = "light";
  return state;
}

/** The time line of a training run, which a document holds in place of texts. */
function followed() {
  return page.document?.timeline ?? null;
}

function words() {
  return page.messages[settled().lang] ?? {};
}

function t(key, values) {
  return message(words(), key, values);
}

function rich(key, values) {
  return messageNodes(words(), key, values);
}

function announce(sentence) {
  place("announcer").textContent = sentence;
}

// ------------------------------------------------------------------------------------ data

/** The name of a head or layer in `document.heads`, `document.contributions` and the server. */
const nameOfHead = (text, layer, head) => `${text.id}/${text.layers[layer].index}/${head}`;

function loadHead(text, layer, head) {
  const name = nameOfHead(text, layer, text.layers[layer].heads[head].index);
  return once(page.heads, name, async () => {
    const here = page.document.heads?.[name];
    if (here === undefined && !page.served) throw new Error(t("shell.head_not_in_report"));
    const index = text.layers[layer].index;
    const number = text.layers[layer].heads[head].index;
    return decodeHead(here ?? (await partOf(text, `heads/${index}/${number}`)));
  });
}

function loadLayer(text, layer) {
  const name = `${text.id}/${text.layers[layer].index}`;
  return once(page.layers, name, async () => {
    const here = page.document.contributions?.[name];
    if (here === undefined && !page.served) throw new Error(t("shell.head_not_in_report"));
    if (here !== undefined) return { contributions: decodeArray(here) };
    const told = await partOf(text, `layers/${text.layers[layer].index}`);
    return { contributions: decodeArray(told.contributions) };
  });
}

function loadResult(text, layer, first, last) {
  const index = text.layers[layer].index;
  const name = `${text.id}/${index}`;
  return once(page.layers, `${name}/${first}-${last}`, async () => {
    const here = page.document.results?.[name];
    if (here === undefined && !page.served) return { missing: "report" };
    const rows = `first=${first}&last=${last}`;
    const told = here ?? (await partOf(text, `layers/${index}/result?${rows}`));
    return { ...told, first, result: decodeArray(told.result) };
  });
}

/** Part of a text from the server. One that it keeps no more, because others came or because it was
 * started again, is sent once more. */
async function partOf(text, path) {
  const { id } = text;
  try {
    return await ask(`api/texts/${id}/${path}`);
  } catch (error) {
    if (error.status !== 410) throw new Error(sentenceOf(error));
    text.id = await once(page.resent, id, async () => {
      const again = await ask("api/texts", { body: { text: text.text } });
      // Another model may be served at this address now.
      if (again.model.name !== page.document.model.name) throw error;
      return again.texts[0].id;
    });
    if (page.state.compare === id) page.state.compare = text.id;
    return ask(`api/texts/${text.id}/${path}`);
  }
}

/** The promise kept under a name, made at the first asking; one that failed is asked for again. */
function once(kept, name, load) {
  let promise = kept.get(name);
  if (promise === undefined) {
    promise = load();
    kept.set(name, promise);
    promise.then((value) => kept.weigh(name, promise, bytesOf(value)), () => kept.delete(name));
  }
  return promise;
}

// ------------------------------------------------------------------------------------ state

/** Changes the state, its fragment and, unless dragged, the picture. */
function set(changes, how) {
  const before = page.state;
  page.state = changedState(before, changes);
  const step = how === "step" || (how === undefined && isStep(before, page.state));
  if (step) {
    writeAddress(before);
    tellHistory("pushState", page.state);
  } else if (how === "drag") {
    page.unwritten ??= setTimeout(() => writeAddress(page.state), ADDRESS_PAUSE);
  } else {
    writeAddress(page.state);
  }
  if (page.state.text !== before.text) void showText();
  if (how !== "drag") show();
}

const addressOf = (state) => formatFragment(state) || location.pathname + location.search;

/** Puts a state in the present step of the history; browsers refuse it hundreds of times in a row,
 * which a slider would ask for. */
function writeAddress(state) {
  clearTimeout(page.unwritten);
  page.unwritten = undefined;
  tellHistory("replaceState", state);
}

/** A frame of a notebook has no address of its own: there the page works without a history. */
function tellHistory(how, state) {
  try {
    history[how]({ text: state.text }, "", addressOf(state));
  } catch (error) {
    if (error.name !== "SecurityError") throw error;
  }
}

/** The state of the fragment; a text too long for one is kept by the history itself. */
function restore(event) {
  const before = page.state;
  page.state = parseFragment(location.hash);
  // A step of the history has a state, an address typed by hand has none: the text stays that such
  // an address could not have held.
  const typed = event?.state === null && !fitsAddress(before.text ?? "");
  const long = typed ? before.text : event?.state?.text;
  if (page.state.text === null && typeof long === "string") page.state.text = long;
  if (page.state.text !== before.text) void showText();
  show();
}

// ------------------------------------------------------------------------------------ the text

/** Makes the text of the state the one shown: kept, inlined, or measured by the server. */
async function showText() {
  const wanted = page.state.text ?? page.opening;
  page.problem = null;
  page.absent = false;
  page.waiting?.controller.abort();
  page.waiting = null;
  if (followed()) return show();
  if (wanted === null || wanted === "") {
    page.text = null;
    return show();
  }
  const known = [...page.kept, ...(page.document?.texts ?? [])].find((x) => x.text === wanted);
  if (known !== undefined) {
    page.text = known;
    return show();
  }
  if (!page.served) {
    page.text = page.document.texts[0] ?? null;
    page.absent = true;
    return show();
  }
  return measure(wanted);
}

/** Has the server measure a text. What was shown before stays until the answer is there. */
async function measure(wanted) {
  const waiting = { controller: new AbortController(), started: performance.now(), timer: 0,
    layers: [] };
  page.waiting = waiting;
  announce(""); // what was said of the text before is over, whatever comes
  waiting.timer = setInterval(() => void showProgress(waiting), PROGRESS_PAUSE);
  try {
    const { signal } = waiting.controller;
    const told = await ask("api/texts", { body: { text: wanted }, signal });
    if (page.waiting !== waiting) return undefined;
    page.document = told;
    page.text = told.texts[0];
    page.waiting = null;
    announce(t("shell.measured", { tokens: tokensIn(page.text) }));
  } catch (error) {
    if (page.waiting !== waiting) return undefined;
    page.waiting = null;
    if (error.name !== "AbortError") page.problem = sentenceOf(error);
  } finally {
    clearInterval(waiting.timer);
  }
  return show();
}

/** What an error says; a server that is gone says nothing itself. */
function sentenceOf(error) {
  return error instanceof TypeError ? t("shell.no_server") : error.message;
}

// ------------------------------------------------------------------------------------ pictures

function show() {
  const state = settled();
  // What was announced in the other language would be read out in this one.
  if (document.documentElement.lang !== state.lang) announce("");
  document.documentElement.lang = state.lang;
  document.documentElement.dataset.theme = state.theme;
  document.documentElement.dataset.view = state.view;
  document.title = titleOf(state);
  showHeader(state);
  showTextSection(state);
  showView(state);
}

function titleOf(state) {
  const parts = ["scaledot"];
  if (page.document) parts.unshift(modelName(page.document.model, t));
  if (followed()) parts.unshift(t("timeline.title"));
  if (page.text && state.view !== "model") {
    const layer = t("shell.layer", { n: page.text.layers[state.layer]?.index ?? state.layer });
    parts.unshift(state.view === "layer" ? layer : `${layer} ${headName(state)}`);
  }
  return parts.join(" · ");
}

function headName(state) {
  return t("shell.head", { n: state.head });
}

function showHeader(state) {
  const root = place("header");
  const app = { ...appNow(), raw: page.state, set, save: (kind) => void save(kind) };
  keepFocus(() => root.replaceChildren(...headerParts(app, state, root)));
  place("skip").textContent = t("shell.skip");
  const { served } = page;
  place("footer").replaceChildren(
    served ? "" : t("shell.about_report", { version: page.document?.scaledot ?? "" }),
    served || state.lang === "ja" ? "" : " ",
    node("span", { class: "keys-hint" }, t("shell.footer")),
  );
}

/** The picture in focus as a file, under what a reader needs to know where it comes from. */
async function save(kind) {
  const saved = page.saved?.();
  if (!saved) return announce(t("shell.nothing_to_save"));
  const state = settled();
  const caption = followed() ? [modelName(page.document.model, t), formatFragment(page.state)] : [
    [modelName(page.document.model, t), t("shell.layer", { n: state.layer }), headName(state)]
      .join(" · "),
    visiblePieces(shortText(page.text.text, 120)).map((x) => x.text).join(""),
    formatFragment({ ...page.state, text: null }),
  ].filter(Boolean);
  const framed = framePicture(saved.picture, saved.title, caption, paletteOf(place("view")));
  const file = await pictureFile(framed, kind);
  downloadFile(file, `${saved.name}.${kind}`);
  return announce(t("shell.saved", { name: `${saved.name}.${kind}` }));
}

/** Runs a redrawing and gives the focus back to the element of the same data-focus. */
function keepFocus(redraw) {
  const name = document.activeElement?.dataset?.focus;
  redraw();
  if (name === undefined || document.activeElement?.dataset?.focus === name) return;
  document.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
}

// ------------------------------------------------------------------------- the text's section

function showTextSection(state) {
  const root = place("text");
  root.hidden = followed() !== null;
  if (root.hidden) return;
  if (page.textBox === null) {
    const row = node("div", { class: "text-row" });
    const note = node("p", { class: "text-note", id: "text-note" });
    root.append(row, node("div", { id: "under-text" }));
    page.textBox = makeTextBox(row, {
      onText: (typed) => set({ text: typed === page.opening ? null : typed }),
      onPick: (token) => set({ q: token, k: null }),
      onPoint: (token) => point(token === null ? null : { q: token, k: null }, true),
    });
    row.append(note);
  }
  root.setAttribute("aria-label", t("shell.text"));
  const text = page.text;
  const typed = page.state.text ?? page.opening ?? "";
  const same = text !== null && text.text === typed;
  page.textBox.show({
    typed,
    runs: same ? tokenRuns(text.tokens) : [],
    chosen: state.view === "model" ? null : state.q,
    readOnly: !page.served,
    label: t("shell.text"),
    placeholder: t("shell.type"),
  });
  place("text-note").replaceChildren(...(same ? [noteOf(text, state)] : []));
  keepFocus(() => place("under-text").replaceChildren(...underText(state)));
}

function tokensIn(text) {
  const n = text.tokens.length;
  return t(n === 1 ? "shell.token" : "shell.tokens", { n: n.toLocaleString("en") });
}

function noteOf(text, state) {
  const tokens = tokensIn(text);
  if (state.view === "whatif" || !text.seconds) return `${tokens} · ${t("shell.in_page")}`;
  const digits = text.seconds < 0.995 ? 2 : 1;
  return `${tokens} · ${t("shell.seconds", { s: text.seconds.toFixed(digits) })}`;
}

/** What the pieces under the text box read. */
function appNow() {
  const { absent, document, text } = page;
  return { absent, document, text, t, rich, english };
}

function underText(state) {
  const parts = [];
  if (page.waiting !== null) parts.push(node("div", { id: "progress" }));
  if (page.problem !== null) parts.push(problemBox(appNow(), page.problem));
  if (page.text === null) {
    if (page.waiting === null) parts.push(examplesBox(appNow(), (text) => set({ text })));
    return parts;
  }
  const texts = shownTexts();
  if (texts.length > 1) parts.push(textTabs(texts));
  const alone = state.view === "model" && texts.length < 2;
  if (state.view === "model" || state.view === "layer") {
    parts.push(factsOf(appNow(), state, alone ? keepLink() : null));
  }
  const notes = notesOf(appNow());
  const between = state.lang === "ja" ? "" : " ";
  if (notes.length > 0) parts.push(node("p", { class: "note" }, notes.join(between)));
  const unseen = page.text.layers.filter((x) => x.observed !== true);
  if (unseen.length > 0 && state.view === "model") parts.push(unobservedBox(appNow(), unseen));
  return parts.filter(Boolean);
}

function shownTexts() {
  const texts = page.served ? [...page.kept] : [...(page.document?.texts ?? [])];
  if (page.text && !texts.includes(page.text)) texts.push(page.text);
  return texts;
}

/** The texts at hand, one of them shown; "Keep" puts the present one aside for comparison. */
function textTabs(texts) {
  const tabs = texts.length < 2 ? [] : texts.map((x, i) =>
    node("button", {
      type: "button", class: "tab", "aria-pressed": String(x === page.text),
      "data-focus": `text-${i}`,
      click: () => chooseText(x),
    }, visibleNodes(shortText(x.text, 28))),
  );
  const keep = keepLink();
  const other = texts.find((x) => x !== page.text);
  const compare = page.state.compare === null ? other?.id : null;
  const beside = settled().view === "model" && other
    ? node("button", {
      type: "button", class: "link", "data-focus": "compare",
      "aria-pressed": String(page.state.compare !== null), click: () => set({ compare }),
    }, t("shell.compare"))
    : null;
  const forget = page.kept.includes(page.text)
    ? node("button", {
      type: "button", class: "link", "data-focus": "forget", click: () => {
        page.kept = page.kept.filter((x) => x !== page.text);
        show();
      },
    }, t("shell.forget"))
    : null;
  return node("div", { class: "texts", role: "group", "aria-label": t("shell.texts") },
    tabs, keep, forget, beside);
}

/** Shows another of the texts at hand; the one shown until now stays among them and beside it. */
function chooseText(chosen) {
  const before = page.text;
  if (page.served && !page.kept.includes(before)) page.kept.push(before);
  const compare = page.state.compare === chosen.id ? before.id : undefined;
  set({ text: chosen.text === page.opening ? null : chosen.text, compare });
}

/** Puts the text that is shown aside, to be compared with the next; null where it cannot. */
function keepLink() {
  if (!page.served || page.kept.includes(page.text)) return null;
  const keep = () => {
    page.kept.push(page.text);
    announce(t("shell.kept"));
    show();
  };
  return node("button", { type: "button", class: "link", "data-focus": "keep", click: keep },
    t("shell.keep"));
}

/** Asks how far a measurement is, and shows it. */
async function showProgress(waiting) {
  const told = await ask(`api/progress?first=${waiting.layers.length}`).catch(() => ({}));
  if (page.waiting !== waiting) return;
  // A slow answer may come after the next one's.
  for (const layer of told.measured ?? []) {
    if (layer.index === waiting.layers.length) waiting.layers.push(layer);
  }
  const state = settled();
  if (place("progress") === null) showTextSection(state);
  const root = place("progress");
  const now = { done: told.layers, total: told.of, layers: waiting.layers,
    elapsed: (performance.now() - waiting.started) / 1000 };
  const app = { t, state, theme: state.theme, palette: paletteOf(root),
    heads: page.document.model.heads };
  showMeasuring(root, now, app, stop);
}

/** Ends a measurement: with layers to keep the answer brings them, else what was there stays. */
function stop(keep) {
  if (keep) {
    ask("api/stop", { body: {} }).catch((error) => {
      page.problem = sentenceOf(error);
      show();
    });
    return;
  }
  page.waiting?.controller.abort();
  clearInterval(page.waiting?.timer);
  page.waiting = null;
  show();
}

// ------------------------------------------------------------------------------------ the view

function point(cell, fromText = false) {
  if (!fromText) page.textBox?.point(cell?.q ?? null);
  for (const listener of page.pointing) listener(cell);
}

function showView(state) {
  const root = place("view");
  const { rendered } = page;
  rendered.end?.();
  rendered.end = null;
  page.pointing = [];
  // A frame that is hidden has no width: there is nothing to lay out until it has one.
  if (innerWidth < NARROWEST_PAGE) return;
  if (followed()) {
    if (rendered.view !== "timeline") {
      rendered.root = node("div", { class: "view timeline-view" });
      rendered.view = "timeline";
      root.replaceChildren(rendered.root);
    }
    keepFocus(() => {
      rendered.end = offeredView("timeline").render(rendered.root, contextOf(state), lostBox());
    });
    return;
  }
  if (page.text === null) {
    root.replaceChildren();
    Object.assign(rendered, { view: null, root: null });
    return;
  }
  const name = `${state.view}/${page.text.id}`;
  if (rendered.view !== name) {
    rendered.root = node("div", { class: `view ${state.view}-view` });
    rendered.view = name;
    page.copied = null;
    page.saved = null;
    root.replaceChildren(rendered.root);
  }
  keepFocus(() => {
    rendered.end = RENDERERS[state.view](rendered.root, contextOf(state)) ?? null;
  });
}

const english = (key) => message(page.messages.en, key);

/** @returns {Context} */
function contextOf(state) {
  return {
    document: page.document,
    text: page.text,
    texts: shownTexts(),
    state,
    set,
    t,
    rich,
    english,
    theme: state.theme,
    language: state.lang,
    still: stillSystem.matches,
    announce,
    loadHead,
    loadLayer,
    loadResult,
    point,
    onPoint: (listener) => page.pointing.push(listener),
    onCopy: (copied) => {
      page.copied = copied;
    },
    onSave: (saved) => {
      page.saved = saved;
    },
  };
}

// ------------------------------------------------------------------------------------ keyboard

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog")) return;
  const state = settled();
  const act = keyAction(event.key, state);
  if (act === null) return;
  event.preventDefault();
  act();
}

function keyAction(key, state) {
  if (key === "?") return () => showKeys(place("keys"), t);
  if (page.text === null) return null;
  const { layers } = page.text;
  const heads = layers[state.layer]?.heads.length ?? 1;
  const by = (field, step, size) => () =>
    set({ layer: state.layer, head: state.head, [field]: (state[field] + step + size) % size });
  if (key === "[") return by("head", -1, heads);
  if (key === "]") return by("head", 1, heads);
  if (key === "{") return by("layer", -1, layers.length);
  if (key === "}") return by("layer", 1, layers.length);
  if (/^[1-5]$/.test(key)) return () => set({ stage: STAGES[Number(key) - 1] });
  if (key === "Escape" && levelUp(state.view)) {
    return () => set({ view: levelUp(state.view), layer: state.layer, head: state.head });
  }
  if (key === "c" && page.copied) return () => void copy(page.copied());
  return null;
}

async function copy(value) {
  try {
    await navigator.clipboard.writeText(value);
    announce(t("shell.copied", { value }));
  } catch {
    announce(t("shell.not_copied", { value }));
  }
}

// ------------------------------------------------------------------------------------ start

/** Reads on in a time line while its run goes on: what came is added to what is there. */
async function followRun() {
  const { lost } = page;
  const line = followed();
  try {
    const told = await ask(`api/timeline?after=${line.mark}`);
    page.lost = null;
    const grown = () => ({ ...page.document, timeline: offeredView("timeline").grown(line, told) });
    page.document = told.document ?? grown();
  } catch (error) {
    page.lost = error;
  }
  if (followed() !== line || page.lost?.message !== lost?.message) show();
  setTimeout(() => void followRun(), FOLLOW_PAUSE);
}

/** Why a time line cannot be read on, in a box; null while it can. */
function lostBox() {
  if (page.lost === null) return null;
  const words = offeredView("timeline").lost(page.lost, t) ?? sentenceOf(page.lost);
  return problemBox(appNow(), words);
}

/** The words of both languages that a file holds. A report's own hold all that it shows. */
async function loadMessages(file) {
  const load = async (language) =>
    inlined(`messages-${language}`) ?? (await ask(`${file}.${language}.json`));
  const [en, ja] = await Promise.all([load("en"), load("ja")]);
  page.messages = { en: { ...page.messages.en, ...en }, ja: { ...page.messages.ja, ...ja } };
}

async function start() {
  await loadMessages("messages");
  page.document = inlined("document");
  page.served = page.document === null;
  page.state = parseFragment(location.hash);
  try {
    if (page.served) page.document = await ask("api/document");
    if (page.served && followed()) await loadMessages("timeline");
    page.text = page.document.texts[0] ?? null;
    page.opening = page.text?.text ?? null;
  } catch (error) {
    page.problem = error.message;
  }
  const long = history.state?.text;
  if (page.state.text === null && typeof long === "string") page.state.text = long;
  addEventListener("popstate", restore);
  document.addEventListener("keydown", onKey);
  for (const query of [darkSystem, stillSystem, printing]) query.addEventListener("change", show);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) show();
    width = innerWidth;
  });
  const asked = page.state.text !== null && page.state.text !== page.opening ? showText() : null;
  show(); // the header and what is waited for stand there meanwhile
  await asked;
  if (followed() && page.served) setTimeout(() => void followRun(), FOLLOW_PAUSE);
  else if (page.text === null && !followed()) page.textBox.area.focus();
  document.documentElement.dataset.ready = "true";
}

void start();
