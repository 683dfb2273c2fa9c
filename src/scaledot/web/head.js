// @ts-check
/**
 * The head level: five stages side by side, and how one row of scores becomes weights.
 *
 * study.js asks stages.js for every number; this file arranges and draws. One cell is shown at a
 * time, the one pointed at or else the pinned one, in the stages, the products, the walk, the ruler
 * and the text box at once.
 */

import { PALETTES } from "./colour.js";
import { TILE_SIDE, headMeasures, headProblem, loadedStudy, rowCache } from "./layout.js";
import { movedCell, tokenLabel } from "./matrix.js";
import { overviewPart } from "./overview.js";
import { lowerPart } from "./rowpart.js";
import { stagesPart } from "./stagepanels.js";
import { fixed, node, tokenInWords, weightDigits } from "./words.js";

/** A text whose cells would be narrower than this is seen through an overview and a tile. */
const NARROWEST_CELL = 2;

/** What was drawn last in an element, so that an answer that comes late draws nothing. */
const headTurns = new WeakMap();

/** Show the head that the state names. @param {HTMLElement} root @param {any} context */
export function renderHead(root, context) {
  const before = headTurns.get(root);
  const turn = { over: false, stage: context.state.stage, end: () => {} };
  headTurns.set(root, turn);
  const { state } = context;
  const problem = (/** @type {any} */ error) => {
    if (!turn.over) root.replaceChildren(headProblem(error));
  };
  loadedStudy(root, context, () => !turn.over)
    .then((/** @type {any} */ study) => {
      if (turn.over) return;
      const held = document.activeElement instanceof HTMLElement && root.contains(
        document.activeElement) ? document.activeElement.dataset.focus : undefined;
      turn.end = showHead(root, context, study);
      const wanted = before && before.stage !== state.stage ? `matrix-${state.stage}` : held;
      if (wanted) {
        /** @type {HTMLElement|null} */
        const found = root.querySelector(`[data-focus="${CSS.escape(wanted)}"]`);
        found?.focus({ preventScroll: true });
      }
    })
    .catch(problem);
  return () => {
    turn.over = true;
    turn.end();
  };
}

/** @param {HTMLElement} root @param {any} context @param {any} study */
function showHead(root, context, study) {
  const { t, state, text } = context;
  const layer = text.layers[state.layer];
  const palette = PALETTES[/** @type {"light"|"dark"} */ (context.theme)];
  const labels = text.tokens.map(tokenLabel);
  const width = root.clientWidth;
  const whole = headMeasures(width, study.n, study.keys, labels);
  const long = whole.cell < NARROWEST_CELL;
  const quoted = (/** @type {number} */ i) => labels[i] ?? String(i);
  const rowOf = rowCache(study);
  const heaviest = (/** @type {number} */ q) => Math.max(0, rowOf(q).topKey);
  const pinned = { q: state.q, k: state.k ?? heaviest(state.q) };
  let cell = { ...pinned };
  let column = null;
  const tile = tileAround(pinned, study, long);

  const shared = { context, study, layer, palette, labels, quoted, rowOf, long };
  const measures = long
    ? headMeasures(width, tile.rows, tile.columns, labels.slice(tile.q, tile.q + tile.rows))
    : whole;
  const title = titlePart(shared);
  const stages = stagesPart(shared, measures, {
    onPoint: (/** @type {any} */ found) => {
      column = found?.column ?? null;
      context.point(found && { q: found.q, k: found.k });
    },
    onPin: (/** @type {any} */ found) => context.set({ q: found.q, k: found.k }, "step"),
    onKey: moveByKey,
    onStep: step,
  });
  const over = long ? overviewPart(shared, {
    width,
    onMove: (/** @type {any} */ to) => {
      context.set(to, "drag");
      settle(to);
    },
    onDone: () => context.set({ ...cell }),
    onKey: moveByKey,
    onPoint: (/** @type {any} */ found) => context.point(found && { q: found.q, k: found.k }),
    onPin: (/** @type {any} */ found) => context.set({ q: found.q, k: found.k }, "step"),
  }) : null;
  const side = width >= 1024 - 2 * 32 && measures.kind === "wide" ? (measures.wide ? 420 : 304) : 0;
  const lower = lowerPart(shared, { width: side ? width - side - 48 : width, measures, side });
  /** The panel that last held the focus: reaching the save button takes it away. */
  let panel = /** @type {HTMLElement|null} */ (null);
  root.replaceChildren(node("div", {
    class: "head-level",
    focusin: (/** @type {any} */ event) => {
      panel = event.target.closest("[data-panel], [data-stage]") ?? panel;
    },
  }, title.element, over?.element ?? null, stages.element, node("hr", {}), lower.element));

  /** @param {KeyboardEvent} event */
  function moveByKey(event) {
    if (event.key === "Enter" || event.key === " ") {
      context.set({ ...cell }, "step");
      return true;
    }
    return step(event.key);
  }

  /** @param {string} key */
  function step(key) {
    const moved = movedCell(key, cell, {
      rows: study.n, keys: study.keys, seen: (q) => firstAndLast(rowOf(q).seen),
    });
    if (!moved) return false;
    context.set(moved, "drag");
    context.point(moved); // the text box marks the row
    settle(moved);
    context.announce(cellSentence(shared, moved));
    return true;
  }

  /** @param {{q: number, k: number}} to */
  function settle(to) {
    Object.assign(pinned, to);
    show(to);
  }

  /** Show one cell everywhere. @param {{q: number, k: number}} to @param {boolean} [pointed] */
  function show(to, pointed = false) {
    cell = { ...to };
    if (follow(tile, cell, study)) stages.draw(tile);
    title.show(cell);
    over?.show(cell, tile);
    stages.show(cell, column, pointed);
    lower.show(cell);
  }

  stages.draw(tile);
  over?.draw(tile);
  show(pinned);
  context.onPoint((/** @type {any} */ found) => {
    show(found === null ? { ...pinned } : { q: found.q, k: found.k ?? heaviest(found.q) },
      found !== null);
  });
  context.onCopy(() => {
    const { panels } = stages;
    const { readout } = panels[panel?.dataset.stage ?? "weights"] ?? Object.values(panels)[0];
    return readout.dataset.value;
  });
  context.onSave(() => savedPart(shared, panel, stages, lower, over));
  return () => {};
}

/** @param {Uint8Array} seen @returns {[number, number]} */
function firstAndLast(seen) {
  const first = seen.indexOf(1);
  return first < 0 ? [0, seen.length - 1] : [first, seen.lastIndexOf(1)];
}

/** The rows and keys that are shown: all, or a tile around a cell.
 *  @param {{q: number, k: number}} cell @param {any} study @param {boolean} long */
function tileAround(cell, study, long) {
  if (!long) return { q: 0, k: 0, rows: study.n, columns: study.keys };
  const rows = Math.min(TILE_SIDE, study.n);
  const columns = Math.min(TILE_SIDE, study.keys);
  return {
    q: Math.max(0, Math.min(study.n - rows, cell.q - (rows >> 1))),
    k: Math.max(0, Math.min(study.keys - columns, cell.k - (columns >> 1))),
    rows, columns,
  };
}

/** Move the tile so that it holds the cell; whether it moved.
 *  @param {any} tile @param {{q: number, k: number}} cell @param {any} study */
function follow(tile, cell, study) {
  const { q, k } = tile;
  if (cell.q < q || cell.q >= q + tile.rows) {
    tile.q = Math.max(0, Math.min(study.n - tile.rows, cell.q - (tile.rows >> 1)));
  }
  if (cell.k < k || cell.k >= k + tile.columns) {
    tile.k = Math.max(0, Math.min(study.keys - tile.columns, cell.k - (tile.columns >> 1)));
  }
  return tile.q !== q || tile.k !== k;
}

/** What a screen reader says of a cell. @param {any} shared @param {{q: number, k: number}} cell */
function cellSentence({ context, rowOf, quoted }, { q, k }) {
  const row = rowOf(q);
  const values = { query: quoted(q), key: quoted(k), score: fixed(row.scores[k], 2),
    scaled: fixed(row.scaled[k], 3), weight: weightDigits(row.weights[k]) };
  return context.t(row.seen[k] ? "head.cell" : "head.cell_masked", values);
}

/** @param {any} shared */
function titlePart({ context, layer, quoted, long }) {
  const { t, rich, state } = context;
  const place = node("p", { class: "head-place" });
  const element = node("div", { class: "head-title" },
    node("h1", {}, t("head.title", { layer: layer.index, head: layer.heads[state.head].index })),
    place,
    node("p", { class: "head-help note" }, t(long ? "head.help_long" : "head.help")));
  return {
    element,
    /** @param {{q: number, k: number}} cell */
    show({ q, k }) {
      place.replaceChildren(rich("head.place", {
        query: node("b", { class: "choice" }, tokenInWords(quoted(q), t)),
        key: node("b", {}, tokenInWords(quoted(k), t)),
      }));
    },
  };
}

/** What "Save picture" saves: the panel that held the focus last, else the stage of the state.
 *  @param {any} shared @param {HTMLElement|null} panel @param {any} stages @param {any} lower
 *  @param {any} over  the overview of a long text, or null */
function savedPart({ context, layer }, panel, stages, lower, over) {
  const { t, state } = context;
  const { index } = layer.heads[state.head];
  const place = t("head.title", { layer: layer.index, head: index });
  const file = `scaledot-layer${layer.index}-head${index}`;
  const name = panel?.dataset.panel;
  if (panel && name) {
    const whole = name === "overview" ? over : name === "numbers" ? lower.numbers : null;
    const picture = whole ? whole.picture() : lower.parts[name].picture;
    const heading = panel.querySelector("h2")?.textContent ?? "";
    return { title: `${place} · ${heading}`, name: `${file}-${name}`, picture };
  }
  const stage = panel?.dataset.stage ?? state.stage;
  const shown = stages.panels[stage] ? stage : Object.keys(stages.panels)[0];
  return { title: `${place} · ${t(`head.${shown}`)}`, name: `${file}-${shown}`,
    picture: stages.picture(shown) };
}
