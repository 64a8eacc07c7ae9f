// SPDX-License-Identifier: Apache-2.0
// Decode attention over coded pages: one thread block per multiprocessor, each bound to a KV head.
// docs/gpu.md explains the design and draws the layouts.
#include "finish.cuh"
#include "keys.cuh"
#include "layout.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "values.cuh"

// What a warp knows about itself.
struct WarpPlace {
  int lane, warp, team, quarter;  // quarter: which 32 keys of a page

  INLINE explicit WarpPlace(int tid)
      : lane(tid & 31), warp(tid / 32), team(tid / 32 / TEAM_WARPS), quarter(tid / 32 % TEAM_WARPS) {}
  INLINE bool is_leader() const { return quarter == team % TEAM_WARPS; }
};

INLINE float query_element(const Params& p, uint64_t at) {
  if (!p.query_is_bf16) return ((const float*)p.query)[at];
  return __uint_as_float((uint32_t)((const uint16_t*)p.query)[at] << 16);
}

// This lane's query planes for one pair of steps, in the order of the head's entries.
INLINE void gather_query(uint4& along, uint4& across, const Params& p, const Row& row, int pair,
                         int lane) {
  const int column = SHARED_COLUMNS ? lane / 4 & 3 : lane / 4;
  const int in_group = row.block * COLUMNS + column;
  const uint64_t head =
      (uint64_t)row.index * (p.kv_heads * p.group) + row.head * p.group + in_group;
  const uint4 v = load_shared4(SHARED_BASE + MAP_OFFSET + pair * 64 + (lane & 3) * 16);
  const uint32_t map[4] = {v.x, v.y, v.z, v.w};
  uint32_t x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float a = 0.f, b = 0.f;
    if (in_group < p.group) {
      a = query_element(p, head * HEAD_DIM + (map[i] >> 8 & 255)) * p.logit_scale;
      b = query_element(p, head * HEAD_DIM + (map[i] >> 16 & 255)) * p.logit_scale;
    }
    x[i] = pack_half2(a, b);
    y[i] = pack_half2(b, -a);
  }
  along = make_uint4(x[0], x[1], x[2], x[3]);
  across = make_uint4(y[0], y[1], y[2], y[3]);
}

// The first row's queries set out for the cache while the table is on its way.
INLINE void prefetch_query(const Params& p, const Row& row, int tid) {
  const int bytes = HEAD_DIM * (p.query_is_bf16 ? 2 : 4), line = 128;
  const uint64_t first = (uint64_t)row.index * (p.kv_heads * p.group) + row.head * p.group;
  if (tid * line < p.group * bytes)
    prefetch_global((const uint8_t*)p.query + first * bytes + tid * line);
}

INLINE void load_query(QueryLane& query, const Params& p, const Row& row, const WarpPlace& place) {
  const int lane = place.lane, column = SHARED_COLUMNS ? lane / 4 & 3 : lane / 4;
  query.rest = SHARED_BASE + QUERY_OFFSET + column * 64 + (lane & 3) * 16;
  uint4 x, y;
#pragma unroll
  for (int pair = 0; pair < REGISTER_PAIRS; pair++) {
    gather_query(x, y, p, row, pair, lane);
    uint32_t *along = query.along + 4 * pair, *across = query.across + 4 * pair;
    along[0] = x.x, along[1] = x.y, along[2] = x.z, along[3] = x.w;
    across[0] = y.x, across[1] = y.y, across[2] = y.z, across[3] = y.w;
  }
  if constexpr (REGISTER_PAIRS < STEP_PAIRS) {
    for (int pair = REGISTER_PAIRS + place.warp; pair < STEP_PAIRS; pair += WARPS) {
      gather_query(x, y, p, row, pair, lane);
      const uint32_t at = query.rest + (pair - REGISTER_PAIRS) * 2 * QUERY_SIDE_BYTES;
      store_shared4(at, x);
      store_shared4(at + QUERY_SIDE_BYTES, y);
    }
    __syncthreads();
  }
}

// Where this lane's share of a row of turns comes from: byte offsets of the planes of entries lane,
// lane + 32, ...
struct TurnOrder {
  static constexpr int PARTS = (ENTRIES + 31) / 32;
  uint32_t offset[PARTS];

  INLINE void load(int lane) {
#pragma unroll
    for (int k = 0; k < PARTS; k++) {
      const int entry = min(lane + 32 * k, ENTRIES - 1);
      offset[k] = (load_shared(SHARED_BASE + MAP_OFFSET + entry * 4) & 255) * 4;
    }
  }

  // The turns of this warp's two tiles, out of plane order ...
  INLINE void fetch(uint32_t (&turn)[2 * PARTS], uint32_t rows) const {
#pragma unroll
    for (int k = 0; k < 2 * PARTS; k++)
      turn[k] = load_shared(rows + k % 2 * TURN_ROW_BYTES + offset[k / 2]);
  }

  // ... and into the head's entry order.
  static INLINE void store(const uint32_t (&turn)[2 * PARTS], uint32_t to, int lane) {
#pragma unroll
    for (int k = 0; k < 2 * PARTS; k++) {
      const int entry = lane + 32 * (k / 2);
      if (32 * (k / 2) + 31 < ENTRIES || entry < ENTRIES)
        store_shared(to + (k % 2 * ENTRIES + entry) * 4, turn[k]);
    }
    __syncwarp();
  }
};

// Radius and scale codes of keys g and g + 8 of one tile.
struct Gains {
  float radius[2], scale[2];
};

INLINE Gains load_gains(uint32_t page, int tile, int g) {
  const uint4 header = load_shared4(page), affine = load_shared4(page + 16);
  const float radius_low = __uint_as_float(header.w), radius_step = __uint_as_float(affine.x);
  Gains gains;
  if (HAS_SCALES) {
    const uint32_t codes = load_shared(page + GAIN_OFFSET + tile * GAIN_TILE_BYTES + g * 4);
    const float scale_low = __uint_as_float(affine.y), scale_step = __uint_as_float(affine.z);
    gains.radius[0] = radius_low + radius_step * (float)(codes & 255);
    gains.radius[1] = radius_low + radius_step * (float)(codes >> 8 & 255);
    gains.scale[0] = scale_low + scale_step * (float)(codes >> 16 & 255);
    gains.scale[1] = scale_low + scale_step * (float)(codes >> 24);
  } else {
    // two bytes per lane: take the word and pick its half
    const uint32_t at = page + GAIN_OFFSET + tile * GAIN_TILE_BYTES + g * 2;
    const uint32_t codes = load_shared(at & ~3u) >> (8 * (at & 2));
    gains.radius[0] = radius_low + radius_step * (float)(codes & 255);
    gains.radius[1] = radius_low + radius_step * (float)(codes >> 8 & 255);
    gains.scale[0] = gains.scale[1] = 1.f;
  }
  return gains;
}

// Soft-cap, and minus infinity for keys past the page's count or outside the window.
INLINE void limit_logits(const Params& p, int row, uint32_t page, int tile, int g,
                         float (&logit)[4]) {
  const int last = p.window > 0 ? __ldg(p.query_positions + row) : 0x7fffffff;
  const int first = p.window > 0 ? last - p.window + 1 : -0x7fffffff;
  const int count = load_shared(page + 4) & 0xffff;
  const int base = (int)load_shared(page + p.position_offset + tile * p.position_stride) +
                   tile * p.tile_step;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int key = g + 8 * (k / 2), position = base + key;
    if (p.softcap > 0.f) logit[k] = soft_cap(logit[k], p.softcap);
    const bool is_hidden = tile * TILE_KEYS + key >= count || position < first || position > last;
    if (is_hidden) logit[k] = MINUS_INFINITY;
  }
}

// Products of slots and queries of this warp's two tiles, without radius.
INLINE void warp_logits(float (&dots)[2][4], const QueryLane& query, const TurnOrder& order,
                        uint32_t page, const WarpPlace& place) {
  const int lane = place.lane;
  const uint32_t keys = page + KEY_OFFSET + 2 * place.quarter * KEY_TILE_BYTES;
  const uint32_t ordered = SHARED_BASE + SCRATCH_OFFSET + place.warp * TURN_BYTES;
  const uint32_t mine = ordered + (lane & 3) * 16;
  uint32_t turn[2 * TurnOrder::PARTS];
  order.fetch(turn, page + PAGE_CAPACITY + 2 * place.quarter * TURN_ROW_BYTES);
  const auto store_turns = [&]() { TurnOrder::store(turn, ordered, lane); };
  if constexpr (SHARED_COLUMNS) {
    const uint32_t tile = lane >= 16 ? ENTRIES * 4 : 0;
    tile_logits<2>(dots, query, keys, mine + tile, lane * 4, lane, store_turns);
  } else {
    float first[1][4], second[1][4];
    tile_logits<1>(first, query, keys, mine, lane * 4, lane, store_turns);
    tile_logits<1>(second, query, keys + KEY_TILE_BYTES, mine + ENTRIES * 4, lane * 4, lane,
                   []() {});
#pragma unroll
    for (int k = 0; k < 4; k++) dots[0][k] = first[0][k], dots[1][k] = second[0][k];
  }
}

// Pick the dots that count and give them their radius; hide keys where a limit asks for it.
INLINE void scale_logits(Logits& logits, const float (&dots)[2][4],
                         const Gains (&gains)[TILE_SETS], const Params& p, int row, uint32_t page,
                         int quarter, int lane) {
  const int g = lane / 4, t = lane & 3;
  const bool is_partial = (load_shared(page + 4) & 0xffff) < PAGE_TOKENS;
  const bool is_limited = p.window > 0 || p.softcap > 0.f || is_partial;
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++) {
#pragma unroll
    for (int k = 0; k < 4; k++)
      logits.dot[u][k] = SHARED_COLUMNS ? (t < 2 ? dots[0][k] : dots[1][k]) : dots[u][k];
    logits.radius[u][0] = gains[u].radius[0];
    logits.radius[u][1] = gains[u].radius[1];
    if (is_limited) {
      const int tile = 2 * quarter + (SHARED_COLUMNS ? t / 2 : u);
#pragma unroll
      for (int k = 0; k < 4; k++) logits.dot[u][k] *= gains[u].radius[k / 2];
      limit_logits(p, row, page, tile, g, logits.dot[u]);
      logits.radius[u][0] = logits.radius[u][1] = 1.f;
    }
  }
}

// Weights of 16 keys as the B operand: keys 2t, 2t + 1 of column g, then 8 keys further.
INLINE void weigh(uint32_t (&weight)[2], const Logits& logits, int set, const Gains& gains,
                  Running& run) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float a = exp2_fast(logits.above(set, 2 * half, run.most));
    const float b = exp2_fast(logits.above(set, 2 * half + 1, run.most));
    run.mass[0] += a;
    run.mass[1] += b;
    if constexpr (HAS_SCALES) {
      const float wa = a * gains.scale[half], wb = b * gains.scale[half];
      run.scaled[0] += wa;
      run.scaled[1] += wb;
      weight[half] = transpose_8x8(pack_half2(wa, wb));
    } else {
      weight[half] = transpose_8x8(pack_bfloat2(a, b));
    }
  }
}

// One warp's quarter of a page.
INLINE void attend_page(const Params& p, int row, const QueryLane& query, const TurnOrder& order,
                        Running& run, Accumulator& acc, uint32_t page, const WarpPlace& place) {
  const int lane = place.lane, quarter = place.quarter, g = lane / 4, t = lane & 3;
  float dots[2][4];
  warp_logits(dots, query, order, page, place);

  Gains gains[TILE_SETS];
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++)
    gains[u] = load_gains(page, 2 * quarter + (SHARED_COLUMNS ? t / 2 : u), g);
  Logits logits;
  scale_logits(logits, dots, gains, p, row, page, quarter, lane);
  if (__any_sync(ALL_LANES, is_too_high(logits, run))) raise_maximum(logits, run, acc);

  uint32_t weights[TILE_SETS][2];
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++) weigh(weights[u], logits, u, gains[u], run);
  const uint32_t values = page + VALUE_OFFSET + 2 * quarter * VALUE_TILE_BYTES;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    // with shared columns a tile's weights sit in half the columns; the others must weigh nothing
    const uint32_t mine = SHARED_COLUMNS ? ((g < 4) == (u == 0) ? ALL_LANES : 0u) : ALL_LANES;
    const uint32_t* w = weights[SHARED_COLUMNS ? 0 : u];
    add_values(acc, values + u * VALUE_TILE_BYTES, w[0] & mine, w[1] & mine, lane);
  }
}

// Rows without pages have no block: the head's first one writes them.
INLINE void write_empty_rows(const Params& p, const int* rows, Row row, int tid) {
  const int lane = tid & 31;
  for (int b = tid / 32; b < p.batch; b += WARPS) {
    if (rows[b] != rows[b + 1]) continue;
    row.index = b;
    for (int query = 0; query < COLUMNS; query++) {
      float v[LANE_DIMS] = {};
      write_query(p, row, query, v, MINUS_INFINITY, lane);
    }
  }
}

// Index of the block whose range holds page `at` of the head.
INLINE int owner(int at, int pages, int ctas) {
  return (int)(((uint64_t)(at + 1) * ctas - 1) / pages);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sphkv_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  // addresses are built from constants, without adding a base register
  if (shared_address(shared_memory) != SHARED_BASE) __trap();
  const int tid = threadIdx.x;
  const WarpPlace place(tid);

  Row row;
  const int heads = p.kv_heads * p.blocks;
  row.head = blockIdx.x % heads / p.blocks;
  row.block = blockIdx.x % heads % p.blocks;
  const int* rows = p.row_start + row.head * p.batch;
  const int head_start = rows[0], head_pages = rows[p.batch] - head_start;
  const int ctas = min(p.ctas, head_pages), cta = blockIdx.x / heads;
  if (cta == 0) write_empty_rows(p, rows, row, tid);
  if (cta >= ctas) return;
  const int start = head_start + (int)((uint64_t)cta * head_pages / ctas);
  const int end = head_start + (int)((uint64_t)(cta + 1) * head_pages / ctas);

  if (tid == 0) init_barriers(p);
  publish_barriers();
  row.index = 0;
  for (int b = tid; b < round_up(p.batch, THREADS); b += THREADS)
    row.index += __syncthreads_count(b < p.batch && rows[b + 1] <= start);
  prefetch_query(p, row, tid);
  if (tid == 0) {
    barrier_expect(table_barrier(), TABLE_BYTES);
    copy_bulk(SHARED_BASE, p.tables + (uint64_t)row.head * TABLE_BYTES, TABLE_BYTES, table_barrier());
  }
  Supply supply;
  supply.end = end;
  if (place.is_leader()) {
    supply.start(p, start + place.team, place.lane);
    for (int n = place.team; n < STAGES; n += TEAMS) supply.send(p, n, place.lane);
  }
  barrier_wait(table_barrier(), 0);
  TurnOrder order;
  order.load(place.lane);

  Stage stage = {(uint32_t)place.team, 0u};
  bool has_left = false;
  // Leave the page before: its stage is filled again once the whole team has left it.
  const auto leave_stage = [&]() {
    if (!has_left) return;
    if (place.is_leader()) {
      barrier_wait(empty_barrier(stage.index), stage.parity);
      supply.send(p, stage.index, place.lane);
    }
    stage.advance(TEAMS);
    has_left = false;
  };
  int page = start + place.team;
  for (int at = start; at < end; row.index++) {
    if (rows[row.index + 1] <= at) continue;
    const int stop = min(rows[row.index + 1], end);
    QueryLane query;
    load_query(query, p, row, place);
    Running run;
    Accumulator acc;
    reset(run, acc);
    for (; page < stop; page += TEAMS) {
      leave_stage();
      barrier_wait(full_barrier(stage.index), stage.parity);
      attend_page(p, row.index, query, order, run, acc, stage_address(stage.index), place);
      __syncwarp();
      if (place.lane == 0) barrier_arrive(empty_barrier(stage.index));
      has_left = true;
    }
    leave_stage();
    const int first_owner = owner(rows[row.index] - head_start, head_pages, ctas);
    row.num_parts = owner(rows[row.index + 1] - head_start - 1, head_pages, ctas) - first_owner + 1;
    row.part = row.index + cta;
    row.first_part = row.index + first_owner;
    finish_row(p, row, run, acc, tid);
    at = stop;
  }
}
