// SPDX-License-Identifier: Apache-2.0
// Logits of 32 keys from their slots: look up a point per slot, multiply by turned queries.
//
// Keys are the A operand of mma.m16n8k16. Lane (g = lane / 4, t = lane % 4), register r of step s
// holds key g + 8 * (r & 1), entry 8 * s + 4 * (r >> 1) + t: its two halves are the point (x, y).
// The point is already turned by the key's row inside the tile; the tile's base position is
// carried by the query, so no key is ever rotated.
#pragma once
#include "lane_words.cuh"
#include "layout.cuh"

// Queries of one lane: column g, entries t, t + 4, ... Four registers of each kind serve a pair of
// steps.
struct QueryLane {
  uint32_t along[4 * REGISTER_PAIRS + 1];   // (x, y)
  uint32_t across[4 * REGISTER_PAIRS + 1];  // (y, -x)
  uint32_t rest;  // address of this lane's queries in shared memory
};

// Bytes from the table's start to the 16 points of a slot. Low nibbles are addressed by
// code << 8 | lane << 2, so two slots interleave. High nibbles are used in place, code << 12,
// which saves their shift and spreads a slot over 64 KB; other slots fill the gaps.
CONSTANT_FUNCTION int low_slot(int slot) {
  return HIGH_BYTES + (slot / 2) * 2 * SLOT_BYTES * LEVELS + (slot % 2) * SLOT_BYTES;
}
CONSTANT_FUNCTION int high_slot(int slot) {
  return SPREAD ? slot * SLOT_BYTES
                : (slot / 2) * 2 * SLOT_BYTES * LEVELS + (slot % 2) * SLOT_BYTES;
}

// Address of a point without its slot: byte BYTE of the codes above the lane's bank.
template <int BYTE>
INLINE uint32_t point_address(uint32_t codes, uint32_t bank) {
  return __byte_perm(codes, bank, 0x5504 | (BYTE << 4));
}

// Eight points of a word (steps 2 * WORD and 2 * WORD + 1), and the second look-up of pair slots.
template <int WORD, int BYTE = 0>
INLINE void look_up(uint32_t (&first)[8], uint32_t (&second)[8], uint32_t low, uint32_t high,
                    uint32_t bank) {
  if constexpr (BYTE < 4) {
    constexpr int SLOT = 4 * WORD + BYTE;
    constexpr bool TWICE = 2 * WORD + BYTE / 2 >= CODE_STEPS - DOUBLE_STEPS;
    const uint32_t low_address = point_address<BYTE>(low, bank);
    const uint32_t high_address = point_address<BYTE>(high, bank);
    first[2 * BYTE] = load_shared_at<SHARED_BASE + low_slot(SLOT)>(low_address);
    first[2 * BYTE + 1] = load_shared_at<SHARED_BASE + high_slot(SLOT)>(high_address);
    if constexpr (TWICE) {
      constexpr int PAIR = SLOT + 2 * DOUBLE_STEPS;
      second[2 * BYTE] = load_shared_at<SHARED_BASE + low_slot(PAIR)>(low_address);
      second[2 * BYTE + 1] = load_shared_at<SHARED_BASE + high_slot(PAIR)>(high_address);
    }
    look_up<WORD, BYTE + 1>(first, second, low, high, bank);
  }
}

// Queries turned to a tile's base, for the four registers of one pair of steps.
template <int PAIR>
INLINE void turn_query(uint32_t* turned, const QueryLane& query, uint32_t turns) {
  const uint4 turn = load_shared4(turns + PAIR * 64);
  uint4 x, y;
  if constexpr (PAIR < REGISTER_PAIRS) {
    const uint32_t *along = query.along + 4 * PAIR, *across = query.across + 4 * PAIR;
    x = make_uint4(along[0], along[1], along[2], along[3]);
    y = make_uint4(across[0], across[1], across[2], across[3]);
  } else {
    const uint32_t at = query.rest + (PAIR - REGISTER_PAIRS) * 2 * QUERY_SIDE_BYTES;
    x = load_shared4(at);
    y = load_shared4(at + QUERY_SIDE_BYTES);
  }
  turned[0] = turn_half2(x.x, y.x, turn.x);
  turned[1] = turn_half2(x.y, y.y, turn.y);
  turned[2] = turn_half2(x.z, y.z, turn.z);
  turned[3] = turn_half2(x.w, y.w, turn.w);
}

// Turned queries of all steps; only a few are alive at a time.
struct Turned {
  uint32_t at[4 * STEP_PAIRS];
};

// One step: acc += points * queries.
INLINE void key_step(float (&acc)[4], const uint32_t* points, const uint32_t* turned) {
  mma_f16(acc, points[0], points[1], points[2], points[3], turned[0], turned[1]);
}

// Planes without bits: the same points for every key of a row, whatever the tile.
template <int STEP = 0>
INLINE void constant_steps(float (&acc)[4], const Turned& turned, uint32_t bank) {
  if constexpr (STEP < CONSTANT_STEPS) {
    const uint4 v = load_shared4(SHARED_BASE + CONSTANT_OFFSET + STEP * 4 * SLOT_BYTES + 4 * bank);
    const uint32_t points[4] = {v.x, v.y, v.z, v.w};
    key_step(acc, points, turned.at + 2 * (LOOKUP_STEPS + STEP));
    constant_steps<STEP + 1>(acc, turned, bank);
  }
}

template <int PAIR, int LAST>
INLINE void turn_pairs(Turned& turned, const QueryLane& query, uint32_t turns) {
  if constexpr (PAIR < LAST) {
    turn_query<PAIR>(turned.at + 4 * PAIR, query, turns);
    turn_pairs<PAIR + 1, LAST>(turned, query, turns);
  }
}

// Points of one word of a tile.
struct WordPoints {
  uint32_t first[8];
  uint32_t second[8];  // of slots that are looked up twice
};

template <int WORD>
INLINE WordPoints look_up_word(uint32_t codes, uint32_t bank) {
  const uint32_t low = codes & 0x0F0F0F0Fu;
  const uint32_t high = SPREAD ? codes & 0xF0F0F0F0u : (codes >> 4) & 0x0F0F0F0Fu;
  WordPoints points;
  look_up<WORD>(points.first, points.second, low, high, bank);
  return points;
}

template <int WORD>
INLINE void multiply_word(float (&acc)[4], const WordPoints& points, const Turned& turned) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int step = 2 * WORD + half;
    key_step(acc, points.first + 4 * half, turned.at + 2 * step);
    if (step >= CODE_STEPS - DOUBLE_STEPS)
      key_step(acc, points.second + 4 * half, turned.at + 2 * (step + DOUBLE_STEPS));
  }
}

// Logits of TILES tiles from word WORD on.
template <int WORD, int TILES>
INLINE void code_words(float (&acc)[TILES][4], const uint32_t (&codes)[TILES][CODE_STEPS / 2],
                       Turned& turned, const QueryLane& query, uint32_t turns, uint32_t bank) {
  if constexpr (WORD < CODE_STEPS / 2) {
    turn_pairs<WORD, WORD + 1>(turned, query, turns);
#pragma unroll
    for (int u = 0; u < TILES; u++)
      multiply_word<WORD>(acc[u], look_up_word<WORD>(codes[u][WORD], bank), turned);
    code_words<WORD + 1>(acc, codes, turned, query, turns, bank);
  }
}

template <int CHUNK = 0>
INLINE void load_codes(uint32_t (&codes)[CODE_STEPS / 2], uint32_t tile, int lane) {
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

// Logits without radius of TILES tiles that use one set of turned queries. `turns_ready` is called
// once the first points are on their way and before any turn is read.
template <int TILES, typename Ready>
INLINE void tile_logits(float (&acc)[TILES][4], const QueryLane& query, uint32_t key_tiles,
                        uint32_t turns, uint32_t bank, int lane, Ready turns_ready) {
  uint32_t codes[TILES][CODE_STEPS / 2];
  WordPoints early[TILES];
#pragma unroll
  for (int u = 0; u < TILES; u++) load_codes(codes[u], key_tiles + u * KEY_TILE_BYTES, lane);
#pragma unroll
  for (int u = 0; u < TILES; u++) early[u] = look_up_word<0>(codes[u][0], bank);
  turns_ready();
  Turned turned;
  turn_pairs<CODE_STEPS / 2, STEP_PAIRS>(turned, query, turns);
#pragma unroll
  for (int k = 0; k < 4; k++) acc[0][k] = 0.f;
  constant_steps(acc[0], turned, bank);
#pragma unroll
  for (int u = 1; u < TILES; u++)
#pragma unroll
    for (int k = 0; k < 4; k++) acc[u][k] = acc[0][k];
  turn_pairs<0, 1>(turned, query, turns);
#pragma unroll
  for (int u = 0; u < TILES; u++) multiply_word<0>(acc[u], early[u], turned);
  code_words<1>(acc, codes, turned, query, turns, bank);
}
