// softmax(Q Kᵀ · scale + mask) · V on a CPU, with exact statistics of every row, in one pass.
//
// The plan. Query rows sit in the lanes of vectors; keys, values and head components are read
// where they lie and broadcast. A strip is 3 vectors of query rows (24 with AVX2):
//
//        Qᵀ (dim × strip)        K block (keys × dim)         Sᵀ (keys × strip)
//        x │ q0 q1 … q23         k0 · · · · ·                 k0 │ s s s … s
//        · │ ·  ·     ·     ×    k1 · · · · ·        →        k1 │ s s s … s     stays in L1
//        · │ ·  ·     ·          …                            …  │
//
//   task = some query rows of one head; tasks are handed out by a counter, the longest first
//     for each block of keys that a row of the task may see
//       for each strip of rows
//         1 scores    Sᵀ = K·Qᵀ, 4 keys × 3 vectors at a time: 12 sums in registers, and on the way
//                     each lane's largest and its sum
//         2 masked    only where a mask, bias or soft-cap touches the block: hidden → −inf
//         3 moments   Σ(s − mean)² of the block, joined to the row's (Chan, Golub & LeVeque 1979)
//         4 weights   e = exp(s − top) and Σe, Σe², Σe·(s − top), Σe·position, lane by lane:
//                     nothing is ever summed across a vector
//         5 output    Oᵀ += Vᵀ·e, again 12 sums in registers
//     finish: row statistics from the sums; Oᵀ ÷ mass, turned round
//
// The state of a row is `RowState` of rows.py: the heaviest key is kept apart from the others' mass
// so that 1 − p, the entropy and Σp(1−p) do not cancel. Backward recomputes Sᵀ from (top, log_mass)
// and runs the same two products: see `backward_head`. One or two queries against many keys have no
// lanes to fill; `decode` puts the components of a key in the lanes instead.
//
// Sources: Milakov & Gimelshein 2018 (arXiv:1805.02867), Rabe & Staats 2021 (arXiv:2112.05682), Dao
// et al. 2022 (arXiv:2205.14135); exp, log and tanh after Moshier's Cephes. What differs: rows in
// lanes, the statistics, the gradients of lse and entropy.
//
// This file knows no torch. It is compiled once for each instruction set, into libraries of their
// own, and native.py loads one. Never compile it with -ffast-math: rounding by a magic number,
// NaN and −inf all carry meaning here.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

// ---------------------------------------------------------------- vectors: W floats side by side

#if X86 && defined(__AVX512F__)
constexpr int W = 16;
constexpr const char* ISA = "avx512";
#elif X86 && defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
constexpr const char* ISA = "avx2";
#else
constexpr int W = 4;
constexpr const char* ISA = "baseline";
#endif

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool FUSED = true;
#else
constexpr bool FUSED = false;
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));

constexpr int MAX_NV = 3;          // vectors of rows in a strip
constexpr int R = MAX_NV * W;      // rows in a full strip
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOWEST = std::numeric_limits<float>::lowest();

INLINE F load(const float* p) { F v; std::memcpy(&v, p, sizeof v); return v; }
INLINE I load(const int32_t* p) { I v; std::memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
INLINE void store(int32_t* p, I v) { std::memcpy(p, &v, sizeof v); }

INLINE F splat(float s) {
#if X86 && defined(__AVX512F__)
  return (F)_mm512_set1_ps(s);
#elif X86 && defined(__AVX2__) && defined(__FMA__)
  return (F)_mm256_set1_ps(s);
#else
  return F{s, s, s, s};
#endif
}
INLINE I splat(int32_t s) {
#if X86 && defined(__AVX512F__)
  return (I)_mm512_set1_epi32(s);
#elif X86 && defined(__AVX2__) && defined(__FMA__)
  return (I)_mm256_set1_epi32(s);
#else
  return I{s, s, s, s};
#endif
}

// a > b ? a : b, so that a NaN in a is dropped and one in b is kept.
INLINE F larger(F a, F b) {
#if X86 && defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif X86 && defined(__AVX2__) && defined(__FMA__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#elif X86
  return (F)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

INLINE bool any(I mask) {
#if X86 && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= mask[i];
  return bits != 0;
#endif
}

INLINE uint32_t bits_of(I mask) {
#if X86 && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif X86 && !defined(__AVX512F__)
  return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] != 0) << i;
  return bits;
#endif
}

INLINE I isfinite(F x) { return (x - x) == F{}; }
INLINE F where(I mask, F a, F b) { return mask ? a : b; }
INLINE F where(I mask, F a) { return (F)((I)a & mask); }  // a or 0

// Keep a loaded vector in its register: GCC would fold the load into every multiplication that uses
// it, twelve loads where one does.
#if X86
#define PIN(v) asm("" : "+x"(v))
#elif defined(__aarch64__)
#define PIN(v) asm("" : "+w"(v))
#else
#define PIN(v)
#endif

// exp(z) for z ≤ 0 (a little above is fine): 2ⁿ·eʳ, n = round(z / ln 2). Below −87.7 it is exactly
// 0, as is exp(−88), which callers put in place of anything lower. Within 1 ulp; exp(0) is 1.
constexpr float EXP_FLOOR = -88.0f;

template <bool FAR = false>   // FAR: ln 2 in two parts, for 1 ulp at −87 too
INLINE F exp_floored(F z) {
  const F magic = splat(12582912.0f + 127.0f);  // 1.5·2²³: the sum's low bits hold n + 127
  F shifted = z * splat(1.44269504f) + magic;
  F n = shifted - magic;
  F r;
  if (FUSED && !FAR) {
    r = z - n * splat(0.69314718f);   // off by 1.9e-9·n: below an ulp where e matters
  } else {
    r = (z - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  }
  // 1 + r·(c1 + c2·r + … + c6·r⁵), in pairs: a short chain keeps more vectors in flight.
  F square = r * r;
  F high = splat(1.381454058e-03f) * r + splat(8.368745446e-03f);
  F middle = splat(4.166838899e-02f) * r + splat(1.666652113e-01f);
  F low = splat(4.999999404e-01f) * r + splat(1.0f);
  F p = ((high * square + middle) * square + low) * r + splat(1.0f);
  F e = p * (F)((I)shifted << 23);
  PIN(e);   // rounded here: fused into a sum it would not be the e that weighs V
  return e;
}

INLINE F exp_of(F z) { return exp_floored(larger(splat(EXP_FLOOR), z)); }

// ln(x), x a positive normal number. Not inlined, so that it rounds the same wherever it is used.
__attribute__((noinline)) F log_of(F x) {
  I bits = (I)x;
  I half = (bits & 0x007fffff) > 0x003504f3;  // above √2, count it to the next power of two
  F e = __builtin_convertvector((bits >> 23) - 127 - half, F);
  F m = (F)((bits & 0x007fffff) | (splat(0x3f800000) + (half << 23)));
  F y = m - splat(1.0f);
  F z = y * y;
  F p = splat(7.0376836292e-2f);
  p = p * y + splat(-1.1514610310e-1f);
  p = p * y + splat(1.1676998740e-1f);
  p = p * y + splat(-1.2420140846e-1f);
  p = p * y + splat(1.4249322787e-1f);
  p = p * y + splat(-1.6668057665e-1f);
  p = p * y + splat(2.0000714765e-1f);
  p = p * y + splat(-2.4999993993e-1f);
  p = p * y + splat(3.3333331174e-1f);
  p = p * y * z;
  p = p + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
  return (y + p) + e * splat(0.693359375f);
}

// ln(1 + x), x ≥ 0, relative accuracy for small x too.
__attribute__((noinline)) F log1p_of(F x) {
  F u = splat(1.0f) + x;
  return log_of(u) + (x - (u - splat(1.0f))) / u;
}

INLINE F tanh_of(F x) {
  F size = larger(x, -x);
  F t = exp_of(splat(-2.0f) * size);
  F far = (splat(1.0f) - t) / (splat(1.0f) + t);
  far = where(x < F{}, -far, far);
  F z = x * x;
  F p = splat(-5.70498872745e-3f);
  p = p * z + splat(2.06390887954e-2f);
  p = p * z + splat(-5.37397155531e-2f);
  p = p * z + splat(1.33314422036e-1f);
  p = p * z + splat(-3.33332819422e-1f);
  F near = p * z * x + x;
  return where(size < splat(0.625f), near, far);
}

// Turn W rows of W floats into W columns.
INLINE void transpose(F (&a)[W]) {
#if X86 && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  __m256 r[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    r[i] = _mm256_unpacklo_ps((__m256)a[i], (__m256)a[i + 1]);
    r[i + 1] = _mm256_unpackhi_ps((__m256)a[i], (__m256)a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(r[i], r[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(r[i], r[i + 2], 0xee);
    s[i + 2] = _mm256_shuffle_ps(r[i + 1], r[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(r[i + 1], r[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    a[i] = (F)_mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    a[i + 4] = (F)_mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
#elif X86 && !defined(__AVX512F__)
  __m128 r0 = (__m128)a[0], r1 = (__m128)a[1], r2 = (__m128)a[2], r3 = (__m128)a[3];
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  a[0] = (F)r0, a[1] = (F)r1, a[2] = (F)r2, a[3] = (F)r3;
#else
  float t[W][W];
  std::memcpy(t, a, sizeof t);
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) a[i][j] = t[j][i];
#endif
}

// ------------------------------------------------------------ the problem, as native.py packs it

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BOOL = 3, FLOAT64 = 4, INT32 = 5 };

struct Array {          // strides in elements, 0 along a broadcast axis
  const char* data;     // null: not given
  int64_t dtype;
  int64_t stride[4];
};

struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  double scale, softcap, floor;    // softcap 0: none; bias ≤ floor: not visible
  int64_t offset, left, right;     // query i sees keys i+offset−left … i+offset+right; −1 unbounded
  Array query, key, value;         // (batch, heads or kv_heads, length, dim)
  Array keep;                      // bool (batch, –, –, keys)
  Array query_ids, key_ids;        // int32 (batch, –, –, length)
  Array dense;                     // bool: may attend; float: added. (batch, heads, queries, keys)
  const float* sinks;              // (heads) or null
  float* out;                      // (batch, heads, queries, value_dim), contiguous
  float* rows;                     // FIELDS × (batch·heads·queries)
  int32_t* whole;                  // visible, then top_key
  uint8_t* nonfinite;
  int64_t statistics;              // 0: only what `out` and backward need
  int64_t octaves;                 // row statistics again at 2, 4, … times the scale
  int64_t threads;
  // backward
  const float *d_out, *level, *d_entropy, *top, *log_mass;   // contiguous
  const uint8_t* counted;                                    // 0 for a row that sees nothing
  float *d_query, *d_key, *d_value;                          // contiguous, zeroed
  float* d_bias;                                             // with these strides, zeroed, or null
  int64_t d_bias_stride[4];
  const float* constants;                                    // unit, unit·δ, lift, limit of rows
  float* sums;                                               // SUMS of rows, zeroed, or null
};

enum Field {
  MEAN, VARIANCE, LARGEST, LSE, ENTROPY, MARGIN, COLLISION, JACOBIAN, MEAN_KEY, SINK_MASS, TOP,
  LOG_MASS, FIELDS
};

INLINE int64_t size_of(int64_t dtype) {
  return dtype == FLOAT64 ? 8 : dtype == BOOL ? 1 : dtype == BFLOAT16 || dtype == FLOAT16 ? 2 : 4;
}

INLINE float from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
INLINE float widen_bfloat16(uint16_t h) { return from_bits((uint32_t)h << 16); }
INLINE float widen_float16(uint16_t h) {
  // Shifted into place the exponent is 112 too small; inf and NaN keep the largest exponent.
  uint32_t size = (uint32_t)(h & 0x7fff) << 13;
  uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  float f = from_bits(size) * from_bits(0x77800000u);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return from_bits((special ? size | special : bits) | (uint32_t)(h & 0x8000) << 16);
}

INLINE const char* address(const Array& a, int64_t i, int64_t j, int64_t k, int64_t l) {
  return a.data + (i * a.stride[0] + j * a.stride[1] + k * a.stride[2] + l * a.stride[3]) *
                      size_of(a.dtype);
}

INLINE float read(const char* p, int64_t dtype) {
  switch (dtype) {
    case FLOAT32: { float x; std::memcpy(&x, p, 4); return x; }
    case FLOAT64: {   // what hides a key, −inf or half of finfo.min, still does as a float
      double x;
      std::memcpy(&x, p, 8);
      const bool hides = x <= std::numeric_limits<double>::lowest() / 2;
      if (x < 0.99 * LOWEST && x != -INF) return hides ? LOWEST : 0.99f * LOWEST;
      return x > -LOWEST ? -LOWEST : (float)x;
    }
    case BOOL: return *p ? 0.0f : -INF;   // "may attend" as a bias
    default: {
      uint16_t h;
      std::memcpy(&h, p, 2);
      return dtype == BFLOAT16 ? widen_bfloat16(h) : widen_float16(h);
    }
  }
}

// n elements of a row, widened to float.
void copy_row(const Array& a, const char* row, int64_t n, float* to) {
  if (a.stride[3] != 1) {
    int64_t step = a.stride[3] * size_of(a.dtype);
    for (int64_t x = 0; x < n; x++) to[x] = read(row + x * step, a.dtype);
  } else if (a.dtype == FLOAT32) {
    std::memcpy(to, row, n * 4);
  } else {
    const uint16_t* from = (const uint16_t*)row;
    if (a.dtype == BFLOAT16)
      for (int64_t x = 0; x < n; x++) to[x] = widen_bfloat16(from[x]);
    else
      for (int64_t x = 0; x < n; x++) to[x] = widen_float16(from[x]);
  }
}

// -------------------------------------------------------------------------------------- threads

typedef void (*Range)(int64_t, int64_t, void*);
typedef int32_t (*ParallelFor)(int64_t, int64_t, int64_t, Range, void*);
ParallelFor torch_pool = nullptr;   // torch's own pool where native.py found it

template <class Body>
void on_threads(int64_t threads, const Body& body) {
  if (threads <= 1) {
    body();
    return;
  }
  if (torch_pool) {
    Range run = [](int64_t begin, int64_t end, void* context) {
      for (int64_t i = begin; i < end; i++) (*(const Body*)context)();
    };
    torch_pool(0, threads, 1, run, (void*)&body);
    return;
  }
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; i++) others.emplace_back([&] { body(); });
  body();
  for (auto& thread : others) thread.join();
}

// Hand `tasks` out by a counter: whoever is free takes the next.
template <class Body>
void for_tasks(int64_t threads, int64_t tasks, const Body& body) {
  std::atomic<int64_t> next{0};
  on_threads(std::min(threads, tasks), [&] {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
  });
}

// A thread's working memory, kept between calls: fresh pages would cost more than a small problem.
struct Memory {
  char* base = nullptr;
  size_t size = 0, used = 0;
  ~Memory() { std::free(base); }
  void reserve(size_t bytes) {
    used = 0;
    if (bytes <= size) return;
    std::free(base);
    size = (bytes + 4095) / 4096 * 4096;
    base = (char*)std::aligned_alloc(64, size);
  }
  float* floats(int64_t n) {
    float* p = (float*)(base + used);
    used += (n * 4 + 63) / 64 * 64 + 64;   // 64 more, so that no two arrays share a 4 KB phase
    return p;
  }
};
thread_local Memory memory;

// -------------------------------------------------------------------------- the two matrix tiles

template <int N> struct Int { static constexpr int value = N; };

// Rows of A at a time, so that rows × NV sums fill the registers.
template <int NV> constexpr int tile_rows() { return NV == 3 ? 4 : NV == 2 ? 6 : 8; }

// Cut n rows of A into tiles: do(Int<rows>, first).
template <int NV, class Do>
INLINE void in_tiles(int64_t n, const Do& run) {
  constexpr int T = tile_rows<NV>();
  int64_t j = 0;
  for (; j + T <= n; j += T) run(Int<T>{}, j);
  if (T > 4 && j + 4 <= n) run(Int<4>{}, j), j += 4;
  if (j + 2 <= n) run(Int<2>{}, j), j += 2;
  if (j < n) run(Int<1>{}, j), j += 1;
  if (j < n) run(Int<1>{}, j);
}

// sum[j][·] += Σ_x A[j·step_j + x·step_x] · B[x·width + ·], 0 ≤ j < T, B rows of NV vectors.
template <int T, int NV>
INLINE void multiply(F (&sum)[T][NV], const float* a, int64_t step_j, int64_t step_x,
                     const float* b, int64_t width, int64_t n) {
#pragma GCC unroll 2
  for (int64_t x = 0; x < n; x++) {
    F b0 = load(b), b1{}, b2{};
    PIN(b0);
    if (NV > 1) { b1 = load(b + W); PIN(b1); }
    if (NV > 2) { b2 = load(b + 2 * W); PIN(b2); }
#pragma GCC unroll 8
    for (int j = 0; j < T; j++) {
      F aj = splat(a[j * step_j]);
      sum[j][0] += aj * b0;
      if (NV > 1) sum[j][1 % NV] += aj * b1;
      if (NV > 2) sum[j][2 % NV] += aj * b2;
    }
    a += step_x;
    b += width;
  }
}

// The same for rows of A along x, in pieces of 128: a long sum rounds more.
template <int T, int NV>
INLINE void multiply_rows(F (&sum)[T][NV], const float* a, int64_t lda, const float* b,
                          int64_t width, int64_t n) {
  constexpr int64_t PIECE = 128;
  if (n <= PIECE) return multiply<T, NV>(sum, a, lda, 1, b, width, n);
  for (int64_t x = 0; x < n; x += PIECE) {
    F part[T][NV] = {};
    multiply<T, NV>(part, a + x, lda, 1, b + x * width, width, std::min(PIECE, n - x));
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) sum[i][v] += part[i][v];
  }
}

// C[j] = factor · Σ_x A[j][x]·B[x]: `a` rows of stride lda, read along x.
template <int NV>
INLINE void product(const float* a, int64_t lda, int64_t rows, const float* b, int64_t width,
                    int64_t n, float factor, float* c, int64_t ldc) {
  in_tiles<NV>(rows, [&](auto t, int64_t j) {
    constexpr int T = decltype(t)::value;
    F sum[T][NV] = {};
    multiply_rows<T, NV>(sum, a + j * lda, lda, b, width, n);
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) store(c + (j + i) * ldc + v * W, sum[i][v] * splat(factor));
  });
}

// C[j] += Σ_x A[j][x]·B[x].
template <int NV>
INLINE void add_product(const float* a, int64_t lda, int64_t rows, const float* b, int64_t width,
                        int64_t n, float* c, int64_t ldc) {
  in_tiles<NV>(rows, [&](auto t, int64_t j) {
    constexpr int T = decltype(t)::value;
    F sum[T][NV];
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) sum[i][v] = load(c + (j + i) * ldc + v * W);
    multiply<T, NV>(sum, a + j * lda, lda, 1, b, width, n);
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) store(c + (j + i) * ldc + v * W, sum[i][v]);
  });
}

// C[j] += Σ_x A[x][j]·B[x]: the columns of A.
template <int NV>
INLINE void add_transposed(const float* a, int64_t lda, int64_t columns, const float* b,
                           int64_t width, int64_t n, float* c, int64_t ldc) {
  in_tiles<NV>(columns, [&](auto t, int64_t j) {
    constexpr int T = decltype(t)::value;
    F sum[T][NV];
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) sum[i][v] = load(c + (j + i) * ldc + v * W);
    multiply<T, NV>(sum, a + j, 1, lda, b, width, n);
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) store(c + (j + i) * ldc + v * W, sum[i][v]);
  });
}

template <class Do>
INLINE void with_vectors(int nv, const Do& run) {
  if (nv == 3) run(Int<3>{});
  else if (nv == 2) run(Int<2>{});
  else run(Int<1>{});
}

// Rows first … first+count−1 of x (b, h) as columns: to[x][lane]. Lanes beyond count repeat the
// last row.
void to_columns(const Array& x, int64_t b, int64_t h, int64_t first, int64_t count, int64_t dim,
                int lanes, float* to, float* room) {
  for (int lane0 = 0; lane0 < lanes; lane0 += W) {
    const float* row[W];
    for (int i = 0; i < W; i++) {
      int64_t r = first + std::min<int64_t>(lane0 + i, count - 1);
      const char* p = address(x, b, h, r, 0);
      if (x.dtype == FLOAT32 && x.stride[3] == 1) {
        row[i] = (const float*)p;
      } else {
        copy_row(x, p, dim, room + i * dim);
        row[i] = room + i * dim;
      }
    }
    int64_t c = 0;
    for (; c + W <= dim; c += W) {
      F block[W];
      for (int i = 0; i < W; i++) block[i] = load(row[i] + c);
      transpose(block);
      for (int i = 0; i < W; i++) store(to + (c + i) * lanes + lane0, block[i]);
    }
    for (; c < dim; c++)
      for (int i = 0; i < W; i++) to[c * lanes + lane0 + i] = row[i][c];
  }
}

// The reverse: columns from[x][lane], lane by lane times factor[lane], as `count` rows. True if a
// result is not finite where its factor is.
bool to_rows(const float* from, int lanes, int64_t count, int64_t dim, const float* factor,
             float* to, int64_t stride) {
  I found{};
  for (int lane0 = 0; lane0 < lanes && lane0 < count; lane0 += W) {
    int n = (int)std::min<int64_t>(W, count - lane0);
    F f = load(factor + lane0), poison = F{};
    int64_t c = 0;
    for (; c + W <= dim; c += W) {
      F block[W];
      for (int i = 0; i < W; i++) {
        block[i] = load(from + (c + i) * lanes + lane0) * f;
        poison += block[i] - block[i];
      }
      transpose(block);
      for (int i = 0; i < n; i++) store(to + (lane0 + i) * stride + c, block[i]);
    }
    for (; c < dim; c++) {
      F column = load(from + c * lanes + lane0) * f;
      poison += column - column;
      for (int i = 0; i < n; i++) to[(lane0 + i) * stride + c] = column[i];
    }
    found |= ~(poison == F{}) & isfinite(f);
  }
  return any(found);
}

// --------------------------------------------------------------------------- strips, blocks, masks

// The state of R rows: rows.py's RowState, one array a field.
struct alignas(64) State {
  float top[R], rest[R], rest_sq[R], rest_log[R], rest_pos[R], count[R], peak[R], mean[R], m2[R];
  int32_t key[R];
  void clear() {
    std::memset(this, 0, sizeof *this);
    for (int i = 0; i < R; i++) top[i] = peak[i] = -INF, key[i] = -1;
  }
};

// Sums of a power of e: of the logits at 2, 4, … times their size, for eᵝᶻ squared is e²ᵝᶻ.
constexpr int MAX_OCTAVES = 4;
struct alignas(64) Octave {
  float rest[R], rest_log[R], rest_pos[R];   // as State's; rest_log with the plain z
};

// A strip: up to R query rows of one head.
struct alignas(64) Strip {
  State state;
  Octave octave[MAX_OCTAVES + 1];
  int32_t lo[R], hi[R], ids[R];       // keys lo … hi by causality and window; document id
  int64_t lo_min, lo_max, hi_min, hi_max;
  int32_t id_min, id_max;
  int64_t batch, head, first, count;  // `count` rows from `first` on
  int nv;                             // vectors in use
  float *qt, *ot;                     // Qᵀ (dim × lanes), Oᵀ (value_dim × lanes)
  bool seen_any[R];                   // careful pass: the row has a visible key
};

INLINE const int32_t* query_ids(const Problem& p, int64_t b) {
  return p.query_ids.data ? (const int32_t*)address(p.query_ids, b, 0, 0, 0) : nullptr;
}

void place(const Problem& p, Strip& s, int64_t b, int64_t h, int64_t first, int64_t count) {
  s.batch = b, s.head = h, s.first = first, s.count = count;
  s.nv = (int)((count + W - 1) / W);
  s.lo_min = s.hi_min = p.keys, s.lo_max = s.hi_max = -1;
  s.id_min = std::numeric_limits<int32_t>::max(), s.id_max = std::numeric_limits<int32_t>::min();
  const int32_t* ids = query_ids(p, b);
  for (int i = 0; i < s.nv * W; i++) {
    int64_t row = first + std::min<int64_t>(i, count - 1), at = row + p.offset;
    int64_t lo = p.left < 0 ? 0 : std::max<int64_t>(0, at - p.left);
    int64_t hi = p.right < 0 ? p.keys - 1 : std::min(p.keys - 1, at + p.right);
    lo = std::min(lo, p.keys), hi = std::max<int64_t>(hi, -1);
    s.lo[i] = (int32_t)lo, s.hi[i] = (int32_t)hi;
    s.lo_min = std::min(s.lo_min, lo), s.lo_max = std::max(s.lo_max, lo);
    s.hi_min = std::min(s.hi_min, hi), s.hi_max = std::max(s.hi_max, hi);
    if (ids) {
      s.ids[i] = ids[row];
      s.id_min = std::min(s.id_min, s.ids[i]), s.id_max = std::max(s.id_max, s.ids[i]);
    }
  }
}

// A block of keys k0 … k1−1 of one kv head.
struct Block {
  int64_t k0, k1;
  const float *k, *v;           // row of key k0
  int64_t ldk, ldv;
  const uint8_t* keep;          // of key 0, or null: all of this block are kept
  const int32_t* ids;           // of key 0, or null
  int32_t id_min, id_max;
  const float* wrong;           // careful pass: 1 where v was not finite (v is 0 there), else null
};

struct Buffers {       // each keys × lanes of one strip, row 0 for key a
  float* raw;          // scaled scores; after `masked`, −inf where not counted
  float* logits;       // what enters softmax, then e; the same array as raw unless both are needed
  float* bias;         // a float mask tensor's part
  uint8_t* allowed;    // a boolean mask tensor's part
  float* tops;         // of each tile of plain keys, the lanes' largest
  float* slope;        // backward with soft-cap: d capped / d scaled
};

// Half of finfo.min of the bias's dtype, as a float: `read` clamps a float64 bias to match.
INLINE float float_floor(const Problem& p) { return p.floor < LOWEST ? LOWEST : (float)p.floor; }

enum Part { NOTHING, SOMETHING, EVERYTHING };   // of a block's keys a mask tensor lets a strip see

// The mask tensor's part for keys from … to−1 and a strip's rows, turned so that rows are lanes:
// into w.allowed if it is boolean, into w.bias if it is added to the scores.
template <int NV>
Part dense_part(const Problem& p, const Strip& s, int64_t from, int64_t to, const Buffers& w) {
  const Array& m = p.dense;
  const bool boolean = m.dtype == BOOL;
  const int64_t n = to - from, width = NV * W, step = m.stride[3] * size_of(m.dtype);
  if (m.stride[2] == 0) {   // one row for all queries
    const char* row = address(m, s.batch, s.head, 0, from);
    for (int64_t j = 0; j < n; j++) {
      if (boolean) {
        std::memset(w.allowed + j * width, row[j * step], width);
      } else {
        F bias = splat(read(row + j * step, m.dtype));
        for (int v = 0; v < NV; v++) store(w.bias + j * width + v * W, bias);
      }
    }
  } else {
    for (int v = 0; v < NV; v++) {
      const char* row[W];
      for (int i = 0; i < W; i++) {
        int64_t r = s.first + std::min<int64_t>(v * W + i, s.count - 1);
        row[i] = address(m, s.batch, s.head, r, from);
        // The next block's part of the row: short pieces far apart, which no hardware foresees.
        for (int64_t x = 0; x < n * step; x += 64) __builtin_prefetch(row[i] + n * step + x, 0, 2);
      }
      float* bias = w.bias + v * W;
      uint8_t* allowed = w.allowed + v * W;
      int64_t j = 0;
      if (m.stride[3] == 1 && m.dtype == FLOAT32)
        for (; j + W <= n; j += W) {
          F block[W];
          for (int i = 0; i < W; i++) block[i] = load((const float*)row[i] + j);
          transpose(block);
          for (int i = 0; i < W; i++) store(bias + (j + i) * width, block[i]);
        }
#if X86
      if (W == 8 && m.stride[3] == 1 && boolean)
        for (; j + 16 <= n; j += 16) {   // 8 rows of 16 bytes → 16 of 8
          __m128i a[8], b[8];
          for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128((const __m128i*)(row[i % W] + j));
          for (int i = 0; i < 4; i++) {
            b[i] = _mm_unpacklo_epi8(a[2 * i], a[2 * i + 1]);
            b[i + 4] = _mm_unpackhi_epi8(a[2 * i], a[2 * i + 1]);
          }
          for (int i = 0; i < 8; i += 2) {
            a[i] = _mm_unpacklo_epi16(b[i], b[i + 1]);
            a[i + 1] = _mm_unpackhi_epi16(b[i], b[i + 1]);
          }
          for (int i = 0; i < 8; i += 4)
            for (int h = 0; h < 2; h++) {
              b[i + 2 * h] = _mm_unpacklo_epi32(a[i + h], a[i + h + 2]);
              b[i + 2 * h + 1] = _mm_unpackhi_epi32(a[i + h], a[i + h + 2]);
            }
          for (int i = 0; i < 8; i++) {
            _mm_storel_epi64((__m128i*)(allowed + (j + 2 * i) * width), b[i]);
            _mm_storeh_pd((double*)(allowed + (j + 2 * i + 1) * width), _mm_castsi128_pd(b[i]));
          }
        }
#endif
      for (; j < n; j++)
        for (int i = 0; i < W; i++) {
          if (boolean) allowed[j * width + i] = row[i][j * step];
          else bias[j * width + i] = read(row[i] + j * step, m.dtype);
        }
    }
  }
  if (boolean) {
    if (!std::memchr(w.allowed, 1, n * width)) return NOTHING;
    return std::memchr(w.allowed, 0, n * width) ? SOMETHING : EVERYTHING;
  }
  const F floor = splat(float_floor(p));
  I hides{};
  for (int64_t i = 0; i < n * width; i += W) hides |= ~(load(w.bias + i) > floor);
  if (!any(hides)) return EVERYTHING;
  for (int64_t i = 0; i < n * width; i++)
    if (w.bias[i] != -INF) return SOMETHING;
  return NOTHING;
}

INLINE I where_set(const uint8_t* bytes) {
#if X86 && defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes)) != 0;
#else
  I mask;
  for (int i = 0; i < W; i++) mask[i] = bytes[i] ? -1 : 0;
  return mask;
#endif
}

// Which keys of a block a strip's rows may see, [a, b), and which all of them see plainly.
struct Cut {
  int64_t a, b, plain0, plain1;
  bool ids, dense;              // documents, the mask tensor: must be looked at key by key
  bool whole;                   // every row counts every key of [a, b), whatever is added
};

// Also fills the buffer of the mask tensor's part: a part that hides everything ends the block's
// work, one that allows everything is forgotten.
template <int NV>
INLINE Cut cut(const Problem& p, const Strip& s, const Block& block, const Buffers& w) {
  Cut c;
  c.a = std::max(block.k0, s.lo_min);
  c.b = std::min(block.k1, s.hi_max + 1);
  const bool one_document = std::min(s.id_min, block.id_min) == std::max(s.id_max, block.id_max);
  c.ids = block.ids && !one_document;
  if (c.ids && (s.id_max < block.id_min || block.id_max < s.id_min)) c.b = c.a;   // other documents
  c.dense = p.dense.data;
  c.whole = !block.keep && !c.ids && c.a >= s.lo_max && c.b <= s.hi_min + 1;
  if (c.dense && c.a < c.b) {
    const Part part = dense_part<NV>(p, s, c.a, c.b, w);
    if (part == NOTHING) c.b = c.a;
    if (part == EVERYTHING && p.dense.dtype == BOOL) c.dense = false;
    c.whole &= part == EVERYTHING;
  }
  const bool plain = !c.dense && p.softcap == 0 && !block.keep && !c.ids;
  c.plain0 = plain ? std::max(c.a, s.lo_max) : c.a;
  c.plain1 = plain ? std::min(c.b, s.hi_min + 1) : c.a;
  if (c.plain0 >= c.plain1) c.plain0 = c.plain1 = c.a;
  return c;
}

// What a block of keys adds to each lane before the weights are known.
template <int NV> struct Gathered {
  F top[NV], peak[NV], sum[NV], count[NV];   // largest logit; of counted scores: largest, Σ, number
};

// Apply soft-cap, bias and everything that hides to keys from … to−1.
template <int NV>
void masked(const Problem& p, const Strip& s, const Block& block, const Cut& c, int64_t from,
            int64_t to, const Buffers& w, Gathered<NV>& g) {
  const int64_t width = NV * W;
  const F hidden = splat(-INF);
  const bool edges = from < s.lo_max || to > s.hi_min + 1;
  for (int v = 0; v < NV; v++) {
    const I lo = load(s.lo + v * W), hi = load(s.hi + v * W), ids = load(s.ids + v * W);
    const F cap = splat((float)p.softcap);
    const F inverse = splat(p.softcap != 0 ? (float)(1 / p.softcap) : 0.0f);
    const F floor = splat(float_floor(p));
    F top = g.top[v], peak = g.peak[v], sum = g.sum[v];
    I count{};
    if (c.whole && p.softcap == 0) {   // then it is a bias that hides nothing
      for (int64_t j = from; j < to; j++) {
        const int64_t at = (j - c.a) * width + v * W;
        F score = load(w.raw + at), logit = score + load(w.bias + at);
        sum += score;
        peak = larger(score, peak);
        top = larger(logit, top);
        store(w.logits + at, logit);
      }
      g.top[v] = top, g.peak[v] = peak, g.sum[v] = sum;
      g.count[v] += splat((float)(to - from));
      continue;
    }
    auto each = [&](auto dense, auto capped) {
      constexpr int DENSE = decltype(dense)::value;   // 1 boolean, 2 added
      for (int64_t j = from; j < to; j++) {
        const int64_t at = (j - c.a) * width + v * W;
        I visible = ~I{};
        if (edges) visible = ~((lo > splat((int32_t)j)) | (hi < splat((int32_t)j)));
        if (block.keep && !block.keep[j]) visible = I{};
        if (c.ids) visible &= ids == splat(block.ids[j]);
        if (DENSE == 1) visible &= where_set(w.allowed + at);
        F score = load(w.raw + at), logit = score;
        if (decltype(capped)::value) {
          F bounded = tanh_of(score * inverse);
          logit = cap * bounded;
          if (w.slope) store(w.slope + at, splat(1.0f) - bounded * bounded);
        }
        I counted = visible;
        if (DENSE == 2) {
          F bias = load(w.bias + at);
          I low = bias <= floor;
          counted = visible & ~low;
          visible &= bias != hidden;
          if (any(low)) logit = where(low & ~isfinite(logit), F{}, logit);
          logit += bias;
        }
        sum += where(counted, score);
        count -= counted;
        logit = where(visible, logit, hidden);
        top = larger(logit, top);
        store(w.logits + at, logit);
        if (DENSE == 2 || decltype(capped)::value) {
          F shown = where(counted, score, hidden);
          peak = larger(shown, peak);
          if (w.raw != w.logits) store(w.raw + at, shown);
        }
      }
    };
    const int dense = !c.dense ? 0 : p.dense.dtype == BOOL ? 1 : 2;
    auto with_cap = [&](auto capped) {
      if (dense == 0) each(Int<0>{}, capped);
      else if (dense == 1) each(Int<1>{}, capped);
      else each(Int<2>{}, capped);
    };
    if (p.softcap != 0) with_cap(Int<1>{});
    else with_cap(Int<0>{});
    g.top[v] = top, g.sum[v] = sum;
    g.peak[v] = p.softcap != 0 || dense == 2 ? peak : top;
    g.count[v] += __builtin_convertvector(count, F);
  }
}

// Sᵀ of keys a … b−1, with the lanes' largest and sum over the plain ones; the masked ones after.
template <int NV>
INLINE void scores(const Problem& p, const Strip& s, const Block& block, const Cut& c,
                   const Buffers& w, Gathered<NV>& g) {
  const int64_t width = NV * W;
  const float* k = block.k - block.k0 * block.ldk;
  for (int v = 0; v < NV; v++) {
    g.top[v] = g.peak[v] = splat(-INF);
    g.sum[v] = F{};
    g.count[v] = splat((float)(c.plain1 - c.plain0));
  }
  // The scale multiplies the sum, once: in q it would round every component.
  const F scale = splat((float)p.scale);
  float* plain = w.raw + (c.plain0 - c.a) * width;
  in_tiles<NV>(c.plain1 - c.plain0, [&](auto t, int64_t j) {
    constexpr int T = decltype(t)::value;
    F sum[T][NV] = {};
    multiply_rows<T, NV>(sum, k + (c.plain0 + j) * block.ldk, block.ldk, s.qt, width, p.dim);
    for (int v = 0; v < NV; v++) {
      F top = splat(-INF);
      for (int i = 0; i < T; i++) {
        F score = sum[i][v] * scale;
        store(plain + (j + i) * width + v * W, score);
        top = larger(score, top);
        g.sum[v] += score;
      }
      if (T == tile_rows<NV>()) store(w.tops + j / T * width + v * W, top);
      g.top[v] = larger(top, g.top[v]);
    }
  });
  for (int v = 0; v < NV; v++) g.peak[v] = g.top[v];
  const int64_t parts[2][2] = {{c.a, c.plain0}, {c.plain1, c.b}};
  for (auto& [from, to] : parts) {
    if (from >= to) continue;
    product<NV>(k + from * block.ldk, block.ldk, to - from, s.qt, width, p.dim, (float)p.scale,
                w.raw + (from - c.a) * width, width);
    masked<NV>(p, s, block, c, from, to, w, g);
  }
}

// ------------------------------------------------------------------------------- forward, a block

// Where the careful pass found a value that is not finite, every lane that attends to it is spoilt.
template <int NV>
void spoil(const Problem& p, Strip& s, const Block& block, const Cut& c, const Buffers& w) {
  const int64_t width = NV * W;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t j = c.a; j < c.b; j++) {
    const float* wrong = block.wrong + (j - block.k0) * p.value_dim;
    if (std::find(wrong, wrong + p.value_dim, 1.0f) == wrong + p.value_dim) continue;
    for (int i = 0; i < width; i++) {
      int64_t at = (j - c.a) * width + i;
      bool attends = w.logits[at] != -INF;
      // A key hidden by a finfo.min bias is attended to only by a row that sees nothing else.
      if (w.bias && c.dense && s.seen_any[i] && w.bias[at] <= float_floor(p)) attends = false;
      if (!attends) continue;
      for (int64_t x = 0; x < p.value_dim; x++)
        if (wrong[x] != 0) s.ot[x * width + i] = nan;
    }
  }
}

// In each lane that grew, the first of n keys whose logit is `top`. Where the tiles' largest are
// known the tile is looked for first.
template <int NV>
INLINE I first_equal(const Buffers& w, int v, int64_t n, bool tiled, I grew, F top) {
  constexpr int64_t width = NV * W, T = tile_rows<NV>();
  const float *logits = w.logits + v * W, *tops = w.tops + v * W;
  const int64_t tiles = tiled ? n / T : 0;
  I index{}, tile = splat((int32_t)-1), at = splat((int32_t)n);
  for (int64_t j = n - 1; j >= tiles * T; j--) {
    at -= 1;
    index = (load(logits + j * width) == top) ? at : index;
  }
  at = splat((int32_t)tiles);
#pragma GCC unroll 4
  for (int64_t t = tiles - 1; t >= 0; t--) {
    at -= 1;
    tile = (load(tops + t * width) == top) ? at : tile;
  }
  int32_t in_tile[W], found[W];
  float tops_of[W];
  store(in_tile, tile), store(found, index), store(tops_of, top);
  for (uint32_t left = bits_of(grew & (tile >= 0)); left; left &= left - 1) {
    const int i = __builtin_ctz(left);
    const float* first = logits + in_tile[i] * T * width + i;
    int32_t j = (int32_t)T - 1;
    for (int32_t k = (int32_t)T - 2; k >= 0; k--) j = first[k * width] == tops_of[i] ? k : j;
    found[i] = in_tile[i] * (int32_t)T + j;
  }
  return load(found);
}

template <int NV, bool STATS, int OCTAVES = 0>
void forward_block(const Problem& p, Strip& s, const Block& block, const Buffers& w) {
  const Cut c = cut<NV>(p, s, block, w);
  if (c.a >= c.b) return;
  const int64_t width = NV * W, n = c.b - c.a;
  const bool all_plain = c.plain0 == c.a && c.plain1 == c.b;
  State& state = s.state;
  Gathered<NV> g;
  scores<NV>(p, s, block, c, w, g);
  if (block.wrong) spoil<NV>(p, s, block, c, w);

  I something{};
  for (int v = 0; v < NV; v++) {
    // Mean and Σ(s − mean)² of the block, joined to the row's.
    F count = load(state.count + v * W), mean = load(state.mean + v * W);
    F here = g.sum[v] / larger(g.count[v], splat(1.0f));
    F both = count + g.count[v];
    F weight = g.count[v] / larger(both, splat(1.0f));
    F gap = here - mean;
    if (STATS) {
      const float* raw = w.raw + v * W;
      // Sums of 16, then of those: a long sum of small squares beside a large one rounds away.
      F m2{};
      for (int64_t j = 0; j < n;) {
        F even{}, odd{};
        const int64_t end = std::min(j + 16, n);
        if (c.whole)
          for (; j + 1 < end; j += 2) {   // two sums: one would wait for itself
            F d = load(raw + j * width) - here, e = load(raw + (j + 1) * width) - here;
            even += d * d;
            odd += e * e;
          }
        for (; j < end; j++) {
          F x = load(raw + j * width);
          F d = where(x != splat(-INF), x - here);
          even += d * d;
        }
        m2 += even + odd;
      }
      store(state.m2 + v * W, load(state.m2 + v * W) + m2 + gap * gap * (count * weight));
      store(state.peak + v * W, larger(g.peak[v], load(state.peak + v * W)));
    }
    store(state.mean + v * W, mean + gap * weight);
    store(state.count + v * W, both);
    something |= (g.top[v] > splat(-INF)) | (g.count[v] > F{});
  }
  if (!any(something)) return;   // every key hidden

  int64_t blanked[R];
  int blanks = 0;
  for (int v = 0; v < NV; v++) {
    F top = load(state.top + v * W);
    I grew = g.top[v] > top;
    if (!any(grew)) continue;
    // The old top key joins the rest with mass 1, the rest shrinks by f, and so does the output.
    F shift = larger(splat(EXP_FLOOR), where(grew, top - g.top[v]));
    F f = exp_floored(shift);
    I key = load(state.key + v * W);
    F own = where(grew & (key >= 0), splat(1.0f));
    F mass = load(state.rest + v * W) + own;
    store(state.rest + v * W, f * mass);
    if (STATS) {
      F log = load(state.rest_log + v * W), sq = load(state.rest_sq + v * W);
      F pos = load(state.rest_pos + v * W);
      store(state.rest_log + v * W, f * (log + shift * mass));
      store(state.rest_sq + v * W, f * f * (sq + own));
      store(state.rest_pos + v * W, f * (pos + own * __builtin_convertvector(key, F)));
    }
    F power = f;
    for (int o = 0; OCTAVES && o <= OCTAVES; o++) {
      Octave& octave = s.octave[o];
      power *= power;
      F sum = load(octave.rest + v * W) + own;
      F log = load(octave.rest_log + v * W), pos = load(octave.rest_pos + v * W);
      store(octave.rest + v * W, power * sum);
      store(octave.rest_log + v * W, power * (log + shift * sum));
      store(octave.rest_pos + v * W, power * (pos + own * __builtin_convertvector(key, F)));
    }
    for (int64_t x = 0; x < p.value_dim; x++) {
      float* o = s.ot + x * width + v * W;
      store(o, load(o) * f);
    }
    // The new top key, the first of equals. Its e is left out of the sums, then set to 1.
    const I index = first_equal<NV>(w, v, n, all_plain, grew, g.top[v]);
    store(state.key + v * W, grew ? index + splat((int32_t)c.a) : key);
    store(state.top + v * W, where(grew, g.top[v], top));
    int32_t rows[W];
    store(rows, index);
    for (uint32_t left = bits_of(grew); left; left &= left - 1) {
      const int i = __builtin_ctz(left);
      blanked[blanks++] = rows[i] * width + v * W + i;
    }
  }
  for (int i = 0; i < blanks; i++) w.logits[blanked[i]] = -INF;

  for (int v = 0; v < NV; v++) {
    F top = load(state.top + v * W);
    top = where(top == splat(-INF), F{}, top);
    F rest{}, sq{}, log{}, pos{};
    F powers[OCTAVES + 1] = {}, logs[OCTAVES + 1] = {}, places[OCTAVES + 1] = {};
    float* column = w.logits + v * W;
    // Sums of 32 keys, then of those: in one long sum equal terms would all round one way. From the
    // last key down, Σ e·place is the sum of the partial sums so far: an addition, no product.
    for (int64_t start = 0; start < n; start += 32) {
      F some{}, some_sq{}, some_log{}, some_pos{};
      F some_powers[OCTAVES + 1] = {}, some_logs[OCTAVES + 1] = {}, some_places[OCTAVES + 1] = {};
#pragma GCC unroll 2
      for (int64_t j = std::min(start + 32, n) - 1; j >= start; j--) {
        F z = larger(splat(EXP_FLOOR), load(column + j * width) - top);
        F e = exp_floored(z);
        store(column + j * width, e);
        if (STATS) {
          some_pos += some;
          some_sq += e * e;
          some_log += e * z;
        }
        some += e;
        F power = e;
#pragma GCC unroll 4
        for (int o = 0; OCTAVES && o <= OCTAVES; o++) {
          power *= power;
          some_places[o] += some_powers[o];
          some_powers[o] += power;
          if (o < OCTAVES) some_logs[o] += power * z;   // only the square of the last
        }
      }
      const F from = splat((float)(c.a + start));
      rest += some, sq += some_sq, log += some_log;
      pos += from * some + some_pos;
      for (int o = 0; OCTAVES && o <= OCTAVES; o++) {
        powers[o] += some_powers[o], logs[o] += some_logs[o];
        places[o] += from * some_powers[o] + some_places[o];
      }
    }
    for (int o = 0; OCTAVES && o <= OCTAVES; o++) {
      Octave& octave = s.octave[o];
      store(octave.rest + v * W, load(octave.rest + v * W) + powers[o]);
      store(octave.rest_log + v * W, load(octave.rest_log + v * W) + logs[o]);
      store(octave.rest_pos + v * W, load(octave.rest_pos + v * W) + places[o]);
    }
    store(state.rest + v * W, load(state.rest + v * W) + rest);
    if (STATS) {
      store(state.rest_sq + v * W, load(state.rest_sq + v * W) + sq);
      store(state.rest_log + v * W, load(state.rest_log + v * W) + log);
      store(state.rest_pos + v * W, load(state.rest_pos + v * W) + pos);
    }
  }
  if (p.value_dim == 0) return;
  for (int i = 0; i < blanks; i++) w.logits[blanked[i]] = 1.0f;
  add_transposed<NV>(block.v + (c.a - block.k0) * block.ldv, block.ldv, p.value_dim, w.logits,
                     width, n, s.ot, width);
}

// ------------------------------------------------------------------------------------- finishing

constexpr float MARGIN_LIMIT = 87.0f;

// Row statistics from the state, as `finish` of rows.py; also each row's 1 ÷ mass for the output.
template <bool STATS>
void finish(const Problem& p, const State& state, int64_t row, int64_t count, float* inverse) {
  const F one = splat(1.0f), nan = splat(std::numeric_limits<float>::quiet_NaN());
  const int64_t total_rows = p.batch * p.heads * p.queries;
  for (int v = 0; v * W < count; v++) {
    const int64_t here = std::min<int64_t>(W, count - v * W);
    auto put = [&](Field field, auto x) {
      std::memcpy(p.rows + field * total_rows + row + v * W, &x, here * 4);
    };
    F top = load(state.top + v * W), rest = load(state.rest + v * W);
    F seen = load(state.count + v * W), mean = load(state.mean + v * W);
    F peak = load(state.peak + v * W);
    I key = load(state.key + v * W);
    F sq = load(state.rest_sq + v * W), log = load(state.rest_log + v * W);
    F all = rest, all_sq = sq, all_log = log;             // the sink counted in
    F log_others = log_of(larger(rest, splat(1.1754944e-38f)));
    F log_mass, lse, f = one, sink{};
    I sink_wins{};
    if (p.sinks) {
      for (int i = 0; i < W; i++) {
        const int64_t r = std::min(row + v * W + i, total_rows - 1);
        sink[i] = p.sinks[r / p.queries % p.heads];
      }
      F gap = sink - top;                                 // the smaller of the two is e^−|gap|
      sink_wins = gap > F{};
      F shift = larger(splat(EXP_FLOOR), where(sink_wins, -gap, gap));
      f = exp_floored<true>(shift);
      F own = where(key >= 0, one), mass = rest + own;
      all = where(sink_wins, f * mass, rest + f);
      all_sq = where(sink_wins, f * f * (sq + own), sq + f * f);
      all_log = where(sink_wins, f * (log + shift * mass), log + f * shift);
      log_others = where(sink_wins, gap + log1p_of(rest * f),
                         log_of(larger(rest + f, splat(1.1754944e-38f))));
      F log_all = log1p_of(all);
      log_mass = where(sink_wins, gap, F{}) + log_all;
      lse = where(sink_wins, sink, top) + log_all;
    } else {
      log_mass = log1p_of(rest);
      lse = top + log_mass;
    }
    I none = key < 0, empty = seen == F{};
    I bad = ~empty & ~(isfinite(lse) & isfinite(mean) & (STATS ? isfinite(peak) : ~I{}));
    I nothing = empty | bad;
    if (p.sinks) bad |= ~empty & ~(sink < splat(INF));
    nothing |= bad;
    F total = one + all;
    F scaling = where(sink_wins, f, one) / total;
    store(inverse + v * W, where(bad, nan, where(none, F{}, scaling)));

    const I visible = __builtin_convertvector(seen, I);
    std::memcpy(p.whole + row + v * W, &visible, here * 4);
    put(LSE, where(empty, p.sinks ? sink : splat(-INF), where(bad, nan, lse)));
    put(TOP, top);
    put(LOG_MASS, where(bad, nan, where(none, F{}, log_mass)));   // NaN spoils the gradients too
    uint8_t* flag = p.nonfinite + row + v * W;
    for (int64_t i = 0; i < here; i++) flag[i] = bad[i] != 0;
    if (!STATS) continue;
    auto defined = [&](F x) { return where(nothing, nan, x); };
    F margin = -log_others;
    margin = where(margin < splat(MARGIN_LIMIT), margin, splat(MARGIN_LIMIT));
    F square = total * total;
    put(MEAN, defined(mean));
    put(VARIANCE, defined(load(state.m2 + v * W) / seen));
    put(LARGEST, defined(peak));
    put(ENTROPY, defined(log1p_of(all) - all_log / total));
    const I top_key = nothing ? splat(-1) : key;
    std::memcpy(p.whole + total_rows + row + v * W, &top_key, here * 4);
    put(MARGIN, defined(margin));
    put(COLLISION, defined((one + all_sq) / square));
    put(JACOBIAN, defined((splat(2.0f) * all + all * all - all_sq) / square));
    F position = __builtin_convertvector(key, F) + load(state.rest_pos + v * W);
    put(MEAN_KEY, defined(position / (one + rest)));
    if (p.sinks) put(SINK_MASS, defined(where(sink_wins, one, f) / total));
  }
}

// The same statistics of octave o: every logit is 2ᵒ⁺¹ times as large.
void finish_octave(const Problem& p, const Strip& s, int64_t o, int64_t row) {
  const int64_t rows = p.batch * p.heads * p.queries;
  const float times = (float)(2 << o);
  State state = s.state;
  for (int i = 0; i < R; i++) {
    state.top[i] *= times, state.peak[i] *= times, state.mean[i] *= times;
    state.m2[i] *= times * times;
    state.rest[i] = s.octave[o].rest[i], state.rest_sq[i] = s.octave[o + 1].rest[i];
    state.rest_log[i] = times * s.octave[o].rest_log[i];
    state.rest_pos[i] = s.octave[o].rest_pos[i];
  }
  Problem there = p;
  there.rows += (o + 1) * FIELDS * rows, there.whole += (o + 1) * 2 * rows;
  there.nonfinite += (o + 1) * rows;
  float unused[R];
  finish<true>(there, state, row, s.count, unused);
}

// ------------------------------------------------------------------------------- forward, a task

struct Plan {
  int64_t rows, keys;        // query rows of a task, keys of a block
  bool copy;                 // K and V blocks are copied first: strided, half precision, few rows
};

Plan plan_for(const Problem& p) {
  Plan plan;
  auto in_place = [&](const Array& x, int64_t dim) {
    return x.dtype == FLOAT32 && x.stride[3] == 1 && x.stride[2] <= dim;
  };
  bool readable = in_place(p.key, p.dim) && (p.value_dim == 0 || in_place(p.value, p.value_dim));
  const int64_t widest = std::max(p.dim, p.value_dim);
  plan.copy = !readable || widest > 128 || (p.queries <= 2 * R && p.keys >= 512);
  plan.keys = widest <= 128 ? 128 : 64;
  const int64_t strips = p.queries <= 256 && !plan.copy ? 2 : plan.copy || widest > 64 ? 8 : 4;
  plan.rows = strips * R;
  return plan;
}

struct Workspace {
  Buffers buffers;
  float *k, *v, *wrong, *room;
};

// Copy or point at keys k0 … k1−1 of one kv head; what the masks say of the block as a whole.
// False: nobody sees any of it.
bool fetch(const Problem& p, const Plan& plan, const Workspace& w, int64_t b, int64_t kv,
           int64_t k0, int64_t k1, bool careful, Block& block) {
  block.k0 = k0, block.k1 = k1;
  block.keep = nullptr, block.ids = nullptr, block.wrong = nullptr;
  block.id_min = block.id_max = 0;
  if (p.keep.data) {
    const uint8_t* keep = (const uint8_t*)address(p.keep, b, 0, 0, 0);
    const void* none = std::memchr(keep + k0, 0, k1 - k0);
    const void* some = std::memchr(keep + k0, 1, k1 - k0);
    if (!some) return false;
    if (none) block.keep = keep;
  }
  if (p.key_ids.data) {
    block.ids = (const int32_t*)address(p.key_ids, b, 0, 0, 0);
    auto ends = std::minmax_element(block.ids + k0, block.ids + k1);
    block.id_min = *ends.first, block.id_max = *ends.second;
  }
  if (plan.copy) {
    for (int64_t j = k0; j < k1; j++)
      copy_row(p.key, address(p.key, b, kv, j, 0), p.dim, w.k + (j - k0) * p.dim);
    block.k = w.k, block.ldk = p.dim;
  } else {
    block.k = (const float*)address(p.key, b, kv, k0, 0), block.ldk = p.key.stride[2];
  }
  block.v = nullptr, block.ldv = 0;
  if (p.value_dim == 0) return true;
  if (plan.copy || careful) {
    for (int64_t j = k0; j < k1; j++)
      copy_row(p.value, address(p.value, b, kv, j, 0), p.value_dim, w.v + (j - k0) * p.value_dim);
    block.v = w.v, block.ldv = p.value_dim;
  } else {
    block.v = (const float*)address(p.value, b, kv, k0, 0), block.ldv = p.value.stride[2];
  }
  if (careful) {
    for (int64_t i = 0; i < (k1 - k0) * p.value_dim; i++) {
      w.wrong[i] = !std::isfinite(w.v[i]);
      if (w.wrong[i] != 0) w.v[i] = 0;
    }
    block.wrong = w.wrong;
  }
  return true;
}

// Rows first … first+count−1 of head h: all keys. True if some output that no score spoils is not
// finite: V holds NaN or inf, which must matter to rows that attend to it only, so look carefully.
template <bool STATS>
bool forward_rows(const Problem& p, const Plan& plan, int64_t b, int64_t h, int64_t first,
                  int64_t count, bool careful, Strip* strips, const Workspace& w) {
  const int64_t kv = h / (p.heads / p.kv_heads);
  const int64_t n = (count + R - 1) / R;
  int64_t begin = p.keys, end = 0;
  for (int64_t i = 0; i < n; i++) {
    Strip& s = strips[i];
    place(p, s, b, h, first + i * R, std::min<int64_t>(R, count - i * R));
    if (careful)
      for (int j = 0; j < R; j++) s.seen_any[j] = s.state.count[j] > 0;
    s.state.clear();
    if (p.octaves) std::memset(s.octave, 0, sizeof s.octave);
    to_columns(p.query, b, h, s.first, s.count, p.dim, s.nv * W, s.qt, w.room);
    std::memset(s.ot, 0, p.value_dim * s.nv * W * 4);
    begin = std::min(begin, s.lo_min), end = std::max(end, s.hi_max + 1);
  }
  begin -= begin % plan.keys;
  for (int64_t k0 = begin; k0 < end; k0 += plan.keys) {
    Block block;
    if (!fetch(p, plan, w, b, kv, k0, std::min(k0 + plan.keys, end), careful, block)) continue;
    for (int64_t i = 0; i < n; i++)
      with_vectors(strips[i].nv, [&](auto nv) {
        constexpr int NV = decltype(nv)::value;
        if (p.octaves == 0) forward_block<NV, STATS>(p, strips[i], block, w.buffers);
        else if (p.octaves == 1) forward_block<NV, true, 1>(p, strips[i], block, w.buffers);
        else if (p.octaves == 2) forward_block<NV, true, 2>(p, strips[i], block, w.buffers);
        else if (p.octaves == 3) forward_block<NV, true, 3>(p, strips[i], block, w.buffers);
        else forward_block<NV, true, 4>(p, strips[i], block, w.buffers);
      });
  }
  bool suspicious = false;
  for (int64_t i = 0; i < n; i++) {
    Strip& s = strips[i];
    const int64_t row = (b * p.heads + h) * p.queries + s.first;
    float inverse[R];
    finish<STATS>(p, s.state, row, s.count, inverse);
    for (int64_t o = 0; o < p.octaves; o++) finish_octave(p, s, o, row);
    if (p.value_dim == 0) continue;
    suspicious |= to_rows(s.ot, s.nv * W, s.count, p.value_dim, inverse, p.out + row * p.value_dim,
                          p.value_dim);
    for (int64_t j = 0; j < s.count; j++)   // a row without keys is 0 whatever V holds
      if (s.state.key[j] < 0 && inverse[j] == 0)
        std::memset(p.out + (row + j) * p.value_dim, 0, p.value_dim * 4);
  }
  return suspicious;
}

Workspace workspace(const Problem& p, const Plan& plan, int64_t strip_count, Strip*& strips) {
  const int64_t lanes = plan.keys * R, rows = strip_count * R;
  memory.reserve((rows * (p.dim + p.value_dim) + 5 * lanes + plan.keys * (p.dim + 2 * p.value_dim) +
                  W * (p.dim + p.value_dim)) * 4 + strip_count * sizeof(Strip) + 64 * 128);
  Workspace w;
  strips = (Strip*)memory.floats(strip_count * sizeof(Strip) / 4);
  w.buffers.raw = memory.floats(lanes);
  bool apart = p.softcap != 0 || (p.dense.data && p.dense.dtype != BOOL);
  w.buffers.logits = apart ? memory.floats(lanes) : w.buffers.raw;
  const bool boolean = p.dense.dtype == BOOL;
  w.buffers.bias = p.dense.data && !boolean ? memory.floats(lanes) : nullptr;
  w.buffers.allowed = p.dense.data && boolean ? (uint8_t*)memory.floats(lanes / 4 + W) : nullptr;
  w.buffers.tops = memory.floats(lanes / 4 + R);
  w.buffers.slope = nullptr;
  w.k = memory.floats(plan.keys * p.dim);
  w.v = memory.floats(plan.keys * p.value_dim);
  w.wrong = memory.floats(plan.keys * p.value_dim);
  w.room = memory.floats(W * (p.dim + p.value_dim));
  for (int64_t i = 0; i < strip_count; i++) {
    strips[i].qt = memory.floats(R * p.dim);
    strips[i].ot = memory.floats(R * p.value_dim);
  }
  return w;
}

template <bool STATS>
void forward(const Problem& p) {
  const Plan plan = plan_for(p);
  const int64_t pieces = (p.queries + plan.rows - 1) / plan.rows, heads = p.batch * p.heads;
  for_tasks(p.threads, pieces * heads, [&](int64_t task) {
    // Under causality the last rows see most: they go first.
    const int64_t piece = pieces - 1 - task / heads, b = task % heads / p.heads, h = task % p.heads;
    const int64_t first = piece * plan.rows, count = std::min(plan.rows, p.queries - first);
    Strip* strips;
    Workspace w = workspace(p, plan, (count + R - 1) / R, strips);
    if (forward_rows<STATS>(p, plan, b, h, first, count, false, strips, w))
      forward_rows<STATS>(p, plan, b, h, first, count, true, strips, w);
  });
}

// -------------------------------------------------------------------------------------- backward
//
// dS = p·(dP − level − dH·ln p) is with respect to what enters softmax; level = δ − dlse + dH·H
// comes from native.py, row by row. For one head, with Sᵀ and dPᵀ (keys × strip) in L1:
//
//   for each block of keys, for each 4 strips of rows
//     for each strip      Sᵀ = K·Qᵀ    dPᵀ = V·dOᵀ    p, dS lane by lane    dQᵀ += Kᵀ·dSᵀ
//     for all 4 at once   dV += Pᵀ·dO  dK += dSᵀ·Q
//
// dK and dV of a block belong to one task; dQ is summed over the blocks of a task, and where a head
// is cut into several tasks, over tasks in a fixed order: the result depends on the number of
// threads only.

constexpr int GROUP = 4;                    // strips that share a pass over dK and dV
constexpr int64_t ROWS_AT_ONCE = GROUP * R;
constexpr int64_t BACKWARD_KEYS = 96;

struct Gradient {                           // a task's working memory
  Strip* strips;                            // of one head; ot holds dOᵀ
  float *dqt;                               // of each strip: dim × R
  float *q_rows, *g_rows;                   // Q·scale and dO, cut into chunks of up to 3 vectors
  float *dp, *p, *ds;                       // dPᵀ of a strip; Pᵀ and dSᵀ of 4 strips
  float *k_safe;                            // K with zeros for NaN and inf
  float *dk, *dv;                           // keys × dim rounded up to vectors
  float* sums;                              // of each strip: SUM_ROWS × R
  bool careful;
};

// What is added up of each row where it is asked for, over its visible keys, as kernels/__init__.py
// says: t = unit·(dP − δ), x = lift·p·t of the weights up to the row's limit.
enum Sum { NUMBER, AVERAGE, SPREAD, TOTAL, SQUARES, MOMENT, SUMS };

constexpr int CONSTANTS = 4;                // unit, unit·δ, lift and limit of a row
constexpr int SUM_ROWS = SUMS + CONSTANTS;  // of R lanes each, kept for a strip

// Join the sums of other keys, b, to the rows' own.
INLINE void join(F (&a)[SUMS], const F (&b)[SUMS]) {
  const F all = a[NUMBER] + b[NUMBER], weight = b[NUMBER] / larger(all, splat(1.0f));
  const F gap = b[AVERAGE] - a[AVERAGE];
  a[SPREAD] += b[SPREAD] + gap * gap * (a[NUMBER] * weight);
  a[AVERAGE] += gap * weight;
  a[NUMBER] = all;
  for (int i : {TOTAL, SQUARES, MOMENT}) a[i] += b[i];
}

INLINE int64_t vectors(int64_t dim) { return (dim + W - 1) / W; }

// Cut n vectors into chunks of up to 3, as even as can be: run(first, number).
template <class Do>
INLINE void in_chunks(int64_t n, const Do& run) {
  const int64_t chunks = (n + MAX_NV - 1) / MAX_NV;
  for (int64_t i = 0, first = 0; i < chunks; i++) {
    const int64_t number = n / chunks + (i < n % chunks);
    run(first, (int)number);
    first += number;
  }
}

bool all_finite(const float* x, int64_t n) {
  F poison{};
  int64_t i = 0;
  for (; i + W <= n; i += W) poison += load(x + i) - load(x + i);
  bool fine = !any(~(poison == F{}));
  for (; i < n; i++) fine &= std::isfinite(x[i]);
  return fine;
}

void make_safe(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = std::isfinite(x[i]) ? x[i] : 0.0f;
}

// Rows of x as chunks: all rows of the first vectors, then of the next.
void to_chunks(const float* row, int64_t r, int64_t rows, int64_t dim, float scale, float* to) {
  in_chunks(vectors(dim), [&](int64_t first, int nv) {
    float* chunk = to + first * W * rows + r * nv * W;
    for (int64_t c = 0; c < nv * W; c++) {
      int64_t x = first * W + c;
      chunk[c] = x < dim ? row[x] * scale : 0.0f;
    }
  });
}

// Add what keys a … b−1 pass on to the strip's sums.
template <int NV>
void add_sums(const Problem& p, const Strip& s, const Block& block, const Cut& c, const Buffers& w,
              const Gradient& m, int64_t lane0, int64_t lanes, float* sums) {
  const int64_t width = NV * W, n = c.b - c.a;
  const F floor = splat(float_floor(p));
  for (int v = 0; v < NV; v++) {
    F own[SUMS], constants[CONSTANTS];
    for (int i = 0; i < SUM_ROWS; i++)
      (i < SUMS ? own[i] : constants[i - SUMS]) = load(sums + i * R + v * W);
    const auto [unit, delta, lift, limit] = constants;
    const I counted = load(s.state.count + v * W) != F{};
    const float* weights = m.p + (c.a - block.k0) * lanes + lane0 + v * W;
    // About the mean so far, or δ in the first block: both lie among the row's own dP, so that at
    // most 2n roundings of the row's spread are lost (docs/maths.md#gradients).
    const F about = own[AVERAGE];
    F number = splat((float)n), sum{}, square{}, total{}, squares{}, moment{};
    I hidden{};
    for (int64_t j = 0; j < n; j++) {
      const int64_t at = j * width + v * W;
      F weight = load(weights + j * lanes), t = load(m.dp + at) * unit - delta, apart = t - about;
      if (!c.whole) {
        I seen = load(w.logits + at) != splat(-INF);
        if (c.dense && w.bias) seen &= ~((load(w.bias + at) <= floor) & counted);
        t = where(seen, t), apart = where(seen, apart), hidden += ~seen;
      }
      F x = where(weight > limit, F{}, lift * weight) * t;
      sum += apart, square += apart * apart;
      total += x, squares += x * x, moment += x * t;
    }
    number += __builtin_convertvector(hidden, F);
    const F mean = sum / larger(number, splat(1.0f)), spread = larger(square - sum * mean, F{});
    const F part[SUMS] = {number, about + mean, spread, total, squares, moment};
    join(own, part);
    for (int i = 0; i < SUMS; i++) store(sums + i * R + v * W, own[i]);
  }
}

// p and dS of one strip and keys a … b−1 into columns `lane0` of the group's buffers.
template <int NV>
void strip_gradient(const Problem& p, const Strip& s, const Block& block, const Cut& c,
                    const Buffers& w, const Gradient& m, int64_t lane0, int64_t lanes,
                    float* sums) {
  const int64_t width = NV * W, n = c.b - c.a;
  const float* k = block.k + (c.a - block.k0) * block.ldk;
  const float* value = block.v + (c.a - block.k0) * block.ldv;
  product<NV>(k, block.ldk, n, s.qt, width, p.dim, (float)p.scale, w.raw, width);
  Gathered<NV> unused{};
  if (c.plain0 > c.a) masked<NV>(p, s, block, c, c.a, c.plain0, w, unused);
  if (c.b > c.plain1) masked<NV>(p, s, block, c, c.plain1, c.b, w, unused);
  product<NV>(value, block.ldv, n, s.ot, width, p.value_dim, 1.0f, m.dp, width);

  const F floor = splat(float_floor(p));
  for (int v = 0; v < NV; v++) {
    const F top = load(s.state.top + v * W), log_mass = load(s.state.rest_log + v * W);
    const F level = load(s.state.mean + v * W), d_entropy = load(s.state.m2 + v * W);
    const I wrong = load(s.state.key + v * W), counted = load(s.state.count + v * W) != F{};
    float* p_out = m.p + (c.a - block.k0) * lanes + lane0 + v * W;
    float* ds_out = m.ds + (c.a - block.k0) * lanes + lane0 + v * W;
    for (int64_t j = 0; j < n; j++) {
      const int64_t at = j * width + v * W;
      F logit = load(w.logits + at);
      F z = larger(splat(EXP_FLOOR), (logit - top) - log_mass);
      F weight = exp_floored(z);
      if (m.careful) weight = wrong ? splat(std::numeric_limits<float>::quiet_NaN()) : weight;
      F ds = weight * (load(m.dp + at) - level - d_entropy * z);
      if (!c.whole) {
        I visible = logit != splat(-INF);
        // Only a row that sees nothing attends to what a finfo.min bias leaves it.
        if (c.dense && w.bias) visible &= ~((load(w.bias + at) <= floor) & counted);
        weight = where(visible, weight);
        ds = where(visible, ds);
      }
      store(p_out + j * lanes, weight);
      store(ds_out + j * lanes, ds);
    }
  }
  if (p.sums) add_sums<NV>(p, s, block, c, w, m, lane0, lanes, sums);
  if (p.d_bias) {
    for (int64_t i = 0; i < s.count; i++) {
      float* to = p.d_bias + s.batch * p.d_bias_stride[0] + s.head * p.d_bias_stride[1] +
                  (s.first + i) * p.d_bias_stride[2];
      const float* from = m.ds + (c.a - block.k0) * lanes + lane0 + i;
      for (int64_t j = 0; j < n; j++) to[(c.a + j) * p.d_bias_stride[3]] += from[j * lanes];
    }
  }
  if (w.slope) {
    for (int64_t j = 0; j < n; j++)
      for (int v = 0; v < NV; v++) {
        float* ds = m.ds + (c.a - block.k0 + j) * lanes + lane0 + v * W;
        F slope = load(w.slope + j * width + v * W), d = load(ds);
        store(ds, where(d != F{}, d * slope));   // what is hidden has d = 0, and any slope
      }
  }
}

// All rows of head h against every `step`-th block of keys from block `part` on.
void backward_head(const Problem& p, const Plan& plan, int64_t b, int64_t h, int64_t part,
                   int64_t step, const Workspace& w, const Gradient& m, float* d_query,
                   float* row_sums) {
  const int64_t kv = h / (p.heads / p.kv_heads), strips = (p.queries + R - 1) / R;
  const int64_t row0 = (b * p.heads + h) * p.queries, dim = p.dim, value_dim = p.value_dim;
  int64_t begin = p.keys, end = 0;
  for (int64_t i = 0; i < strips; i++) {
    Strip& s = m.strips[i];
    place(p, s, b, h, i * R, std::min<int64_t>(R, p.queries - i * R));
    const int lanes = s.nv * W;
    to_columns(p.query, b, h, s.first, s.count, dim, lanes, s.qt, w.room);
    Array d_out{(const char*)(p.d_out + row0 * value_dim), FLOAT32, {0, 0, value_dim, 1}};
    to_columns(d_out, 0, 0, s.first, s.count, value_dim, lanes, s.ot, w.room);
    std::memset(m.dqt + i * R * dim, 0, lanes * dim * 4);
    float* sums = m.sums + i * SUM_ROWS * R;
    if (p.sums) std::memset(sums, 0, SUMS * R * 4);
    begin = std::min(begin, s.lo_min), end = std::max(end, s.hi_max + 1);
    for (int64_t j = 0; j < lanes; j++) {
      const int64_t row = row0 + s.first + std::min(j, s.count - 1);
      const float* g = p.d_out + row * value_dim;
      s.state.top[j] = p.top[row] == -INF ? 0.0f : p.top[row];
      s.state.rest_log[j] = p.log_mass[row];
      s.state.mean[j] = p.level[row];
      s.state.m2[j] = p.d_entropy ? p.d_entropy[row] : 0.0f;
      s.state.count[j] = p.counted[row];
      for (int64_t x = 0; p.sums && x < CONSTANTS; x++)
        sums[(SUMS + x) * R + j] = p.constants[x * p.batch * p.heads * p.queries + row];
      s.state.key[j] = m.careful && !all_finite(g, value_dim) ? -1 : 0;
      if (j >= s.count) continue;
      copy_row(p.query, address(p.query, b, h, s.first + j, 0), dim, w.room);
      if (m.careful) make_safe(w.room, dim);
      to_chunks(w.room, s.first + j, p.queries, dim, (float)p.scale, m.q_rows);
      std::memcpy(w.room, g, value_dim * 4);
      if (m.careful) make_safe(w.room, value_dim);
      to_chunks(w.room, s.first + j, p.queries, value_dim, 1.0f, m.g_rows);
    }
  }
  const int64_t k_width = vectors(dim) * W, v_width = vectors(value_dim) * W;
  begin -= begin % plan.keys;
  for (int64_t k0 = begin; k0 < end; k0 += plan.keys) {
    if (k0 / plan.keys % step != part) continue;
    Block block;
    if (!fetch(p, plan, w, b, kv, k0, std::min(k0 + plan.keys, p.keys), false, block)) continue;
    const int64_t keys = block.k1 - k0;
    const float* k_safe = block.k;
    int64_t ld_safe = block.ldk;
    if (m.careful) {
      std::memcpy(m.k_safe, w.k, keys * dim * 4);
      make_safe(m.k_safe, keys * dim);
      k_safe = m.k_safe, ld_safe = dim;
    }
    std::memset(m.dk, 0, keys * k_width * 4);
    std::memset(m.dv, 0, keys * v_width * 4);
    for (int64_t g0 = 0; g0 < strips; g0 += GROUP) {
      const int64_t g1 = std::min<int64_t>(g0 + GROUP, strips);
      const int64_t first_row = m.strips[g0].first;
      const int64_t lanes = m.strips[g1 - 1].first + m.strips[g1 - 1].nv * W - first_row;
      int64_t used0 = g1, used1 = g0;       // strips that see the block
      for (int64_t i = g0; i < g1; i++) {
        Strip& s = m.strips[i];
        Cut c;
        with_vectors(s.nv, [&](auto nv) { c = cut<decltype(nv)::value>(p, s, block, w.buffers); });
        const int64_t lane0 = s.first - first_row, width = s.nv * W;
        if (c.a < c.b) used0 = std::min(used0, i), used1 = i + 1;
        const int64_t a = c.a < c.b ? c.a : block.k1, end_seen = c.a < c.b ? c.b : block.k1;
        for (int64_t j = 0; j < keys; j++) {   // what the strip does not see of the block is 0
          if (j == a - k0) j = end_seen - k0;
          if (j >= keys) break;
          std::memset(m.p + j * lanes + lane0, 0, width * 4);
          std::memset(m.ds + j * lanes + lane0, 0, width * 4);
        }
        if (c.a >= c.b) continue;
        with_vectors(s.nv, [&](auto nv) {
          constexpr int NV = decltype(nv)::value;
          strip_gradient<NV>(p, s, block, c, w.buffers, m, lane0, lanes, m.sums + i * SUM_ROWS * R);
          add_transposed<NV>(k_safe + (c.a - k0) * ld_safe, ld_safe, dim,
                             m.ds + (c.a - k0) * lanes + lane0, lanes, c.b - c.a,
                             m.dqt + i * R * dim, width);
        });
      }
      if (used0 >= used1) continue;
      const int64_t r0 = m.strips[used0].first, lane0 = r0 - first_row;
      const int64_t rows = m.strips[used1 - 1].first + m.strips[used1 - 1].count - r0;
      auto accumulate = [&](const float* weights, const float* chunks, int64_t width, float* to) {
        in_chunks(width / W, [&](int64_t first, int nv) {
          with_vectors(nv, [&](auto n) {
            constexpr int NV = decltype(n)::value;
            add_product<NV>(weights + lane0, lanes, keys,
                            chunks + first * W * p.queries + r0 * NV * W, NV * W, rows,
                            to + first * W, width);
          });
        });
      };
      accumulate(m.p, m.g_rows, v_width, m.dv);
      accumulate(m.ds, m.q_rows, k_width, m.dk);
    }
    const int64_t key_row = (b * p.kv_heads + kv) * p.keys + k0;
    for (int64_t j = 0; j < keys; j++) {
      float *dk = p.d_key + (key_row + j) * dim, *dv = p.d_value + (key_row + j) * value_dim;
      for (int64_t x = 0; x < dim; x++) dk[x] += m.dk[j * k_width + x];
      for (int64_t x = 0; x < value_dim; x++) dv[x] += m.dv[j * v_width + x];
    }
  }
  float scale[R];
  std::fill(scale, scale + R, (float)p.scale);
  for (int64_t i = 0; i < strips; i++) {
    const Strip& s = m.strips[i];
    to_rows(m.dqt + i * R * dim, s.nv * W, s.count, dim, scale, d_query + s.first * dim, dim);
    for (int64_t j = 0; p.sums && j < SUMS; j++)
      std::memcpy(row_sums + j * p.batch * p.heads * p.queries + row0 + s.first,
                  m.sums + (i * SUM_ROWS + j) * R, s.count * 4);
  }
}

// An input of this kv head holds NaN or inf: 0 · NaN must then be kept out of every product.
bool unsafe(const Problem& p, int64_t b, int64_t kv, float* room) {
  auto rows_finite = [&](const Array& x, int64_t head, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; i++) {
      const char* row = address(x, b, head, i, 0);
      const float* values = (const float*)row;
      if (x.dtype != FLOAT32 || x.stride[3] != 1) copy_row(x, row, dim, room), values = room;
      if (!all_finite(values, dim)) return false;
    }
    return true;
  };
  if (!rows_finite(p.key, kv, p.keys, p.dim)) return true;
  if (!rows_finite(p.value, kv, p.keys, p.value_dim)) return true;
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    if (!rows_finite(p.query, h, p.queries, p.dim)) return true;
    const float* g = p.d_out + (b * p.heads + h) * p.queries * p.value_dim;
    if (!all_finite(g, p.queries * p.value_dim)) return true;
  }
  return false;
}

void backward(const Problem& p) {
  const int64_t heads = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  int64_t threads = p.threads;
  // A bias shared by heads is summed by one thread, so that nothing races and the order is fixed.
  const int64_t* bias = p.d_bias_stride;
  const bool shared =
      (bias[0] == 0 && p.batch > 1) || (bias[1] == 0 && p.heads > 1) || bias[3] == 0;
  if (p.d_bias && shared) threads = 1;
  const int64_t parts = heads % threads == 0 || heads >= 4 * threads ? 1 : threads;
  const int64_t size = p.batch * p.heads * p.queries * p.dim;
  const int64_t rows = p.batch * p.heads * p.queries;
  std::vector<float> partial((parts - 1) * size);
  std::vector<float> partial_sums(p.sums ? (parts - 1) * SUMS * rows : 0);
  for_tasks(threads, heads * parts, [&](int64_t task) {
    const int64_t b = task / parts / p.kv_heads, kv = task / parts % p.kv_heads;
    const int64_t part = task % parts;
    Plan plan = plan_for(p);
    plan.keys = BACKWARD_KEYS;
    const int64_t strips = (p.queries + R - 1) / R, k_width = vectors(p.dim) * W;
    const int64_t v_width = vectors(p.value_dim) * W, lanes = plan.keys * R;
    const int64_t floats =
        strips * R * (2 * p.dim + p.value_dim + SUM_ROWS) + p.queries * (k_width + v_width) + 6 * lanes +
        2 * plan.keys * ROWS_AT_ONCE + plan.keys * (2 * p.dim + p.value_dim + k_width + v_width) +
        W * (p.dim + p.value_dim);
    memory.reserve(floats * 4 + strips * sizeof(Strip) + (2 * strips + 40) * 128);
    Workspace w;
    Gradient m;
    m.strips = (Strip*)memory.floats(strips * sizeof(Strip) / 4);
    for (int64_t i = 0; i < strips; i++) {
      m.strips[i].qt = memory.floats(R * p.dim);
      m.strips[i].ot = memory.floats(R * p.value_dim);
    }
    m.dqt = memory.floats(strips * R * p.dim);
    m.sums = memory.floats(strips * R * SUM_ROWS);
    m.q_rows = memory.floats(p.queries * k_width);
    m.g_rows = memory.floats(p.queries * v_width);
    w.buffers.raw = w.buffers.logits = memory.floats(lanes);
    const bool boolean = p.dense.dtype == BOOL;
    w.buffers.bias = p.dense.data && !boolean ? memory.floats(lanes) : nullptr;
    w.buffers.allowed = p.dense.data && boolean ? (uint8_t*)memory.floats(lanes / 4 + W) : nullptr;
    w.buffers.slope = p.softcap != 0 ? memory.floats(lanes) : nullptr;
    m.dp = memory.floats(lanes);
    m.p = memory.floats(plan.keys * ROWS_AT_ONCE);
    m.ds = memory.floats(plan.keys * ROWS_AT_ONCE);
    m.k_safe = memory.floats(plan.keys * p.dim);
    m.dk = memory.floats(plan.keys * k_width);
    m.dv = memory.floats(plan.keys * v_width);
    w.k = memory.floats(plan.keys * p.dim);
    w.v = memory.floats(plan.keys * p.value_dim);
    w.wrong = nullptr;
    w.room = memory.floats(W * (p.dim + p.value_dim));
    m.careful = unsafe(p, b, kv, w.room);
    plan.copy |= m.careful;
    float* d_query = part == 0 ? p.d_query : partial.data() + (part - 1) * size;
    float* sums = part == 0 ? p.sums : partial_sums.data() + (part - 1) * SUMS * rows;
    for (int64_t h = kv * group; h < (kv + 1) * group; h++)
      backward_head(p, plan, b, h, part, parts, w, m,
                    d_query + (b * p.heads + h) * p.queries * p.dim, sums);
  });
  if (parts == 1) return;
  constexpr int64_t PIECE = 1 << 14;
  for_tasks(threads, (size + PIECE - 1) / PIECE, [&](int64_t task) {
    const int64_t from = task * PIECE, to = std::min(from + PIECE, size);
    for (int64_t part = 0; part + 1 < parts; part++)
      for (int64_t i = from; i < to; i++) p.d_query[i] += partial[part * size + i];
  });
  for (int64_t i = 0; p.sums && i < rows; i += W) {
    const int64_t here = std::min<int64_t>(W, rows - i) * 4;
    F own[SUMS]{}, other[SUMS]{};
    for (int x = 0; x < SUMS; x++) std::memcpy(&own[x], p.sums + x * rows + i, here);
    for (int64_t part = 0; part + 1 < parts; part++) {
      const float* from = partial_sums.data() + part * SUMS * rows + i;
      for (int x = 0; x < SUMS; x++) std::memcpy(&other[x], from + x * rows, here);
      join(own, other);
    }
    for (int x = 0; x < SUMS; x++) std::memcpy(p.sums + x * rows + i, &own[x], here);
  }
}

// ---------------------------------------------------------------------------------------- decode
//
// One or two queries against many keys: reading K and V once is all the work, so a row of K lies in
// the lanes, and the keys are cut into chunks that threads take; `merge` joins the chunks' states
// as rows.py does.

constexpr int DECODE_ROWS = 8;        // query rows (heads of a group × queries) of a task
constexpr int64_t DECODE_KEYS = 256;  // keys of a block

// Join state b, lane j, of later keys into a, lane i: the factors that rescale each side's output.
void merge(State& a, int i, const State& b, int j, float& fa, float& fb) {
  const bool a_first = !(b.top[j] > a.top[i]) && (a.key[i] >= 0 || b.key[j] < 0);
  const float top = a_first ? a.top[i] : b.top[j];
  auto factor = [&](float own_top, float& shift) {
    shift = own_top == -INF || own_top == top ? 0.0f : own_top - top;
    shift = shift < EXP_FLOOR ? EXP_FLOOR : shift;
    return own_top == -INF || shift == EXP_FLOOR ? 0.0f : std::exp(shift);
  };
  float shift_a, shift_b;
  fa = factor(a.top[i], shift_a), fb = factor(b.top[j], shift_b);
  // The side that loses the top gives its own top key, mass 1, to the rest.
  const float own_a = !a_first && a.key[i] >= 0, own_b = a_first && b.key[j] >= 0;
  const float mass_a = a.rest[i] + own_a, mass_b = b.rest[j] + own_b;
  const float count = a.count[i] + b.count[j], gap = b.mean[j] - a.mean[i];
  const float weight = b.count[j] / std::max(count, 1.0f);
  a.rest_log[i] = fa * (a.rest_log[i] + shift_a * mass_a) + fb * (b.rest_log[j] + shift_b * mass_b);
  a.rest_sq[i] = (a.rest_sq[i] + own_a) * fa * fa + (b.rest_sq[j] + own_b) * fb * fb;
  a.rest_pos[i] = fa * (a.rest_pos[i] + own_a * a.key[i]) + fb * (b.rest_pos[j] + own_b * b.key[j]);
  a.rest[i] = mass_a * fa + mass_b * fb;
  a.m2[i] += b.m2[j] + gap * gap * (a.count[i] * weight);
  a.mean[i] += gap * weight;
  a.count[i] = count;
  a.peak[i] = std::max(a.peak[i], b.peak[j]);
  a.top[i] = top;
  if (!a_first) a.key[i] = b.key[j];
}

INLINE float sum_of(F x) {
  float s = 0;
  for (int i = 0; i < W; i++) s += x[i];
  return s;
}

// Scores of W keys, rows of k, with one query of `n` whole vectors and `rest` more components.
INLINE F score_keys(const float* const (&k)[W], const float* q, int64_t n, int64_t rest) {
  F sum[W] = {};
  for (int64_t x = 0; x < n * W; x += W) {
    F qx = load(q + x);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sum[i] += load(k[i] + x) * qx;
  }
  if (rest) {
    F qx = load(q + n * W);   // padded with zeros
    for (int i = 0; i < W; i++) {
      F kx{};
      std::memcpy(&kx, k[i] + n * W, rest * 4);
      sum[i] += kx * qx;
    }
  }
  transpose(sum);
  F total = sum[0];
  for (int i = 1; i < W; i++) total += sum[i];
  return total;
}

// out[x] += Σ_j e[j]·V[j][x] for N vectors of x.
template <int N>
INLINE void add_values(const float* v, int64_t ldv, const float* e, int64_t n, float* out) {
  F sum[N];
  for (int i = 0; i < N; i++) sum[i] = load(out + i * W);
  for (int64_t j = 0; j < n; j++) {
    F ej = splat(e[j]);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) sum[i] += load(v + j * ldv + i * W) * ej;
  }
  for (int i = 0; i < N; i++) store(out + i * W, sum[i]);
}

// One row of scores of a block (raw = logits where nothing is capped or added): apply masks; how many
// keys count.
int64_t masked_row(const Problem& p, const Block& block, int64_t b, int64_t h, int64_t i, float* raw,
                float* logits, float& poison) {
  const int64_t at = i + p.offset;
  const int64_t lo = p.left < 0 ? 0 : at - p.left, hi = p.right < 0 ? p.keys : at + p.right;
  const int32_t* ids = query_ids(p, b);
  const char* dense = p.dense.data ? address(p.dense, b, h, i, block.k0) : nullptr;
  const int64_t step = p.dense.stride[3] * size_of(p.dense.dtype);
  int64_t number = 0;
  for (int64_t j = block.k0; j < block.k1; j++) {
    const int64_t x = j - block.k0;
    float logit = raw[x];
    if (p.softcap != 0) logit = (float)p.softcap * std::tanh(logit / (float)p.softcap);
    bool visible = j >= lo && j <= hi;
    visible &= (!block.keep || block.keep[j]) && (!ids || ids[i] == block.ids[j]);
    bool counted = visible;
    if (dense) {
      const float bias = read(dense + x * step, p.dense.dtype);
      visible &= bias != -INF;
      const bool low = bias <= float_floor(p);
      counted = visible && !low;
      if (low && !std::isfinite(logit)) logit = 0;
      logit += bias;
      if (counted) poison += logit - logit;
    }
    if (!counted) raw[x] = -INF;
    number += counted;
    logits[x] = visible ? logit : -INF;
  }
  return number;
}

// The state of one row over one block of n keys (both arrays padded with −inf to whole vectors), of
// which `number` count; logits become e, the top key's 1.
template <bool STATS>
void summarise(float* raw, float* logits, int64_t n, int64_t number, int64_t k0, float poison,
               State& s, int lane) {
  F top = splat(-INF), peak = top, sum{}, count{};
  for (int64_t j = 0; j < n; j += W) {
    F x = load(raw + j);
    I counted = x != splat(-INF);
    peak = larger(x, peak);
    top = larger(load(logits + j), top);
    sum += where(counted, x);
    count += where(counted, splat(1.0f));
  }
  float best = -INF, high = -INF;
  for (int i = 0; i < W; i++) best = std::max(best, top[i]), high = std::max(high, peak[i]);
  s.top[lane] = best, s.peak[lane] = high, s.key[lane] = -1;
  s.count[lane] = (float)number;
  // A score that counts and is −∞ looks hidden above, and spoils its row.
  if (sum_of(count) != s.count[lane]) poison = std::numeric_limits<float>::quiet_NaN();
  s.mean[lane] = (sum_of(sum) + poison) / std::max(s.count[lane], 1.0f);
  s.rest[lane] = s.rest_sq[lane] = s.rest_log[lane] = s.rest_pos[lane] = s.m2[lane] = 0;
  const F mean = splat(s.mean[lane]);
  F m2{};
  for (int64_t j = 0; STATS && j < n; j += W) {
    F x = load(raw + j), d = where(x != splat(-INF), x - mean);
    m2 += d * d;
  }
  int64_t key = -1;
  if (best > -INF) {
    key = std::find(logits, logits + n, best) - logits;
    s.key[lane] = (int32_t)(k0 + key);
    logits[key] = -INF;
  }
  const F base = splat(best > -INF ? best : 0.0f);
  F rest{}, sq{}, log{}, pos{}, position{};
  for (int i = 0; i < W; i++) position[i] = (float)i;
  for (int64_t j = 0; j < n; j += W) {
    F z = larger(splat(EXP_FLOOR), load(logits + j) - base);
    F e = exp_floored(z);
    store(logits + j, e);
    rest += e;
    if (STATS) {
      sq += e * e;
      log += e * z;
      pos += e * position;
      position += splat((float)W);
    }
  }
  s.rest[lane] = sum_of(rest);
  if (STATS) {
    s.m2[lane] = sum_of(m2), s.rest_sq[lane] = sum_of(sq), s.rest_log[lane] = sum_of(log);
    s.rest_pos[lane] = sum_of(pos) + s.rest[lane] * (float)k0;
  }
  if (key >= 0) logits[key] = 1.0f;
}

// Join the chunks of rows row … row+n−1, finish them and write their output.
template <bool STATS>
void finish_decode(const Problem& p, State* states, float* out, int64_t chunks, int64_t room,
                   int64_t row, int n) {
  const int64_t b = row / p.queries / p.heads;
  State& state = states[0];
  for (int64_t c = 1; c < chunks; c++)
    for (int r = 0; r < n; r++) {
      float fa, fb;
      merge(state, r, states[c], r, fa, fb);
      for (int64_t x = r * p.value_dim; x < (r + 1) * p.value_dim; x++)
        out[x] = out[x] * fa + out[c * room + x] * fb;
    }
  float inverse[R];
  finish<STATS>(p, state, row, n, inverse);
  bool suspicious = false;
  for (int r = 0; r < n && p.value_dim; r++) {
    float* to = p.out + (row + r) * p.value_dim;
    float poison = 0;
    for (int64_t x = 0; x < p.value_dim; x++) {
      to[x] = out[r * p.value_dim + x] * inverse[r];
      poison += to[x] - to[x];
    }
    suspicious |= poison != 0 && std::isfinite(inverse[r]);
  }
  if (!suspicious) return;
  const Plan plan = plan_for(p);
  for (int64_t first = row; first < row + n;) {   // head by head, as V's NaN asks for
    const int64_t i = first % p.queries, h = first / p.queries % p.heads;
    const int64_t count = std::min(p.queries - i, row + n - first);
    Strip* strips;
    Workspace w = workspace(p, plan, (count + R - 1) / R, strips);
    if (forward_rows<STATS>(p, plan, b, h, i, count, false, strips, w))
      forward_rows<STATS>(p, plan, b, h, i, count, true, strips, w);
    first += count;
  }
}

template <bool STATS>
void decode(const Problem& p) {
  auto in_place = [](const Array& x) { return x.dtype == FLOAT32 && x.stride[3] == 1; };
  Plan plan;
  plan.copy = !in_place(p.key) || (p.value_dim && !in_place(p.value));
  plan.keys = DECODE_KEYS;
  const int64_t rows = p.heads / p.kv_heads * p.queries;    // of one kv head, contiguous
  const int64_t row_pieces = (rows + DECODE_ROWS - 1) / DECODE_ROWS;
  const int64_t units = p.batch * p.kv_heads * row_pieces;
  // Chunks of whole blocks, enough of them for every thread to have several.
  int64_t blocks = (p.keys + DECODE_KEYS - 1) / DECODE_KEYS;
  int64_t wanted = std::max<int64_t>((4 * p.threads + units - 1) / units, (blocks + 7) / 8);
  wanted = std::min(wanted, blocks);
  if (p.threads == 1) wanted = 1;
  const int64_t chunk = (blocks + wanted - 1) / std::max<int64_t>(wanted, 1) * DECODE_KEYS;
  const int64_t chunks = std::max<int64_t>((p.keys + chunk - 1) / std::max<int64_t>(chunk, 1), 1);
  const int64_t padded = vectors(p.dim) * W, room = DECODE_ROWS * p.value_dim;
  std::vector<State> states(units * chunks);
  std::vector<float> outs(units * chunks * room);
  std::vector<std::atomic<int64_t>> finished(units);
  for_tasks(p.threads, units * chunks, [&](int64_t task) {
    const int64_t unit = task / chunks, first = unit % row_pieces * DECODE_ROWS;
    const int64_t b = unit / row_pieces / p.kv_heads, kv = unit / row_pieces % p.kv_heads;
    const int n = (int)std::min<int64_t>(DECODE_ROWS, rows - first);
    const int64_t head0 = kv * (p.heads / p.kv_heads);
    memory.reserve((DECODE_KEYS * (p.dim + 2 * p.value_dim + 2) + DECODE_ROWS * padded) * 4 + 4096);
    Workspace w;
    w.k = memory.floats(DECODE_KEYS * p.dim);
    w.v = memory.floats(DECODE_KEYS * p.value_dim);
    float* query = memory.floats(DECODE_ROWS * padded);
    float *raw = memory.floats(DECODE_KEYS), *logits = memory.floats(DECODE_KEYS);
    if (p.softcap == 0 && (!p.dense.data || p.dense.dtype == BOOL)) logits = raw;
    State& state = states[task];
    State block_state;
    float* out = outs.data() + task * room;
    state.clear();
    for (int r = 0; r < n; r++) {
      const int64_t h = head0 + (first + r) / p.queries, i = (first + r) % p.queries;
      float* q = query + r * padded;
      copy_row(p.query, address(p.query, b, h, i, 0), p.dim, q);
      for (int64_t x = 0; x < padded; x++) q[x] = x < p.dim ? q[x] : 0.0f;
    }
    const int64_t begin = task % chunks * chunk, end = std::min(begin + chunk, p.keys);
    for (int64_t k0 = begin; k0 < end; k0 += DECODE_KEYS) {
      Block block;
      if (!fetch(p, plan, w, b, kv, k0, std::min(k0 + DECODE_KEYS, end), false, block)) continue;
      const int64_t keys = block.k1 - k0, whole = (keys + W - 1) / W * W;
      for (int r = 0; r < n; r++) {
        const int64_t h = head0 + (first + r) / p.queries, i = (first + r) % p.queries;
        for (int64_t j = 0; j < keys; j += W) {
          const float* k[W];
          for (int64_t t = 0; t < W; t++) k[t] = block.k + std::min(j + t, keys - 1) * block.ldk;
          F score = score_keys(k, query + r * padded, p.dim / W, p.dim % W);
          store(raw + j, score * splat((float)p.scale));
        }
        const int64_t at = i + p.offset;
        float poison = 0;
        int64_t number = keys;
        if (p.dense.data || p.softcap != 0 || block.keep || block.ids ||
            (p.left >= 0 && at - p.left > k0) || (p.right >= 0 && at + p.right < block.k1 - 1))
          number = masked_row(p, block, b, h, i, raw, logits, poison);
        for (int64_t j = keys; j < whole; j++) raw[j] = logits[j] = -INF;
        summarise<STATS>(raw, logits, whole, number, k0, poison, block_state, 0);
        float fa, fb;
        merge(state, r, block_state, 0, fa, fb);
        if (p.value_dim == 0) continue;
        float* o = out + r * p.value_dim;
        if (fa != 1)
          for (int64_t x = 0; x < p.value_dim; x++) o[x] *= fa;
        if (fb != 1)
          for (int64_t j = 0; j < keys; j++) logits[j] *= fb;
        int64_t x = 0;
        const float* v = block.v;
        const int64_t ld = block.ldv, d = p.value_dim;
        for (; x + 8 * W <= d; x += 8 * W) add_values<8>(v + x, ld, logits, keys, o + x);
        for (; x + 4 * W <= d; x += 4 * W) add_values<4>(v + x, ld, logits, keys, o + x);
        for (; x + W <= d; x += W) add_values<1>(v + x, ld, logits, keys, o + x);
        for (int64_t j = 0; x < p.value_dim && j < keys; j++)
          for (int64_t y = x; y < p.value_dim; y++) o[y] += logits[j] * block.v[j * block.ldv + y];
      }
    }
    // Whoever finishes a unit's last chunk joins them, in order.
    if (finished[unit].fetch_add(1) + 1 == chunks)
      finish_decode<STATS>(p, &states[unit * chunks], outs.data() + unit * chunks * room, chunks,
                           room, (b * p.kv_heads + kv) * rows + first, n);
  });
}

// ------------------------------------------------------------------------------- score moments
//
// Mean and variance of each row's scores over keys start … stop−1, start being where a run of keys
// starts (intervals.py), all in double. Keys are cut into chunks; of the chunks before a row's last
// one the state (count, mean μ, scatter M) is kept, and the keys of the row's own chunk are scored:
//
//     var·n = qᵀMq + Σ(s − s̄)² + (⟨q,c − μ⟩ + s̄)²·n_piece·n_before/n      c: the piece's centre
//
// Keys are taken about the mean of their own run in their own chunk, and states are joined by the
// formula of Chan, Golub & LeVeque, so nothing cancels. M is kept as an upper triangle with what is
// above the diagonal doubled: half of qᵀMq. A row's lane and a strip's rows are as in `forward`.

typedef double D __attribute__((vector_size(W * 4)));
typedef int64_t L __attribute__((vector_size(W * 4)));
constexpr int WD = W / 2;          // doubles side by side
constexpr int RD = MAX_NV * WD;    // rows in a strip

INLINE D load(const double* p) { D v; std::memcpy(&v, p, sizeof v); return v; }
INLINE void store(double* p, D v) { std::memcpy(p, &v, sizeof v); }
INLINE D splat(double s) { return D{} + s; }

struct Moments {
  int64_t batch, heads, kv_heads, queries, keys, dim, threads;
  Array query, key;        // (batch, heads or kv_heads, length, dim)
  const int64_t* source;   // where each key lies, in the order of runs; null: in that order
  const int64_t* runs;     // where each key's run starts, in that order; null: they are one
  const int64_t *start, *stop;   // (queries)
  const int64_t* rows;     // queries by ascending stop; null: they are
  const uint8_t* weight;   // (batch·kv_heads, keys), in that order, 0 for a key to leave out; or null
  const double* toward;    // (batch, heads, dim): the query whose variance along each row is wanted
  double *mean, *m2, *bias_mean, *bias_m2;   // (batch, heads, queries); 0 for a row without keys
  double* state;           // (batch·kv_heads, 1 + dim + dim²): n, μ, M of the last run; or null
};

// Σ over the keys of the run that goes on.
struct RunState {
  double n = 0;
  std::vector<double> mean, scatter;     // dim; dim × whole vectors, upper, doubled
  std::vector<double> bias_mean, bias_m2;   // of each head of the group
  bool fresh = false;                    // whether a run has started since this was cleared
  RunState(int64_t dim, int64_t width, int64_t group)
      : mean(width), scatter(dim * width), bias_mean(group), bias_m2(group) {}
};

INLINE int64_t chunk_of(int64_t dim) {   // scoring a chunk costs about what its Gram does
  return std::min<int64_t>(std::max<int64_t>((3 * dim / 4 + 23) / 24 * 24, 24), 192);
}

void copy_row(const Array& a, const char* row, int64_t n, double* to) {
  const int64_t step = a.stride[3] * size_of(a.dtype);
  if (a.dtype == FLOAT64)
    for (int64_t x = 0; x < n; x++) std::memcpy(to + x, row + x * step, 8);
  else if (a.dtype == FLOAT32 && a.stride[3] == 1)
    for (int64_t x = 0; x < n; x++) to[x] = ((const float*)row)[x];
  else
    for (int64_t x = 0; x < n; x++) to[x] = read(row + x * step, a.dtype);
}

template <int T, int NV>
INLINE void multiply(D (&sum)[T][NV], const double* a, int64_t step_j, int64_t step_x,
                     const double* b, int64_t width, int64_t n) {
  for (int64_t x = 0; x < n; x++) {
    D b0 = load(b), b1{}, b2{};
    PIN(b0);
    if (NV > 1) { b1 = load(b + WD); PIN(b1); }
    if (NV > 2) { b2 = load(b + 2 * WD); PIN(b2); }
#pragma GCC unroll 4
    for (int j = 0; j < T; j++) {
      D aj = splat(a[j * step_j]);
      sum[j][0] += aj * b0;
      if (NV > 1) sum[j][1 % NV] += aj * b1;
      if (NV > 2) sum[j][2 % NV] += aj * b2;
    }
    a += step_x;
    b += width;
  }
}

// Cut n rows into fours and what is left: do(Int<rows>, first).
template <class Do>
INLINE void in_fours(int64_t n, const Do& run) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) run(Int<4>{}, j);
  for (; j < n; j++) run(Int<1>{}, j);
}

// scatter (upper, doubled) += XᵀX for n rows of X.
template <int NV>
INLINE void add_gram(const double* x, int64_t width, int64_t n, int64_t dim, int64_t from,
                     double* scatter) {
  in_fours(std::min(dim, from + NV * WD), [&](auto t, int64_t a) {
    constexpr int T = decltype(t)::value;
    D sum[T][NV] = {};
    multiply<T, NV>(sum, x + a, 1, width, x + from, width, n);
    for (int i = 0; i < T; i++)
      for (int v = 0; v < NV; v++) {
        double* to = scatter + (a + i) * width + from + v * WD;
        for (int l = 0; l < WD; l++) {
          const int64_t b = from + v * WD + l;
          sum[i][v][l] *= b > a + i ? 2 : b == a + i ? 1 : 0;
        }
        store(to, load(to) + sum[i][v]);
      }
  });
}

struct MomentsRoom {   // of a thread
  int64_t chunk, width, group;
  std::vector<double> x, centre, along, bias, q, scores, shift;
  std::vector<int64_t> run, count;
  std::vector<uint8_t> real;
  MomentsRoom(const Moments& p)
      : chunk(chunk_of(p.dim)), width((p.dim + WD - 1) / WD * WD), group(p.heads / p.kv_heads),
        x((chunk + 1) * width), centre(chunk * width), along(group * chunk), bias(2 * group * chunk),
        q(width * RD), scores(chunk * RD), shift(2 * width), run(chunk), count(chunk), real(chunk) {}
};

INLINE int64_t row_at(const Moments& p, int64_t i) { return p.rows ? p.rows[i] : i; }

// The keys of a chunk about the mean of their run in it. Returns how many runs there are.
int64_t fetch_keys(const Moments& p, MomentsRoom& room, int64_t pair, int64_t e0, int64_t e1) {
  const int64_t b = pair / p.kv_heads, kv = pair % p.kv_heads, width = room.width;
  int64_t runs = 0;
  for (int64_t first = e0, last; first < e1; first = last, runs++) {
    double* centre = &room.centre[runs * width];
    std::fill_n(centre, width, 0.0);
    int64_t n = 0;
    for (last = first; last < e1; last++) {
      if (last > first && p.runs && p.runs[last] != p.runs[first]) break;
      const int64_t j = last - e0;
      double* x = &room.x[j * width];
      room.run[j] = runs;
      room.real[j] = !p.weight || p.weight[pair * p.keys + last];
      if (room.real[j]) {
        copy_row(p.key, address(p.key, b, kv, p.source ? p.source[last] : last, 0), p.dim, x);
        for (int64_t i = 0; i < p.dim; i++) centre[i] += x[i];
        n++;
      } else {
        std::fill_n(x, p.dim, 0.0);
      }
      room.count[j] = n;
    }
    for (int64_t i = 0; i < p.dim; i++) centre[i] /= std::max<double>((double)n, 1);
    for (int64_t j = first - e0; j < last - e0; j++)
      for (int64_t i = 0; room.real[j] && i < p.dim; i++) room.x[j * width + i] -= centre[i];
  }
  return runs;
}

// The mean query's scores along the runs of a chunk: mean and squared deviations up to each key.
void run_along(const Moments& p, MomentsRoom& room, RunState& state, int64_t pair, int64_t e0,
               int64_t e1) {
  for (int64_t g = 0; g < room.group; g++) {
    const double* toward = p.toward + (pair * room.group + g) * p.dim;
    auto dot = [&](const double* x) {
      double sum = 0;
      for (int64_t i = 0; i < p.dim; i++) sum += toward[i] * x[i];
      return sum;
    };
    double n = state.n, mean = state.bias_mean[g], m2 = state.bias_m2[g], base = 0;
    for (int64_t j = 0; j < e1 - e0; j++) {
      if (j == 0 || room.run[j] != room.run[j - 1]) base = dot(&room.centre[room.run[j] * room.width]);
      if (p.runs && p.runs[e0 + j] == e0 + j) n = mean = m2 = 0;
      if (room.real[j]) {
        const double gap = dot(&room.x[j * room.width]) + base - mean;
        n += 1;
        mean += gap / n;
        m2 += gap * gap * ((n - 1) / n);
      }
      room.bias[2 * (g * room.chunk + j)] = mean, room.bias[2 * (g * room.chunk + j) + 1] = m2;
    }
    state.bias_mean[g] = mean, state.bias_m2[g] = m2;
  }
}

// Rows at first … first+count−1 (≤ RD) of the order, whose last key is in the chunk.
void moments_strip(const Moments& p, MomentsRoom& room, const RunState& state, int64_t pair,
                   int64_t g, int64_t e0, int64_t first, int64_t count) {
  const int64_t b = pair / p.kv_heads, h = pair % p.kv_heads * room.group + g, width = room.width;
  int64_t lo = room.chunk, hi = 0, row[RD];
  bool before = false, same = true;
  double from[RD], to[RD], n_piece[RD], n_before[RD];
  int64_t run[RD];
  for (int i = 0; i < RD; i++) {
    row[i] = row_at(p, first + std::min<int64_t>(i, count - 1));
    const int64_t start = p.start[row[i]] - e0, stop = p.stop[row[i]] - e0;
    const bool any = start < stop;
    from[i] = (double)std::max<int64_t>(start, 0), to[i] = any ? (double)stop : 0.0;
    n_piece[i] = any ? (double)room.count[stop - 1] : 0.0;
    n_before[i] = any && start < 0 ? state.n : 0.0;
    run[i] = any ? room.run[stop - 1] : 0;
    same &= run[i] == run[0];
    before |= n_before[i] > 0;
    if (any) lo = std::min(lo, (int64_t)from[i]), hi = std::max(hi, stop);
    if (i < count || i == 0) {
      double q[64];
      for (int64_t x0 = 0; x0 < p.dim; x0 += 64) {
        const int64_t some = std::min<int64_t>(64, p.dim - x0);
        copy_row(p.query, address(p.query, b, h, row[i], x0), some, q);
        for (int64_t x = 0; x < some; x++) room.q[(x0 + x) * RD + i] = q[x];
      }
    } else {
      for (int64_t x = 0; x < p.dim; x++) room.q[x * RD + i] = room.q[x * RD + count - 1];
    }
  }
  const double *q = room.q.data(), *keys = room.x.data();
  double* scores = room.scores.data();
  in_fours(hi - lo, [&](auto t, int64_t j) {
    constexpr int T = decltype(t)::value;
    D sum[T][MAX_NV] = {};
    multiply<T, MAX_NV>(sum, keys + (lo + j) * width, width, 1, q, RD, p.dim);
    for (int i = 0; i < T; i++)
      for (int v = 0; v < MAX_NV; v++) store(scores + (lo + j + i) * RD + v * WD, sum[i][v]);
  });
  D mean[MAX_NV] = {}, m2[MAX_NV] = {}, low[MAX_NV], high[MAX_NV];
  for (int v = 0; v < MAX_NV; v++) low[v] = load(from + v * WD), high[v] = load(to + v * WD);
  auto of_keys = [&](auto add) {
    for (int64_t j = lo; j < hi; j++) {
      if (!room.real[j]) continue;
      const D place = splat((double)j);
      for (int v = 0; v < MAX_NV; v++)
        add(v, load(scores + j * RD + v * WD), (L)(place >= low[v]) & (L)(place < high[v]));
    }
  };
  of_keys([&](int v, D s, L there) { mean[v] += (D)((L)s & there); });
  for (int v = 0; v < MAX_NV; v++) {
    const D n = load(n_piece + v * WD);
    mean[v] /= n > splat(1.0) ? n : splat(1.0);
  }
  of_keys([&](int v, D s, L there) {
    const D away = (D)((L)(s - mean[v]) & there);
    m2[v] += away * away;
  });

  // The scores' common part: ⟨q, centre⟩ of the row's run.
  double common[RD] = {}, known[RD] = {}, of_mean[RD] = {}, gap[RD];
  auto dots = [&](const double* with, double* result) {
    D sum[1][MAX_NV] = {};
    multiply<1, MAX_NV>(sum, with, 0, 1, q, RD, p.dim);
    for (int v = 0; v < MAX_NV; v++) store(result + v * WD, sum[0][v]);
  };
  if (same) {
    dots(&room.centre[run[0] * width], common);
  } else {
    for (int i = 0; i < RD; i++)
      for (int64_t x = 0; x < p.dim; x++) common[i] += room.centre[run[i] * width + x] * q[x * RD + i];
  }
  if (before) {
    D sum[MAX_NV] = {};
    in_fours(p.dim, [&](auto t, int64_t a) {
      constexpr int T = decltype(t)::value;
      D y[T][MAX_NV] = {};
      multiply<T, MAX_NV>(y, &state.scatter[a * width + a], width, 1, q + a * RD, RD, p.dim - a);
      for (int i = 0; i < T; i++)
        for (int v = 0; v < MAX_NV; v++) sum[v] += y[i][v] * load(q + (a + i) * RD + v * WD);
    });
    for (int v = 0; v < MAX_NV; v++) store(known + v * WD, sum[v]);
    for (int64_t x = 0; x < p.dim; x++) room.shift[x] = room.centre[x] - state.mean[x];
    dots(state.mean.data(), of_mean);
    dots(room.shift.data(), gap);
  }
  double piece_mean[RD], piece_m2[RD];
  for (int v = 0; v < MAX_NV; v++) store(piece_mean + v * WD, mean[v]), store(piece_m2 + v * WD, m2[v]);
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = (b * p.heads + h) * p.queries + row[i];
    const double n = n_piece[i] + n_before[i];
    if (n == 0) {
      p.mean[at] = p.m2[at] = p.bias_mean[at] = p.bias_m2[at] = 0;
      continue;
    }
    if (n_before[i] > 0) {
      const double away = gap[i] + piece_mean[i], share = n_piece[i] / n;
      p.mean[at] = of_mean[i] + (share > 0 ? away * share : 0.0);
      p.m2[at] = known[i] + piece_m2[i] + (share > 0 ? away * away * (n_before[i] * share) : 0.0);
    } else {
      p.mean[at] = piece_mean[i] + common[i], p.m2[at] = piece_m2[i];
    }
    const double* bias = &room.bias[2 * (g * room.chunk + p.stop[row[i]] - 1 - e0)];
    p.bias_mean[at] = bias[0], p.bias_m2[at] = bias[1];
  }
}

// `state` joined by what a later run state holds; both of one run unless the later is fresh.
void join(RunState& state, const RunState& later, int64_t dim, int64_t width) {
  if (later.fresh || state.n == 0) {
    const bool fresh = state.fresh || later.fresh;
    state = later;
    state.fresh = fresh;
    return;
  }
  if (later.n == 0) return;
  const double n = state.n + later.n, share = later.n / n, weight = state.n * share;
  std::vector<double> gap(dim);
  for (int64_t a = 0; a < dim; a++) gap[a] = later.mean[a] - state.mean[a];
  for (int64_t a = 0; a < dim; a++) {
    double* to = &state.scatter[a * width];
    for (int64_t b = a; b < dim; b++)
      to[b] += later.scatter[a * width + b] + (b > a ? 2 : 1) * weight * gap[a] * gap[b];
    state.mean[a] += gap[a] * share;
  }
  for (size_t g = 0; g < state.bias_mean.size(); g++) {
    const double away = later.bias_mean[g] - state.bias_mean[g];
    state.bias_m2[g] += later.bias_m2[g] + away * away * weight;
    state.bias_mean[g] += away * share;
  }
  state.n = n;
}

// Keys from … to−1 of one kv head; the rows whose last key is among them, unless `states_only`.
void moments_piece(const Moments& p, MomentsRoom& room, RunState& state, int64_t pair, int64_t from,
                   int64_t to, bool states_only) {
  const int64_t width = room.width, chunk = room.chunk;
  int64_t cursor = 0;
  if (!states_only && from > 0) {   // the first row whose last key is not before
    int64_t high = p.queries;
    while (cursor < high) {
      const int64_t middle = (cursor + high) / 2;
      if (p.stop[row_at(p, middle)] <= from) cursor = middle + 1;
      else high = middle;
    }
  }
  for (int64_t e0 = from, e1; e0 < to; e0 = e1) {
    e1 = std::min(e0 + chunk, to);
    const int64_t runs = fetch_keys(p, room, pair, e0, e1);
    const double before = state.n;
    if (p.toward) run_along(p, room, state, pair, e0, e1);
    int64_t last = cursor;
    while (!states_only && last < p.queries && p.stop[row_at(p, last)] <= e1) last++;
    for (int64_t g = 0; g < room.group; g++)
      for (int64_t i = cursor; i < last; i += RD)
        moments_strip(p, room, state, pair, g, e0, i, std::min<int64_t>(RD, last - i));
    cursor = last;
    // The run that goes on after the chunk.
    const int64_t going = p.runs ? p.runs[e1 - 1] : 0;
    const int64_t first = std::max(going, e0) - e0;
    const double n = (double)room.count[e1 - 1 - e0];
    const double* centre = &room.centre[(runs - 1) * width];
    int64_t vectors = e1 - e0 - first;
    if (going >= e0) {
      state.fresh = true;
      state.n = n;
      std::copy_n(centre, width, state.mean.data());
      std::fill(state.scatter.begin(), state.scatter.end(), 0.0);
    } else if (n > 0) {
      // The step from the earlier mean is one more vector of the Gram.
      const double share = n / (before + n), root = std::sqrt(before * share);
      double* step = &room.x[(e1 - e0) * width];
      for (int64_t i = 0; i < width; i++) {
        const double gap = centre[i] - state.mean[i];
        step[i] = gap * root;
        state.mean[i] += gap * share;
      }
      state.n = before + n;
      vectors++;
    }
    if (n == 0) continue;
    for (int64_t at = 0; at < width; at += MAX_NV * WD) {
      const double* x = &room.x[first * width];
      with_vectors((int)std::min<int64_t>((width - at) / WD, MAX_NV), [&](auto nv) {
        add_gram<decltype(nv)::value>(x, width, vectors, p.dim, at, state.scatter.data());
      });
    }
  }
}

void moments(const Moments& p) {
  const int64_t pairs = p.batch * p.kv_heads, chunk = chunk_of(p.dim);
  const int64_t width = (p.dim + WD - 1) / WD * WD, group = p.heads / p.kv_heads;
  const int64_t chunks = (p.keys + chunk - 1) / chunk;
  // Few heads are cut along the keys; each cut but the last then costs its Grams twice.
  int64_t cuts = pairs >= p.threads ? 1 : (2 * p.threads + pairs - 1) / pairs;
  cuts = std::max<int64_t>(std::min(cuts, chunks / 8), 1);
  const int64_t size = (chunks + cuts - 1) / cuts * chunk;
  cuts = (p.keys + size - 1) / size;
  std::vector<RunState> states(pairs * cuts, RunState(p.dim, width, group));
  auto piece = [&](int64_t task, bool states_only) {
    MomentsRoom room(p);
    const int64_t from = task % cuts * size;
    moments_piece(p, room, states[task], task / cuts, from, std::min(from + size, p.keys), states_only);
  };
  if (cuts > 1) {
    for_tasks(p.threads, pairs * cuts, [&](int64_t task) {
      if (task % cuts + 1 < cuts) piece(task, true);
    });
    for (int64_t pair = 0; pair < pairs; pair++) {   // from each piece's own to what is before it
      RunState so_far(p.dim, width, group);
      for (int64_t c = 0; c < cuts; c++) {
        RunState own = std::move(states[pair * cuts + c]);
        states[pair * cuts + c] = so_far;
        if (c + 1 < cuts) join(so_far, own, p.dim, width);
      }
    }
  }
  for_tasks(p.threads, pairs * cuts, [&](int64_t task) { piece(task, false); });
  for (int64_t pair = 0; p.state && pair < pairs; pair++) {
    const RunState& s = states[pair * cuts + cuts - 1];
    double* to = p.state + pair * (1 + p.dim + p.dim * p.dim);
    *to++ = s.n;
    to = std::copy_n(s.mean.data(), p.dim, to);
    for (int64_t a = 0; a < p.dim; a++)
      for (int64_t b = 0; b < p.dim; b++) {
        const double x = s.scatter[std::min(a, b) * width + std::max(a, b)];
        *to++ = a == b ? x : x / 2;
      }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------ what is seen

#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC const char* scaledot_isa() { return ISA; }
PUBLIC int64_t scaledot_problem_size() { return sizeof(Problem); }
PUBLIC void scaledot_use_pool(void* parallel_for) { torch_pool = (ParallelFor)parallel_for; }

PUBLIC int64_t scaledot_supports(const char* variant) {
#if X86
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(variant, "avx2")) return avx2;
  if (!std::strcmp(variant, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return !std::strcmp(variant, "baseline");
}

// The machine's peak: `times` × 12 independent multiply-adds of a vector. Returns the flops done.
PUBLIC int64_t scaledot_peak(int64_t times, float* out) {
  F sum[12], a = splat(0.999f), b = splat(0.001f);
  for (int i = 0; i < 12; i++) sum[i] = splat((float)i);
  for (int64_t t = 0; t < times; t++) {
    PIN(a);
    PIN(b);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum[i] = sum[i] * a + b;
  }
  for (int i = 0; i < 12; i++) store(out + i * W, sum[i]);
  return times * 12 * W * 2;
}

PUBLIC void scaledot_forward(const Problem* p) {
  // Few rows: too few to fill the lanes, or a head's rows too few to share among threads.
  const bool idle = p->queries <= 16 && p->batch * p->heads < p->threads;
  const bool few = p->keys >= 32 && !p->octaves && (p->queries <= 2 || idle);
  if (p->statistics) few ? decode<true>(*p) : forward<true>(*p);
  else few ? decode<false>(*p) : forward<false>(*p);
}
PUBLIC void scaledot_backward(const Problem* p) { backward(*p); }
PUBLIC int64_t scaledot_moments_size() { return sizeof(Moments); }
PUBLIC void scaledot_moments(const Moments* p) { moments(*p); }
