// SPDX-License-Identifier: Apache-2.0
// Start of a row (one sequence of one head): its queries, from device memory to registers.
#pragma once
#include "finish.cuh"
#include "keys.cuh"
#include "layout.cuh"

// What a warp knows about itself.
struct WarpPlace {
  int lane, team, quarter;  // quarter: which 32 keys of a page
  int plain_count;          // a page with so many keys has no logit to limit or hide

  INLINE WarpPlace(const Params& p, int tid)
      : lane(tid & 31), team(tid / 32 / TEAM_WARPS), quarter(tid / 32 % TEAM_WARPS) {
    plain_count = p.window > 0 || p.softcap > 0.f ? PAGE_TOKENS + 1 : PAGE_TOKENS;
  }
  // Which pages this warp asks for, of WARPS in a row.
  INLINE int supply_order() const { return team + (quarter - team & TEAM_WARPS - 1) * TEAMS; }
};

// One thread's share of a row's queries, in the order of the head's entries (map word
// 16 * pair + 4 * t + i belongs to entry 16 * pair + 4 * i + t), and of the turns of the eight
// tiles of a page at position zero. Nothing touches what is loaded before `store`, so that other
// work fits in between; the map is read from device memory because the table is on its way, and
// before anything else.
struct RowStart {
  static constexpr int QUERIES = (COLUMNS * ENTRIES + THREADS - 1) / THREADS;
  static constexpr int TURNS = IS_CONTIGUOUS ? (PAGE_TILES * ENTRIES + THREADS - 1) / THREADS : 0;
  uint32_t a[QUERIES], b[QUERIES];  // as they are stored, bfloat16 or float
  uint32_t turn[TURNS + 1];         // both: first the map's words

  // Places past the end stand for the last one.
  static INLINE int query_place(int k, int tid) {
    return min(tid + k * THREADS, COLUMNS * ENTRIES - 1);
  }
  static INLINE int turn_place(int k, int tid) {
    return min(tid + k * THREADS, PAGE_TILES * ENTRIES - 1);
  }

  INLINE void load_map(const uint8_t* table, int tid) {
    const uint32_t* map = (const uint32_t*)(table + MAP_OFFSET);
#pragma unroll
    for (int k = 0; k < QUERIES; k++) a[k] = __ldg(map + query_place(k, tid) % ENTRIES);
#pragma unroll
    for (int k = 0; k < TURNS; k++) turn[k] = __ldg(map + turn_place(k, tid) % ENTRIES);
  }

  INLINE void load(const Params& p, const Row& row, int tid) {
    const uint64_t first = (uint64_t)row.index * (p.kv_heads * p.group) + row.head * p.group;
#pragma unroll
    for (int k = 0; k < QUERIES; k++) {
      const int x = query_place(k, tid), in_group = row.block * COLUMNS + x / ENTRIES;
      const uint32_t word = a[k];
      const uint64_t at = (first + min(in_group, p.group - 1)) * HEAD_DIM;
      const uint64_t at_a = at + (word >> 8 & 255), at_b = at + (word >> 16 & 255);
      if (p.query_is_bf16) {
        a[k] = __ldg((const uint16_t*)p.query + at_a);
        b[k] = __ldg((const uint16_t*)p.query + at_b);
      } else {
        a[k] = __ldg((const uint32_t*)p.query + at_a);
        b[k] = __ldg((const uint32_t*)p.query + at_b);
      }
    }
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
      const int x = turn_place(k, tid);
      const uint2* turns = (const uint2*)p.turns + x / ENTRIES * PLANES;
      turn[k] = __ldg(&turns[turn[k] & 255].y);
    }
  }

  INLINE void store(const Params& p, const Row& row, int tid) const {
    constexpr uint32_t TO = SHARED_BASE + SCRATCH_OFFSET;
    const int shift = p.query_is_bf16 ? 16 : 0;
#pragma unroll
    for (int k = 0; k < QUERIES; k++) {
      const int x = query_place(k, tid), in_group = row.block * COLUMNS + x / ENTRIES;
      const float scale = in_group < p.group ? p.logit_scale : 0.f;
      const uint32_t to = TO + x / ENTRIES * QUERY_COLUMN_BYTES + x % ENTRIES * 8;
      store_shared2(to, __float_as_uint(__uint_as_float(a[k] << shift) * scale),
                    __float_as_uint(__uint_as_float(b[k] << shift) * scale));
    }
#pragma unroll
    for (int k = 0; k < TURNS; k++)
      store_shared(TO + QUERY_BYTES + turn_place(k, tid) * 4, turn[k]);
  }
};

// This lane's queries. On contiguous pages they are turned to the warp's quarter, so that a page's
// own turn does for all its tiles.
INLINE void take_query(QueryLane& query, const WarpPlace& place) {
  constexpr uint32_t FROM = SHARED_BASE + SCRATCH_OFFSET;
  const int lane = place.lane, t = lane & 3, column = SHARED_COLUMNS ? lane / 4 & 3 : lane / 4;
#pragma unroll
  for (int set = 0; set < QUERY_SETS; set++)
#pragma unroll
    for (int k = 0; k < 4 * STEP_PAIRS; k++) {
      const int entry = k / 4 * 16 + t * 4 + k % 4;
      const uint2 v = load_shared2(FROM + column * QUERY_COLUMN_BYTES + entry * 8);
      float x = __uint_as_float(v.x), y = __uint_as_float(v.y);
      if constexpr (IS_CONTIGUOUS) {
        const int tile = 2 * place.quarter + (SHARED_COLUMNS ? lane / 16 : set);
        const uint32_t turn = load_shared(FROM + QUERY_BYTES + (tile * ENTRIES + entry) * 4);
        const float s = low_half(turn), c = high_half(turn), a = x;
        x = a * c + y * s;
        y = y * c - a * s;
      }
      query.at[set][k] = TURNED_BY_PRODUCT ? pack_half2(y, x) : pack_half2(x, y);
    }
}
