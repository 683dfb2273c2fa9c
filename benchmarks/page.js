/**
 * Time of the page's arithmetic: node benchmarks/page.js
 *
 * One head of random normal q, k, v, d_k 64, causal. Each line is the first run, as a page that has
 * just opened has it, and the best of five; then the memory that the whole took at most.
 */

import {
  addToTally, drawProducts, drawSoftmaxes, newTally, randomStream, rowBlocks, scaleCurves,
  scaleSteps, spacedRows, stagesOf, summaryOf, summaryOfTally, weightMaxima,
} from "../src/scaledot/web/stages.js";

const D = 64;
const SEED = 20260714;

function head(n) {
  const random = randomStream(SEED, n);
  const matrix = () => ({
    data: Float32Array.from(random.normals(new Float64Array(n * D))), rows: n, columns: D,
  });
  return {
    query: matrix(), key: matrix(), value: matrix(), scale: 1 / Math.sqrt(D), softcap: null,
    sink: null, mask: { kind: "causal" }, hidden: null, bias: null,
  };
}

function time(what, run) {
  const times = [];
  for (let i = 0; i < 5; i++) {
    const start = performance.now();
    run();
    times.push(performance.now() - start);
  }
  const [first, best] = [times[0], Math.min(...times)].map((x) => x.toFixed(1).padStart(8));
  console.log(`${what.padEnd(52)}${first} ms first${best} ms best`);
}

const short = head(64);
time("64 tokens: every stage and its statistics", () => stagesOf(short));
const middle = head(512);
time("512 tokens: every stage and its statistics", () => stagesOf(middle));
const block = stagesOf(middle);
time("512 tokens: the same at another scale", () => {
  stagesOf({ ...middle, scale: 1 }, 0, 512, block.scores);
});
time("512 tokens: summary", () => summaryOf([block]));
time("512 tokens: curves at 64 scales", () => scaleCurves(middle, scaleSteps(1 / D, 2, 64)));
for (const n of [2000, 8000]) {
  const long = head(n);
  time(`${n} tokens: largest weights at 512 pixels a side`, () => weightMaxima(long, 512));
  time(`${n} tokens: a tile's 24 rows`, () => stagesOf(long, n - 24, n));
  if (n > 2000) continue;
  time(`${n} tokens: summary`, () => {
    const tally = newTally();
    for (const rows of rowBlocks(long)) addToTally(tally, rows);
    summaryOfTally(tally);
  });
  time(`${n} tokens: curves at 64 scales of 256 rows`, () => {
    scaleCurves(long, scaleSteps(1 / D, 2, 64), spacedRows(n, 256));
  });
}
time("Monte Carlo, d_k 4 … 1024: 5,000 scores, 400 rows", () => {
  for (const dK of [4, 16, 64, 256, 1024]) {
    drawProducts(dK, 5000, SEED);
    drawSoftmaxes(dK, 8, 400, SEED);
  }
});
console.log(`largest memory ${(process.resourceUsage().maxRSS / 1024).toFixed(0)} MiB`);
