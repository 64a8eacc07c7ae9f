// SPDX-License-Identifier: Apache-2.0
// Weighted sum of coded values: out[dim][query] += values^T[dim][key] * weights[key][query].
//
// Values are the A operand, 16 dimensions by 16 keys. A code is never converted: its bits, masked
// in place inside a half, are a subnormal number code * 2^(shift - 24), and the power of two is
// taken out once at the end. "Feature" f = 2 * j + h stands for dimensions 16 * j + 8 * h + g.
#pragma once
#include "lane_words.cuh"
#include "layout.cuh"

constexpr int VALUE_TILES = HEAD_DIM / 16;
constexpr int FEATURES = HEAD_DIM / 8;
constexpr int VALUE_WORDS = VALUE_TILE_BYTES / 128;  // per lane and tile of keys

struct Accumulator {
  float o[VALUE_TILES][4];
};

CONSTANT_FUNCTION uint32_t half_mask(int bits, int shift) {
  const uint32_t field = ((1u << bits) - 1u) << shift;
  return field | (field << 16);
}

// ---- 2 and 4 bits: a byte holds features 8 / bits; 8 bits: one ----

// Operands need not be single fields: each takes those below it along, and `feature_sum` takes their
// sums off again at the end.
template <int WORD, int PART = 0>
INLINE void packed_word(Accumulator& acc, uint32_t x, uint32_t w0, uint32_t w1) {
  constexpr int PARTS = 4 / VALUE_BITS;  // pairs of features in a word
  if constexpr (PART < PARTS) {
    constexpr uint32_t FIRST = half_mask((2 * PART + 1) * VALUE_BITS, 0);
    constexpr uint32_t SECOND = half_mask((2 * PART + 2) * VALUE_BITS, 0);
    constexpr bool IS_LAST = PART == PARTS - 1;
    const uint32_t upper = __byte_perm(x, 0, 0x4341);
    // the lower bytes are what is left, by a pipe that is less busy than that of bit operations
    const uint32_t lower = IS_LAST ? multiply_add(upper, -256, x) : x & SECOND;
    mma_f16(acc.o[WORD * PARTS + PART], x & FIRST, lower, upper & FIRST,
            IS_LAST ? upper : upper & SECOND, w0, w1);
    packed_word<WORD, PART + 1>(acc, x, w0, w1);
  }
}

INLINE void byte_words(float (&o)[4], uint32_t x0, uint32_t x1, uint32_t w0, uint32_t w1) {
  constexpr uint32_t BYTE = half_mask(8, 0);
  mma_f16(o, x0 & BYTE, x1 & BYTE, (x0 >> 8) & BYTE, (x1 >> 8) & BYTE, w0, w1);
}

// ---- 3 bits: five fields in the low 15 bits of a half; the 16th bits make up the rest ----

constexpr int SINGLES = 2 * VALUE_WORDS;  // features from here on have one field per word

// Field of feature F, keys 8 * UPPER + 2 * t and the next; y is x >> 9.
template <int F, int UPPER>
INLINE uint32_t three_bits(const uint32_t* x, const uint32_t* y) {
  if constexpr (F < VALUE_WORDS) {
    return (UPPER ? y[F] : x[F]) & half_mask(3, 0);
  } else if constexpr (F < SINGLES) {
    return (UPPER ? y[F - VALUE_WORDS] : x[F - VALUE_WORDS]) & half_mask(3, 3);
  } else {
    constexpr int I = 2 * (F - SINGLES) + UPPER;
    if constexpr (I < VALUE_WORDS) {
      return x[I] & half_mask(3, 6);
    } else {
      constexpr int FROM = 3 * (I - VALUE_WORDS);
      return (y[FROM] & half_mask(1, 6)) | ((x[FROM + 1] >> 8) & half_mask(1, 7)) |
             ((x[FROM + 2] >> 7) & half_mask(1, 8));
    }
  }
}

template <int J = 0>
INLINE void three_bit_tiles(Accumulator& acc, const uint32_t* x, const uint32_t* y, uint32_t w0,
                            uint32_t w1) {
  if constexpr (J < VALUE_TILES) {
    mma_f16(acc.o[J], three_bits<2 * J, 0>(x, y), three_bits<2 * J + 1, 0>(x, y),
            three_bits<2 * J, 1>(x, y), three_bits<2 * J + 1, 1>(x, y), w0, w1);
    three_bit_tiles<J + 1>(acc, x, y, w0, w1);
  }
}

// ---- one tile of 16 keys ----

template <int CHUNK>
INLINE void value_chunk(Accumulator& acc, const uint32_t (&x)[4], uint32_t w0, uint32_t w1) {
  constexpr int FIRST = 4 * CHUNK;
  if constexpr (VALUE_BITS == 2 || VALUE_BITS == 4) {
    packed_word<FIRST>(acc, x[0], w0, w1);
    if constexpr (FIRST + 1 < VALUE_WORDS) packed_word<FIRST + 1>(acc, x[1], w0, w1);
    if constexpr (FIRST + 2 < VALUE_WORDS) packed_word<FIRST + 2>(acc, x[2], w0, w1);
    if constexpr (FIRST + 3 < VALUE_WORDS) packed_word<FIRST + 3>(acc, x[3], w0, w1);
  } else if constexpr (VALUE_BITS == 8) {
    byte_words(acc.o[FIRST / 2], x[0], x[1], w0, w1);
    byte_words(acc.o[FIRST / 2 + 1], x[2], x[3], w0, w1);
  } else {
    mma_bf16(acc.o[FIRST / 4], x[0], x[1], x[2], x[3], w0, w1);
  }
}

template <int CHUNK = 0>
INLINE void value_chunks(Accumulator& acc, uint32_t tile, uint32_t w0, uint32_t w1, int lane) {
  using Words = LaneWords<VALUE_WORDS>;
  if constexpr (CHUNK < Words::CHUNKS) {
    uint32_t x[4];
    Words::load_chunk<CHUNK>(x, tile, lane);
    value_chunk<CHUNK>(acc, x, w0, w1);
    value_chunks<CHUNK + 1>(acc, tile, w0, w1, lane);
  }
}

template <int CHUNK = 0>
INLINE void load_all(uint32_t (&all)[VALUE_WORDS], uint32_t tile, int lane) {
  using Words = LaneWords<VALUE_WORDS>;
  if constexpr (CHUNK < Words::CHUNKS) {
    uint32_t x[4];
    Words::load_chunk<CHUNK>(x, tile, lane);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (4 * CHUNK + i < VALUE_WORDS) all[4 * CHUNK + i] = x[i];
    load_all<CHUNK + 1>(all, tile, lane);
  }
}

// Adds the 16 keys at `tile`; w0 and w1 are weights of keys 2t, 2t + 1 and 8 more, column g.
INLINE void add_values(Accumulator& acc, uint32_t tile, uint32_t w0, uint32_t w1, int lane) {
  if constexpr (VALUE_BITS == 3) {
    uint32_t x[VALUE_WORDS], y[VALUE_WORDS];
    load_all(x, tile, lane);
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i++) y[i] = x[i] >> 9;
    three_bit_tiles(acc, x, y, w0, w1);
  } else {
    value_chunks(acc, tile, w0, w1, lane);
  }
}

// What one unit of a feature's field is worth in the accumulator.
CONSTANT_FUNCTION float feature_unit(int feature) {
  if (VALUE_BITS == 16) return 1.f;
  const int per_byte = larger(8 / VALUE_BITS, 1);
  const int shift = VALUE_BITS == 3 ? (feature < VALUE_WORDS ? 0 : feature < SINGLES ? 3 : 6)
                                    : feature % per_byte * VALUE_BITS;
  return 16777216.f / (float)(1 << shift);
}

constexpr float MIDPOINT = HAS_SCALES ? (float)((1 << VALUE_BITS) - 1) / 2.f : 0.f;

// Sum of a feature's field, column c.
INLINE float feature_sum(const Accumulator& acc, int feature, int c) {
  const int below = feature - 1;
  const float sum = acc.o[feature / 2][feature % 2 * 2 + c];
  const bool is_alone = VALUE_BITS == 3 || VALUE_BITS >= 8 || feature % (8 / VALUE_BITS) == 0;
  return is_alone ? sum : sum - acc.o[below / 2][below % 2 * 2 + c];
}
