/**
 * The numbers of a training run before anything is drawn: decoded, summed up by step, added to while
 * the run goes on. Pure, but for what it remembers of a line that it decoded.
 */

import { decodeArray } from "./data.js";

const QUANTILES = [0.05, 0.25, 0.5, 0.75, 0.95];
/** A positive measure whose most is so many times its least is drawn on a logarithmic axis. */
const LOGARITHMIC = 30;
const decodedLines = new WeakMap();

/** The quantile of sorted numbers, between neighbours in proportion; NaN of none. */
export function quantileOf(sorted, part) {
  if (sorted.length === 0) return NaN;
  const at = part * (sorted.length - 1);
  const low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return low === at ? sorted[low] : sorted[low] + (at - low) * (sorted[high] - sorted[low]);
}

/**
 * Of each step the quantiles of the heads, the worst head and the largest number.
 *
 * @param {Float32Array} data  (steps, heads)
 * @returns {{bands: number[][], worst: number[], at: number[], most: number[]}}  bands by quantile;
 *     at: the column, −1 where no head has a number; most: the largest finite one, else 0
 */
export function stepsSummed(data, heads, low) {
  const steps = data.length / heads;
  const found = { bands: QUANTILES.map(() => []), worst: [], at: [], most: [] };
  for (let i = 0; i < steps; i++) {
    const row = data.subarray(i * heads, (i + 1) * heads);
    const sorted = [...row].filter((x) => !Number.isNaN(x)).sort((x, y) => x - y);
    QUANTILES.forEach((part, j) => found.bands[j].push(quantileOf(sorted, part)));
    const worst = low ? sorted[0] : sorted.at(-1);
    found.worst.push(worst ?? NaN);
    found.at.push(worst === undefined ? -1 : row.indexOf(worst));
    found.most.push(sorted.findLast(Number.isFinite) ?? 0);
  }
  return found;
}

/** The place of the step looked at last before or at this one; the last for null. */
export function placeOfStep(steps, step) {
  if (step === null) return steps.length - 1;
  return Math.max(0, steps.findLastIndex((x) => x <= step));
}

export function nearestStep(steps, wanted) {
  return steps.reduce((x, y) => (Math.abs(y - wanted) < Math.abs(x - wanted) ? y : x));
}

/** {layer, head} of each column of the values. */
export function columnsOf(line) {
  return line.layers.flatMap((x, layer) =>
    Array.from({ length: x.heads }, (_, head) => ({ layer, head })));
}

/** A line's arrays, decoded once: values by measure, losses, and what was summed up of them. */
function arraysOf(line) {
  let known = decodedLines.get(line);
  if (known === undefined) {
    const values = Object.entries(line.values).map(([name, x]) => [name, decodeArray(x).data]);
    known = { values: Object.fromEntries(values), losses: decodeArray(line.losses).data,
      summed: {} };
    decodedLines.set(line, known);
  }
  return known;
}

/** A measure's values with `stepsSummed` of them. */
export function summedOf(line, name, low) {
  const { values, summed } = arraysOf(line);
  summed[name] ??= stepsSummed(values[name], columnsOf(line).length, low);
  return { data: values[name], ...summed[name] };
}

export function lossesOf(line) {
  return [...arraysOf(line).losses];
}

/**
 * A line with what the server told of its file since: steps that came, some of them in place of
 * others (a run that was resumed). What was decoded and summed up before is kept.
 */
export function grownLine(line, told) {
  const { mark, notes } = told;
  const before = arraysOf(line);
  if (told.steps === undefined) {
    const same = JSON.stringify(notes) === JSON.stringify(line.notes);
    const next = same ? line : { ...line, notes };
    decodedLines.set(next, before);
    return Object.assign(next, { mark });
  }
  const came = { ...told, layers: line.layers };
  const after = arraysOf(came);
  const replaced = new Set(told.steps);
  const order = [
    ...line.steps.map((step, i) => ({ step, i, old: true })).filter((x) => !replaced.has(x.step)),
    ...told.steps.map((step, i) => ({ step, i, old: false })),
  ].sort((x, y) => x.step - y.step);
  const taken = (a, b) => order.map(({ i, old }) => (old ? a : b)[i]);
  const rows = (a, b, wide) => {
    const data = new Float32Array(order.length * wide);
    order.forEach(({ i, old }, k) =>
      data.set((old ? a : b).subarray(i * wide, (i + 1) * wide), k * wide));
    return data;
  };
  const heads = columnsOf(line).length;
  const arrays = { values: {}, losses: rows(before.losses, after.losses, 1), summed: {} };
  for (const { name, low } of line.measures) {
    arrays.values[name] = rows(before.values[name], after.values[name], heads);
    const known = before.summed[name];
    if (known === undefined) continue;
    const more = stepsSummed(after.values[name], heads, low);
    arrays.summed[name] = { worst: taken(known.worst, more.worst), at: taken(known.at, more.at),
      most: taken(known.most, more.most), bands: known.bands.map((x, j) => taken(x, more.bands[j])) };
  }
  const alarms = [...line.alarms.filter((x) => !replaced.has(x.step)), ...told.alarms]
    .sort((x, y) => x.step - y.step);
  const next = { ...line, mark, notes, alarms, values: null, losses: null,
    steps: order.map((x) => x.step), nonfinite: taken(line.nonfinite, told.nonfinite) };
  decodedLines.set(next, arrays);
  return next;
}

/** Alarms by rule: the first of each, how often and until when. */
export function alarmsByRule(alarms) {
  const found = new Map();
  for (const alarm of alarms) {
    const known = found.get(alarm.rule);
    if (known === undefined) found.set(alarm.rule, { first: alarm, last: alarm.step, times: 1 });
    else Object.assign(known, { last: alarm.step, times: known.times + 1 });
  }
  return [...found.values()];
}

/** Alarms, by ascending steps, in groups whose first steps lie so many pixels apart or more. */
export function alarmGroups(alarms, x, apart) {
  const groups = [];
  for (const alarm of alarms) {
    const group = groups.at(-1);
    const near = group && (alarm.step === group.alarms[0].step || x(alarm.step) - group.x < apart);
    if (near) group.alarms.push(alarm);
    else groups.push({ x: x(alarm.step), alarms: [alarm] });
  }
  return groups;
}

/**
 * A map of numbers to 0 … 1, and the ticks of its axis. Logarithmic where the numbers span decades;
 * those that reach zero or below are even within a unit of it and logarithmic beyond.
 */
export function axisOfValues(values) {
  const finite = values.filter(Number.isFinite);
  let least = finite.reduce((x, y) => Math.min(x, y), Infinity);
  let most = finite.reduce((x, y) => Math.max(x, y), -Infinity);
  if (finite.length === 0) [least, most] = [0, 1];
  const sizes = finite.map(Math.abs).sort((x, y) => x - y);
  const middle = quantileOf(sizes, 0.5);
  const log = least > 0 ? most / least > LOGARITHMIC
    : middle > 0 && sizes.at(-1) / middle > LOGARITHMIC;
  if (!log && least > 0 && least < most / 2) least = 0;
  if (most === least) most = least + (Math.abs(least) || 1);
  const unit = log && least <= 0 ? 10 ** Math.floor(Math.log10(middle)) : null;
  const as = !log ? (x) => x : unit === null ? Math.log : (x) => Math.asinh(x / unit);
  const part = (x) => (as(x) - as(least)) / (as(most) - as(least));
  const ticks = !log ? evenTicks(least, most) : unit === null ? logTicks(least, most)
    : [...logTicks(unit, -least).reverse().map((x) => -x), 0, ...logTicks(unit, most)];
  return { part: (x) => Math.min(1, Math.max(0, part(x))), ticks, log };
}

export function evenTicks(least, most) {
  const rough = (most - least) / 4;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((x) => x * ten).find((x) => x >= rough) ?? 10 * ten;
  const first = Math.ceil(least / size);
  const count = Math.floor(most / size) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * size);
}

function logTicks(least, most) {
  if (!(most >= least)) return [];
  const first = Math.ceil(Math.log10(least));
  const count = Math.floor(Math.log10(most)) - first + 1;
  const each = Math.max(1, Math.ceil(count / 6));
  return Array.from({ length: Math.max(0, count) }, (_, i) => i)
    .filter((i) => i % each === 0).map((i) => 10 ** (first + i));
}
