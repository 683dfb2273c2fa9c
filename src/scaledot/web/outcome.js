/** What a layer comes to: what each head adds to the chosen row, and the next token. */

import { axisSize, fitWords, newPicture, pictureSvg, wordsWidth } from "./draw.js";
import { tokenLabel } from "./matrix.js";
import { fixed, node, symbol, tokenInWords, visiblePieces, weightDigits } from "./words.js";

/** Horizontal bars with their numbers: {label, value, words, yours, hatched}. */
function barsPicture(bars, width, palette) {
  const style = { size: axisSize() + 1, fill: palette.ink };
  const widest = Math.max(...bars.map((x) => wordsWidth(x.label, { ...style, weight: 600 })));
  const label = Math.min(Math.max(56, Math.ceil(widest)), width / 3);
  const numbers = Math.ceil(Math.max(...bars.map((x) => wordsWidth(x.words, style)))) + 8;
  const room = Math.max(20, Math.min(436, width - label - 8 - numbers));
  const most = Math.max(...bars.map((x) => x.value), 0) || 1;
  const pitch = bars.length > 16 ? 18 : 22;
  const picture = newPicture(width, bars.length * pitch);
  for (const [i, bar] of bars.entries()) {
    const y = i * pitch + 4;
    const long = Math.max(1, (bar.value / most) * room);
    const x = label + 8;
    if (bar.hatched) {
      picture.rect(x + 0.5, y + 0.5, long, 13, null, palette.rule2);
      picture.hatch([[x, y, long, 14]], palette.hatch);
    } else picture.rect(x, y, long, 14, bar.yours ? palette.row : palette.seq);
    picture.text(label, y + 11, fitWords(bar.label, label, style), {
      ...style, anchor: "end", weight: bar.yours ? 700 : 400,
      fill: bar.yours ? palette.row : bar.hatched ? palette.ink2 : palette.ink,
    });
    picture.text(x + long + 6, y + 11, bar.words, {
      ...style, fill: bar.hatched ? palette.ink2 : palette.ink,
    });
  }
  return picture;
}

const partWidth = () => {
  const parts = document.querySelector(".layer-parts");
  const whole = parts?.clientWidth ?? 600;
  return innerWidth < 900 ? whole : Math.floor((whole - 32) * 0.46);
};

/** How long what each head adds to the chosen row is, after W_O. */
export function addedPart(shared, contributions) {
  const { context, layer, palette, studies } = shared;
  const { rich, state, t, text } = context;
  const token = node("span", { class: "yours" },
    tokenInWords(tokenLabel(text.tokens[state.q]), t));
  const part = node("section", {}, node("h2", {}, rich("layer.adds", { token })));
  if (contributions === null) {
    part.append(node("p", {}, t("layer.no_projection")));
    return part;
  }
  const heads = studies.length;
  const lengths = Array.from(
    contributions.data.subarray(state.q * heads, (state.q + 1) * heads),
  );
  const order = lengths.map((_, h) => h).sort((a, b) => lengths[b] - lengths[a]);
  const values = { wo: symbol("W", "O", true), first: layer.heads[order[0]].index,
    second: layer.heads[order[1] ?? 0].index };
  const bars = lengths.map((value, h) => ({
    label: t("layer.head", { n: layer.heads[h].index }), value, words: fixed(value, 2),
    yours: h === state.head,
  }));
  const said = bars.map((x) => `${x.label} ${x.words}`).join(", ");
  part.append(node("p", {}, rich(heads > 1 ? "layer.adds_note" : "layer.adds_one", values)),
    node("div", { class: "bars" }, pictureSvg(barsPicture(bars, partWidth(), palette), said)));
  return part;
}

/** What a causal model would say next. */
export function nextPart(shared) {
  const { context, palette } = shared;
  const { t, text } = context;
  const part = node("section", {}, node("h2", {}, t("layer.next")));
  if (!text.next) {
    const { causal } = context.document.model;
    part.append(node("p", {}, t(causal ? "layer.no_predictor" : "layer.not_causal")));
    return part;
  }
  const end = [...text.text.slice(-120)];
  const last = end.length > 60 ? `…${end.slice(-59).join("")}` : text.text;
  const shown = visiblePieces(last).map((x) => x.text).join("");
  const bars = text.next.tokens.map(([label, p]) => ({
    label: label.replace(/^␣(?=.)/, ""), value: p, words: weightDigits(p), yours: false,
  }));
  bars.push({ label: t("layer.others"), value: text.next.others,
    words: weightDigits(text.next.others), yours: false, hatched: true });
  const said = bars.map((x) => `${x.label} ${x.words}`).join(", ");
  part.append(node("p", { dir: "auto" }, t("layer.after", { text: shown })),
    node("div", { class: "bars" }, pictureSvg(barsPicture(bars, partWidth(), palette), said)));
  return part;
}
