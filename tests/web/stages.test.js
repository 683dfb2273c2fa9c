/**
 * stages.js against tests/golden/stages_*.json, which `scaledot.trace` has written, and what it
 * promises besides. Run by `node --test tests/web/stages.test.js`, and by tests/test_stages_golden.
 */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import {
  FALLBACK, HIDDEN, LARGEST_BLOCK, SCALE_RULES, VISIBLE, addToHistogram, addToOverview,
  addToTally, attentionOf, drawProducts, drawSoftmaxes, gradientsOf, heaviestKeys, histogramOf,
  newHistogram, newOverview, newTally, randomStream, rowBlocks, scaleCurves, scaleFactor,
  scaleSteps, scalingFacts, scoresOf, spacedRows, stagesOf, summaryOf, summaryOfTally,
  weightMaxima,
} from "../../src/scaledot/web/stages.js";

const GOLDEN = new URL("../golden/", import.meta.url);
const read = (file) => JSON.parse(readFileSync(new URL(file, GOLDEN), "utf8"));
const FILES = readdirSync(GOLDEN).filter((x) => /^stages_.*\.json$/.test(x)).sort();
const CASES = FILES.filter((x) => read(x).format === "scaledot/stages");

function unpacked(array) {
  if (array === null) return null;
  const bytes = Uint8Array.from(Buffer.from(array.float64 ?? array.float32, "base64"));
  const data = array.float64 ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return { shape: array.shape, data };
}

function attentionIn(document, head) {
  const arrays = Object.fromEntries(
    Object.entries(head.arrays).map(([k, x]) => [k, k === "sink" ? x : unpacked(x)]),
  );
  return attentionOf(arrays, document.layer);
}

/** Equal to `limit`, relative to the larger of 1 and the number, or to `size`; NaN is NaN. */
function assertClose(found, wanted, limit, what, size = 1) {
  assert.equal(found.length, wanted.length, what);
  for (let i = 0; i < wanted.length; i++) {
    const [a, b] = [Number(found[i]), wanted[i]];
    if (Object.is(a, b) || a === b) continue;
    const error = Math.abs(a - b) / Math.max(1, Math.abs(b), size);
    assert.ok(error <= limit, `${what}[${i}] is ${a}, expected ${b}`);
  }
}

function largestFinite(values) {
  return values.reduce((m, x) => (Number.isFinite(x) ? Math.max(m, Math.abs(x)) : m), 0);
}

/** A head of random normal queries, keys and values. */
function randomHead(n, d, more = {}) {
  const random = randomStream(n, d);
  const matrix = (columns) => ({
    data: Float32Array.from(random.normals(new Float64Array(n * columns))), rows: n, columns,
  });
  return {
    query: matrix(d), key: matrix(d), value: matrix(d), scale: 1 / Math.sqrt(d), softcap: null,
    sink: null, mask: { kind: "causal" }, hidden: null, bias: null, ...more,
  };
}

test("there are golden files", () => assert.ok(CASES.length >= 20));

for (const file of CASES) {
  const document = read(file);
  for (const [h, head] of document.heads.entries()) {
    for (const kind of ["float64", "float32"].filter((x) => head[x])) {
      test(`${file} head ${h} (${document.about}), ${kind}`, () => {
        const attention = attentionIn(document, head);
        const block = stagesOf(attention);
        const { stages, rows, summary, curves } = head[kind];
        const limit = kind === "float64" ? 1e-12 : 1e-6;
        // A float32 logit of a thousand is known to 1e-4: so is what softmax makes of it.
        const size = Math.max(1, largestFinite(block.scaled) / 10);
        for (const [name, packed] of Object.entries(stages)) {
          if (name === "visible") {
            const seen = Array.from(block.seen, (x) => (x === VISIBLE ? 1 : 0));
            assert.deepEqual(seen, Array.from(unpacked(packed).data), name);
          } else if (packed === null) assert.equal(block[name], null, name);
          else {
            const wanted = unpacked(packed).data;
            const linear = ["scores", "scaled", "masked"].includes(name);
            const most = linear ? largestFinite(wanted) : size;
            assertClose(block[name], wanted, limit, name, most);
          }
        }
        for (const [name, packed] of Object.entries(rows)) {
          if (packed === null) assert.equal(block.rows[name], null, name);
          else assertClose(block.rows[name], unpacked(packed).data, limit, name, size);
        }
        const found = summaryOf([block]);
        assert.equal(found.largestRaw, largestFinite(block.scores));
        for (const [name, wanted] of Object.entries(summary)) {
          assertClose([found[name]], [wanted ?? NaN], limit, `summary ${name}`, size);
        }
        const scales = document.factors.map((x) => x * attention.scale);
        const curve = scaleCurves(attention, scales);
        const most = size * Math.max(...document.factors);
        for (const [name, packed] of Object.entries(curves)) {
          assertClose(curve[name], unpacked(packed).data, limit, `curve ${name}`, most);
        }
      });
    }
  }
}

test("blocks of rows say what the whole head says", () => {
  for (const file of CASES) {
    const document = read(file);
    for (const head of document.heads) {
      const attention = attentionIn(document, head);
      const whole = stagesOf(attention);
      const { keys } = whole;
      for (let first = 0; first < attention.query.rows; first += 3) {
        const last = Math.min(first + 3, attention.query.rows);
        const block = stagesOf(attention, first, last);
        for (const name of ["scores", "masked", "weights", "seen"]) {
          assert.deepEqual(block[name], whole[name].slice(first * keys, last * keys), name);
        }
        assert.deepEqual(block.rows.entropy, whole.rows.entropy.slice(first, last));
        const again = stagesOf(attention, first, last, block.scores);
        assert.deepEqual(again, block);
      }
    }
  }
});

test("a long text goes through blocks: summary, histogram and overview as of the whole", () => {
  const attention = randomHead(401, 8);
  const whole = stagesOf(attention);
  for (const everything of [true, false]) {
    const tally = newTally();
    const histogram = newHistogram(-4, 4, 32);
    const overview = newOverview(401, 401, 57);
    let blocks = 0;
    for (const block of rowBlocks(attention, everything)) {
      blocks++;
      addToTally(tally, block);
      addToHistogram(histogram, block.scaled, block.seen);
      addToOverview(overview, block.weights, 401, block.first, block.seen);
    }
    assert.ok(blocks > 1);
    const [one, other] = [summaryOfTally(tally), summaryOf([whole])];
    for (const name in other) {
      if (name === "largestRaw" && !everything) continue;
      assertClose([one[name]], [other[name]], 1e-12, name);
    }
    const direct = histogramOf(whole.scaled, -4, 4, 32, whole.seen);
    assert.deepEqual(histogram.counts, direct.counts);
    assertClose([histogram.mean, histogram.sd], [direct.mean, direct.sd], 1e-13, "moments");
    assert.deepEqual(overview, [...weightMaxima(attention, 57)].at(-1));
    assert.deepEqual([overview.rowStep, overview.rows], [8, 51]);
    for (let pixel = 0; pixel < 51 * 51; pixel++) {
      const [r, c] = [Math.floor(pixel / 51), pixel % 51];
      let most = 0;
      let seen = 0;
      for (let i = 8 * r; i < Math.min(8 * r + 8, 401); i++) {
        for (let j = 8 * c; j < Math.min(8 * c + 8, 401); j++) {
          most = Math.max(most, whole.weights[i * 401 + j]);
          seen = Math.max(seen, whole.seen[i * 401 + j]);
        }
      }
      assert.equal(overview.data[pixel], Math.fround(most));
      assert.equal(overview.seen[pixel], seen);
    }
  }
});

test("an overview keeps the sign of the largest, and says where a NaN is", () => {
  const overview = newOverview(2, 5, 1, 3);
  addToOverview(overview, Float64Array.of(1, -3, 2, 0, NaN), 5, 0);
  addToOverview(overview, Float64Array.of(1, 2, 0, 0, 5), 5, 1, Uint8Array.of(1, 1, 0, 0, 1));
  assert.deepEqual(overview.data, Float32Array.of(-3, 2, 5));
  assert.deepEqual(overview.spoilt, Uint8Array.of(0, 0, 1));
});

test("no block holds more than 512² cells", () => {
  const attention = randomHead(513, 2);
  assert.throws(() => stagesOf(attention), /fewer rows/);
  assert.equal(stagesOf(attention, 0, Math.floor(LARGEST_BLOCK / 513)).keys, 513);
});

test("what cannot be a head is an error that says why", () => {
  const array = (...shape) => ({ shape, data: new Float32Array(shape.reduce((a, b) => a * b)) });
  const layer = { scale: 1, mask: { kind: "none" } };
  const make = (more) => attentionOf({ query: array(2, 3), key: array(2, 3), ...more }, layer);
  assert.equal(make({}).value, null);
  assert.throws(() => make({ key: array(2, 4) }), /a query has 3 numbers, a key 4/);
  assert.throws(() => make({ value: array(3, 1) }), /2 keys and 3 values/);
  assert.throws(() => make({ bias: array(3, 2) }), /bias is 3×2: expected 2×2/);
  assert.throws(() => make({ key: { shape: [2, 3], data: [1] } }), /key has shape 2×3 and 1/);
  const two = { query: array(2, 3), key: array(2, 3) };
  assert.throws(() => attentionOf(two, { scale: null }), /scale of a head is null/);
  const dense = { scale: 1, mask: { kind: "dense" } };
  assert.throws(() => attentionOf(two, dense), /neither hidden nor bias/);
  const odd = { ...make({}), mask: { kind: "window", window: null } };
  assert.throws(() => stagesOf(odd), /a mask is/);
});

test("a row that sees only what finfo.min hides is spread over it, and counted as empty", () => {
  const document = read("stages_floor.json");
  const block = stagesOf(attentionIn(document, document.heads[0]));
  const row = block.seen.slice(2 * 7, 3 * 7);
  assert.deepEqual([...row], [2, 2, 2, 2, 0, 2, 2]);
  assert.deepEqual([FALLBACK, HIDDEN], [2, 0]);
  assert.equal(block.rows.visible[2], 0);
  assert.ok([...block.seen.slice(0, 7)].includes(HIDDEN));
});

test("a sink of −∞ is none, and of ∞ no number", () => {
  const attention = randomHead(5, 3);
  const plain = stagesOf(attention);
  const without = stagesOf({ ...attention, sink: -Infinity });
  assertClose(without.weights, plain.weights, 0, "weights");
  for (const name of ["entropy", "topMargin", "gradient", "largestWeight", "lse"]) {
    assertClose(without.rows[name], plain.rows[name], 1e-15, name);
  }
  assert.deepEqual(without.rows.sinkMass, new Float64Array(5));
  const endless = { ...attention, sink: Infinity };
  const spoilt = stagesOf(endless);
  assert.deepEqual(spoilt.rows.nonfinite, new Uint8Array(5).fill(1));
  spoilt.weights.forEach((w, c) => assert.ok(spoilt.seen[c] === HIDDEN ? w === 0 : Number.isNaN(w)));
  assert.equal(scaleCurves(endless, [1]).rows, 0);
});

test("p(1 − p) of a saturated weight is what the others hold", () => {
  const attention = {
    ...randomHead(2, 1, { mask: { kind: "none" } }), scale: 1,
    query: { data: Float64Array.of(1, 0), rows: 2, columns: 1 },
    key: { data: Float64Array.of(50, 0), rows: 2, columns: 1 },
  };
  const block = stagesOf(attention);
  const [top, other] = gradientsOf(block);
  const rest = Math.exp(-50) / (1 + Math.exp(-50));
  const ratios = [top / rest, other / rest, block.rows.gradient[0] / rest];
  assertClose(ratios, [1, 1, 2], 1e-12, "p(1 − p)");
  assertClose(gradientsOf(block).slice(2), [0.25, 0.25], 1e-15, "of equal weights");
});

test("a histogram holds its edges, and tells what lies outside", () => {
  const values = Float64Array.of(-2, -1, -0.5, 0, 0.99, 1, 3, NaN, -Infinity);
  const found = histogramOf(values, -1, 1, 4);
  assert.deepEqual(found.counts, Float64Array.of(1, 1, 1, 2));
  assert.deepEqual([found.below, found.above, found.nonfinite, found.count], [1, 1, 2, 7]);
  const mean = (-2 - 1 - 0.5 + 0.99 + 1 + 3) / 7;
  assert.ok(Math.abs(found.mean - mean) < 1e-15);
  const nothing = histogramOf(Float64Array.of(NaN), 0, 1, 2);
  assert.ok(Number.isNaN(nothing.mean) && Number.isNaN(nothing.sd));
  assert.throws(() => newHistogram(1, 1, 4), /holds nothing/);
});

test("order kept, range shrinks, signs stay: of the article's three observations", () => {
  const raw = Float64Array.of(-12, 0, 5, 5, 49, NaN);
  const seen = Uint8Array.of(1, 1, 1, 1, 1, 1);
  const half = scalingFacts(raw, raw.map((x) => x / 8), seen);
  assert.deepEqual(half, {
    keys: 5, kept: 5, rangeBefore: 61, rangeAfter: 7.625, negative: 1, positive: 3, signs: 5,
  });
  const turned = scalingFacts(raw, raw.map((x) => -x), seen);
  assert.deepEqual([turned.kept, turned.signs, turned.negative], [0, 1, 3]);
  const gone = scalingFacts(raw, raw.map((x) => x * 0), seen);
  assert.deepEqual([gone.kept, gone.rangeAfter, gone.signs], [1, 0, 1]);
  const none = scalingFacts(raw, raw, new Uint8Array(6));
  assert.deepEqual([none.keys, Number.isNaN(none.rangeBefore)], [0, true]);
});

test("a long row shows its heaviest keys in text order and sums up the others", () => {
  const weights = Float64Array.of(0.1, 0.4, 0.05, 0.3, 0.15, 0);
  const block = { keys: 6, weights, seen: Uint8Array.of(1, 1, 1, 1, 1, 0) };
  const all = { keys: [0, 1, 2, 3, 4], others: { count: 0, weight: 0 } };
  assert.deepEqual(heaviestKeys(block, 0), all);
  const tied = { ...block, weights: Float64Array.of(0.2, 0.2, 0.2, 0.2, 0.2, 0) };
  assert.deepEqual(heaviestKeys(tied, 0, 4, 2).keys, [0, 1]);
  const few = heaviestKeys(block, 0, 4, 2);
  assert.deepEqual([few.keys, few.others.count], [[1, 3], 3]);
  assertClose([few.others.weight], [0.3], 1e-15, "others");
});

test("scale rules are those of scales.py", () => {
  const { rules, factors } = read("stages_scales.json");
  assert.deepEqual(SCALE_RULES, rules);
  for (const { rule, dK, dModel, keys, scale } of factors) {
    const found = scaleFactor(rule, dK, { dModel, keys });
    assertClose([found / (scale || 1)], [scale && 1], 1e-15, rule);
  }
  assert.throws(() => scaleFactor("1/sqrt_d_model", 64), /needs d_model/);
  assert.throws(() => scaleFactor("log_n/sqrt_d_k", 64), /number of keys/);
  assert.throws(() => scaleFactor("sqrt", 64), /expected one of/);
});

test("scales of a slider are even on a log axis; rows of a long text are evenly spaced", () => {
  assertClose(scaleSteps(1 / 64, 4, 5), [1 / 64, 1 / 16, 1 / 4, 1, 4], 1e-15, "scales");
  assert.deepEqual(spacedRows(3, 5), [0, 1, 2]);
  assert.deepEqual(spacedRows(10, 4), [2, 4, 7, 9]);
  assert.equal(new Set(spacedRows(2000, 256)).size, 256);
});

test("a curve of some rows is the mean of these", () => {
  const attention = randomHead(19, 4, { sink: 0.5, softcap: 3 });
  const { rows } = stagesOf(attention);
  const queries = [3, 4, 18];
  const found = scaleCurves(attention, [attention.scale], queries);
  assert.equal(found.rows, 3);
  for (const name of ["entropy", "largestWeight", "gradient"]) {
    const mean = queries.reduce((sum, i) => sum + rows[name][i] / 3, 0);
    assertClose(found[name], [mean], 1e-14, name);
  }
});

test("random numbers are those of sfc32, the same for the same seed and stream", () => {
  for (const { seed, stream, words } of read("stages_draws.json").draws) {
    const random = randomStream(seed, stream);
    assert.deepEqual(words.map(() => random.word()), words);
  }
  const draw = (...seed) => {
    const random = randomStream(...seed);
    return Array.from({ length: 4 }, () => random.word());
  };
  assert.deepEqual(draw(7), draw(7));
  const seeds = [[7], [8], [7, 1], [8, 1], [7 + 2 ** 32], [0]];
  assert.equal(new Set(seeds.map((x) => draw(...x).join())).size, seeds.length);
  assert.throws(() => randomStream(-1), /a seed is -1/);
  assert.throws(() => randomStream(0.5), /a seed is 0.5/);
});

test("random words are uniform and normal numbers are normal, over seeds", () => {
  // Of each seed one z; together they must be what 40 standard normal numbers are.
  const sums = { bits: 0, mean: 0, square: 0, fourth: 0, lag: 0 };
  const n = 20_001; // odd: the last normal number of a pair is left out
  for (let seed = 0; seed < 40; seed++) {
    const random = randomStream(seed);
    let ones = 0;
    for (let i = 0; i < 1000; i++) {
      for (let w = random.word(); w; w &= w - 1) ones++;
    }
    const x = random.normals(new Float64Array(n));
    const total = (f) => x.reduce((sum, v, i) => sum + f(v, i), 0);
    sums.bits += ((ones - 16_000) / Math.sqrt(8000)) ** 2;
    sums.mean += (total((v) => v) / Math.sqrt(n)) ** 2;
    sums.square += (total((v) => v * v - 1) / Math.sqrt(2 * n)) ** 2;
    sums.fourth += (total((v) => v ** 4 - 3) / Math.sqrt(96 * n)) ** 2;
    sums.lag += (total((v, i) => (i ? v * x[i - 1] : 0)) / Math.sqrt(n - 1)) ** 2;
  }
  // χ² of 40 degrees lies outside 16 … 80 once in 10 000.
  for (const [name, sum] of Object.entries(sums)) assert.ok(sum > 16 && sum < 80, `${name} ${sum}`);
});

test("random scores spread as √d_k, and softmax saturates without the scale", () => {
  let chi = 0;
  for (let seed = 0; seed < 40; seed++) {
    const { values, sd, theory, mean } = drawProducts(16, 2000, seed);
    assert.deepEqual([values.length, theory], [2000, 4]);
    // Var of a sample variance: (κ + 2)σ⁴/n, and the kurtosis of a sum of 16 products is 6/16.
    chi += ((sd * sd - 16) / (16 * Math.sqrt((2 + 6 / 16) / 2000))) ** 2;
    assert.ok(Math.abs(mean) < (5 * 4) / Math.sqrt(2000));
  }
  assert.ok(chi > 16 && chi < 80, `χ² ${chi}`);
  assert.deepEqual(drawProducts(4, 50, 9), drawProducts(4, 50, 9));
  const found = [4, 64, 1024].map((dK) => drawSoftmaxes(dK, 8, 400, 20260714));
  assert.ok(found[0].raw < found[1].raw && found[1].raw < found[2].raw && found[2].raw > 0.95);
  for (const { scaled, first } of found) {
    assert.ok(scaled > 0.33 && scaled < 0.39);
    for (const weights of [first.raw, first.scaled]) {
      assertClose([weights.reduce((a, b) => a + b)], [1], 1e-14, "a row");
    }
  }
});

test("scores do not depend on how keys are taken together", () => {
  const { query, key } = randomHead(11, 3);
  const found = scoresOf(query, key, 2, 5, 1, 8);
  for (let c = 0; c < found.length; c++) {
    const [i, j] = [2 + Math.floor(c / 11), c % 11];
    let sum = 0;
    for (let m = 0; m < 3; m++) sum += query.data[3 * i + m] * key.data[3 * j + m];
    assert.equal(found[c], j >= 1 && j < 8 ? sum : 0);
  }
});
