// SPDX-License-Identifier: Apache-2.0
// Value codes on 512-bit vectors; included in place of the value part of simd_x86.h.
// One register holds four tokens of each of kValueDims dimensions.
constexpr int kValueDims = 16;
using Codes = __m512i;
using Sums = __m512i;

inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Codes and_mask(Codes x, int mask) {
  return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask)));
}
template <int SHIFT>
inline Codes shift_right(Codes x) {
  if constexpr (SHIFT == 0) return x;
  else return and_mask(_mm512_srli_epi16(x, SHIFT), 255 >> SHIFT);
}
template <int SHIFT>
inline Codes shift_up(Codes x) {
  if constexpr (SHIFT == 0) return x;
  else return and_mask(_mm512_slli_epi16(x, SHIFT), 255 << SHIFT & 255);
}
// bits of `yes` where the mask has ones
inline Codes select(int mask, Codes yes, Codes no) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(mask)), yes, no, 0xca);
}
inline Codes flip_sign(Codes x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
inline Sums zero_sums() { return _mm512_setzero_si512(); }

// Weights stay in memory: a broadcast from there needs no shuffle.
using Weights = const uint8_t*;
inline Weights load_weights(const uint8_t* p) { return p; }

// Adds codes times weights of tokens 4 * LANE .. 4 * LANE + 3 of a group; weights have no sign.
template <int PARTS, int LANE>
inline Sums weigh(Sums sum, Codes codes, Weights weights) {
  int32_t word;
  std::memcpy(&word, weights + 4 * LANE, sizeof word);
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(word), codes);
}

inline Sums join_parts(Sums high, Sums low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
}

// out += scale * (sum - middle)
inline void add_sums(float* out, Sums sum, float scale, float middle) {
  const __m512 centred = _mm512_sub_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(middle));
  _mm512_storeu_ps(out, _mm512_fmadd_ps(centred, _mm512_set1_ps(scale), _mm512_loadu_ps(out)));
}
