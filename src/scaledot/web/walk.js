// @ts-check
/**
 * One row, step by step, as pictures: its score as a sum of products, its walk from scores to
 * weights, and the division by √d_k on one ruler. Given numbers in, marks out; nothing is computed
 * but positions.
 *
 * @typedef {import("./draw.js").Palette} Palette
 * @typedef {{label: string, score: number, scaled: number, exponential: number, weight: number,
 *   hidden: boolean, key: number|null}} WalkLine  a key of the row; key null: the others, the sink
 */

import { SERIF_FAMILY, drawArrow, fitWords, newPicture, wordsWidth } from "./draw.js";
import { fixed, weightDigits } from "./words.js";

/** Every product q_m·k_m as a bar; below, their running sum as steps that end in the score. */
export function productsPicture(
  /** @type {ArrayLike<number>} */ products, /** @type {number} */ width,
  /** @type {Palette} */ palette, /** @type {number} */ scaleUp = 1,
) {
  const [barsHigh, between, sumHigh] = [68 * scaleUp, 16, 60 * scaleUp];
  const p = newPicture(width, barsHigh + between + sumHigh + 12);
  const count = products.length;
  const sums = [0];
  for (let m = 0; m < count; m++) sums.push(sums[m] + products[m]);
  const finite = (/** @type {number} */ x) => (Number.isFinite(x) ? x : 0);
  const bars = verticalScale(Array.from(products, finite), 4, barsHigh);
  const steps = verticalScale(sums.map(finite), barsHigh + between, sumHigh);
  const column = (width - 6) / count;
  for (let m = 0; m < count; m++) {
    const value = finite(products[m]);
    const [top, foot] = [Math.min(bars(value), bars(0)), Math.max(bars(value), bars(0))];
    p.rect(m * column + 0.25, top, Math.max(0.5, column - 0.5), Math.max(foot - top, 0.5),
      value < 0 ? palette.neg : palette.pos);
  }
  p.rect(0, bars(0) - 0.5, count * column, 1, palette.ink2);
  p.rect(0, steps(0) - 0.5, count * column, 1, palette.rule2);
  /** @type {[number, number][]} */
  const line = [];
  for (let m = 0; m < count && Number.isFinite(sums[m + 1]); m++) {
    const y = steps(sums[m + 1]);
    line.push([m * column, y], [(m + 1) * column, y]);
  }
  if (line.length > 0) p.path(line, palette.ink, 1.5);
  const sum = sums[count];
  if (Number.isFinite(sum)) p.dot(count * column, steps(sum), 3.5, palette.row);
  return p;
}

/** A scale that holds 0 and every value between y and y + height. @param {number[]} values
 *  @param {number} y @param {number} height */
function verticalScale(values, y, height) {
  let [low, high] = [0, 0];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const unit = height / (high - low || 1);
  return (/** @type {number} */ value) => y + (high - value) * unit;
}

/**
 * Where the parts of the walk lie: also used to find the line under a pointer.
 *
 * @param {number} width @param {number} size of the text @param {boolean} narrow leaves out the
 *     column of exponentials
 */
export function walkMeasures(width, size, narrow) {
  const line = Math.round(size * 1.6) + 2;
  const label = narrow ? 56 : Math.round(size * 8);
  const gap = narrow ? 10 : 22;
  const columns = narrow ? 3 : 4;
  const column = (width - label - gap * columns) / columns;
  const digits = Math.round(size * (narrow ? 3.9 : 4.3));
  return {
    line, label, column, digits, narrow, size,
    head: narrow ? 24 : 28,
    start: (/** @type {number} */ index) => label + gap + index * (column + gap),
    bar: column - digits,
  };
}

/**
 * One line a key: the score, the same divided (on one ruler), e^(score − largest), the weight.
 *
 * @param {WalkLine[]} lines
 * @param {{width: number, size: number, narrow: boolean, chosen: number|null, headings: any[],
 *   reason: string}} options  chosen: the place of the chosen line
 * @param {Palette} palette
 */
export function walkPicture(lines, options, palette) {
  const measures = walkMeasures(options.width, options.size, options.narrow);
  const { line, label, bar, size, start, column } = measures;
  const p = newPicture(options.width, measures.head + lines.length * line + 4);
  const seen = lines.filter((x) => !x.hidden && x.key !== null && Number.isFinite(x.score));
  let [low, high] = [0, 0];
  for (const x of seen) {
    low = Math.min(low, x.score, x.scaled);
    high = Math.max(high, x.score, x.scaled);
  }
  const unit = bar / (high - low || 1);
  const note = { size: Math.max(10, size - 1), fill: palette.ink2 };
  const order = options.narrow ? [0, 1, 3] : [0, 1, 2, 3];
  order.forEach((step, index) => {
    p.text(start(index), 13, options.headings[step], note);
  });
  if (options.chosen !== null) {
    p.rect(0, measures.head + options.chosen * line, options.width, line, palette.rowbg);
  }
  lines.forEach((x, index) => {
    const y = measures.head + index * line;
    const text = y + line / 2 + size * 0.36;
    const bold = index === options.chosen ? 700 : 400;
    const words = { size, weight: bold, fill: x.hidden ? palette.ink3 : palette.ink };
    p.text(label, text, fitWords(x.label, label - 2, words), { ...words, anchor: "end" });
    if (x.hidden) return;
    const numbers = /** @type {import("./draw.js").TextStyle} */ ({ ...words, anchor: "end" });
    const values = [fixed(x.score, 2), fixed(x.scaled, 3), weightDigits(x.exponential),
      weightDigits(x.weight)];
    order.forEach((step, place) => {
      if (x.key === null && step < 2 && !Number.isFinite([x.score, x.scaled][step])) return;
      const left = start(place);
      if (step < 2) {
        const value = [x.score, x.scaled][step];
        const [from, to] = [Math.min(0, value), Math.max(0, value)];
        if (Number.isFinite(value)) {
          p.rect(left + (from - low) * unit, y + line * 0.22, Math.max((to - from) * unit, 0.75),
            line * 0.56, value < 0 ? palette.neg : palette.pos);
        }
      } else {
        const value = step === 2 ? x.exponential : x.weight;
        if (Number.isFinite(value)) {
          p.rect(left, y + line * 0.22, Math.max(value * bar, 0.75), line * 0.56, palette.seq);
        }
      }
      p.text(left + column, text, values[step], numbers);
    });
  });
  for (const place of [0, 1]) {
    const zero = start(place) - low * unit;
    lines.forEach((x, index) => {
      if (x.hidden || x.key === null) return;
      const above = index === 0 ? 8 : 0;
      p.rect(zero - 0.6, measures.head + index * line - above, 1.2, line + above, palette.ink2);
    });
  }
  drawHiddenLines(p, lines, measures, options, palette);
  return p;
}

/** @param {any} p @param {WalkLine[]} lines @param {any} measures @param {any} options
 *  @param {Palette} palette */
function drawHiddenLines(p, lines, measures, options, palette) {
  const { line, size, start } = measures;
  const style = { size: Math.max(10, size - 1), fill: palette.ink2 };
  const left = start(0);
  let told = false;
  lines.forEach((x, index) => {
    if (!x.hidden) return;
    const y = measures.head + index * line + line * 0.25;
    if (told) {
      p.hatch([[left, y, options.width - left, line * 0.5]], palette.hatch);
      return;
    }
    told = true;
    const room = options.width - left - 24;
    const words = fitWords(options.reason, room, style);
    const width = wordsWidth(words, style);
    p.hatch([[left, y, 8, line * 0.5],
      [left + 20 + width, y, Math.max(0, options.width - left - 20 - width), line * 0.5]],
    palette.hatch);
    p.text(left + 14, y + line * 0.25 + style.size * 0.36, words, style);
  });
}

/**
 * The scores of a row above, the same divided below, on one ruler: zero stands still, the lines
 * never cross.
 *
 * @param {{label: string, score: number, scaled: number}[]} points
 * @param {{width: number, size: number, chosen: number|null, divided: any}} options  divided: the
 *     name of the lower line
 * @param {Palette} palette
 */
export function rulerPicture(points, options, palette) {
  const { width, size } = options;
  const [lanes, laneHigh] = [3, size + 4];
  const top = lanes * laneHigh + 8;
  const foot = top + 56;
  const p = newPicture(width, foot + 2 * size + 10);
  const usable = points.filter((x) => Number.isFinite(x.score) && Number.isFinite(x.scaled));
  let [low, high] = [0, 0];
  for (const x of usable) {
    low = Math.min(low, x.score, x.scaled);
    high = Math.max(high, x.score, x.scaled);
  }
  const left = Math.max(56, size * 7 + 12);
  const right = width - size * 5;
  const at = (/** @type {number} */ value) =>
    left + ((value - low) / (high - low || 1)) * (right - left);
  p.rect(left, top - 0.5, right - left, 1, palette.rule2);
  p.rect(at(low), foot - 0.5, Math.max(at(0) - at(low), 0), 0, null);
  const name = { size, weight: 700, fill: palette.ink };
  p.text(0, top + size * 0.36, [{ t: "q·k", family: SERIF_FAMILY, italic: true, weight: 700 }],
    name);
  p.text(0, foot + size * 0.36, options.divided, name);
  const ordered = [...usable].sort((a, b) => Number(points.indexOf(a) === options.chosen)
    - Number(points.indexOf(b) === options.chosen));
  for (const x of ordered) {
    const chosen = points.indexOf(x) === options.chosen;
    const colour = chosen ? palette.row : x.score < 0 ? palette.neg : palette.pos;
    p.path([[at(x.score), top], [at(x.scaled), foot]], colour, chosen ? 2 : 1);
    p.dot(at(x.score), top, chosen ? 4.5 : 3, colour);
    p.dot(at(x.scaled), foot, chosen ? 4.5 : 3, colour);
  }
  p.rect(at(0) - 0.75, top - 12, 1.5, foot - top + 20, palette.ink2);
  p.text(at(0), foot + 2 * size, "0", { size, fill: palette.ink, anchor: "middle" });
  drawRulerEnds(p, usable, at, top, foot, size, palette);
  drawRulerLabels(p, points, options, at, { top, lanes, laneHigh, right: width }, palette);
  return p;
}

/** @param {any} p @param {any[]} points @param {(value: number) => number} at @param {number} top
 *  @param {number} foot @param {number} size @param {Palette} palette */
function drawRulerEnds(p, points, at, top, foot, size, palette) {
  if (!points.length) return;
  const style = { size, fill: palette.ink2 };
  const by = (/** @type {"score"|"scaled"} */ name) =>
    [...points].sort((a, b) => a[name] - b[name]);
  const scores = by("score");
  const scaled = by("scaled");
  const [least, most] = [scores[0].score, scores[scores.length - 1].score];
  const [small, large] = [scaled[0].scaled, scaled[scaled.length - 1].scaled];
  p.text(at(least) - 8, top + size * 0.36, fixed(least, 2),
    { ...style, anchor: "end", halo: palette.bg });
  if (points.length > 1) {
    p.text(at(most) + 9, top + size * 0.36, fixed(most, 2), { ...style, halo: palette.bg });
  }
  const under = foot + size + 6;
  const clear = Math.max(12, size);
  const from = Math.min(at(small), at(0) - 6);
  if (small < 0) p.text(from, under, fixed(small, 2), { ...style, anchor: "end" });
  else p.text(Math.max(at(small), at(0) + clear), under, fixed(small, 2), style);
  if (points.length > 1) {
    const start = small < 0 ? at(0) + clear
      : Math.max(at(small), at(0) + clear) + wordsWidth(fixed(small, 2), style) + 10;
    if (large >= 0) p.text(Math.max(at(large), start), under, fixed(large, 2), style);
    else if (at(large) + wordsWidth(fixed(large, 2), style) < at(0) - 8) {
      p.text(Math.max(at(large), from + 6), under, fixed(large, 2), style);
    }
  }
}

/** Labels above their points, moved up a lane where they would touch; those without room left out.
 *  @param {any} p @param {any[]} points @param {any} options @param {(value: number) => number} at
 *  @param {{top: number, lanes: number, laneHigh: number, right: number}} place
 *  @param {Palette} palette */
function drawRulerLabels(p, points, options, at, place, palette) {
  const { size } = options;
  /** @type {[number, number][][]} */
  const taken = Array.from({ length: place.lanes }, () => []);
  const indices = points.map((_, index) => index).filter((i) => Number.isFinite(points[i].score));
  const rank = (/** @type {number} */ i) => (i === options.chosen ? 0 : 1);
  const size2 = (/** @type {number} */ i) => Math.abs(points[i].score);
  indices.sort((a, b) => rank(a) - rank(b) || size2(b) - size2(a));
  const most = points.length > 40 ? 12 : points.length;
  // Lines first: a label that one passes interrupts it.
  /** @type {(() => void)[]} */
  const later = [];
  for (const i of indices.slice(0, most)) {
    const chosen = i === options.chosen;
    const style = { size, weight: chosen ? 700 : 400, fill: chosen ? palette.row : palette.ink };
    const text = fitWords(points[i].label, 90, style);
    const half = wordsWidth(text, style) / 2 + 4;
    const x = Math.min(Math.max(at(points[i].score), half), place.right - half);
    const lane = taken.findIndex((spans) =>
      spans.every(([from, to]) => x + half <= from || x - half >= to));
    if (lane < 0) continue;
    taken[lane].push([x - half, x + half]);
    const y = place.top - 9 - lane * place.laneHigh;
    if (lane) {
      const point = at(points[i].score);
      p.path([[point, place.top - 4], [point, y + 3]], palette.rule2, 1);
    }
    later.push(() => p.text(x, y, text, { ...style, anchor: "middle", halo: palette.bg }));
  }
  for (const write of later) write();
}

/** The arrow between two stages with the operator above it and its numbers below. */
export function operatorPicture(
  /** @type {{above: any, below: any}} */ words, /** @type {number} */ width,
  /** @type {number} */ size, /** @type {Palette} */ palette,
) {
  const p = newPicture(width, 3 * size + 16);
  const length = Math.min(30, width - 12);
  p.text(width / 2, size, words.above,
    { size, weight: 700, fill: palette.ink, anchor: "middle" });
  drawArrow(p, (width - length) / 2, size + 12, length, palette.ink);
  p.text(width / 2, 2 * size + 18, words.below, { size, fill: palette.ink2, anchor: "middle" });
  return p;
}
