// SPDX-License-Identifier: Apache-2.0
// Pages and their turns on the way from device memory to shared memory.
//
// Page n of a block goes to stage n % STAGES and to team n % TEAMS. While a team works on page n, one
// of its warps asks for page n + AHEAD, into the stage of page n - TEAMS, which the team has left.
// The warps of a team do so in turn, because a team is as slow as its slowest warp. At a time those
// of different teams live on different quarters of the multiprocessor.
#pragma once
#include "layout.cuh"

struct Stage {
  uint32_t index;
  uint32_t parity;

  template <int PAGES>
  INLINE void advance() {
    index += PAGES % STAGES;
    parity ^= PAGES / STAGES & 1;
    if (index >= STAGES) index -= STAGES, parity ^= 1;
  }
};

INLINE uint32_t stage_address(uint32_t stage) {
  return SHARED_BASE + RING_OFFSET + stage * STAGE_BYTES;
}
INLINE uint32_t full_barrier(uint32_t stage) {
  return SHARED_BASE + BARRIER_OFFSET + stage * 16;
}
INLINE uint32_t empty_barrier(uint32_t stage) { return full_barrier(stage) + 8; }
INLINE uint32_t table_barrier() { return SHARED_BASE + BARRIER_OFFSET + 16 * MAX_STAGES; }

INLINE void init_barriers() {
  barrier_init(table_barrier(), 1);
  for (int s = 0; s < STAGES; s++) {
    // the page, and every lane's copies of turns
    barrier_init(full_barrier(s), TURN_ROWS ? 1 + 32 : 1);
    barrier_init(empty_barrier(s), TEAM_WARPS);
  }
}

INLINE void request_table(const uint8_t* table) {
  barrier_expect(table_barrier(), TABLE_BYTES);
  copy_bulk(SHARED_BASE, table, TABLE_BYTES, table_barrier());
}

INLINE const uint8_t* page_pointer(const Params& p, int id) {
  return p.pages + (uint64_t)(uint32_t)id * PAGE_BYTES;
}

// Row of the turns of a position, which may lie as far below zero as queries are turned beforehand.
// Rows 16 positions apart are neighbours.
INLINE uint32_t turn_row(const Params& p, int base) {
  const uint32_t position = base + ROWS_BEFORE * TILE_KEYS;
  const uint32_t phase = position % TILE_KEYS >> p.turn_shift;
  return phase * p.turn_rows + min(position / TILE_KEYS, (uint32_t)(p.turn_rows - PAGE_TILES));
}

// A row of turns in shared memory, in map order (16 * pair + 4 * t + i for entry 16 * pair + 4 * i
// + t). Either both words of an entry side by side, copied by one lane; or, where queries are turned
// by a product, 32 words for each pair of steps: lane 8 * t + 4 * half + i copies word `half`, so
// that a lane of the product has its four words side by side.
struct TurnOrder {
  static constexpr int PARTS = TURNED_BY_PRODUCT ? STEP_PAIRS : (ENTRIES + 31) / 32;
  static constexpr int COPY_BYTES = TURNED_BY_PRODUCT || HALF_TURNS ? 4 : 8;
  uint32_t word[PARTS];

  // Where lane's part `k` is in the map.
  static INLINE int place(int k, int lane) {
    if (TURNED_BY_PRODUCT) return 16 * k + lane / 8 * 4 + lane % 4;
    return min(lane + 32 * k, ENTRIES - 1);
  }

  // The map lies in the head's table: in device memory before the table has arrived, then in shared
  // memory.
  INLINE void load_from_device(const uint8_t* table, int lane) {
#pragma unroll
    for (int k = 0; k < PARTS; k++)
      word[k] = __ldg((const uint32_t*)(table + MAP_OFFSET) + place(k, lane));
  }
  INLINE void load(int lane) {
#pragma unroll
    for (int k = 0; k < PARTS; k++)
      word[k] = load_shared(SHARED_BASE + MAP_OFFSET + place(k, lane) * 4);
  }
};

INLINE void request_page(const Params& p, int id, uint32_t stage, int lane) {
  if (lane != 0) return;
  barrier_expect(full_barrier(stage), PAGE_BYTES);
  copy_bulk(stage_address(stage), page_pointer(p, id), PAGE_BYTES, full_barrier(stage));
}

// How far the queries of tile `lane % PAGE_TILES` of a page of runs are turned beforehand.
INLINE int turned_before(int lane) { return IS_TURNED_BEFORE ? TILE_KEYS * (lane % PAGE_TILES) : 0; }

// Which tiles of a page of runs have a row of turns of their own, a bit each: the first one, and those
// that do not follow the tile before them. `base` is that of run `lane % PAGE_TILES`; bits past the
// last tile mean nothing.
INLINE uint32_t own_rows(int base, int lane) {
  return __ballot_sync(ALL_LANES, base - __shfl_up_sync(ALL_LANES, base, 1) != TILE_KEYS);
}

// Row of turns of a tile, among those that the page has.
INLINE int tile_row(uint32_t own, int tile) { return __popc(own & (2u << tile) - 1u) - 1; }

// Copy a row of turns, out of plane order into the head's entry order.
INLINE void copy_turns(const Params& p, const TurnOrder& order, uint32_t row, uint32_t to, int lane) {
  const uint8_t* from = p.turns + (uint64_t)row * TURN_ROW_BYTES;
  if (TURNED_BY_PRODUCT) from += 4 - (lane & 4);
#pragma unroll
  for (int k = 0; k < TurnOrder::PARTS; k++) {
    const int at = (lane + 32 * k) * TurnOrder::COPY_BYTES;
    if (at < TURN_BYTES)
      copy_small<TurnOrder::COPY_BYTES>(to + at, from + (order.word[k] & 255) * TURN_PLANE_BYTES);
  }
}

// Copy the turns of a page's bases. `base` is lane r's own base in a page of runs, the page's in a
// contiguous one.
INLINE void request_turns(const Params& p, const TurnOrder& order, int base, uint32_t stage,
                          int lane) {
  if constexpr (TURN_ROWS > 0) {
    const uint32_t first = turn_row(p, IS_RUNS ? base - turned_before(lane) : base);
    uint32_t to = stage_address(stage) + PAGE_BYTES;
    if constexpr (SHARES_ROWS) {
      uint32_t left = own_rows(base, lane) & (1u << PAGE_TILES) - 1u;
#pragma unroll 1
      for (; left; left &= left - 1u, to += TURN_BYTES)
        copy_turns(p, order, __shfl_sync(ALL_LANES, first, __ffs(left) - 1), to, lane);
    } else {
#pragma unroll 1
      for (int r = 0; r < TURN_ROWS; r++) {
        const uint32_t row = IS_RUNS ? __shfl_sync(ALL_LANES, first, r) : first + r;
        copy_turns(p, order, row, to + r * TURN_BYTES, lane);
      }
    }
    track_copies(full_barrier(stage));
  }
}

// A page's base; in a page of runs that of run `lane`, which only the page itself knows.
INLINE int base_of(const Params& p, int2 entry, int lane) {
  if (!IS_RUNS) return entry.y;
  return __ldg((const int*)(page_pointer(p, entry.x) + POSITION_OFFSET) + lane % PAGE_TILES);
}

// Pages that a warp of a team requests: `next`, `next + WARPS`, ... What the list says of a page is
// read one request ahead, and two if its bases lie in the page, so that no latency is seen.
struct Supply {
  int next;        // place in the list of the page to be requested next
  int end;
  int id, base;    // of that page
  int2 following;  // the warp's page after it, if that is needed early
  Stage stage;     // where the next page goes

  INLINE int2 entry(const Params& p, int at) const { return __ldg(p.page_list + min(at, end - 1)); }

  // A warp's first page: one of those that a block asks for before it begins, or none.
  struct Early {
    int2 page;
    TurnOrder turns;
  };

  // Looks up which pages come first. Nothing is touched before `start`, so that other work fits in
  // between.
  INLINE Early look(const Params& p, const uint8_t* table, int first, int last, int order, int lane) {
    next = first + order + AHEAD, end = last;
    Early early;
    early.page = entry(p, first + order);
    const int2 then = entry(p, next);
    if (IS_RUNS) following = entry(p, next + WARPS);
    early.turns.load_from_device(table, lane);
    id = then.x, base = then.y;
    return early;
  }

  INLINE void start(const Params& p, const Early& early, int first, int order, int lane) {
    if (order < AHEAD && first + order < end) {
      request_page(p, early.page.x, order, lane);
      request_turns(p, early.turns, base_of(p, early.page, lane), order, lane);
    }
    base = base_of(p, {id, base}, lane);
    stage.index = (order + AHEAD) % STAGES, stage.parity = (order + AHEAD) / STAGES & 1;
  }

  // Called once while the warp works on page `page`.
  INLINE void send(const Params& p, int page, int lane) {
    if (page + AHEAD != next || next >= end) return;
    barrier_wait(empty_barrier(stage.index), stage.parity ^ 1);
    request_page(p, id, stage.index, lane);
    TurnOrder turns;
    if (TURN_ROWS > 0) turns.load(lane);
    request_turns(p, turns, base, stage.index, lane);
    next += WARPS;
    stage.advance<WARPS>();
    const int2 then = IS_RUNS ? following : entry(p, next);
    id = then.x, base = base_of(p, then, lane);
    if (IS_RUNS) following = entry(p, next + WARPS);
  }
};

// What a supplier does: ask for all pages of a team, each as soon as its stage is free.
INLINE void supply_team(const Params& p, const uint8_t* table, int first, int end, int team,
                        int lane) {
  TurnOrder turns;
  turns.load_from_device(table, lane);
  Stage stage = {(uint32_t)team, 0u};
  int page = first + team;
  int2 next = __ldg(p.page_list + min(page, end - 1));
  for (; page < end; page += TEAMS) {
    const int2 entry = next;
    next = __ldg(p.page_list + min(page + TEAMS, end - 1));
    const int base = base_of(p, entry, lane);
    barrier_wait(empty_barrier(stage.index), stage.parity ^ 1);
    request_page(p, entry.x, stage.index, lane);
    request_turns(p, turns, base, stage.index, lane);
    stage.advance<TEAMS>();
  }
}
