// @ts-check
/**
 * The five stages side by side: for each its formula with real numbers, its matrix, the value of
 * the chosen cell, and the histogram that stands on the matrix' own colours.
 */

import { rampOf, signedColour, weightColour } from "./colour.js";
import { drawHistogram, newPicture, paintPicture, pictureSvg } from "./draw.js";
import { columnRoom, mathNode, mathRun, scaleTerm, scaleWords, shortNumber, sixDigits, steppersPart } from "./layout.js";
import { makeMatrix } from "./matrix.js";
import { STAGES } from "./state.js";
import { operatorPicture } from "./walk.js";
import { fixed, node, significant, weightDigits } from "./words.js";

const SPREAD_BINS = 25;

/** @param {any} shared @param {any} measures @param {any} listeners */
export function stagesPart(shared, measures, listeners) {
  const { context, study, layer, palette, labels, long } = shared;
  const { t, state } = context;
  const stageList = study.dv ? STAGES : STAGES.slice(0, 4);
  const looks = /** @type {any} */ (stageLooks(shared, state));
  const phone = measures.kind === "phone";
  const one = stageList.includes(state.stage) ? state.stage : "weights";
  const shownStages = phone ? [one] : stageList;
  /** @type {Record<string, any>} */
  const panels = {};
  for (const stage of shownStages) {
    panels[stage] = {
      matrix: makeMatrix({
        name: `matrix-${stage}`, keyless: stage === "output",
        label: t("head.matrix", { stage: looks[stage].name, rows: study.n,
          columns: stage === "output" ? study.dv : study.keys }),
        description: t("head.matrix_role"), ...listeners,
      }),
      readout: node("p", { class: "readout" }),
      spread: node("canvas", { class: "spread", role: "img" }),
      moments: node("p", { class: "moments" }),
    };
  }
  const element = node("section", { class: `stages ${measures.kind}`,
    "aria-label": t("head.stages") });
  if (phone) element.append(stageSwitch(context, stageList, looks, one));
  const row = node("div", { class: "stage-row" });
  element.append(row);
  let columnHigh = 0;
  shownStages.forEach((stage, index) => {
    const look = looks[stage];
    const english = context.language === "ja"
      ? node("span", { class: "english", lang: "en" }, stage) : null;
    const labelled = isLabelled(index, measures);
    const panel = node("div", { class: "stage-panel", "data-stage": stage },
      phone ? null : node("h2", {}, look.name, english ? " " : null, english),
      node("p", { class: "stage-formula" }, mathNode(...look.formula)),
      node("p", { class: "stage-shape" }, ...[look.shape].flat()),
      panels[stage].matrix.element, panels[stage].readout, panels[stage].spread,
      panels[stage].moments);
    panel.style.width = `${measures.panel + (labelled ? measures.label : 0)}px`;
    if (labelled) panel.style.setProperty("--label", `${measures.label}px`);
    row.append(panel);
    panels[stage].panel = panel;
    panels[stage].labelled = labelled;
    if (!phone && index + 1 < shownStages.length && !(measures.kind === "tablet" && index === 2)) {
      const operator = node("div", { class: "operator", "aria-hidden": "true" });
      operator.style.width = `${measures.gutter}px`;
      row.append(operator);
      panels[stage].operator = operator;
    }
  });
  element.append(steppersPart(context, listeners.onStep), togglesPart(context),
    countsPart(shared));

  /** @param {any} tile the rows and keys shown */
  function draw(tile) {
    const block = study.whole ?? study.block(tile.q, tile.q + tile.rows);
    const first = study.whole ? 0 : tile.q;
    const rowNames = labels.slice(tile.q, tile.q + tile.rows);
    const keyNames = labels.slice(tile.k, tile.k + tile.columns);
    const { size, cell, high, label } = measures;
    columnHigh = Math.ceil(columnRoom(keyNames, size, cell)) + 8;
    const shift = state.centre ? visibleMeans(block, study.keys) : null;
    for (const stage of shownStages) {
      const { matrix, spread, moments, labelled } = panels[stage];
      const look = looks[stage];
      const output = stage === "output";
      const columns = output ? study.dv : tile.columns;
      const left = labelled ? label : 0;
      const wide = output ? measures.panel / columns : cell;
      const values = block[stage];
      const across = output ? study.dv : study.keys;
      const from = output ? 0 : tile.k;
      const centred = shift && ["scores", "scaled", "masked"].includes(stage);
      const perScale = stage === "scores" ? 1 : layer.scale;
      const value = (/** @type {number} */ i, /** @type {number} */ j) => {
        const at = tile.q - first + i;
        const x = values[at * across + from + j];
        return centred ? x - shift[at] * perScale : x;
      };
      const hides = stage === "masked" || stage === "weights";
      const hidden = hides ? (/** @type {number} */ i, /** @type {number} */ j) =>
        !block.seen[(tile.q - first + i) * study.keys + tile.k + j] : null;
      const grid = { x: left, y: columnHigh, cell: wide, high, rows: tile.rows, columns };
      matrix.draw({
        width: left + measures.panel + 2, height: columnHigh + tile.rows * high + 3, grid, value,
        colour: look.colour, hidden, palette, size, firstRow: tile.q, firstKey: tile.k,
        rowLabels: labelled ? rowNames : null, columnLabels: output ? null : keyNames,
        labelRoom: label - 8, columnRoom: columnHigh - 8,
        extra: (/** @type {any} */ p) => {
          if (output) drawDimensions(p, grid, study.dv, context.t, measures, palette);
          else if (labelled) drawCorner(p, grid, label, context.t, measures, palette);
        },
      });
      drawSpread(shared, stage, look, measures, spread, moments, left);
    }
    const texts = operatorWords(shared);
    shownStages.forEach((stage, index) => {
      const { operator, matrix } = panels[stage];
      if (!operator) return;
      const picture = operatorPicture(texts[index], measures.gutter, measures.size, palette);
      panels[stage].operatorPicture = picture;
      operator.replaceChildren(pictureSvg(picture));
      // Level with the middle of the matrix, whatever stands above it.
      requestAnimationFrame(() => {
        const above = matrix.element.getBoundingClientRect().top
          - operator.getBoundingClientRect().top;
        operator.style.paddingTop = `${above + columnHigh
          + (tile.rows * high - picture.height) / 2}px`;
      });
    });
  }

  return {
    element, draw, panels,
    /** @param {{q: number, k: number}} cell @param {number|null} column of the output
     *  @param {boolean} pointed  adds digits */
    show(cell, column, pointed) {
      for (const stage of shownStages) {
        panels[stage].matrix.cross(cell);
        const path = phone ? `${shared.quoted(cell.q)} → ${shared.quoted(cell.k)}　` : "";
        panels[stage].readout.replaceChildren(path, ...readoutOf(shared, stage, cell, column, pointed));
        const value = stageValue(shared, stage, cell, column);
        panels[stage].readout.dataset.value = String(value);
        panels[stage].readout.title = Number.isFinite(value) ? sixDigits(value) : "";
      }
    },
    /** @param {string} stage */
    picture(stage) {
      return stagePicture(shared, looks[stage], panels[stage], measures);
    },
  };
}

/** What each stage is: its formula, its shape, its colours, where it hides.
 *  @param {any} shared @param {any} state */
function stageLooks({ context, study, layer, long }, state) {
  const { t, theme } = context;
  const { n, keys, d, dv, summary } = study;
  const scale = scaleWords(layer);
  const scores = summary.largestRaw || 1;
  const scaled = scores * Math.abs(layer.scale) || 1;
  const one = state.range === "one";
  const limits = { scores, scaled: one ? scores : scaled, masked: one ? scores : scaled,
    output: study.largestOutput || 1 };
  const signed = (/** @type {number} */ limit) => (/** @type {number} */ value) =>
    signedColour(value, limit, theme);
  const divided = scale.root
    ? [" ÷ √", { i: "d" }, { sub: node("i", {}, "k") }, " = ", { i: "S" },
      ` ÷ ${shortNumber(1 / layer.scale)}`]
    : [` ${scale.above}`];
  const capped = layer.softcap && shortNumber(layer.softcap);
  const masks = {
    none: [t("head.no_mask")],
    causal: [{ i: "j" }, " ≤ ", { i: "i" }, t("head.else")],
    window: [{ i: "i" }, ` − ${layer.mask.window} < `, { i: "j" }, " ≤ ", { i: "i" },
      t("head.else")],
    dense: [t("head.dense_mask")],
  };
  const bias = study.attention.bias ? [" + ", t("head.bias")] : [];
  const mask = [.../** @type {any} */ (masks)[layer.mask.kind], ...bias];
  const visible = t("head.visible", { seen: summary.pairs.toLocaleString("en"),
    all: (n * keys).toLocaleString("en") });
  return {
    scores: { name: t("head.scores"), limit: limits.scores, colour: signed(limits.scores),
      formula: [{ i: "S" }, " = ", { i: "QK" }, { sup: "⊤" }],
      shape: `(${n}×${d})(${d}×${keys}) → ${n}×${keys}` },
    scaled: { name: t("head.scaled"), limit: limits.scaled, colour: signed(limits.scaled),
      formula: [{ i: "S" }, ...divided], shape: `${n}×${keys}` },
    masked: { name: t(capped && layer.mask.kind === "none" ? "head.capped"
      : layer.mask.kind === "causal" ? "head.causal" : "head.masked"),
      limit: limits.masked, colour: signed(limits.masked),
      formula: capped ? [`${capped} tanh(`, { i: "x" }, ` ÷ ${capped})`] : mask,
      shape: capped ? [mathNode(...mask), ` · ${visible}`] : visible },
    weights: { name: t("head.weights"), limit: 1, colour: (/** @type {number} */ value) =>
        weightColour(value, theme, long),
      formula: [{ i: "A" }, " = softmax", node("span", { class: "per-row" }, t("head.per_row"))],
      shape: t(study.attention.sink === null ? "head.sums" : "head.sums_sink") },
    output: { name: t("head.output"), limit: limits.output, colour: signed(limits.output),
      formula: [{ i: "O" }, " = ", { i: "AV" }],
      shape: `(${n}×${keys})(${keys}×${dv}) → ${n}×${dv}` },
  };
}

/** @param {number} index @param {any} measures */
function isLabelled(index, measures) {
  return index === 0 || (measures.kind === "tablet" && index === 3);
}

/** @param {any} context @param {string[]} stageList @param {any} looks @param {string} shown */
function stageSwitch(context, stageList, looks, shown) {
  return node("div", { class: "segments stage-switch", role: "group",
    "aria-label": context.t("head.stages") },
  stageList.map((stage) => node("button", {
    type: "button", "aria-pressed": String(stage === shown),
    "data-focus": `stage-${stage}`, click: () => context.set({ stage }),
  }, looks[stage].name)));
}

/** @param {any} context */
function togglesPart({ t, state, set }) {
  const box = (/** @type {string} */ name, /** @type {boolean} */ on, /** @type {any} */ change) =>
    node("label", {}, node("input", { type: "checkbox", checked: on, "data-focus": `toggle-${name}`,
      change: (/** @type {any} */ event) => set(change(event.target.checked)) }),
    t(`head.${name}`));
  return node("div", { class: "head-toggles" },
    box("one_range", state.range === "one", (/** @type {boolean} */ on) =>
      ({ range: on ? "one" : "stage" })),
    box("centre", state.centre, (/** @type {boolean} */ on) => ({ centre: on })));
}

/** Rows that enter no number, counted. @param {any} shared */
function countsPart({ context, study }) {
  const { rows, nonfinite, empty } = study.summary;
  if (!nonfinite && !empty) return "";
  const parts = [context.t("head.rows_enter", { n: rows - nonfinite - empty, all: rows })];
  if (nonfinite) parts.push(context.t("head.rows_nan", { n: nonfinite }));
  if (empty) parts.push(context.t("head.rows_empty", { n: empty }));
  return node("p", { class: "note" }, parts.join(" · "));
}

/** The mean of the visible raw scores of each row of a block. @param {any} block
 *  @param {number} keys */
function visibleMeans(block, keys) {
  const means = new Float64Array(block.last - block.first);
  for (let i = 0; i < means.length; i++) {
    let [count, sum] = [0, 0];
    for (let j = 0; j < keys; j++) {
      if (!block.seen[i * keys + j]) continue;
      count++;
      sum += block.scores[i * keys + j];
    }
    means[i] = count ? sum / count : 0;
  }
  return means;
}

/** @param {any} p @param {any} grid @param {number} dv @param {any} t @param {any} measures
 *  @param {any} palette */
function drawDimensions(p, grid, dv, t, { size }, palette) {
  const y = grid.y - 6;
  const style = { size, fill: palette.ink2 };
  const right = grid.x + grid.cell * dv;
  p.text(grid.x, y, "0", style);
  p.text((grid.x + right) / 2, y, t("head.dimension"), { ...style, anchor: "middle" });
  if (dv > 1) p.text(right, y, String(dv - 1), { ...style, anchor: "end" });
}

/** Which way is which, in the corner of the first matrix. @param {any} p @param {any} grid
 *  @param {number} label @param {any} t @param {any} measures @param {any} palette */
function drawCorner(p, grid, label, t, { size }, palette) {
  const style = { size: Math.max(10, size - 1), fill: palette.ink3,
    anchor: /** @type {"end"} */ ("end") };
  if (label < 48) return;
  p.text(grid.x - 6, grid.y - size - 9, `${t("head.key")} →`, style);
  p.text(grid.x - 6, grid.y - 6, `${t("head.query")} ↓`, style);
}

/** @param {any} shared */
function operatorWords({ context, study, layer }) {
  const { t } = context;
  const scale = scaleWords(layer);
  const { kind } = layer.mask;
  return [
    { above: scale.above, below: scale.below },
    { above: layer.softcap ? t("head.operator_cap") : t("head.operator_mask"),
      below: kind === "none" && !study.attention.bias ? "+ 0" : "+ {0, −∞}" },
    { above: "softmax", below: [{ t: "e", italic: true }, { t: "x", italic: true, shift: "sup" },
      " ÷ Σ"] },
    { above: "· V", below: `${study.keys}×${study.dv}` },
  ];
}

/** The histogram of a stage on its ramp, and its mean and s.d. in words.
 *  @param {any} shared @param {string} stage @param {any} look @param {any} measures
 *  @param {any} canvas @param {any} moments @param {number} left */
function drawSpread(shared, stage, look, measures, canvas, moments, left) {
  const { context, study } = shared;
  const { t } = context;
  const picture = spreadPicture(shared, stage, look, measures);
  paintPicture(canvas, newPicture(left + picture.width, picture.height).put(picture, left, 0));
  const low = stage === "weights" ? 0 : -look.limit;
  const found = study.spread(stage, low, look.limit, SPREAD_BINS);
  const small = stage === "weights" || stage === "output" ? 3 : 2;
  const digits = (/** @type {number} */ x) =>
    (Math.abs(x) >= 1 ? significant(x, 3) : fixed(x, small));
  const words = { mean: node("b", {}, digits(found.mean)), sd: node("b", {}, digits(found.sd)) };
  moments.replaceChildren(context.rich("head.moments", words));
  moments.dataset.mean = String(found.mean);
  moments.dataset.sd = String(found.sd);
  canvas.setAttribute("aria-label", t("head.histogram", { stage: look.name,
    mean: digits(found.mean), sd: digits(found.sd) }));
}

/** @param {any} shared @param {string} stage @param {any} look @param {any} measures */
function spreadPicture({ context, study, palette }, stage, look, measures) {
  const weights = stage === "weights";
  const colours = rampOf(weights ? "weights" : "signed", context.theme).hex;
  const low = weights ? 0 : -look.limit;
  const found = study.spread(stage, low, look.limit, SPREAD_BINS);
  const { size, panel } = measures;
  const high = measures.wide ? 52 : 44;
  const p = newPicture(panel + 2, high + 20 + size + 4);
  drawHistogram(p, { x: 0, y: 4, width: panel, height: high }, found,
    (part) => colours[Math.round(part * 256)], palette);
  const y = high + 19 + size;
  const style = { size, fill: palette.ink2 };
  const places = stage === "scores" ? 1 : 2;
  const text = weights ? ["0", "0.5", "1"] : [fixed(low, places), "0", fixed(look.limit, places)];
  p.text(0, y, text[0], style);
  p.text(panel / 2, y, text[1], { ...style, anchor: "middle" });
  p.text(panel, y, text[2], { ...style, anchor: "end" });
  return p;
}

/** @param {any} shared @param {string} stage @param {{q: number, k: number}} cell
 *  @param {number|null} column */
function stageValue({ rowOf }, stage, { q, k }, column) {
  const row = rowOf(q);
  return stage === "output" ? row.output[column ?? 0] : row[stage][k];
}

/** The value of the chosen cell in a stage, with where it comes from; pointing adds digits.
 *  @param {any} shared @param {string} stage @param {{q: number, k: number}} cell
 *  @param {number|null} column @param {boolean} pointed @returns {any[]} */
function readoutOf(shared, stage, { q, k }, column, pointed) {
  const { context, rowOf, quoted, layer, study } = shared;
  const { t } = context;
  const row = rowOf(q);
  const visible = row.seen[k] !== 0;
  const digits = (/** @type {number} */ value, /** @type {number} */ places) =>
    (pointed ? sixDigits(value) : fixed(value, places));
  const scaled = digits(row.scaled[k], 3);
  switch (stage) {
    case "scores":
      return [mathNode({ i: "q·k" }), ` = ${digits(row.scores[k], 2)}`];
    case "scaled":
      return [`${fixed(row.scores[k], 2)} ${scaleTerm(layer)} = ${scaled}`];
    case "masked": {
      if (layer.mask.kind === "none" && !study.attention.bias && !layer.softcap) {
        return [t("head.unchanged", { value: scaled })];
      }
      if (!visible) return [t("head.hidden", { i: q, j: k })];
      return [t(layer.mask.kind === "causal" ? "head.kept_causal" : "head.kept",
        { i: q, j: k, value: digits(row.masked[k], 3) })];
    }
    case "weights": {
      if (Number.isNaN(row.weights[k])) return ["NaN"];
      if (!visible) return [t("head.weight_hidden")];
      return [mathNode({ i: "e" }, { sup: fixed(row.masked[k] - row.largest, 3) }),
        ` ÷ ${fixed(row.total, 3)} = ${pointed ? sixDigits(row.weights[k])
          : weightDigits(row.weights[k])}`];
    }
    default: {
      if (column !== null) {
        return [t("head.output_cell", { query: quoted(q), dimension: column,
          value: digits(row.output[column], 3) })];
      }
      const order = Array.from(row.weights.keys()).filter((j) => row.weights[j] > 0)
        .sort((a, b) => row.weights[b] - row.weights[a]);
      // What two decimals would call 0.00 is among the "…".
      const told = order.slice(0, 2).filter((j, at) => at === 0 || row.weights[j] >= 0.005);
      const parts = told.flatMap((j, index) => [
        `${index ? " + " : ""}${fixed(row.weights[j], 2)} `, mathNode({ i: "v" }),
        `(${quoted(j)})`]);
      if (!parts.length) return [Number.isNaN(row.output[0]) ? "NaN" : "0"];
      return [...parts, order.length > told.length ? " + …" : ""];
    }
  }
}

/** A stage with its heading and histogram, to be saved. @param {any} shared @param {any} look
 *  @param {any} panel @param {any} measures */
function stagePicture(shared, look, panel, measures) {
  const { palette } = shared;
  const left = panel.labelled ? measures.label : 0;
  const matrix = panel.matrix.picture();
  const spread = spreadPicture(shared, panel.panel.dataset.stage, look, measures);
  const p = newPicture(matrix.width + 8, matrix.height + spread.height + 70);
  const style = { size: 12, fill: palette.ink2 };
  p.text(left, 14, look.formula.map(mathRun), { size: 16, fill: palette.ink });
  p.text(left, 30, panel.panel.querySelector(".stage-shape").textContent, style);
  p.put(matrix, 0, 36);
  p.text(left, matrix.height + 52, panel.readout.textContent,
    { ...style, weight: 700, fill: palette.row });
  p.put(spread, left, matrix.height + 58);
  p.text(left, matrix.height + spread.height + 68, panel.moments.textContent, style);
  return p;
}
