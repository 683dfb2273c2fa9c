/**
 * The layer level: all heads side by side, which is their concatenation, then W_O; what each head
 * adds to the chosen row; and what a causal model would say next. Nothing is averaged.
 */

import { signedColour, weightColour } from "./colour.js";
import { SERIF_FAMILY, axisSize, drawCrosshair, drawMap, fitWords, newPicture, paintPicture, paletteOf, pictureSvg, wordsWidth } from "./draw.js";
import { tokenLabel } from "./matrix.js";
import { addedPart, nextPart } from "./outcome.js";
import { smallMap } from "./preview.js";
import { rangeWords, resultPart } from "./result.js";
import { VISIBLE, attentionOf, stagesOf } from "./stages.js";
import { largestOf } from "./study.js";
import { fixed, node, symbol, tokenInWords } from "./words.js";

/** The column of row names, and what its larger type asks for on a page from 1600 on. */
const LABEL_COLUMN = 56;
const WIDE_LABEL_COLUMN = 72;
const WIDE_VIEW = 1504;
const NARROWEST = 84;
/** A head's map is as wide as it can be, yet the whole picture is seen at once. */
const WIDEST = 440;
const TALLEST = 0.4; // of the window
/** Columns at least this wide name the chosen row's token, which stands beside the line anyway. */
const NAMED = 110;
const HEAD_GAP = 8;
const GROUPS_GAP = 24;
const OUTPUT_HEIGHT = 78;
const ARROW_HEIGHT = 36;
/** Rows of outputs that are drawn of a long text, around the chosen one. */
const OUTPUT_ROWS = 24;
/** Rows up to which all outputs are drawn. */
const EXACT_ROWS = 128;
const COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
  "eleven", "twelve"];

/**
 * How heads share a line: columns as wide as they can be, kv groups whole where they fit.
 *
 * @returns {{label: number, perLine: number, column: number, gap: number}}
 */
export function headColumns(width, heads, perGroup, phone, widest = WIDEST) {
  const label = phone ? 0 : width >= WIDE_VIEW ? WIDE_LABEL_COLUMN : LABEL_COLUMN;
  const grouped = perGroup > 1 && perGroup < heads;
  const most = Math.max(1, Math.floor((width - label + HEAD_GAP) / (NARROWEST + HEAD_GAP)));
  let perLine = Math.ceil(heads / Math.ceil(heads / most));
  if (grouped && perGroup <= most) {
    perLine = Math.min(heads, Math.floor(most / perGroup) * perGroup);
  }
  const groups = grouped && perGroup <= most ? Math.ceil(perLine / perGroup) : 1;
  const gaps = (perLine - groups) * HEAD_GAP + (groups - 1) * GROUPS_GAP;
  const column = Math.min(widest, Math.floor((width - label - gaps) / perLine));
  return { label, perLine, column, gap: groups > 1 ? GROUPS_GAP : HEAD_GAP };
}

/** @param {HTMLElement} root @param {import("./app.js").Context} context */
export function renderLayer(root, context) {
  const { state, text, t } = context;
  const layer = text.layers[state.layer];
  let here = true;
  const heading = node("div", { class: "title-row" },
    node("h1", {}, layerTitle(context, layer)), node("p", {}, t("layer.note")));
  if (layer.heads.length === 0) {
    root.replaceChildren(heading, node("p", { class: "note" }, t("shell.layer_empty")));
    return undefined;
  }
  const waiting = node("p", {}, t("layer.loading"));
  if (root.childElementCount === 0) root.append(heading, waiting);
  const heads = layer.heads.map((_, h) => context.loadHead(text, state.layer, h));
  const added = context.loadLayer(text, state.layer).catch(() => ({ contributions: null }));
  const [first, last] = rowsShown(text.tokens.length, state.q);
  const result = context.loadResult(text, state.layer, first, last)
    .catch(() => ({ missing: "failed" }));
  const drawn = async () => {
    const told = { ...(await added), projected: await result };
    const loaded = await Promise.allSettled(heads);
    // A report may hold some heads of a layer: those are drawn.
    const there = loaded.filter((one) => one.status === "fulfilled");
    if (there.length === 0) throw loaded[0].reason;
    const found = [];
    for (const one of there) {
      const map = await smallMap(one.value, layer, () => here);
      if (!here) return;
      waiting.textContent = t("head.walking",
        { percent: Math.round((100 * found.length) / there.length) });
      found.push(headOfLayer(one.value, layer, state.q, map));
    }
    if (!here) return;
    const one = found[0];
    const studies = loaded.map((x) => (x.status === "fulfilled" ? found.shift()
      : absentHead(one, x.reason.message)));
    keepingFocus(() => showLayer(root, context, heading, studies, told));
  };
  drawn().catch(
    (error) => {
      if (here) root.replaceChildren(heading, node("p", { class: "problem" }, error.message));
    },
  );
  return () => {
    here = false;
  };
}

/** The shell gives the focus back after a call; what is drawn later does so itself. */
function keepingFocus(draw) {
  const name = document.activeElement?.dataset?.focus;
  draw();
  if (name && document.activeElement?.dataset?.focus !== name) {
    document.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
  }
}

function layerTitle(context, layer) {
  const n = layer.heads.length;
  const count = context.language === "en" ? (COUNTS[n] ?? String(n)) : String(n);
  const key = n === 1 ? "layer.one_head" : "layer.title";
  return context.t(key, { layer: layer.index, count });
}

function showLayer(root, context, heading, studies, told) {
  const { state, text } = context;
  const layer = text.layers[state.layer];
  const palette = paletteOf(root);
  const limit = Math.max(...studies.map((x) => x.largest)) || 1;
  const first = layer.heads[0]?.kv_head;
  const perGroup = layer.heads.filter((x) => x.kv_head === first).length;
  const picture = node("div", { class: "layer-picture" });
  const parts = node("div", { class: "layer-parts" });
  root.replaceChildren(heading, picture, parts);
  const width = picture.clientWidth;
  const absent = studies.filter((x) => x.absent);
  if (absent.length > 0) {
    const some = context.t("layer.absent", { n: absent.length, of: studies.length });
    // Of a server that failed for some heads, its own sentence.
    const said = context.document.included ? some : absent[0].absent;
    picture.append(node("p", { class: "note" }, said));
  }
  const widest = Math.max(200, Math.min(WIDEST, Math.round(TALLEST * innerHeight)));
  const columns = headColumns(width, studies.length, perGroup, innerWidth < 600, widest);
  const shared = { context, layer, studies, limit, columns, palette, perGroup,
    projected: told.projected };
  for (let h = 0; h < studies.length; h += columns.perLine) picture.append(headLine(shared, h));
  const used = Math.min(width, lineWidth(shared));
  shared.result = resultPart(shared, used, told.projected);
  picture.append(concatenation(shared, used), resultLine(shared));
  parts.append(addedPart(shared, told.contributions), nextPart(shared));
  context.onSave(() => savedLayer(shared));
  context.onCopy(() => shared.result.copied() ?? String(studies[state.head].top.weight));
}

/** A head whose arrays are not there, of the sizes of one that is: its place stays empty. */
function absentHead(there, reason) {
  return { ...there, absent: reason, largest: 0, top: { key: -1, weight: NaN } };
}

/** Rows of outputs that are drawn: all, or of a long text those around the chosen one. */
function rowsShown(n, q) {
  if (n <= EXACT_ROWS) return [0, n];
  const from = Math.max(0, Math.min(q - OUTPUT_ROWS / 2, n - OUTPUT_ROWS));
  return [from, from + OUTPUT_ROWS];
}

/** What is shown of one head: its map, its outputs, and the heaviest key of the chosen row. */
function headOfLayer(loaded, layer, q, map) {
  const attention = attentionOf(loaded, layer);
  const n = attention.query.rows;
  const [from, to] = rowsShown(n, q);
  const block = stagesOf(attention, from, to);
  const row = block.weights.subarray((q - from) * block.keys, (q - from + 1) * block.keys);
  const key = block.rows.topKey[q - from];
  return {
    map, from, rows: to - from, n, columns: attention.value?.columns ?? 0,
    output: block.output ?? new Float64Array(0), largest: largestOf(block.output ?? []),
    top: { key, weight: key < 0 ? NaN : row[key] },
  };
}

// --------------------------------------------------------------------------- heads side by side

/** One line of heads, in their kv groups. */
function headLine(shared, from) {
  const { context, layer, columns, perGroup, studies } = shared;
  const to = Math.min(studies.length, from + columns.perLine);
  const line = node("div", { class: "layer-line" });
  if (columns.label > 0) line.append(labelColumn(shared));
  const groups = node("div", { class: "layer-groups" });
  groups.style.gap = `${columns.gap}px`;
  line.append(groups);
  const grouped = perGroup > 1 && perGroup < studies.length && columns.perLine >= perGroup;
  const size = grouped ? perGroup : to - from;
  for (let h = from; h < to; h += size) {
    const end = Math.min(to, h + size);
    const members = [];
    for (let i = h; i < end; i++) members.push(headColumn(shared, i));
    const row = node("div", { class: "layer-heads" }, members);
    row.style.gap = `${HEAD_GAP}px`;
    const title = grouped
      ? node("div", { class: "layer-kv" }, context.t(
        end - h === 1 ? "layer.kv_one" : "layer.kv_head",
        { n: layer.heads[h].kv_head, a: h, b: end - 1 },
      ))
      : null;
    groups.append(node("div", {}, title, row));
  }
  if (grouped) line.classList.add("grouped");
  return line;
}

/** "queries ↓", the chosen row's token, "13 rows": level with the maps beside them. */
function labelColumn(shared) {
  const { context, columns, palette, studies } = shared;
  const { column } = columns;
  const picture = newPicture(columns.label, columnHeight(column));
  const size = axisSize();
  const style = { size, anchor: "end", fill: palette.ink2 };
  const right = columns.label - 8;
  picture.text(right, 9, context.t("layer.queries"), style);
  picture.text(right, 22, "↓", style);
  const { text, state } = context;
  const chosen = { size: size + 1, anchor: "end", weight: 700, fill: palette.row };
  const y = ((state.q + 0.5) / studies[0].n) * column + 4;
  const label = fitWords(tokenLabel(text.tokens[state.q]), right, chosen);
  picture.text(right, y < 34 ? Math.max(y, 36) : y, label, chosen);
  const rows = context.t("layer.rows", { n: studies[0].rows });
  picture.text(right, column + ARROW_HEIGHT + 13, fitWords(rows, right, style), style);
  const made = node("div", { class: "layer-labels", "aria-hidden": "true" });
  const canvas = node("canvas", {});
  paintPicture(canvas, picture);
  made.append(canvas);
  return made;
}

const columnHeight = (column) => column + ARROW_HEIGHT + OUTPUT_HEIGHT + 20;

function headColumn(shared, h) {
  const { context, columns, layer, studies } = shared;
  const { state, text, t } = context;
  const study = studies[h];
  const named = (i) => tokenInWords(tokenLabel(text.tokens[i]), t);
  const token = named(state.q);
  const key = study.top.key < 0 ? "–" : named(study.top.key);
  const unknown = study.absent ? "–" : "NaN";
  const weight = study.top.key < 0 ? unknown : shortWeight(study.top.weight);
  const canvas = node("canvas", { "aria-hidden": "true" });
  paintPicture(canvas, columnPicture(shared, h));
  const picked = h === state.head;
  const button = node("button", {
    type: "button",
    class: picked ? "layer-head picked" : "layer-head",
    "aria-pressed": String(picked),
    "data-focus": `layer-head-${h}`,
    click: (event) => {
      const box = canvas.getBoundingClientRect();
      const part = (event.clientY - box.top) / columns.column;
      const inside = event.detail > 0 && part >= 0 && part < 1;
      if (h === state.head && !inside) context.set({ view: "head", head: h, layer: state.layer });
      else context.set({ head: h, layer: state.layer,
        q: inside ? Math.floor(part * study.n) : state.q });
    },
    pointermove: (event) => {
      const box = canvas.getBoundingClientRect();
      const part = (event.clientY - box.top) / columns.column;
      const inside = part >= 0 && part < 1;
      context.point(inside ? { q: Math.floor(part * study.n), k: null } : null);
    },
    pointerleave: () => context.point(null),
    dblclick: () => context.set({ view: "head", head: h, layer: state.layer }),
    keydown: (event) => moveInLayer(event, context, studies),
  },
  node("span", { class: "layer-name" }, t("layer.head", { n: layer.heads[h].index })),
  node("span", { class: "layer-top" },
    node("span", { class: "layer-pair" },
      columns.column < NAMED ? null : node("span", { class: "yours" }, token), " → ", key),
    node("b", {}, weight)),
  canvas);
  button.style.width = `${columns.column}px`;
  return button;
}

/** 0.75, and "< .01" for what two decimals cannot say. */
function shortWeight(weight) {
  return weight > 0 && weight < 0.005 ? "< .01" : fixed(weight, 2);
}

/** Arrows move the row and the head; the row moves in all heads at once. */
function moveInLayer(event, context, studies) {
  const { state, text } = context;
  const rows = text.tokens.length;
  const moves = {
    ArrowUp: { q: state.q - 1 }, ArrowDown: { q: state.q + 1 }, PageUp: { q: state.q - 10 },
    PageDown: { q: state.q + 10 }, Home: { q: 0 }, End: { q: rows - 1 },
    ArrowLeft: { head: state.head - 1 }, ArrowRight: { head: state.head + 1 },
  };
  if (event.key === "Enter" && event.target.getAttribute("aria-pressed") === "true") {
    event.preventDefault();
    context.set({ view: "head", layer: state.layer, head: state.head });
    return;
  }
  if (!Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  const to = { layer: state.layer, head: state.head, ...moves[event.key] };
  to.head = Math.min(studies.length - 1, Math.max(0, to.head));
  if (to.q !== undefined) to.q = Math.min(rows - 1, Math.max(0, to.q));
  event.target.dataset.focus = `layer-head-${to.head}`;
  context.set(to, "replace");
  const row = to.q ?? state.q;
  context.announce(`${context.t("layer.head", { n: to.head })}, ${tokenLabel(text.tokens[row])}`);
}

/** A head's map with the chosen row, an arrow "· V", and its outputs. */
function columnPicture(shared, h) {
  const { context, studies, limit, columns, palette } = shared;
  const { theme, state } = context;
  const { column } = columns;
  const study = studies[h];
  const { map } = study;
  const picture = newPicture(column, columnHeight(column));
  if (study.absent) {
    picture.rect(1, 1, column - 2, column - 2, null, palette.rule2);
    return picture;
  }
  const grid = { x: 1, y: 1, cell: (column - 2) / map.columns, high: (column - 2) / map.rows,
    rows: map.rows, columns: map.columns };
  const hidden = (i, j) => map.seen[i * map.columns + j] !== VISIBLE;
  drawMap(picture, grid, (i, j) =>
    hidden(i, j) ? null : weightColour(map.data[i * map.columns + j], theme, map.root),
  hidden, palette);
  const step = study.n / map.rows;
  const k = h === state.head && study.top.key >= 0 ? Math.floor((state.k ?? study.top.key) / step)
    : null;
  drawCrosshair(picture, grid, Math.floor(state.q / step), k, palette);
  drawDown(picture, column / 2, column + 7, 18, palette.ink);
  picture.text(column / 2 + 9, column + 20, "· V", { size: axisSize(), fill: palette.ink2 });
  if (study.columns > 0) {
    const y = column + ARROW_HEIGHT;
    const cells = { x: 1, y, cell: (column - 2) / study.columns, high: OUTPUT_HEIGHT / study.rows };
    picture.cells(cells.x, cells.y, cells.cell, cells.high, study.rows, study.columns, (i, j) =>
      signedColour(study.output[i * study.columns + j], limit, theme));
    picture.text(column / 2, y + OUTPUT_HEIGHT + 14, String(study.columns), {
      size: axisSize(), anchor: "middle", fill: palette.ink2,
    });
  }
  return picture;
}

function drawDown(picture, x, y, length, colour) {
  picture.path([[x, y], [x, y + length]], colour, 1.25);
  const foot = y + length;
  picture.path([[x - 4, foot - 6], [x, foot], [x + 4, foot - 6]], colour, 1.25);
}

// --------------------------------------------------------------------------- concatenation

/** The bracket under the outputs is the concatenation; W_O follows it. */
function concatenation(shared, width) {
  const { columns, palette } = shared;
  if (innerWidth < 600) return concatenationWords(shared);
  const picture = concatenationPicture(shared, width);
  const made = node("div", { class: "layer-joined" }, pictureSvg(picture, joinedWords(shared)));
  made.style.marginLeft = `${columns.label}px`;
  made.style.color = palette.ink;
  return made;
}

/** W_O's result, its shape beside it where there is room. */
function resultLine({ columns, palette, projected, result, studies }) {
  const line = node("div", { class: "layer-result-line" });
  if (columns.label > 0 && projected.result) {
    const shape = newPicture(columns.label, 24);
    shape.text(columns.label - 8, 14, `${studies[0].n}×${projected.result.shape[1]}`,
      { size: axisSize(), anchor: "end", fill: palette.ink2 });
    line.append(pictureSvg(shape));
  }
  line.append(result.element);
  return line;
}

function lineWidth({ columns, perGroup, studies }) {
  const heads = Math.min(columns.perLine, studies.length);
  const groups = columns.gap === GROUPS_GAP ? Math.ceil(heads / perGroup) : 1;
  return heads * columns.column + (heads - groups) * HEAD_GAP + (groups - 1) * GROUPS_GAP;
}

function joinedWords({ context, studies }) {
  const h = studies.length;
  const d = studies[0].columns;
  return context.t("layer.concatenate", { h, d, hd: h * d, n: studies[0].n });
}

function concatenationPicture(shared, width) {
  const { palette } = shared;
  const after = afterWords(shared);
  const picture = newPicture(width, 56);
  const middle = Math.round(width / 2) + 0.5;
  picture.path([[0.5, 0], [0.5, 8], [width - 0.5, 8], [width - 0.5, 0]], palette.ink, 1.25);
  drawDown(picture, middle, 8, 34, palette.ink);
  const style = { size: axisSize() + 2, fill: palette.ink };
  picture.text(middle - 12, 28, joinedWords(shared), { ...style, anchor: "end" });
  picture.text(middle + 12, 28, [
    "· ", { t: "W", italic: true, family: SERIF_FAMILY }, { t: "O", shift: "sub" },
    after,
  ], style);
  const colours = coloursWords(shared);
  const small = { size: axisSize(), anchor: "end", fill: palette.ink2 };
  const room = middle - 12 - wordsWidth(`· WO${after}`, style);
  if (wordsWidth(colours, small) < room - 24) picture.text(width, 28, colours, small);
  return picture;
}

/** The shape of W_O; that of its result too where no map says it. */
function afterWords({ context, projected, studies }) {
  const joined = studies.length * studies[0].columns;
  const model = projected.result?.shape[1] ?? context.document.model.d_model;
  if (!model) return "";
  return projected.result ? ` (${joined}×${model})` : ` (${joined}×${model}) → ${studies[0].n}×${model}`;
}

function coloursWords({ context, limit, projected }) {
  const x = rangeWords(limit);
  if (!projected.result) return context.t("layer.colours", { x });
  return context.t("layer.colours_both", { x, y: rangeWords(projected.largest) });
}

function concatenationWords(shared) {
  return node("div", { class: "layer-joined-words" },
    node("p", {}, joinedWords(shared)),
    node("p", {}, "↓ · ", symbol("W", "O", true), afterWords(shared)),
    node("p", { class: "note" }, coloursWords(shared)));
}

function savedLayer(shared) {
  const { context, layer, columns, result, studies } = shared;
  const each = columns.column + HEAD_GAP;
  const perLine = columns.perLine;
  const lines = Math.ceil(studies.length / perLine);
  const high = columnHeight(columns.column) + 24;
  const below = result.picture?.() ?? newPicture(0, 0);
  const width = Math.max(Math.min(perLine, studies.length) * each - HEAD_GAP, below.width);
  const picture = newPicture(width, lines * high + 56 + below.height);
  for (let h = 0; h < studies.length; h++) {
    const [x, y] = [(h % perLine) * each, Math.floor(h / perLine) * high];
    picture.text(x, y + 13, context.t("layer.head", { n: layer.heads[h].index }), {
      size: 12, weight: 600, fill: h === context.state.head ? shared.palette.row
        : shared.palette.ink,
    });
    picture.put(columnPicture(shared, h), x, y + 22);
  }
  picture.put(concatenationPicture(shared, width), 0, lines * high);
  picture.put(below, 0, lines * high + 56);
  return { title: layerTitle(context, layer), name: `scaledot-layer-${layer.index}`, picture };
}
