// @ts-check
/**
 * What another scale would do, as pictures: curves over the scale, a row's weights before and now,
 * random scores and their softmax. Numbers in, marks out.
 *
 * @typedef {import("./draw.js").Palette} Palette
 */

import { drawRamp, fitWords, newPicture, wordsWidth } from "./draw.js";
import { fixed } from "./words.js";

/** Where the curves' shared axis lies in a picture of a width. @param {number} width
 *  @param {number} size */
export function curveMeasures(width, size) {
  const left = Math.round(size * 4.6);
  return { left, right: width - 10, high: Math.round(size * 5.9), gap: Math.round(size * 3) };
}

/**
 * Three curves over one logarithmic axis of scales; the model's scale a grey line with circles, the
 * current one in the colour of choice.
 *
 * @param {{name: string, values: ArrayLike<number>, top: number, model: number, now: number,
 *   digits: number, topText: string}[]} curves
 * @param {{width: number, size: number, low: number, high: number, scales: ArrayLike<number>,
 *   modelScale: number, nowScale: number, ticks: number[]}} axis
 * @param {Palette} palette
 */
export function curvesPicture(curves, axis, palette) {
  const { width, size } = axis;
  const { left, right, high, gap } = curveMeasures(width, size);
  const step = high + gap;
  const p = newPicture(width, curves.length * step + 6);
  const at = (/** @type {number} */ scale) => {
    const part = Math.log(scale / axis.low) / Math.log(axis.high / axis.low);
    return left + Math.min(1, Math.max(0, part)) * (right - left);
  };
  const bottom = curves.length * step + 6;
  for (const tick of axis.ticks) p.rect(at(tick) - 0.5, 0, 1, bottom, palette.rule);
  const same = Math.abs(Math.log(axis.nowScale / axis.modelScale)) < 1e-6;
  p.rect(at(axis.modelScale) - 0.75, 0, 1.5, bottom, palette.ink3);
  p.rect(at(axis.nowScale) - 0.75, 0, 1.5, bottom, palette.row);
  curves.forEach((curve, index) => {
    const top = index * step + gap - size;
    const foot = top + high;
    const up = (/** @type {number} */ value) =>
      foot - Math.min(1.15, value / (curve.top || 1)) * high;
    const note = { size, fill: palette.ink2, anchor: /** @type {"end"} */ ("end") };
    p.rect(left, top - 0.5, right - left, 1, palette.rule);
    p.rect(left, foot - 0.5, right - left, 1, palette.rule2);
    p.text(left - 6, top + size * 0.36, curve.topText, note);
    p.text(left - 6, foot + size * 0.36, "0", note);
    p.text(left, top - 7, curve.name,
      { size, weight: 600, fill: palette.ink, halo: palette.bg });
    /** @type {[number, number][]} */
    const line = Array.from(axis.scales, (scale, i) => [at(scale), up(curve.values[i])]);
    p.path(line.filter(([, y]) => Number.isFinite(y)), palette.ink, 1.75);
    drawCurvePoints(p, curve, { at, up, left, right, size, same, axis }, palette);
  });
  return p;
}

/**
 * The point of the model and that of now, their numbers on the sides away from each other: where a
 * curve falls there is room above it on the right and below it on the left, where it rises the other
 * way round.
 *
 * @param {any} p @param {any} curve @param {any} place @param {Palette} palette
 */
function drawCurvePoints(p, curve, { at, up, left, right, size, same, axis }, palette) {
  const [x, now] = [at(axis.modelScale), at(axis.nowScale)];
  const rising = curve.values[curve.values.length - 1] > curve.values[0];
  const say = (/** @type {number} */ place, /** @type {number} */ value,
    /** @type {boolean} */ wanted, /** @type {string} */ fill) => {
    const words = fixed(value, curve.digits);
    const style = { size, weight: 700 };
    const room = wordsWidth(words, style) + 8;
    const before = place + room > right || (wanted && place > left + room);
    const [y, high, low] = [up(value), up(curve.top), up(0)];
    const above = low - y < size + 8 || (before === rising && y - high > size + 8);
    p.text(place + (before ? -8 : 8), y + (above ? -6 : size + 5), words,
      { ...style, halo: palette.bg, fill, anchor: before ? "end" : "start" });
  };
  const other = !same || Math.abs(curve.model - curve.now) > 1e-9;
  if (Number.isFinite(curve.model)) {
    p.dot(x, up(curve.model), 4, palette.bg, palette.ink, 1.5);
    if (other) say(x, curve.model, now >= x, palette.ink);
  }
  if (!Number.isFinite(curve.now)) return;
  p.dot(now, up(curve.now), 4.5, palette.row);
  say(now, curve.now, other && now < x, palette.row);
}

/**
 * A line a key from the weight before (circle) to the weight now (disc).
 *
 * @param {{label: string, before: number, now: number, chosen: boolean}[]} lines
 * @param {{width: number, size: number}} place @param {Palette} palette
 */
export function dumbbellPicture(lines, { width, size }, palette) {
  const line = Math.round(size * 1.6) + 2;
  const head = size + 12;
  const [left, right] = [Math.round(size * 5.8), width - 24];
  const p = newPicture(width, head + lines.length * line + 4);
  const at = (/** @type {number} */ weight) => left + weight * (right - left);
  for (const tick of [0, 0.5, 1]) {
    p.rect(at(tick) - 0.5, head - 6, 1, lines.length * line + 8, palette.rule);
    p.text(at(tick), size, String(tick), { size, fill: palette.ink2, anchor: "middle" });
  }
  lines.forEach((one, index) => {
    const y = head + (index + 0.5) * line;
    const style = { size, weight: one.chosen ? 700 : 400, fill: palette.ink };
    p.rect(left, y - 0.5, right - left, 1, palette.rule);
    p.text(left - 8, y + size * 0.36, fitWords(one.label, left - 12, style),
      { ...style, anchor: "end" });
    if (!Number.isFinite(one.before) || !Number.isFinite(one.now)) {
      p.text(left + 8, y + size * 0.36, "NaN", { ...style, fill: palette.warn });
      return;
    }
    p.path([[at(one.before), y], [at(one.now), y]], palette.row, 2);
    p.dot(at(one.before), y, 4, palette.bg, palette.ink, 1.5);
    p.dot(at(one.now), y, 4.5, palette.row);
  });
  return p;
}

/** A ramp with its ends and middle in words, as wide as the map above it.
 *  @param {{width: number, left: number, size: number, texts: string[],
 *  colour: (part: number) => string}} options @param {Palette} palette */
export function rampPicture({ width, left, size, texts, colour }, palette) {
  const p = newPicture(left + width + 12, size + 16);
  drawRamp(p, left, 2, width, 6, colour);
  texts.forEach((text, index) => {
    const part = index / (texts.length - 1);
    p.text(left + part * width, size + 12, text, { size, fill: palette.ink2,
      anchor: part === 0 ? "start" : part === 1 ? "end" : "middle" });
  });
  return p;
}

/**
 * Random scores of one d_k on the ruler that all share: their histogram, the measured s.d. as a
 * bar, theory as ticks; below, the weights of one draw as they are and divided.
 *
 * @param {{counts: ArrayLike<number>, limit: number, sd: number, theory: number, raw: number,
 *   scaled: number, first: {raw: ArrayLike<number>, scaled: ArrayLike<number>}}} drawn
 * @param {{width: number, size: number, words: {sd: any, raw: any, scaled: any}}}
 *     place
 * @param {Palette} palette
 */
export function chancePicture(drawn, { width, size, words }, palette) {
  const high = 58;
  const p = newPicture(width, high + 88 + 4 * size);
  const foot = high + 2;
  const at = (/** @type {number} */ x) => ((x + drawn.limit) / (2 * drawn.limit)) * width;
  const most = Math.max(1, ...Array.from(drawn.counts));
  const bins = drawn.counts.length;
  for (let b = 0; b < bins; b++) {
    const tall = (drawn.counts[b] / most) * high;
    if (tall) p.rect((b / bins) * width, foot - tall, width / bins + 0.3, tall, palette.ink3);
  }
  p.rect(0, foot - 0.5, width, 1, palette.rule2);
  p.rect(at(-drawn.sd), foot + 5, at(drawn.sd) - at(-drawn.sd), 4, palette.ink);
  for (const end of [-drawn.theory, drawn.theory]) {
    p.rect(at(end) - 1, foot + 2, 2, 10, palette.ink);
  }
  const note = { size, fill: palette.ink2 };
  const y = foot + 16 + size;
  p.text(0, y, fixed(-drawn.limit, 0), note);
  p.text(width / 2, y, "0", { ...note, anchor: "middle" });
  p.text(width, y, fixed(drawn.limit, 0), { ...note, anchor: "end" });
  p.text(0, y + size + 8, words.sd, note);
  const top = y + size + 24;
  const [half, tall] = [(width - 16) / 2, 40];
  const sides = [
    { weights: drawn.first.raw, x: 0, fill: palette.ink3, words: words.raw },
    { weights: drawn.first.scaled, x: half + 16, fill: palette.seq, words: words.scaled },
  ];
  for (const side of sides) {
    const count = side.weights.length;
    p.rect(side.x, top - 0.5, half, 1, palette.rule);
    for (let j = 0; j < count; j++) {
      const bar = Math.max(side.weights[j] * tall, 0.75);
      p.rect(side.x + (j / count) * half, top + tall - bar, half / count - 2, bar, side.fill);
    }
    p.text(side.x, top + tall + size + 4, side.words, note);
  }
  return p;
}
