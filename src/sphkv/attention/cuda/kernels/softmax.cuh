// SPDX-License-Identifier: Apache-2.0
// From logits to weights, with a running maximum that moves only when it must.
#pragma once
#include "layout.cuh"
#include "values.cuh"

// Of one lane: columns 2t and 2t + 1. The sums cover this lane's keys only.
struct Running {
  float most[2];    // largest logit so far, give or take MAX_LAG; the same in all lanes of a column
  float mass[2];    // sum of weights
  float scaled[2];  // sum of weights times value scales, for the codes' midpoint
};

constexpr float NO_LOGIT = -1e30f;
constexpr float MAX_LAG = 8.f;  // weights stay below 2^8, far from the largest half

INLINE void reset(Running& run, Accumulator& acc) {
#pragma unroll
  for (int c = 0; c < 2; c++) run.most[c] = NO_LOGIT, run.mass[c] = 0.f, run.scaled[c] = 0.f;
#pragma unroll
  for (int j = 0; j < VALUE_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) acc.o[j][k] = 0.f;
}

// Lanes that hold the same column: all g, and with shared columns also the other tile's lanes.
constexpr int FIRST_PEER = SHARED_COLUMNS ? 2 : 4;

INLINE float peer_max(float x) {
#pragma unroll
  for (int k = FIRST_PEER; k < 32; k *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, k));
  return x;
}

INLINE float peer_sum(float x) {
#pragma unroll
  for (int k = FIRST_PEER; k < 32; k *= 2) x += __shfl_xor_sync(ALL_LANES, x, k);
  return x;
}

// Logits of a lane: keys g and g + 8, columns 2t and 2t + 1, as products dot * radius.
struct Logits {
  float dot[TILE_SETS][4];
  float radius[TILE_SETS][2];
};

// Logits relative to the running maximum.
struct Above {
  float at[TILE_SETS][4];

  INLINE void take(const Logits& logits, const Running& run) {
#pragma unroll
    for (int u = 0; u < TILE_SETS; u++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        at[u][k] = fmaf(logits.dot[u][k], logits.radius[u][k / 2], -run.most[k & 1]);
  }

  INLINE bool is_too_high() const {
    float top = at[0][0];
#pragma unroll
    for (int u = 0; u < TILE_SETS; u++)
#pragma unroll
      for (int k = 0; k < 4; k++) top = fmaxf(top, at[u][k]);
    return top > MAX_LAG;
  }
};

// Move the maximum up to the new logits and bring all sums to it.
INLINE void raise_maximum(const Logits& logits, Running& run, Accumulator& acc) {
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float top = NO_LOGIT;
#pragma unroll
    for (int u = 0; u < TILE_SETS; u++)
      top = fmaxf(top, fmaxf(logits.dot[u][c] * logits.radius[u][0],
                             logits.dot[u][c + 2] * logits.radius[u][1]));
    top = fmaxf(peer_max(top), run.most[c]);
    const float shrink = exp2_fast(run.most[c] - top);
    run.most[c] = top;
    run.mass[c] *= shrink;
    run.scaled[c] *= shrink;
#pragma unroll
    for (int j = 0; j < VALUE_TILES; j++) acc.o[j][c] *= shrink, acc.o[j][c + 2] *= shrink;
  }
}

// Bounded logit: cap * tanh(x / cap); tanh.approx would be too coarse.
INLINE float soft_cap(float x, float cap) {
  const float e = exp2_fast(__fdividef(x, cap) * 2.88539008f);
  return cap * (1.f - __fdividef(2.f, 1.f + e));
}
