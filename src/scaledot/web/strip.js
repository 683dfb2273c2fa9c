/**
 * A statistic's axis: where its values lie, its colours and ticks, and the strip plot on it. The
 * axis is the legend of the grid beside it.
 */

import { roundedMaximum, statisticColour } from "./colour.js";
import { newPicture, wordsWidth } from "./draw.js";
import { significant } from "./words.js";

/** The field of a head that each statistic reads; a role's number is its strength. */
const FIELDS = {
  variance: "score_var",
  entropy: "normalised_entropy",
  largest: "largest_weight",
  gradient: "gradient",
  max_score: "max_score",
  role: "role",
};
const WIDE_AXIS = 1600;

/** A head's statistic as a number, NaN where it has none. */
export function statisticOf(head, stat) {
  if (stat === "role") return head.role?.strength ?? NaN;
  return head[FIELDS[stat]] ?? NaN;
}

/** The median of the numbers among values, NaN of none. */
export function medianOf(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (sorted.length === 0) return NaN;
  const middle = (sorted.length - 1) / 2;
  return (sorted[Math.floor(middle)] + sorted[Math.ceil(middle)]) / 2;
}

/**
 * The axis of a statistic: where a value lies (0 … 1), its ticks, and theory where there is one.
 *
 * @returns {{low: number, high: number, log: boolean, ticks: number[], theory: number|null}}
 */
export function axisOf(stat, values) {
  const numbers = values.filter(Number.isFinite);
  if (stat === "variance") {
    const positive = numbers.filter((x) => x > 0);
    const power = (x, round) => 4 ** round(Math.log(x) / Math.log(4));
    const low = Math.min(0.25, power(Math.min(...positive, 1), Math.floor));
    const high = Math.max(256, power(Math.max(...positive, 1), Math.ceil));
    const ticks = [];
    for (let x = low; x <= high; x *= 4) ticks.push(x);
    const every = Math.ceil(ticks.length / 7);
    const kept = ticks.filter((x, i) => x === 1 || i === 0 || (i % every === 0 && x !== 1));
    return { low, high, log: true, ticks: kept, theory: 1 };
  }
  if (stat === "max_score") {
    const high = roundedMaximum(numbers);
    const least = Math.min(0, ...numbers);
    const low = least < 0 ? -roundedMaximum([-least]) : 0;
    const ticks = low < 0 ? [low, 0, high / 2, high]
      : [0, high / 4, high / 2, (3 * high) / 4, high];
    return { low, high, log: false, ticks, theory: null };
  }
  return { low: 0, high: 1, log: false, ticks: [0, 0.25, 0.5, 0.75, 1], theory: null };
}

/** Where a value lies on an axis, 0 … 1, beyond it at its end. */
export function axisPart(axis, value) {
  const at = axis.log ? Math.log : (x) => x;
  const part = (at(value) - at(axis.low)) / (at(axis.high) - at(axis.low));
  return Math.min(1, Math.max(0, part));
}

/** The colour of a statistic's value, null where it has none. */
export function cellColour(theme, stat, value, axis) {
  if (!Number.isFinite(value)) return null;
  return statisticColour(FIELDS[stat], value, theme, axis.high);
}

/** Ticks and ramp of an axis; its foot is at y. */
function drawAxis(picture, context, axis, left, width, y, palette) {
  const at = (value) => left + axisPart(axis, value) * width;
  const steps = Math.max(1, Math.round(width)); // whole pixels: no seams
  const value = (part) => axis.log
    ? Math.exp(Math.log(axis.low) + part * Math.log(axis.high / axis.low))
    : axis.low + part * (axis.high - axis.low);
  picture.cells(left, y - 8, width / steps, 8, 1, steps, (_, j) =>
    cellColour(context.theme, context.state.stat, value((j + 0.5) / steps), axis));
  const size = innerWidth >= WIDE_AXIS ? 13 : 11;
  for (const tick of axis.ticks) {
    const theory = tick === axis.theory;
    picture.text(at(tick), y - 14, tickWords(tick), {
      size, anchor: "middle", weight: theory ? 700 : 400, fill: theory ? palette.ink : palette.ink2,
    });
  }
  return at;
}

function tickWords(value) {
  return value !== 0 && Math.abs(value) < 1 ? significant(value, 2).replace(/0+$/, "")
    : String(value).replace("-", "−");
}

/** Each layer's heads on the statistic's axis; the axis is the grid's legend. */
export function stripPicture(context, text, axis, width, sizes, palette) {
  const { state, t } = context;
  const { top, height } = sizes;
  const size = innerWidth >= WIDE_AXIS ? 13 : 11;
  const words = axis.ticks.map((x) => wordsWidth(tickWords(x), { size }) / 2);
  const left = Math.max(12, Math.ceil(words[0]));
  const right = width - Math.max(12, Math.ceil(words.at(-1)));
  const foot = top + height * text.layers.length;
  const bar = { size, anchor: "end", fill: palette.ink2 };
  const theoryStyle = { size, weight: 600, anchor: "middle", fill: palette.ink };
  const picture = newPicture(width, foot + 24);
  const at = drawAxis(picture, context, axis, left, right - left, top - 3, palette);
  for (const tick of axis.ticks) {
    if (tick !== axis.theory) picture.rect(at(tick) - 0.5, top, 1, foot - top, palette.rule);
  }
  if (axis.theory !== null) picture.rect(at(axis.theory) - 0.75, top, 1.5, foot - top, palette.ink);
  for (const [l, layer] of text.layers.entries()) {
    const y = top + (l + 0.5) * height;
    const values = layer.heads.map((h) => statisticOf(h, state.stat));
    const middle = medianOf(values);
    const tall = Math.min(17, 0.4 * height);
    if (Number.isFinite(middle)) picture.rect(at(middle) - 1, y - tall, 2, 2 * tall, palette.ink);
    for (const [h, value] of values.entries()) {
      if (!Number.isFinite(value) || (l === state.layer && h === state.head)) continue;
      picture.dot(at(value), y, 3, null, palette.ink2, 1);
    }
    const own = l === state.layer ? values[state.head] : NaN;
    if (Number.isFinite(own)) picture.dot(at(own), y, 5, palette.row);
  }
  // Beside one another where both find room, else one under the other.
  let below = foot + 17;
  if (axis.theory !== null) {
    const half = wordsWidth(t("model.theory"), theoryStyle) / 2;
    const middle = Math.max(half, at(axis.theory));
    picture.text(middle, below, t("model.theory"), theoryStyle);
    if (middle + half + 12 > right - wordsWidth(t("model.bar"), bar)) {
      below += 17;
      picture.height += 17;
    }
  }
  picture.text(right, below, t("model.bar"), bar);
  return picture;
}

/** The axis alone, where the strip plot has no room. */
export function legendPicture(context, axis, width, palette) {
  const picture = newPicture(width, 32);
  const at = drawAxis(picture, context, axis, 16, width - 32, 26, palette);
  if (axis.theory !== null) picture.rect(at(axis.theory) - 0.75, 18, 1.5, 12, palette.ink);
  return picture;
}

