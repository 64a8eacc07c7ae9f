// SPDX-License-Identifier: Apache-2.0
// Vectors on x86-64 with AVX2 and FMA; dot products by VNNI where SPHKV_HAS_VNNI says so.
// Included inside a variant's namespace, after <immintrin.h>. Mirrors simd_neon.h.

// Query rows kept beside codes and codebook in the first-level cache, 32 or 48 KiB.
constexpr int kRowBytesBudget = 20 * 1024;

#define SPHKV_INLINE __attribute__((always_inline)) inline

// These processors reorder enough by themselves; see simd_neon.h.
template <class T>
SPHKV_INLINE T pin(T x) {
  return x;
}

using Bytes = __m128i;
using Ints = __m128i;

inline Bytes load_bytes(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
template <int OFFSET>
inline void load_pair(const void* p, Bytes& first, Bytes& second) {
  first = load_bytes(static_cast<const uint8_t*>(p) + OFFSET);
  second = load_bytes(static_cast<const uint8_t*>(p) + OFFSET + 16);
}
inline Bytes low_nibbles(Bytes x) { return _mm_and_si128(x, _mm_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm_srli_epi16(x, 4)); }
inline Bytes look_up(Bytes table, Bytes index) { return _mm_shuffle_epi8(table, index); }

// Interleaves the lower or upper halves of two vectors by bytes, or by pairs of bytes.
inline Bytes zip_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
inline Bytes zip_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
inline Bytes zip_pairs_low(Bytes a, Bytes b) { return _mm_unpacklo_epi16(a, b); }
inline Bytes zip_pairs_high(Bytes a, Bytes b) { return _mm_unpackhi_epi16(a, b); }

// One lane from each of four places.
inline Bytes gather_words(const int8_t* base, const int32_t* place) {
  int32_t word[4];
  for (int i = 0; i < 4; ++i) std::memcpy(word + i, base + 4 * place[i], 4);
  return load_bytes(word);
}

inline Ints zero_ints() { return _mm_setzero_si128(); }
inline Ints twice(Ints x) { return _mm_add_epi32(x, x); }

// Signed bytes times signed bytes, four products per lane. The instructions want one factor
// unsigned, so the sign moves over; no sum of two products passes 16 bits.
inline Ints dot(Ints sum, Bytes points, Bytes query) {
  const Bytes size = _mm_abs_epi8(points), moved = _mm_sign_epi8(query, points);
#if SPHKV_HAS_VNNI
  return _mm_dpbusd_epi32(sum, size, moved);
#else
  const __m128i pairs = _mm_maddubs_epi16(size, moved);
  return _mm_add_epi32(sum, _mm_madd_epi16(pairs, _mm_set1_epi16(1)));
#endif
}

// The same with one word of the query for all lanes.
template <int WORD>
inline Ints dot_word(Ints sum, Bytes points, Bytes query) {
  return dot(sum, points, _mm_shuffle_epi32(query, WORD * 0x55));
}

inline void store_scaled(float* out, Ints x, float scale) {
  _mm_storeu_ps(out, _mm_mul_ps(_mm_cvtepi32_ps(x), _mm_set1_ps(scale)));
}

inline const Point* entry_points(const HeadCodebook& head, int entry) {
  return head.scaled.data() + static_cast<size_t>(entry) * 2 * kSlotLevels;
}

inline void finish_phases(int /*num_planes*/, Phases& /*phases*/) {}

// Words (a.x, a.y, b.x, b.y) of some rows, as bytes; cosines and sines by plane and row. Adding
// 1.5 * 2^23 leaves the rounded integer in the low byte.
constexpr int kTurnLanes = kLanes;
using TurnedWords = Words;

inline Words low_bytes(Floats x) {
  x += 12582912.0f;
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 255;
}

inline Words turn_pairs(const Turning& q, const Point* cosine, const Point* sine, int row) {
  const Floats c = load_floats(cosine + q.at + row), s = load_floats(sine + q.at + row);
  return low_bytes(q.x * c + q.y * s) | low_bytes(q.y * c - q.x * s) << 8;
}

inline TurnedWords turn_rows(const Turning& a, const Turning& b, const Point* cosine,
                             const Point* sine, int row) {
  return turn_pairs(a, cosine, sine, row) | turn_pairs(b, cosine, sine, row) << 16;
}

// Sixteen turned coordinates x * a + y * b, rounded to integers in units of 1/256 byte.
inline void turn_points(const float* x, const float* y, float a, float b, __m128i out[4]) {
  for (int i = 0; i < 4; ++i) {
    const __m128 first = _mm_mul_ps(_mm_loadu_ps(x + 4 * i), _mm_set1_ps(a));
    out[i] = _mm_cvtps_epi32(_mm_fmadd_ps(_mm_loadu_ps(y + 4 * i), _mm_set1_ps(b), first));
  }
}

inline void store_bytes(const __m128i words[4], uint8_t* out) {
  const __m128i low = _mm_packs_epi32(words[0], words[1]);
  const __m128i high = _mm_packs_epi32(words[2], words[3]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(low, high));
}

inline void store_upper(__m128i words[4], uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    words[i] = _mm_srai_epi32(_mm_add_epi32(words[i], _mm_set1_epi32(128)), 8);
  }
  store_bytes(words, out);
}

// Turns `count` entries of 16 points (x then y) and rounds each coordinate to a byte.
inline void rotate_bytes(const Point* points, const int32_t* plane, int count,
                         const Phases& phases, uint8_t* out) {
  for (int e = 0; e < count; ++e, points += 2 * kSlotLevels, out += 2 * kSlotLevels) {
    const float c = phases.cosine[plane[e]], s = phases.sine[plane[e]];
    __m128i words[4];
    turn_points(points, points + kSlotLevels, c, -s, words);
    store_upper(words, out);
    turn_points(points, points + kSlotLevels, s, c, words);
    store_upper(words, out + kSlotLevels);
  }
}

// The lower byte of each turned coordinate, signed.
inline void rotate_low_bytes(const float* points, float cosine, float sine, uint8_t* out) {
  __m128i words[4];
  for (int half = 0; half < 2; ++half) {
    turn_points(points, points + kSlotLevels, half ? sine : cosine, half ? cosine : -sine, words);
    for (auto& word : words) word = _mm_srai_epi32(_mm_slli_epi32(word, 24), 24);
    store_bytes(words, out + half * kSlotLevels);
  }
}

#if !SPHKV_WIDE_VALUES
// Value codes: one register holds four tokens of each of kValueDims dimensions.
constexpr int kValueDims = 8;
using Codes = __m256i;
using Sums = __m256i;

inline Codes load_codes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Codes and_mask(Codes x, int mask) {
  return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask)));
}
template <int SHIFT>
inline Codes shift_right(Codes x) {
  return and_mask(_mm256_srli_epi16(x, SHIFT), 255 >> SHIFT);
}
template <int SHIFT>
inline Codes shift_up(Codes x) {
  return and_mask(_mm256_slli_epi16(x, SHIFT), 255 << SHIFT & 255);
}
inline Codes select(int mask, Codes yes, Codes no) {
  return _mm256_or_si256(and_mask(yes, mask), and_mask(no, ~mask & 255));
}
inline Codes flip_sign(Codes x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
inline Sums zero_sums() { return _mm256_setzero_si256(); }

using Weights = __m256i;
inline Weights load_weights(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(load_bytes(p));
}

// Adds codes times weights of tokens 4 * LANE .. 4 * LANE + 3 of a group. One part: codes are at
// most 15; two parts: weights are at most 127. So no sum of two products passes 16 bits.
template <int PARTS, int LANE>
inline Sums weigh(Sums sum, Codes codes, Weights weights) {
  const __m256i lane = _mm256_shuffle_epi32(weights, LANE * 0x55);
#if SPHKV_HAS_VNNI
  return _mm256_dpbusd_epi32(sum, lane, codes);
#else
  const __m256i pairs = _mm256_maddubs_epi16(lane, codes);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

inline Sums join_parts(Sums high, Sums low) {
  return _mm256_add_epi32(_mm256_slli_epi32(high, 7), low);
}

// out += scale * (sum - middle)
inline void add_sums(float* out, Sums sum, float scale, float middle) {
  const __m256 centred = _mm256_sub_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(middle));
  _mm256_storeu_ps(out, _mm256_fmadd_ps(centred, _mm256_set1_ps(scale), _mm256_loadu_ps(out)));
}
#endif
