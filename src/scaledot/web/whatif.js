// @ts-check
/**
 * The what-if level: the model's own scores under another scale, temperature, soft-cap or mask.
 *
 * The slider is the axis of the curves above it. Scores come once; whatever moves, only the stages
 * after them are formed again, by stages.js. Axes and colour ranges stay where they are while a
 * control moves.
 */

import { chancePart, FIRST_SEED } from "./chance.js";
import { PALETTES, rampOf, weightColour } from "./colour.js";
import { curveMeasures, curvesPicture, dumbbellPicture, rampPicture } from "./curves.js";
import { newPicture, pictureSvg } from "./draw.js";
import { TILE_SIDE, columnRoom, headMeasures, headProblem, loadedStudy, mathNode, rowCache, shortNumber, steppersPart } from "./layout.js";
import { makeMatrix, movedCell, tokenLabel } from "./matrix.js";
import { gradientsOf, heaviestKeys, scaleCurves, scaleFactor, scaleSteps, scalingFacts, spacedRows, stagesOf } from "./stages.js";
import { fixed, node, symbol, tokenInWords, weightDigits } from "./words.js";

/** Rules that have a tick on the slider. */
const TICK_RULES = ["1/d_k", "1/sqrt_d_model", "1/sqrt_d_k", "none"];
const SLIDER_STEPS = 1000;
const CURVE_STEPS = 97;
/** Rows × keys that curves look at: more would not follow a moving soft-cap. */
const CURVE_CELLS = 40000;
const SNAP = 12; // steps of the slider: a drag that near to a rule means the rule
const CAP_RANGE = [0.5, 100];
const TEMPERATURE_RANGE = [0.25, 4];
/** A soft-cap from which on nothing is capped: how the fragment says "off" for a model with one. */
const CAP_OFF = 1e6;
/** Factor, temperature and soft-cap that the page computes with: beyond these no sum of squares is
 * sure to be a number. No model comes near. */
const COMPUTED = [1e-6, 1e6];

/** @param {HTMLElement} root @param {any} context */
export function renderWhatIf(root, context) {
  const turn = { over: false, end: () => {} };
  loadedStudy(root, context, () => !turn.over)
    .then((/** @type {any} */ study) => {
      if (turn.over) return;
      const focus = document.activeElement;
      const inside = focus instanceof HTMLElement && root.contains(focus);
      const held = inside ? focus.dataset.focus : null;
      turn.end = showWhatIf(root, context, study);
      if (held) {
        /** @type {HTMLElement|null} */
        const again = root.querySelector(`[data-focus="${CSS.escape(held)}"]`);
        again?.focus({ preventScroll: true });
      }
    })
    .catch((/** @type {any} */ error) => {
      if (!turn.over) root.replaceChildren(headProblem(error));
    });
  return () => {
    turn.over = true;
    turn.end();
  };
}

/**
 * What the state's controls make of a layer: the factor, temperature, soft-cap and mask in force.
 *
 * @param {any} state @param {any} layer
 * @param {{dModel: number|null, keys: number}} sizes
 *
 * out: what the fragment asks for beyond `COMPUTED`, as [given, taken] pairs.
 */
export function settingsOf(state, layer, sizes) {
  /** @type {number[][]} */
  const out = [];
  const within = (/** @type {number} */ given) => {
    const taken = Math.min(COMPUTED[1], Math.max(COMPUTED[0], given));
    if (taken !== given) out.push([given, taken]);
    return taken;
  };
  let scale = layer.scale;
  if (state.rule === "custom" && state.scale) scale = within(state.scale);
  else if (state.rule !== "model") {
    try {
      scale = scaleFactor(state.rule, layer.d_k, sizes);
    } catch {
      scale = layer.scale; // a rule of a fragment that nobody knows is left out
    }
  }
  const cap = state.cap === null ? layer.softcap ?? null : state.cap >= CAP_OFF ? null
    : within(state.cap);
  const temperature = within(state.temp);
  const own = state.mask === "model";
  const mask = own ? layer.mask
    : { kind: state.mask, window: state.mask === "window" ? state.window : null };
  return { scale, temperature, cap, mask, own, out,
    changed: scale !== layer.scale || temperature !== 1 || cap !== (layer.softcap ?? null) || !own };
}

/** The attention under these settings. @param {any} attention @param {any} settings */
export function attentionUnder(attention, settings) {
  return {
    ...attention,
    scale: settings.scale / settings.temperature,
    softcap: settings.cap,
    mask: settings.mask,
    hidden: settings.own ? attention.hidden : null,
  };
}

/** @param {HTMLElement} root @param {any} context @param {any} study @param {any} turn */
function showWhatIf(root, context, study) {
  const { t, rich, text, theme } = context;
  let state = { ...context.state };
  const layer = text.layers[state.layer];
  const palette = PALETTES[/** @type {"light"|"dark"} */ (theme)];
  const labels = text.tokens.map(tokenLabel);
  const sizes = { dModel: context.document.model.d_model ?? null, keys: study.keys };
  const width = root.clientWidth;
  const { kind, size } = headMeasures(width, study.n, study.keys, labels);
  const split = kind === "wide";
  const gap = 48;
  const leftWide = split ? Math.floor((width - gap) * 0.53) : width;
  const rightWide = split ? width - gap - leftWide : width;
  const rowOf = rowCache(study);
  const pinned = { q: state.q, k: state.k ?? Math.max(0, rowOf(state.q).topKey) };
  let cell = { ...pinned };

  const tile = { rows: Math.min(study.n, study.n > 64 ? TILE_SIDE : study.n),
    columns: Math.min(study.keys, study.n > 64 ? TILE_SIDE : study.keys), q: 0, k: 0 };
  tile.q = Math.max(0, Math.min(study.n - tile.rows, pinned.q - (tile.rows >> 1)));
  tile.k = Math.max(0, Math.min(study.keys - tile.columns, pinned.k - (tile.columns >> 1)));
  const shownRows = [tile.q, tile.q + tile.rows];
  const model = stagesOf(study.attention, shownRows[0], shownRows[1]);
  const modelGradients = gradientsOf(model);
  const queries = spacedRows(study.n, Math.max(16, Math.floor(CURVE_CELLS / study.keys)));

  const axis = scaleAxis(layer, sizes);
  const scales = scaleSteps(axis.low, axis.high, CURVE_STEPS);
  /** Curves, by soft-cap and mask: scale and temperature only move along them. */
  let curved = { key: "", values: /** @type {any} */ (null), tops: /** @type {any} */ (null) };
  const own = scaleCurves(study.attention, [layer.scale], queries);

  const parts = {
    formula: node("p", { class: "whatif-formula" }),
    beyond: node("div"),
    curves: node("div", { class: "figure" }),
    row: node("div", { class: "figure", tabindex: 0 }),
    rowHeading: node("h2", {}),
    sentence: node("p", { class: "whatif-sentence", "aria-live": "off" }),
    nowNames: [node("p", { class: "map-name choice" }), node("p", { class: "map-name choice" })],
  };
  const slider = scaleSlider();
  const controls = controlsPart();
  const maps = mapsPart();
  const chance = chancePart(context, { width, size, kind, seed: state.seed ?? FIRST_SEED,
    onSeed: (seed) => context.set({ seed: seed === FIRST_SEED ? null : seed }, "drag") });

  /** The panel that last held the focus: reaching the save button takes it away. */
  let panel = /** @type {HTMLElement|null} */ (null);
  root.replaceChildren(node("div", {
    class: "whatif",
    focusin: (/** @type {any} */ event) => {
      panel = event.target.closest("[data-panel]") ?? panel;
    },
  },
    node("div", { class: "head-title" }, node("h1", {}, t("whatif.title")),
      node("p", { class: "head-place" }, t("whatif.about", { layer: layer.index,
        head: layer.heads[state.head].index })), partNote()),
    node("div", { class: `whatif-columns ${split ? "sided" : ""}` },
      node("div", {},
        node("section", { "data-panel": "curves" }, node("h2", {}, t("whatif.drag")),
          parts.beyond, parts.formula, parts.curves, slider.element),
        controls.element, steppersPart(context, step),
        node("section", { class: "whatif-row", "data-panel": "row" }, parts.rowHeading, parts.row)),
      node("div", {}, maps.element, parts.sentence)),
    node("hr", {}), chance.element));

  /** What of a long text is shown. */
  function partNote() {
    const notes = [];
    if (queries.length < study.n) {
      notes.push(t("whatif.sampled", { n: queries.length, all: study.n.toLocaleString("en") }));
    }
    if (tile.rows < study.n) {
      notes.push(t("whatif.tile", { q0: tile.q, q1: tile.q + tile.rows - 1, k0: tile.k,
        k1: tile.k + tile.columns - 1 }));
    }
    return notes.length ? node("p", { class: "note" },
      notes.join(context.language === "ja" ? "" : " ")) : null;
  }

  // ------------------------------------------------------------ controls

  /** Apply changes: while a control moves only this view draws. @param {any} changes
   *  @param {boolean} moving */
  function change(changes, moving) {
    state = { ...state, ...changes };
    update();
    if (moving) {
      context.set(changes, "drag");
      return;
    }
    context.announce(parts.sentence.textContent);
    context.set(changes);
  }

  function scaleSlider() {
    const { left, right } = curveMeasures(leftWide, size);
    const place = (/** @type {number} */ scale) =>
      SLIDER_STEPS * (Math.log(scale / axis.low) / Math.log(axis.high / axis.low));
    const input = node("input", { type: "range", class: "scale-slider", min: 0, max: SLIDER_STEPS,
      step: 1, "aria-label": t("whatif.scale"), "data-focus": "scale" });
    input.style.marginLeft = `${left - 9}px`;
    input.style.width = `${right - left + 18}px`;
    let dragged = false;
    const chosen = () => {
      const at = Number(/** @type {any} */ (input).value);
      const near = axis.ticks.find((x) => Math.abs(place(x.scale) - at) < SNAP);
      if (dragged && near) return { rule: near.rule, scale: near.rule === "custom" ? near.scale : null };
      const scale = axis.low * (axis.high / axis.low) ** (at / SLIDER_STEPS);
      return { rule: "custom", scale: Number(scale.toPrecision(4)) };
    };
    input.addEventListener("pointerdown", () => { dragged = true; });
    input.addEventListener("input", () => change(chosen(), true));
    input.addEventListener("change", () => {
      const last = chosen();
      dragged = false;
      change(last, false);
    });
    input.addEventListener("keydown", () => { dragged = false; });
    const names = node("div", { class: "scale-ticks" });
    /** @type {number[]} */
    const ends = [];
    for (const tick of axis.ticks) {
      const x = left + (place(tick.scale) / SLIDER_STEPS) * (right - left);
      const lane = [0, 1, 2].find((row) => (ends[row] ?? -Infinity) < x - 34) ?? 2;
      ends[lane] = x + 34;
      const button = node("button", { type: "button", class: "scale-tick",
        "data-focus": `rule-${tick.rule}`, "data-rule": tick.rule,
        click: () => change({ rule: tick.rule, scale: null }, false) },
      node("span", { class: "tick-name" }, ruleName(tick, t)),
      node("span", {}, shortNumber(Number(tick.scale.toPrecision(3)))),
      tick.own ? node("span", { class: "tick-own" }, t("whatif.this_model")) : null);
      button.style.left = `${x}px`;
      button.style.top = `${lane * 46}px`;
      names.append(button);
    }
    names.style.height = `${ends.length * 46 + 14}px`;
    return {
      element: node("div", {}, input, names),
      /** @param {any} settings */
      show(settings) {
        /** @type {any} */ (input).value = String(Math.round(place(settings.scale)));
        input.setAttribute("aria-valuetext", settingName(settings.scale));
        for (const button of names.children) {
          if (!(button instanceof HTMLElement)) continue;
          const tick = axis.ticks.find((x) => x.rule === button.dataset.rule);
          const on = tick !== undefined && nearly(tick.scale, settings.scale);
          button.classList.toggle("choice", on && !(tick?.own));
          button.setAttribute("aria-pressed", String(on));
        }
      },
    };
  }

  function controlsPart() {
    const temperature = controlSlider("temperature", logSlider(TEMPERATURE_RANGE),
      (/** @type {number} */ value) => ({ temp: nearly(value, 1, 0.02) ? 1
        : Number(value.toPrecision(3)) }));
    const cap = controlSlider("cap", logSlider(CAP_RANGE, true),
      (/** @type {number|null} */ value) => {
        const none = layer.softcap ?? null;
        if (value === null) return { cap: none === null ? null : CAP_OFF };
        const rounded = Number(value.toPrecision(3));
        return { cap: rounded === none ? null : rounded };
      });
    const kinds = ["causal", "none", "window"];
    if (!kinds.includes(layer.mask.kind)) kinds.unshift("model");
    const current = state.mask === "model"
      ? kinds.includes(layer.mask.kind) ? layer.mask.kind : "model" : state.mask;
    const kept = layer.mask.kind === "window" && state.mask === "model" ? layer.mask.window
      : state.window;
    const buttons = kinds.map((one) => node("button", {
      type: "button", "aria-pressed": String(one === current), "data-focus": `mask-${one}`,
      click: () => change({ mask: one === layer.mask.kind && one !== "window" ? "model" : one },
        false),
    }, t(`whatif.mask_${one}`, { n: kept })));
    const number = current === "window" ? node("input", { type: "number", class: "window-keys",
      min: 1, max: study.keys, value: kept, "aria-label": t("whatif.window_keys"),
      "data-focus": "window" }) : null;
    number?.addEventListener("change", () => {
      const value = Math.round(Number(/** @type {any} */ (number).value));
      if (value >= 1) change({ mask: "window", window: Math.min(value, study.keys) }, false);
    });
    const reset = node("button", { type: "button", class: "link reset", "data-focus": "reset",
      click: () => change({ rule: "model", scale: null, temp: 1, cap: null, mask: "model" }, false),
    }, t("whatif.reset"));
    const element = node("div", { class: "whatif-controls" },
      temperature.row, cap.row,
      node("div", { class: "control" }, node("span", { id: "mask-name" }, t("whatif.mask")),
        node("div", { class: "control-body" },
          node("div", { class: "segments", role: "group", "aria-labelledby": "mask-name" },
            buttons),
          number, reset)));
    return {
      element,
      /** @param {any} settings */
      show(settings) {
        temperature.show(settings.temperature, fixed(settings.temperature, 2));
        cap.show(settings.cap, settings.cap === null ? t("whatif.off") : shortNumber(settings.cap));
        reset.toggleAttribute("disabled", !settings.changed);
      },
    };
  }

  /** A slider in a row of its own with its name and value. @param {string} name @param {any} law
   *  @param {(value: any) => any} changes */
  function controlSlider(name, law, changes) {
    const id = `whatif-${name}`;
    const input = /** @type {any} */ (node("input", { type: "range", id, min: 0, max: 200, step: 1,
      class: "plain-slider", "data-focus": name }));
    const value = node("output", { for: id, class: "control-value" });
    input.addEventListener("input", () => change(changes(law.value(Number(input.value))), true));
    input.addEventListener("change", () => change(changes(law.value(Number(input.value))), false));
    return {
      row: node("div", { class: "control" }, node("label", { for: id }, t(`whatif.${name}`)), input,
        value),
      /** @param {any} to @param {string} words */
      show(to, words) {
        input.value = String(law.place(to));
        input.setAttribute("aria-valuetext", words);
        value.textContent = words;
      },
    };
  }

  // ------------------------------------------------------------ maps

  function mapsPart() {
    const names = labels.slice(tile.q, tile.q + tile.rows);
    const keyNames = labels.slice(tile.k, tile.k + tile.columns);
    const named = headMeasures(width, tile.rows, tile.columns, names);
    const label = kind === "phone" ? 44 : named.label;
    const between = kind === "phone" ? 14 : 24;
    const cellWide = Math.min(24, Math.floor((rightWide - label - between - 6) / 2 / tile.columns));
    const labelsHigh = columnRoom(keyNames, size, cellWide) + 8;
    const wide = cellWide * tile.columns;
    const listeners = {
      description: t("head.matrix_role"),
      onPoint: (/** @type {any} */ found) => context.point(found && { q: found.q, k: found.k }),
      onPin: (/** @type {any} */ found) => context.set({ q: found.q, k: found.k }, "step"),
      onKey: moveByKey,
    };
    const four = ["weights-model", "weights-now", "gradient-model", "gradient-now"].map((name) =>
      makeMatrix({ name: `matrix-${name}`, label: t("whatif.map", {
        what: t(`whatif.${name.startsWith("weights") ? "weights" : "gradient_map"}`),
        when: t(name.endsWith("now") ? "whatif.now" : "whatif.this_model") }), ...listeners }));
    /** @param {number} index @param {any} block @param {any} values @param {number} most */
    const draw = (index, block, values, most) => {
      const first = index % 2 === 0;
      const left = first ? label : 0;
      const high = index < 2 ? labelsHigh : 4;
      const at = (/** @type {number} */ i, /** @type {number} */ j) => i * study.keys + tile.k + j;
      four[index].draw({
        width: left + wide + 2, height: high + tile.rows * cellWide + 3,
        grid: { x: left, y: high, cell: cellWide, high: cellWide, rows: tile.rows,
          columns: tile.columns },
        value: (i, j) => values[at(i, j)],
        colour: (value) => weightColour(value, theme, false, most),
        hidden: (i, j) => !block.seen[at(i, j)], rowLabels: first ? names : null,
        columnLabels: index < 2 ? keyNames : null, firstRow: tile.q, firstKey: tile.k, size,
        labelRoom: label - 8, columnRoom: labelsHigh - 8, palette,
      });
      four[index].cross(cell);
    };
    const colours = rampOf("weights", theme).hex;
    const ramp = (/** @type {string[]} */ texts) => pictureSvg(rampPicture({ width: wide,
      left: label, size, texts, colour: (part) => colours[Math.round(part * 256)] }, palette));
    const pair = (/** @type {number} */ from, /** @type {any} */ title,
      /** @type {string[]} */ ends, /** @type {string} */ panel) => {
      const row = node("div", { class: "map-pair" },
        node("div", {}, from === 0 ? node("p", { class: "map-name" },
          t("whatif.model_is", { scale: modelName() })) : null, four[from].element),
        node("div", {}, from === 0 ? parts.nowNames[0] : null, four[from + 1].element));
      row.style.gap = `${between}px`;
      row.style.setProperty("--label", `${label}px`);
      return node("section", { class: "whatif-maps", "data-panel": panel },
        node("h2", {}, title), row, ramp(ends));
    };
    const thin = (/** @type {string} */ words) => node("span", { class: "thin" }, ` ${words}`);
    return {
      four, draw,
      element: node("div", {},
        pair(0, [t("whatif.weights"), thin(t("whatif.fixed_one"))], ["0", ".5", "1"], "weights"),
        pair(2, [t("whatif.gradient_map"), " ", mathNode({ i: "p" }, "(1−", { i: "p" }, ")"),
          thin(t("whatif.fixed_quarter"))], ["0", ".125", ".25"], "gradient")),
      /** Two maps with their names and their ramp, to be saved. @param {number} from */
      picture(from) {
        const [a, b] = [four[from].picture(), four[from + 1].picture()];
        const texts = from === 0 ? ["0", ".5", "1"] : ["0", ".125", ".25"];
        const scaleRamp = rampPicture({ width: wide, left: label, size, texts,
          colour: (part) => colours[Math.round(part * 256)] }, palette);
        const name = { size: 12, weight: 600 };
        return newPicture(a.width + 24 + b.width, a.height + 20 + scaleRamp.height)
          .text(label, 12, t("whatif.model_is", { scale: modelName() }),
            { ...name, fill: palette.ink })
          .text(a.width + 24, 12, parts.nowNames[0].textContent ?? "",
            { ...name, fill: palette.row })
          .put(a, 0, 18).put(b, a.width + 24, 18).put(scaleRamp, 0, a.height + 20);
      },
    };
  }

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
    const moved = movedCell(key, cell, { rows: study.n, keys: study.keys, seen: (q) => {
      const seen = rowOf(q).seen;
      return seen.includes(1) ? [seen.indexOf(1), seen.lastIndexOf(1)] : [0, seen.length - 1];
    } });
    if (!moved) return false;
    Object.assign(pinned, moved);
    const outside = moved.q < tile.q || moved.q >= tile.q + tile.rows || moved.k < tile.k
      || moved.k >= tile.k + tile.columns;
    context.set(moved, outside ? undefined : "drag");
    if (!outside) {
      context.point(moved); // the text box marks the row
      show(moved);
    }
    context.announce(cellWords(moved));
    return true;
  }

  // ------------------------------------------------------------ drawing

  function modelName() {
    return settingName(layer.scale);
  }

  /** A factor by its rule's short form, else as a number. @param {number} scale */
  function settingName(scale) {
    const tick = axis.ticks.find((x) => nearly(x.scale, scale));
    const short = { "1/d_k": `1/${layer.d_k}`, "1/sqrt_d_k": `1/√${layer.d_k}`,
      "1/sqrt_d_model": `1/√${sizes.dModel}`, none: t("whatif.no_scale") };
    return tick && tick.rule !== "model" ? /** @type {any} */ (short)[tick.rule]
      : shortNumber(scale);
  }

  /** The curves over the ticks of their slider, to be saved. */
  function curvesWithTicks() {
    const { left, right } = curveMeasures(leftWide, size);
    const p = newPicture(leftWide, pictures.curves.height + 2 * size + 14);
    p.put(pictures.curves, 0, 0);
    for (const tick of axis.ticks) {
      const part = Math.log(tick.scale / axis.low) / Math.log(axis.high / axis.low);
      const style = { size, anchor: /** @type {"middle"} */ ("middle"), fill: palette.ink2,
        weight: tick.own ? 700 : 400 };
      const x = left + part * (right - left);
      p.text(x, pictures.curves.height + size + 2, settingName(tick.scale), style);
      p.text(x, pictures.curves.height + 2 * size + 6,
        tick.own ? t("whatif.this_model") : shortNumber(Number(tick.scale.toPrecision(3))), style);
    }
    return p;
  }

  /** @type {any} */
  let now = null;
  /** @type {any} */
  let pictures = {};

  function update() {
    const settings = settingsOf(state, layer, sizes);
    const attention = attentionUnder(study.attention, settings);
    const block = stagesOf(attention, shownRows[0], shownRows[1], model.scores);
    const point = scaleCurves(attention, [attention.scale], queries);
    const key = JSON.stringify([settings.cap, settings.mask, settings.own]);
    if (key !== curved.key) {
      // At a scale of next to nothing every row is uniform: the largest entropy there can be.
      curved = { key, values: scaleCurves(attention, scales, queries),
        tops: scaleCurves(attention, [1e-9], queries) };
    }
    now = { settings, block, gradients: gradientsOf(block), point };
    slider.show(settings);
    controls.show(settings);
    parts.formula.replaceChildren(formulaOf(settings));
    parts.beyond.replaceChildren(...settings.out.map(([given, taken]) => node("p",
      { class: "problem", role: "alert" }, t("whatif.beyond", { given, taken }))));
    const words = [
      ["entropy", "entropy", 2], ["largestWeight", "largest", 3], ["gradient", "gradient", 3],
    ];
    pictures.curves = curvesPicture(words.map(([field, name, digits]) => {
      const top = field === "largestWeight" ? 1 : curved.tops[field][0];
      return { name: t(`whatif.curve_${name}`), values: curved.values[field], top,
        model: own[/** @type {"entropy"} */ (field)][0],
        now: point[/** @type {"entropy"} */ (field)][0], digits: /** @type {number} */ (digits),
        topText: fixed(top, 2) };
    }), { width: leftWide, size, low: axis.low, high: axis.high, scales,
      modelScale: layer.scale, nowScale: attention.scale, ticks: axis.ticks.map((x) => x.scale) },
    palette);
    parts.curves.replaceChildren(pictureSvg(pictures.curves, t("whatif.curves_label", {
      entropy: fixed(point.entropy[0], 2), largest: fixed(point.largestWeight[0], 3),
      gradient: fixed(point.gradient[0], 3) })));
    for (const [name, values] of Object.entries({ entropy: point.entropy,
      largest: point.largestWeight, gradient: point.gradient })) {
      parts.curves.dataset[name] = String(values[0]);
    }
    maps.draw(0, model, model.weights, 1);
    maps.draw(2, model, modelGradients, 0.25);
    maps.draw(1, block, block.weights, 1);
    maps.draw(3, block, now.gradients, 0.25);
    for (const name of parts.nowNames) {
      name.textContent = t("whatif.now_is", { scale: nowName(settings) });
    }
    parts.sentence.replaceChildren(...sentenceOf());
    show(cell);
  }

  /** @param {any} settings */
  function nowName(settings) {
    const names = [settingName(settings.scale)];
    if (settings.temperature !== 1) names.push(`T ${fixed(settings.temperature, 2)}`);
    return names.join(", ");
  }

  /** softmax( 0.125 · QKᵀ + mask ) V with what is chosen put in. @param {any} settings */
  function formulaOf(settings) {
    const factor = node("b", { class: "choice" }, shortNumber(settings.scale));
    const temperature = settings.temperature === 1 ? null
      : node("b", { class: "choice" }, ` ÷ ${fixed(settings.temperature, 2)}`);
    const inner = [factor, temperature, " · ", { i: "QK" }, { sup: "⊤" }]
      .filter((x) => x !== null);
    const cap = settings.cap === null ? inner : [`${shortNumber(settings.cap)} tanh( `, ...inner,
      ` ÷ ${shortNumber(settings.cap)} )`];
    const mask = settings.mask.kind === "none" ? [] : [` + ${t("whatif.mask_word")}`];
    return mathNode("softmax( ", ...cap, ...mask, " ) ", { i: "V" });
  }

  /** The live sentence: what changed, in numbers. @returns {any[]} */
  function sentenceOf() {
    const { settings, point, block } = now;
    const from = { largest: own.largestWeight[0], gradient: own.gradient[0] };
    const to = { largest: point.largestWeight[0], gradient: point.gradient[0] };
    if (!settings.changed) {
      return [rich("whatif.unchanged", { largest: node("b", {}, fixed(from.largest, 3)),
        gradient: node("b", {}, fixed(from.gradient, 3)) })];
    }
    const only = settings.temperature === 1 && settings.own
      && settings.cap === (layer.softcap ?? null);
    const lead = !only ? t("whatif.lead_settings") : nearly(settings.scale, 1)
      ? t("whatif.lead_none") : t("whatif.lead_scale", { scale: settingName(settings.scale) });
    const turnOf = (/** @type {number} */ a, /** @type {number} */ b) =>
      (Math.abs(a - b) < 5e-4 ? "stays" : b > a ? "rises" : "falls");
    const marked = (/** @type {number} */ x) => node("b", { class: "choice" }, weightDigits(x));
    const clause = (/** @type {"largest"|"gradient"} */ name) => rich(
      `whatif.${name}_${turnOf(from[name], to[name])}`,
      { from: fixed(from[name], 3), to: marked(to[name]) });
    const ratio = to.gradient < from.gradient ? from.gradient / to.gradient
      : to.gradient / from.gradient;
    const times = Math.abs(from.gradient - to.gradient) < 5e-4 || !Number.isFinite(ratio) ? ""
      : t(to.gradient < from.gradient ? "whatif.times_less" : "whatif.times_more",
        { n: ratio < 10 ? fixed(ratio, 1) : fixed(ratio, 0) });
    return [rich("whatif.sentence", { lead, largest: clause("largest"),
      gradient: clause("gradient"), times,
      order: t(orderKept(block) ? "whatif.order_same" : "whatif.order_not") })];
  }

  /** Whether what both see keeps its order in every shown row. @param {any} block */
  function orderKept(block) {
    const { keys } = study;
    for (let i = 0; i < tile.rows; i++) {
      const cut = (/** @type {any} */ values) => values.subarray(i * keys, (i + 1) * keys);
      const facts = scalingFacts(cut(model.scores), cut(block.capped ?? block.scaled),
        cut(block.seen));
      if (facts.kept !== facts.keys) return false;
    }
    return true;
  }

  /** @param {{q: number, k: number}} to */
  function cellWords(to) {
    const i = to.q - tile.q;
    if (!now || i < 0 || i >= tile.rows) return "";
    const at = i * study.keys + to.k;
    return t("whatif.cell", { query: labels[to.q], key: labels[to.k],
      before: weightDigits(model.weights[at]), now: weightDigits(now.block.weights[at]) });
  }

  /** @param {{q: number, k: number}} to */
  function show(to) {
    cell = { ...to };
    for (const map of maps.four) map.cross(cell);
    const i = Math.min(tile.rows - 1, Math.max(0, cell.q - tile.q));
    const found = heaviestKeys(now.block, i);
    const keys = new Set(found.keys);
    if (model.seen[i * study.keys + cell.k]) keys.add(cell.k);
    const lines = [...keys].sort((a, b) => a - b).map((j) => ({ label: labels[j],
      before: model.weights[i * study.keys + j], now: now.block.weights[i * study.keys + j],
      chosen: j === cell.k }));
    pictures.row = dumbbellPicture(lines, { width: leftWide, size }, palette);
    parts.row.replaceChildren(pictureSvg(pictures.row,
      t("whatif.row_label", { query: labels[tile.q + i] })));
    parts.rowHeading.replaceChildren(rich("whatif.row", {
      query: node("span", { class: "choice" }, tokenInWords(labels[tile.q + i], t)),
      model: node("span", { class: "thin" }, ` ○ ${modelName()}`),
      now: node("span", { class: "thin" }, " ", node("span", { class: "whole" },
        node("span", { class: "choice" }, "● "), t("whatif.now"))) }));
  }

  update();
  context.onPoint((/** @type {any} */ found) => {
    const inside = found && found.q >= tile.q && found.q < tile.q + tile.rows;
    show(inside ? { q: found.q, k: found.k ?? Math.max(0, rowOf(found.q).topKey) } : pinned);
  });
  context.onCopy(() => {
    const i = cell.q - tile.q;
    return String(now.block.weights[i * study.keys + cell.k]);
  });
  context.onSave(() => {
    const name = panel?.dataset.panel ?? "curves";
    const picture = name === "weights" ? maps.picture(0) : name === "gradient" ? maps.picture(2)
      : name === "chance" ? chance.picture() : name === "row" ? pictures.row : curvesWithTicks();
    const heading = (panel ?? root).querySelector("h2")?.textContent ?? "";
    return { title: heading, name: `scaledot-layer${layer.index}-head`
      + `${layer.heads[state.head].index}-whatif-${name}`, picture };
  });
  return () => chance.end();
}

/**
 * The axis of scales: from below the smallest rule to above the largest, with a tick for each rule
 * and for the model's own factor. Fixed for a head, whatever is chosen.
 *
 * @param {any} layer @param {{dModel: number|null}} sizes
 */
export function scaleAxis(layer, sizes) {
  /** @type {{rule: string, scale: number, own: boolean}[]} */
  const ticks = [];
  for (const rule of TICK_RULES) {
    if (rule === "1/sqrt_d_model" && !sizes.dModel) continue;
    const scale = scaleFactor(rule, layer.d_k, sizes);
    if (ticks.some((x) => nearly(x.scale, scale))) continue;
    ticks.push({ rule, scale, own: nearly(scale, layer.scale) });
  }
  const usable = layer.scale > 0 && Number.isFinite(layer.scale);
  if (usable && !ticks.some((x) => x.own)) {
    ticks.push({ rule: "model", scale: layer.scale, own: true });
  }
  ticks.sort((a, b) => a.scale - b.scale);
  return { low: ticks[0].scale / 4, high: ticks[ticks.length - 1].scale * 2, ticks };
}

/** @param {number} a @param {number} b @param {number} [within] */
function nearly(a, b, within = 1e-4) {
  return Math.abs(a - b) <= within * Math.max(Math.abs(a), Math.abs(b));
}

/** A rule as a formula. @param {{rule: string}} tick @param {any} t */
function ruleName(tick, t) {
  switch (tick.rule) {
    case "1/d_k": return ["1/", symbol("d", "k")];
    case "1/sqrt_d_k": return ["1/√", symbol("d", "k")];
    case "1/sqrt_d_model": return ["1/√", symbol("d", "model", true)];
    case "none": return t("whatif.none");
    default: return "α";
  }
}

/** Values of a slider of 200 steps on a log axis; with `off` the last step is null.
 *  @param {number[]} range @param {boolean} [off] */
function logSlider([low, high], off = false) {
  const last = off ? 196 : 200;
  return {
    value: (/** @type {number} */ step) =>
      (off && step > last ? null : low * (high / low) ** (step / last)),
    place: (/** @type {number|null} */ value) => (value === null ? 200
      : Math.round(last * Math.min(1, Math.max(0, Math.log(value / low) / Math.log(high / low))))),
  };
}
