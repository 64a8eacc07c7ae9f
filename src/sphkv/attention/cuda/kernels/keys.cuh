// SPDX-License-Identifier: Apache-2.0
// Logits of 32 keys from their slots: look up a point per slot, multiply by turned queries.
//
// Keys are the A operand of mma.m16n8k16. Lane (g = lane / 4, t = lane % 4), register r of step s
// holds key g + 8 * (r & 1), entry 8 * s + 4 * (r >> 1) + t: its two halves are the point (x, y).
// The point is already turned by the key's row inside the tile; the tile's base position is
// carried by the query, so no key is ever rotated. Pages with a position per key are the exception:
// there the table is not turned, and every point is, by its key's own position.
#pragma once
#include "lane_words.cuh"
#include "layout.cuh"

// Queries (x, y) of one lane: column g, entries t, t + 4, ...
struct QueryLane {
  uint32_t at[QUERY_SETS][4 * STEP_PAIRS];
};

// Bytes from the table's start to the points of a slot. Low nibbles are addressed by code << 8,
// so two slots of 128 bytes interleave, or one of 256 bytes that holds both points of a pair.
// High nibbles can be used in place, code << 12, which saves their shift and spreads a slot over
// 64 KB; other slots fill the gaps. The second point of a pair follows SLOT_BYTES after the first.
CONSTANT_FUNCTION int low_slot(int slot) {
  return slot < SINGLE_SLOTS ? (slot / 2) * BLOCK_BYTES + (slot % 2) * SLOT_BYTES
                             : (SINGLE_SLOTS / 2 + slot - SINGLE_SLOTS) * BLOCK_BYTES;
}
CONSTANT_FUNCTION int high_slot(int slot) {
  if (!SPREAD) return low_slot(slot);
  return slot * SLOT_BYTES + larger(0, slot - SINGLE_SLOTS) * SLOT_BYTES;
}

// Address of a point without its slot: byte BYTE of the codes above the lane's bank.
template <int BYTE>
INLINE uint32_t point_address(uint32_t codes, uint32_t bank) {
  return __byte_perm(codes, bank, 0x5504 | (BYTE << 4));
}

// Points of one word of codes, steps 2 * WORD and 2 * WORD + 1.
struct WordPoints {
  uint32_t first[8];
  uint32_t second[8];  // of slots that are looked up twice
};

template <int WORD, int BYTE = 0>
INLINE void look_up(WordPoints& points, uint32_t low, uint32_t high, int lane) {
  if constexpr (BYTE < 4) {
    constexpr int SLOT = 4 * WORD + BYTE;
    constexpr int LOW = SHARED_BASE + HIGH_BYTES + low_slot(SLOT);
    constexpr int HIGH = SHARED_BASE + high_slot(SLOT);
    const uint32_t a = point_address<BYTE>(low, lane * 4);
    const uint32_t b = point_address<BYTE>(high, lane * 4);
    points.first[2 * BYTE] = load_shared_at<LOW>(a);
    points.first[2 * BYTE + 1] = load_shared_at<HIGH>(b);
    if constexpr (SLOT >= SINGLE_SLOTS) {
      points.second[2 * BYTE] = load_shared_at<LOW + SLOT_BYTES>(a);
      points.second[2 * BYTE + 1] = load_shared_at<HIGH + SLOT_BYTES>(b);
    }
    look_up<WORD, BYTE + 1>(points, low, high, lane);
  }
}

template <int WORD>
INLINE WordPoints look_up_word(uint32_t codes, int lane) {
  const uint32_t low = codes & 0x0F0F0F0Fu;
  // what is left, by a pipe that is less busy than that of bit operations
  const uint32_t high = SPREAD ? multiply_add(low, -1, codes) : (codes >> 4) & 0x0F0F0F0Fu;
  WordPoints points;
  look_up<WORD>(points, low, high, lane);
  return points;
}

// Turned queries of all steps; only a few are alive at a time. Tiles that share the columns of a
// product share these.
constexpr int TURNED_SETS = SHARED_COLUMNS ? 1 : 2;
struct Turned {
  uint32_t at[TURNED_SETS][4 * STEP_PAIRS];
};

// Where a warp's keys are: this lane's part of the rows of turns, or the position of each key.
struct KeyPlaces {
  uint32_t turns[TURN_SETS];
  uint32_t position[2][2];  // by tile, of keys g and g + 8
};

// Turns of two steps: the matrices (cos, -sin), (sin, cos) of this lane's four entries.
struct PairTurns {
  uint32_t word[8];

  INLINE void load(uint32_t at) {
    const uint4 a = load_shared4(at);
    if constexpr (HALF_TURNS) {
      const uint32_t half[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        word[2 * i] = __byte_perm(half[i], 0, 0x1032) ^ 0x80000000u;
        word[2 * i + 1] = half[i];
      }
      return;
    }
    word[0] = a.x, word[1] = a.y, word[2] = a.z, word[3] = a.w;
    if constexpr (!TURNED_BY_PRODUCT) {
      const uint4 b = load_shared4(at + 16);
      word[4] = b.x, word[5] = b.y, word[6] = b.z, word[7] = b.w;
    }
  }
};

// A lane's part of a row of turns. With eight columns the tensor cores turn the queries: their rows
// are columns of the product to come, and (y, x) of four entries is multiplied by a matrix with
// four blocks of two words on its diagonal. Lane (g, t) has two rows of column g of it, which is not
// zero for g = 2 * t and 2 * t + 1; other lanes read zeros, from banks of their own.
INLINE uint32_t turn_address(uint32_t row, int lane) {
  const int g = lane / 4, t = lane & 3;
  if (!TURNED_BY_PRODUCT) return row + t * (HALF_TURNS ? 16 : 32);
  const uint32_t zeros = SHARED_BASE + ZERO_OFFSET + (g / 2 + 1) % 4 * 32;
  return g / 2 == t ? row + t * 32 + g % 2 * 16 : zeros;
}

// Queries of one step, entries k and k + 1 of the lane, turned by a product. With one set of queries
// the second entry takes the lower half of the rows, so that both operands lie side by side.
INLINE void turn_step(Turned& turned, const QueryLane& query, int set, int k, uint32_t turn0,
                      uint32_t turn1) {
  if constexpr (QUERY_SETS == 2) {
    const uint2 one = mma_half(query.at[0][k], query.at[1][k], turn0);
    const uint2 two = mma_half(query.at[0][k + 1], query.at[1][k + 1], turn1);
    turned.at[0][k] = one.x, turned.at[0][k + 1] = two.x;
    turned.at[1][k] = one.y, turned.at[1][k + 1] = two.y;
  } else {
    turned.at[set][k] = mma_half(query.at[0][k], query.at[0][k + 1], turn0).x;
    turned.at[set][k + 1] = mma_half(query.at[0][k], query.at[0][k + 1], turn1).y;
  }
}

// Queries of pairs of steps PAIR ... LAST - 1, turned to the tiles' bases.
template <int PAIR, int LAST>
INLINE void turn_pairs(Turned& turned, const QueryLane& query, const KeyPlaces& places, int lane) {
  if constexpr (PAIR < LAST) {
#pragma unroll
    for (int set = 0; set < TURN_SETS; set++) {
      PairTurns turns;
      if constexpr (!IS_TOKENS) turns.load(places.turns[set] + PAIR * TURN_PAIR_BYTES);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = 4 * PAIR + i;
        if constexpr (IS_TOKENS) {
#pragma unroll
          for (int u = 0; u < TURNED_SETS; u++) turned.at[u][k] = query.at[0][k];
        } else if constexpr (TURNED_BY_PRODUCT) {
          if (i % 2 == 0) turn_step(turned, query, set, k, turns.word[i], turns.word[i + 1]);
        } else {
          turned.at[0][k] = combine_half2(query.at[0][k], turns.word[2 * i], turns.word[2 * i + 1]);
        }
      }
    }
    turn_pairs<PAIR + 1, LAST>(turned, query, places, lane);
  }
}

// Points of one step turned by their keys' positions. Frequencies are fractions of a turn in
// 32 bits, so that the product with a position wraps around by itself.
template <int STEP>
INLINE void turn_points(uint32_t (&points)[4], const uint32_t (&position)[2], int lane) {
  constexpr int AT = FREQUENCY_OFFSET + (16 * (STEP / 2) + 2 * (STEP % 2)) * 4;
  const uint2 frequency = load_shared2(SHARED_BASE + AT + (lane & 3) * 16);
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const uint32_t phase = position[r & 1] * (r < 2 ? frequency.x : frequency.y);
    const float angle = (float)(int)phase * 1.46291808e-9f;  // 2 pi / 2^32
    const float c = cos_fast(angle), s = sin_fast(angle);
    points[r] = combine_half2(points[r], pack_half2(c, s), pack_half2(-s, c));
  }
}

// One step of tile TILE: acc += points * queries.
template <int STEP, int TILE>
INLINE void key_step(float (&acc)[4], const uint32_t* points, const Turned& turned,
                     const KeyPlaces& places, int lane) {
  uint32_t a[4] = {points[0], points[1], points[2], points[3]};
  if constexpr (IS_TOKENS) turn_points<STEP>(a, places.position[TILE], lane);
  const uint32_t* b = turned.at[TILE % TURNED_SETS] + 2 * STEP;
  mma_f16(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// Planes without bits: the same points for every key of a row, whatever the tile. Four columns have
// registers left to keep them.
constexpr bool KEEPS_CONSTANTS = SHARED_COLUMNS;

struct ConstantPoints {
  uint32_t at[larger(1, CONSTANT_STEPS)][4];

  INLINE void load(int lane) {
#pragma unroll
    for (int s = 0; s < CONSTANT_STEPS; s++) {
      const uint4 v = load_shared4(SHARED_BASE + CONSTANT_OFFSET + s * 4 * SLOT_BYTES + lane * 16);
      at[s][0] = v.x, at[s][1] = v.y, at[s][2] = v.z, at[s][3] = v.w;
    }
  }
};

template <int TILE, int STEP = 0>
INLINE void constant_steps(float (&acc)[4], const ConstantPoints& points, const Turned& turned,
                           const KeyPlaces& places, int lane) {
  if constexpr (STEP < CONSTANT_STEPS) {
    key_step<LOOKUP_STEPS + STEP, TILE>(acc, points.at[STEP], turned, places, lane);
    constant_steps<TILE, STEP + 1>(acc, points, turned, places, lane);
  }
}

template <int TILE, int WORD, int HALF = 0>
INLINE void multiply_word(float (&acc)[4], const WordPoints& points, const Turned& turned,
                          const KeyPlaces& places, int lane) {
  if constexpr (HALF < 2) {
    constexpr int STEP = 2 * WORD + HALF;
    key_step<STEP, TILE>(acc, points.first + 4 * HALF, turned, places, lane);
    if constexpr (STEP >= CODE_STEPS - DOUBLE_STEPS)
      key_step<STEP + DOUBLE_STEPS, TILE>(acc, points.second + 4 * HALF, turned, places, lane);
    multiply_word<TILE, WORD, HALF + 1>(acc, points, turned, places, lane);
  }
}

using TileCodes = uint32_t[CODE_WORDS];

// A product takes longer to turn queries: it is begun one word ahead of their use.
constexpr bool TURNED_EARLY = TURNED_BY_PRODUCT;

// Logits of both tiles from word WORD on; `amid` is called after word SEND_WORD.
template <int WORD, class Amid>
INLINE void code_words(float (&acc)[2][4], const TileCodes (&codes)[2], Turned& turned,
                       const QueryLane& query, const KeyPlaces& places, int lane,
                       const Amid& amid) {
  if constexpr (WORD < CODE_WORDS) {
    if constexpr (TURNED_EARLY) {
      const WordPoints one = look_up_word<WORD>(codes[0][WORD], lane);
      const WordPoints two = look_up_word<WORD>(codes[1][WORD], lane);
      turn_pairs<WORD + 1, smaller(WORD + 2, CODE_WORDS)>(turned, query, places, lane);
      multiply_word<0, WORD>(acc[0], one, turned, places, lane);
      multiply_word<1, WORD>(acc[1], two, turned, places, lane);
    } else {
      turn_pairs<WORD, WORD + 1>(turned, query, places, lane);
      const WordPoints one = look_up_word<WORD>(codes[0][WORD], lane);
      multiply_word<0, WORD>(acc[0], one, turned, places, lane);
      const WordPoints two = look_up_word<WORD>(codes[1][WORD], lane);
      multiply_word<1, WORD>(acc[1], two, turned, places, lane);
    }
    if constexpr (WORD == SEND_WORD) amid();
    code_words<WORD + 1>(acc, codes, turned, query, places, lane, amid);
  }
}

template <int CHUNK = 0>
INLINE void load_codes(TileCodes& codes, uint32_t tile, int lane) {
  using Words = LaneWords<CODE_WORDS>;
  if constexpr (CHUNK < Words::CHUNKS) {
    uint32_t x[4];
    Words::load_chunk<CHUNK>(x, tile, lane);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (4 * CHUNK + i < CODE_WORDS) codes[4 * CHUNK + i] = x[i];
    load_codes<CHUNK + 1>(codes, tile, lane);
  }
}

// Logits without radius of the two tiles at `key_tiles`.
template <class Amid>
INLINE void tile_logits(float (&acc)[2][4], const QueryLane& query, uint32_t key_tiles,
                        const KeyPlaces& places, int lane, ConstantPoints& constants,
                        const Amid& amid) {
  TileCodes codes[2];
  load_codes(codes[0], key_tiles, lane);
  load_codes(codes[1], key_tiles + KEY_TILE_BYTES, lane);
  if constexpr (!KEEPS_CONSTANTS) constants.load(lane);
  Turned turned;
  turn_pairs<CODE_WORDS, STEP_PAIRS>(turned, query, places, lane);
#pragma unroll
  for (int k = 0; k < 4; k++) acc[0][k] = 0.f, acc[1][k] = 0.f;
  if constexpr (TURNED_EARLY) turn_pairs<0, 1>(turned, query, places, lane);
  constant_steps<0>(acc[0], constants, turned, places, lane);
  // with shared columns that is the same product again; to copy it was no faster
  constant_steps<1>(acc[1], constants, turned, places, lane);
  code_words<0>(acc, codes, turned, query, places, lane, amid);
}
