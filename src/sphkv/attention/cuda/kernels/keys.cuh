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
// 64 KB; other slots fill the gaps.
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
    if constexpr (SLOT < SINGLE_SLOTS) {
      points.first[2 * BYTE] = load_shared_at<LOW>(point_address<BYTE>(low, lane * 4));
      points.first[2 * BYTE + 1] = load_shared_at<HIGH>(point_address<BYTE>(high, lane * 4));
    } else {
      const uint2 a = load_shared2_at<LOW>(point_address<BYTE>(low, lane * 8));
      const uint2 b = load_shared2_at<HIGH>(point_address<BYTE>(high, lane * 8));
      points.first[2 * BYTE] = a.x, points.first[2 * BYTE + 1] = b.x;
      points.second[2 * BYTE] = a.y, points.second[2 * BYTE + 1] = b.y;
    }
    look_up<WORD, BYTE + 1>(points, low, high, lane);
  }
}

template <int WORD>
INLINE WordPoints look_up_word(uint32_t codes, int lane) {
  const uint32_t low = codes & 0x0F0F0F0Fu;
  const uint32_t high = SPREAD ? codes & 0xF0F0F0F0u : (codes >> 4) & 0x0F0F0F0Fu;
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

// Where a warp's keys are: the rows of turns for the queries, or the position of each key.
struct KeyPlaces {
  uint32_t turns[TURN_SETS];
  uint32_t position[2][2];  // by tile, of keys g and g + 8
};

// The matrix that turns (x, y) by minus an angle, column by column: (cos, -sin), (sin, cos).
struct TurnColumns {
  uint32_t x, y;
};

// Turns of four entries of this lane, from a row in shared memory.
template <int PAIR>
INLINE void load_turns(TurnColumns (&turn)[4], uint32_t row, int lane) {
  const uint32_t at = row + (PAIR * 16 + (lane & 3) * 4) * 4 * TURN_WORDS;
  const uint4 a = load_shared4(at);
  if constexpr (TURN_WORDS == 2) {
    const uint4 b = load_shared4(at + 16);
    turn[0] = {a.x, a.y}, turn[1] = {a.z, a.w}, turn[2] = {b.x, b.y}, turn[3] = {b.z, b.w};
  } else {
    const uint32_t y[4] = {a.x, a.y, a.z, a.w};
    constexpr uint32_t ONE_MINUS_ONE = 0xBC003C00u;
#pragma unroll
    for (int i = 0; i < 4; i++)
      turn[i] = {mul_half2(__byte_perm(y[i], y[i], 0x1032), ONE_MINUS_ONE), y[i]};
  }
}

// Queries of pairs of steps PAIR ... LAST - 1, turned to the tiles' bases.
template <int PAIR, int LAST>
INLINE void turn_pairs(Turned& turned, const QueryLane& query, const KeyPlaces& places, int lane) {
  if constexpr (PAIR < LAST) {
#pragma unroll
    for (int set = 0; set < TURN_SETS; set++) {
      TurnColumns turn[4];
      if constexpr (!IS_TOKENS) load_turns<PAIR>(turn, places.turns[set], lane);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int u = 0; u < TURNED_SETS; u++) {
          if (TURN_SETS == 2 && u != set) continue;
          const uint32_t from = query.at[u % QUERY_SETS][4 * PAIR + i];
          turned.at[u][4 * PAIR + i] = IS_TOKENS ? from : combine_half2(from, turn[i].x, turn[i].y);
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

// Planes without bits: the same points for every key of a row, whatever the tile.
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

using TileCodes = uint32_t[CODE_STEPS / 2];

// Logits of both tiles from word WORD on; queries of a word are turned just before their use.
template <int WORD>
INLINE void code_words(float (&acc)[2][4], const TileCodes (&codes)[2], Turned& turned,
                       const QueryLane& query, const KeyPlaces& places, int lane) {
  if constexpr (WORD < CODE_STEPS / 2) {
    turn_pairs<WORD, WORD + 1>(turned, query, places, lane);
    multiply_word<0, WORD>(acc[0], look_up_word<WORD>(codes[0][WORD], lane), turned, places, lane);
    multiply_word<1, WORD>(acc[1], look_up_word<WORD>(codes[1][WORD], lane), turned, places, lane);
    code_words<WORD + 1>(acc, codes, turned, query, places, lane);
  }
}

template <int CHUNK = 0>
INLINE void load_codes(TileCodes& codes, uint32_t tile, int lane) {
  using Words = LaneWords<CODE_STEPS / 2>;
  if constexpr (CHUNK < Words::CHUNKS) {
    uint32_t x[4];
    Words::load_chunk<CHUNK>(x, tile, lane);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (4 * CHUNK + i < CODE_STEPS / 2) codes[4 * CHUNK + i] = x[i];
    load_codes<CHUNK + 1>(codes, tile, lane);
  }
}

// Logits without radius of the two tiles at `key_tiles`.
INLINE void tile_logits(float (&acc)[2][4], const QueryLane& query, uint32_t key_tiles,
                        const KeyPlaces& places, int lane) {
  TileCodes codes[2];
  load_codes(codes[0], key_tiles, lane);
  load_codes(codes[1], key_tiles + KEY_TILE_BYTES, lane);
  ConstantPoints constants;
  constants.load(lane);
  Turned turned;
  turn_pairs<CODE_STEPS / 2, STEP_PAIRS>(turned, query, places, lane);
#pragma unroll
  for (int k = 0; k < 4; k++) acc[0][k] = 0.f, acc[1][k] = 0.f;
  constant_steps<0>(acc[0], constants, turned, places, lane);
  constant_steps<1>(acc[1], constants, turned, places, lane);
  code_words<0>(acc, codes, turned, query, places, lane);
}
