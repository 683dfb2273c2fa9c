// @ts-check
/**
 * What the head and what-if levels share: how numbers, formulas and scales are written, and how
 * wide things are for a page's width.
 */

import { SERIF_FAMILY, standsUpright, wordsWidth } from "./draw.js";
import { headStudy, rowStudy } from "./study.js";
import { node, significant } from "./words.js";

/** Rows and keys of the tile that a long text is seen through. */
export const TILE_SIDE = 24;

/** A sentence in the place of a picture that cannot be shown. @param {any} error */
export function headProblem(error) {
  return node("div", { class: "problem", role: "alert" },
    node("p", { class: "strong" }, String(error.message ?? error)));
}

/**
 * The study of the state's head; rejects with a sentence where there is none. While a long text is
 * walked through, a line at the head of the view says how far; the last picture stays.
 *
 * @param {HTMLElement} root @param {any} context @param {() => boolean} wanted
 */
export async function loadedStudy(root, { text, state, loadHead, t }, wanted) {
  const layer = text.layers[state.layer];
  if (!layer.heads.length) throw new Error(String(layer.observed));
  const line = node("p", { class: "note" });
  return headStudy(await loadHead(text, state.layer, state.head), layer, wanted, (share) => {
    line.textContent = t("head.walking", { percent: Math.round(100 * share) });
    if (!line.parentNode) root.prepend(line);
  });
}

/** A formula: strings are upright, {i} italic, {sub} and {sup} moved. @param {any[]} parts */
export function mathNode(...parts) {
  const inner = parts.map((part) => {
    if (typeof part === "string") return part;
    if (part instanceof Node) return part;
    if (part.i !== undefined) return node("i", {}, part.i);
    if (part.sub !== undefined) return node("sub", {}, part.sub);
    return node("sup", {}, part.sup);
  });
  return node("span", { class: "formula" }, inner);
}

/** A part of mathNode as a run of a picture's text. @param {any} part */
export function mathRun(part) {
  const family = SERIF_FAMILY;
  if (typeof part === "string") return { t: part, family };
  if (part instanceof Node) return { t: part.textContent ?? "", family };
  if (part.i !== undefined) return { t: part.i, family, italic: true };
  const [shift, inner] = part.sub !== undefined ? ["sub", part.sub] : ["sup", part.sup];
  const text = inner instanceof Node ? inner.textContent ?? "" : inner;
  return { t: text, family, italic: shift === "sub", shift };
}

/** At most four significant digits, without zeros at the end: 8, 5.385, 0.0417. */
export function shortNumber(/** @type {number} */ value) {
  return significant(value, 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Six significant digits, as pointing shows them; tiny numbers with a power of ten. */
export function sixDigits(/** @type {number} */ value) {
  if (value === 0 || !Number.isFinite(value) || Math.abs(value) >= 1e-4) {
    return significant(value, 6);
  }
  return value.toExponential(5).replaceAll("-", "−");
}

/** The division that a layer's scale is, as text in a formula: name and number.
 *  @param {any} layer */
export function scaleWords(layer) {
  const root = layer.rule && ["1/√d_k", "1/sqrt_d_k"].includes(layer.rule.name);
  if (root) return { root, above: `÷ √${layer.d_k}`, below: `÷ ${shortNumber(1 / layer.scale)}` };
  const whole = 1 / layer.scale;
  if (layer.scale > 0 && layer.scale < 1 && Math.abs(whole - Math.round(whole)) < 1e-4 * whole) {
    return { root, above: `÷ ${Math.round(whole)}`, below: `· ${shortNumber(layer.scale)}` };
  }
  return { root, above: `· ${shortNumber(layer.scale)}`, below: "" };
}

/** "÷ 8", or "· 0.0417" where the scale is no division. @param {any} layer */
export function scaleTerm(layer) {
  const words = scaleWords(layer);
  return words.root ? words.below : words.above;
}

/** Sizes of the five panels for a width: page.md, "Grid, spacing, type".
 *  @param {number} width @param {number} n rows @param {number} keys @param {string[]} rows */
export function headMeasures(width, n, keys, rows) {
  const wide = innerWidth >= 1600;
  const kind = innerWidth < 600 ? "phone" : innerWidth < 1024 ? "tablet" : "wide";
  const size = wide ? 13 : 11;
  const across = { phone: 1, tablet: 3, wide: 5 }[kind];
  const gutter = wide ? 76 : 56;
  const most = wide ? 88 : 56;
  const named = Math.max(0, ...rows.map((x) => wordsWidth(x, { size, weight: 700 })));
  const label = Math.min(most, Math.max(size + 12, Math.ceil(named) + 12));
  const free = width - label - (across - 1) * gutter;
  const room = Math.floor(free / across);
  const cell = room / keys >= 1 ? Math.floor(room / keys) : room / keys;
  const panel = Math.min(room, Math.round(cell * keys));
  const spare = across > 1 ? (width - label - across * panel) / (across - 1) : 0;
  return { kind, size, label, cell, high: Math.min(cell, 44), panel, wide,
    gutter: across > 1 ? spare : 0 };
}

/** Room above a matrix for its column labels. @param {string[]} labels @param {number} size
 *  @param {number} cell */
export function columnRoom(labels, size, cell) {
  if (cell < 1) return size * 5;
  const tall = (/** @type {string} */ label) => (standsUpright(label)
    ? [...label].length * size * 1.05 : wordsWidth(label, { size, weight: 700 }));
  return Math.min(size * 5, Math.max(size, ...labels.map(tall)));
}

/** rowStudy of the rows asked for last. @param {any} study */
export function rowCache(study) {
  const kept = new Map();
  return (/** @type {number} */ q) => {
    let row = kept.get(q);
    if (row === undefined) {
      row = rowStudy(study, q);
      kept.set(q, row);
      if (kept.size > 64) kept.delete(kept.keys().next().value);
    }
    return row;
  };
}

/** Buttons that move the cell: on a touch screen a finger is wider than a cell.
 *  @param {any} context @param {(key: string) => void} onStep */
export function steppersPart({ t }, onStep) {
  const steps = [["ArrowUp", "↑", "row_up"], ["ArrowDown", "↓", "row_down"],
    ["ArrowLeft", "←", "key_left"], ["ArrowRight", "→", "key_right"]];
  return node("div", { class: "steppers" }, steps.map(([key, sign, name]) =>
    node("button", { type: "button", "aria-label": t(`head.${name}`), "data-focus": `step-${key}`,
      click: () => onStep(key) }, sign)));
}
