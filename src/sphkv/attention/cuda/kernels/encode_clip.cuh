// SPDX-License-Identifier: Apache-2.0
// The clipping ratio that explains most of a value, of all that codec/values.py tries.
//
// A ratio gives a component the level k + 1/2 where k counts the ratio's thresholds at or below it.
// Thresholds of all ratios, sorted, part the unit interval into bins that are the same for every
// value. So each component is put into its bin once, count and sum, and the sums a ratio needs are
// products of its levels with the bins, which tensor cores take byte by byte. Thresholds are
// multiples of 1 / CELLS: a table from cells to bins is exact. A warp works on its 16 states alone.
#pragma once
#include "encode_layout.cuh"

constexpr int RATIOS = SPHKV_RATIOS;
constexpr int CELLS = SPHKV_CELLS;

constexpr int HALF_LEVELS = 1 << (VALUE_BITS - 1);
constexpr bool IS_BINNED = VALUE_BITS < 8;  // of more thresholds the histogram would not fit
constexpr int BINS = IS_BINNED ? (RATIOS * (HALF_LEVELS - 1) + 16) / 16 * 16 : 1;
// Sums of a value stay below 2^24; the bits above count.
constexpr int UNIT = (1 << 24) / HEAD_DIM - 1;
// Words of a bin, one per state. Rows of an odd length put neighbouring bins into different banks, so
// that lanes seldom wait for each other. Of few bins they would meet in the same word: two copies.
constexpr int COPIES = VALUE_BITS == 2 ? 2 : 1;
constexpr int COLUMNS = COPIES == 2 ? 2 * TILE : TILE + 1;

struct ClipMemory {
  uint32_t tally[WARPS][BINS][COLUMNS];
  uint8_t bins[IS_BINNED ? (CELLS + 16) / 16 * 16 : 16];
  uint64_t bins_arrived;
};

// What one ratio, or two, make of a value.
struct Clip {
  float gain, step;

  INLINE void take(const Clip& other) {
    if (other.gain > gain) *this = other;
  }
};

// Starts a copy of the bins to shared memory.
INLINE void fetch_bins(const EncodeParams& p, ClipMemory& m) {
  const uint32_t barrier = shared_address(&m.bins_arrived);
  barrier_init(barrier, 1);
  publish_barriers();
  barrier_expect(barrier, sizeof(m.bins));
  copy_bulk(shared_address(m.bins), p.bins, sizeof(m.bins), barrier);
}

struct Tally {
  uint32_t bins, to;  // addresses

  // Components of a state, magnitudes at most 1, to cells, and cells to bins. The bits of a subnormal
  // number are an integer, so that sums of products with such numbers need no conversion.
  template <int COUNT>
  INLINE void find(const float (&x)[COUNT], uint32_t (&bin)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float cell = __fmaf_rd(fabsf(x[i]), __int_as_float(CELLS), __uint_as_float(bins));
      bin[i] = load_shared_byte(__float_as_uint(cell));
    }
  }

  template <int COUNT>
  INLINE void add(const float (&x)[COUNT], const uint32_t (&bin)[COUNT], int column) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float counted = fmaf(fabsf(x[i]), __int_as_float(2 * UNIT), __int_as_float(1 << 24));
      add_shared(to + 4 * column + bin[i] * (4 * COLUMNS), __float_as_uint(counted));
    }
  }
};

// Bytes of four neighbouring bins of a state: three of the sum and one of the count.
INLINE void load_bins(const uint32_t* tally, int state, uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i] = tally[COLUMNS * i + state];
    if (COPIES == 2) x[i] += tally[COLUMNS * i + state + TILE];
  }
  transpose_bytes(x);
}

// The best ratio of states 2 t and 2 t + 1 of eight that begin at `first`, for all their lanes.
// Weights are those of ratios g and g + 8; row 15 counts every level as one.
INLINE void best_clips(const EncodeParams& p, const uint32_t* tally, int first, int lane,
                       Clip (&best)[2]) {
  int low[4] = {}, middle[4] = {}, high[4] = {}, square[4] = {};
#pragma unroll
  for (int step = 0; step < BINS / 16; step++) {
    const uint4 weight = __ldg(p.weights + 32 * step + lane);
    uint32_t x[4];
    load_bins(tally + (16 * step + lane % 4 * 4) * COLUMNS, first + lane / 4, x);
    mma_bytes(low, weight.x, weight.y, x[0]);
    mma_bytes(middle, weight.x, weight.y, x[1]);
    mma_bytes(high, weight.x, weight.y, x[2]);
    mma_bytes(square, weight.z, weight.w, x[3]);
  }
  float along[4];
#pragma unroll
  for (int k = 0; k < 4; k++) along[k] = (float)(low[k] + (middle[k] << 8) + (high[k] << 16));
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float total = __shfl_sync(ALL_LANES, along[2 + k], 28 + lane % 4);
    best[k] = {-1.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // twice and four times the sums over k + 1/2
      const float twice = fmaf(2.f, along[2 * half + k], total);
      const float four = (float)(HEAD_DIM + 4 * square[2 * half + k]);
      const float ratio = twice * reciprocal_fast(four);
      if (8 * half + lane / 4 < RATIOS) best[k].take({twice * ratio, ratio * (2.f / UNIT)});
    }
#pragma unroll
    for (int other = 4; other < 32; other *= 2)
      best[k].take({__shfl_xor_sync(ALL_LANES, best[k].gain, other),
                    __shfl_xor_sync(ALL_LANES, best[k].step, other)});
  }
}
