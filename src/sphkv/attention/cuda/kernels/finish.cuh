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
  int part;      // slot of this block's partial result
  int first_part, num_parts;  // those of all blocks that share this row
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

// Parts of a row tell by themselves that they are there: between launches every word is EMPTY, and
// no number is written as that. So no block needs a fence or a counter, which take as long as a short
// list. A warp writes and reads 32 dimensions of a query, with a copy of the log-sum-exp beside them.
INLINE uint32_t part_word(float x) { return min(__float_as_uint(x), EMPTY - 1); }

struct PartPlace {
  uint32_t *out, *lse;  // of part 0; the others follow PART_WORDS and PART_WARPS further
  static constexpr int PART_WORDS = COLUMNS * HEAD_DIM;
  static constexpr int PART_WARPS = PART_WORDS / 32;

  // `x`: query * HEAD_DIM + dimension.
  INLINE PartPlace(const Params& p, const Row& row, int part, int x) {
    const uint64_t at = (uint64_t)(row.head * p.blocks + row.block) * (p.batch + p.ctas) + part;
    out = p.part_out + at * PART_WORDS + x;
    lse = p.part_lse + at * PART_WARPS + x / 32;
  }

  // The place `words` dimensions further, a multiple of 32.
  INLINE PartPlace further(int words) const {
    PartPlace place = *this;
    place.out += words, place.lse += words / 32;
    return place;
  }
};

INLINE uint32_t result_at(int x) { return SHARED_BASE + RESULT_OFFSET + x * 4; }

// This block's share of a row, for the row's first block.
INLINE void write_part(const Params& p, const Row& row, int tid) {
  for (int x = tid; x < PartPlace::PART_WORDS; x += THREADS) {
    const PartPlace place(p, row, row.part, x);
    store_device(place.out, part_word(load_shared_float(result_at(x))));
    if (tid % 32 == 0)
      store_device(place.lse, part_word(load_shared_float(stat_at(0) + x / HEAD_DIM * 4)));
  }
}

// Some of a row's parts: one dimension of each, and in lane k the log-sum-exp of part k.
struct Parts {
  static constexpr int MERGED = 16;  // at a time, so that many loads are on their way together
  uint32_t out[MERGED], lse;

  INLINE Parts() {
    lse = EMPTY;
#pragma unroll
    for (int k = 0; k < MERGED; k++) out[k] = EMPTY;
  }

  // Words that were there already are not read again. Past the last part stands the last one.
  INLINE void load(const PartPlace& from, int last, int lane) {
    fill_from_device(lse, from.lse + min(lane, last) * PartPlace::PART_WARPS);
#pragma unroll
    for (int k = 0; k < MERGED; k++)
      fill_from_device(out[k], from.out + min(k, last) * PartPlace::PART_WORDS);
  }

  INLINE bool is_there() const {
    uint32_t top = lse;
#pragma unroll
    for (int k = 0; k < MERGED; k++) top = max(top, out[k]);
    return top != EMPTY;
  }
};

// One dimension of a query, over all parts so far.
struct Merged {
  float most, mass, sum;

  INLINE Merged() {}
  INLINE Merged(float lse2, float x) {
    most = fmaxf(lse2, NO_LOGIT), mass = exp2_fast(lse2 - most), sum = mass * x;
  }

  INLINE void add(const Parts& parts, int last, int lane) {
    const float lse = lane <= last ? __uint_as_float(parts.lse) : MINUS_INFINITY;
    const float top = fmaxf(most, warp_max(lse)), shrink = exp2_fast(most - top);
    const float factor = exp2_fast(lse - top);
    most = top;
    mass = mass * shrink + warp_sum(factor);
    sum *= shrink;
#pragma unroll
    for (int k = 0; k < Parts::MERGED; k++)
      sum += __shfl_sync(ALL_LANES, factor, k) * __uint_as_float(parts.out[k]);
  }
};

// Adds what the row's other blocks have written to what this one has, a thread per dimension, or two
// where there are so many. The log-sum-exp of all goes to the third stat.
INLINE void merge_parts(const Params& p, const Row& row, int tid) {
  constexpr int WIDTH = PartPlace::PART_WORDS % (2 * THREADS) ? 1 : 2;
  const int lane = tid & 31;
  for (int first = tid; first < PartPlace::PART_WORDS; first += WIDTH * THREADS) {
    Merged merged[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const int x = first + i * THREADS;
      merged[i] = Merged(load_shared_float(stat_at(0) + x / HEAD_DIM * 4),
                         load_shared_float(result_at(x)));
    }
    for (int s = 1; s < row.num_parts; s += Parts::MERGED) {
      const PartPlace from(p, row, row.first_part + s, first);
      const int last = min(Parts::MERGED, row.num_parts - s) - 1;
      Parts parts[WIDTH];
      bool is_there;
      do {
        is_there = true;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) parts[i].load(from.further(i * THREADS), last, lane);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) is_there = is_there && parts[i].is_there();
      } while (!__all_sync(ALL_LANES, is_there));
#pragma unroll
      for (int i = 0; i < WIDTH; i++) merged[i].add(parts[i], last, lane);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const int x = first + i * THREADS;
      const float mass = merged[i].mass;
      store_shared_float(result_at(x), mass > 0.f ? merged[i].sum / mass : 0.f);
      if (x % HEAD_DIM == 0)
        store_shared_float(stat_at(2) + x / HEAD_DIM * 4,
                           mass > 0.f ? merged[i].most + log2_fast(mass) : MINUS_INFINITY);
    }
  }
}

// Leaves the parts as the next launch must find them. Every thread clears what it has read.
INLINE void clear_parts(const Params& p, const Row& row, int tid) {
  for (int x = tid; x < PartPlace::PART_WORDS; x += THREADS) {
    PartPlace place(p, row, row.first_part + 1, x);
#pragma unroll 1
    for (int k = 1; k < row.num_parts; k++) {
      store_device(place.out, EMPTY);
      if (tid % 32 == 0) store_device(place.lse, EMPTY);
      place.out += PartPlace::PART_WORDS, place.lse += PartPlace::PART_WARPS;
    }
  }
}

// All threads of the teams call this when the row's pages of this block are done. A row's first block
// comes to it after its other rows, so that it is the one that waits.
INLINE void finish_row(const Params& p, Row& row, const Running& run, const Accumulator& acc,
                       int tid) {
  const int lane = tid & 31, query = tid / 32;
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
  if (query < COLUMNS) {
    float v[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
      v[i] = load_shared_float(result_at(query * HEAD_DIM + lane + 32 * i));
    const float lse2 = load_shared_float(stat_at(is_shared ? 2 : 0) + query * 4);
    write_query(p, row, query, v, lse2, lane);
  }
  if (is_shared) clear_parts(p, row, tid);
}
