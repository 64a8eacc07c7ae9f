// SPDX-License-Identifier: Apache-2.0
// Decode attention over coded pages: one thread block per multiprocessor, each bound to a KV head.
// docs/gpu.md explains the design and draws the layouts.
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

// Short lists are spread until every block has 256 keys: teams without a page leave their share of the
// multiprocessor to the others, while every block has a table to fetch and sums to merge.
constexpr int LEAST_PAGES = 256 / PAGE_TOKENS;

// Bits below bit `n`, which may lie outside the word.
INLINE uint32_t bits_below(int n) { return n <= 0 ? 0u : n >= 32 ? ALL_LANES : (1u << n) - 1u; }

// Which head a block has, and which of the head's blocks it is. Found once and kept in shared memory:
// while a block works on pages it has no register to spare.
struct BlockPlace {
  int head, cta, ctas, parts;
  int work;  // of the head: its pages and what its rows cost beside them, in pages

  // Blocks of all heads one after the other, last one first: a block waits for blocks of its head with
  // later pages, so they must begin before it. Heads share the blocks so that none has more work than
  // it must; blocks that no head has a use for, and heads without pages, are left over.
  INLINE BlockPlace(const Params& p, int lane) {
    const int heads = p.kv_heads, at = p.ctas - 1 - blockIdx.x;
    if (!p.uneven) {
      ctas = p.ctas / heads;
      head = heads - 1 - blockIdx.x % heads, cta = ctas - 1 - blockIdx.x / heads;
      parts = head * (p.batch + ctas);
      work = pages_of(p, head);
      return;
    }
    const int lanes_work = work_of(p, lane, lane), most = most_work(p, lanes_work, lane);
    head = heads - 1, cta = at, ctas = 0, work = 0;
    int before = 0;
    for (int h = lane; h < round_up(heads, 32); h += 32) {
      const int all = h < 32 ? lanes_work : work_of(p, h, lane);
      const int own = blocks_of(all, most), end = before + sum_up_to(own, lane);
      const uint32_t behind = __ballot_sync(ALL_LANES, end > at);
      if (behind) {
        const int owner = __ffs(behind) - 1;
        head = h - lane + owner;
        work = __shfl_sync(ALL_LANES, all, owner);
        ctas = __shfl_sync(ALL_LANES, own, owner);
        cta = at - __shfl_sync(ALL_LANES, end, owner) + ctas;
        break;
      }
      before = __shfl_sync(ALL_LANES, end, 31);
    }
    parts = head * p.batch + at - cta;
  }

  static INLINE int pages_of(const Params& p, int head) {
    if (head >= p.kv_heads) return 0;
    return __ldg(p.row_start + (head + 1) * p.batch) - __ldg(p.row_start + head * p.batch);
  }

  // Pages of a head, which differs from lane to lane, and what its rows that have some cost beside; the
  // first is free, for every block begins one.
  static INLINE int work_of(const Params& p, int head, int lane) {
    const int rows = p.kv_heads * p.batch, first = head * p.batch;
    int filled = 0;
    for (int k = 0; k < rows; k += 32) {
      const int at = k + lane;
      const bool has_pages = at < rows && __ldg(p.row_start + at + 1) > __ldg(p.row_start + at);
      const uint32_t mine = bits_below(first + p.batch - k) & ~bits_below(first - k);
      filled += __popc(__ballot_sync(ALL_LANES, has_pages) & mine);
    }
    return pages_of(p, head) + ROW_PAGES * max(filled - 1, 0);
  }

  // Blocks of a head if none has more work than `most`.
  static INLINE int blocks_of(int work, int most) {
    return (uint32_t)(work + most - 1) / (uint32_t)most;
  }

  // Least work a block can have at most. If it were only for the sum, that would be all work by
  // blocks; but a head's last block may have less than others, so that somewhat more is needed.
  static INLINE int most_work(const Params& p, int lanes_work, int lane) {
    int longest = 1, total = 0;
    for (int h = lane; h < round_up(p.kv_heads, 32); h += 32) {
      const int all = h < 32 ? lanes_work : work_of(p, h, lane);
      longest = max(longest, __reduce_max_sync(ALL_LANES, all));
      total += __reduce_add_sync(ALL_LANES, all);
    }
    const int rest = p.ctas - p.kv_heads;
    int low = max((uint32_t)(total + p.ctas - 1) / (uint32_t)p.ctas, 1u);
    int high = rest > 0 ? min(longest, (int)((uint32_t)(total + rest - 1) / (uint32_t)rest)) : longest;
    while (low < high) {
      const int middle = (low + high) / 2;
      int blocks = 0;
      for (int h = lane; h < round_up(p.kv_heads, 32); h += 32) {
        const int all = h < 32 ? lanes_work : work_of(p, h, lane);
        blocks += __reduce_add_sync(ALL_LANES, blocks_of(all, middle));
      }
      if (blocks <= p.ctas) high = middle;
      else low = middle + 1;
    }
    return max(low, 1);
  }

  static INLINE int sum_up_to(int own, int lane) {
#pragma unroll
    for (int k = 1; k < 32; k *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, own, k);
      if (lane >= k) own += other;
    }
    return own;
  }

  INLINE void keep() const {
    store_shared2(SHARED_BASE + PLACE_OFFSET, head, cta);
    store_shared2(SHARED_BASE + PLACE_OFFSET + 8, ctas, parts);
    store_shared(SHARED_BASE + PLACE_OFFSET + 16, work);
  }
};

INLINE int kept_head() { return load_shared(SHARED_BASE + PLACE_OFFSET); }
INLINE int kept_cta() { return load_shared(SHARED_BASE + PLACE_OFFSET + 4); }
INLINE int kept_ctas() { return load_shared(SHARED_BASE + PLACE_OFFSET + 8); }
INLINE int kept_parts() { return load_shared(SHARED_BASE + PLACE_OFFSET + 12); }
INLINE int kept_work() { return load_shared(SHARED_BASE + PLACE_OFFSET + 16); }

// A head's pages in the list, and how many blocks share them. Pages are told apart by their place in
// the head's work, in which every row but the first begins with what it costs beside its pages.
struct HeadPages {
  const int* rows;
  int batch, work, ctas;
  int row_pages;  // what a row costs

  INLINE HeadPages(const Params& p, int head, int work, int most)
      : rows(p.row_start + head * p.batch), batch(p.batch), work(work),
        row_pages(p.uneven ? ROW_PAGES : 0) {
    ctas = min(most, (rows[batch] - rows[0] + LEAST_PAGES - 1) / LEAST_PAGES);
  }

  // Where the work of block `cta` begins. 32 bits: a head's work times blocks stays far below 2^32.
  INLINE int bound(int cta) const { return (uint32_t)(cta * work) / max(ctas, 1); }

  // First page of block `cta` in the list; all lanes of a warp find it together.
  INLINE int first(int cta, int lane) const {
    const int start = rows[0], end = bound(cta);
    if (row_pages == 0) return start + end;
    int pages = start, filled = 0;
    for (int b = lane; b < round_up(batch, 32); b += 32) {
      const int from = rows[min(b, batch)], count = rows[min(b + 1, batch)] - from;
      const uint32_t live = __ballot_sync(ALL_LANES, count > 0);
      const int rank = filled + __popc(live & (2u << lane) - 1u) - 1;
      const int before = end - (from - start) - row_pages * rank;
      pages += __reduce_add_sync(ALL_LANES, min(max(before, 0), count));
      filled += __popc(live);
    }
    return pages;
  }

  // Index of the block that has page `at` of the list, in row `rank` of those that have pages.
  INLINE int owner(int at, int rank) const {
    return (int)((uint32_t)((at - rows[0] + row_pages * rank + 1) * ctas - 1) / work);
  }
};

// First row with pages at or behind `start`; all lanes of a warp find it together.
INLINE int first_row(const int* rows, int batch, int start, int lane) {
  int index = 0;
  for (int b = lane; b < round_up(batch, 32); b += 32)
    index += __popc(__ballot_sync(ALL_LANES, b < batch && rows[b + 1] <= start));
  return index;
}

// Rows with pages before row `index`; all lanes of a warp find it together.
INLINE int row_rank(const int* rows, int index, int lane) {
  int rank = 0;
  for (int b = lane; b < round_up(index, 32); b += 32)
    rank += __popc(__ballot_sync(ALL_LANES, b < index && rows[b + 1] > rows[b]));
  return rank;
}

// Bounds of the head's rows, found anew between rows.
INLINE const int* head_rows(const Params& p) { return p.row_start + kept_head() * p.batch; }

// Which blocks share a row, for its end. One thread alone knows which of the rows with pages it is.
INLINE void keep_parts(const Params& p, int index) {
  const HeadPages head(p, kept_head(), kept_work(), kept_ctas());
  const int rank = load_shared(SHARED_BASE + RANK_OFFSET);
  const int first = head.owner(head.rows[index], rank);
  const int last = head.owner(head.rows[index + 1] - 1, rank);
  store_shared2(SHARED_BASE + KEPT_OFFSET, index + first, last - first + 1);
  store_shared(SHARED_BASE + RANK_OFFSET, rank + 1);
}

constexpr int PARTS_THREAD = THREADS - 32;  // of the team with the fewest pages

// What the teams do: attend to the block's pages, row by row.
INLINE void attend_rows(const Params& p, int first, int end, Row& row, RowStart& start,
                        const uint8_t* table, int tid) {
  const WarpPlace place(p, tid);
  row.index = first_row(head_rows(p), p.batch, first, place.lane);
  const int rank = row_rank(head_rows(p), row.index, place.lane);
  // queries set out before pages are asked for, else they would queue behind them
  start.load(p, row, tid);
  Supply supply;
  if constexpr (!HAS_SUPPLIERS)
    supply.start(p, table, first, end, place.supply_order(), place.lane);
  start.store(p, row, tid);
  if (tid == PARTS_THREAD) store_shared(SHARED_BASE + RANK_OFFSET, rank);

  Stage stage = {(uint32_t)place.team, 0u};
  int page = first + place.team;
  bool is_next = false;
  for (int at = first; at < end; row.index++) {
    const int row_end = head_rows(p)[row.index + 1], stop = min(row_end, end);
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
    if (BlockPlace::pages_of(p, row.head) == 0) write_empty_rows(p, row, tid);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    sphkv_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  // addresses are built from constants, without adding a base register
  if (shared_address(shared_memory) != SHARED_BASE) __trap();
  const int tid = threadIdx.x;
  // what comes next may take multiprocessors as soon as this launch has all it needs
  start_dependents();
  const BlockPlace place(p, tid & 31);
  Row row;
  row.head = place.head;
  row.block = blockIdx.y;
  if (tid == 0) place.keep();
  const uint8_t* table = p.tables + (uint64_t)row.head * TABLE_BYTES;
  for (int k = tid; k < ZERO_BYTES / 4; k += BLOCK_THREADS)
    store_shared(SHARED_BASE + ZERO_OFFSET + 4 * k, 0u);
  // the table sets out first, before anything that the barriers' fence would wait for
  if (tid == 0) request_table(table);
  RowStart start;
  start.load_map(table, tid);
  const HeadPages head(p, place.head, place.work, place.ctas);
  const bool is_used = place.cta < head.ctas;
  const int first = head.first(place.cta, tid & 31), end = head.first(place.cta + 1, tid & 31);
  __syncthreads();
  // a short share may hold nothing but what a row costs
  if (!is_used || first >= end) {
    barrier_wait(table_barrier(), 0);  // shared memory must outlive the copy
    if (tid < THREADS) write_rest(p, row, tid);
    end_after_previous();
    return;
  }
  if constexpr (HAS_SUPPLIERS) {
    if (tid >= THREADS) {
      shrink_registers<SUPPLY_REGISTERS>();
      const int team = tid / 32 - WARPS;
      if (team < TEAMS) supply_team(p, table, first, end, team, tid & 31);
    } else {
      grow_registers<TEAM_REGISTERS>();
      attend_rows(p, first, end, row, start, table, tid);
    }
  } else {
    attend_rows(p, first, end, row, start, table, tid);
  }
  if (tid < THREADS) write_rest(p, row, tid);
  end_after_previous();
}
