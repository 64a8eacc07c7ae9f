// SPDX-License-Identifier: Apache-2.0
// 128-bit vectors on aarch64 with dot products (Armv8.2 dotprod). Included inside a variant's
// namespace. simd_x86.h has the same functions.

// Query rows kept beside codes and codebook in the first-level cache, 64 KiB on these cores.
constexpr int kRowBytesBudget = 44 * 1024;

// Functions that must be inlined for their registers to stay registers.
#define SPHKV_INLINE __attribute__((always_inline)) inline

// Keeps the compiler from moving x across other pinned values: kernels are written in the order in
// which both vector units stay busy, and the compiler's own order is a third slower.
template <class T>
SPHKV_INLINE T pin(T x) {
  asm volatile("" : "+w"(x));
  return x;
}

using Bytes = uint8x16_t;
using Ints = int32x4_t;

inline Bytes load_bytes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
// Two adjacent vectors by one instruction, at this place among pinned values.
template <int OFFSET>
SPHKV_INLINE void load_pair(const void* p, Bytes& first, Bytes& second) {
  struct Read {
    char bytes[OFFSET + 32];
  };
  asm volatile("ldp %q0, %q1, [%2, %3]"
               : "=w"(first), "=w"(second)
               : "r"(p), "i"(OFFSET), "m"(*static_cast<const Read*>(p)));
}
inline Bytes low_nibbles(Bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes x) { return vshrq_n_u8(x, 4); }
inline Bytes look_up(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }

// Interleaves the lower or upper halves of two vectors by bytes, or by pairs of bytes.
inline Bytes zip_low(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
inline Bytes zip_high(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
inline Bytes zip_pairs_low(Bytes a, Bytes b) {
  return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
inline Bytes zip_pairs_high(Bytes a, Bytes b) {
  return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

// One lane from each of four places.
inline Bytes gather_words(const int8_t* base, const int32_t* place) {
  const auto* words = reinterpret_cast<const uint32_t*>(base);
  uint32x4_t out = vdupq_n_u32(words[place[0]]);
  out = vld1q_lane_u32(words + place[1], out, 1);
  out = vld1q_lane_u32(words + place[2], out, 2);
  out = vld1q_lane_u32(words + place[3], out, 3);
  return vreinterpretq_u8_u32(out);
}

inline Ints zero_ints() { return vdupq_n_s32(0); }

// Signed bytes times signed bytes, four products per lane.
inline Ints dot(Ints sum, Bytes points, Bytes query) {
  return vdotq_s32(sum, vreinterpretq_s8_u8(points), vreinterpretq_s8_u8(query));
}

// The same with one word of the query for all lanes.
template <int WORD>
inline Ints dot_word(Ints sum, Bytes points, Bytes query) {
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(points), vreinterpretq_s8_u8(query), WORD);
}

inline Ints twice(Ints x) { return vaddq_s32(x, x); }

inline void store_scaled(float* out, Ints x, float scale) {
  vst1q_f32(out, vmulq_n_f32(vcvtq_f32_s32(x), scale));
}

inline const Point* entry_points(const HeadCodebook& head, int entry) {
  return head.halves.data() + static_cast<size_t>(entry) * 2 * kSlotLevels;
}

// Phases in the type of points.
inline void finish_phases(int num_planes, Phases& phases) {
  phases.half_cosine.resize(num_planes);
  phases.half_sine.resize(num_planes);
  for (int i = 0; i < num_planes; ++i) {
    phases.half_cosine[i] = static_cast<__fp16>(phases.cosine[i]);
    phases.half_sine[i] = static_cast<__fp16>(phases.sine[i]);
  }
}

// Words (a.x, a.y, b.x, b.y) of eight rows, as bytes; cosines and sines by plane and row. Adding
// 1.5 * 2^10 leaves the rounded integer in the low byte.
constexpr int kTurnLanes = 8;
struct TurnedWords {
  uint16x8_t part[2];
};

inline TurnedWords turn_rows(const Turning& a, const Turning& b, const Point* cosine,
                             const Point* sine, int row) {
  const float16x8_t integer = vdupq_n_f16(static_cast<__fp16>(1536.0f));
  uint8x16_t bytes[2];
  const Turning* const both[2] = {&a, &b};
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
    const auto x = static_cast<__fp16>(both[k]->x), y = static_cast<__fp16>(both[k]->y);
    const float16x8_t c = vld1q_f16(cosine + both[k]->at + row);
    const float16x8_t s = vld1q_f16(sine + both[k]->at + row);
    const float16x8_t turned_x = vfmaq_n_f16(vmulq_n_f16(c, x), s, y);
    const float16x8_t turned_y = vfmsq_n_f16(vmulq_n_f16(c, y), s, x);
    bytes[k] = vtrn1q_u8(vreinterpretq_u8_f16(vaddq_f16(turned_x, integer)),
                         vreinterpretq_u8_f16(vaddq_f16(turned_y, integer)));
  }
  const uint16x8_t first = vreinterpretq_u16_u8(bytes[0]), last = vreinterpretq_u16_u8(bytes[1]);
  return {{vzip1q_u16(first, last), vzip2q_u16(first, last)}};
}

// Turns `count` entries of 16 points (x then y) and rounds each coordinate to a byte. Eleven bits
// are enough for that, and half precision turns eight points at a time. Adding 1.5 * 2^10 leaves
// the rounded integer in the low byte.
inline void rotate_bytes(const Point* points, const int32_t* plane, int count,
                         const Phases& phases, uint8_t* out) {
  const float16x8_t integer = vdupq_n_f16(static_cast<__fp16>(1536.0f));
  const __fp16* cosines = phases.half_cosine.data();
  const __fp16* sines = phases.half_sine.data();
  for (int e = 0; e < count; ++e, points += 2 * kSlotLevels, out += 2 * kSlotLevels) {
    const float16x8_t cosine = vld1q_dup_f16(cosines + plane[e]);
    const float16x8_t sine = vld1q_dup_f16(sines + plane[e]);
    uint8x16_t x8[2], y8[2];
    for (int i = 0; i < 2; ++i) {
      const float16x8_t x = vld1q_f16(points + 8 * i);
      const float16x8_t y = vld1q_f16(points + kSlotLevels + 8 * i);
      const float16x8_t turned_x = vfmsq_f16(vmulq_f16(x, cosine), y, sine);
      const float16x8_t turned_y = vfmaq_f16(vmulq_f16(x, sine), y, cosine);
      x8[i] = vreinterpretq_u8_f16(vaddq_f16(turned_x, integer));
      y8[i] = vreinterpretq_u8_f16(vaddq_f16(turned_y, integer));
    }
    vst1q_u8(out, vuzp1q_u8(x8[0], x8[1]));
    vst1q_u8(out + kSlotLevels, vuzp1q_u8(y8[0], y8[1]));
  }
}

// Turns 16 points (x then y, in units of 1/256 byte) and keeps the lower byte of each
// coordinate. The sum starts at a number so large that the float's low bits are the rounded
// integer: no conversion is needed.
inline void rotate_low_bytes(const float* points, float cosine, float sine, uint8_t* out) {
  constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23
  const float32x4_t start = vdupq_n_f32(kInteger);
  uint16x8_t x16[2], y16[2];
  for (int half = 0; half < 2; ++half) {
    uint16x8_t x32[2], y32[2];
    for (int i = 0; i < 2; ++i) {
      const float32x4_t x = vld1q_f32(points + 8 * half + 4 * i);
      const float32x4_t y = vld1q_f32(points + kSlotLevels + 8 * half + 4 * i);
      const float32x4_t turned_x = vfmsq_n_f32(vfmaq_n_f32(start, x, cosine), y, sine);
      const float32x4_t turned_y = vfmaq_n_f32(vfmaq_n_f32(start, x, sine), y, cosine);
      x32[i] = vreinterpretq_u16_f32(turned_x);
      y32[i] = vreinterpretq_u16_f32(turned_y);
    }
    x16[half] = vuzp1q_u16(x32[0], x32[1]);
    y16[half] = vuzp1q_u16(y32[0], y32[1]);
  }
  const uint8x16_t xa = vreinterpretq_u8_u16(x16[0]), xb = vreinterpretq_u8_u16(x16[1]);
  const uint8x16_t ya = vreinterpretq_u8_u16(y16[0]), yb = vreinterpretq_u8_u16(y16[1]);
  vst1q_u8(out, vuzp1q_u8(xa, xb));
  vst1q_u8(out + 16, vuzp1q_u8(ya, yb));
}

// Value codes: one register holds four tokens of each of kValueDims dimensions.
constexpr int kValueDims = 4;
using Codes = uint8x16_t;
using Sums = int32x4_t;

inline Codes load_codes(const uint8_t* p) { return vld1q_u8(p); }
template <int SHIFT>
inline Codes shift_right(Codes x) {
  if constexpr (SHIFT == 0) return x;
  else return vshrq_n_u8(x, SHIFT);
}
template <int SHIFT>
inline Codes shift_up(Codes x) {
  if constexpr (SHIFT == 0) return x;
  else return vshlq_n_u8(x, SHIFT);
}
inline Codes and_mask(Codes x, int mask) { return vandq_u8(x, vdupq_n_u8(mask)); }
inline Codes select(int mask, Codes yes, Codes no) { return vbslq_u8(vdupq_n_u8(mask), yes, no); }
inline Codes flip_sign(Codes x) { return veorq_u8(x, vdupq_n_u8(128)); }
inline Sums zero_sums() { return vdupq_n_s32(0); }

using Weights = uint8x16_t;
inline Weights load_weights(const uint8_t* p) { return vld1q_u8(p); }

// Adds codes times weights of tokens 4 * LANE .. 4 * LANE + 3 of a group. One part: codes and
// weights are unsigned; two parts: codes are signed and weights at most 127.
template <int PARTS, int LANE>
inline Sums weigh(Sums sum, Codes codes, Weights weights) {
  if constexpr (PARTS == 1) {
    return vreinterpretq_s32_u32(
        vdotq_laneq_u32(vreinterpretq_u32_s32(sum), codes, weights, LANE));
  } else {
    return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(weights), LANE);
  }
}

inline Sums join_parts(Sums high, Sums low) { return vaddq_s32(vshlq_n_s32(high, 7), low); }

// out += scale * (sum - middle)
inline void add_sums(float* out, Sums sum, float scale, float middle) {
  const float32x4_t centred = vsubq_f32(vcvtq_f32_s32(sum), vdupq_n_f32(middle));
  vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), centred, scale));
}
