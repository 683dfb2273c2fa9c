/**
 * The page's colours: palettes of both themes, scales that are piecewise linear in OKLab (Ottosson
 * 2020), and the statistics' domains. Zero lies near the page's colour, so that ink means
 * magnitude. Pure: nothing here draws.
 */

/** @typedef {"light" | "dark"} Theme */
/** @typedef {[number, number, number]} Rgb  0 … 255 each */

/** Named colours of each theme; style.css holds the same. */
export const PALETTES = {
  light: {
    bg: "#FBFBF8", raise: "#FFFFFF", ink: "#17191C", ink2: "#4A4F57", ink3: "#686E76",
    rule: "#E0E0DB", rule2: "#B7B9B4", row: "#B0125B", rowbg: "#FBEAF2", neg: "#2B6CB3",
    pos: "#B9570F", seq: "#12606C", hatch: "#8B9097", warn: "#8A3A04", errbg: "#FFF3E6",
  },
  dark: {
    bg: "#14161A", raise: "#1C1F24", ink: "#ECEDEE", ink2: "#B6BBC2", ink3: "#949AA3",
    rule: "#2C3036", rule2: "#50565F", row: "#FF86B6", rowbg: "#3A1D2B", neg: "#6FAEF2",
    pos: "#EE9A52", seq: "#6FBDB4", hatch: "#6B727B", warn: "#FFC58C", errbg: "#33240F",
  },
};

/** Stops of the scales: "signed" from − to + about its middle, "weights" from 0 to 1. */
export const RAMP_STOPS = {
  signed: {
    light: [
      "#08336B", "#2B6CB3", "#7DAEDC", "#CFE0EF", "#F4F4EF", "#F6DDC2", "#E3A265", "#B9570F",
      "#6E2E02",
    ],
    dark: [
      "#B5D8FF", "#5B9FE6", "#2A5C94", "#1D3147", "#1B1E23", "#46301E", "#8A5220", "#E08E44",
      "#FFD9AE",
    ],
  },
  weights: {
    light: ["#F4F4EF", "#CBE3DD", "#84BDB6", "#3A8D90", "#115C69", "#052B38"],
    dark: ["#1B1E23", "#16424B", "#1F6C74", "#4FA39F", "#9AD5C6", "#EDFBF0"],
  },
};

/** Steps of a scale. They lie between 257 colours, so that zero has the middle one exactly. */
export const RAMP_STEPS = 256;

/** Luminance above which text on a cell is black: both inks have 4.58:1 or more there. */
const BLACK_TEXT_FROM = 0.179;

/**
 * "#RRGGBB" as numbers.
 * @param {string} hex
 * @returns {Rgb}
 */
export function rgbOf(hex) {
  const bits = parseInt(hex.slice(1), 16);
  return [bits >> 16, (bits >> 8) & 255, bits & 255];
}

/** @param {ArrayLike<number>} rgb */
export function hexOf(rgb) {
  return `#${[0, 1, 2].map((c) => rgb[c].toString(16).padStart(2, "0")).join("").toUpperCase()}`;
}

function linearOf(channel) {
  const x = channel / 255;
  return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
}

function channelOf(linear) {
  const x = Math.min(Math.max(linear, 0), 1);
  return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
}

/**
 * An sRGB colour in OKLab.
 * @param {Rgb} rgb
 * @returns {[number, number, number]} lightness 0 … 1, green–red, blue–yellow
 */
export function oklabOf(rgb) {
  const [r, g, b] = rgb.map(linearOf);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function rgbOfOklab([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    channelOf(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    channelOf(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    channelOf(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

const rampsMade = new Map();

/**
 * The colours of a scale, RAMP_STEPS + 1 of them: red, green, blue after one another, for pixels,
 * and as "#RRGGBB". Made once.
 * @param {"signed" | "weights"} name
 * @param {Theme} theme
 * @returns {{rgb: Uint8ClampedArray, hex: string[]}}
 */
export function rampOf(name, theme) {
  const made = rampsMade.get(`${name} ${theme}`);
  if (made) return made;
  const stops = RAMP_STOPS[name][theme].map((hex) => oklabOf(rgbOf(hex)));
  const ramp = { rgb: new Uint8ClampedArray(3 * (RAMP_STEPS + 1)), hex: [] };
  for (let step = 0; step <= RAMP_STEPS; step++) {
    const place = (step / RAMP_STEPS) * (stops.length - 1);
    const left = Math.min(Math.floor(place), stops.length - 2);
    const part = place - left;
    const rgb = rgbOfOklab(stops[left].map((x, c) => x + part * (stops[left + 1][c] - x)));
    ramp.rgb.set(rgb, 3 * step);
    ramp.hex.push(hexOf(rgb));
  }
  rampsMade.set(`${name} ${theme}`, ramp);
  return ramp;
}

/**
 * Step of a signed value on a scale of ± limit, 128 for 0; beyond, the end's. −1 for NaN.
 * @param {number} value
 * @param {number} limit  0 for a head whose scores are all 0
 */
export function signedStep(value, limit) {
  if (Number.isNaN(value)) return -1;
  const half = RAMP_STEPS / 2;
  const part = value === 0 ? 0 : Math.min(Math.max(value / limit, -1), 1);
  return Math.round(half + half * part);
}

/**
 * Step of a value on a scale from 0 to `most`; beyond, the end's. −1 for NaN.
 * @param {number} value
 */
export function sequentialStep(value, most = 1) {
  if (Number.isNaN(value)) return -1;
  const part = value === 0 ? 0 : Math.min(Math.max(value / most, 0), 1);
  return Math.round(RAMP_STEPS * part);
}

/**
 * Step of a weight; a long text uses √weight, so that small ones are seen.
 * @param {number} weight  0 … 1
 * @param {boolean} root
 */
export function weightStep(weight, root = false) {
  return sequentialStep(root ? Math.sqrt(weight) : weight);
}

/**
 * The colour of a signed value on a scale of ± limit; null for NaN, which is a word, not a colour.
 * @param {number} value
 * @param {number} limit
 * @param {Theme} theme
 * @returns {string | null} "#RRGGBB"
 */
export function signedColour(value, limit, theme) {
  return rampOf("signed", theme).hex[signedStep(value, limit)] ?? null;
}

/**
 * The colour of a weight, or of what else lies between 0 and `most`; null for NaN.
 * @param {number} value
 * @param {Theme} theme
 * @param {boolean} root  by √value, as long texts are
 * @returns {string | null} "#RRGGBB"
 */
export function weightColour(value, theme, root = false, most = 1) {
  const part = value / most;
  return rampOf("weights", theme).hex[weightStep(part, root)] ?? null;
}

/** Variance at which the model grid is full blue, and full orange; 1 is the middle. */
export const VARIANCE_DOMAIN = [1 / 16, 128];

/**
 * Where a variance lies on the signed scale, −1 … 1, on a log axis about 1.
 * @param {number} variance
 */
export function variancePart(variance) {
  const [low, high] = VARIANCE_DOMAIN;
  const nats = Math.log(variance);
  const part = nats < 0 ? -nats / Math.log(low) : nats / Math.log(high);
  return Math.min(Math.max(part, -1), 1);
}

/**
 * Which scale a statistic of the model grid is drawn on, and its step there; −1 for NaN and null.
 * @param {string} statistic  a name of the page document's heads
 * @param {number | null} value
 * @param {number} most  of max_score: its rounded maximum
 * @returns {{ramp: "signed" | "weights", step: number}}
 */
export function statisticStep(statistic, value, most = 1) {
  const x = value ?? NaN;
  if (statistic.startsWith("score_var")) {
    return { ramp: "signed", step: signedStep(variancePart(x), 1) };
  }
  return { ramp: "weights", step: sequentialStep(x, statistic === "max_score" ? most : 1) };
}

/**
 * The colour of a statistic of the model grid; null where there is no number.
 * @param {string} statistic
 * @param {number | null} value
 * @param {Theme} theme
 * @param {number} most  of max_score
 * @returns {string | null} "#RRGGBB"
 */
export function statisticColour(statistic, value, theme, most = 1) {
  const { ramp, step } = statisticStep(statistic, value, most);
  return rampOf(ramp, theme).hex[step] ?? null;
}

/**
 * The smallest of 1, 2, 5, 10, 20 … that no value exceeds: the end of an axis. 1 for none.
 * @param {Iterable<number | null>} values
 */
export function roundedMaximum(values) {
  let most = 0;
  for (const x of values) if (x !== null && Number.isFinite(x) && x > most) most = x;
  if (most === 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10, 20].map((x) => x * unit).find((x) => x >= most) ?? 20 * unit;
}

/**
 * Relative luminance, 0 … 1 (WCAG 2).
 * @param {ArrayLike<number>} rgb
 */
export function luminanceOf(rgb) {
  return 0.2126 * linearOf(rgb[0]) + 0.7152 * linearOf(rgb[1]) + 0.0722 * linearOf(rgb[2]);
}

/**
 * Contrast of two colours, 1 … 21 (WCAG 2).
 * @param {ArrayLike<number>} one
 * @param {ArrayLike<number>} other
 */
export function contrastOf(one, other) {
  const [dark, bright] = [luminanceOf(one), luminanceOf(other)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
}

/**
 * The colour of text on a cell.
 * @param {string} hex  the cell's
 */
export function textColour(hex) {
  return luminanceOf(rgbOf(hex)) > BLACK_TEXT_FROM ? "#000000" : "#FFFFFF";
}
