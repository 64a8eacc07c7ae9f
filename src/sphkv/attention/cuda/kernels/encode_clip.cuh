// SPDX-License-Identifier: Apache-2.0
// The clipping ratio that explains most of a value, as codec/clipping.py judges it.
//
// Every component is counted once, in its cell. The sums that a ratio needs are products of its
// weights with the counts, which tensor cores take byte by byte: a row per ratio, a column per state.
// A warp works on its 16 states alone.
#pragma once
#include "encode_layout.cuh"

constexpr int CELLS = SPHKV_CELLS;
constexpr float CELLS_PER_UNIT = CELLS - 0.5f;
constexpr float FLOOR = 8388608.f;  // added with rounding down, it leaves whole numbers
constexpr uint32_t FLOOR_BITS = 0x4b000000;
constexpr int STATES = 4;  // of a lane: 2 * upper + odd
constexpr int HALF_LEVELS = 1 << (VALUE_BITS - 1);
constexpr bool IS_CLIPPED = VALUE_BITS < 8;
static_assert(HEAD_DIM < 256 && STATES == 4, "counts of four states fill a word");

// Counts of the four states of lanes t, a byte each, in column t. Columns lie half the banks apart,
// so that a product reads each word once.
struct ClipMemory {
  static constexpr int COLUMN = CELLS + 16;
  uint32_t counts[IS_CLIPPED ? WARPS : 0][4][COLUMN];
};

INLINE void clear_counts(ClipMemory& m, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < 4; t++) ((uint4*)m.counts[warp][t])[lane] = {0, 0, 0, 0};
  static_assert(CELLS == 4 * 32, "a lane has four cells of a column");
}

// Counts components of a lane's state `s`, magnitudes at most 1. The lowest bits of FLOOR + cell are the
// cell; those of FLOOR are taken off the address.
template <int COUNT>
INLINE void count_cells(uint32_t column, const float (&x)[COUNT], int s) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float cell = __fmaf_rd(fabsf(x[i]), CELLS_PER_UNIT, FLOOR);
    add_shared(column - 4 * FLOOR_BITS + 4 * __float_as_uint(cell), 1u << (8 * s));
  }
}

// What a ratio makes of a value.
struct Clip {
  float gain, step;

  // Part by part: of whole structures the compiler would take addresses.
  static INLINE Clip choose(bool is_first, const Clip& a, const Clip& b) {
    return {is_first ? a.gain : b.gain, is_first ? a.step : b.step};
  }
  INLINE Clip better(const Clip& other) const { return choose(other.gain > gain, other, *this); }
  INLINE Clip of_lane_xor(int k) const {
    return {__shfl_xor_sync(ALL_LANES, gain, k), __shfl_xor_sync(ALL_LANES, step, k)};
  }
};

// The best of a lane's two ratios for each of its columns, out of sums over counts.
struct ClipSums {
  int low[4], high[4], square[4];

  INLINE Clip best(int column) const {
    Clip of_row[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const int k = 2 * row + column;
      const float along = (float)(low[k] + (high[k] << 8));
      const float ratio = along * reciprocal_fast((float)square[k]);
      of_row[row] = {along * ratio, ratio * (1.f / CELLS_PER_UNIT)};
    }
    return of_row[0].better(of_row[1]);
  }
};

// Step of the best ratio, to lane (g, t) that of its state g / 2. Of a product's columns the two of
// lanes t are their states 2 * block and 2 * block + 1.
INLINE float best_clip(const EncodeParams& p, uint32_t counts, int lane) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t from = counts + (g / 2 * ClipMemory::COLUMN + 4 * t) * 4;
  const uint32_t pick = 0x6240 + 0x1111 * (g % 2);  // this column's byte of two words, both blocks
  ClipSums sums[2] = {};
#pragma unroll 1  // the components need the registers
  for (int step = 0; step < CELLS / 32; step++) {
    uint32_t count[2][2];  // [block][half]
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 w = load_shared4(from + (32 * step + 16 * half) * 4);
      const uint32_t a = __byte_perm(w.x, w.y, pick), b = __byte_perm(w.z, w.w, pick);
      count[0][half] = __byte_perm(a, b, 0x5410);
      count[1][half] = __byte_perm(a, b, 0x7632);
    }
    const uint4* weight = p.weights + 3 * 32 * step + lane;
    const uint4 low = __ldg(weight), high = __ldg(weight + 32), square = __ldg(weight + 64);
#pragma unroll
    for (int block = 0; block < 2; block++) {
      const uint2 b = {count[block][0], count[block][1]};
      mma_bytes(sums[block].low, low, b);
      mma_bytes(sums[block].high, high, b);
      mma_bytes(sums[block].square, square, b);
    }
  }
  // lanes hand over what belongs to others, as `collect` does
  const bool is_upper = lane & 16, is_odd = lane & 8;
  Clip mine[2];
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const Clip first = sums[0].best(odd), second = sums[1].best(odd);
    const Clip others = Clip::choose(is_upper, first, second).of_lane_xor(16);
    mine[odd] = Clip::choose(is_upper, second, first).better(others);
  }
  const Clip others = Clip::choose(is_odd, mine[0], mine[1]).of_lane_xor(8);
  const Clip own = Clip::choose(is_odd, mine[1], mine[0]).better(others);
  return own.better(own.of_lane_xor(4)).step;
}
