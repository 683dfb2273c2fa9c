/** Messages in two languages, numbers in the page's digits, and nodes made without HTML strings. */

/**
 * A message with its {placeholders} replaced. A key that is missing is shown as itself: a hole is
 * seen and never stops the page.
 *
 * @param {Record<string, string>} messages
 * @param {string} key
 * @param {Record<string, string|number>} [values]
 */
export function message(messages, key, values = {}) {
  const text = Object.hasOwn(messages, key) ? messages[key] : key;
  return text.replace(/\{(\w+)\}/g, (whole, name) =>
    Object.hasOwn(values, name) ? String(values[name]) : whole,
  );
}

/**
 * The same as nodes: a value may be a Node (a bold number, a formula) and stands where its
 * placeholder stood, in either language's order.
 *
 * @returns {DocumentFragment}
 */
export function messageNodes(messages, key, values = {}) {
  const text = Object.hasOwn(messages, key) ? messages[key] : key;
  const fragment = document.createDocumentFragment();
  for (const piece of text.split(/(\{\w+\})/)) {
    const name = /^\{\w+\}$/.test(piece) ? piece.slice(1, -1) : null;
    if (name !== null && Object.hasOwn(values, name)) {
      const value = values[name];
      fragment.append(value instanceof Node ? value : String(value));
    } else {
      fragment.append(piece);
    }
  }
  return fragment;
}

/**
 * An HTML element. Attributes: a function is a listener ("click"), true an empty attribute, false,
 * null and undefined leave it out. Children: nodes, strings, numbers, null.
 *
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...any} children
 * @returns {HTMLElement}
 */
export function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, String(value));
    }
  }
  const given = (x) => x !== null && x !== undefined && x !== false;
  made.append(...children.flat(Infinity).filter(given));
  return made;
}

/**
 * A sentence that fits the pattern `from` ("{m} of {n} heads"), said as `to` says it; null where it
 * does not fit. So a finding, which comes as English, is read in another language.
 *
 * @param {string} from
 * @param {string} to
 * @param {string} sentence
 * @param {(name: string, text: string) => string} [value]  how a placeholder's text is said
 */
export function translated(from, to, sentence, value = (name, text) => text) {
  const names = [];
  const pattern = from.split(/(\{\w+\})/).map((piece) => {
    if (!/^\{\w+\}$/.test(piece)) return piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    names.push(piece.slice(1, -1));
    return "(.+?)";
  });
  const found = new RegExp(`^${pattern.join("")}$`, "u").exec(sentence);
  if (found === null) return null;
  const values = names.map((x, i) => [x, value(x, found[i + 1])]);
  return message({ to }, "to", Object.fromEntries(values));
}

/** A formula's letter with its subscript, in the formula's face: d_k, W_O. */
export function symbol(letter, subscript, upright = false) {
  const below = node("sub", {}, upright ? subscript : node("i", {}, subscript));
  return node("span", { class: "formula" }, node("i", {}, letter), below);
}

/** A number with the minus sign U+2212 and this many decimals; NaN is the word. */
export function fixed(value, decimals) {
  if (value === null || value === undefined || Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const text = value.toFixed(decimals);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** Significant digits without an exponent: 130, 14, 2.1, 0.60, 0.0013. */
export function significant(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value) || value === 0) return value === 0 ? "0" : fixed(value, 0);
  const rounded = Number(value.toPrecision(digits));
  const places = digits - 1 - Math.floor(Math.log10(Math.abs(rounded)));
  return fixed(rounded, Math.max(0, Math.min(20, places)));
}

/** A weight: three decimals, and never 0.000 for one that is not zero. */
export function weightDigits(value) {
  return value > 0 && value < 0.0005 ? "< .001" : fixed(value, 3);
}

/** "1/√64 = 0.1250" where a rule gives the factor, the factor alone where none does. */
export function scaleText(layer) {
  const number = layer.scale === 1 ? "1" : fixed(layer.scale, layer.scale < 0.01 ? 6 : 4);
  const rule = layer.rule?.value ?? number;
  return rule === number ? number : `${rule} = ${number}`;
}

/** A model by its name; the embedded sample in the reader's language. */
export function modelName(model, t) {
  return model.embedded ? t("shell.embedded") : model.name;
}

/** A token within a sentence: one that is all marks (a full stop) is lost there without quotes. */
export function tokenInWords(label, t) {
  return /[\p{L}\p{N}]/u.test(label) ? label : t("shell.quoted", { token: label });
}

/** The message that names a role; "local.16" is one of the near ones. */
export function roleKey(role) {
  return `model.role_${role.name.split(".")[0]}`;
}

/** Kinds of characters without a glyph, save the joiners and tags that scripts and emoji need. */
const WITHOUT_GLYPH = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/u;
const NEEDED = /[\u200c\u200d\u{e0020}-\u{e007f}]/u;

/**
 * A text in pieces that can be shown: {text, code}, code marking a control or lone surrogate that
 * became its code point. A newline is ↵, a tab ⇥.
 *
 * @param {string} text
 * @returns {{text: string, code: boolean}[]}
 */
export function visiblePieces(text) {
  const pieces = [];
  for (const character of text) {
    const glyph = { "\n": "↵", "\t": "⇥" }[character];
    const code = !glyph && WITHOUT_GLYPH.test(character) && !NEEDED.test(character);
    const shown = code ? `U+${hexadecimal(character)}` : (glyph ?? character);
    if (code || pieces.length === 0 || pieces.at(-1).code) pieces.push({ text: shown, code });
    else pieces.at(-1).text += shown;
  }
  return pieces;
}

function hexadecimal(character) {
  return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** A text cut to so many characters, the last of them an ellipsis. */
export function shortText(text, most) {
  const characters = [...text.slice(0, 2 * most)];
  return characters.length <= most && text.length <= 2 * most ? text
    : `${characters.slice(0, most - 1).join("")}…`;
}

/** A text as nodes, its invisible characters as boxed code points. */
export function visibleNodes(text) {
  return visiblePieces(text).map((x) =>
    x.code ? node("span", { class: "code-point" }, x.text) : x.text,
  );
}
