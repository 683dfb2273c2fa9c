/**
 * study.js: a head that is walked through in blocks says what the same head held whole says.
 * Run by `node --test tests/web/study.test.js`, and by tests/test_stages_golden.
 */

import assert from "node:assert/strict";
import { test } from "node:test";

import { randomStream } from "../../src/scaledot/web/stages.js";
import { headStudy, productsOf, rowStudy, studyHead } from "../../src/scaledot/web/study.js";

const yes = () => true;

function head(n, { d = 7, seed = 3, ...rest } = {}) {
  const random = randomStream(seed);
  const matrix = (columns) => ({ data: random.normals(new Float32Array(n * columns)), rows: n,
    columns });
  return { query: matrix(d), key: matrix(d), value: matrix(5), scale: d ** -0.5, softcap: null,
    sink: null, mask: { kind: "causal" }, hidden: null, bias: null, ...rest };
}

const near = (found, expected, name) => {
  if (Number.isNaN(expected)) return assert.ok(Number.isNaN(found), name);
  return assert.ok(Math.abs(found - expected) <= 1e-9 * Math.max(1, Math.abs(expected)),
    `${name}: ${found}, expected ${expected}`);
};

for (const [name, options] of [["causal", {}], ["sink and cap", { sink: 0.3, softcap: 2 }],
  ["window", { mask: { kind: "window", window: 11 } }]]) {
  test(`walked = whole, ${name}`, async () => {
    const attention = head(300, options);
    const whole = await studyHead(attention, yes);
    const walked = await studyHead(attention, yes, 0);
    assert.ok(whole.whole !== null && walked.whole === null);
    for (const [field, value] of Object.entries(whole.summary)) {
      near(walked.summary[field], value, field);
    }
    near(walked.largestOutput, whole.largestOutput, "largestOutput");
    near(walked.largestRowVar, whole.largestRowVar, "largestRowVar");
    for (const stage of ["scores", "scaled", "masked", "weights", "output"]) {
      const low = stage === "weights" ? 0 : -6;
      const [a, b] = [walked, whole].map((x) => x.spread(stage, low, stage === "weights" ? 1 : 6, 24));
      near(a.mean, b.mean, `${stage} mean`);
      near(a.sd, b.sd, `${stage} sd`);
    }
    const [a, b] = [rowStudy(walked, 250), rowStudy(whole, 250)];
    assert.deepEqual(a.weights, b.weights);
    assert.deepEqual(a.output, b.output);
    near(a.total, b.total, "total");
  });
}

test("the overview of a walked head keeps its largest weight", async () => {
  const walked = await studyHead(head(700), yes, 0);
  const { overview } = walked;
  assert.equal(overview.rowStep, 2);
  const block = walked.block(400, 402);
  let most = 0;
  for (const weight of block.weights) most = Math.max(most, weight);
  const row = overview.data.subarray(200 * overview.columns, 201 * overview.columns);
  near(Math.max(...row), Math.fround(most), "pixel");
});

test("a head nobody looks at any more is given up between two blocks", async () => {
  const slow = head(3000, { d: 2 });
  await assert.rejects(studyHead(slow, () => false), /another head/);
});

test("the weights of a row are e^(logit − largest) over their sum, the sink's included", async () => {
  const study = await studyHead(head(9, { sink: 0.5 }), yes);
  const row = rowStudy(study, 6);
  for (let j = 0; j < 9; j++) {
    near(row.weights[j], row.seen[j] ? Math.exp(row.masked[j] - row.largest) / row.total : 0, j);
  }
});

test("the products of a cell add up to its score", async () => {
  const attention = head(9);
  const study = await studyHead(attention, yes);
  const sum = productsOf(attention, 7, 2).reduce((a, b) => a + b, 0);
  near(sum, rowStudy(study, 7).scores[2], "score");
});

test("a study goes on while anybody who asked wants it", async () => {
  const matrix = (n, d) => ({ shape: [n, d], data: new Float32Array(n * d).fill(0.1) });
  const loaded = { query: matrix(3000, 2), key: matrix(3000, 2), value: null, sink: null,
    hidden: null, bias: null };
  const layer = { scale: 1, softcap: null, mask: { kind: "causal" } };
  const heard = [];
  const first = headStudy(loaded, layer, () => false);
  const second = headStudy(loaded, layer, yes, (share) => heard.push(share));
  assert.equal(first, second);
  const study = await second;
  assert.equal(study.summary.rows, 3000);
  assert.ok(heard.length > 0 && heard.every((x, i) => x > (heard[i - 1] ?? 0) && x <= 1));
});
