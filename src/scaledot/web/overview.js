// @ts-check
/**
 * A long text at once: a pixel is the largest weight of its block, a frame shows where the tile of
 * exact cells lies. The frame is dragged, or moved by the arrow keys.
 */

import { rampOf, weightColour } from "./colour.js";
import { drawMap, drawRamp, newPicture, paintPicture, pictureSvg } from "./draw.js";
import { makeMatrix } from "./matrix.js";
import { newOverview, addToOverview } from "./stages.js";
import { node } from "./words.js";

const OVERVIEW_MOST = 512;
const LABEL_ROOM = 60;

/** @param {any} shared @param {any} options */
export function overviewPart(shared, options) {
  const { context, study, palette, labels } = shared;
  const { t, theme } = context;
  const overview = study.overview ?? overviewOf(study);
  const side = options.width >= 860;
  const room = side ? Math.floor(options.width * 0.43) : options.width - 4;
  const pixel = Math.max(1, Math.floor(Math.min(OVERVIEW_MOST, room) / overview.columns));
  const scale = overview.columns > room ? room / overview.columns : pixel;
  const wide = overview.columns * scale;
  const high = overview.rows * scale;
  const perPixel = [overview.rowStep / scale, overview.columnStep / scale];
  const colour = (/** @type {number} */ value) => weightColour(value, theme, true);

  const base = node("canvas", { "aria-hidden": "true" });
  const over = node("canvas", { "aria-hidden": "true" });
  const map = node("div", { class: "matrix overview-map", tabindex: 0, role: "application",
    "aria-label": t("head.overview_label", { n: study.n }),
    "aria-roledescription": t("head.matrix_role"), "data-focus": "overview" }, base, over);
  map.style.width = `${wide + 2}px`;
  map.style.height = `${high + 22}px`;
  const tileName = node("h2", {});
  const tileNote = node("p", { class: "note" }, t("head.tile_note"));
  const matrix = makeMatrix({ name: "matrix-tile", label: t("head.tile_label"),
    description: t("head.matrix_role"), onPoint: options.onPoint, onPin: options.onPin,
    onKey: options.onKey });
  const ramp = node("canvas", { "aria-hidden": "true" });
  const lines = node("div", { class: "overview-lines", "aria-hidden": "true" });
  const tilePart = node("div", { class: "overview-tile" }, tileName, tileNote, matrix.element,
    ramp);
  const element = node("section", { class: `overview ${side ? "sided" : ""}`,
    "data-panel": "overview" },
    node("div", {},
      node("h2", {}, t("head.overview", { n: study.n.toLocaleString("en") })),
      node("p", { class: "note" }, t(overview.rowStep * overview.columnStep === 1
        ? "head.overview_each" : "head.overview_note", { rows: overview.rowStep,
        keys: overview.columnStep })),
      map),
    tilePart, side ? lines : null);

  const p = newPicture(wide + 2, high + 22);
  const grid = { x: 1, y: 0, cell: scale, high: scale, rows: overview.rows,
    columns: overview.columns };
  const at = (/** @type {number} */ i, /** @type {number} */ j) => i * overview.columns + j;
  drawMap(p, grid, (i, j) => (overview.seen[at(i, j)] ? colour(overview.data[at(i, j)]) : null),
    (i, j) => !overview.seen[at(i, j)], palette);
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const key = Math.min(study.keys - 1, Math.round(part * study.keys));
    p.text(1 + part * wide, high + 15, String(key), { size: 11, fill: palette.ink2,
      anchor: part === 0 ? "start" : part === 1 ? "end" : "middle" });
  }
  paintPicture(/** @type {any} */ (base), p);

  let framed = newPicture(1, 1);
  let dragging = false;
  const cellUnder = (/** @type {any} */ event) => {
    const box = map.getBoundingClientRect();
    const clamp = (/** @type {number} */ x, /** @type {number} */ most) =>
      Math.min(most - 1, Math.max(0, Math.floor(x)));
    return { q: clamp((event.clientY - box.top) * perPixel[0], study.n),
      k: clamp((event.clientX - box.left) * perPixel[1], study.keys) };
  };
  map.addEventListener("pointerdown", (event) => {
    dragging = true;
    map.setPointerCapture(event.pointerId);
    options.onMove(cellUnder(event));
  });
  map.addEventListener("pointermove", (event) => {
    if (dragging) options.onMove(cellUnder(event));
  });
  map.addEventListener("pointerup", () => {
    if (dragging) options.onDone();
    dragging = false;
  });
  map.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && options.onKey(event)) {
      event.preventDefault();
    }
  });

  const tileRoom = side ? options.width - wide - 2 - 76 - LABEL_ROOM
    : Math.min(options.width, 480) - LABEL_ROOM;

  /** @param {any} tile */
  function draw(tile) {
    const cell = Math.min(22, Math.floor(tileRoom / tile.columns));
    const block = study.whole ?? study.block(tile.q, tile.q + tile.rows);
    const first = study.whole ? 0 : tile.q;
    const cellOf = (/** @type {number} */ i, /** @type {number} */ j) =>
      (tile.q - first + i) * study.keys + tile.k + j;
    const columnHigh = 66;
    tileName.textContent = t("head.tile", { q0: tile.q, q1: tile.q + tile.rows - 1, k0: tile.k,
      k1: tile.k + tile.columns - 1 });
    matrix.draw({
      width: LABEL_ROOM + cell * tile.columns + 2, height: columnHigh + cell * tile.rows + 3,
      grid: { x: LABEL_ROOM, y: columnHigh, cell, high: cell, rows: tile.rows,
        columns: tile.columns },
      value: (i, j) => block.weights[cellOf(i, j)], colour,
      hidden: (i, j) => !block.seen[cellOf(i, j)],
      rowLabels: labels.slice(tile.q, tile.q + tile.rows),
      columnLabels: labels.slice(tile.k, tile.k + tile.columns),
      firstRow: tile.q, firstKey: tile.k, size: 11, labelRoom: LABEL_ROOM - 8,
      columnRoom: columnHigh - 8, palette,
    });
    const bar = newPicture(LABEL_ROOM + cell * tile.columns + 8, 26);
    const colours = rampOf("weights", theme).hex;
    const long = cell * tile.columns;
    drawRamp(bar, LABEL_ROOM, 2, long, 6, (part) => colours[Math.round(part * 256)]);
    for (const weight of [0, 0.01, 0.1, 0.25, 0.5, 1]) {
      bar.text(LABEL_ROOM + Math.sqrt(weight) * long, 22, String(weight),
        { size: 11, fill: palette.ink2, anchor: weight === 0 ? "start" : weight === 1 ? "end"
          : "middle" });
    }
    paintPicture(/** @type {any} */ (ramp), bar);
    frame(tile, cell, columnHigh);
  }

  /** @param {any} tile @param {number} cell @param {number} columnHigh */
  function frame(tile, cell, columnHigh) {
    const mark = newPicture(wide + 2, high + 22);
    const [x, y] = [1 + tile.k / perPixel[1], tile.q / perPixel[0]];
    const [w, h] = [Math.max(4, tile.columns / perPixel[1]), Math.max(4, tile.rows / perPixel[0])];
    mark.rect(x, y, w, h, null, palette.row, 2);
    paintPicture(/** @type {any} */ (over), mark);
    framed = mark;
    if (!side) return;
    requestAnimationFrame(() => {
      const whole = element.getBoundingClientRect();
      const from = map.getBoundingClientRect();
      const to = matrix.element.getBoundingClientRect();
      if (!whole.width) return;
      const left = from.left - whole.left + x + w;
      const top = from.top - whole.top + y;
      const right = to.left - whole.left;
      const picture = newPicture(whole.width, whole.height);
      const [upper, lower] = [to.top - whole.top + columnHigh,
        to.top - whole.top + columnHigh + cell * tile.rows];
      picture.path([[left, top], [right - 10, upper]], palette.row, 1);
      picture.path([[left, top + h], [right - 10, lower]], palette.row, 1);
      picture.path([[right - 4, upper], [right - 10, upper], [right - 10, lower],
        [right - 4, lower]], palette.row, 1);
      lines.replaceChildren(pictureSvg(picture));
    });
  }

  let drawn = "";
  return {
    element,
    draw(/** @type {any} */ tile) {
      drawn = `${tile.q},${tile.k}`;
      draw(tile);
    },
    /** @param {any} cell @param {any} tile */
    show(cell, tile) {
      if (`${tile.q},${tile.k}` !== drawn) this.draw(tile);
      matrix.cross(cell);
    },
    /** The overview with its frame, and the tile beside it, to be saved. */
    picture() {
      const near = matrix.picture();
      return newPicture(p.width + 24 + near.width, Math.max(p.height, near.height))
        .put(p, 0, 0).put(framed, 0, 0).put(near, p.width + 24, 0);
    },
  };
}

/** The overview of a head that is held whole. @param {any} study */
function overviewOf(study) {
  const overview = newOverview(study.n, study.keys, OVERVIEW_MOST);
  addToOverview(overview, study.whole.weights, study.keys, 0, study.whole.seen);
  return overview;
}
