// Runs the native kernel over many small problems whose buffers are exactly as large as they must be,
// to be compiled with sanitizers, which end the process at the first stray read, write or undefined
// operation; outputs are held against a plain loop in double.
//
//   c++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-psabi
//       -mavx2 -mfma -mf16c tests/native_driver.cpp -o driver -pthread
//
// Without the -m options it is the baseline variant; with -fsanitize=thread it looks for races.

#include "../src/scaledot/kernels/native.cpp"

#include <cstdio>
#include <memory>
#include <random>

std::mt19937 engine(20260714);

template <class T> struct Block1 {   // exactly n elements on the heap
  std::unique_ptr<T[]> data;
  explicit Block1(int64_t n) : data(new T[n]()) {}
  operator T*() { return data.get(); }
};

Block1<float> normal(int64_t n) {
  std::normal_distribution<float> draw;
  Block1<float> x(n);
  for (int64_t i = 0; i < n; i++) x[i] = draw(engine);
  return x;
}

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)(bits >> 16);
}

enum MaskKind { NONE, CAUSAL, WINDOW, KEEP, IDS, BOOLEAN, BOOLEAN_ROW, BIAS, BIAS_HALF, KINDS };

struct Shape { int64_t heads, kv_heads, queries, keys, dim, value_dim; };

double run(const Shape& s, MaskKind kind, bool half, bool capped, bool with_sinks, int64_t threads) {
  const int64_t rows = s.heads * s.queries, group = s.heads / s.kv_heads;
  auto q = normal(rows * s.dim), k = normal(s.kv_heads * s.keys * s.dim);
  auto v = normal(s.kv_heads * s.keys * s.value_dim), sinks = normal(s.heads);
  Block1<uint16_t> hq(rows * s.dim), hk(s.kv_heads * s.keys * s.dim), hv(s.kv_heads * s.keys * s.value_dim);
  auto round = [&](Block1<float>& x, Block1<uint16_t>& h, int64_t n) {
    for (int64_t i = 0; half && i < n; i++) h[i] = to_bfloat16(x[i]), x[i] = widen_bfloat16(h[i]);
  };
  round(q, hq, rows * s.dim), round(k, hk, s.kv_heads * s.keys * s.dim);
  round(v, hv, s.kv_heads * s.keys * s.value_dim);
  const int64_t scores = rows * s.keys;
  Block1<uint8_t> allowed(kind == BOOLEAN_ROW ? s.keys : scores), keep(s.keys), counted(rows), flags(rows);
  auto bias = normal(scores);
  Block1<uint16_t> half_bias(scores);
  Block1<int32_t> query_ids(s.queries), key_ids(s.keys), whole(2 * rows);
  for (int64_t i = 0; i < (kind == BOOLEAN_ROW ? s.keys : scores); i++) allowed[i] = engine() % 3 != 0;
  for (int64_t i = 0; i < s.keys; i++) keep[i] = engine() % 4 != 0, key_ids[i] = (int32_t)(i / 7);
  for (int64_t i = 0; i < s.queries; i++) query_ids[i] = (int32_t)(i / 7);
  for (int64_t i = 0; i < scores; i++) {
    if (engine() % 8 == 0) bias[i] = engine() % 2 ? -INF : LOWEST;
    half_bias[i] = to_bfloat16(bias[i]);
  }
  auto d_out = normal(rows * s.value_dim), level = normal(rows), d_entropy = normal(rows);
  Block1<float> out(rows * s.value_dim), numbers(FIELDS * rows), d_query(rows * s.dim);
  Block1<float> d_key(s.kv_heads * s.keys * s.dim), d_value(s.kv_heads * s.keys * s.value_dim), d_bias(scores);

  Problem p{};
  p.batch = 1, p.heads = s.heads, p.kv_heads = s.kv_heads, p.queries = s.queries, p.keys = s.keys;
  p.dim = s.dim, p.value_dim = s.value_dim, p.scale = 0.3, p.softcap = capped ? 2.0 : 0.0;
  p.floor = LOWEST / 2.0, p.left = p.right = -1, p.threads = threads, p.statistics = 1;
  auto array = [&](float* x, uint16_t* h, int64_t length, int64_t dim) {
    return Array{half ? (const char*)h : (const char*)x, half ? BFLOAT16 : FLOAT32, {0, length * dim, dim, 1}};
  };
  p.query = array(q, hq, s.queries, s.dim), p.key = array(k, hk, s.keys, s.dim);
  p.value = array(v, hv, s.keys, s.value_dim);
  if (kind == CAUSAL || kind == WINDOW) p.right = 0, p.offset = s.keys - s.queries;
  if (kind == WINDOW) p.left = 5;
  if (kind == KEEP) p.keep = {(const char*)(uint8_t*)keep, BOOL, {0, 0, 0, 1}};
  if (kind == IDS) {
    p.query_ids = {(const char*)(int32_t*)query_ids, INT32, {0, 0, 0, 1}};
    p.key_ids = {(const char*)(int32_t*)key_ids, INT32, {0, 0, 0, 1}};
  }
  const int64_t per_head = s.queries * s.keys;
  if (kind == BOOLEAN) p.dense = {(const char*)(uint8_t*)allowed, BOOL, {0, per_head, s.keys, 1}};
  if (kind == BOOLEAN_ROW) p.dense = {(const char*)(uint8_t*)allowed, BOOL, {0, 0, 0, 1}};
  if (kind == BIAS) p.dense = {(const char*)(float*)bias, FLOAT32, {0, per_head, s.keys, 1}};
  if (kind == BIAS_HALF) p.dense = {(const char*)(uint16_t*)half_bias, BFLOAT16, {0, per_head, s.keys, 1}};
  if (with_sinks) p.sinks = sinks;
  p.out = out, p.rows = numbers, p.whole = whole, p.nonfinite = flags;
  scaledot_forward(&p);

  // At five scales in one run, which has the values too.
  Problem sweep = p;
  Block1<float> swept(5 * FIELDS * rows);
  Block1<int32_t> swept_whole(5 * 2 * rows);
  Block1<uint8_t> swept_flags(5 * rows);
  sweep.octaves = 4;
  sweep.rows = swept, sweep.whole = swept_whole, sweep.nonfinite = swept_flags;
  scaledot_forward(&sweep);

  for (int64_t r = 0; r < rows; r++) counted[r] = whole[r] > 0;
  p.d_out = d_out, p.level = level, p.d_entropy = d_entropy, p.counted = counted;
  p.top = numbers + TOP * rows, p.log_mass = numbers + LOG_MASS * rows;
  p.d_query = d_query, p.d_key = d_key, p.d_value = d_value;
  if (kind == BIAS || kind == BIAS_HALF) {
    p.d_bias = d_bias;
    const int64_t strides[4] = {0, per_head, s.keys, 1};
    std::copy(strides, strides + 4, p.d_bias_stride);
  }
  auto constants = normal(CONSTANTS * rows);
  Block1<float> sums(SUMS * rows);
  p.constants = constants, p.sums = sums;
  scaledot_backward(&p);

  double worst = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t h = r / s.queries, i = r % s.queries, kv = h / group, at = i + p.offset;
    if (!counted[r]) continue;   // what a row of finfo.min attends to is tests/test_native.py's
    std::vector<double> logit(s.keys, -INFINITY);
    double top = with_sinks ? sinks[h] : -INFINITY;
    for (int64_t j = 0; j < s.keys; j++) {
      if ((p.right == 0 && j > at) || (p.left >= 0 && j < at - p.left)) continue;
      if ((kind == KEEP && !keep[j]) || (kind == IDS && query_ids[i] != key_ids[j])) continue;
      if (kind == BOOLEAN && !allowed[r * s.keys + j]) continue;
      if (kind == BOOLEAN_ROW && !allowed[j]) continue;
      double dot = 0;
      for (int64_t x = 0; x < s.dim; x++)
        dot += (double)q[r * s.dim + x] * k[(kv * s.keys + j) * s.dim + x];
      dot *= p.scale;
      if (capped) dot = p.softcap * std::tanh(dot / p.softcap);
      if (kind == BIAS) dot += bias[r * s.keys + j];
      if (kind == BIAS_HALF) dot += widen_bfloat16(half_bias[r * s.keys + j]);
      logit[j] = dot;
      top = std::max(top, dot);
    }
    double mass = with_sinks ? std::exp(sinks[h] - top) : 0.0;
    std::vector<double> sum(s.value_dim, 0.0);
    for (int64_t j = 0; j < s.keys; j++) {
      const double e = std::exp(logit[j] - top);
      mass += e;
      for (int64_t x = 0; x < s.value_dim; x++) sum[x] += e * v[(kv * s.keys + j) * s.value_dim + x];
    }
    for (int64_t x = 0; x < s.value_dim; x++)
      worst = std::max(worst, std::fabs(sum[x] / mass - out[r * s.value_dim + x]));
  }
  return worst;
}

// Row moments over prefixes of runs of `run` keys, every fifth key left out, against two loops.
double run_moments(const Shape& s, int64_t run, bool half, int64_t threads) {
  const int64_t rows = s.heads * s.queries, group = s.heads / s.kv_heads, dim = s.dim;
  auto q = normal(rows * dim), k = normal(s.kv_heads * s.keys * dim);
  Block1<uint16_t> hq(rows * dim), hk(s.kv_heads * s.keys * dim);
  for (int64_t i = 0; half && i < rows * dim; i++) q[i] = widen_bfloat16(hq[i] = to_bfloat16(q[i]));
  for (int64_t i = 0; half && i < s.kv_heads * s.keys * dim; i++)
    k[i] = widen_bfloat16(hk[i] = to_bfloat16(k[i]));
  Block1<int64_t> runs(s.keys), source(s.keys), start(s.queries), stop(s.queries);
  Block1<uint8_t> weight(s.kv_heads * s.keys);
  Block1<double> toward(s.heads * dim), mean(rows), m2(rows), bias_mean(rows), bias_m2(rows);
  Block1<double> state(s.kv_heads * (1 + dim + dim * dim));
  for (int64_t j = 0; j < s.keys; j++) runs[j] = j / run * run, source[j] = s.keys - 1 - j;
  for (int64_t j = 0; j < s.kv_heads * s.keys; j++) weight[j] = j % 5 != 4;
  for (int64_t i = 0; i < s.queries; i++) {
    stop[i] = i * s.keys / std::max<int64_t>(s.queries - 1, 1);
    start[i] = stop[i] ? runs[stop[i] - 1] : 0;
  }
  for (int64_t i = 0; i < s.heads * dim; i++) toward[i] = q[i % (rows * dim)];
  const int64_t type = half ? BFLOAT16 : FLOAT32;
  Moments p{};
  p.batch = 1, p.heads = s.heads, p.kv_heads = s.kv_heads, p.queries = s.queries, p.keys = s.keys;
  p.dim = dim, p.threads = threads;
  p.query = {half ? (char*)(uint16_t*)hq : (char*)(float*)q, type, {0, s.queries * dim, dim, 1}};
  p.key = {half ? (char*)(uint16_t*)hk : (char*)(float*)k, type, {0, s.keys * dim, dim, 1}};
  p.source = source, p.runs = run < s.keys ? (int64_t*)runs : nullptr, p.start = start, p.stop = stop;
  p.weight = weight, p.toward = toward, p.state = state;
  p.mean = mean, p.m2 = m2, p.bias_mean = bias_mean, p.bias_m2 = bias_m2;
  scaledot_moments(&p);

  double worst = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t h = r / s.queries, i = r % s.queries, kv = h / group;
    auto against = [&](auto with, double a_mean, double a_m2) {
      double n = 0, sum = 0, square = 0;
      for (int pass = 0; pass < 2; pass++)
        for (int64_t j = start[i]; j < stop[i]; j++) {
          if (!weight[kv * s.keys + j]) continue;
          double dot = 0;
          for (int64_t x = 0; x < dim; x++)
            dot += (double)with[x] * k[(kv * s.keys + source[j]) * dim + x];
          if (pass == 0) n++, sum += dot;
          else square += (dot - sum / n) * (dot - sum / n);
        }
      worst = std::max(worst, std::fabs(a_mean - (n ? sum / n : 0)));
      worst = std::max(worst, std::fabs(a_m2 - square) / std::max(1.0, square));
    };
    against((float*)q + r * dim, mean[r], m2[r]);
    against((double*)toward + h * dim, bias_mean[r], bias_m2[r]);
  }
  return worst;
}

int main() {
  const Shape shapes[] = {
      {2, 1, 1, 33, 8, 8},   {4, 2, 2, 300, 7, 5},    {1, 1, 1, 1, 1, 1},       {2, 2, 3, 5, 9, 17},
      {2, 1, 25, 131, 16, 3}, {1, 1, 49, 257, 33, 40}, {3, 3, 100, 97, 130, 12}, {2, 2, 7, 129, 1, 140},
  };
  int problems = 0;
  double worst = 0;
  for (const Shape& s : shapes)
    for (int kind = 0; kind < KINDS; kind++)
      for (int more = 0; more < 4; more++) {
        worst = std::max(worst, run(s, (MaskKind)kind, more & 1, more & 2, more == 3, 1 + more % 3));
        problems++;
      }
  double worst_moment = 0;
  for (const Shape& s : shapes)
    for (int64_t run : {1, 3, 50, 1000})
      for (int more = 0; more < 4; more++) {
        const Shape longer{s.heads, s.kv_heads, s.queries, more & 2 ? s.keys * 9 : s.keys, s.dim, 0};
        worst_moment = std::max(worst_moment, run_moments(longer, run, more & 1, 1 + more % 3));
        problems++;
      }
  worst = std::max(worst, worst_moment * 1e6);   // they are in double
  std::printf("%s: %d problems, largest error %.2g\n", ISA, problems, worst);
  return worst < 1e-5 ? 0 : 1;
}
