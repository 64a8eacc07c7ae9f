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
    count = load_shared(page + 4) & 0xffff;
    radius_step = load_shared_float(page + 16);
    radius_low = fmaf(-32768.f, radius_step, load_shared_float(page + 12));
    scale_step = load_shared_float(page + 24);
    scale_low = fmaf(-32768.f, scale_step, load_shared_float(page + 20));
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
  const int lane = place.lane, quarter = place.quarter;
  KeyPlaces places = {};
#pragma unroll
  for (int u = 0; u < 2; u++) {
    if (u < TURN_SETS) {
      const int row = IS_RUNS ? 2 * quarter + (SHARED_COLUMNS ? lane / 16 : u) : u;
      places.turns[u % TURN_SETS] = turn_address(page + PAGE_BYTES + row * TURN_BYTES, lane);
    }
    if (IS_TOKENS) {
      places.position[u][0] = key_position(page, 2 * quarter + u, lane / 4);
      places.position[u][1] = key_position(page, 2 * quarter + u, lane / 4 + 8);
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
      const int tile = 2 * place.quarter + (SHARED_COLUMNS ? t / 2 : u);
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

// One warp's quarter of a page.
INLINE void attend_page(const Params& p, int row, const QueryLane& query, Running& run,
                        Accumulator& acc, uint32_t page, const WarpPlace& place, Supply& supply,
                        int number, ConstantPoints& constants) {
  const int lane = place.lane, quarter = place.quarter, g = lane / 4, t = lane & 3;
  float dots[2][4];
  tile_logits(dots, query, page + KEY_OFFSET + 2 * quarter * KEY_TILE_BYTES,
              key_places(page, place), lane, constants);
  if constexpr (SENDS_LATE) supply.send(p, number, lane);

  const Affine affine(page);
  Gains gains[TILE_SETS];
#pragma unroll
  for (int u = 0; u < TILE_SETS; u++)
    gains[u] = load_gains(affine, page, 2 * quarter + (SHARED_COLUMNS ? t / 2 : u), g);
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
INLINE int owner(uint32_t at, uint32_t pages, uint32_t ctas) {
  return (int)(((at + 1) * ctas - 1) / pages);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sphkv_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  // addresses are built from constants, without adding a base register
  if (shared_address(shared_memory) != SHARED_BASE) __trap();
  const int tid = threadIdx.x;
  const WarpPlace place(p, tid);

  Row row;
  const int heads = p.kv_heads * p.blocks;
  row.head = blockIdx.x % heads / p.blocks;
  row.block = blockIdx.x % heads % p.blocks;
  const uint8_t* table = p.tables + (uint64_t)row.head * TABLE_BYTES;
  for (int k = tid; k < ZERO_BYTES / 4; k += THREADS)
    store_shared(SHARED_BASE + ZERO_OFFSET + 4 * k, 0u);
  // the table sets out first: everything else is read meanwhile
  if (tid == 0) request_table(table);
  RowStart first;
  first.load_map(table, tid);
  const int* rows = p.row_start + row.head * p.batch;
  const int head_start = rows[0], head_pages = rows[p.batch] - head_start;
  // fewer blocks than pages: every team of a block should have one
  const int ctas = min(p.ctas, (head_pages + TEAMS - 1) / TEAMS), cta = blockIdx.x / heads;
  __syncthreads();
  if (cta >= ctas) {
    barrier_wait(table_barrier(), 0);  // shared memory must outlive the copy
    if (cta == 0) write_empty_rows(p, rows, row, tid);
    return;
  }
  // 32 bits: a head's pages times blocks stays far below 2^32
  const int start = head_start + (uint32_t)(cta * head_pages) / ctas;
  const int end = head_start + (uint32_t)((cta + 1) * head_pages) / ctas;
  row.index = 0;
  for (int b = tid; b < round_up(p.batch, THREADS); b += THREADS)
    row.index += __syncthreads_count(b < p.batch && rows[b + 1] <= start);
  // queries set out before pages are asked for, else they would queue behind them
  first.load(p, row, tid);
  Supply supply;
  supply.start(p, table, start, end, place.supply_order(), place.lane);
  first.store(p, row, tid);

  Stage stage = {(uint32_t)place.team, 0u};
  int page = start + place.team;
  for (int at = start; at < end; row.index++) {
    if (rows[row.index + 1] <= at) continue;
    const int stop = min(rows[row.index + 1], end);
    if (at != start) {
      RowStart next;
      next.load_map(table, tid);
      next.load(p, row, tid);
      next.store(p, row, tid);
    }
    barrier_wait(table_barrier(), 0);
    __syncthreads();
    QueryLane query;
    take_query(query, place);
    Running run;
    Accumulator acc;
    reset(run, acc);
    ConstantPoints constants;
    if constexpr (KEEPS_CONSTANTS) constants.load(place.lane);
    for (; page < stop; page += TEAMS) {
      if constexpr (!SENDS_LATE) supply.send(p, page, place.lane);
      barrier_wait(full_barrier(stage.index), stage.parity);
      attend_page(p, row.index, query, run, acc, stage_address(stage.index), place, supply, page,
                  constants);
      __syncwarp();
      if (place.lane == 0) barrier_arrive(empty_barrier(stage.index));
      stage.advance<TEAMS>();
    }
    const int first_owner = owner(rows[row.index] - head_start, head_pages, ctas);
    row.num_parts = owner(rows[row.index + 1] - head_start - 1, head_pages, ctas) - first_owner + 1;
    row.part = row.index + cta;
    row.first_part = row.index + first_owner;
    finish_row(p, row, run, acc, tid);
    at = stop;
  }
  if (cta == 0) write_empty_rows(p, rows, row, tid);
}
