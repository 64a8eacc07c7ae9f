// SPDX-License-Identifier: Apache-2.0
// Pages and their turns on the way from device memory to shared memory.
//
// Page n of a block goes to stage n % STAGES and to team n % TEAMS. When a team begins page n, its
// leader asks for page n + AHEAD, into the stage of page n - TEAMS, which the team has just left or
// another one left before. Leaders of different teams live on different quarters of the
// multiprocessor.
#pragma once
#include "layout.cuh"

struct Stage {
  uint32_t index;
  uint32_t parity;

  INLINE void advance() {
    index += TEAMS;
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

INLINE const uint8_t* page_pointer(const Params& p, int id) {
  return p.pages + (uint64_t)(uint32_t)id * PAGE_BYTES;
}

// Row of the turns of a position. Rows 16 positions apart are neighbours.
INLINE uint32_t turn_row(const Params& p, uint32_t position) {
  const uint32_t phase = position % TILE_KEYS >> p.turn_shift;
  return phase * p.turn_rows + min(position / TILE_KEYS, (uint32_t)(p.turn_rows - PAGE_TILES));
}

// Words of the entry map for lane's share of a row of turns: entries lane, lane + 32, ... in map
// order, see stage_query.
struct TurnOrder {
  static constexpr int PARTS = (ENTRIES + 31) / 32;
  uint32_t word[PARTS];

  // The map lies in the head's table: in device memory before the table has arrived, then in shared
  // memory.
  INLINE void load_from_device(const uint8_t* table, int lane) {
#pragma unroll
    for (int k = 0; k < PARTS; k++)
      word[k] = __ldg((const uint32_t*)(table + MAP_OFFSET) + min(lane + 32 * k, ENTRIES - 1));
  }
  INLINE void load(int lane) {
#pragma unroll
    for (int k = 0; k < PARTS; k++)
      word[k] = load_shared(SHARED_BASE + MAP_OFFSET + min(lane + 32 * k, ENTRIES - 1) * 4);
  }
};

INLINE void request_page(const Params& p, int id, uint32_t stage, int lane) {
  if (lane != 0) return;
  barrier_expect(full_barrier(stage), PAGE_BYTES);
  copy_bulk(stage_address(stage), page_pointer(p, id), PAGE_BYTES, full_barrier(stage));
}

// Copy the turns of a page's bases, out of plane order into the head's entry order. `base` is lane
// r's own base in a page of runs, the page's in a contiguous one.
INLINE void request_turns(const Params& p, const TurnOrder& order, int base, uint32_t stage,
                          int lane) {
  if constexpr (TURN_ROWS > 0) {
    const uint32_t first = turn_row(p, base), to = stage_address(stage) + PAGE_BYTES;
#pragma unroll 1
    for (int r = 0; r < TURN_ROWS; r++) {
      const uint32_t row = IS_RUNS ? __shfl_sync(ALL_LANES, first, r) : first + r;
      const uint8_t* from = p.turns + (uint64_t)row * TURN_ROW_BYTES + 8 - 4 * TURN_WORDS;
#pragma unroll
      for (int k = 0; k < TurnOrder::PARTS; k++) {
        const int entry = lane + 32 * k;
        if (32 * k + 31 < ENTRIES || entry < ENTRIES)
          copy_small<4 * TURN_WORDS>(to + r * TURN_BYTES + entry * 4 * TURN_WORDS,
                                     from + (order.word[k] & 255) * 8);
      }
    }
    track_copies(full_barrier(stage));
  }
}

// Lane's base position of a page.
INLINE int load_base(const Params& p, int id, int lane) {
  if (TURN_ROWS == 0) return 0;
  const int* bases = (const int*)(page_pointer(p, id) + POSITION_OFFSET);
  return __ldg(bases + (IS_RUNS ? lane % PAGE_TILES : 0));
}

// Pages that a leader requests: `next`, `next + TEAMS`, ... Ids are read two requests ahead, bases
// one request ahead, so that neither latency is seen; nothing may touch a loaded value before its
// turn.
struct Supply {
  int next;          // place in page_ids of the page to be requested next
  int end;
  int id, base;      // of that page
  int following_id;  // of the leader's page after it
  Stage stage;       // where that page goes

  INLINE void look_ahead(const Params& p, int lane) {
    if (next >= end) return;
    base = load_base(p, id, lane);
    if (next + TEAMS < end) following_id = __ldg(p.page_ids + next + TEAMS);
  }

  // Ask for the pages up to `team + AHEAD`, all at once.
  INLINE void start(const Params& p, const uint8_t* table, int first, int last, int team,
                    int lane) {
    constexpr int MOST = (TEAMS - 1 + AHEAD) / TEAMS;
    const int mine = (team + AHEAD) / TEAMS;
    stage.index = (team + AHEAD) % TEAMS, stage.parity = 0;
    next = first + stage.index, end = last;
    int ids[MOST + 2], bases[MOST];
#pragma unroll
    for (int k = 0; k < MOST + 2; k++)
      ids[k] = next + k * TEAMS < end ? __ldg(p.page_ids + next + k * TEAMS) : 0;
    TurnOrder order;
    order.load_from_device(table, lane);
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      if (k >= mine || next + k * TEAMS >= end) continue;
      request_page(p, ids[k], stage.index + k * TEAMS, lane);
      bases[k] = load_base(p, ids[k], lane);
    }
    id = mine == MOST ? ids[MOST] : ids[MOST - 1];
    following_id = mine == MOST ? ids[MOST + 1] : ids[MOST];
    if (next + mine * TEAMS < end) base = load_base(p, id, lane);
#pragma unroll
    for (int k = 0; k < MOST; k++) {
      if (k >= mine) continue;
      if (next < end) request_turns(p, order, bases[k], stage.index, lane);
      next += TEAMS;
      stage.advance();
    }
  }

  INLINE void send(const Params& p, int lane) {
    if (next >= end) return;
    barrier_wait(empty_barrier(stage.index), stage.parity ^ 1);
    request_page(p, id, stage.index, lane);
    TurnOrder order;
    if (TURN_ROWS > 0) order.load(lane);
    request_turns(p, order, base, stage.index, lane);
    next += TEAMS;
    stage.advance();
    id = following_id;
    look_ahead(p, lane);
  }
};
