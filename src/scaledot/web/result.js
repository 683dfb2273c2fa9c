/**
 * What W_O makes of the heads' outputs, (queries × d_model): a map under the concatenation whose
 * values are pointed at or walked through. Its colours have one range over the whole text.
 */

import { signedColour } from "./colour.js";
import { makeMatrix, movedCell, tokenLabel } from "./matrix.js";
import { fixed, node, significant, tokenInWords } from "./words.js";

const HEIGHT = 78;
/** The dimension that was looked at last, by text: the map is made anew when the row changes. */
const dimensions = new WeakMap();

/** ± the largest value, as the pictures say it. */
export function rangeWords(limit) {
  return fixed(limit, limit < 10 ? 2 : 1);
}

/**
 * @param {object} shared  context, palette
 * @param {number} width
 * @param {object} told  what the context's loadResult gave
 * @returns {{element: HTMLElement, picture: (() => object)|null, copied: () => string|null}}
 */
export function resultPart({ context, palette }, width, told) {
  const { state, t, text } = context;
  if (!told.result) {
    const why = node("p", { class: "note" }, t(`layer.result_${told.missing ?? "unknown"}`));
    return { element: node("div", { class: "layer-result" }, why), picture: null,
      copied: () => null };
  }
  const [rows, columns] = told.result.shape;
  const { data } = told.result;
  const { first } = told;
  const at = (q, j) => data[(q - first) * columns + j];
  const readout = node("p", { class: "readout" });
  const words = (q, j) => t("layer.result_cell", {
    token: tokenInWords(tokenLabel(text.tokens[q]), t), j, x: significant(at(q, j), 6) });
  const say = (q, j) => {
    readout.textContent = words(q, j);
    Object.assign(readout.dataset, { value: at(q, j), q, dimension: j });
  };
  let column = dimensions.get(text) ?? largestDimension(told.result, state.q - first);
  const matrix = makeMatrix({
    name: "layer-result", description: t("layer.dimension"),
    label: t("layer.result", { n: text.tokens.length, d: columns }),
    onPoint: (cell) => {
      say(cell?.q ?? state.q, cell?.k ?? column);
      matrix.cross(cell ?? { q: state.q, k: column });
      context.point(cell && { q: cell.q, k: null });
    },
    onPin: ({ q, k }) => move(q, k),
    onKey: (event) => {
      const bounds = { rows: text.tokens.length, keys: columns, seen: () => [0, columns - 1] };
      const to = movedCell(event.key, { q: state.q, k: column }, bounds);
      if (to === null) return false;
      move(to.q, to.k);
      return true;
    },
  });
  function move(q, k) {
    column = k;
    dimensions.set(text, k);
    if (q === state.q) {
      matrix.cross({ q, k });
      say(q, k);
    } else context.set({ layer: state.layer, q }, "replace");
    if (q >= first && q < first + rows) context.announce(words(q, k));
  }
  matrix.cross({ q: state.q, k: column });
  matrix.draw({
    width, height: HEIGHT, firstRow: first, firstKey: 0, size: 10, palette,
    grid: { x: 0.75, y: 1, cell: (width - 1.5) / columns, high: (HEIGHT - 2) / rows, rows, columns },
    value: (i, j) => data[i * columns + j],
    colour: (x) => signedColour(x, told.largest, context.theme),
    hidden: null, rowLabels: null, columnLabels: null, labelRoom: 0, columnRoom: 0,
  });
  say(state.q, column);
  const notes = [t(told.biased ? "layer.result_biased" : "layer.result_plain")];
  if (rows < text.tokens.length) {
    notes.unshift(t("layer.result_some",
      { a: first, b: first + rows - 1, n: text.tokens.length.toLocaleString("en") }));
  }
  const under = node("div", { class: "layer-result-words" },
    readout, node("p", { class: "note" }, notes.join(context.language === "ja" ? "" : " ")));
  return {
    element: node("div", { class: "layer-result" }, matrix.element, under),
    picture: () => matrix.picture(),
    copied: () => (document.activeElement === matrix.element ? String(at(state.q, column)) : null),
  };
}

/** Where a row is farthest from 0; its first dimension where nothing is. */
function largestDimension({ shape, data }, row) {
  let found = 0;
  const start = row * shape[1];
  for (let j = 1; j < shape[1]; j++) {
    if (Math.abs(data[start + j]) > Math.abs(data[start + found])) found = j;
  }
  return found;
}
