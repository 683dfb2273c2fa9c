/** The list of keys that "?" opens. */

import { node } from "./words.js";

/** The table that "?" lists; the keys of a matrix are the matrix's own. */
const KEYS = [
  ["← ↑ → ↓", "shell.key_arrows"],
  ["Home End", "shell.key_ends"],
  ["Page Up, Page Down", "shell.key_pages"],
  ["Enter", "shell.key_enter"],
  ["[ ]", "shell.key_head"],
  ["{ }", "shell.key_layer"],
  ["1 – 5", "shell.key_stage"],
  ["c", "shell.key_copy"],
  ["Ctrl Enter", "shell.key_measure"],
  ["Esc", "shell.key_up"],
  ["?", "shell.key_list"],
];

/** Opens the list of keys. */
export function showKeys(dialog, t) {
  const rows = KEYS.map(([keys, key]) =>
    node("tr", {}, node("th", { scope: "row" }, node("kbd", {}, keys)), node("td", {}, t(key))),
  );
  dialog.setAttribute("aria-label", t("shell.keys"));
  dialog.replaceChildren(
    node("h2", {}, t("shell.keys")),
    node("table", {}, node("tbody", {}, rows)),
    node("button", { type: "button", click: () => dialog.close() }, t("shell.close")),
  );
  dialog.showModal();
}
