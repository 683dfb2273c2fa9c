/** Small maps of weights: a layer's heads in a row, and one head with its numbers. */

import { rampOf, weightColour, weightStep } from "./colour.js";
import { drawColumnLabels, drawMap, drawRowLabels, newPicture, paintPicture, paletteOf } from "./draw.js";
import { VISIBLE, attentionOf, stagesOf, weightMaxima } from "./stages.js";
import { fixed, node, roleKey, significant } from "./words.js";

/** Tokens up to which a map has one cell a weight; a longer text shows blocks' largest weights. */
const EXACT_TOKENS = 128;
/** A text longer than this is drawn in √weight. */
const ROOT_TOKENS = 64;
const PREVIEW_SIDE = 256;
/** Tokens of a text whose layer is drawn whole: twelve heads of a long one take seconds. */
const ROW_TOKENS = 160;
/** Milliseconds for which a walk through a long text holds the page. */
const BUSY = 30;
const smallMaps = new WeakMap();

/**
 * The weights of a head, or the largest of each block: {rows, columns, data, seen, root}. A long
 * text is walked through in blocks, between which the page stays alive.
 *
 * @param {any} loaded  what the context's loadHead gave
 * @param {any} layer
 * @param {() => boolean} wanted  once it says no, the walk is given up and null the answer
 */
export async function smallMap(loaded, layer, wanted) {
  let map = smallMaps.get(loaded);
  if (map !== undefined) return map;
  const attention = attentionOf(loaded, layer);
  const n = attention.query.rows;
  const root = n > ROOT_TOKENS;
  if (n <= EXACT_TOKENS) {
    const { weights, seen } = stagesOf(attention);
    map = { rows: n, columns: attention.key.rows, data: weights, seen, root };
  } else {
    let overview;
    let since = performance.now();
    for (overview of weightMaxima(attention, PREVIEW_SIDE)) {
      if (performance.now() - since < BUSY) continue;
      await new Promise((done) => setTimeout(done));
      if (!wanted()) return null;
      since = performance.now();
    }
    map = { ...overview, root };
  }
  smallMaps.set(loaded, map);
  return map;
}

/** A map as an image of one pixel a cell; hidden cells are left out. */
export function mapImage(map, theme) {
  const ramp = rampOf("weights", theme);
  const canvas = node("canvas", { "aria-hidden": "true" });
  canvas.width = map.columns;
  canvas.height = map.rows;
  const image = new ImageData(map.columns, map.rows);
  for (let c = 0; c < map.rows * map.columns; c++) {
    if (map.seen[c] !== VISIBLE) continue;
    const step = weightStep(map.data[c], map.root);
    if (step < 0) continue;
    image.data.set(ramp.rgb.subarray(3 * step, 3 * step + 3), 4 * c);
    image.data[4 * c + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.imageRendering = "pixelated";
  return canvas;
}

/** A head's numbers as the preview lists them, and the way into it. */
export function headNumbers(context, layer, head, open) {
  const { t } = context;
  const found = context.text.layers[layer].heads[head];
  const role = found.role
    ? `${t(roleKey(found.role))} ${significant(found.role.strength, 2)}`
    : t("model.no_role");
  const rows = [
    ["model.variance", significant(found.score_var, 3)],
    ["model.entropy", small(found.normalised_entropy, 2)],
    ["model.largest", small(found.largest_weight, 3)],
    ["model.gradient", small(found.gradient, 3)],
    ["model.max_score", significant(found.max_score, 3)],
    ["model.role", role],
  ];
  const body = rows.map(([key, value]) =>
    node("tr", {}, node("th", { scope: "row" }, t(key)), node("td", {}, value)));
  return node("div", { class: "preview-numbers" },
    node("table", {}, node("tbody", {}, body)),
    node("button", { type: "button", class: "link", click: open, "data-focus": "open-head" },
      t("model.open"), " ↵"));
}

/** 0.860, and 0.0013 where so many decimals would leave nothing. */
function small(value, decimals) {
  if (value === null) return "–"; // no row has one: an only key, say
  if (!Number.isFinite(value)) return "NaN";
  return Math.abs(value) < 0.01 && value !== 0 ? significant(value, 2) : fixed(value, decimals);
}

/**
 * The preview of a head. `current` says whether the reader still points at it.
 *
 * @param {HTMLElement} root
 */
export function drawPreview(root, context, { layer, head, numbers, wide, current }) {
  const { t, rich, text } = context;
  const found = text.layers[layer];
  const yours = (x) => node("span", { class: "yours" }, String(x));
  const map = node("div");
  const named = node("h3", {}, rich("model.head_nodes", { head: yours(found.heads[head].index) }));
  const beside = node("div", {}, wide ? null : named, numbers);
  const body = node("div", { class: "preview-body" }, map, beside);
  const values = { layer: yours(found.index), head: yours(found.heads[head].index),
    n: found.heads.length };
  const row = !wide && text.tokens.length <= ROW_TOKENS && found.heads.length > 1;
  const title = rich(row ? "model.layer_weights" : "model.layer_head", values);
  const maps = row ? node("div", { class: "preview-maps" }) : null;
  // The old maps stay until the new ones are there: pointing along a row does not flicker.
  const heads = row ? found.heads.map((_, h) => h) : [head];
  // A report may hold some heads of a layer: those are drawn.
  void Promise.allSettled(heads.map((h) => context.loadHead(text, layer, h))).then(async (loaded) => {
    const all = await Promise.all(loaded.map((x) =>
      (x.status === "fulfilled" ? smallMap(x.value, found, current) : null)));
    if (!current()) return;
    root.replaceChildren(node("h2", {}, title), maps ?? "", body);
    if (row) rowOfMaps(maps, context, all, layer, head);
    const own = row ? head : 0;
    if (all[own] !== null) headMap(map, context, all[own]);
    else map.append(node("p", { class: "note" }, loaded[own].reason.message));
  });
  if (root.childElementCount === 0) {
    root.append(node("h2", {}, title.cloneNode(true)), t("model.loading"));
  }
}

function rowOfMaps(root, context, maps, layer, head) {
  root.style.height = "auto";
  const grid = document.querySelector("#view .grid-row:last-child");
  const first = document.querySelector("#view .grid-cell");
  if (grid && first) {
    root.style.marginLeft = `${first.offsetLeft}px`;
    root.style.width = `${grid.offsetWidth - first.offsetLeft}px`;
  }
  for (const [h, map] of maps.entries()) {
    const image = map === null ? null : mapImage(map, context.theme);
    const link = node("button", {
      type: "button",
      class: h === head ? "small-map picked" : "small-map",
      tabindex: "-1",
      "aria-label": context.t("model.place", { layer: context.text.layers[layer].index, head: h }),
      click: () => context.set({ view: "head", layer, head: h }),
    }, image);
    root.append(link);
  }
}

/** One head: with its tokens where cells are wide enough for a label. */
function headMap(root, context, map) {
  const { text, theme } = context;
  const phone = root.clientWidth < 300 && root.clientWidth > 0;
  const cell = Math.min(16, Math.floor((phone ? 200 : 220) / map.rows));
  if (map.rows !== text.tokens.length || cell < 8) {
    const image = mapImage(map, theme);
    image.style.width = `${PREVIEW_SIDE}px`;
    image.style.height = `${PREVIEW_SIDE}px`;
    root.append(image);
    return;
  }
  const palette = paletteOf(document.documentElement);
  const labels = text.tokens.map((x) => x.label.replace(/^␣(?=.)/, ""));
  const left = 56;
  const top = 52;
  const picture = newPicture(left + cell * map.columns + 2, top + cell * map.rows + 2);
  const grid = { x: left, y: top, cell, high: cell, rows: map.rows, columns: map.columns };
  const hidden = (i, j) => map.seen[i * map.columns + j] !== VISIBLE;
  drawMap(picture, grid, (i, j) => {
    return hidden(i, j) ? null : weightColour(map.data[i * map.columns + j], theme, map.root);
  }, hidden, palette);
  drawColumnLabels(picture, grid, labels, null, palette);
  drawRowLabels(picture, grid, labels, null, palette);
  const canvas = node("canvas", { role: "img", "aria-label": context.t("model.map_label") });
  paintPicture(canvas, picture);
  root.append(canvas);
}
