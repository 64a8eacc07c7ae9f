// SPDX-License-Identifier: Apache-2.0
// Dense states: pages of the dense tier, the open tail, and bfloat16 values of coded pages.
// Included inside a variant's namespace.

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Dot products of `num_rows` queries with `count` keys: logit[v * kMaxPageTokens + t].
inline void dense_logits(const uint16_t* keys, int count, int dim, const float* query,
                         int num_rows, float scale, float* logit) {
  constexpr int kLanes = 16;
  float key[kLanes];
  for (int t = 0; t < count; ++t) {
    const uint16_t* k = keys + static_cast<size_t>(t) * dim;
    for (int v = 0; v < num_rows; ++v) {
      const float* q = query + static_cast<size_t>(v) * dim;
      float sums[kLanes] = {};
      int i = 0;
      for (; i + kLanes <= dim; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) key[j] = from_bfloat16(k[i + j]);
        for (int j = 0; j < kLanes; ++j) sums[j] += q[i + j] * key[j];
      }
      float sum = 0.0f;
      for (; i < dim; ++i) sum += q[i] * from_bfloat16(k[i]);
      for (int j = 0; j < kLanes; ++j) sum += sums[j];
      logit[v * kMaxPageTokens + t] = scale * sum;
    }
  }
}

// Adds weighted bfloat16 values to `out`; slack is never read.
inline void dense_values(const uint16_t* values, int count, int dim, const float* weight,
                         float* out) {
  for (int t = 0; t < count; ++t) {
    const float w = weight[t];
    if (w == 0.0f) continue;
    const uint16_t* value = values + static_cast<size_t>(t) * dim;
    for (int i = 0; i < dim; ++i) out[i] += w * from_bfloat16(value[i]);
  }
}
