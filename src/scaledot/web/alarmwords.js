/** What an alarm says, from its numbers, in the reader's language. */

import { alarmsByRule } from "./steps.js";
import { node, significant } from "./words.js";

const NORMS = { query: "‖q‖", key: "‖k‖" };
const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸",
  9: "⁹" };

/** Significant digits; of a number with many more places a power of ten: 8.7×10⁸. */
export function runNumber(x, digits) {
  const size = Math.abs(x);
  if (!Number.isFinite(x) || size === 0 || (size >= 1e-4 && size < 1e6)) {
    return significant(x, digits);
  }
  const [factor, power] = x.toExponential(digits - 1).split("e");
  const raised = [...power.replace("+", "")].map((c) => RAISED[c]).join("");
  return `${factor.replace("-", "−")}×10${raised}`;
}

/** A number of a document: one that is not finite comes as its name. */
function numberWords(x, measure) {
  if (typeof x !== "number") return x;
  return measure === "nonfinite" ? x.toLocaleString("en") : runNumber(x, 3);
}

function ruleWords({ t }, { line, measure, rule }) {
  if (line === null) return rule;
  const [[kind, x]] = Object.entries(line);
  return t(`timeline.rule_${kind}`, { measure: t(`timeline.${measure}`), x });
}

/** Why a head could cross a line; null where a file has no numbers of it. */
function causeWords({ t, language }, { cause }) {
  const { before, grown, now, rows, scale, since } = cause;
  if (rows !== undefined) {
    const n = rows.toLocaleString("en");
    return before === undefined ? t("timeline.cause_new", { n })
      : t("timeline.cause_rows", { n, x: runNumber(before, 4) });
  }
  const [comma, semicolon] = language === "ja" ? ["、", "。"] : [", ", "; "];
  const each = (factors, norm, alignment) => Object.entries(factors).map(([name, x]) =>
    t(name === "scale" ? "timeline.scale_times" : name in NORMS ? norm : alignment,
      { name: NORMS[name], x: runNumber(x, 3) })).join(comma);
  const parts = [
    scale === undefined ? null : t("timeline.cause_scale", { x: runNumber(scale, 3) }),
    grown && t("timeline.cause_grown", { step: since,
      factors: each(grown, "timeline.norm_times", "timeline.alignment_times") }),
    now && t("timeline.cause_now", {
      factors: each(now, "timeline.norm_now", "timeline.alignment_now") }),
  ].filter(Boolean);
  return parts.length === 0 ? null : parts.join(semicolon) + (language === "ja" ? semicolon : "");
}

/**
 * What alarms say, those of one rule together.
 *
 * @returns {{first: object, words: string, more: string[], why: string, lang: string|null}[]}  lang:
 *     of `why`, where that is not the reader's
 */
export function alarmSentences(context, alarms) {
  const { t } = context;
  const number = (x) => x.toLocaleString("en");
  return alarmsByRule(alarms).map(({ first, last, times }) => {
    const { action, also, head, layer, measure, path, step, value } = first;
    const words = t("timeline.alarm", { step: number(step), rule: ruleWords(context, first),
      value: numberWords(value, measure), head: `${layer}.${head}`, path });
    const done = { stop: "timeline.then_stop", save: "timeline.then_save",
      call: "timeline.then_call" }[action];
    const more = [also > 0 ? t("timeline.also", { n: number(also) }) : null,
      times > 1 ? t("timeline.times", { first: number(step), last: number(last), n: number(times) })
        : null, done ? t(done) : null].filter(Boolean);
    const why = causeWords(context, first) ?? first.why ?? t("timeline.cause_none");
    const lang = first.why === undefined || context.language === "en" ? null : "en";
    return { first, words, more, why, lang };
  });
}

/** Why, its norms in the face of formulas. */
export function whyNode({ why, lang }) {
  return node("p", { class: "note", lang }, why.split(/(‖[qk]‖)/).map((x) =>
    (x.startsWith("‖") ? node("span", { class: "formula" }, "‖", node("i", {}, x[1]), "‖") : x)));
}
