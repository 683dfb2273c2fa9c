/**
 * A training run over its steps: of one measure the band of all heads, the worst head and the
 * chosen one, alarms and loss; under it every head at one step.
 */

import { rampOf, textColour, variancePart } from "./colour.js";
import { decodeArray } from "./data.js";
import { axisSize, newPicture, paletteOf, pictureSvg } from "./draw.js";
import { MEASURES } from "./state.js";
import { offerView } from "./views.js";
import { node, significant } from "./words.js";

const QUANTILES = [0.05, 0.25, 0.5, 0.75, 0.95];
const CHART_HEIGHT = 260;
const LOSS_HEIGHT = 72;
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
 * Of each step the quantiles of the heads and the worst head.
 *
 * @param {Float32Array} data  (steps, heads)
 * @returns {{bands: number[][], worst: number[], at: number[]}}  bands by quantile; at: the column,
 *     −1 where no head has a number
 */
export function stepsSummed(data, heads, low) {
  const steps = data.length / heads;
  const found = { bands: QUANTILES.map(() => []), worst: [], at: [] };
  for (let i = 0; i < steps; i++) {
    const row = data.subarray(i * heads, (i + 1) * heads);
    const sorted = [...row].filter((x) => !Number.isNaN(x)).sort((x, y) => x - y);
    QUANTILES.forEach((part, j) => found.bands[j].push(quantileOf(sorted, part)));
    const worst = low ? sorted[0] : sorted.at(-1);
    found.worst.push(worst ?? NaN);
    found.at.push(worst === undefined ? -1 : row.indexOf(worst));
  }
  return found;
}

/** The place of the step looked at last before or at this one; the last for null. */
export function placeOfStep(steps, step) {
  if (step === null) return steps.length - 1;
  return Math.max(0, steps.findLastIndex((x) => x <= step));
}

/** The state within a time line: view, layer and head of it, the worst head's unless chosen. */
export function settledTimeline(state, raw, line) {
  const { name, low } = line.measures.find((x) => x.name === state.measure);
  const { at } = summedOf(line, name, low);
  const worst = columnsOf(line)[Math.max(0, at.at(-1))];
  const layer = Math.min(raw.layer ?? worst.layer, line.layers.length - 1);
  const own = raw.layer === null || raw.layer === worst.layer ? worst.head : 0;
  const head = Math.min(raw.head ?? own, line.layers[layer].heads - 1);
  return { ...state, view: "model", layer, head };
}

/** {layer, head} of each column of the values. */
export function columnsOf(line) {
  return line.layers.flatMap((x, layer) =>
    Array.from({ length: x.heads }, (_, head) => ({ layer, head })));
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

function summedOf(line, name, low) {
  const known = decodedLines.get(line) ?? {};
  decodedLines.set(line, known);
  if (known[name] === undefined) {
    const { data } = decodeArray(line.values[name]);
    known[name] = { data, ...stepsSummed(data, columnsOf(line).length, low) };
  }
  return known[name];
}

/** A map of numbers to 0 … 1, and the ticks of its axis. */
export function axisOfValues(values) {
  const finite = values.filter(Number.isFinite);
  let least = finite.reduce((x, y) => Math.min(x, y), Infinity);
  let most = finite.reduce((x, y) => Math.max(x, y), -Infinity);
  if (finite.length === 0) [least, most] = [0, 1];
  const log = least > 0 && most / least > LOGARITHMIC;
  if (!log && least > 0 && least < most / 2) least = 0;
  if (most === least) most = least + (Math.abs(least) || 1);
  const as = log ? Math.log : (x) => x;
  const part = (x) => (as(x) - as(least)) / (as(most) - as(least));
  const ticks = log ? logTicks(least, most) : evenTicks(least, most);
  return { part: (x) => Math.min(1, Math.max(0, part(x))), ticks, log };
}

function evenTicks(least, most) {
  const rough = (most - least) / 4;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((x) => x * ten).find((x) => x >= rough) ?? 10 * ten;
  const first = Math.ceil(least / size);
  const count = Math.floor(most / size) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * size);
}

function logTicks(least, most) {
  const first = Math.ceil(Math.log10(least));
  const count = Math.floor(Math.log10(most)) - first + 1;
  const each = Math.max(1, Math.ceil(count / 6));
  return Array.from({ length: Math.max(0, count) }, (_, i) => i)
    .filter((i) => i % each === 0).map((i) => 10 ** (first + i));
}

/** Builds the view. @param {import("./app.js").Context} context */
export function renderTimeline(root, context, problem) {
  const line = context.document.timeline;
  const { state, t } = context;
  const { name, low } = line.measures.find((x) => x.name === state.measure);
  const summed = summedOf(line, name, low);
  const place = placeOfStep(line.steps, state.step);
  const view = { context, line, name, low, summed, place,
    column: columnsOf(line).findIndex((x) => x.layer === state.layer && x.head === state.head) };
  const width = Math.max(200, root.clientWidth || root.parentElement.clientWidth);
  const number = (x) => x.toLocaleString("en");
  const facts = t("timeline.facts", {
    layers: line.layers.length, width: [...new Set(line.layers.map((x) => x.d_k))].join("/"),
    first: number(line.steps[0]), last: number(line.steps.at(-1)), count: number(line.steps.length),
  });
  const bad = line.nonfinite.reduce((x, y) => x + y, 0);
  const warning = bad === 0 ? null : node("p", { class: "timeline-bad" }, t("timeline.bad", {
    n: number(bad), step: number(line.steps[line.nonfinite.findIndex((x) => x > 0)]),
  }));
  const figure = node("div", { class: "timeline-chart" });
  const heads = node("div", { class: "timeline-heads" });
  const label = t("timeline.chart", { measure: t(`timeline.${name}`), first: number(line.steps[0]),
    last: number(line.steps.at(-1)) });
  let chart = null;
  // The slider stays while it moves; what depends on the step is drawn anew.
  const draw = (at) => {
    const now = { ...view, place: at };
    chart = chartPicture(now, width, paletteOf(document.documentElement));
    figure.replaceChildren(pictureSvg(chart.picture, label));
    heads.replaceChildren(node("p", { class: "note timeline-readout" }, lineReadout(now)),
      node("h2", {}, t("timeline.grid", { step: number(line.steps[at]) })), gridOf(now));
  };
  draw(place);
  figure.addEventListener("click", (event) => {
    const x = event.clientX - figure.getBoundingClientRect().left;
    context.set({ step: nearestStep(line.steps, chart.stepAt(x)) }, "replace");
  });
  root.replaceChildren(...[
    problem, problem && node("p", { class: "note" }, t("timeline.kept")),
    node("h1", {}, t("timeline.title")), node("p", { class: "note" }, facts), warning,
    ...line.notes.map((x) => node("p", { class: "note", lang: "en" }, x)), measuresOf(view), figure,
    node("p", { class: "note" }, t("timeline.band"), chart.log ? ` · ${t("timeline.log")}` : ""),
    sliderOf(view, draw), heads, alarmsOf(view),
  ].filter(Boolean));
  context.onSave(() => ({ title: t(`timeline.${name}`), name: `scaledot-${name}`,
    picture: chart.picture }));
  return null;
}

function nearestStep(steps, wanted) {
  return steps.reduce((x, y) => (Math.abs(y - wanted) < Math.abs(x - wanted) ? y : x));
}

function measuresOf({ context, name }) {
  const { t, set } = context;
  return node("div", { class: "segments timeline-measures", role: "group",
    "aria-label": t("timeline.measure") },
  MEASURES.map((x) => node("button", { type: "button", "aria-pressed": String(x === name),
    "data-focus": `measure-${x}`, click: () => set({ measure: x }) }, t(`timeline.${x}`))));
}

function sliderOf({ context, line, place }, draw) {
  const { t, set } = context;
  return node("label", { class: "timeline-step" }, t("timeline.slider"), node("input", {
    type: "range", min: 0, max: line.steps.length - 1, value: place, "data-focus": "timeline-step",
    "aria-valuetext": String(line.steps[place]),
    input: (event) => {
      const at = Number(event.target.value);
      event.target.setAttribute("aria-valuetext", String(line.steps[at]));
      set({ step: line.steps[at] }, "drag");
      draw(at);
    },
  }));
}

function headWord(line, column) {
  const found = columnsOf(line)[column];
  return found === undefined ? "–" : `${found.layer}.${found.head}`;
}

function lineReadout({ context, line, name, summed, place, column }) {
  const { t } = context;
  const heads = columnsOf(line).length;
  return t("timeline.now", {
    measure: t(`timeline.${name}`), step: line.steps[place].toLocaleString("en"),
    worst: significant(summed.worst[place], 4), at: headWord(line, summed.at[place]),
    median: significant(summed.bands[2][place], 4), head: headWord(line, column),
    value: significant(summed.data[place * heads + column], 4),
  });
}

function chartPicture(view, width, palette) {
  const { context, line, summed, place, column } = view;
  const { t } = context;
  const size = axisSize();
  const losses = [...decodeArray(line.losses).data];
  const lossThere = losses.some(Number.isFinite);
  const [left, right, top] = [56, width < 600 ? 12 : 120, 28];
  const height = CHART_HEIGHT + (lossThere ? LOSS_HEIGHT : 0) + 28;
  const picture = newPicture(width, top + height);
  const heads = columnsOf(line).length;
  const own = line.steps.map((_, i) => summed.data[i * heads + column]);
  const axis = axisOfValues([...summed.bands.flat(), ...summed.worst, ...own]);
  const [first, last] = [line.steps[0], line.steps.at(-1)];
  const room = width - left - right;
  const x = (step) => left + (room * (step - first)) / Math.max(1, last - first);
  const y = (value) => top + CHART_HEIGHT * (1 - axis.part(value));
  const bottom = top + CHART_HEIGHT;
  for (const tick of axis.ticks) {
    picture.path([[left, y(tick)], [width - right, y(tick)]], palette.rule);
    picture.text(left - 8, y(tick) + 4, significant(tick, 2), { size, anchor: "end",
      fill: palette.ink3 });
  }
  const points = (values) => values.map((v, i) => [x(line.steps[i]), v])
    .filter(([, v]) => !Number.isNaN(v)).map(([at, v]) => [at, y(v)]);
  const band = (low, high) => {
    const shape = [...points(summed.bands[high]), ...points(summed.bands[low]).reverse()];
    if (shape.length > 2) picture.path([...shape, shape[0]], palette.rule2, 0.5, [], palette.rule);
  };
  band(0, 4);
  band(1, 3);
  picture.path(points(summed.bands[2]), palette.ink3, 1, [4, 3]);
  picture.path(points(summed.worst), palette.ink, 1.5);
  picture.path(points(own), palette.row, 2);
  for (const { step, value, measure } of line.alarms) {
    const at = x(step);
    picture.path([[at - 4, top - 12], [at + 4, top - 12], [at, top - 5], [at - 4, top - 12]],
      palette.warn, 1, [], palette.warn);
    if (measure !== view.name || typeof value !== "number") continue;
    picture.dot(at, y(value), 2.5, palette.warn);
  }
  picture.path([[x(line.steps[place]), top], [x(line.steps[place]), top + height - 28]],
    palette.row, 1, [2, 3]);
  picture.dot(x(line.steps[place]), y(own[place] ?? NaN), 3.5, palette.row);
  if (right > 60) endLabels(view, picture, palette, { size, width, right, y, own, t });
  if (lossThere) lossPart(picture, line, losses, { x, bottom, left, size, palette, t });
  for (const tick of evenTicks(first, Math.max(last, first + 1)).filter((n) => n % 1 === 0)) {
    picture.text(x(tick), top + height - 8, tick.toLocaleString("en"), { size, anchor: "middle",
      fill: palette.ink3 });
  }
  return { picture, log: axis.log, stepAt: (at) => first + ((at - left) / room) * (last - first) };
}

/** The lines' names at their right ends, apart from each other. */
function endLabels({ line, summed, column }, picture, palette, { size, width, right, y, own, t }) {
  const labels = [
    [y(summed.worst.at(-1)), t("timeline.worst", { head: headWord(line, summed.at.at(-1)) }),
      palette.ink],
    [y(summed.bands[2].at(-1)), t("timeline.median"), palette.ink3],
    [y(own.at(-1)), t("timeline.chosen", { head: headWord(line, column) }), palette.row],
  ].filter(([at]) => Number.isFinite(at)).sort((a, b) => a[0] - b[0]);
  let before = -Infinity;
  for (const [at, words, fill] of labels) {
    before = Math.max(at + 4, before + size + 4);
    picture.text(width - right + 8, before, words, { size, fill });
  }
}

function lossPart(picture, line, losses, { x, bottom, left, size, palette, t }) {
  const axis = axisOfValues(losses);
  const y = (v) => bottom + 16 + (LOSS_HEIGHT - 24) * (1 - axis.part(v));
  const points = losses.map((v, i) => [x(line.steps[i]), v]).filter(([, v]) => Number.isFinite(v))
    .map(([at, v]) => [at, y(v)]);
  picture.path(points, palette.seq, 1.5);
  picture.text(left - 8, bottom + 16 + LOSS_HEIGHT / 2 - 8, t("timeline.loss"), { size,
    anchor: "end", fill: palette.ink2 });
}

// --------------------------------------------------------------------------- heads at a step

function gridOf(view) {
  const { context, line, name, summed, place, column } = view;
  const { t, set, state } = context;
  const columns = columnsOf(line);
  const most = Math.max(...line.layers.map((x) => x.heads));
  const finite = [...summed.data].filter(Number.isFinite);
  // One range for all steps: colours do not change their meaning while the slider moves.
  const range = finite.reduce((x, y) => Math.max(x, y), 0) || 1;
  const colour = (value) => (name === "score_var_within"
    ? rampOf("signed", context.theme).hex[Math.round(128 * (1 + variancePart(value)))]
    : rampOf("weights", context.theme).hex[Math.max(0, Math.min(256,
      Math.round((256 * value) / range)))]);
  const grid = node("div", { class: "timeline-grid", role: "grid", "aria-label":
    t("timeline.grid_label", { measure: t(`timeline.${name}`), step: line.steps[place] }) });
  line.layers.forEach((layer, l) => {
    const row = node("div", { class: "timeline-row", role: "row" },
      node("div", { class: "grid-layer", role: "rowheader" }, l));
    row.style.gridTemplateColumns = `28px repeat(${most}, minmax(0, 1fr))`;
    for (let h = 0; h < layer.heads; h++) {
      const i = columns.findIndex((x) => x.layer === l && x.head === h);
      const value = summed.data[place * columns.length + i];
      const words = Number.isNaN(value) ? "–" : significant(value, 2);
      const label = t("timeline.cell", { layer: l, head: h,
        value: Number.isNaN(value) ? t("timeline.no_rows") : significant(value, 6) });
      const picked = i === column;
      const cell = node("div", { class: picked ? "timeline-cell picked" : "timeline-cell",
        role: "gridcell", title: label, "aria-label": label, "aria-selected": String(picked),
        tabindex: picked ? "0" : "-1", "data-focus": picked ? "timeline-cell" : null,
        "data-value": value, click: () => set({ layer: l, head: h }) }, most > 24 ? "" : words);
      if (!Number.isNaN(value)) {
        cell.style.backgroundColor = colour(value);
        cell.style.color = textColour(colour(value));
      }
      row.append(cell);
    }
    grid.append(row);
  });
  grid.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const layer = Math.min(line.layers.length - 1, Math.max(0, state.layer + down));
    const head = Math.min(line.layers[layer].heads - 1, Math.max(0, state.head + right));
    set({ layer, head }, "replace");
    const i = columns.findIndex((x) => x.layer === layer && x.head === head);
    context.announce(t("timeline.cell", { layer, head,
      value: significant(summed.data[place * columns.length + i], 3) }));
  });
  return grid;
}

function alarmsOf({ context, line }) {
  const { t, set } = context;
  const items = alarmsByRule(line.alarms).map(({ first, last, times }) => {
    const { step, rule, value, layer, head, path, also, why } = first;
    const shown = typeof value === "number" ? significant(value, 3) : value;
    const words = t("timeline.alarm", { step, rule, value: shown, head: `${layer}.${head}`, path });
    const more = [also > 0 ? t("timeline.also", { n: also }) : null,
      times > 1 ? t("timeline.times", { first: step, last, n: times }) : null].filter(Boolean);
    return node("li", {}, node("button", { type: "button", class: "link",
      "data-focus": `alarm-${rule}`, click: () => set({ step, layer, head }) }, words),
    more.length ? node("span", { class: "note" }, ` · ${more.join(" · ")}`) : null,
    node("p", { class: "note", lang: "en" }, why));
  });
  return node("section", { class: "timeline-alarms" }, node("h2", {}, t("timeline.alarms")),
    items.length ? node("ul", {}, items) : node("p", { class: "note" }, t("timeline.no_alarms")));
}

offerView("timeline", { settled: settledTimeline, render: renderTimeline });
