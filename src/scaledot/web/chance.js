// @ts-check
/**
 * Why the square root: random q and k of five sizes, drawn in the page from a seed that is shown.
 * Theory is a tick, what was measured a bar; neither is the reader's choice, so none is raspberry.
 */

import { PALETTES } from "./colour.js";
import { chancePicture } from "./curves.js";
import { newPicture, pictureSvg } from "./draw.js";
import { drawProducts, drawSoftmaxes, histogramOf } from "./stages.js";
import { fixed, node, symbol } from "./words.js";

const SIZES = [4, 16, 64, 256, 1024];
/** Where five columns have no room. */
const NARROW_SIZES = [4, 64, 1024];
const PAIRS = 5000;
const SOFTMAX_KEYS = 8;
const SOFTMAX_DRAWS = 400;
const RULER = 100;
const RULER_BINS = 100;
export const FIRST_SEED = 20260714;

/** What was drawn, by seed and size: a change of theme or language draws nothing anew.
 *  @type {Map<string, any>} */
const drawnBefore = new Map();
const DRAWN_KEPT = 40;

/** @param {number} dK @param {number} seed */
function drawnOf(dK, seed) {
  const key = `${seed}/${dK}`;
  let drawn = drawnBefore.get(key);
  if (drawn === undefined) {
    const products = drawProducts(dK, PAIRS, seed);
    const softmaxes = drawSoftmaxes(dK, SOFTMAX_KEYS, SOFTMAX_DRAWS, seed);
    const { counts } = histogramOf(products.values, -RULER, RULER, RULER_BINS);
    drawn = { counts, limit: RULER, sd: products.sd, theory: products.theory, raw: softmaxes.raw,
      scaled: softmaxes.scaled, first: softmaxes.first };
    drawnBefore.set(key, drawn);
    if (drawnBefore.size > DRAWN_KEPT) drawnBefore.delete([...drawnBefore.keys()][0]);
  }
  return drawn;
}

/** "s.d. 7.91 theory √64 = 8" with the measured number in bold, in either language's order.
 *  @param {any} t @param {number} dK @param {any} drawn @param {(x: number) => any} bold */
function sdRuns(t, dK, drawn, bold) {
  const mark = "\u0000";
  const [before, after] = t("whatif.chance_sd", { sd: mark, d: dK,
    theory: fixed(drawn.theory, 0) }).split(mark);
  return [before, bold(drawn.sd), after];
}

/** @param {any} context @param {{width: number, size: number, kind: string, seed: number,
 *  onSeed: (seed: number) => void}} options */
export function chancePart(context, options) {
  const { t, rich, theme } = context;
  const palette = PALETTES[/** @type {"light"|"dark"} */ (theme)];
  const phone = options.kind === "phone";
  const sizes = options.kind === "wide" ? SIZES : NARROW_SIZES;
  const width = phone ? options.width
    : Math.floor((options.width - 24 * (sizes.length - 1)) / sizes.length);
  let { seed } = options;
  let over = false;
  const input = node("input", { type: "text", inputmode: "numeric", class: "seed", value: seed,
    maxlength: 12, "aria-label": t("whatif.seed"), "data-focus": "seed" });
  const again = node("button", { type: "button", "data-focus": "again",
    click: () => start(seed + 1) }, t("whatif.again"));
  const columns = sizes.map((dK) => ({
    dK, figure: node("div", { class: "figure" }),
  }));
  /** @type {any[]} */
  let pictures = [];
  const element = node("section", { "data-panel": "chance" },
    node("div", { class: "chance-head" }, node("h2", {}, t("whatif.chance")),
      node("div", { class: "chance-seed" },
        node("label", {}, t("whatif.pairs", { n: PAIRS.toLocaleString("en") }), input), again)),
    node("p", { class: "note" }, rich("whatif.chance_note", {
      qk: node("span", { class: "formula" }, node("i", {}, "q·k")),
      sd: node("b", {}, t("whatif.measured_sd")),
      root: node("span", { class: "formula" }, "±√", symbol("d", "k")), keys: SOFTMAX_KEYS,
      draws: SOFTMAX_DRAWS })),
    node("div", { class: "chance-columns" }, columns.map((one) =>
      node("div", {}, node("p", { class: "chance-size" }, symbol("d", "k"), ` = ${one.dK}`),
        one.figure))));
  element.style.setProperty("--columns", String(phone ? 1 : sizes.length));
  input.addEventListener("change", () => {
    const typed = Number(/** @type {any} */ (input).value.trim());
    if (Number.isSafeInteger(typed) && typed >= 0) start(typed);
    else /** @type {any} */ (input).value = String(seed);
  });

  /** @param {number} next */
  async function start(next) {
    seed = next;
    /** @type {any} */ (input).value = String(seed);
    options.onSeed(seed);
    pictures = [];
    for (const { dK, figure } of columns) {
      if (!drawnBefore.has(`${seed}/${dK}`)) await new Promise((resolve) => setTimeout(resolve));
      if (over || seed !== next) return;
      const drawn = drawnOf(dK, seed);
      const bold = (/** @type {number} */ x) => ({ t: fixed(x, 2), weight: 700,
        fill: palette.ink });
      const picture = chancePicture(drawn, { width, size: options.size, words: {
        sd: sdRuns(t, dK, drawn, bold),
        raw: [`${t("whatif.raw")} `, bold(drawn.raw)],
        scaled: [`÷ √${dK} `, bold(drawn.scaled)] } }, palette);
      pictures.push({ dK, picture });
      const label = t("whatif.chance_label", { d: dK, sd: fixed(drawn.sd, 2),
        theory: fixed(drawn.theory, 0), raw: fixed(drawn.raw, 2), scaled: fixed(drawn.scaled, 2) });
      figure.replaceChildren(pictureSvg(picture, label));
      figure.dataset.sd = String(drawn.sd);
    }
    if (next !== options.seed) context.announce(t("whatif.drawn", { seed }));
  }

  void start(seed);
  return {
    element,
    end() {
      over = true;
    },
    picture() {
      const high = Math.max(200, ...pictures.map((x) => x.picture.height));
      const p = newPicture(options.width, high + 28);
      pictures.forEach(({ dK, picture }, index) => {
        const x = index * (width + 24);
        p.text(x, 14, `d_k = ${dK}`, { size: 13, weight: 600, fill: palette.ink });
        p.put(picture, x, 24);
      });
      return p;
    },
  };
}
