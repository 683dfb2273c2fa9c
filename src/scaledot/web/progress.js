/** A measurement that runs: layers and time, a small grid that fills as layers come, the way out. */

import { newPicture, pictureSvg } from "./draw.js";
import { axisOf, cellColour, statisticOf } from "./strip.js";
import { node } from "./words.js";

const WIDEST_CELL = 24;
const TALLEST_GRID = 160;
const LEAST_CELL = 3;

/**
 * @param {HTMLElement} root
 * @param {object} told  done, total, elapsed (seconds), layers: those measured, as in a document
 * @param {object} app  t, state, theme, palette, heads (of the model)
 * @param {(keep: boolean) => void} stop
 */
export function showMeasuring(root, { done, total, elapsed, layers }, app, stop) {
  const { state, t } = app;
  const known = Number.isFinite(done) && done > 0;
  const bar = node("progress", { "aria-label": t("shell.measuring") });
  if (known) Object.assign(bar, { max: total, value: done });
  const values = { s: Math.floor(elapsed), left: Math.ceil((elapsed / done) * (total - done)) };
  const title = known ? t("shell.measuring_layer", { done, total }) : t("shell.measuring");
  const line = node("div", { class: "progress-line" }, node("b", {}, title),
    node("span", {}, t(known ? "shell.so_far_left" : "shell.so_far", values)));
  const shown = node("div", { class: "progress-shown" }, line, bar);
  if (known) {
    const width = root.clientWidth;
    const label = t("shell.so_far_grid", { stat: t(`model.stat_${state.stat}`) });
    shown.append(node("div", { class: "progress-grid", "data-layers": layers.length },
      pictureSvg(soFarPicture(layers, total, width, app), label)));
  }
  // The button stays the same element: replaced between press and release it would lose the click.
  const button = root.querySelector("button") ?? node("button", {
    type: "button", class: "link", "data-focus": "stop",
    click: (event) => stop("keep" in event.currentTarget.dataset),
  });
  button.toggleAttribute("data-keep", known);
  button.textContent = known ? t("shell.stop_keep", { n: done }) : t("shell.stop");
  if (button.isConnected) {
    root.querySelector(".progress-shown").replaceWith(shown);
    root.querySelector(".progress-note").textContent = known ? t("shell.appear") : "";
  } else {
    root.replaceChildren(shown, node("p", { class: "progress-foot" },
      node("span", { class: "progress-note" }, known ? t("shell.appear") : ""), " ", button));
  }
}

/** One column a layer, one row a head; what is not measured yet is an empty frame. */
function soFarPicture(layers, total, width, { heads, palette, state, theme }) {
  const values = layers.flatMap((x) => x.heads.map((h) => statisticOf(h, state.stat)));
  const axis = axisOf(state.stat, values);
  const cell = Math.max(LEAST_CELL, Math.min(WIDEST_CELL, width / total));
  const high = Math.max(LEAST_CELL, Math.min(Math.round(cell), Math.floor(TALLEST_GRID / heads)));
  const picture = newPicture(Math.round(total * cell), heads * high);
  for (let l = 0; l < total; l++) {
    const there = layers[l]?.heads ?? [];
    const left = Math.round(l * cell); // whole pixels, as wide as the bar above
    const wide = Math.round((l + 1) * cell) - left;
    for (let h = 0; h < heads; h++) {
      const colour = there[h]
        ? cellColour(theme, state.stat, statisticOf(there[h], state.stat), axis) : null;
      if (colour) picture.rect(left, h * high, wide - 1, high - 1, colour);
      else picture.rect(left + 0.5, h * high + 0.5, wide - 2, high - 2, null, palette.rule);
    }
  }
  return picture;
}
