/** The findings beside the grid: most serious first, linked both ways with their cells. */

import { node, translated } from "./words.js";

const LINKS_SHOWN = 6;
/** Patterns of a finding's sentence, at most. */
const PATTERNS = 4;
const ROLES = [
  "previous", "next", "current", "first", "local", "duplicate", "delimiter", "induction", "broad",
];

/**
 * @param {{context: import("./app.js").Context, aside: HTMLElement,
 *   preview: (layer: number, head: number) => void}} view  preview: of a head that is pointed at
 */
export function showFindings(view) {
  const { context, aside } = view;
  const { text, t } = context;
  aside.append(node("h2", {}, t("model.findings"), " ", node("span", {}, text.findings.length)));
  if (text.findings.length === 0) aside.append(node("p", { class: "note" }, t("model.nothing")));
  else aside.append(node("ol", {}, text.findings.map((x) => findingItem(view, x))));
}

/** Kinds whose sentences name heads as "13.8"; in the others such a text may be a number. */
const NAMING = ["variance", "saturation", "sharp", "sink", "roles", "roles_item", "induction",
  "structure", "uniform", "values", "range", "storage"];

/** "layer 13 head 8" for a placeholder's text "13.8", where such a head is there. */
function placeWords(context, id, name, text) {
  const found = /^(\d+)\.(\d+)$/.exec(text);
  if (found === null || !["b", "d", "h"].includes(name) || !NAMING.includes(id)) return text;
  const [layer, head] = [Number(found[1]), Number(found[2])];
  const heads = context.text.layers.find((x) => x.index === layer)?.heads ?? [];
  const there = heads.some((x) => x.index === head);
  return there ? context.t("model.place", { layer, head }).replaceAll(" ", "\u00a0") : text;
}

/** The page's numbers start with a digit: 0.17 for the terminal's .17. */
function pageWords(words) {
  return words.replace(/(?<![\d.])\.(?=\d)/g, "0.").replace(/^(Head )?layer/, "Layer");
}

/**
 * A finding's words. They come in English; in another language each sentence that fits a pattern of
 * its kind is said in that language. Where one fits none, all stays English and is marked as such.
 */
function findingWords(context, finding) {
  const patterns = (stem, sentence, value) => {
    for (let i = 1; i <= PATTERNS; i++) {
      const key = `finding.${stem}_${i}`;
      const words = translated(context.english(key), context.t(key), sentence, value);
      if (words !== null) return words;
    }
    return null;
  };
  const role = (name) => {
    const known = ROLES.find((x) => context.english(`model.role_${x}`) === name);
    return known ? context.t(`model.role_${known}`) : (patterns("near", name) ?? name);
  };
  const part = (name, text) => {
    if (name === "role") return text.replace(/^.*(?= \S+$)/, role);
    if (name !== "items") return placeWords(context, finding.id, name, text);
    const items = text.split("; ").map((x) => patterns(`${finding.id}_item`, x, part) ?? x);
    return items.join(context.language === "ja" ? "、" : "; ");
  };
  const say = (name) => {
    const words = finding[name];
    const stem = `${finding.id}_${name}`;
    // Sentence by sentence first: a pattern of one would take in those that follow.
    const each = words.split(/(?<=\.) (?=\S)/).map((x) => patterns(stem, x, part));
    const said = each.includes(null) ? patterns(stem, words, part)
      : each.join(context.language === "ja" ? "" : " ");
    const lang = said === null && context.language !== "en" ? "en" : null;
    return { words: pageWords(said ?? words), lang };
  };
  return { title: say("title"), seen: say("seen"), means: say("means") };
}

function findingItem(view, finding) {
  const { context } = view;
  const { t, text } = context;
  const said = findingWords(context, finding);
  const links = finding.heads.slice(0, LINKS_SHOWN).map(([l, h]) => {
    const layer = text.layers.findIndex((x) => x.index === l);
    const head = text.layers[layer]?.heads.findIndex((x) => x.index === h) ?? 0;
    return node("a", {
      class: "link",
      href: "#",
      click: (event) => {
        event.preventDefault();
        context.set({ view: "head", layer, head });
      },
      pointerenter: () => view.preview(layer, head),
      pointerleave: () => view.preview(context.state.layer, context.state.head),
    }, t("model.place", { layer: l, head: h }));
  });
  const hidden = finding.heads.length - links.length;
  if (hidden > 0) links.push(node("span", {}, t("model.more_heads", { n: hidden })));
  const sure = t(`model.sure_${finding.sure}`);
  const action = finding.kind === "note" ? t("model.no_action") : null;
  links.push(node("span", {}, [sure, action].filter(Boolean).join(" · ")));
  return node("li", {
    class: finding.kind === "wrong" ? "finding wrong" : "finding",
    id: `finding-${finding.number}`,
    tabindex: "-1",
    pointerenter: () => markCells(view, finding.heads),
    pointerleave: () => markCells(view, []),
  },
  node("span", { class: "badge", "aria-hidden": "true" }, finding.number),
  node("div", {},
    node("h3", { lang: said.title.lang }, said.title.words),
    node("p", { lang: said.seen.lang }, said.seen.words),
    node("p", { lang: said.means.lang }, said.means.words),
    node("div", { class: "places" }, links)));
}

/** Marks the findings of these numbers, and no others. */
export function markFindings(view, numbers) {
  for (const item of view.aside.querySelectorAll(".finding")) {
    item.classList.toggle("marked", numbers.includes(Number(item.id.replace("finding-", ""))));
  }
}

function markCells(view, heads) {
  const names = new Set(heads.map(([l, h]) => `${l}/${h}`));
  const { layers } = view.context.text;
  for (const cell of document.querySelectorAll("#view .grid-cell")) {
    const name = `${layers[cell.dataset.layer]?.index}/${cell.dataset.head}`;
    cell.classList.toggle("linked", names.has(name));
  }
}

