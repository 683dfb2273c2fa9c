/**
 * The text box: the reader's own text in a <textarea> while it is edited, its tokens underlined
 * otherwise. A click on a token picks its row; typing is told to the shell 250 ms after it stops,
 * Ctrl+Enter at once.
 */

import { node, visibleNodes } from "./words.js";

const TYPING_PAUSE = 250; // milliseconds
const RIGHT_TO_LEFT =
  /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
const SHOWN_TOKENS = 96; // more than these are shown around the chosen one, on one line
const AT_THE_END = 24; // so many at least, where the chosen one is among the last

/**
 * Tokens as the text box shows them: the byte tokens of one character are one piece, standing for
 * the first of them; white space in front is kept apart, since only the word is underlined.
 *
 * @param {{label: string, text: string, part: number[]|null, char: string|null}[]} tokens
 * @returns {{first: number, last: number, space: string, text: string, lang: string|null}[]}
 */
export function tokenRuns(tokens) {
  const runs = [];
  for (const [i, token] of tokens.entries()) {
    if (token.part && token.part[0] > 1 && runs.length > 0) {
      runs.at(-1).last = i;
      continue;
    }
    const whole = token.part && token.char ? token.char : token.text || token.label;
    const space = /^ */.exec(whole)[0];
    const text = whole.slice(space.length) || "␣";
    runs.push({ first: i, last: i, space, text, lang: token.lang ?? null });
  }
  return runs;
}

/** The runs that fit one line of a long text: all, or those around the chosen token. */
export function shownRuns(runs, chosen, limit = SHOWN_TOKENS) {
  if (runs.length <= limit) return { runs, before: false, after: false };
  const place = Math.max(0, runs.findIndex((x) => x.first <= chosen && chosen <= x.last));
  const from = place < limit / 2 ? 0
    : Math.max(0, Math.min(place - 6, runs.length - Math.min(AT_THE_END, limit)));
  const shown = runs.slice(from, from + limit);
  return { runs: shown, before: from > 0, after: from + limit < runs.length };
}

const CLOSING = /^[\p{Pe}\p{Pf}、。，．！？!?,.;:]/u;
const SPACED = "[\\p{Script=Latin}\\p{Script=Greek}\\p{Script=Cyrillic}\\p{M}]";
const WITHIN_WORD = new RegExp(`^${SPACED}+\n${SPACED}`, "u");

/** Whether a line may end between two tokens without a space: not within a word, nor before what
 *  closes a sentence. */
export function mayPart(before, after) {
  return !CLOSING.test(after) && !WITHIN_WORD.test(`${before}\n${after}`);
}

/**
 * @param {HTMLElement} root
 * @param {{onText: (text: string) => void, onPick: (token: number) => void,
 *   onPoint: (token: number|null) => void}} listeners
 */
export function makeTextBox(root, listeners) {
  const area = node("textarea", {
    rows: 1,
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    id: "typed",
  });
  const tokens = node("div", { class: "tokens", dir: "auto" });
  const box = node("div", { class: "text-box" }, area, tokens);
  root.append(box);
  let waiting = null;
  let known = "";

  const tell = () => {
    clearTimeout(waiting);
    waiting = null;
    if (area.value !== known) {
      known = area.value;
      listeners.onText(known);
    }
  };
  const grow = () => {
    area.style.height = "0";
    area.style.height = `${Math.min(area.scrollHeight, 220)}px`;
  };
  const edit = () => {
    if (area.readOnly) return;
    box.classList.add("editing");
    grow();
  };
  area.addEventListener("focus", edit);
  area.addEventListener("input", () => {
    grow();
    clearTimeout(waiting);
    waiting = setTimeout(tell, TYPING_PAUSE);
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      tell();
    } else if (event.key === "Escape") {
      area.blur();
      event.stopPropagation();
    }
  });
  area.addEventListener("blur", () => {
    if (waiting !== null) tell();
    box.classList.remove("editing");
  });
  tokens.addEventListener("click", (event) => {
    const token = event.target.closest("[data-token]");
    if (token !== null) listeners.onPick(Number(token.dataset.token));
    else area.focus();
  });
  tokens.addEventListener("dblclick", () => area.focus());
  tokens.addEventListener("pointerover", (event) => {
    const token = event.target.closest("[data-token]");
    listeners.onPoint(token === null ? null : Number(token.dataset.token));
  });
  tokens.addEventListener("pointerleave", () => listeners.onPoint(null));

  return {
    area,
    /** What stands in the box; the tokens, and which of them is chosen (null: none). */
    show({ typed, runs, chosen, readOnly, label, placeholder }) {
      area.readOnly = readOnly;
      area.setAttribute("aria-label", label);
      area.placeholder = placeholder;
      // While it is typed in, only a text that came from elsewhere (Back, a tab) may replace it.
      const elsewhere = waiting === null && typed !== known;
      if (document.activeElement !== area || elsewhere) {
        area.value = typed;
        known = typed;
        if (document.activeElement === area) grow();
      }
      box.classList.toggle("read-only", readOnly);
      box.classList.toggle("tokenised", runs.length > 0 && (readOnly || typed.length > 0));
      box.classList.toggle("spaceless", runs.every((x) => x.space === ""));
      const shown = shownRuns(runs, chosen ?? 0);
      box.classList.toggle("one-line", shown.runs.length < runs.length);
      tokens.replaceChildren();
      if (shown.before) tokens.append("… ");
      let into = tokens;
      let before = "";
      for (const run of shown.runs) {
        const picked = chosen !== null && run.first <= chosen && chosen <= run.last;
        // What is written from right to left is isolated, its tokens together in their own order.
        if (!RIGHT_TO_LEFT.test(run.text)) into = tokens;
        else if (into === tokens) into = tokens.appendChild(node("bdi", { class: "from-right" }));
        if (run.space) into.append(" ");
        else if (mayPart(before, run.text)) into.append(node("wbr"));
        before = run.text;
        into.append(
          node(
            "span",
            { class: picked ? "token chosen" : "token", "data-token": run.first, lang: run.lang },
            visibleNodes(run.text),
          ),
        );
      }
      if (shown.after) tokens.append(" …");
      const token = tokens.querySelector(".chosen");
      tokens.scrollLeft = token === null ? 0
        : Math.max(0, token.offsetLeft + token.offsetWidth + 24 - tokens.clientWidth);
    },
    /** The token under the pointer elsewhere on the page. */
    point(token) {
      for (const shown of tokens.querySelectorAll(".pointed")) shown.classList.remove("pointed");
      if (token === null) return;
      const all = [...tokens.querySelectorAll("[data-token]")];
      all.filter((x) => Number(x.dataset.token) <= token).at(-1)?.classList.add("pointed");
    },
    /** Whether the reader is typing: what comes in must not move under the caret. */
    editing: () => document.activeElement === area,
  };
}
