// SPDX-License-Identifier: Apache-2.0
// Start of a row (one sequence of one head): its queries, from device memory to registers.
#pragma once
#include "finish.cuh"
#include "keys.cuh"
#include "layout.cuh"

// Whether the compiler must keep the slice, and the lane, in a register: left alone it finds them, and
// what depends on them, anew for every page. Where registers are fewest that is the better choice.
constexpr bool KEEPS_SLICE = !IS_RUNS;
constexpr bool KEEPS_LANE = !IS_RUNS && (SHARED_COLUMNS || HEAD_DIM == 64);

// What a warp knows about itself.
struct WarpPlace {
  int lane, team, slice;  // slice: which 32 keys of a page
  int plain_count;          // a page with so many keys has no logit to limit or hide

  INLINE WarpPlace(const Params& p, int tid)
      : lane(KEEPS_LANE ? unknown(tid & 31) : tid & 31),
        team((uint32_t)tid / 32 / TEAM_WARPS),
        slice(KEEPS_SLICE ? unknown(tid / 32 & TEAM_WARPS - 1) : tid / 32 & TEAM_WARPS - 1) {
    plain_count = p.window > 0 || p.softcap > 0.f ? PAGE_TOKENS + 1 : PAGE_TOKENS;
  }
  // Which pages this warp asks for, of WARPS in a row.
  INLINE int supply_order() const { return team + (slice - team & TEAM_WARPS - 1) * TEAMS; }
};

// One thread's share of a row's queries: pairs of components in the order of the head's entries (map
// word 16 * pair + 4 * t + i belongs to entry 16 * pair + 4 * i + t), with the turns of their plane
// to the tiles of a page at position zero. Nothing touches what is loaded before `store`, so that
// other work fits in between; the map is read from device memory because the table is on its way,
// and before anything else.
struct RowStart {
  static constexpr int PAIRS = COLUMNS * ENTRIES;
  static constexpr int ROUNDS = (PAIRS + THREADS - 1) / THREADS;
  static constexpr int TILES = TURNED * QUERY_SETS;
  uint32_t a[ROUNDS], b[ROUNDS];  // as they are stored, bfloat16 or float; first the map's words
  uint32_t turn[ROUNDS][TILES];

  // Places past the end stand for the last one.
  static INLINE int place(int k, int tid) { return min(tid + k * THREADS, PAIRS - 1); }

  INLINE void load_map(const uint8_t* table, int tid) {
    const uint32_t* map = (const uint32_t*)(table + MAP_OFFSET);
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) a[k] = __ldg(map + place(k, tid) % ENTRIES);
  }

  INLINE void load(const Params& p, const Row& row, int tid) {
    const uint64_t first = (uint64_t)row.index * (p.kv_heads * p.group) + row.head * p.group;
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
      const int in_group = row.block * COLUMNS + place(k, tid) / ENTRIES;
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
      // the second word of a turn, or the only one
      constexpr int WORDS = TURN_PLANE_BYTES / 4;
      const uint32_t* turns = (const uint32_t*)p.turns + (word & 255) * WORDS + WORDS - 1;
#pragma unroll
      for (int j = 0; j < TILES; j++)
        if (IS_TURNED_BEFORE)
          turn[k][j] = __ldg(turns + (ROWS_BEFORE + j * (PAGE_TILES / TILES)) * PLANES * WORDS);
    }
  }

  INLINE void store(const Params& p, const Row& row, int tid) const {
    const int shift = p.query_is_bf16 ? 16 : 0;
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
      const int at = place(k, tid), column = at / ENTRIES;
      const float scale = row.block * COLUMNS + column < p.group ? p.logit_scale : 0.f;
      const float x = __uint_as_float(a[k] << shift) * scale;
      const float y = __uint_as_float(b[k] << shift) * scale;
      const uint32_t to = query_at(0, column) + at % ENTRIES * QUERY_SETS * 4;
#pragma unroll
      for (int j = 0; j < TURNED; j++) {
        uint32_t words[QUERY_SETS];
#pragma unroll
        for (int set = 0; set < QUERY_SETS; set++)
          words[set] = turned(x, y, turn[k][j * QUERY_SETS + set]);
        if constexpr (QUERY_SETS == 2)
          store_shared2(to + j * TURNED_BYTES, words[0], words[1]);
        else
          store_shared(to + j * TURNED_BYTES, words[0]);
      }
    }
  }

  static INLINE uint32_t turned(float x, float y, uint32_t turn) {
    float u = x, v = y;
    if constexpr (IS_TURNED_BEFORE) {
      const float s = low_half(turn), c = high_half(turn);
      u = x * c + y * s;
      v = y * c - x * s;
    }
    return TURNED_BY_PRODUCT ? pack_half2(v, u) : pack_half2(u, v);
  }

  // A column's row.
  static INLINE uint32_t query_at(int turned, int column) {
    return SHARED_BASE + SCRATCH_OFFSET + turned * TURNED_BYTES + column * QUERY_ROW * 4;
  }
};

// This lane's queries, turned to the warp's keys, so that a page's own turn does for all tiles that
// follow each other.
INLINE void take_query(QueryLane& query, const WarpPlace& place) {
  constexpr int WORDS = 4 * STEP_PAIRS * QUERY_SETS;
  const int lane = place.lane, t = lane & 3, column = SHARED_COLUMNS ? lane / 4 & 3 : lane / 4;
  const int turned = place.slice * WARP_ROWS + (SHARED_COLUMNS ? lane / 16 : 0);
  const uint32_t from = RowStart::query_at(IS_TURNED_BEFORE ? turned : 0, column);
#pragma unroll
  for (int w = 0; w < WORDS; w += 4) {
    // four entries of a lane are neighbours; those of the next pair of steps follow all lanes'
    constexpr int RUN = 4 * QUERY_SETS;
    const uint4 words = load_shared4(from + (w / RUN * 4 * RUN + t * RUN + w % RUN) * 4);
    query.at[w % QUERY_SETS][w / QUERY_SETS] = words.x;
    query.at[(w + 1) % QUERY_SETS][(w + 1) / QUERY_SETS] = words.y;
    query.at[(w + 2) % QUERY_SETS][(w + 2) / QUERY_SETS] = words.z;
    query.at[(w + 3) % QUERY_SETS][(w + 3) / QUERY_SETS] = words.w;
  }
}
