// SPDX-License-Identifier: Apache-2.0
// End of a row (one sequence of one head): merge warps, then blocks, then write the output.
#pragma once
#include "layout.cuh"
#include "softmax.cuh"

constexpr int LANE_DIMS = HEAD_DIM / 32;
constexpr float LN2 = 0.69314718f;
constexpr float LOG2E = 1.44269504f;

// Which part of the work a block has: pages first ... first + total of one head.
struct Row {
  int index;     // sequence
  int head;      // KV head
  int block;     // which COLUMNS query heads of the group
  int num_parts; // thread blocks that share this row
  int part;      // slot of this block's partial result
  int first_part;
};

CONSTANT_FUNCTION int stat_at(int kind) { return SHARED_BASE + RESULT_OFFSET + COLUMNS * HEAD_DIM * 4 + kind * STAT_BYTES; }

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
  const int lane = tid & 31, query = tid / 32;
  if (query >= COLUMNS) return;
  // a warp has one query, its lanes one warp each
  const uint32_t at = (min(lane, WARPS - 1) * COLUMNS + query) * 4;
  const bool is_live = lane < WARPS;
  const float most = is_live ? load_shared_float(at + stat_at(0)) : NO_LOGIT;
  const float top = warp_max(most), factor = exp2_fast(most - top);
  const float mass = warp_sum(is_live ? factor * load_shared_float(at + stat_at(1)) : 0.f);
  const float scaled = warp_sum(is_live ? factor * load_shared_float(at + stat_at(2)) : 0.f);
  const float inverse = mass > 0.f ? 1.f / mass : 0.f;
  if (is_live) store_shared_float(at + stat_at(3), factor * inverse);
  if (lane == 0) {
    store_shared_float(stat_at(0) + query * 4, mass > 0.f ? top + log2_fast(mass) : MINUS_INFINITY);
    store_shared_float(stat_at(1) + query * 4, MIDPOINT * scaled * inverse);
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

// Sum of what the warps have stored, to results[query][dim].
template <int FIRST>
INLINE void add_warps(int tid) {
  for (int x = tid; x < COLUMNS * PASS_DIMS; x += THREADS) {
    const int query = x / PASS_DIMS, dim = x % PASS_DIMS;
    const uint32_t from = SHARED_BASE + SCRATCH_OFFSET + (query * PASS_ROW + dim) * 4;
    float sum = -load_shared_float(stat_at(1) + query * 4);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      sum += load_shared_float(stat_at(3) + (w * COLUMNS + query) * 4) *
             load_shared_float(from + w * COLUMNS * PASS_ROW * 4);
    store_shared_float(SHARED_BASE + RESULT_OFFSET + (query * HEAD_DIM + FIRST + dim) * 4, sum);
  }
}

// Sums of all warps to results[query][dim], PASS_DIMS dimensions at a time.
template <int FIRST = 0>
INLINE void merge_warps(const Accumulator& acc, int tid) {
  if constexpr (FIRST < HEAD_DIM) {
    store_sums<FIRST>(acc, tid);
    sync_teams();
    if constexpr (FIRST == 0) {
      warp_factors(tid);
      sync_teams();
    }
    add_warps<FIRST>(tid);
    sync_teams();
    merge_warps<FIRST + PASS_DIMS>(acc, tid);
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

// Rotation, other partial, sink, output: one warp writes one query.
INLINE void write_query(const Params& p, const Row& row, int query, float (&v)[LANE_DIMS],
                        float lse2, int lane) {
  const int in_group = row.block * COLUMNS + query;
  if (in_group >= p.group) return;
  const int head = row.head * p.group + in_group;
  const uint64_t at = (uint64_t)row.index * (p.kv_heads * p.group) + head;
  if (p.unrotate) hadamard(v, lane);
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
      ((float*)p.out)[to] = v[i];
  }
  if (lane == 0) p.lse[at] = lse2 * LN2;
}

INLINE uint64_t part_slot(const Params& p, const Row& row, int part) {
  return ((uint64_t)(row.head * p.blocks + row.block) * (p.batch + p.ctas) + part) * COLUMNS;
}

INLINE void write_part(const Params& p, const Row& row, int query, const float (&v)[LANE_DIMS],
                       float lse2, int lane) {
  const uint64_t at = part_slot(p, row, row.part) + query;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) p.part_out[at * HEAD_DIM + lane + 32 * i] = v[i];
  if (lane == 0) p.part_lse[at] = lse2;
}

// The block that arrives last merges what all have written, MERGED parts at a time so that the
// loads of many are on their way together.
INLINE float merge_parts(const Params& p, const Row& row, int query, float (&v)[LANE_DIMS],
                         int lane) {
  constexpr int MERGED = 16;
  const uint64_t first = part_slot(p, row, row.first_part) + query;
  float most = NO_LOGIT, mass = 0.f;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) v[i] = 0.f;
  for (int s = 0; s < row.num_parts; s += MERGED) {
    float lse[MERGED], x[MERGED][LANE_DIMS], top = most;
#pragma unroll
    for (int k = 0; k < MERGED; k++) {
      const uint64_t at = first + (uint64_t)min(s + k, row.num_parts - 1) * COLUMNS;
      lse[k] = __ldcg(p.part_lse + at);
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i++) x[k][i] = __ldcg(p.part_out + at * HEAD_DIM + lane + 32 * i);
    }
#pragma unroll
    for (int k = 0; k < MERGED; k++) top = fmaxf(top, lse[k]);
    const float shrink = exp2_fast(most - top);
    most = top;
    mass *= shrink;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) v[i] *= shrink;
#pragma unroll
    for (int k = 0; k < MERGED; k++) {
      const float f = s + k < row.num_parts ? exp2_fast(lse[k] - top) : 0.f;
      mass += f;
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i++) v[i] += f * x[k][i];
    }
  }
  const float inverse = mass > 0.f ? 1.f / mass : 0.f;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) v[i] *= inverse;
  return mass > 0.f ? most + log2_fast(mass) : MINUS_INFINITY;
}

// All threads of the block call this when the row's pages of this block are done.
INLINE void finish_row(const Params& p, const Row& row, const Running& run,
                       const Accumulator& acc, int tid) {
  const int lane = tid & 31, warp = tid / 32;
  store_stats(run, tid);
  sync_teams();  // nobody has queries to take from scratch any more
  merge_warps(acc, tid);
  float v[LANE_DIMS];
  float lse2 = 0.f;
  if (warp < COLUMNS) {
    lse2 = load_shared_float(stat_at(0) + warp * 4);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
      v[i] = load_shared_float(SHARED_BASE + RESULT_OFFSET + (warp * HEAD_DIM + lane + 32 * i) * 4);
    if (row.num_parts == 1)
      write_query(p, row, warp, v, lse2, lane);
    else
      write_part(p, row, warp, v, lse2, lane);
  }
  if (row.num_parts == 1) return;
  sync_teams();
  if (tid == 0) {
    // the fences of one thread hold for all, which it meets before and after
    uint32_t* counter = p.arrivals + (row.head * p.blocks + row.block) * p.batch + row.index;
    __threadfence();
    const uint32_t arrived = atomicAdd(counter, 1u);
    if (arrived == (uint32_t)row.num_parts - 1u) *counter = 0u;
    __threadfence();
    store_shared(SHARED_BASE + ARRIVED_OFFSET, arrived);
  }
  sync_teams();
  if (load_shared(SHARED_BASE + ARRIVED_OFFSET) != (uint32_t)row.num_parts - 1u) return;
  if (warp < COLUMNS) {
    lse2 = merge_parts(p, row, warp, v, lane);
    write_query(p, row, warp, v, lse2, lane);
  }
}
