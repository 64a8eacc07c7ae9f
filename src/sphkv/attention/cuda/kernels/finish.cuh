// SPDX-License-Identifier: Apache-2.0
// End of a row (one sequence of one head): merge warps, then blocks, then write the output.
#pragma once
#include "layout.cuh"
#include "softmax.cuh"
#include "told.cuh"

constexpr int LANE_DIMS = HEAD_DIM / 32;
constexpr float LN2 = 0.69314718f;
constexpr float LOG2E = 1.44269504f;

// Which part of the work a block has: pages first ... first + total of one head.
struct Row {
  int index;     // sequence
  int head;      // KV head
  int block;     // which COLUMNS query heads of the group
  int parts;     // where the head's partial results begin
  int part;      // slot of this block's partial result among them
  int first_part, num_parts;  // those of all blocks that share this row
};

CONSTANT_FUNCTION int stat_at(int kind) { return SHARED_BASE + RESULT_OFFSET + COLUMNS * HEAD_DIM * 4 + kind * STAT_BYTES; }

// Dimension x % HEAD_DIM of query x / HEAD_DIM.
INLINE uint32_t result_at(int x) { return SHARED_BASE + RESULT_OFFSET + x * 4; }

// Column of a lane's logits c = 0, 1 as a query of the group.
INLINE int lane_query(int t, int c) { return SHARED_COLUMNS ? 2 * (t & 1) + c : 2 * t + c; }

// What every warp knows of its sums.
INLINE void store_stats(const Running& run, int tid) {
  const int lane = tid & 31, warp = tid / 32, t = lane & 3;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const float mass = peer_sum(run.mass[c]), scaled = peer_sum(run.scaled[c]);
    if (lane < 4 && (!SHARED_COLUMNS || t < 2)) {
      const uint32_t at = (warp * COLUMNS + lane_query(t, c)) * 4;
      store_shared_float(at + stat_at(0), run.most[c]);
      store_shared_float(at + stat_at(1), mass);
      store_shared_float(at + stat_at(2), scaled);
    }
  }
}

// Factors that bring each warp's sums to a common maximum and divide by the total mass. Afterwards
// warp 0's first two stats carry the row's own: log-sum-exp and what the midpoint of codes adds.
INLINE void warp_factors(int tid) {
  const int lane = tid & 31;
  const bool is_live = lane < WARPS;
  // a warp has one query at a time, its lanes one warp each; a lone team has more queries than warps
  for (int query = tid / 32; query < COLUMNS; query += WARPS) {
    const uint32_t at = (min(lane, WARPS - 1) * COLUMNS + query) * 4;
    const float most = is_live ? load_shared_float(at + stat_at(0)) : NO_LOGIT;
    const float top = warp_max(most), factor = exp2_fast(most - top);
    const float mass = warp_sum(is_live ? factor * load_shared_float(at + stat_at(1)) : 0.f);
    const float scaled = warp_sum(is_live ? factor * load_shared_float(at + stat_at(2)) : 0.f);
    const float inverse = mass > 0.f ? 1.f / mass : 0.f;
    if (is_live) store_shared_float(at + stat_at(3), factor * inverse);
    if (lane == 0) {
      store_shared_float(stat_at(0) + query * 4,
                         mass > 0.f ? top + log2_fast(mass) : MINUS_INFINITY);
      store_shared_float(stat_at(1) + query * 4, MIDPOINT * scaled * inverse);
    }
  }
}

// A warp's sums of PASS_DIMS dimensions, from FIRST on, to scratch: [query][dim].
template <int FIRST>
INLINE void store_sums(const Accumulator& acc, int tid) {
  const int lane = tid & 31, warp = tid / 32, g = lane / 4, t = lane & 3;
  const uint32_t mine = SHARED_BASE + SCRATCH_OFFSET + warp * COLUMNS * PASS_ROW * 4;
#pragma unroll
  for (int j = 0; j < PASS_DIMS / 16; j++) {
    const int tile = FIRST / 16 + j;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      v[k] = feature_sum(acc, 2 * tile + k / 2, k % 2) * feature_unit(2 * tile + k / 2);
      if (SHARED_COLUMNS) v[k] += __shfl_xor_sync(ALL_LANES, v[k], 2);
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t at = mine + (lane_query(t, c) * PASS_ROW + 16 * j + g) * 4;
      if constexpr (SHARED_COLUMNS) {
        // both lanes of a query have the sums: each stores half of them
        store_shared_float(at + (t < 2 ? 0 : 32), t < 2 ? v[c] : v[2 + c]);
      } else {
        store_shared_float(at, v[c]);
        store_shared_float(at + 32, v[2 + c]);
      }
    }
  }
}

// Sum of what the warps have stored, to results[query][dim]; a thread has two dimensions.
template <int FIRST>
INLINE void add_warps(int tid) {
  for (int x = 2 * tid; x < COLUMNS * PASS_DIMS; x += 2 * THREADS) {
    const int query = x / PASS_DIMS, dim = x % PASS_DIMS;
    const uint32_t from = SHARED_BASE + SCRATCH_OFFSET + (query * PASS_ROW + dim) * 4;
    float a = -load_shared_float(stat_at(1) + query * 4), b = a;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = load_shared_float(stat_at(3) + (w * COLUMNS + query) * 4);
      const uint2 v = load_shared2(from + w * COLUMNS * PASS_ROW * 4);
      a += factor * __uint_as_float(v.x), b += factor * __uint_as_float(v.y);
    }
    store_shared2(result_at(query * HEAD_DIM + FIRST + dim), __float_as_uint(a), __float_as_uint(b));
  }
}

// Sums of all warps to results[query][dim], PASS_DIMS dimensions at a time.
template <int FIRST = 0>
INLINE void merge_warps(const Running& run, const Accumulator& acc, int tid) {
  if constexpr (FIRST < HEAD_DIM) {
    if constexpr (FIRST == 0) store_stats(run, tid);
    store_sums<FIRST>(acc, tid);
    sync_teams();
    if constexpr (FIRST == 0) {
      warp_factors(tid);
      sync_teams();
    }
    add_warps<FIRST>(tid);
    sync_teams();
    merge_warps<FIRST + PASS_DIMS>(run, acc, tid);
  }
}

// Fast Hadamard transform of a row spread over a warp: dimension lane + 32 * i in v[i].
INLINE void hadamard(float (&v)[LANE_DIMS], int lane) {
#pragma unroll
  for (int k = 1; k < 32; k *= 2)
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      const float other = __shfl_xor_sync(ALL_LANES, v[i], k);
      v[i] = lane & k ? other - v[i] : v[i] + other;
    }
#pragma unroll
  for (int k = 1; k < LANE_DIMS; k *= 2)
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
      if (!(i & k)) {
        const float a = v[i], b = v[i | k];
        v[i] = a + b;
        v[i | k] = a - b;
      }
  const float norm = rsqrtf((float)HEAD_DIM);
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) v[i] *= norm;
}

// Other partial, sink, output: one warp writes one query.
INLINE void merge_query(const Params& p, const Row& row, int query, float (&v)[LANE_DIMS],
                        float lse2, int lane) {
  const int in_group = row.block * COLUMNS + query;
  if (in_group >= p.group) return;
  const int head = row.head * p.group + in_group;
  const uint64_t at = (uint64_t)row.index * (p.kv_heads * p.group) + head;
  if (p.other_lse || p.sinks) {
    wait_for_previous();
    const float other = p.other_lse ? p.other_lse[at] * LOG2E : MINUS_INFINITY;
    const float sink = p.sinks ? p.sinks[head] * LOG2E : MINUS_INFINITY;
    const float top = fmaxf(fmaxf(fmaxf(lse2, other), sink), NO_LOGIT);
    const float mine = exp2_fast(lse2 - top), theirs = exp2_fast(other - top);
    const float mass = mine + theirs + exp2_fast(sink - top);
    const float inverse = mass > 0.f ? 1.f / mass : 0.f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      v[i] *= mine * inverse;
      if (theirs > 0.f) v[i] += theirs * inverse * p.other_out[at * HEAD_DIM + lane + 32 * i];
    }
    lse2 = mass > 0.f ? top + log2_fast(mass) : MINUS_INFINITY;
    __syncwarp();  // the partial may lie where the result goes: all lanes have read it
  }
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) {
    const uint64_t to = at * HEAD_DIM + lane + 32 * i;
    if (p.out_is_bf16)
      ((uint16_t*)p.out)[to] = (uint16_t)pack_bfloat2(v[i], 0.f);
    else
      tell(p.out, to, v[i]);
  }
  if (lane == 0) tell(p.lse, at, lse2 * LN2);
}

// Parts of a row tell by themselves that they are there, which a fence or a counter would take as long
// as a short list to do. A lane writes and reads two dimensions of a query, a warp 64, with a copy of
// the log-sum-exp beside them.
struct PartPlace {
  uint32_t *out, *lse;  // of one part; the next ones follow PART_WORDS and PART_WARPS further
  static constexpr int PART_WORDS = COLUMNS * HEAD_DIM;
  static constexpr int PART_WARPS = PART_WORDS / 64;

  // `x`: query * HEAD_DIM + dimension.
  INLINE PartPlace(const Params& p, const Row& row, int part, int x) {
    const uint64_t at =
        (uint64_t)row.block * (p.kv_heads * p.batch + p.ctas) + row.parts + part;
    out = p.part_out + at * PART_WORDS + x;
    lse = p.part_lse + at * PART_WARPS + x / 64;
  }
};

// This block's share of a row, for the row's first block.
INLINE void write_part(const Params& p, const Row& row, int tid) {
  for (int x = 2 * tid; x < PartPlace::PART_WORDS; x += 2 * THREADS) {
    const PartPlace place(p, row, row.part, x);
    store_device2(place.out, told_word(load_shared_float(result_at(x))),
                  told_word(load_shared_float(result_at(x + 1))));
    if (tid % 32 == 0)
      store_device(place.lse, told_word(load_shared_float(stat_at(0) + x / HEAD_DIM * 4)));
  }
}

// Some of a row's parts, `count` of them: two dimensions of each, and in lane k the log-sum-exp of
// part k. Words past the count are there from the start, and weigh nothing.
struct Parts {
  static constexpr int MERGED = 16;  // at a time, so that many loads are on their way together
  uint2 out[MERGED];
  uint32_t lse;

  INLINE Parts(int count, int lane) {
    lse = lane < count ? EMPTY : __float_as_uint(MINUS_INFINITY);
#pragma unroll
    for (int k = 0; k < MERGED; k++) out[k].x = out[k].y = k < count ? EMPTY : 0u;
  }

  // Reads until all are there; those that were there already are not read again.
  INLINE void await(const PartPlace& from, int lane) {
    uint32_t top;
    do {
      fill_from_device(lse, from.lse + lane * PartPlace::PART_WARPS);
#pragma unroll
      for (int k = 0; k < MERGED; k++)
        fill_from_device2(out[k], from.out + k * PartPlace::PART_WORDS);
      top = lse;
#pragma unroll
      for (int k = 0; k < MERGED; k++) top = max(top, max(out[k].x, out[k].y));
    } while (__any_sync(ALL_LANES, top == EMPTY));
  }

  // Leaves them as the next launch must find them.
  static INLINE void clear(const PartPlace& from, int count, int lane) {
    if (lane < count) store_device(from.lse + lane * PartPlace::PART_WARPS, EMPTY);
#pragma unroll
    for (int k = 0; k < MERGED; k++)
      if (k < count) store_device2(from.out + k * PartPlace::PART_WORDS, EMPTY, EMPTY);
  }
};

// Two dimensions of a query, over all parts so far.
struct Merged {
  float most, mass, a, b;

  INLINE Merged(float lse2, float x, float y) {
    most = fmaxf(lse2, NO_LOGIT), mass = exp2_fast(lse2 - most);
    a = mass * x, b = mass * y;
  }

  INLINE void add(const Parts& parts) {
    const float lse = __uint_as_float(parts.lse);
    const float top = fmaxf(most, warp_max(lse)), shrink = exp2_fast(most - top);
    const float factor = exp2_fast(lse - top);
    most = top;
    mass = mass * shrink + warp_sum(factor);
    a *= shrink, b *= shrink;
#pragma unroll
    for (int k = 0; k < Parts::MERGED; k++) {
      const float f = __shfl_sync(ALL_LANES, factor, k);
      a += f * __uint_as_float(parts.out[k].x), b += f * __uint_as_float(parts.out[k].y);
    }
  }
};

// Adds what the row's other blocks have written to what this one has. The log-sum-exp of all goes to
// the third stat.
INLINE void merge_parts(const Params& p, const Row& row, int tid) {
  const int lane = tid & 31;
  for (int x = 2 * tid; x < PartPlace::PART_WORDS; x += 2 * THREADS) {
    const int query = x / HEAD_DIM;
    Merged merged(load_shared_float(stat_at(0) + query * 4), load_shared_float(result_at(x)),
                  load_shared_float(result_at(x + 1)));
    for (int s = 1; s < row.num_parts; s += Parts::MERGED) {
      const PartPlace from(p, row, row.first_part + s, x);
      const int count = min(row.num_parts - s, Parts::MERGED);
      Parts parts(count, lane);
      parts.await(from, lane);
      merged.add(parts);
      Parts::clear(from, count, lane);
    }
    const float inverse = merged.mass > 0.f ? 1.f / merged.mass : 0.f;
    store_shared_float(result_at(x), merged.a * inverse);
    store_shared_float(result_at(x + 1), merged.b * inverse);
    if (x % HEAD_DIM == 0)
      store_shared_float(stat_at(2) + query * 4, merged.mass > 0.f
                                                     ? merged.most + log2_fast(merged.mass)
                                                     : MINUS_INFINITY);
  }
}

// All threads of the teams call this when the row's pages of this block are done. A row's first block
// comes to it after its other rows, so that it is the one that waits.
INLINE void finish_row(const Params& p, Row& row, const Running& run, const Accumulator& acc,
                       int tid) {
  const int lane = tid & 31;
  sync_teams();  // nobody has queries to take from scratch any more
  const uint2 parts = load_shared2(SHARED_BASE + KEPT_OFFSET);
  row.first_part = parts.x, row.num_parts = parts.y;
  merge_warps(run, acc, tid);
  if (row.part != row.first_part) return write_part(p, row, tid);
  const bool is_shared = row.num_parts > 1;
  if (is_shared) {
    merge_parts(p, row, tid);
    sync_teams();
  }
  for (int query = tid / 32; query < COLUMNS; query += WARPS) {
    float v[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
      v[i] = load_shared_float(result_at(query * HEAD_DIM + lane + 32 * i));
    const float lse2 = load_shared_float(stat_at(is_shared ? 2 : 0) + query * 4);
    if (p.unrotate) hadamard(v, lane);
    merge_query(p, row, query, v, lse2, lane);
  }
}
