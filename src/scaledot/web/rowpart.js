// @ts-check
/**
 * Below the stages: one score as a sum of products, the row's walk, the division on one ruler, and
 * the row's numbers beside the head's.
 */

import { drawStrip, newPicture, pictureSvg } from "./draw.js";
import { mathNode, scaleTerm, scaleWords, shortNumber, sixDigits } from "./layout.js";
import { scalingFacts } from "./stages.js";
import { productsOf } from "./study.js";
import { productsPicture, rulerPicture, walkMeasures, walkPicture } from "./walk.js";
import { fixed, node, significant, tokenInWords, weightDigits } from "./words.js";

/** Above this many keys the walk shows the heaviest and sums up the others. */
const WALK_KEYS = 40;

const WALK_HEAVIEST = 20;
/** Points that the ruler draws; of more, those evenly spaced by rank. */
const RULER_POINTS = 200;

/** @param {any} shared @param {{width: number, measures: any, side: number}} place */
export function lowerPart(shared, { width, measures, side }) {
  const { context } = shared;
  const figure = (/** @type {string} */ name) => {
    const heading = node("h2", {});
    const note = node("p", { class: "note" });
    const body = node("div", { class: "figure", tabindex: 0 });
    const section = node("section", { class: `head-${name}`, "data-panel": name }, heading, note,
      body);
    return { heading, note, body, section, picture: /** @type {any} */ (null) };
  };
  const parts = { products: figure("products"), walk: figure("walk"), ruler: figure("ruler") };
  const numbers = numbersPart(shared, side || Math.min(width, 420));
  const phone = measures.kind === "phone";
  const element = node("div", { class: `head-lower ${side ? "sided" : ""}` },
    node("div", { class: "head-row" }, phone ? [parts.walk.section, parts.products.section]
      : [parts.products.section, parts.walk.section], parts.ruler.section),
    node("aside", {}, numbers.element, pythonPart(shared)));
  if (side) element.style.setProperty("--side-width", `${side}px`);
  const narrow = phone;
  /** @type {any[]} */
  let lines = [];
  const lineAt = (/** @type {any} */ event) => {
    const box = parts.walk.body.getBoundingClientRect();
    const look = walkMeasures(width, measures.size, narrow);
    const index = Math.floor((event.clientY - box.top - look.head) / look.line);
    const line = lines[index];
    return line && line.key !== null ? line.key : null;
  };
  let shownCell = { q: 0, k: 0 };
  parts.walk.body.addEventListener("pointermove", (/** @type {any} */ event) => {
    const key = lineAt(event);
    if (key !== null && key !== shownCell.k) context.point({ q: shownCell.q, k: key });
  });
  parts.walk.body.addEventListener("pointerleave", () => context.point(null));
  parts.walk.body.addEventListener("click", (/** @type {any} */ event) => {
    const key = lineAt(event);
    if (key !== null) context.set({ q: shownCell.q, k: key }, "step");
  });

  /** @param {{q: number, k: number}} cell */
  function show(cell) {
    shownCell = cell;
    const one = rowPictures(shared, cell, { width, size: measures.size, narrow });
    lines = one.lines;
    for (const name of /** @type {const} */ (["products", "walk", "ruler"])) {
      const part = parts[name];
      part.heading.replaceChildren(...[one[name].heading].flat());
      part.note.replaceChildren(...[one[name].note].flat());
      part.picture = one[name].picture;
      // A row without a number has nothing to lay on a ruler.
      part.section.hidden = part.picture === null;
      part.body.replaceChildren(part.picture ? pictureSvg(part.picture, one[name].label) : "");
    }
    numbers.show(cell.q);
  }
  return { element, show, parts, numbers };
}

/** The three pictures of a cell's row, with their headings.
 *  @param {any} shared @param {{q: number, k: number}} cell
 *  @param {{width: number, size: number, narrow: boolean}} place */
function rowPictures(shared, { q, k }, { width, size, narrow }) {
  const { context, study, layer, palette, rowOf, quoted } = shared;
  const { t, rich } = context;
  const row = rowOf(q);
  const mark = () => node("span", { class: "choice" }, tokenInWords(quoted(q), t));
  const score = fixed(row.scores[k], 2);
  const sum = mathNode({ i: "q" }, { sub: quoted(q) }, " · ", { i: "k" },
    { sub: quoted(k) }, " = Σ ", { i: "q" }, { sub: node("i", {}, "m") }, " ", { i: "k" },
    { sub: node("i", {}, "m") }, " = ", node("b", { class: "choice" }, score));
  const products = {
    heading: t("head.products", { d: study.d }),
    note: [sum, node("span", { class: "aside-note" }, t("head.products_note"))],
    picture: productsPicture(productsOf(study.attention, q, k), width, palette,
      size > 11 ? 1.2 : 1),
    label: t("head.products_label", { query: quoted(q), key: quoted(k), d: study.d, score }),
  };
  const lines = walkLines(shared, q, k);
  const chosen = lines.findIndex((line) => line.key === k);
  const total = fixed(row.total, 3);
  const headings = [
    narrow ? [t("head.walk_score_short")] : [{ t: "q · k", italic: true, family: "serif" },
      t("head.walk_score", { d: study.d })],
    narrow ? scaleTerm(layer) : t("head.walk_scaled", { scale: scaleWords(layer).above }),
    t("head.walk_exponential"),
    narrow ? t("head.weight_short") : t("head.walk_weight", { total }),
  ];
  const walk = {
    heading: rich("head.walk", { query: mark() }),
    note: row.nonfinite ? t("head.row_nan") : row.visible === 0 ? t("head.row_empty") : "",
    picture: walkPicture(lines, { width, size, narrow, chosen: chosen < 0 ? null : chosen,
      headings, reason: t(`head.reason_${layer.mask.kind}`) }, palette),
    label: t("head.walk_label", { query: quoted(q), keys: row.visible }),
  };
  const points = [];
  let at = -1;
  for (let j = 0; j < study.keys; j++) {
    if (!row.seen[j]) continue;
    if (j === k) at = points.length;
    points.push({ label: quoted(j), score: row.scores[j], scaled: row.scaled[j] });
  }
  const drawn = spacedPoints(points, points[at]);
  const facts = scalingFacts(row.scores, row.scaled, row.seen);
  const scale = scaleTerm(layer);
  const check = (/** @type {boolean|null} */ held, /** @type {string} */ words) =>
    node("span", {}, held === null ? "" : held ? "✓ " : "✗ ", words);
  const range = { before: significant(facts.rangeBefore, 3),
    after: significant(facts.rangeAfter, 3) };
  const shrinks = facts.rangeAfter < facts.rangeBefore;
  const ruler = {
    heading: t(scaleWords(layer).root ? "head.ruler" : "head.ruler_times", {
      scale: shortNumber(scaleWords(layer).root ? 1 / layer.scale : layer.scale) }),
    note: facts.keys ? [
      check(facts.kept === facts.keys, t("head.order", { kept: facts.kept, all: facts.keys })),
      check(shrinks || null, t(shrinks ? "head.range" : "head.range_same", range)),
      check(facts.signs === facts.keys, t("head.signs", { negative: facts.negative,
        positive: facts.positive })),
      drawn.length < points.length ? node("span", {}, t("head.ruler_some",
        { n: drawn.length, all: points.length.toLocaleString("en") })) : "",
    ] : [],
    picture: facts.keys ? rulerPicture(drawn, { width, size,
      chosen: at < 0 ? null : drawn.indexOf(points[at]), divided: scaleWords(layer).above },
    palette) : null,
    label: t("head.ruler_label", { scale, ...range }),
  };
  return { products, walk, ruler, lines };
}

/** At most RULER_POINTS of the points, evenly spaced by rank: both ends and the chosen one are there.
 *  @param {any[]} points @param {any} chosen */
function spacedPoints(points, chosen) {
  if (points.length <= RULER_POINTS) return points;
  const order = [...points].sort((a, b) => a.score - b.score);
  const step = (order.length - 1) / (RULER_POINTS - 1);
  const kept = new Set(Array.from({ length: RULER_POINTS }, (_, i) => order[Math.round(i * step)]));
  if (chosen) kept.add(chosen);
  return [...kept];
}

/** The lines of the walk: every key in text order; of a long row the heaviest, and the others.
 *  @param {any} shared @param {number} q @param {number} k */
function walkLines({ context, study, rowOf, quoted }, q, k) {
  const row = rowOf(q);
  const line = (/** @type {number} */ j) => ({
    label: quoted(j), score: row.scores[j], scaled: row.scaled[j],
    exponential: row.seen[j] ? Math.exp(row.masked[j] - row.largest) : 0,
    weight: row.weights[j], hidden: !row.seen[j], key: j,
  });
  const all = Array.from({ length: study.keys }, (_, j) => j);
  let keys = all;
  /** @type {any[]} */
  const extra = [];
  if (study.keys > WALK_KEYS) {
    const seen = all.filter((j) => row.seen[j]);
    const heavy = [...seen].sort((a, b) => row.weights[b] - row.weights[a]).slice(0, WALK_HEAVIEST);
    const shown = new Set(heavy);
    if (row.seen[k]) shown.add(k);
    keys = all.filter((j) => shown.has(j));
    const others = seen.filter((j) => !shown.has(j));
    if (others.length) {
      const add = (/** @type {(j: number) => number} */ of) =>
        others.reduce((total, j) => total + of(j), 0);
      extra.push({ label: context.t("head.others", { n: others.length }), score: NaN, scaled: NaN,
        exponential: add((j) => Math.exp(row.masked[j] - row.largest)),
        weight: add((j) => row.weights[j]), hidden: false, key: null });
    }
  }
  if (row.sink !== null) {
    extra.push({ label: context.t("head.sink"), score: NaN, scaled: NaN,
      exponential: Math.exp(row.sink - row.largest),
      weight: Math.exp(row.sink - row.largest) / row.total, hidden: false, key: null });
  }
  return [...keys.map(line), ...extra];
}

/** @param {any} shared @param {number} width */
function numbersPart(shared, width) {
  const { context, study, palette, rowOf } = shared;
  const { t } = context;
  const list = node("div");
  let within = false;
  let shownRow = 0;
  const element = node("section", { class: "head-numbers", "data-panel": "numbers" },
    node("div", { class: "number-head" }, node("h2", {}, t("head.numbers")),
      node("span", { class: "choice legend" }, `● ${t("head.this_row")}`),
      node("span", { class: "legend" }, `○ ${t("head.head_mean")}`)),
    list);
  const theory = (/** @type {any} */ words) =>
    [node("span", { class: "theory-tick", "aria-hidden": "true" }), words];
  const picture = (/** @type {any} */ item) => {
    const p = newPicture(width, 16);
    drawStrip(p, 8, { width, ...item }, palette);
    return p;
  };
  /** @type {any[]} */
  let items = [];
  function show(/** @type {number} */ q) {
    shownRow = q;
    const row = rowOf(q);
    const all = study.summary;
    items = numberItems(shared, row, all, within);
    list.replaceChildren(...items.map((item) => node("div", { class: "number" },
      node("div", { class: "number-line" },
        node("b", { class: "number-name" }, item.name),
        node("span", { class: "number-row choice", "data-value": item.row,
          title: sixDigits(item.row) },
        row.visible ? item.write(item.row) : "–"),
        node("span", { class: "number-mean", "data-value": item.head,
          title: sixDigits(item.head) }, item.write(item.head))),
      pictureSvg(picture(item.strip)),
      node("p", { class: "number-note" }, item.theory ? theory(item.note) : item.note))));
    list.append(node("button", { type: "button", class: "link", "data-focus": "within",
      "aria-pressed": String(within), click: () => {
        within = !within;
        show(shownRow);
        /** @type {HTMLElement|null} */ (list.querySelector("[data-focus=within]"))?.focus();
      } }, t(within ? "head.all_pairs" : "head.within_rows")));
  }
  return {
    element, show,
    /** All numbers as one picture. */
    picture() {
      const p = newPicture(width, items.length * 62 + 30);
      p.text(width - 72, 12, `● ${t("head.this_row")}`,
        { size: 12, weight: 600, fill: palette.row, anchor: "end" });
      p.text(width, 12, `○ ${t("head.head_mean")}`,
        { size: 12, fill: palette.ink2, anchor: "end" });
      items.forEach((item, index) => {
        const y = index * 62 + 22;
        p.text(0, y + 14, item.name, { size: 12, weight: 600, fill: palette.ink });
        p.text(width - 72, y + 14, item.write(item.row),
          { size: 14, weight: 700, fill: palette.row, anchor: "end" });
        p.text(width, y + 14, item.write(item.head),
          { size: 14, fill: palette.ink, anchor: "end" });
        p.put(picture(item.strip), 0, y + 20);
      });
      return p;
    },
  };
}

/** The six statistics: this row, the head, where they lie between their limits.
 *  @param {any} shared @param {any} row @param {any} all the summary @param {boolean} within */
function numberItems({ context, study, layer, quoted }, row, all, within) {
  const { t, rich } = context;
  const outcomes = row.visible + (row.sink === null ? 0 : 1);
  const limit = Math.log(Math.max(outcomes, 1));
  const part = (/** @type {number} */ x, /** @type {number} */ low, /** @type {number} */ high) =>
    (Number.isFinite(x) && high > low ? (x - low) / (high - low) : null);
  const strip = (/** @type {number} */ a, /** @type {number} */ b, /** @type {number} */ low,
    /** @type {number} */ high, /** @type {number|null} */ theory = null) =>
    ({ row: part(a, low, high), head: part(b, low, high),
      theory: theory === null ? null : part(theory, low, high) });
  const two = (/** @type {number} */ x) => (x > 0 && x < 0.005 ? "< .01" : fixed(x, 2));
  const three = weightDigits;
  const least = 1 / Math.max(outcomes, 1);
  const scale2 = layer.scale * layer.scale;
  const headScaled = within ? all.varWithin : all.scaledVar;
  const headRaw = scale2 ? headScaled / scale2 : NaN;
  const theory = study.d;
  const most = 1.05 * Math.max(study.largestRowVar, headRaw || 0, theory);
  const dk = () => mathNode({ i: "d" }, { sub: node("i", {}, "k") });
  const scaledTheory = theory * scale2;
  const name = t(within ? "head.var_raw_within" : "head.var_raw");
  return [
    { name: t("head.entropy"), row: row.entropy, head: all.entropy, write: two,
      strip: strip(row.entropy, all.entropy, 0, limit),
      note: t("head.entropy_note", { n: outcomes, limit: two(limit) }) },
    { name: t("head.effective"), row: row.effectiveKeys, head: all.effectiveKeys,
      write: two, strip: strip(row.effectiveKeys, all.effectiveKeys, 1, outcomes),
      note: t("head.effective_note", { n: row.visible }) },
    { name: t("head.largest"), row: row.largestWeight, head: all.largestWeight, write: three,
      strip: strip(row.largestWeight, all.largestWeight, least, 1),
      note: row.topKey < 0 ? "" : t("head.largest_note", { key: quoted(row.topKey) }) },
    { name: t("head.gradient"), row: row.gradient, head: all.gradient, write: three,
      strip: strip(row.gradient, all.gradient, 0, 1 - least),
      note: t("head.gradient_note", { limit: three(1 - least) }) },
    { name, row: row.rawVar, head: headRaw, write: (/** @type {number} */ x) => significant(x, 4),
      strip: strip(row.rawVar, headRaw, 0, most, theory), theory: true,
      note: rich("head.theory", { value: node("span", {}, dk(), ` = ${theory}`) }) },
    { name: t("head.var_scaled"), row: row.scoreVar, head: headScaled,
      write: (/** @type {number} */ x) => significant(x, 3),
      strip: strip(row.scoreVar, headScaled, 0, most * scale2, scaledTheory), theory: true,
      note: rich("head.theory", { value: shortNumber(scaledTheory) }) },
  ];
}

/** @param {any} shared */
function pythonPart({ context, layer }) {
  const { t, state } = context;
  const code = node("code", {});
  const write = (/** @type {number} */ q) => `seen.weights(\n  ${JSON.stringify(layer.path)},\n`
    + `  head=${layer.heads[state.head].index}, rows=slice(${q}, ${q + 1}))`;
  code.textContent = write(state.q);
  const copy = async () => {
    const text = code.textContent ?? "";
    try {
      await navigator.clipboard.writeText(text);
      context.announce(t("head.copied"));
    } catch {
      getSelection()?.selectAllChildren(code);
      context.announce(t("head.select_copy"));
    }
  };
  return node("section", { class: "head-python" },
    node("h2", {}, t("head.python")),
    node("button", { type: "button", class: "code-button", "data-focus": "python", click: copy,
      title: t("head.python_copy") }, node("pre", {}, code)),
    node("p", { class: "note" }, t("head.python_note")));
}
