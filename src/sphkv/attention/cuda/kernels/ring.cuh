// SPDX-License-Identifier: Apache-2.0
// Pages and their turns on the way from device memory to shared memory.
//
// Page n of a block goes to stage n % STAGES and to team n % TEAMS; STAGES is a multiple of TEAMS.
// One warp of the team, its leader, waits until the team has left page n and then asks for page
// n + STAGES in its place. Leaders of different teams live on different quarters of the
// multiprocessor.
#pragma once
#include "layout.cuh"

struct Stage {
  uint32_t index;
  uint32_t parity;

  INLINE void advance(int pages) {
    index += pages;
    if (index >= STAGES) index -= STAGES, parity ^= 1;
  }
};

INLINE uint32_t stage_address(uint32_t stage) {
  return SHARED_BASE + RING_OFFSET + stage * STAGE_BYTES;
}
INLINE uint32_t full_barrier(uint32_t stage) {
  return SHARED_BASE + BARRIER_OFFSET + stage * 16;
}
INLINE uint32_t empty_barrier(uint32_t stage) {
  return full_barrier(stage) + 8;
}
INLINE uint32_t table_barrier() { return SHARED_BASE + BARRIER_OFFSET + 16 * MAX_STAGES; }

INLINE void init_barriers(const Params& p) {
  barrier_init(table_barrier(), 1);
  for (int s = 0; s < STAGES; s++) {
    // the page, and with it the turns of contiguous tiles; those of runs are copied by each lane
    barrier_init(full_barrier(s), p.tile_step ? 1 : 1 + 32);
    barrier_init(empty_barrier(s), TEAM_WARPS);
  }
}

INLINE const uint8_t* page_pointer(const Params& p, int id) {
  return p.pages + (uint64_t)(uint32_t)id * (uint32_t)p.page_bytes;
}

// Base position of a tile as the page stores it; contiguous pages store that of the first tile.
INLINE int stored_base(const Params& p, const uint8_t* page, int tile) {
  return __ldg((const int*)(page + p.position_offset + tile * p.position_stride));
}

// Row of the turns of a position. Rows 16 positions apart are neighbours, so that the tiles of a
// contiguous page are one piece.
INLINE uint32_t turn_row(const Params& p, uint32_t position) {
  const uint32_t phase = position % TILE_KEYS >> p.turn_shift;
  return phase * p.turn_rows + min(position / TILE_KEYS, (uint32_t)(p.turn_rows - PAGE_TILES));
}

// Copy a page, and for each of its tiles the row of turns of the tile's base.
INLINE void request_page(const Params& p, int id, int stored, uint32_t stage, int lane) {
  constexpr int ROW_LANES = TURN_ROW_BYTES / 16, ROWS = 32 / ROW_LANES;
  const uint32_t full = full_barrier(stage);
  const uint32_t to = stage_address(stage);
  const uint32_t offset = turn_row(p, stored) * TURN_ROW_BYTES;
  if (lane == 0) {
    const uint32_t turn_bytes = p.tile_step ? PAGE_TILES * TURN_ROW_BYTES : 0;
    barrier_expect(full, p.page_bytes + turn_bytes);
    copy_bulk(to, page_pointer(p, id), p.page_bytes, full);
    if (p.tile_step) copy_bulk(to + PAGE_CAPACITY, p.turns + offset, turn_bytes, full);
  }
  if (!p.tile_step) {
    // lanes 0-7 know the bases; lanes copy small pieces faster than the copy engine
#pragma unroll 1
    for (int tile = 0; tile < PAGE_TILES; tile += ROWS) {
      const uint32_t row = __shfl_sync(ALL_LANES, offset, tile + lane / ROW_LANES);
      copy_16(to + PAGE_CAPACITY + tile * TURN_ROW_BYTES + lane * 16,
              p.turns + row + lane % ROW_LANES * 16);
    }
    track_copies(full);
  }
}

// Pages that a leader will request. Ids are read two requests ahead, bases one request ahead, so
// that neither latency is seen; nothing may touch a loaded value before its turn.
struct Supply {
  int next;          // place in page_ids of the page to be requested next
  int end;
  int id, stored;    // of that page, see stored_base
  int following_id;  // of the leader's page after it

  INLINE void look_ahead(const Params& p, int lane) {
    if (lane < PAGE_TILES) stored = stored_base(p, page_pointer(p, id), lane);
    if (next + TEAMS < end) following_id = __ldg(p.page_ids + next + TEAMS);
  }

  INLINE void start(const Params& p, int first, int lane) {
    next = first;
    if (next >= end) return;
    id = __ldg(p.page_ids + next);
    look_ahead(p, lane);
  }

  INLINE void send(const Params& p, uint32_t stage, int lane) {
    if (next >= end) return;
    request_page(p, id, stored, stage, lane);
    next += TEAMS;
    if (next >= end) return;
    id = following_id;
    look_ahead(p, lane);
  }
};
