/**
 * The definition of stages.py in the browser: one head, stage by stage, and what its rows did.
 *
 *     scores   S = Q Kᵀ             masked   + bias, −∞ where hidden
 *     scaled   α S                  weights  softmax over keys, the sink one more outcome
 *     capped   c · tanh(αS / c)     output   weights · V
 *
 * Pure functions: nothing here draws, fetches or remembers. Arithmetic is float64 whatever comes
 * in. Whoever looks at a long text asks for blocks of rows: none may hold more than LARGEST_BLOCK
 * cells, so that a tab's memory grows with n. Agreement with stages.py is tested on
 * tests/golden/stages_*.json, which both languages read. Formulas: docs/maths.md#rows.
 */

/**
 * @typedef {Float32Array | Float64Array} Numbers
 * @typedef {{shape: number[], data: Numbers}} Decoded  an array of the page document, decoded
 * @typedef {{data: Numbers, rows: number, columns: number}} Matrix  row after row
 *
 * @typedef {Object} Attention  what one head computes its stages from
 * @property {Matrix} query  (queries, d_k), as it enters QKᵀ
 * @property {Matrix} key  (keys, d_k)
 * @property {Matrix | null} value  (keys, d_v)
 * @property {number} scale  the factor α
 * @property {number | null} softcap
 * @property {number | null} sink  logit of an outcome without a value
 * @property {{kind: string, window?: number | null}} mask  "none", "causal", "window", "dense"
 * @property {Matrix | null} hidden  not 0 where a query may not attend; axes of 1 are stretched
 * @property {Matrix | null} bias  added to the logits; axes of 1 are stretched
 *
 * @typedef {Object} Rows  one number a row, as RowStats in rows.py; NaN where undefined
 * @property {Int32Array} visible  keys that the row sees
 * @property {Float64Array} scoreMean  of the visible scaled scores
 * @property {Float64Array} scoreVar  population variance of the same
 * @property {Float64Array} rawVar  the same without the scale
 * @property {Float64Array} maxScore  largest scaled score
 * @property {Float64Array} lse  log-sum-exp, nats; −∞ (or the sink) for an empty row
 * @property {Float64Array} entropy  nats
 * @property {Float64Array} normalisedEntropy  ÷ ln(outcomes); NaN for a row that sees one key
 * @property {Float64Array} effectiveKeys  e^entropy
 * @property {Int32Array} topKey  −1 if none, the first of equals
 * @property {Float64Array} largestWeight  of the top key
 * @property {Float64Array} topMargin  −ln(mass of the others ÷ mass of the top key), at most 87
 * @property {Float64Array} collision  Σp²
 * @property {Float64Array} gradient  Σp(1−p), without cancellation
 * @property {Float64Array} meanKey  attention-weighted position
 * @property {Float64Array | null} sinkMass  probability of the sink, where there is one
 * @property {Uint8Array} nonfinite  1 where a visible score is not a number
 *
 * @typedef {Object} Block  stages of queries first … last − 1; matrices are (last − first, keys)
 * @property {number} first
 * @property {number} last
 * @property {number} keys
 * @property {number} scale
 * @property {Float64Array} scores
 * @property {Float64Array} scaled
 * @property {Float64Array | null} capped  null without a soft-cap
 * @property {Float64Array} masked
 * @property {Uint8Array} seen  HIDDEN, VISIBLE or FALLBACK
 * @property {Float64Array} weights
 * @property {Float64Array | null} output  (last − first, d_v); null without a value
 * @property {Rows} rows
 */

/** Cells of the largest block of rows: a whole head up to 512 tokens. */
export const LARGEST_BLOCK = 512 * 512;
/** A key that the query may not attend to. */
export const HIDDEN = 0;
/** A key that it may. */
export const VISIBLE = 1;
/** In a row that sees nothing: a key that a finfo.min bias hides without removing it, so that
 * softmax spreads over it as torch's does. Statistics count the row as empty. */
export const FALLBACK = 2;
/** Nats of topMargin from which bfloat16 stores the heaviest weight as 1: heads.SATURATED. */
export const SATURATED_MARGIN = 9 * Math.log(2);

const MARGIN_MOST = 87;
const EXP_NOTHING = -1000; // exp of it is 0: where logarithms stop, so that 0·∞ never arises
const BIAS_FLOOR = -3.4028234663852886e38 / 2;
const STREAMED_CELLS = 1 << 16; // of a block in a loop over all rows: it stays in the cache

// What comes in

/**
 * One head of the page document: its decoded arrays, and the layer that says scale, soft-cap and
 * mask.
 * @param {{query: Decoded, key: Decoded, value?: Decoded | null, sink?: number | null,
 *   hidden?: Decoded | null, bias?: Decoded | null}} arrays
 * @param {{scale: number, softcap?: number | null,
 *   mask?: {kind: string, window?: number | null}}} layer
 * @returns {Attention}
 */
export function attentionOf(arrays, layer) {
  const matrix = (name, { shape, data }) => {
    if (shape.length !== 2 || shape[0] * shape[1] !== data.length) {
      throw new RangeError(
        `${name} has shape ${shape.join("×")} and ${data.length} numbers: expected a matrix`,
      );
    }
    return { data, rows: shape[0], columns: shape[1] };
  };
  const some = (name) => (arrays[name] ? matrix(name, arrays[name]) : null);
  const attention = {
    query: matrix("query", arrays.query),
    key: matrix("key", arrays.key),
    value: some("value"),
    scale: layer.scale,
    softcap: layer.softcap ?? null,
    sink: arrays.sink ?? null,
    mask: layer.mask ?? { kind: "none" },
    hidden: some("hidden"),
    bias: some("bias"),
  };
  const { query, key, value } = attention;
  if (!Number.isFinite(attention.scale)) {
    throw new RangeError(`the scale of a head is ${attention.scale}: expected a finite number`);
  }
  if (attention.mask.kind === "dense" && !attention.hidden && !attention.bias) {
    throw new RangeError("the mask is dense, and came with neither hidden nor bias");
  }
  if (query.columns !== key.columns) {
    throw new RangeError(`a query has ${query.columns} numbers, a key ${key.columns}`);
  }
  if (value && value.rows !== key.rows) {
    throw new RangeError(`there are ${key.rows} keys and ${value.rows} values`);
  }
  for (const [name, matrix] of [["hidden", attention.hidden], ["bias", attention.bias]]) {
    if (matrix && !(
      [1, query.rows].includes(matrix.rows) && [1, key.rows].includes(matrix.columns)
    )) {
      throw new RangeError(
        `${name} is ${matrix.rows}×${matrix.columns}: expected ${query.rows}×${key.rows}`,
      );
    }
  }
  return attention;
}

// Stage by stage

/**
 * ⟨q, k⟩ of queries first … last − 1 with keys from … to − 1; the other keys' columns stay 0.
 * @param {Matrix} query
 * @param {Matrix} key
 * @returns {Float64Array} (last − first, all keys)
 */
export function scoresOf(query, key, first = 0, last = query.rows, from = 0, to = key.rows) {
  const keys = key.rows;
  const d = query.columns;
  if ((last - first) * keys > LARGEST_BLOCK) {
    throw new RangeError(
      `${last - first} rows of ${keys} keys are more than ${LARGEST_BLOCK} cells: ` +
        "ask for fewer rows at a time",
    );
  }
  const result = new Float64Array((last - first) * keys);
  const k = float64Of(key.data);
  const q = float64Of(query.data);
  for (let i = first; i < last; i++) {
    const row = i * d;
    const out = (i - first) * keys;
    let j = from;
    // Four keys at once: their sums do not wait for one another.
    for (; j + 4 <= to; j += 4) {
      const at = j * d;
      let s0 = 0;
      let s1 = 0;
      let s2 = 0;
      let s3 = 0;
      for (let m = 0; m < d; m++) {
        const x = q[row + m];
        s0 += x * k[at + m];
        s1 += x * k[at + d + m];
        s2 += x * k[at + 2 * d + m];
        s3 += x * k[at + 3 * d + m];
      }
      result[out + j] = s0;
      result[out + j + 1] = s1;
      result[out + j + 2] = s2;
      result[out + j + 3] = s3;
    }
    for (; j < to; j++) {
      let sum = 0;
      for (let m = 0; m < d; m++) sum += q[row + m] * k[j * d + m];
      result[out + j] = sum;
    }
  }
  return result;
}

/** @param {Numbers} data */
function float64Of(data) {
  return data instanceof Float64Array ? data : Float64Array.from(data);
}

/**
 * α S.
 * @param {Float64Array} scores
 * @param {number} scale
 */
export function scaledOf(scores, scale) {
  return scores.map((x) => x * scale);
}

/**
 * c · tanh(x / c), or null without a soft-cap.
 * @param {Float64Array} scaled
 * @param {number | null} softcap  positive
 */
export function cappedOf(scaled, softcap) {
  return softcap ? scaled.map((x) => softcap * Math.tanh(x / softcap)) : null;
}

/**
 * The keys [from, to) that the mask's kind leaves to a query: causal 0 … i, window the W up to i.
 * @param {Attention} attention
 * @param {number} i
 * @returns {[number, number]}
 */
export function keysSeen(attention, i) {
  const { mask, key } = attention;
  if (mask.kind === "none" || mask.kind === "dense") return [0, key.rows];
  const to = Math.min(i + 1, key.rows);
  if (mask.kind === "causal") return [0, to];
  if (mask.kind !== "window" || !mask.window) {
    throw new RangeError(`a mask is ${JSON.stringify(mask)}: expected causal, window or none`);
  }
  return [Math.min(Math.max(0, i + 1 - mask.window), to), to];
}

/**
 * HIDDEN, VISIBLE or FALLBACK for each cell of queries first … last − 1.
 * @param {Attention} attention
 * @returns {Uint8Array}
 */
export function seenOf(attention, first = 0, last = attention.query.rows) {
  const { hidden, bias } = attention;
  const keys = attention.key.rows;
  const seen = new Uint8Array((last - first) * keys);
  for (let i = first; i < last; i++) {
    const [from, to] = keysSeen(attention, i);
    const out = (i - first) * keys;
    let visible = 0;
    let floored = 0;
    for (let j = from; j < to; j++) {
      if (hidden && stretched(hidden, i, j) !== 0) continue;
      const added = bias ? stretched(bias, i, j) : 0;
      if (added === -Infinity) continue;
      if (added <= BIAS_FLOOR) {
        seen[out + j] = FALLBACK;
        floored++;
      } else {
        seen[out + j] = VISIBLE;
        visible++;
      }
    }
    if (visible && floored) {
      for (let j = from; j < to; j++) if (seen[out + j] === FALLBACK) seen[out + j] = HIDDEN;
    }
  }
  return seen;
}

/** @param {Matrix} matrix */
function stretched(matrix, i, j) {
  const row = matrix.rows === 1 ? 0 : i * matrix.columns;
  return matrix.data[row + (matrix.columns === 1 ? 0 : j)];
}

/**
 * The logits with the bias added, −∞ where hidden.
 * @param {Float64Array} logits  scaled, or capped with a soft-cap
 * @param {Uint8Array} seen
 * @param {Attention} attention
 */
export function maskedOf(logits, seen, attention, first = 0) {
  const { bias } = attention;
  const keys = attention.key.rows;
  const result = new Float64Array(logits.length);
  for (let c = 0; c < result.length; c++) {
    const state = seen[c];
    if (state === HIDDEN) {
      result[c] = -Infinity;
    } else if (bias === null) {
      result[c] = logits[c];
    } else {
      const i = Math.floor(c / keys);
      // What a finfo.min bias hides must not matter, even if it is not a number.
      const x = state === VISIBLE || Number.isFinite(logits[c]) ? logits[c] : 0;
      result[c] = x + stretched(bias, first + i, c - i * keys);
    }
  }
  return result;
}

/**
 * Softmax over the keys of each row, the sink one more outcome; 0 in an empty row, NaN where a row
 * sees a score that is not a number, even one that tanh would tame.
 * @param {Float64Array} masked
 * @param {Float64Array} scaled
 * @param {Uint8Array} seen
 * @param {number} keys
 * @param {number | null} sink
 */
export function weightsOf(masked, scaled, seen, keys, sink = null) {
  const result = new Float64Array(masked.length);
  for (let row = 0; row < masked.length; row += keys) {
    const end = row + keys;
    let top = sink ?? -Infinity;
    let bad = false;
    for (let c = row; c < end; c++) {
      if (seen[c] === HIDDEN) continue;
      if (masked[c] > top) top = masked[c];
      if (!(masked[c] < Infinity) || (seen[c] === VISIBLE && !Number.isFinite(scaled[c]))) {
        bad = true;
      }
    }
    if (bad || !(top < Infinity)) {
      for (let c = row; c < end; c++) if (seen[c] !== HIDDEN) result[c] = NaN;
      continue;
    }
    if (top === -Infinity) continue;
    let total = sink === null ? 0 : Math.exp(sink - top);
    for (let c = row; c < end; c++) {
      if (seen[c] === HIDDEN) continue;
      const e = Math.exp(masked[c] - top);
      result[c] = e;
      total += e;
    }
    for (let c = row; c < end; c++) result[c] /= total;
  }
  return result;
}

/**
 * Weights · V, where a value that is not a number matters only to queries that see its key.
 * @param {Float64Array} weights
 * @param {Uint8Array} seen
 * @param {Matrix} value
 * @returns {Float64Array} (rows, d_v)
 */
export function outputOf(weights, seen, value) {
  const keys = value.rows;
  const d = value.columns;
  const v = float64Of(value.data);
  const rows = keys ? weights.length / keys : 0;
  const result = new Float64Array(rows * d);
  const finite = v.every(Number.isFinite);
  for (let i = 0; i < rows; i++) {
    const out = i * d;
    for (let j = 0; j < keys; j++) {
      const w = weights[i * keys + j];
      if (seen[i * keys + j] === HIDDEN) continue;
      const at = j * d;
      if (finite) {
        if (w !== 0) for (let m = 0; m < d; m++) result[out + m] += w * v[at + m];
      } else {
        for (let m = 0; m < d; m++) {
          result[out + m] += Number.isFinite(v[at + m]) ? w * v[at + m] : NaN;
        }
      }
    }
  }
  return result;
}

/**
 * Every stage of queries first … last − 1. Scores that are known already are taken as they are: a
 * slider forms them once. `{...attention, scale}` asks what another scale would do.
 * @param {Attention} attention
 * @param {Float64Array} [scores]  of the same rows
 * @returns {Block}
 */
export function stagesOf(attention, first = 0, last = attention.query.rows, scores = undefined) {
  const known = scores ?? scoresOf(attention.query, attention.key, first, last);
  const block = weighed(attention, first, last, known);
  const { value, sink } = attention;
  return {
    ...block,
    output: value && outputOf(block.weights, block.seen, value),
    rows: rowsOf(block, sink),
  };
}

/** The stages up to the weights. */
function weighed(attention, first, last, scores) {
  const { scale, softcap, sink, key } = attention;
  const scaled = scaledOf(scores, scale);
  const capped = cappedOf(scaled, softcap);
  const seen = seenOf(attention, first, last);
  const masked = maskedOf(capped ?? scaled, seen, attention, first);
  const weights = weightsOf(masked, scaled, seen, key.rows, sink);
  return { first, last, keys: key.rows, scale, scores, scaled, capped, masked, seen, weights };
}

/**
 * All rows of a head, block after block, without their output: what summaryOf and addToOverview
 * take. The page may draw, or give up, between two.
 * @param {Attention} attention
 * @param {boolean} [everything]  false leaves scores of keys that the mask's kind hides at 0
 * @returns {Generator<Block>}
 */
export function* rowBlocks(attention, everything = true) {
  const { query, key } = attention;
  const together = Math.max(1, Math.floor(STREAMED_CELLS / Math.max(1, key.rows)));
  for (let first = 0; first < query.rows; first += together) {
    const last = Math.min(first + together, query.rows);
    const from = everything ? 0 : keysSeen(attention, first)[0];
    const to = everything ? key.rows : keysSeen(attention, last - 1)[1];
    const scores = scoresOf(query, key, first, last, from, to);
    const block = weighed(attention, first, last, scores);
    yield { ...block, output: null, rows: rowsOf(block, attention.sink) };
  }
}

// What rows did

/**
 * The statistics of every row of a block.
 * @param {{keys: number, scores: Float64Array, scaled: Float64Array, masked: Float64Array,
 *   seen: Uint8Array, scale: number, first: number, last: number}} block
 * @param {number | null} sink
 * @returns {Rows}
 */
export function rowsOf(block, sink = null) {
  const { keys, scores, scaled, masked, seen } = block;
  const n = block.last - block.first;
  const numbers = () => new Float64Array(n).fill(NaN);
  const rows = {
    visible: new Int32Array(n), scoreMean: numbers(), scoreVar: numbers(), rawVar: numbers(),
    maxScore: numbers(), lse: numbers(), entropy: numbers(), normalisedEntropy: numbers(),
    effectiveKeys: numbers(), topKey: new Int32Array(n).fill(-1), largestWeight: numbers(),
    topMargin: numbers(), collision: numbers(), gradient: numbers(), meanKey: numbers(),
    sinkMass: sink === null ? null : numbers(), nonfinite: new Uint8Array(n),
  };
  const logits = new Float64Array(keys);
  const places = new Int32Array(keys);
  for (let i = 0; i < n; i++) {
    let count = 0;
    let sum = 0;
    let rawSum = 0;
    let most = -Infinity;
    let bad = false;
    for (let c = i * keys; c < (i + 1) * keys; c++) {
      if (seen[c] !== VISIBLE) continue;
      const x = scaled[c];
      bad ||= !Number.isFinite(x) || !Number.isFinite(masked[c]);
      sum += x;
      rawSum += scores[c];
      if (x > most) most = x;
      logits[count] = masked[c];
      places[count++] = c - i * keys;
    }
    rows.visible[i] = count;
    if (count === 0) {
      rows.lse[i] = sink ?? -Infinity;
      continue;
    }
    if (bad || (sink !== null && !(sink < Infinity))) {
      rows.nonfinite[i] = 1;
      continue;
    }
    const mean = sum / count;
    const rawMean = rawSum / count;
    let squares = 0;
    let rawSquares = 0;
    for (let p = 0; p < count; p++) {
      const c = i * keys + places[p];
      squares += (scaled[c] - mean) ** 2;
      rawSquares += (scores[c] - rawMean) ** 2;
    }
    rows.scoreMean[i] = mean;
    rows.scoreVar[i] = squares / count;
    rows.rawVar[i] = rawSquares / count;
    rows.maxScore[i] = most;
    const spread = spreadOf(logits, count, sink, places);
    rows.lse[i] = spread.lse;
    rows.entropy[i] = spread.entropy;
    const outcomes = count + (sink === null ? 0 : 1);
    if (count > 1) rows.normalisedEntropy[i] = spread.entropy / Math.log(outcomes);
    rows.effectiveKeys[i] = Math.exp(spread.entropy);
    rows.topKey[i] = places[spread.top];
    rows.largestWeight[i] = spread.largest;
    rows.topMargin[i] = spread.margin;
    rows.collision[i] = spread.collision;
    rows.gradient[i] = spread.gradient;
    rows.meanKey[i] = spread.position;
    if (rows.sinkMass) rows.sinkMass[i] = spread.sink;
  }
  return rows;
}

/**
 * What softmax over some finite logits, and the sink, is like. Everything is measured from the
 * heaviest outcome: 1 − p and its like are sums of the others' masses, never differences (rows.py).
 * @param {Float64Array} logits
 * @param {number} count  how many of them
 * @param {number | null} sink
 * @param {Int32Array | null} places  their keys' positions
 */
function spreadOf(logits, count, sink, places = null) {
  let top = 0;
  for (let p = 1; p < count; p++) if (logits[p] > logits[top]) top = p;
  const peak = logits[top];
  let rest = 0;
  let squares = 0;
  let logs = 0;
  let positions = 0;
  for (let p = 0; p < count; p++) {
    if (p === top) continue;
    const z = logits[p] - peak;
    const e = Math.exp(z);
    rest += e;
    squares += e * e;
    logs += e * z;
    if (places) positions += e * places[p];
  }
  const position = places ? (places[top] + positions) / (1 + rest) : NaN;
  let margin = -Math.log(rest);
  let largest = 1 / (1 + rest);
  let sinkMass = NaN;
  let heaviest = peak;
  if (sink !== null) {
    const gap = sink - peak;
    const logMass = logAdd(Math.log1p(rest), gap);
    margin = -logAdd(Math.log(rest), gap);
    largest = Math.exp(-logMass);
    sinkMass = Math.exp(gap - logMass);
    if (gap <= 0) {
      const e = Math.exp(gap);
      rest += e;
      squares += e * e;
      if (e > 0) logs += e * gap;
    } else {
      // The sink is the heaviest: the top key joins the rest, which is rescaled.
      const shift = Math.max(-gap, EXP_NOTHING);
      const f = Math.exp(shift);
      logs = f * (logs + shift * (1 + rest));
      squares = f * f * (squares + 1);
      rest = f * (rest + 1);
      heaviest = sink;
    }
  }
  const total = 1 + rest;
  return {
    top, largest, position, sink: sinkMass,
    lse: heaviest + Math.log1p(rest),
    entropy: Math.log1p(rest) - logs / total,
    margin: Math.min(margin, MARGIN_MOST),
    collision: (1 + squares) / (total * total),
    gradient: (2 * rest + rest * rest - squares) / (total * total),
  };
}

function logAdd(a, b) {
  const most = Math.max(a, b);
  return most === -Infinity ? most : most + Math.log1p(Math.exp(Math.min(a, b) - most));
}

/**
 * p(1 − p) of each weight; the heaviest's 1 − p is taken from the others' mass, not from 1.
 * @param {Block} block
 * @returns {Float64Array}
 */
export function gradientsOf(block) {
  const result = block.weights.map((p) => p * (1 - p));
  block.rows.topKey.forEach((j, i) => {
    if (j < 0) return;
    const p = block.rows.largestWeight[i];
    result[i * block.keys + j] = p / (1 + Math.exp(block.rows.topMargin[i]));
  });
  return result;
}

/**
 * @typedef {Object} Summary  one head, NaN where no row says; names as in findings.Head
 * @property {number} rows
 * @property {number} empty  rows that see nothing
 * @property {number} nonfinite  rows that hold a NaN or ∞, counted and in no mean
 * @property {number} single  rows that see one key
 * @property {number} pairs  visible query-key pairs
 * @property {number} rawMean  of all visible pairs' ⟨q, k⟩
 * @property {number} rawVar  their population variance
 * @property {number} scaledMean
 * @property {number} scaledVar
 * @property {number} varWithin  mean variance of scaled scores within a row of two keys or more
 * @property {number} entropy  mean over rows, nats
 * @property {number} effectiveKeys  exp of it
 * @property {number} normalisedEntropy  mean over rows of two keys or more
 * @property {number} largestWeight  mean
 * @property {number} gradient  mean Σp(1−p)
 * @property {number} saturated  share of rows of two keys or more beyond SATURATED_MARGIN
 * @property {number} maxScore  largest scaled score
 * @property {number} largestRaw  largest |⟨q, k⟩| of any pair, visible or not: the colour domain
 *
 *
 * @param {Iterable<Block>} blocks  rowBlocks(attention), or [stagesOf(attention)]
 * @returns {Summary}
 */
export function summaryOf(blocks) {
  const tally = newTally();
  for (const block of blocks) addToTally(tally, block);
  return summaryOfTally(tally);
}

/** Sums for a summary, of no rows yet: for whoever draws between two blocks. */
export function newTally() {
  return {
    scale: NaN, rows: 0, empty: 0, nonfinite: 0, single: 0, pairs: 0, largestRaw: 0, saturated: 0,
    maxScore: -Infinity, raw: { count: 0, mean: 0, squares: 0 },
    over: { entropy: 0, largestWeight: 0, gradient: 0 }, // every row that says something
    choice: { scoreVar: 0, normalisedEntropy: 0 }, // of these, the rows with a choice of keys
  };
}

/**
 * Add the rows of a block.
 * @param {ReturnType<typeof newTally>} tally
 * @param {Block} block
 */
export function addToTally(tally, block) {
  const { rows, keys, scores, seen } = block;
  const { over, choice } = tally;
  tally.scale = block.scale;
  for (let c = 0; c < scores.length; c++) {
    const size = Math.abs(scores[c]);
    if (size > tally.largestRaw && size < Infinity) tally.largestRaw = size;
  }
  for (let i = 0; i < block.last - block.first; i++) {
    const n = rows.visible[i];
    tally.rows++;
    tally.pairs += n;
    tally.empty += n === 0 ? 1 : 0;
    tally.nonfinite += rows.nonfinite[i];
    if (n === 0 || rows.nonfinite[i]) continue;
    for (const name in over) over[name] += rows[name][i];
    tally.maxScore = Math.max(tally.maxScore, rows.maxScore[i]);
    let sum = 0;
    for (let c = i * keys; c < (i + 1) * keys; c++) if (seen[c] === VISIBLE) sum += scores[c];
    mergeMoments(tally.raw, n, sum / n, rows.rawVar[i] * n);
    if (n === 1) {
      tally.single++;
      continue;
    }
    for (const name in choice) choice[name] += rows[name][i];
    tally.saturated += rows.topMargin[i] >= SATURATED_MARGIN ? 1 : 0;
  }
}

/**
 * The summary of what was added.
 * @param {ReturnType<typeof newTally>} tally
 * @returns {Summary}
 */
export function summaryOfTally(tally) {
  const { scale, rows, empty, nonfinite, single, pairs, largestRaw, raw, over, choice } = tally;
  const measured = rows - empty - nonfinite;
  const chosen = measured - single;
  const rawMean = measured ? raw.mean : NaN;
  const rawVar = raw.squares / raw.count;
  const entropy = over.entropy / measured;
  return {
    rows, empty, nonfinite, single, pairs, rawMean, rawVar,
    scaledMean: rawMean * scale, scaledVar: rawVar * scale * scale,
    varWithin: choice.scoreVar / chosen, entropy, effectiveKeys: Math.exp(entropy),
    normalisedEntropy: choice.normalisedEntropy / chosen,
    largestWeight: over.largestWeight / measured, gradient: over.gradient / measured,
    saturated: tally.saturated / chosen, maxScore: measured ? tally.maxScore : NaN, largestRaw,
  };
}

/** Join n more numbers to (count, mean, squares), as Chan, Golub & LeVeque 1979. */
function mergeMoments(into, n, mean, squares) {
  const total = into.count + n;
  const gap = mean - into.mean;
  into.squares += squares + gap * gap * ((into.count * n) / total);
  into.mean += (gap * n) / total;
  into.count = total;
}

// How values are spread

/**
 * @typedef {Object} Histogram  bins of equal width from low to high, whose last holds high itself
 * @property {number} low
 * @property {number} high
 * @property {Float64Array} counts
 * @property {number} below  values under low
 * @property {number} above  values over high
 * @property {number} nonfinite  NaN and ±∞, in nothing else
 * @property {number} count  finite values, those outside too
 * @property {number} mean
 * @property {number} squares  Σ(value − mean)²
 * @property {number} sd  population standard deviation
 */

/**
 * A histogram of nothing yet.
 * @param {number} low
 * @param {number} high
 * @param {number} bins
 * @returns {Histogram}
 */
export function newHistogram(low, high, bins) {
  if (!(low < high) || !(bins >= 1)) {
    throw new RangeError(`a histogram from ${low} to ${high} in ${bins} bins holds nothing`);
  }
  return {
    low, high, counts: new Float64Array(bins), below: 0, above: 0, nonfinite: 0, count: 0,
    mean: NaN, squares: 0, sd: NaN,
  };
}

/**
 * Add the values of a block; with `seen`, of what is not hidden.
 * @param {Histogram} histogram
 * @param {Numbers} values
 * @param {Uint8Array | null} seen
 */
export function addToHistogram(histogram, values, seen = null) {
  const { low, high, counts } = histogram;
  const bins = counts.length;
  const perUnit = bins / (high - low);
  let [count, sum] = [0, 0];
  for (let c = 0; c < values.length; c++) {
    if (seen && seen[c] === HIDDEN) continue;
    const x = values[c];
    if (!Number.isFinite(x)) histogram.nonfinite++;
    else {
      count++;
      sum += x;
      if (x < low) histogram.below++;
      else if (x > high) histogram.above++;
      else counts[Math.min(bins - 1, Math.floor((x - low) * perUnit))]++;
    }
  }
  if (!count) return;
  const mean = sum / count;
  let squares = 0;
  for (let c = 0; c < values.length; c++) {
    if (seen && seen[c] === HIDDEN) continue;
    if (Number.isFinite(values[c])) squares += (values[c] - mean) ** 2;
  }
  if (!histogram.count) histogram.mean = 0;
  mergeMoments(histogram, count, mean, squares);
  histogram.sd = Math.sqrt(histogram.squares / histogram.count);
}

/**
 * The histogram of one array.
 * @param {Numbers} values
 * @param {Uint8Array | null} seen
 * @returns {Histogram}
 */
export function histogramOf(values, low, high, bins, seen = null) {
  const histogram = newHistogram(low, high, bins);
  addToHistogram(histogram, values, seen);
  return histogram;
}

// Long texts: a pixel is the largest of its block

/**
 * @typedef {Object} Overview  a pixel is the value of largest magnitude of its block
 * @property {number} rowStep  rows of a block
 * @property {number} columnStep
 * @property {number} rows  pixels
 * @property {number} columns
 * @property {Float32Array} data  0 where nothing is seen
 * @property {Uint8Array} seen  HIDDEN if all of the block is, VISIBLE if not
 * @property {Uint8Array} spoilt  1 where the block holds a NaN
 */

/**
 * An overview of nothing yet, of at most so many pixels a side.
 * @returns {Overview}
 */
export function newOverview(rows, columns, mostRows, mostColumns = mostRows) {
  const rowStep = Math.max(1, Math.ceil(rows / mostRows));
  const columnStep = Math.max(1, Math.ceil(columns / mostColumns));
  const [high, wide] = [Math.ceil(rows / rowStep), Math.ceil(columns / columnStep)];
  return {
    rowStep, columnStep, rows: high, columns: wide, data: new Float32Array(high * wide),
    seen: new Uint8Array(high * wide), spoilt: new Uint8Array(high * wide),
  };
}

/**
 * Add rows first … of a matrix with so many columns; with `seen`, what is not hidden.
 * @param {Overview} overview
 * @param {Numbers} values
 * @param {Uint8Array | null} seen
 */
export function addToOverview(overview, values, columns, first, seen = null) {
  const { rowStep, columnStep, columns: wide, data } = overview;
  for (let row = 0; row * columns < values.length; row++) {
    const line = Math.floor((first + row) / rowStep) * wide;
    for (let pixel = 0, j = 0; j < columns; pixel++) {
      const end = Math.min(j + columnStep, columns);
      let best = data[line + pixel];
      for (; j < end; j++) {
        const c = row * columns + j;
        if (seen && seen[c] === HIDDEN) continue;
        overview.seen[line + pixel] = VISIBLE;
        const x = values[c];
        if (Math.abs(x) > Math.abs(best)) best = x;
        else if (Number.isNaN(x)) overview.spoilt[line + pixel] = 1;
      }
      data[line + pixel] = best;
    }
  }
}

/**
 * The largest weight of each block of a head, at most `side` pixels a side: the same overview after
 * each block of rows, so that the page may draw, or give up, between two.
 * @param {Attention} attention
 * @param {number} side
 * @returns {Generator<Overview>}
 */
export function* weightMaxima(attention, side) {
  const { query, key } = attention;
  const overview = newOverview(query.rows, key.rows, side);
  for (const block of rowBlocks(attention, false)) {
    addToOverview(overview, block.weights, key.rows, block.first, block.seen);
    yield overview;
  }
}

// One row

/**
 * The keys that a row shows: all it sees, or of more than `most` the `few` heaviest, in text order,
 * and what the others hold together.
 * @param {Block} block
 * @param {number} i  row of the block
 * @returns {{keys: number[], others: {count: number, weight: number}}}
 */
export function heaviestKeys(block, i, most = 40, few = 20) {
  const at = i * block.keys;
  const seen = [];
  for (let j = 0; j < block.keys; j++) if (block.seen[at + j] !== HIDDEN) seen.push(j);
  if (seen.length <= most) return { keys: seen, others: { count: 0, weight: 0 } };
  // Of equal weights, and of NaN, the earlier comes first.
  const size = (j) => (Number.isNaN(block.weights[at + j]) ? -1 : block.weights[at + j]);
  const order = seen.slice().sort((a, b) => size(b) - size(a) || a - b);
  const keys = order.slice(0, few).sort((a, b) => a - b);
  const weight = order.slice(few).reduce((sum, j) => sum + block.weights[at + j], 0);
  return { keys, others: { count: seen.length - few, weight } };
}

/**
 * What a scale did to the visible scores of one row: those that are not numbers enter nothing.
 * kept: how many hold their rank, equals sharing one; ranges: largest − smallest, NaN for none;
 * signs: how many have the sign they had.
 * @param {Numbers} before
 * @param {Numbers} after
 * @param {Uint8Array} seen
 */
export function scalingFacts(before, after, seen) {
  const places = [];
  for (let j = 0; j < before.length; j++) {
    if (seen[j] === VISIBLE && Number.isFinite(before[j]) && Number.isFinite(after[j])) {
      places.push(j);
    }
  }
  const ranks = [before, after].map((x) => {
    const order = places.slice().sort((a, b) => x[b] - x[a]);
    const rank = new Map();
    order.forEach((j, at) => {
      const same = at > 0 && x[order[at - 1]] === x[j];
      rank.set(j, same ? rank.get(order[at - 1]) : at);
    });
    return rank;
  });
  const range = (x) => {
    let [low, high] = [Infinity, -Infinity];
    for (const j of places) [low, high] = [Math.min(low, x[j]), Math.max(high, x[j])];
    return places.length ? high - low : NaN;
  };
  const many = (is) => places.filter(is).length;
  return {
    keys: places.length,
    kept: many((j) => ranks[0].get(j) === ranks[1].get(j)),
    rangeBefore: range(before),
    rangeAfter: range(after),
    negative: many((j) => after[j] < 0),
    positive: many((j) => after[j] > 0),
    signs: many((j) => Math.sign(before[j]) === Math.sign(after[j])),
  };
}

// Scales

/** The rules that can be asked for by name, and how each is written: scales.RULES. */
export const SCALE_RULES = {
  "1/sqrt_d_k": "1/√d_k",
  "1/d_k": "1/d_k",
  "none": "none",
  "1/sqrt_d_model": "1/√d_model",
  "log_n/sqrt_d_k": "log₅₁₂ n/√d_k",
  "sqrt_log_n/sqrt_d_k": "√log₅₁₂ n/√d_k",
};

/**
 * The factor that a rule gives, as scales.factor.
 * @param {string} rule
 * @param {number} dK
 * @param {{dModel?: number | null, keys?: number | null}} sizes  for the rules that need them
 */
export function scaleFactor(rule, dK, sizes = {}) {
  const { dModel, keys } = sizes;
  if (rule === "none") return 1;
  if (rule === "1/sqrt_d_k") return 1 / Math.sqrt(dK);
  if (rule === "1/d_k") return 1 / dK;
  if (rule === "1/sqrt_d_model") {
    if (!dModel) throw new RangeError("scale 1/sqrt_d_model needs d_model");
    return 1 / Math.sqrt(dModel);
  }
  if (rule === "log_n/sqrt_d_k" || rule === "sqrt_log_n/sqrt_d_k") {
    if (!keys) throw new RangeError(`scale ${rule} needs the number of keys`);
    const length = Math.log(keys) / Math.log(512);
    return (rule === "log_n/sqrt_d_k" ? length : Math.sqrt(length)) / Math.sqrt(dK);
  }
  throw new RangeError(`scale is ${rule}: expected one of ${Object.keys(SCALE_RULES).join(", ")}`);
}

/**
 * Scales from low to high, evenly on a log axis.
 * @returns {Float64Array}
 */
export function scaleSteps(low, high, count) {
  const ratio = Math.log(high / low) / (count - 1);
  return Float64Array.from({ length: count }, (_, i) => low * Math.exp(ratio * i));
}

/**
 * At most `most` of n rows, evenly, the last among them: what curves of a long text look at.
 * @returns {number[]}
 */
export function spacedRows(n, most) {
  if (n <= most) return Array.from({ length: n }, (_, i) => i);
  return Array.from({ length: most }, (_, i) => Math.ceil(((i + 1) * n) / most) - 1);
}

/**
 * A head's means over rows at each scale, for the q and k that it has. A temperature T is the scale
 * divided by T. Empty rows and those with a NaN are left out; `rows` says how many are not.
 * @param {Attention} attention  whose own scale does not matter
 * @param {ArrayLike<number>} scales
 * @param {number[]} [queries]  all unless given
 * @returns {{rows: number, entropy: Float64Array, largestWeight: Float64Array,
 *   gradient: Float64Array}}
 */
export function scaleCurves(attention, scales, queries = undefined) {
  const { query, key, softcap, sink } = attention;
  const keys = key.rows;
  const result = {
    rows: 0, entropy: new Float64Array(scales.length),
    largestWeight: new Float64Array(scales.length), gradient: new Float64Array(scales.length),
  };
  const logits = new Float64Array(keys);
  const raw = new Float64Array(keys);
  const bias = new Float64Array(keys);
  for (const i of queries ?? spacedRows(query.rows, query.rows)) {
    const [from, to] = keysSeen(attention, i);
    const scores = scoresOf(query, key, i, i + 1, from, to);
    const seen = seenOf(attention, i, i + 1);
    let count = 0;
    let finite = sink === null || sink < Infinity;
    for (let j = from; j < to; j++) {
      if (seen[j] !== VISIBLE) continue;
      raw[count] = scores[j];
      bias[count] = attention.bias ? stretched(attention.bias, i, j) : 0;
      finite &&= Number.isFinite(raw[count]) && Number.isFinite(bias[count]);
      count++;
    }
    if (!count || !finite) continue;
    result.rows++;
    for (let s = 0; s < scales.length; s++) {
      for (let p = 0; p < count; p++) {
        const x = raw[p] * scales[s];
        logits[p] = (softcap ? softcap * Math.tanh(x / softcap) : x) + bias[p];
      }
      const spread = spreadOf(logits, count, sink);
      result.entropy[s] += spread.entropy;
      result.largestWeight[s] += spread.largest;
      result.gradient[s] += spread.gradient;
    }
  }
  for (let s = 0; s < scales.length; s++) {
    result.entropy[s] /= result.rows;
    result.largestWeight[s] /= result.rows;
    result.gradient[s] /= result.rows;
  }
  return result;
}

// Monte Carlo

/**
 * Random numbers from a seed: the same ones on every machine. sfc32 (Doty-Humphrey, PractRand),
 * its state filled by splitmix32, so that neighbouring seeds and streams have nothing in common.
 * @param {number} seed  a whole number from 0
 * @param {number} stream  another whole number: an independent sequence of the same seed
 */
export function randomStream(seed, stream = 0) {
  if (!Number.isSafeInteger(seed) || seed < 0) {
    throw new RangeError(`a seed is ${seed}: expected a whole number from 0`);
  }
  let mixed = 0;
  const next = (word) => {
    mixed = (mixed ^ word) + 0x9e3779b9 | 0;
    let z = mixed ^ (mixed >>> 16);
    z = Math.imul(z, 0x21f0aaad);
    z ^= z >>> 15;
    z = Math.imul(z, 0x735a2d97);
    return (mixed = z ^ (z >>> 15));
  };
  let a = next(seed >>> 0);
  let b = next(Math.floor(seed / 2 ** 32));
  let c = next(stream);
  let counter = 1;
  const word = () => {
    const t = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (c << 21) | (c >>> 11);
    c = (c + t) | 0;
    return t >>> 0;
  };
  for (let i = 0; i < 12; i++) word();
  return {
    /** Whole, 0 … 2³² − 1. */
    word,
    /** Fill with standard normal numbers, two at a time (Box & Muller 1958). */
    normals(into) {
      for (let i = 0; i < into.length; i += 2) {
        const radius = Math.sqrt(-2 * Math.log((word() + 1) / 2 ** 32));
        const angle = (2 * Math.PI * word()) / 2 ** 32;
        into[i] = radius * Math.cos(angle);
        if (i + 1 < into.length) into[i + 1] = radius * Math.sin(angle);
      }
      return into;
    },
  };
}

/**
 * ⟨q, k⟩ of pairs of independent standard normal vectors: mean 0, s.d. √d_k in theory.
 * @param {number} dK
 * @param {number} pairs
 * @param {number} seed
 * @returns {{values: Float64Array, mean: number, sd: number, theory: number, seed: number}}
 */
export function drawProducts(dK, pairs, seed) {
  const random = randomStream(seed, 2 * dK);
  const both = new Float64Array(2 * dK);
  const values = new Float64Array(pairs);
  let sum = 0;
  for (let p = 0; p < pairs; p++) {
    random.normals(both);
    for (let m = 0; m < dK; m++) values[p] += both[m] * both[dK + m];
    sum += values[p];
  }
  const mean = sum / pairs;
  let squares = 0;
  for (const x of values) squares += (x - mean) ** 2;
  return { values, mean, sd: Math.sqrt(squares / (pairs - 1)), theory: Math.sqrt(dK), seed };
}

/**
 * Softmax over the scores of one random query with so many random keys, as they are and ÷ √d_k:
 * the largest weight's mean over draws, and the weights of the first draw.
 * @param {number} dK
 * @param {number} keys
 * @param {number} draws
 * @param {number} seed
 * @returns {{raw: number, scaled: number, first: {raw: Float64Array, scaled: Float64Array},
 *   seed: number}}
 */
export function drawSoftmaxes(dK, keys, draws, seed) {
  const random = randomStream(seed, 2 * dK + 1);
  const q = new Float64Array(dK);
  const k = new Float64Array(dK * keys);
  const seen = new Uint8Array(keys).fill(VISIBLE);
  const [query, key] = [q, k].map((data) => ({ data, rows: data.length / dK, columns: dK }));
  const means = { raw: 0, scaled: 0 };
  let first = null;
  for (let draw = 0; draw < draws; draw++) {
    random.normals(q);
    random.normals(k);
    const raw = scoresOf(query, key);
    const scaled = scaledOf(raw, 1 / Math.sqrt(dK));
    const weights = {
      raw: weightsOf(raw, raw, seen, keys), scaled: weightsOf(scaled, scaled, seen, keys),
    };
    first ??= weights;
    for (const name in means) means[name] += Math.max(...weights[name]) / draws;
  }
  return { ...means, first, seed };
}
