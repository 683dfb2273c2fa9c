// @ts-check
/**
 * A matrix that is pointed at and walked through by keyboard: cells on one canvas, labels and
 * crosshair on a second, so that moving redraws nothing but the crosshair.
 */

import { textColour } from "./colour.js";
import { cellAt, drawColumnLabels, drawCrosshair, drawMap, drawRowLabels, newPicture, paintPicture } from "./draw.js";
import { node, significant, visiblePieces } from "./words.js";

/** @typedef {{q: number, k: number}} Cell */
/** @typedef {import("./draw.js").Palette} Palette */
/** @typedef {import("./draw.js").Grid} Grid */

/** Cells at least this wide carry their number. */
const NUMBERED_CELL = 34;
const NAN_CELL = 21;

/** A token as a row or column of a matrix says it: "cat", "猫 1/3", "U+202E"; a mark alone would
 * sit on what stands beside it, and gets a circle of its own. */
export function tokenLabel(/** @type {any} */ token) {
  const words = token.part && token.char ? `${token.char} ${token.part[0]}/${token.part[1]}`
    : token.label.replace(/^[␣ ]+/, "") || token.label;
  const shown = visiblePieces(words).map((/** @type {any} */ piece) => piece.text).join("");
  return /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
}

/**
 * The cell that a key leads to, or null where the key moves nothing.
 *
 * @param {string} key  of a keyboard event
 * @param {Cell} cell
 * @param {{rows: number, keys: number, seen: (q: number) => [number, number]}} matrix  seen: the
 *     first and last key a row sees, [0, keys − 1] for a row that sees none
 * @returns {Cell|null}
 */
export function movedCell(key, cell, { rows, keys, seen }) {
  const row = (/** @type {number} */ q) => Math.min(rows - 1, Math.max(0, q));
  const column = (/** @type {number} */ k) => Math.min(keys - 1, Math.max(0, k));
  const { q, k } = cell;
  switch (key) {
    case "ArrowUp": return { q: row(q - 1), k };
    case "ArrowDown": return { q: row(q + 1), k };
    case "ArrowLeft": return { q, k: column(k - 1) };
    case "ArrowRight": return { q, k: column(k + 1) };
    case "Home": return { q, k: seen(q)[0] };
    case "End": return { q, k: seen(q)[1] };
    case "PageUp": return { q: row(q - 10), k };
    case "PageDown": return { q: row(q + 10), k };
    default: return null;
  }
}

/**
 * @typedef {object} MatrixLook
 * @property {number} width
 * @property {number} height
 * @property {Grid} grid
 * @property {(i: number, j: number) => number} value
 * @property {(value: number) => string|null} colour
 * @property {((i: number, j: number) => boolean)|null} hidden
 * @property {string[]|null} rowLabels
 * @property {string[]|null} columnLabels
 * @property {number} firstRow  query of the matrix' first row, for a tile
 * @property {number} firstKey
 * @property {number} size  of labels
 * @property {number} labelRoom  widest row label
 * @property {number} columnRoom  tallest column label
 * @property {Palette} palette
 * @property {((picture: any) => void)|null} [extra]  drawn over the cells
 */

/**
 * @param {{name: string, label: string, description: string, onPoint: (cell: any) => void,
 *   onPin: (cell: any) => void, onKey: (event: KeyboardEvent) => boolean, keyless?: boolean}}
 *     options  name: of its focus; keyless: columns are no keys; onKey tells whether it moved
 */
export function makeMatrix(options) {
  const base = node("canvas", { "aria-hidden": "true" });
  const over = node("canvas", { "aria-hidden": "true" });
  const element = node(
    "div",
    { class: "matrix", tabindex: 0, role: "application", "aria-label": options.label,
      "aria-roledescription": options.description, "data-focus": options.name },
    base, over,
  );
  /** @type {MatrixLook|null} */
  let look = null;
  /** @type {any} */
  let shown = { q: null, k: null };
  const cellOf = (/** @type {any} */ event) => {
    if (!look) return null;
    const box = element.getBoundingClientRect();
    const found = cellAt(look.grid, event.clientX - box.left, event.clientY - box.top);
    if (!found) return null;
    const [i, j] = found;
    return options.keyless ? { q: look.firstRow + i, k: null, column: j }
      : { q: look.firstRow + i, k: look.firstKey + j, column: j };
  };
  element.addEventListener("pointermove", (event) => options.onPoint(cellOf(event)));
  element.addEventListener("pointerleave", () => options.onPoint(null));
  element.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) options.onPin(cell);
  });
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (options.onKey(event)) event.preventDefault();
  });
  const baseMarks = () => {
    const one = /** @type {MatrixLook} */ (look);
    const p = newPicture(one.width, one.height);
    drawCells(p, one);
    return p;
  };
  const overMarks = () => {
    const one = /** @type {MatrixLook} */ (look);
    const p = newPicture(one.width, one.height);
    const row = shown.q === null ? null : shown.q - one.firstRow;
    const column = shown.k === null || options.keyless ? null : shown.k - one.firstKey;
    if (one.columnLabels) {
      drawColumnLabels(p, one.grid, one.columnLabels, column, one.palette,
        { size: one.size, most: one.columnRoom });
    }
    if (one.rowLabels) {
      drawRowLabels(p, one.grid, one.rowLabels, row, one.palette,
        { size: one.size, most: one.labelRoom });
    }
    one.extra?.(p);
    drawCrosshair(p, one.grid, row, column, one.palette);
    return p;
  };
  return {
    element,
    /** Draw all anew. @param {MatrixLook} next */
    draw(next) {
      look = next;
      element.style.width = `${next.width}px`;
      element.style.height = `${next.height}px`;
      paintPicture(/** @type {any} */ (base), baseMarks());
      paintPicture(/** @type {any} */ (over), overMarks());
    },
    /** Move the crosshair. @param {any} cell */
    cross(cell) {
      shown = cell;
      if (look) paintPicture(/** @type {any} */ (over), overMarks());
    },
    /** Cells, labels and crosshair as one picture. */
    picture() {
      const one = /** @type {MatrixLook} */ (look);
      return newPicture(one.width, one.height).put(baseMarks(), 0, 0).put(overMarks(), 0, 0);
    },
  };
}

/** @param {any} p @param {MatrixLook} look */
function drawCells(p, look) {
  const { grid, value, colour, hidden, palette } = look;
  const masked = hidden ?? (() => false);
  drawMap(p, grid, (i, j) => (masked(i, j) ? null : colour(value(i, j))), hidden, palette);
  const numbered = grid.cell >= NUMBERED_CELL && grid.high >= 14;
  for (let i = 0; i < grid.rows; i++) {
    let named = false;
    for (let j = 0; j < grid.columns; j++) {
      if (masked(i, j)) continue;
      const x = value(i, j);
      const missing = Number.isNaN(x);
      if (!missing && !numbered) continue;
      // Narrow cells share one word a row.
      if (missing && named && grid.cell < NAN_CELL) continue;
      named = true;
      const fill = missing ? palette.warn : textColour(colour(x) ?? palette.bg);
      const narrow = missing && grid.cell < NAN_CELL;
      p.text(grid.x + (j + (narrow ? 0 : 0.5)) * grid.cell,
        grid.y + (i + 0.5) * grid.high + look.size * 0.36,
        missing ? "NaN" : significant(x, 2),
        { size: Math.max(10, look.size - (missing ? 1 : 0)), weight: missing ? 700 : 400, fill,
          anchor: narrow ? "start" : "middle" });
    }
  }
}
