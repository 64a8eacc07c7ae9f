// SPDX-License-Identifier: Apache-2.0
// Decode attention over coded pages: one thread block per multiprocessor, each bound to a KV head.
// docs/gpu.md explains the design and draws the layouts.
#include "block_share.cuh"
#include "finish.cuh"
#include "keys.cuh"
#include "layout.cuh"
#include "ring.cuh"
#include "row_start.cuh"
#include "softmax.cuh"
#include "values.cuh"

// Radius and scale codes of keys g and g + 8 of one tile.
struct Gains {
  float radius[2], scale[2];
};

// Code in byte BYTE of a word, as 32768 + code: the byte lands where that number counts ones.
template <int BYTE>
INLINE float code_above_32768(uint32_t codes) {
  return __uint_as_float(__byte_perm(codes, 0x47000000u, 0x7404 | (BYTE << 4)));
}

// What the header says of a page's radii and scales, with 32768 steps taken off.
struct Affine {
  float radius_low, radius_step, scale_low, scale_step;
  int count;

  INLINE explicit Affine(uint32_t page) {
    // words: a wider load would carry its fill to every lane
    count = load_shared(page + COUNT_OFFSET) & 0xffff;
    radius_step = load_shared_float(page + RADIUS_STEP_OFFSET);
    radius_low = fmaf(-32768.f, radius_step, load_shared_float(page + RADIUS_LOW_OFFSET));
    scale_step = load_shared_float(page + SCALE_STEP_OFFSET);
    scale_low = fmaf(-32768.f, scale_step, load_shared_float(page + SCALE_LOW_OFFSET));
  }
};

INLINE Gains load_gains(const Affine& affine, uint32_t page, int tile, int g) {
  Gains gains;
  uint32_t codes;
  if (HAS_SCALES) {
    codes = load_shared(page + GAIN_OFFSET + tile * GAIN_TILE_BYTES + g * 4);
    gains.scale[0] = fmaf(affine.scale_step, code_above_32768<2>(codes), affine.scale_low);
    gains.scale[1] = fmaf(affine.scale_step, code_above_32768<3>(codes), affine.scale_low);
  } else {
    // two bytes per lane: take the word and pick its half
    const uint32_t at = page + GAIN_OFFSET + tile * GAIN_TILE_BYTES + g * 2;
    codes = load_shared(at & ~3u) >> (8 * (at & 2));
    gains.scale[0] = gains.scale[1] = 1.f;
  }
  gains.radius[0] = fmaf(affine.radius_step, code_above_32768<0>(codes), affine.radius_low);
  gains.radius[1] = fmaf(affine.radius_step, code_above_32768<1>(codes), affine.radius_low);
  return gains;
}

// Position of a key of a page.
INLINE int key_position(uint32_t page, int tile, int key) {
  const uint32_t at = page + POSITION_OFFSET;
  if (IS_CONTIGUOUS) return (int)load_shared(at) + tile * TILE_KEYS + key;
  if (IS_RUNS) return (int)load_shared(at + tile * 4) + key;
  return (int)load_shared(at + (tile * TILE_KEYS + key) * 4);
}

// Soft-cap, and minus infinity for keys past the page's count or outside the window.
INLINE void limit_logits(const Params& p, int row, uint32_t page, int count, int tile, int g,
                         float (&logit)[4]) {
  const int last = p.window > 0 ? __ldg(p.query_positions + row) : 0x7fffffff;
  const int first = p.window > 0 ? last - p.window + 1 : -0x7fffffff;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int key = g + 8 * (k / 2), position = key_position(page, tile, key);
    if (p.softcap > 0.f) logit[k] = soft_cap(logit[k], p.softcap);
    const bool is_hidden = tile * TILE_KEYS + key >= count || position < first || position > last;
    if (is_hidden) logit[k] = MINUS_INFINITY;
  }
}

// Where the keys of this warp's two tiles are.
INLINE KeyPlaces key_places(uint32_t page, const WarpPlace& place) {
  const int lane = place.lane, slice = place.slice;
  KeyPlaces places = {};
  uint32_t own = 0u;
  if constexpr (SHARES_ROWS) own = own_rows(key_position(page, lane % PAGE_TILES, 0), lane);
#pragma unroll
  for (int u = 0; u < 2; u++) {
    if (u < TURN_SETS) {
      const int tile = 2 * slice + (SHARED_COLUMNS ? lane / 16 : u);
      const int row = SHARES_ROWS ? tile_row(own, tile) : IS_RUNS ? tile : u;
      places.turns[u % TURN_SETS] = turn_address(page + PAGE_BYTES + row * TURN_BYTES, lane);
    }
    if (IS_TOKENS) {
      places.position[u][0] = key_position(page, 2 * slice + u, lane / 4);
      places.position[u][1] = key_position(page, 2 * slice + u, lane / 4 + 8);
    }
  }
  return places;
}

// Pick the dots that count and give them their radius; hide keys where a limit asks for it.
INLINE void scale_logits(Logits& logits, const float (&dots)[2][4],
                         const Gains (&gains)[TILE_SETS], const Params& p, int row, uint32_t page,
                         int count, const WarpPlace& place) {
  const int g = place.lane / 4, t = place.lane & 3;
  const bool is_limited = count < place.plain_count;
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++) {
#pragma unroll
    for (int k = 0; k < 4; k++)
      logits.dot[u][k] = SHARED_COLUMNS ? (t < 2 ? dots[0][k] : dots[1][k]) : dots[u][k];
    logits.radius[u][0] = gains[u].radius[0];
    logits.radius[u][1] = gains[u].radius[1];
    if (is_limited) {
      const int tile = 2 * place.slice + (SHARED_COLUMNS ? t / 2 : u);
#pragma unroll
      for (int k = 0; k < 4; k++) logits.dot[u][k] *= gains[u].radius[k / 2];
      limit_logits(p, row, page, count, tile, g, logits.dot[u]);
      logits.radius[u][0] = logits.radius[u][1] = 1.f;
    }
  }
}

// Weights of 16 keys as the B operand: keys 2t, 2t + 1 of column g, then 8 keys further.
INLINE void weigh(uint32_t (&weight)[2], const float (&above)[4], const Gains& gains,
                  Running& run) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float a = exp2_fast(above[2 * half]), b = exp2_fast(above[2 * half + 1]);
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

// One warp's slice of a page.
INLINE void attend_page(const Params& p, int row, const QueryLane& query, Running& run,
                        Accumulator& acc, uint32_t page, const WarpPlace& place, Supply& supply,
                        int number, ConstantPoints& constants) {
  const int lane = place.lane, slice = place.slice, g = lane / 4, t = lane & 3;
  float dots[2][4];
  tile_logits(dots, query, page + KEY_OFFSET + 2 * slice * KEY_TILE_BYTES,
              key_places(page, place), lane, constants, [&] {
                if constexpr (!HAS_SUPPLIERS) supply.send(p, number, lane);
              });

  const Affine affine(page);
  Gains gains[TILE_SETS];
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++)
    gains[u] = load_gains(affine, page, 2 * slice + (SHARED_COLUMNS ? t / 2 : u), g);
  Logits logits;
  scale_logits(logits, dots, gains, p, row, page, affine.count, place);
  Above above;
  above.take(logits, run);
  if (__any_sync(ALL_LANES, above.is_too_high())) {
    raise_maximum(logits, run, acc);
    above.take(logits, run);
  }

  uint32_t weights[TILE_SETS][2];
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++) weigh(weights[u], above.at[u], gains[u], run);
  const uint32_t values = page + VALUE_OFFSET + 2 * slice * VALUE_TILE_BYTES;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    // with shared columns a tile's weights sit in half the columns; the others must weigh nothing
    const uint32_t mine = SHARED_COLUMNS ? ((g < 4) == (u == 0) ? ALL_LANES : 0u) : ALL_LANES;
    const uint32_t* w = weights[SHARED_COLUMNS ? 0 : u];
    add_values(acc, values + u * VALUE_TILE_BYTES, w[0] & mine, w[1] & mine, lane);
  }
}

// Rows without pages have no block: the head's first one writes them, a warp one query of one row at a
// time. There is nothing to turn back.
INLINE void write_empty_rows(const Params& p, Row row, int tid) {
  const int lane = tid & 31;
  const int* rows = p.row_start + row.head * p.batch;
  for (int k = tid / 32; k < p.batch * COLUMNS; k += WARPS) {
    row.index = k / COLUMNS;
    if (__ldg(rows + row.index) != __ldg(rows + row.index + 1)) continue;
    float v[LANE_DIMS] = {};
    merge_query(p, row, k % COLUMNS, v, MINUS_INFINITY, lane);
  }
}

INLINE Sharing sharing_of(const Params& p) {
  return {p.row_start, p.batch, p.kv_heads, p.ctas, p.uneven, ROW_PAGES, LEAST_PAGES};
}

// What a block is asked for again when a row ends: while it works on pages it has no register to spare.
INLINE void keep_share(const BlockShare& share) {
  store_shared2(SHARED_BASE + PLACE_OFFSET, share.head, share.cta);
  store_shared2(SHARED_BASE + PLACE_OFFSET + 8, share.ctas, share.parts);
  store_shared(SHARED_BASE + PLACE_OFFSET + 16, share.work);
}

INLINE int kept_head() { return load_shared(SHARED_BASE + PLACE_OFFSET); }
INLINE int kept_cta() { return load_shared(SHARED_BASE + PLACE_OFFSET + 4); }
INLINE int kept_ctas() { return load_shared(SHARED_BASE + PLACE_OFFSET + 8); }
INLINE int kept_parts() { return load_shared(SHARED_BASE + PLACE_OFFSET + 12); }
INLINE int kept_work() { return load_shared(SHARED_BASE + PLACE_OFFSET + 16); }

// Bounds of the head's rows, found anew between rows.
INLINE const int* head_rows(const Params& p) { return p.row_start + kept_head() * p.batch; }

// Which blocks share a row, for its end. One thread alone knows which of the rows with pages it is.
INLINE void keep_parts(const Params& p, int index) {
  const HeadPages head(sharing_of(p), kept_head(), kept_work(), kept_ctas());
  const int rank = load_shared(SHARED_BASE + RANK_OFFSET);
  const int first = head.owner(head.rows[index], rank);
  const int last = head.owner(head.rows[index + 1] - 1, rank);
  store_shared2(SHARED_BASE + KEPT_OFFSET, index + first, last - first + 1);
  store_shared(SHARED_BASE + RANK_OFFSET, rank + 1);
}

constexpr int PARTS_THREAD = THREADS - 32;  // of the team with the fewest pages

// What the teams do: attend to the block's pages, row by row.
INLINE void attend_rows(const Params& p, const BlockShare& share, Row& row, RowStart& start,
                        const uint8_t* table, int tid) {
  const WarpPlace place(p, tid);
  const int first = share.first, end = share.end;
  row.index = share.row;
  Supply supply;
  Supply::Early early;
  if constexpr (!HAS_SUPPLIERS)
    early = supply.look(p, table, first, end, place.supply_order(), place.lane);
  // queries set out before pages are asked for, else they would queue behind them
  start.load(p, row, tid);
  if constexpr (!HAS_SUPPLIERS) supply.start(p, early, first, place.supply_order(), place.lane);
  start.store(p, row, tid);
  if (tid == PARTS_THREAD) store_shared(SHARED_BASE + RANK_OFFSET, share.rank);

  Stage stage = {(uint32_t)place.team, 0u};
  int page = first + place.team;
  bool is_next = false;
  for (int at = first; at < end; row.index++) {
    const int row_end = is_next ? head_rows(p)[row.index + 1] : share.row_end;
    const int stop = min(row_end, end);
    if (row_end <= at) continue;
    if (is_next) {
      const int thread = unknown(tid);
      start.load_map(table, thread);
      start.load(p, row, thread);
      sync_teams();  // nobody reads the results of the row before any more
      start.store(p, row, thread);
    }
    barrier_wait(table_barrier(), 0);
    sync_teams();
    QueryLane query;
    take_query(query, place);
    Running run;
    Accumulator acc;
    reset(run, acc);
    ConstantPoints constants;
    if constexpr (KEEPS_CONSTANTS) constants.load(place.lane);
    if (tid == PARTS_THREAD) keep_parts(p, row.index);
    for (; page < stop; page += TEAMS) {
      if constexpr (!HAS_SUPPLIERS && SEND_WORD < 0) supply.send(p, page, place.lane);
      barrier_wait(full_barrier(stage.index), stage.parity);
      attend_page(p, row.index, query, run, acc, stage_address(stage.index), place, supply, page,
                  constants);
      __syncwarp();
      if (place.lane == 0) barrier_arrive(empty_barrier(stage.index));
      stage.advance<TEAMS>();
    }
    row.head = kept_head(), row.block = unknown(blockIdx.y);
    row.parts = kept_parts(), row.part = row.index + kept_cta();
    finish_row(p, row, run, acc, unknown(tid));
    at = stop, is_next = true;
  }
}

// What is left of a head when its pages are done: rows without any. The launch's last block has those
// of heads that have no block.
INLINE void write_rest(const Params& p, Row row, int tid) {
  row.block = unknown(blockIdx.y);
  if (kept_cta() == 0 && kept_ctas() > 0) {
    row.head = kept_head();
    write_empty_rows(p, row, tid);
  }
  if (!p.uneven || blockIdx.x != 0) return;
  for (row.head = 0; row.head < p.kv_heads; row.head++)
    if (pages_of_head(sharing_of(p), row.head) == 0) write_empty_rows(p, row, tid);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    sphkv_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  // addresses are built from constants, without adding a base register
  if (shared_address(shared_memory) != SHARED_BASE) __trap();
  const int tid = threadIdx.x;
  // what comes next may take multiprocessors as soon as this launch has all it needs
  start_dependents();
  if (tid == 0) {
    init_barriers();
    publish_barriers();
  }
  const BlockShare share = p.shares ? BlockShare::load(p.shares, blockIdx.x)
                                    : BlockShare(sharing_of(p), blockIdx.x, tid & 31);
  Row row;
  row.head = share.head;
  row.block = blockIdx.y;
  const uint8_t* table = p.tables + (uint64_t)row.head * TABLE_BYTES;
  // the table sets out first
  if (tid == 0) request_table(table);
  RowStart start;
  start.load_map(table, tid);
  if (tid == 0) keep_share(share);
  for (int k = tid; k < ZERO_BYTES / 4; k += BLOCK_THREADS)
    store_shared(SHARED_BASE + ZERO_OFFSET + 4 * k, 0u);
  __syncthreads();
  // a short share may hold nothing but what a row costs
  if (share.first >= share.end) {
    barrier_wait(table_barrier(), 0);  // shared memory must outlive the copy
    if (tid < THREADS) write_rest(p, row, tid);
    return;
  }
  if constexpr (HAS_SUPPLIERS) {
    if (tid >= THREADS) {
      shrink_registers<SUPPLY_REGISTERS>();
      const int team = tid / 32 - WARPS;
      if (team < TEAMS) supply_team(p, table, share.first, share.end, team, tid & 31);
    } else {
      grow_registers<TEAM_REGISTERS>();
      attend_rows(p, share, row, start, table, tid);
    }
  } else {
    attend_rows(p, share, row, start, table, tid);
  }
  if (tid < THREADS) write_rest(p, row, tid);
}
