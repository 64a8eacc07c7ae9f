// SPDX-License-Identifier: Apache-2.0
// Parts of a decode step that several launches attend to, made one. A warp merges one query. It begins
// beside the launches that write the parts, and takes them as they come: the end of a launch would be
// known microseconds later. What it has read it leaves EMPTY, as the next step must find it. Its own end
// does not say that theirs has come: they may still be leaving, after what they wrote, none of which is
// written again before the layer's products are done.
#include "told.cuh"

constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int MOST_PARTS = SPHKV_MOST_PARTS;
constexpr int PAIRS = HEAD_DIM / 64;  // of dimensions that a lane has
constexpr int WARPS = 4;
constexpr float LN2 = 0.69314718f;
constexpr float LOG2E = 1.44269504f;
constexpr float NO_LOGIT = -1e30f;

struct MergeParams {
  uint32_t* part_out;  // [parts][queries][HEAD_DIM] float
  uint32_t* part_lse;  // [parts][queries]
  const float* sinks;  // [heads] or null
  void* out;           // [queries][HEAD_DIM] float or bfloat16
  float* lse;          // [queries]
  int parts;           // at most MOST_PARTS
  int queries;         // of all sequences
  int heads;
  int out_is_bf16;
};

// What the launches found for one query: of a part its log-sum-exp, and this lane's dimensions. Parts
// past the last one are there from the start, and weigh nothing.
struct QueryParts {
  uint32_t lse[MOST_PARTS];
  uint2 out[MOST_PARTS][PAIRS];

  // Returns when all are there, and leaves their places empty.
  INLINE QueryParts(const MergeParams& p, int query, int lane) {
#pragma unroll
    for (int k = 0; k < MOST_PARTS; k++) {
      lse[k] = k < p.parts ? EMPTY : __float_as_uint(MINUS_INFINITY);
#pragma unroll
      for (int i = 0; i < PAIRS; i++) out[k][i].x = out[k][i].y = k < p.parts ? EMPTY : 0u;
    }
    // what is not there is asked for by one word of a part, or many warps would keep memory busy
    const uint32_t* mine = lse_at(p, min(lane, p.parts - 1), query);
    for (uint32_t word = EMPTY;; pause()) {
      fill_from_device(word, mine);
      if (!__any_sync(ALL_LANES, word == EMPTY)) break;
    }
    uint32_t top;
    do {
      top = 0u;
#pragma unroll
      for (int k = 0; k < MOST_PARTS; k++) {
        fill_from_device(lse[k], lse_at(p, k, query));
#pragma unroll
        for (int i = 0; i < PAIRS; i++) fill_from_device2(out[k][i], out_at(p, k, query, i, lane));
      }
#pragma unroll
      for (int k = 0; k < MOST_PARTS; k++) {
        top = max(top, lse[k]);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) top = max(top, max(out[k][i].x, out[k][i].y));
      }
    } while (__any_sync(ALL_LANES, top == EMPTY));
#pragma unroll
    for (int k = 0; k < MOST_PARTS; k++) {
      if (k >= p.parts) continue;
      if (lane == 0) store_device(lse_at(p, k, query), EMPTY);
#pragma unroll
      for (int i = 0; i < PAIRS; i++) store_device2(out_at(p, k, query, i, lane), EMPTY, EMPTY);
    }
  }

  static INLINE uint32_t* lse_at(const MergeParams& p, int part, int query) {
    return p.part_lse + (uint64_t)part * p.queries + query;
  }
  static INLINE uint32_t* out_at(const MergeParams& p, int part, int query, int pair, int lane) {
    return p.part_out + ((uint64_t)part * p.queries + query) * HEAD_DIM + 64 * pair + 2 * lane;
  }
};

INLINE void write_pair(const MergeParams& p, uint64_t at, float a, float b) {
  if (p.out_is_bf16) {
    *(uint32_t*)((uint16_t*)p.out + at) = pack_bfloat2(a, b);
  } else {
    ((float*)p.out)[at] = a;
    ((float*)p.out)[at + 1] = b;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    sphkv_merge(const __grid_constant__ MergeParams p) {
  start_dependents();
  const int lane = threadIdx.x & 31, query = blockIdx.x * WARPS + threadIdx.x / 32;
  if (query >= p.queries) return;
  const float sink = p.sinks ? p.sinks[query % p.heads] * LOG2E : MINUS_INFINITY;
  const QueryParts parts(p, query, lane);
  float top = fmaxf(sink, NO_LOGIT), mass = 0.f, weight[MOST_PARTS];
#pragma unroll
  for (int k = 0; k < MOST_PARTS; k++) top = fmaxf(top, __uint_as_float(parts.lse[k]) * LOG2E);
#pragma unroll
  for (int k = 0; k < MOST_PARTS; k++) {
    weight[k] = exp2_fast(__uint_as_float(parts.lse[k]) * LOG2E - top);
    mass += weight[k];
  }
  mass += exp2_fast(sink - top);
  // without any key, as for a part without one: nothing, at minus infinity
  const float inverse = mass > 0.f ? 1.f / mass : 0.f;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int k = 0; k < MOST_PARTS; k++) {
      a += weight[k] * __uint_as_float(parts.out[k][i].x);
      b += weight[k] * __uint_as_float(parts.out[k][i].y);
    }
    write_pair(p, (uint64_t)query * HEAD_DIM + 64 * i + 2 * lane, a * inverse, b * inverse);
  }
  if (lane == 0) p.lse[query] = mass > 0.f ? (top + log2_fast(mass)) * LN2 : MINUS_INFINITY;
}
