// SPDX-License-Identifier: Apache-2.0
// Radius, soft-cap, mask and online softmax of one page. Included inside a variant's namespace:
// every variant compiles its own copy with its own instruction set.
//
// Vectors are the compiler's own (GCC and Clang); SPHKV_VECTOR_BYTES is the variant's width.

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr int kLanes = SPHKV_VECTOR_BYTES / sizeof(float);
static_assert(kGroupTokens % kLanes == 0, "a group is a whole number of vectors");

typedef float Floats __attribute__((vector_size(SPHKV_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(SPHKV_VECTOR_BYTES)));
typedef int32_t Integers __attribute__((vector_size(SPHKV_VECTOR_BYTES)));

inline Floats load_floats(const float* p) {
  Floats out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
inline void store_floats(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Floats same(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) {
#if defined(__aarch64__)
  return vmaxnmq_f32(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float largest(Floats x) {
#if defined(__aarch64__)
  return vmaxnmvq_f32(x);
#endif
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = std::max(out, x[i]);
  return out;
}
inline float total(Floats x) {
#if defined(__aarch64__)
  return vaddvq_f32(x);
#endif
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out += x[i];
  return out;
}

// exp(x) for x <= 0, within two units in the last place; 0 below the smallest normal float.
inline Floats exp_negative(Floats x) {
  const Floats bounded = larger(x, same(-87.0f));
  const Floats t = bounded * 1.44269504088896341f + 12582912.0f;
  const Floats n = t - 12582912.0f;
  const Floats r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Words bits;
  std::memcpy(&bits, &t, sizeof bits);
  const Words power = (bits - (0x4B400000 - 127)) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < -87.0f ? Floats{} : p * scale;
}

inline float exp_negative(float x) { return exp_negative(same(x))[0]; }

// The same from x * log2(e), to 4e-6: fast kernels keep 14 bits of a weight. Never quite 0.
inline Floats exp2_coarse(Floats x) {
  const Floats bounded = larger(x, same(-126.0f));
  const Floats t = bounded + 12582912.0f;
  const Floats f = bounded - (t - 12582912.0f);
  Floats p = f * 9.6180170e-3f + 5.5504110e-2f;
  p = p * f + 2.4022650e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  Words bits, power;
  std::memcpy(&power, &t, sizeof power);
  std::memcpy(&bits, &p, sizeof bits);
  bits += power << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

inline void scale_floats(float* x, int count, float factor) {
  for (int i = 0; i < count; ++i) x[i] *= factor;
}

// low + step * code of every state; zero for slack up to a whole group.
inline void read_affine(const uint8_t* code, int count, int padded, float low, float step,
                        float* out) {
  for (int t = 0; t < padded; ++t) out[t] = low + step * code[t];
  for (int t = count; t < padded; ++t) out[t] = 0.0f;
}

inline float largest_of(const float* x, int padded) {
  Floats most = load_floats(x);
  for (int t = kLanes; t < padded; t += kLanes) most = larger(most, load_floats(x + t));
  return largest(most);
}

// Multiplies logits by the radius and returns the largest. The loops of a row stand out of line,
// so that their constants stay in registers whatever surrounds them.
__attribute__((noinline)) inline float apply_radius(float* logit, const float* radius,
                                                    int padded) {
  Floats most = same(kMinusInf);
  for (int t = 0; t < padded; t += kLanes) {
    const Floats x = load_floats(logit + t) * load_floats(radius + t);
    store_floats(logit + t, x);
    most = larger(most, x);
  }
  return largest(most);
}

// exp(logit - peak) times the value step, in place; returns the sum without the step.
__attribute__((noinline)) inline float exponentiate(float* logit, const float* step, int padded,
                                                    float peak, float* largest_weight) {
  constexpr float kLog2e = 1.44269504088896341f;
  const Floats top = same(peak * kLog2e);
  constexpr int kWays = kGroupTokens / kLanes;  // independent chains
  Floats sum[kWays] = {}, most[kWays] = {};
  for (int t = 0; t < padded; t += kGroupTokens) {
    for (int i = 0; i < kWays; ++i) {
      const Floats x = load_floats(logit + t + i * kLanes);
      const Floats weight = kIsExact ? exp_negative(x - peak) : exp2_coarse(x * kLog2e - top);
      const Floats folded = weight * load_floats(step + t + i * kLanes);
      store_floats(logit + t + i * kLanes, folded);
      sum[i] += weight;
      most[i] = larger(most[i], folded);
    }
  }
  for (int i = 1; i < kWays; ++i) {
    sum[0] += sum[i];
    most[0] = larger(most[0], most[i]);
  }
  *largest_weight = largest(most[0]);
  return total(sum[0]);
}

// Soft-cap, then minus infinity where the key is hidden, in the future or past the window.
inline void mask_row(float* logit, int count, const int32_t* position, int64_t query_position,
                     const Options& options) {
  if (options.softcap > 0.0f) {
    const float cap = options.softcap;
    for (int t = 0; t < count; ++t) logit[t] = cap * std::tanh(logit[t] / cap);
  }
  const int64_t oldest = options.window > 0 ? query_position - options.window + 1 : INT64_MIN;
  for (int t = 0; t < count; ++t) {
    if (position[t] < oldest || position[t] > query_position) logit[t] = kMinusInf;
  }
}

// Rescales the sums of a row if the peak rises.
inline void raise_peak(Partial& state, int v, int head_dim, float peak) {
  const float old = state.peak[v];
  if (peak <= old) return;
  const float shrink = old == kMinusInf ? 0.0f : exp_negative(old - peak);
  state.mass[v] *= shrink;
  scale_floats(state.rotated + static_cast<size_t>(v) * head_dim, head_dim, shrink);
  scale_floats(state.plain + static_cast<size_t>(v) * head_dim, head_dim, shrink);
  state.peak[v] = peak;
}
