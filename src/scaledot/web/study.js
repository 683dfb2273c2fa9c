// @ts-check
/**
 * One head studied: its stages in blocks of rows, its summary, its histograms, its overview.
 *
 * Every number comes from stages.js; here they are asked for once and kept for the heads
 * looked at last. A head of up to SMALL_HEAD cells is held whole; a longer text is walked through in
 * blocks, between which the page stays alive, and only its overview and counts are kept.
 */

import { recent } from "./data.js";
import { LARGEST_BLOCK, addToHistogram, addToOverview, addToTally, attentionOf, histogramOf, newHistogram, newOverview, newTally, outputOf, rowBlocks, stagesOf, summaryOf, summaryOfTally } from "./stages.js";

/** @typedef {import("./stages.js").Attention} Attention */
/** @typedef {import("./stages.js").Block} Block */
/** @typedef {{low: number, high: number, counts: ArrayLike<number>, mean: number, sd: number}}
 *   Spread  a histogram as it is drawn */
/** @typedef {Awaited<ReturnType<typeof studyHead>>} Study */

const SMALL_HEAD = LARGEST_BLOCK;
/** Bins of a histogram whose final range is not known yet. */
const FINE_BINS = 4096;
const OVERVIEW_SIDE = 512;
const BLOCKS_KEPT = 4;
/** Rows that a block of a long text is taken to have, and bytes of a cell with all its stages. */
const BLOCK_ROWS = 24;
const CELL_BYTES = 48;
/** Bytes that the studies of all heads may take. */
const STUDY_BYTES = 64e6;
const STUDIED = ["scores", "scaled", "masked", "weights", "output"];

const studies = recent(STUDY_BYTES);

/**
 * The study of a head, made at the first asking.
 *
 * @param {any} loaded  what the context's loadHead gave
 * @param {any} layer  the layer's record in the document
 * @param {() => boolean} wanted  once nobody who asked wants it any more, it is given up between
 *     two blocks, and the promise rejects
 * @param {(share: number) => void} [onProgress]  hears how much of a long text is done
 */
export function headStudy(loaded, layer, wanted = () => true, onProgress = () => {}) {
  const known = studies.get(loaded);
  if (known !== undefined) {
    known.askers.push({ wanted, onProgress });
    return known.promise;
  }
  const askers = [{ wanted, onProgress }];
  const promise = studyHead(attentionOf(loaded, layer), (share) => {
    const still = askers.filter((asker) => asker.wanted());
    for (const asker of still) asker.onProgress(share);
    return still.length > 0;
  });
  const made = { promise, askers };
  studies.set(loaded, made);
  promise.then((study) => studies.weigh(loaded, made, study.bytes), () => studies.delete(loaded));
  return promise;
}

/**
 * @param {Attention} attention
 * @param {(share: number) => boolean} wanted  asked between two blocks, told the share that is done
 * @param {number} [most]  cells up to which a head is held whole
 */
export async function studyHead(attention, wanted, most = SMALL_HEAD) {
  const { query, key, value } = attention;
  const found = query.rows * key.rows <= most ? wholeHead(attention)
    : await walkedHead(attention, wanted);
  /** @type {Map<number, Block>} */
  const kept = new Map();
  return {
    attention,
    n: query.rows,
    keys: key.rows,
    d: query.columns,
    dv: value ? value.columns : 0,
    /** What it takes in memory, about. */
    bytes: CELL_BYTES * (found.overview ? found.overview.data.length
      + BLOCKS_KEPT * BLOCK_ROWS * key.rows : query.rows * key.rows),
    ...found,
    /** The stages of queries first … last − 1. @param {number} first @param {number} last
     *  @returns {Block} */
    block(first, last) {
      if (found.whole && first === 0 && last === query.rows) return found.whole;
      const name = first * (query.rows + 1) + last;
      let block = kept.get(name);
      if (block === undefined) {
        block = stagesOf(attention, first, last);
        kept.set(name, block);
        if (kept.size > BLOCKS_KEPT) kept.delete(kept.keys().next().value ?? -1);
      }
      return block;
    },
  };
}

/** @param {Attention} attention */
function wholeHead(attention) {
  const whole = stagesOf(attention);
  const summary = summaryOf([whole]);
  const output = whole.output ?? new Float64Array(0);
  const values = { scores: whole.scores, scaled: whole.scaled, masked: whole.masked,
    weights: whole.weights, output };
  const all = { scores: null, scaled: null, masked: whole.seen, weights: whole.seen, output: null };
  return {
    /** @type {Block|null} */ whole,
    summary,
    overview: null,
    largestOutput: largestOf(output),
    largestRowVar: largestOf(whole.rows.rawVar),
    /** Values of a stage from low to high in so many bins; a masked stage counts what is visible.
     *  @param {string} stage @param {number} low @param {number} high @param {number} bins
     *  @returns {Spread} */
    spread(stage, low, high, bins) {
      const name = /** @type {keyof typeof values} */ (stage);
      return histogramOf(values[name], low, high, bins, all[name]);
    },
  };
}

/** @param {Attention} attention @param {(share: number) => boolean} wanted */
async function walkedHead(attention, wanted) {
  const { query, key, value, scale } = attention;
  const overview = newOverview(query.rows, key.rows, OVERVIEW_SIDE);
  const bound = largestNorm(query) * largestNorm(key) || 1;
  const most = { scores: bound, scaled: bound * Math.abs(scale), masked: bound * Math.abs(scale),
    weights: 1, output: value ? largestOf(value.data) || 1 : 1 };
  const fine = Object.fromEntries(STUDIED.map((stage) => {
    const high = most[/** @type {keyof typeof most} */ (stage)] || 1;
    return [stage, newHistogram(stage === "weights" ? 0 : -high, high, FINE_BINS)];
  }));
  let [largestOutput, largestRowVar] = [0, 0];
  const tally = newTally();
  let rested = performance.now();
  for (const block of rowBlocks(attention)) {
    addToOverview(overview, block.weights, key.rows, block.first, block.seen);
    addToHistogram(fine.scores, block.scores);
    addToHistogram(fine.scaled, block.scaled);
    addToHistogram(fine.masked, block.masked, block.seen);
    addToHistogram(fine.weights, block.weights, block.seen);
    if (value) {
      const output = outputOf(block.weights, block.seen, value);
      addToHistogram(fine.output, output);
      largestOutput = Math.max(largestOutput, largestOf(output));
    }
    largestRowVar = Math.max(largestRowVar, largestOf(block.rows.rawVar));
    addToTally(tally, block);
    if (performance.now() - rested > 40) {
      await new Promise((resolve) => setTimeout(resolve));
      if (!wanted(block.last / query.rows)) throw new Error("another head is looked at");
      rested = performance.now();
    }
  }
  return {
    /** @type {Block|null} */ whole: null,
    summary: summaryOfTally(tally),
    overview,
    largestOutput,
    largestRowVar,
    /** @param {string} stage @param {number} low @param {number} high @param {number} bins
     *  @returns {Spread} */
    spread(stage, low, high, bins) {
      const from = fine[stage];
      const counts = new Float64Array(bins);
      from.counts.forEach((count, index) => {
        const at = from.low + ((index + 0.5) / FINE_BINS) * (from.high - from.low);
        const bin = Math.floor(((at - low) / (high - low)) * bins);
        counts[Math.min(bins - 1, Math.max(0, bin))] += count;
      });
      return { low, high, counts, mean: from.mean, sd: from.sd };
    },
  };
}

/** The largest finite magnitude, 0 if there is none. @param {ArrayLike<number>} values */
export function largestOf(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) {
    const size = Math.abs(values[i]);
    if (size > most && size < Infinity) most = size;
  }
  return most;
}

/** @param {import("./stages.js").Matrix} matrix */
function largestNorm(matrix) {
  let most = 0;
  for (let i = 0; i < matrix.rows; i++) {
    let sum = 0;
    for (let m = 0; m < matrix.columns; m++) sum += matrix.data[i * matrix.columns + m] ** 2;
    if (sum > most && sum < Infinity) most = sum;
  }
  return Math.sqrt(most);
}

/**
 * One row as the page tells it: for each key its score, scaled score, logit, weight and whether it
 * is seen; the largest outcome and the sum of e^(logit − largest), the sink included.
 *
 * @param {Study} study @param {number} i
 */
export function rowStudy(study, i) {
  const first = study.whole ? 0 : i;
  const block = study.whole ?? study.block(i, i + 1);
  const { keys } = study;
  const from = (i - first) * keys;
  const cut = (/** @type {any} */ values) => values.subarray(from, from + keys);
  const seen = cut(block.seen);
  const masked = cut(block.masked);
  const { sink } = study.attention;
  let largest = sink ?? -Infinity;
  for (let j = 0; j < keys; j++) if (seen[j] && masked[j] > largest) largest = masked[j];
  let total = sink === null ? 0 : Math.exp(sink - largest);
  for (let j = 0; j < keys; j++) if (seen[j]) total += Math.exp(masked[j] - largest);
  const at = i - first;
  const rows = block.rows;
  return {
    scores: cut(block.scores), scaled: cut(block.scaled), masked, weights: cut(block.weights), seen,
    largest, total, sink,
    output: block.output && block.output.subarray(at * study.dv, (at + 1) * study.dv),
    visible: rows.visible[at], entropy: rows.entropy[at], effectiveKeys: rows.effectiveKeys[at],
    largestWeight: rows.largestWeight[at], gradient: rows.gradient[at], topKey: rows.topKey[at],
    rawVar: rows.rawVar[at], scoreVar: rows.scoreVar[at], nonfinite: rows.nonfinite[at] === 1,
  };
}

/** The products q_m·k_m of one cell. @param {Attention} attention @param {number} i
 *  @param {number} j */
export function productsOf(attention, i, j) {
  const d = attention.query.columns;
  const result = new Float64Array(d);
  for (let m = 0; m < d; m++) {
    result[m] = attention.query.data[i * d + m] * attention.key.data[j * d + m];
  }
  return result;
}
