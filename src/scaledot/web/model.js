/**
 * The model level: every head of every layer by one statistic, what was found, and a preview of the
 * head that is pointed at. The axis of the strip plot is the legend of the grid.
 */

import { statisticColour, textColour } from "./colour.js";
import { newPicture, paletteOf, pictureSvg } from "./draw.js";
import { markFindings, showFindings } from "./findings.js";
import { drawPreview, headNumbers } from "./preview.js";
import { STATISTICS } from "./state.js";
import { axisOf, cellColour, legendPicture, medianOf, statisticOf, stripPicture } from "./strip.js";
import { modelName, node, roleKey, shortText, significant, symbol, visibleNodes } from "./words.js";

const LABEL_WIDTH = 36;
const KV_HEIGHT = 24;
const HEADS_HEIGHT = 30;
const GROUP_GAP = 8;
/** A finding about more heads than these, or a quarter of all, marks no cell: it is about the
 * model. */
const MOST_BADGES = 12;
const WIDE_PAGE = 1600;
const PHONE = 600;
/** Layers from which a grid fills the height of a page. */
const TALL_GRID = 16;

/** The heads of a layer as the grid shows them: by number, or the largest first. */
export function orderedHeads(layer, stat, sort) {
  const places = layer.heads.map((_, i) => i);
  if (sort === "index") return places;
  const value = (i) => {
    const x = statisticOf(layer.heads[i], stat);
    return Number.isFinite(x) ? x : -Infinity;
  };
  return places.sort((a, b) => value(b) - value(a) || a - b);
}

/** @param {HTMLElement} root @param {import("./app.js").Context} context */
export function renderModel(root, context) {
  const wide = innerWidth >= WIDE_PAGE;
  const phone = innerWidth < PHONE;
  const main = node("div");
  const aside = node("aside", { class: "findings", "aria-label": context.t("model.findings") });
  const preview = node("section", { class: "preview" });
  const view = { context, phone, wide, previewed: preview, aside, shown: null };
  view.preview = (layer, head) => showPreview(view, layer, head);
  root.replaceChildren(main, aside);
  const name = node("h1", { class: "unseen" }, modelName(context.document.model, context.t));
  main.append(name, statisticChoice(context), statisticSays(context));
  const second = context.texts.find((x) => x.id === context.state.compare && x !== context.text);
  const width = main.clientWidth;
  if (second === undefined) main.append(gridAndStrip(view, context.text, width));
  else main.append(sideBySide(view, second, width));
  showFindings(view);
  // Beside a tall grid there is no room under it; on a phone findings come first.
  const tall = wide && context.text.layers.length > TALL_GRID;
  view.wide = tall;
  if (phone) root.append(preview);
  else (tall ? aside : main).append(preview);
  showPreview(view, context.state.layer, context.state.head);
  const { state } = context;
  context.onCopy(() => String(statisticOf(headAt(context.text, state), state.stat)));
  return () => {
    view.shown = null;
  };
}

function headAt(text, { layer, head }) {
  return text.layers[layer].heads[head] ?? {};
}

// --------------------------------------------------------------------------- the statistic

function statisticChoice(context) {
  const { state, t } = context;
  const buttons = STATISTICS.map((stat) =>
    node("button", {
      type: "button",
      class: "statistic",
      "aria-pressed": String(stat === state.stat),
      "data-focus": `stat-${stat}`,
      click: () => context.set({ stat }),
    }, t(`model.stat_${stat}`)),
  );
  const options = STATISTICS.map((stat) =>
    node("option", { value: stat, selected: stat === state.stat }, t(`model.stat_${stat}`)),
  );
  const menu = node("select", {
    class: "statistic-menu",
    "aria-label": t("model.statistic"),
    "data-focus": "stat-menu",
    change: (event) => context.set({ stat: event.target.value }),
  }, options);
  const group = { class: "statistics", role: "group", "aria-label": t("model.statistic") };
  const other = state.sort === "index" ? "value" : "index";
  const sort = node("button", {
    type: "button", class: "link sort", "data-focus": "sort",
    click: () => context.set({ sort: other }),
  }, t(`model.sort_${other}`));
  return node("div", { class: "statistic-row" }, node("div", group, buttons), menu, sort);
}

/** One sentence: what the statistic is, its median, and how many heads it singles out. */
function statisticSays(context) {
  const { state, t, rich, text } = context;
  const values = text.layers.flatMap((x) => x.heads.map((h) => statisticOf(h, state.stat)));
  const numbers = values.filter(Number.isFinite);
  const median = node("b", {}, t("model.median", { x: significant(medianOf(values), 3) }));
  const rules = new Set(text.layers.map((x) => x.rule?.name));
  const divisor = rules.size === 1 && rules.has("1/√d_k")
    ? node("span", {}, "÷√", symbol("d", "k"))
    : t("model.scaling");
  const counted = {
    variance: (x) => x >= 0.5 && x <= 2,
    entropy: (x) => x < 0.1,
    largest: (x) => x > 0.9,
    gradient: (x) => x < 0.05,
    max_score: (x) => x > 50,
    role: (x) => x > 0,
  }[state.stat];
  const values_ = { median, divisor, m: numbers.filter(counted).length, n: values.length };
  return node("p", { class: "statistic-says" },
    rich(`model.says_${state.stat}`, values_), context.language === "ja" ? "" : " ",
    t(state.sort === "index" ? "model.says_order" : "model.says_sorted"));
}

// --------------------------------------------------------------------------- grid and strip

function gridAndStrip(view, text, width) {
  const { context, phone } = view;
  const { state } = context;
  const values = text.layers.flatMap((x) => x.heads.map((h) => statisticOf(h, state.stat)));
  const axis = axisOf(state.stat, values);
  const stripWidth = phone ? width : Math.round(Math.min(400, Math.max(200, 0.283 * width)));
  const gridWidth = phone ? width : width - stripWidth - 32;
  const sizes = gridSizes(text, gridWidth, phone, state.sort);
  const grid = modelGrid(view, text, axis, sizes);
  const palette = paletteOf(document.documentElement);
  const picture = phone
    ? legendPicture(context, axis, width, palette)
    : stripPicture(context, text, axis, stripWidth, sizes, palette);
  const label = context.t("model.strip_label");
  const strip = node("div", { class: "strip" }, pictureSvg(picture, label));
  if (phone && axis.theory !== null) {
    strip.append(node("p", { class: "note" }, context.t("model.phone_legend")));
  }
  context.onSave(() => ({
    title: context.t(`model.stat_${state.stat}`),
    name: `scaledot-${state.stat}`,
    picture: savedPicture(context, text, axis, sizes, palette),
  }));
  return node("div", { class: "grid-and-strip" }, grid, strip);
}

/** Two texts, the same axis; strips give way. */
function sideBySide(view, second, width) {
  const { context, phone } = view;
  const texts = [context.text, second];
  const all = texts.flatMap((x) => x.layers.flatMap((y) => y.heads));
  const axis = axisOf(context.state.stat, all.map((x) => statisticOf(x, context.state.stat)));
  const each = phone ? width : Math.floor((width - 32) / 2);
  const palette = paletteOf(document.documentElement);
  const parts = texts.map((text) => {
    const sizes = gridSizes(text, each, phone, context.state.sort);
    return node("div", { class: "beside" },
      node("h3", { dir: "auto" }, visibleNodes(shortText(text.text, 60))),
      modelGrid(view, text, axis, sizes));
  });
  const legend = pictureSvg(
    legendPicture(context, axis, Math.min(width, 400), palette), context.t("model.strip_label"),
  );
  return node("div", {}, node("div", { class: "strip" }, legend),
    node("div", { class: "grid-and-strip pair" }, parts));
}

/** Pixels of a grid: cells of equal width, a gap after each kv group. */
function gridSizes(text, width, phone, sort) {
  const heads = Math.max(1, ...text.layers.map((x) => x.heads.length));
  const first = text.layers.find((x) => x.heads.length > 0)?.heads ?? [];
  const groups = new Set(first.map((x) => x.kv_head)).size;
  const grouped = sort === "index" && groups > 1 && groups < heads;
  const label = phone ? 20 : LABEL_WIDTH;
  const gaps = grouped ? (groups - 1) * GROUP_GAP : 0;
  const cell = (width - label - gaps) / heads;
  const layers = text.layers.length;
  const height = phone ? 30 : Math.min(48, Math.max(20, Math.floor(720 / layers)));
  return {
    heads, groups, grouped, label, cell, height, width,
    perGroup: heads / groups, top: (grouped ? KV_HEIGHT : 0) + HEADS_HEIGHT,
    /** The column, in CSS grid lines, of a head's place. */
    column: (place) => 2 + place + (grouped ? Math.floor(place / (heads / groups)) : 0),
  };
}

function gridTemplate(sizes) {
  const { label, heads, grouped, groups, perGroup } = sizes;
  const run = (count) => `repeat(${count}, minmax(0, 1fr))`;
  const cells = grouped ? Array(groups).fill(run(perGroup)).join(` ${GROUP_GAP}px `) : run(heads);
  return `${label}px ${cells}`;
}

function modelGrid(view, text, axis, sizes) {
  const { context } = view;
  const { state, t } = context;
  const template = gridTemplate(sizes);
  const size = sizes.cell < 28 ? " tightest" : sizes.cell < 36 ? " tight" : "";
  const grid = node("div", {
    class: `model-grid${size}${sizes.height < 40 ? " low" : ""}`,
    role: "grid",
    "aria-label": t("model.grid_label", { stat: t(`model.stat_${state.stat}`) }),
    "aria-rowcount": text.layers.length + 1,
  });
  const row = (attributes, ...cells) => {
    const made = node("div", { class: "grid-row", ...attributes }, cells);
    made.style.gridTemplateColumns = template;
    return made;
  };
  const at = (made, line) => {
    made.style.gridColumn = line;
    return made;
  };
  if (sizes.grouped) {
    const kv = Array.from({ length: sizes.groups }, (_, g) => at(
      node("div", { class: "grid-kv" }, t("model.kv_head", { n: g })),
      `${sizes.column(g * sizes.perGroup)} / span ${sizes.perGroup}`,
    ));
    const made = row({ "aria-hidden": "true" }, kv);
    made.style.height = `${KV_HEIGHT}px`;
    grid.append(made);
  }
  const numbers = Array.from({ length: sizes.heads }, (_, h) => {
    const name = state.sort === "index" ? String(h) : "";
    const seen = sizes.cell < 16 && h % 4 !== 0 ? "" : name;
    const label = state.sort === "index"
      ? t("model.head", { n: h }) : t("model.rank", { n: h + 1 });
    return at(
      node("div", { class: "grid-head", role: "columnheader", "aria-label": label }, seen),
      sizes.column(h),
    );
  });
  const corner = at(node("div", { role: "columnheader" }, node("span", { class: "unseen" },
    t("model.layers"))), 1);
  const top = row({ role: "row" }, corner, numbers);
  top.style.height = `${HEADS_HEIGHT}px`;
  grid.append(top);
  for (const [l, layer] of text.layers.entries()) {
    grid.append(layerRow(view, text, axis, sizes, l, layer, row, at));
  }
  if (text === context.text) listenToGrid(view, grid, text);
  return grid;
}

function layerRow(view, text, axis, sizes, l, layer, row, at) {
  const { context } = view;
  const { state, t } = context;
  const own = text === context.text;
  const header = at(node("div", {
    class: own && l === state.layer ? "grid-layer picked" : "grid-layer",
    role: "rowheader",
  }, layer.index), 1);
  if (layer.heads.length === 0) {
    const why = node("div", { class: "grid-missing note", role: "gridcell" },
      t("model.not_observed", { n: layer.index }));
    const made = row({ role: "row" }, header, at(why, "2 / -1"));
    made.style.height = `${sizes.height}px`;
    return made;
  }
  const cells = orderedHeads(layer, state.stat, state.sort).map((h, placeOf) => {
    const head = layer.heads[h];
    const picked = own && l === state.layer && h === state.head;
    const cell = gridCell(context, text, axis, sizes, layer, head, picked);
    cell.dataset.layer = l;
    cell.dataset.head = h;
    return at(cell, sizes.column(placeOf));
  });
  const made = row({ role: "row" }, header, cells);
  made.style.height = `${sizes.height}px`;
  return made;
}

function gridCell(context, text, axis, sizes, layer, head, picked) {
  const { state, t } = context;
  const value = statisticOf(head, state.stat);
  const { stat } = state;
  const all = text.layers.reduce((sum, x) => sum + x.heads.length, 0);
  const finding = text.findings.find((x) => head.findings.includes(x.number)
    && x.heads.length <= Math.min(MOST_BADGES, Math.max(1, all / 4)));
  const says = cellWords(head, stat, value);
  const label = t("model.cell_label", {
    layer: layer.index, head: head.index, stat: t(`model.stat_${stat}`),
    value: stat === "role" && head.role
      ? `${t(roleKey(head.role))} ${significant(value, 3)}` : significant(value, 6),
  });
  const named = finding ? `${label}, ${t("model.finding_n", { n: finding.number })}` : label;
  const cell = node("div", {
    class: picked ? "grid-cell picked" : "grid-cell",
    role: "gridcell",
    tabindex: picked ? "0" : "-1",
    title: named,
    "data-value": Number.isFinite(value) ? value : null,
    "aria-selected": String(picked),
    "data-focus": picked ? "grid-cell" : null,
  });
  const place = t("model.cell_place", {
    layer: layer.index, head: head.index, stat: t(`model.stat_${stat}`),
  });
  cell.append(unseen(place), sizes.cell < 20 ? unseen(says)
    : sizes.cell < 28 ? says.replace(/^0\./, ".") : says);
  if (state.sort === "value" && sizes.cell >= 44) {
    cell.append(node("span", { class: "own" }, head.index));
  }
  // In a low row a badge stands beside the number, in a high one over it.
  if (finding && sizes.cell >= (sizes.height < 40 ? 60 : 40)) {
    cell.append(unseen(t("model.cell_finding")),
      node("span", { class: "badge", "data-finding": finding.number }, finding.number));
  }
  const colour = cellColour(context.theme, stat, value, axis);
  const shown = colour ?? statisticColour("role", 0, context.theme);
  cell.style.backgroundColor = shown;
  cell.style.color = textColour(shown);
  return cell;
}

/** Words for a screen reader only. */
const unseen = (words) => node("span", { class: "unseen" }, words);

/** What a cell says: two significant digits, or a role's letter. */
function cellWords(head, stat, value) {
  if (stat === "role") return head.role?.letter ?? "·";
  if (Number.isNaN(value)) return "NaN";
  return value > 0 && value < 0.0005 ? "< .001" : significant(value, 2);
}

// --------------------------------------------------------------------------- moving in the grid

function listenToGrid(view, grid, text) {
  const { context } = view;
  const { state } = context;
  const cellOf = (event) => event.target.closest?.("[data-head]");
  const place = (cell) => ({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  grid.addEventListener("pointerover", (event) => {
    const cell = cellOf(event);
    if (!cell) return;
    const { layer, head } = place(cell);
    showPreview(view, layer, head);
    markFindings(view, text.layers[layer].heads[head].findings);
  });
  grid.addEventListener("pointerleave", () => {
    showPreview(view, state.layer, state.head);
    markFindings(view, []);
  });
  grid.addEventListener("click", (event) => {
    const badge = event.target.closest("[data-finding]");
    if (badge) {
      document.getElementById(`finding-${badge.dataset.finding}`)?.focus();
      return;
    }
    const cell = cellOf(event);
    if (cell) context.set({ view: "head", ...place(cell) });
  });
  grid.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      context.set({ view: "head", layer: state.layer, head: state.head });
      event.preventDefault();
      return;
    }
    const next = movedHead(text, state, event.key);
    if (next === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    context.set(next, "replace");
    const head = headAt(text, next);
    context.announce(context.t("model.cell_label", {
      layer: text.layers[next.layer].index, head: head.index,
      stat: context.t(`model.stat_${state.stat}`),
      value: significant(statisticOf(head, state.stat), 3),
    }));
  });
}

/** The cell that a key leads to, or null for a key that leads nowhere. */
export function movedHead(text, { layer, head, stat, sort }, key) {
  const order = orderedHeads(text.layers[layer], stat, sort);
  const column = order.indexOf(head);
  const rows = text.layers.length;
  const moves = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    Home: [0, -column], End: [0, order.length], PageUp: [-10, 0], PageDown: [10, 0],
  };
  if (!Object.hasOwn(moves, key)) return null;
  const [down, right] = moves[key];
  let row = Math.min(rows - 1, Math.max(0, layer + down));
  // Over layers without heads: onward, and back where nothing comes any more.
  const step = Math.sign(down);
  while (step !== 0 && text.layers[row]?.heads.length === 0) row += step;
  if (text.layers[row] === undefined) row = layer;
  const there = orderedHeads(text.layers[row], stat, sort);
  return { layer: row, head: there[Math.min(there.length - 1, Math.max(0, column + right))] };
}

/** Grid and strip as one picture, to save. */
function savedPicture(context, text, axis, sizes, palette) {
  const { state } = context;
  const strip = stripPicture(context, text, axis, 260, sizes, palette);
  const picture = newPicture(sizes.width + 32 + strip.width, strip.height);
  const cell = sizes.cell;
  const left = (place) => sizes.label + place * cell
    + (sizes.grouped ? Math.floor(place / sizes.perGroup) * GROUP_GAP : 0);
  for (const [l, layer] of text.layers.entries()) {
    const y = sizes.top + l * sizes.height;
    picture.text(sizes.label - 8, y + sizes.height / 2 + 4, String(layer.index), {
      size: 11, anchor: "end", fill: palette.ink2,
    });
    for (const [place, h] of orderedHeads(layer, state.stat, state.sort).entries()) {
      const value = statisticOf(layer.heads[h], state.stat);
      const colour = cellColour(context.theme, state.stat, value, axis);
      picture.rect(left(place), y, cell - 1, sizes.height - 1, colour ?? palette.bg);
      if (sizes.cell < 20) continue;
      picture.text(left(place) + cell / 2, y + sizes.height / 2 + 4,
        cellWords(layer.heads[h], state.stat, value), {
          size: 12, anchor: "middle", fill: colour ? textColour(colour) : palette.ink2,
        });
    }
  }
  for (let h = 0; h < sizes.heads && state.sort === "index"; h++) {
    picture.text(left(h) + cell / 2, sizes.top - 8, String(h), {
      size: 11, anchor: "middle", fill: palette.ink2,
    });
  }
  return picture.put(strip, sizes.width + 32, 0);
}

// --------------------------------------------------------------------------- preview

function showPreview(view, layer, head) {
  const name = `${layer}/${head}`;
  if (view.shown === name) return;
  view.shown = name;
  const { context } = view;
  if (context.text.layers[layer].heads.length === 0) {
    view.previewed.replaceChildren();
    return;
  }
  const numbers = headNumbers(context, layer, head, () =>
    context.set({ view: "head", layer, head }));
  drawPreview(view.previewed, context, { layer, head, numbers, wide: view.wide,
    current: () => view.shown === name });
}
