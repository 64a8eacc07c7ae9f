// SPDX-License-Identifier: Apache-2.0
// Values to codes and scale codes: rotate, fit a step per state, snap, pack. The arithmetic is that
// of codec/values.py.
#pragma once
#include "encode_layout.cuh"

constexpr int OWN = HEAD_DIM / 2;  // dimensions of a thread; two threads share a value
constexpr int HALF_LEVELS = 1 << (VALUE_BITS - 1);
constexpr float FLOOR = 8388608.f;  // added with rounding down, it leaves whole numbers

INLINE float reciprocal(float x) { return x > 1.2e-38f ? 1.f / x : 0.f; }
INLINE float both(float x) { return x + __shfl_xor_sync(ALL_LANES, x, 1); }

struct Value {
  float x[OWN];  // rotated, peak 1

  // Returns the peak.
  INLINE float load(const EncodeParams& p, long long state, int half) {
    const uint4* value = (const uint4*)(p.values + state * HEAD_DIM);
    const float sign = half ? -1.f : 1.f;
#pragma unroll
    for (int c = 0; c < OWN / 8; c++) {
      const uint4 a = value[c], b = value[OWN / 8 + c];
      const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        x[8 * c + 2 * w] = fmaf(sign, bfloat(right[w] & 0xffff), bfloat(left[w] & 0xffff));
        x[8 * c + 2 * w + 1] = fmaf(sign, bfloat(right[w] >> 16), bfloat(left[w] >> 16));
      }
    }
#pragma unroll
    for (int k = 1; k < OWN; k *= 2)
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (!(i & k)) {
          const float a = x[i], b = x[i | k];
          x[i] = a + b, x[i | k] = a - b;
        }
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) peak = fmaxf(peak, fabsf(x[i]));
    peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
    const float norm = rsqrtf((float)HEAD_DIM);
    const float inverse = reciprocal(peak * norm) * norm;
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] *= inverse;
    return peak * norm;
  }

  // Magnitude of the nearest centred level. Levels are symmetric, so signs stay out of it.
  INLINE float level(int i, float inverse_step) const {
    const float whole = __fmaf_rd(fabsf(x[i]), inverse_step, FLOOR);
    return fminf(whole, FLOOR + HALF_LEVELS - 1) - (FLOOR - 0.5f);
  }

  // Best step for the levels that `step` selects, and the energy it explains.
  INLINE float least_squares(float step, float& gain) const {
    const float inverse = reciprocal(step);
    float along = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float c = level(i, inverse);
      along = fmaf(fabsf(x[i]), c, along);
      square = fmaf(c, c, square);
    }
    along = both(along);
    const float refined = along / both(square);
    gain = along * refined;
    return refined;
  }

  INLINE float best_step(const EncodeParams& p) const {
    float best = 0.f, most = -1.f, gain;
#pragma unroll 1
    for (int at = 0; at < RATIOS; at++) {
      const float ratio = p.first_ratio + (p.last_ratio - p.first_ratio) * at / (RATIOS - 1);
      const float step = least_squares(ratio / (HALF_LEVELS - 0.5f), gain);
      best = gain > most ? step : best;
      most = fmaxf(gain, most);
    }
#pragma unroll 1
    for (int k = 0; k < REFINEMENTS; k++) best = least_squares(best, gain);
    return best;
  }

  INLINE float error(float step) const {
    const float inverse = reciprocal(step);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float rest = fmaf(level(i, inverse), step, -fabsf(x[i]));
      sum = fmaf(rest, rest, sum);
    }
    return both(sum);
  }

  // Codes of four dimensions.
  INLINE uint32_t codes(int first, float inverse_step) const {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int level_number = (int)(level(first + k, inverse_step) - 0.5f);
      const bool is_negative = x[first + k] < 0.f && inverse_step > 0.f;
      const int code = is_negative ? HALF_LEVELS - 1 - level_number : HALF_LEVELS + level_number;
      word |= (uint32_t)code << (8 * k);
    }
    return word;
  }
};

// One stream of WIDTH bits per value, taken from bit SHIFT of its code: blocks of 32 / WIDTH states,
// a word per dimension, whose byte j holds states j, j + 4, ... of the block.
template <int WIDTH, int SHIFT>
INLINE void write_stream(const uint8_t* code, uint8_t* to, int tid) {
  constexpr int PLACES = 8 / WIDTH;
  for (int w = tid; w < PAGE * WIDTH / 32 * HEAD_DIM; w += THREADS) {
    const uint8_t* from = code + w / HEAD_DIM * 4 * PLACES * VALUE_ROW + w % HEAD_DIM;
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < 4 * PLACES; k++) {
      const uint32_t field = from[k * VALUE_ROW] >> SHIFT & ((1 << WIDTH) - 1);
      word |= field << (8 * (k % 4) + k / 4 * WIDTH);
    }
    ((uint32_t*)to)[w] = word;
  }
}

// Codes, scale codes; returns the range of the steps.
INLINE Affine encode_values(const EncodeParams& p, Memory& m, uint8_t* page, long long row, int count,
                            int tid) {
  const int token = tid / 2, half = tid % 2;
  Value value;
  const float peak = value.load(p, row * PAGE + token, half);
  const float step = value.best_step(p) * peak;
  __syncthreads();
  if (half == 0) m.scalar[token] = step;
  __syncthreads();
  const Affine affine(m, tid < PAGE ? m.scalar[tid] : 0.f, tid < min(count, PAGE), tid);
  const float to_unit = reciprocal(peak), nearest_code = affine.code(step);
  float best = nearest_code, least = __int_as_float(0x7f800000);
#pragma unroll 1
  for (int turn = 0; turn < 3; turn++) {
    const float offset = turn == 0 ? 0.f : turn == 1 ? -1.f : 1.f;
    const float code = fminf(fmaxf(nearest_code + offset, 0.f), 255.f);
    const float error = value.error((affine.low + affine.step * code) * to_unit);
    best = error < least ? code : best;
    least = fminf(error, least);
  }
  const bool is_live = token < count;
  const float inverse = reciprocal((affine.low + affine.step * best) * to_unit);
  uint8_t* codes = (uint8_t*)m.key;
#pragma unroll
  for (int i = 0; i < OWN; i += 4)
    *(uint32_t*)(codes + token * VALUE_ROW + half * OWN + i) = is_live ? value.codes(i, inverse) : 0;
  if (half == 0) page[SCALE_OFFSET + token] = is_live ? (uint8_t)best : 0;
  __syncthreads();
  if constexpr (VALUE_BITS == 3) {
    write_stream<2, 0>(codes, page + VALUE_OFFSET, tid);
    write_stream<1, 2>(codes, page + VALUE_OFFSET + PAGE * HEAD_DIM / 4, tid);
  } else {
    write_stream<VALUE_BITS, 0>(codes, page + VALUE_OFFSET, tid);
  }
  return affine;
}
