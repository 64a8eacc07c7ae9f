// SPDX-License-Identifier: Apache-2.0
// Dense states: pages of the dense tier, the open tail, and bfloat16 values of coded pages.
// Included inside a variant's namespace, after softmax.h. Rows are taken in blocks, so that a state
// is widened once for all of them.

constexpr int kDenseRows = 4;
constexpr int kDenseTokens = 4;   // keys whose sums stay in registers
constexpr int kDenseVectors = 4;  // of a value

typedef uint16_t Halves __attribute__((vector_size(SPHKV_VECTOR_BYTES / 2)));

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline Floats load_bfloat16(const uint16_t* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words) << 16;
  Floats out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Dot products of NV queries with TOKENS keys: logit[v * kMaxPageTokens + t].
template <int NV, int TOKENS>
inline void dense_dots(const uint16_t* keys, int dim, const float* query, float scale,
                       float* logit) {
  Floats sum[NV][TOKENS] = {};
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    Floats key[TOKENS];
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) key[t] = load_bfloat16(keys + t * dim + i);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const Floats q = load_floats(query + v * dim + i);
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) sum[v][t] += q * key[t];
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
      float whole = total(sum[v][t]);
      for (int j = i; j < dim; ++j) whole += query[v * dim + j] * from_bfloat16(keys[t * dim + j]);
      logit[v * kMaxPageTokens + t] = scale * whole;
    }
  }
}

template <int NV>
void dense_logit_rows(const uint16_t* keys, int count, int dim, const float* query, float scale,
                      float* logit) {
  int t = 0;
  for (; t + kDenseTokens <= count; t += kDenseTokens) {
    dense_dots<NV, kDenseTokens>(keys + static_cast<size_t>(t) * dim, dim, query, scale,
                                 logit + t);
  }
  for (; t < count; ++t) {
    dense_dots<NV, 1>(keys + static_cast<size_t>(t) * dim, dim, query, scale, logit + t);
  }
}

inline void dense_logits(const uint16_t* keys, int count, int dim, const float* query,
                         int num_rows, float scale, float* logit) {
  for (int v = 0; v < num_rows; v += kDenseRows) {
    const float* q = query + static_cast<size_t>(v) * dim;
    float* out = logit + static_cast<size_t>(v) * kMaxPageTokens;
    switch (num_rows - v) {
      case 1: dense_logit_rows<1>(keys, count, dim, q, scale, out); break;
      case 2: dense_logit_rows<2>(keys, count, dim, q, scale, out); break;
      case 3: dense_logit_rows<3>(keys, count, dim, q, scale, out); break;
      default: dense_logit_rows<4>(keys, count, dim, q, scale, out); break;
    }
  }
}

// Adds weighted values of VECTORS vectors of dimensions to NV rows of `out`.
template <int NV, int VECTORS>
inline void dense_sums(const uint16_t* values, int count, int dim, const float* weight,
                       float* out) {
  Floats sum[NV][VECTORS] = {};
  for (int t = 0; t < count; ++t, values += dim) {
#pragma GCC unroll 4
    for (int k = 0; k < VECTORS; ++k) {
      const Floats value = load_bfloat16(values + k * kLanes);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[v][k] += weight[v * kMaxPageTokens + t] * value;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
    for (int k = 0; k < VECTORS; ++k) {
      float* at = out + v * dim + k * kLanes;
      store_floats(at, load_floats(at) + sum[v][k]);
    }
  }
}

template <int NV>
void dense_value_rows(const uint16_t* values, int count, int dim, const float* weight,
                      float* out) {
  int i = 0;
  for (; i + kDenseVectors * kLanes <= dim; i += kDenseVectors * kLanes) {
    dense_sums<NV, kDenseVectors>(values + i, count, dim, weight, out + i);
  }
  for (; i + kLanes <= dim; i += kLanes) {
    dense_sums<NV, 1>(values + i, count, dim, weight, out + i);
  }
  for (; i < dim; ++i) {
    for (int v = 0; v < NV; ++v) {
      for (int t = 0; t < count; ++t) {
        const float value = from_bfloat16(values[static_cast<size_t>(t) * dim + i]);
        out[v * dim + i] += weight[v * kMaxPageTokens + t] * value;
      }
    }
  }
}

// Adds weighted bfloat16 values to every row of `out`; slack is never read.
inline void dense_values(const uint16_t* values, int count, int dim, const float* weight,
                         int num_rows, float* out) {
  for (int v = 0; v < num_rows; v += kDenseRows) {
    const float* w = weight + static_cast<size_t>(v) * kMaxPageTokens;
    float* to = out + static_cast<size_t>(v) * dim;
    switch (num_rows - v) {
      case 1: dense_value_rows<1>(values, count, dim, w, to); break;
      case 2: dense_value_rows<2>(values, count, dim, w, to); break;
      case 3: dense_value_rows<3>(values, count, dim, w, to); break;
      default: dense_value_rows<4>(values, count, dim, w, to); break;
    }
  }
}
