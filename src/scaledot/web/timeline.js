/**
 * A training run over its steps: of one measure the band of all heads, the worst head and the
 * chosen one, alarms and loss; under it every head at one step, and the alarms in words.
 *
 * What the reader has in hand (the slider, the mark of an alarm) stays while the run goes on: the
 * view is built once and mended after.
 */

import { alarmSentences, runNumber, whyNode } from "./alarmwords.js";
import { rampOf, textColour, variancePart } from "./colour.js";
import { axisSize, newPicture, paletteOf, pictureSvg } from "./draw.js";
import { MEASURES } from "./state.js";
import { alarmGroups, axisOfValues, columnsOf, evenTicks, grownLine, lossesOf, nearestStep, placeOfStep, summedOf } from "./steps.js";
import { offerView } from "./views.js";
import { node } from "./words.js";

const CHART_HEIGHT = 260;
const LOSS_HEIGHT = 72;
const MARKS_HEIGHT = 36;
/** Pixels between the marks of alarms, and from one within which the pointer means it. */
const MARKS_APART = 9;
const NEAR_MARK = 24;
/** Half a slider's thumb: its middle reaches the ends of the axis. */
const THUMB = 8;
const NARROW_CHART = 600;
/** Heads a layer up to which cells hold their numbers and columns all their names. */
const NUMBERED_CELLS = 24;
/** Heads a layer from which cells are as narrow as a phone's. */
const NARROW_CELLS = 12;
/** What was built in a root. */
const builtViews = new WeakMap();

const number = (x) => x.toLocaleString("en");

/** The state within a time line: view, layer and head of it, the worst head's unless chosen. */
export function settledTimeline(state, raw, line) {
  const { name, low } = line.measures.find((x) => x.name === state.measure);
  const { at } = summedOf(line, name, low);
  const worst = columnsOf(line)[at.findLast((x) => x >= 0) ?? 0];
  const layer = Math.min(raw.layer ?? worst.layer, line.layers.length - 1);
  const own = raw.layer === null || raw.layer === worst.layer ? worst.head : 0;
  const head = Math.min(raw.head ?? own, line.layers[layer].heads - 1);
  return { ...state, view: "model", layer, head };
}

/** Why the file cannot be read any more; null where the error is another. */
export function lostWords({ told }, t) {
  const keys = { missing: "timeline.lost_missing", foreign: "timeline.lost_foreign",
    version: "timeline.lost_version", damaged: "timeline.lost_damaged",
    empty: "timeline.lost_empty" };
  return told && Object.hasOwn(keys, told.id) ? t(keys[told.id], { line: told.line }) : null;
}

/** Builds the view or mends it. @param {import("./app.js").Context} context */
export function renderTimeline(root, context, problem) {
  const line = context.document.timeline;
  const { state, t } = context;
  const { name, low } = line.measures.find((x) => x.name === state.measure);
  const built = builtViews.get(root) ?? builtIn(root);
  const width = Math.max(200, root.clientWidth || root.parentElement.clientWidth);
  const view = { context, line, name, width, summed: summedOf(line, name, low), built,
    place: placeOfStep(line.steps, state.step),
    column: columnsOf(line).findIndex((x) => x.layer === state.layer && x.head === state.head) };
  built.view = view;
  showTop(view, problem);
  showStep(view, view.place);
  built.band.replaceChildren(
    t(line.alarms.length ? "timeline.band_alarms" : "timeline.band"),
    built.chart.log ? `${context.language === "ja" ? "、" : " · "}${t("timeline.log")}` : "");
  showSlider(view);
  showMarks(view);
  showAlarms(view);
  context.onSave(() => ({ title: t(`timeline.${name}`), name: `scaledot-${name}`,
    picture: built.chart.picture }));
  return null;
}

/** The parts that stay, and what moves them. */
function builtIn(root) {
  const part = (className, tag = "div", attributes = {}) =>
    node(tag, { class: className, ...attributes });
  const built = { top: part("timeline-top"), picture: part("timeline-picture"),
    marks: part("timeline-marks", "div", { role: "toolbar" }), tip: part("timeline-tip"),
    band: part("note", "p"), readout: part("note timeline-readout", "p"),
    heads: part("timeline-heads", "section"), alarms: part("timeline-alarms", "section"),
    slider: node("input", { type: "range", min: 0, "data-focus": "timeline-step" }),
    sliderName: node("span"), mark: null };
  built.tip.hidden = true;
  built.step = node("label", { class: "timeline-step" }, built.sliderName, built.slider);
  const over = node("div", { class: "timeline-over" }, built.marks, built.tip);
  const chart = node("div", { class: "timeline-chart" }, built.picture, over);
  root.replaceChildren(built.top, chart, built.step, built.band, built.readout,
    node("div", { class: "timeline-below" }, built.heads, built.alarms));
  builtViews.set(root, built);
  built.slider.addEventListener("input", () => {
    const { context, line } = built.view;
    const at = Number(built.slider.value);
    built.slider.setAttribute("aria-valuetext", number(line.steps[at]));
    context.set({ step: line.steps[at] }, "drag");
    showStep(built.view, at);
  });
  built.picture.addEventListener("click", (event) => {
    const x = event.clientX - built.picture.getBoundingClientRect().left;
    const { context, line } = built.view;
    context.set({ step: nearestStep(line.steps, built.chart.stepAt(x)) }, "replace");
  });
  listenToMarks(built, over);
  return built;
}

function showTop({ built, context, line, name }, problem) {
  const { set, t } = context;
  const facts = t("timeline.facts", {
    layers: line.layers.length, width: [...new Set(line.layers.map((x) => x.d_k))].join("/"),
    first: number(line.steps[0]), last: number(line.steps.at(-1)), count: number(line.steps.length),
  });
  const bad = line.nonfinite.reduce((x, y) => x + y, 0);
  const warning = bad === 0 ? null : node("p", { class: "timeline-bad" }, t("timeline.bad", {
    n: number(bad), step: number(line.steps[line.nonfinite.findIndex((x) => x > 0)]),
  }));
  const notes = { torn: "timeline.note_torn", others: "timeline.note_others" };
  const buttons = MEASURES.map((x) => node("button", { type: "button", class: "statistic",
    "aria-pressed": String(x === name), "data-focus": `measure-${x}`,
    click: () => set({ measure: x }) }, t(`timeline.${x}`)));
  const options = MEASURES.map((x) =>
    node("option", { value: x, selected: x === name }, t(`timeline.${x}`)));
  built.top.replaceChildren(...[
    problem, problem && node("p", { class: "note" }, t("timeline.kept")),
    node("h1", {}, t("timeline.title")), node("p", { class: "note" }, facts), warning,
    ...line.notes.map(({ id, numbers }) => node("p", { class: "note" }, t(notes[id], numbers))),
    node("div", { class: "timeline-measures" },
      node("div", { class: "statistics", role: "group", "aria-label": t("timeline.measure") },
        buttons),
      node("select", { class: "statistic-menu", "aria-label": t("timeline.measure"),
        "data-focus": "measure-menu", change: (event) => set({ measure: event.target.value }) },
      options)),
  ].filter(Boolean));
}

/** What depends on the step, drawn anew while the slider moves. */
function showStep(view, place) {
  const { built, context, line, name, width } = view;
  const { t } = context;
  const now = { ...view, place };
  built.chart = chartPicture(now, width, paletteOf(document.documentElement));
  const label = t("timeline.chart", { measure: t(`timeline.${name}`), first: number(line.steps[0]),
    last: number(line.steps.at(-1)) });
  built.picture.replaceChildren(pictureSvg(built.chart.picture, label));
  built.readout.replaceChildren(lineReadout(now));
  built.heads.replaceChildren(node("h2", {}, t("timeline.grid", { step: number(line.steps[place]) })),
    gridOf(now));
}

function showSlider({ built, context, line, place }) {
  const { slider, sliderName, chart } = built;
  sliderName.textContent = context.t("timeline.slider");
  slider.max = line.steps.length - 1;
  slider.value = place;
  slider.setAttribute("aria-valuetext", number(line.steps[place]));
  built.step.style.setProperty("--left", `${chart.left - THUMB}px`);
  built.step.style.setProperty("--right", `${chart.right - THUMB}px`);
}

function headWord(line, column) {
  const found = columnsOf(line)[column];
  return found === undefined ? "–" : `${found.layer}.${found.head}`;
}

function lineReadout({ context, line, name, summed, place, column }) {
  const { t } = context;
  const heads = columnsOf(line).length;
  const loss = lossesOf(line)[place];
  const at = { measure: t(`timeline.${name}`), step: number(line.steps[place]) };
  const words = summed.at[place] < 0 ? t("timeline.now_none", at) : t("timeline.now", { ...at,
    worst: runNumber(summed.worst[place], 4), at: headWord(line, summed.at[place]),
    median: runNumber(summed.bands[2][place], 4), head: headWord(line, column),
    value: runNumber(summed.data[place * heads + column], 4),
  });
  return Number.isNaN(loss) ? words
    : `${words} · ${t("timeline.now_loss", { x: runNumber(loss, 4) })}`;
}

// --------------------------------------------------------------------------- the chart

function chartPicture(view, width, palette) {
  const { context, line, summed, place, column } = view;
  const { t } = context;
  const size = axisSize();
  const losses = lossesOf(line);
  const lossThere = losses.some(Number.isFinite);
  const [left, right] = [size > 11 ? 68 : 56, width < NARROW_CHART ? 12 : 11 * size];
  const top = line.alarms.length ? MARKS_HEIGHT : 12;
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
  const said = [];
  // Zero first: powers of ten on both sides of it may lie too near to be read.
  for (const tick of [...axis.ticks].sort((a, b) => Math.abs(a) - Math.abs(b))) {
    if (said.some((at) => Math.abs(at - y(tick)) < size + 4)) continue;
    said.push(y(tick));
    picture.path([[left, y(tick)], [width - right, y(tick)]], palette.rule);
    picture.text(left - 8, y(tick) + 4, runNumber(tick, axis.log ? 1 : 2), { size,
      anchor: "end", fill: palette.ink3 });
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
    if (measure !== view.name || typeof value !== "number") continue;
    picture.dot(x(step), y(value), 2.5, palette.warn);
  }
  const groups = alarmGroups(line.alarms, x, MARKS_APART);
  for (const { x: at } of groups) {
    picture.path([[at - 4, top - 12], [at + 4, top - 12], [at, top - 5], [at - 4, top - 12]],
      palette.warn, 1, [], palette.warn);
  }
  picture.path([[x(line.steps[place]), top], [x(line.steps[place]), top + height - 28]],
    palette.row, 1, [2, 3]);
  if (!Number.isNaN(own[place])) {
    picture.dot(x(line.steps[place]), y(own[place]), 3.5, palette.row);
  }
  if (right > 60) endLabels(view, picture, palette, { size, width, right, y, own, t });
  if (lossThere) lossPart(picture, line, losses, { x, bottom, left, size, palette, t });
  for (const tick of evenTicks(first, Math.max(last, first + 1)).filter((n) => n % 1 === 0)) {
    picture.text(x(tick), top + height - 8, number(tick), { size, anchor: "middle",
      fill: palette.ink3 });
  }
  return { picture, log: axis.log, groups, left, right,
    stepAt: (at) => first + ((at - left) / room) * (last - first) };
}

/** The lines' names at their right ends, apart from each other; the chosen head may be the worst. */
function endLabels({ line, summed, column }, picture, palette, { size, width, right, y, own, t }) {
  const worst = summed.at.at(-1);
  const labels = [
    [y(summed.worst.at(-1)), t("timeline.worst", { head: headWord(line, worst) }),
      worst === column ? palette.row : palette.ink],
    [y(summed.bands[2].at(-1)), t("timeline.median"), palette.ink3],
    worst === column ? [NaN]
      : [y(own.at(-1)), t("timeline.chosen", { head: headWord(line, column) }), palette.row],
  ].filter(([at]) => Number.isFinite(at)).sort((a, b) => a[0] - b[0]);
  let before = -Infinity;
  for (const [at, words, fill] of labels) {
    before = Math.max(at + 4, before + size + 4);
    picture.text(width - right + 8, before, words, { size, fill });
  }
}

/** The loss over the same steps, its ends beside it. */
function lossPart(picture, line, losses, { x, bottom, left, size, palette, t }) {
  const finite = losses.filter(Number.isFinite);
  const [least, most] = [finite.reduce((a, b) => Math.min(a, b)),
    finite.reduce((a, b) => Math.max(a, b))];
  const part = (v) => (most > least ? (v - least) / (most - least) : 0.5);
  const room = LOSS_HEIGHT - 28;
  const y = (v) => bottom + 20 + room * (1 - part(v));
  const points = losses.map((v, i) => [x(line.steps[i]), v]).filter(([, v]) => Number.isFinite(v))
    .map(([at, v]) => [at, y(v)]);
  picture.path(points, palette.seq, 1.5);
  const say = (at, words, fill) => picture.text(left - 8, at + 4, words, { size, anchor: "end",
    fill });
  say(bottom + 20 + room / 2, t("timeline.loss"), palette.seq);
  if (most > least) for (const v of [least, most]) say(y(v), runNumber(v, 3), palette.ink3);
}

// --------------------------------------------------------------------------- marks of alarms

/** One tab stop: arrows go from alarm to alarm, focus or a pointer nearby shows what it says. */
function showMarks({ built, context }) {
  const { chart, marks } = built;
  const groups = chart.groups;
  marks.setAttribute("aria-label", context.t("timeline.marks"));
  marks.hidden = groups.length === 0;
  const last = groups.findLastIndex((x) => x.alarms[0].step <= (built.mark ?? -Infinity));
  const current = built.mark === null ? groups.length - 1 : Math.max(0, last);
  marks.replaceChildren(...groups.map(({ x, alarms }, i) => {
    const said = tipSentences(context, alarms)
      .map((s) => [s.words, ...s.more, s.why].filter(Boolean).join(" · "));
    const button = node("button", { type: "button", "aria-label": said.join(" "),
      tabindex: i === current ? "0" : "-1", "data-focus": i === current ? "timeline-mark" : null,
      focus: () => showTip(built, i), click: () => chooseAlarm(context, alarms[0]) });
    button.style.left = `${x}px`;
    return button;
  }));
  if (!built.tip.hidden) showTip(built, current);
}

function listenToMarks(built, over) {
  const { marks, tip } = built;
  const left = () => {
    if (!over.matches(":hover") && !marks.contains(document.activeElement)) tip.hidden = true;
  };
  const nearest = (event) => {
    const at = event.clientX - marks.getBoundingClientRect().left;
    const far = built.chart.groups.map((x) => Math.abs(x.x - at));
    const best = far.indexOf(Math.min(...far));
    return far[best] <= NEAR_MARK ? best : -1;
  };
  marks.addEventListener("pointermove", (event) => {
    const at = nearest(event);
    if (at >= 0 && event.pointerType === "mouse") showTip(built, at);
  });
  over.addEventListener("pointerleave", left);
  marks.addEventListener("focusout", () => setTimeout(left));
  // The buttons are narrower than a finger: the strip is touched, the nearest of them is meant.
  marks.addEventListener("click", (event) => {
    const at = event.target === marks ? nearest(event) : -1;
    if (at < 0) return;
    // With the focus it says what it says until something else is touched.
    marks.children[at].focus({ preventScroll: true });
    chooseAlarm(built.view.context, built.chart.groups[at].alarms[0]);
  });
  marks.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !tip.hidden) {
      tip.hidden = true;
      event.preventDefault();
    }
    const all = [...marks.children];
    const at = all.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    all[Math.min(all.length - 1, Math.max(0, to))].focus();
  });
}

function chooseAlarm(context, { step, layer, head }) {
  context.set({ step, layer, head });
}

/** Sentences of a mark, with the reasons where one rule alone was broken: several hide the picture. */
function tipSentences(context, alarms) {
  const said = alarmSentences(context, alarms);
  return said.length === 1 ? said : said.map((x) => ({ ...x, why: null }));
}

/** What a group of alarms says, beneath its mark. */
function showTip(built, at) {
  const { chart, marks, tip, view } = built;
  const group = chart.groups[at];
  built.mark = group.alarms[0].step;
  [...marks.children].forEach((x, i) => {
    x.tabIndex = i === at ? 0 : -1;
    if (i === at) x.dataset.focus = "timeline-mark";
    else delete x.dataset.focus;
  });
  tip.hidden = false;
  tip.replaceChildren(...tipSentences(view.context, group.alarms).map((x) => node("div", {},
    node("p", {}, x.words), x.more.length ? node("p", { class: "note" }, x.more.join(" · ")) : null,
    x.why === null ? null : whyNode(x))));
  const most = view.width - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(most, group.x - 24))}px`;
}

// --------------------------------------------------------------------------- heads at a step

/** A cell's figure; of a power of ten its size alone where there is no room for more. */
function cellFigure(value, narrow) {
  const words = runNumber(value, 2);
  return narrow && words.includes("×") ? runNumber(value, 1).replace(/\d×/, "") : words;
}

function gridOf(view) {
  const { context, line, name, summed, place, column, width } = view;
  const { t, set, state } = context;
  const columns = columnsOf(line);
  const most = Math.max(...line.layers.map((x) => x.heads));
  // One range for all steps: colours do not change their meaning while the slider moves.
  const range = summed.most.reduce((x, y) => Math.max(x, y), 0) || 1;
  const colour = (value) => (name === "score_var_within"
    ? rampOf("signed", context.theme).hex[Math.round(128 * (1 + variancePart(value)))]
    : rampOf("weights", context.theme).hex[Math.max(0, Math.min(256,
      Math.round((256 * value) / range)))]);
  const narrow = width < NARROW_CHART || most > NARROW_CELLS;
  const grid = node("div", { class: "timeline-grid", role: "grid", "aria-label":
    t("timeline.grid_label", { measure: t(`timeline.${name}`), step: line.steps[place] }) });
  const row = (attributes, ...cells) => {
    const made = node("div", { class: "timeline-row", ...attributes }, ...cells);
    made.style.gridTemplateColumns = `28px repeat(${most}, minmax(0, 72px))`;
    grid.append(made);
  };
  // Each cell says its head itself.
  row({ "aria-hidden": "true" }, node("div"), Array.from({ length: most }, (_, h) =>
    node("div", { class: "timeline-head" }, most <= NUMBERED_CELLS || h % 4 === 0 ? h : "")));
  line.layers.forEach((layer, l) => {
    const first = columns.findIndex((x) => x.layer === l);
    const cells = Array.from({ length: layer.heads }, (_, h) => {
      const i = first + h;
      const value = summed.data[place * columns.length + i];
      const words = Number.isNaN(value) ? "–" : cellFigure(value, narrow);
      // The name holds the figure as it is seen; pointing adds digits.
      const say = (digits) => t("timeline.cell", { layer: l, head: h,
        value: Number.isNaN(value) ? t("timeline.no_rows") : runNumber(value, digits) });
      const picked = i === column;
      const cell = node("div", { class: picked ? "timeline-cell picked" : "timeline-cell",
        role: "gridcell", title: say(6), "aria-label": say(2), "aria-selected": String(picked),
        tabindex: picked ? "0" : "-1", "data-focus": picked ? "timeline-cell" : null,
        "data-value": value, click: () => set({ layer: l, head: h }) },
      most > NUMBERED_CELLS ? "" : words);
      if (!Number.isNaN(value)) {
        cell.style.backgroundColor = colour(value);
        cell.style.color = textColour(colour(value));
      }
      return cell;
    });
    row({ role: "row" }, node("div", { class: "grid-layer", role: "rowheader" }, l), cells);
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
      value: runNumber(summed.data[place * columns.length + i], 3) }));
  });
  return grid;
}

function showAlarms({ built, context, line }) {
  const { t, set } = context;
  const items = alarmSentences(context, line.alarms).map((x) => node("li", {},
    node("button", { type: "button", class: "link", "data-focus": `alarm-${x.first.rule}`,
      click: () => chooseAlarm({ set }, x.first) }, x.words),
    x.more.length ? node("p", { class: "note" }, x.more.join(" · ")) : null, whyNode(x)));
  built.alarms.replaceChildren(node("h2", {}, t("timeline.alarms")),
    items.length ? node("ul", {}, items) : node("p", { class: "note" }, t("timeline.no_alarms")));
}

offerView("timeline", { settled: settledTimeline, render: renderTimeline, grown: grownLine,
  lost: lostWords });
