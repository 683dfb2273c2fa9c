/** The header: the path Model › Layer › Head › What if is the navigation. */

import { VIEWS, changedState, formatFragment } from "./state.js";
import { modelName, node } from "./words.js";

/** A link to another state, which a click reaches without leaving the page. */
function stateLink({ raw, set }, changes, attributes, ...children) {
  const target = { ...changedState(raw, changes) };
  return node(
    "a",
    {
      href: formatFragment(target) || "#",
      ...attributes,
      click: (event) => {
        if (event.metaKey || event.ctrlKey || event.shiftKey) return;
        event.preventDefault();
        set(changes);
      },
    },
    ...children,
  );
}

/**
 * The header's parts: name, path, tools.
 *
 * @param {{document: object|null, text: object|null, raw: import("./state.js").State,
 *   t: Function, set: Function, save: (kind: string) => void}} app  raw: the state not settled
 * @param {import("./state.js").State} state
 * @param {HTMLElement} root  which is "open" where a phone shows its tools
 */
export function headerParts(app, state, root) {
  const { set, t, text } = app;
  const model = app.document?.model;
  const empty = text === null;
  const index = empty ? state.layer : (text.layers[state.layer]?.index ?? state.layer);
  const names = {
    model: [t("shell.model"), null],
    layer: [t("shell.layer_short"), index],
    head: [t("shell.head_short"), state.head],
    whatif: [t("shell.whatif"), null],
  };
  const steps = VIEWS.map((view) => {
    const [name, number] = names[view];
    const long = number === null ? null : node("span", { class: "wide" }, ` ${number}`);
    const current = view === state.view ? "page" : null;
    const choice = { view, layer: state.layer, head: state.head };
    const link = stateLink(app, view === "model" ? { view } : choice, {
      "aria-current": current,
      "data-focus": `path-${view}`,
    }, name, long);
    return node("li", {}, link);
  });
  const languages = [["en", "EN", "EN English"], ["ja", "日本語", "日本語"]].map(
    ([code, short, long]) =>
      node("button", {
        type: "button",
        lang: code,
        "aria-label": long,
        "aria-pressed": String(state.lang === code),
        "data-focus": `lang-${code}`,
        click: () => set({ lang: code }),
      }, short),
  );
  const other = state.theme === "dark" ? "light" : "dark";
  const tools = node(
    "div",
    { class: "tools", id: "tools" },
    empty && !app.document?.timeline ? null : saveMenu(app),
    node("button", {
      type: "button", class: "plain", "data-focus": "theme", click: () => set({ theme: other }),
    }, t(other === "dark" ? "shell.dark" : "shell.light")),
    node("div", { class: "segments", role: "group", "aria-label": t("shell.language") }, languages),
  );
  const more = node("button", {
    type: "button", class: "more", "aria-label": t("shell.more"), "aria-expanded": "false",
    "aria-controls": "tools", "data-focus": "more", click: (event) => {
      const open = root.classList.toggle("open");
      event.currentTarget.setAttribute("aria-expanded", String(open));
    },
  }, "⋯");
  if (root.classList.contains("open")) more.setAttribute("aria-expanded", "true");
  return [
    node("div", { class: empty ? "brand alone" : "brand" }, "scaledot"),
    model ? node("div", { class: "model-name" }, modelName(model, t)) : null,
    empty ? null : node("nav", { "aria-label": t("shell.path") }, node("ol", {}, steps)),
    more,
    tools,
  ].filter(Boolean);
}

function saveMenu({ save, t }) {
  const kinds = ["svg", "png"].map((kind) =>
    node("button", {
      type: "button", class: "plain", "data-focus": `save-${kind}`, click: () => save(kind),
    }, kind.toUpperCase()),
  );
  return node(
    "details",
    { class: "save" },
    node("summary", { "data-focus": "save" }, t("shell.save")),
    node("div", { class: "save-kinds" }, kinds),
  );
}
