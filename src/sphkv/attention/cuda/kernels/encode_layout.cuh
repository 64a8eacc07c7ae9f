// SPDX-License-Identifier: Apache-2.0
// Sizes, parameters and shared memory of the encoder, and bytes that are affine over a page.
#pragma once
#include "ptx.cuh"

constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int SLOTS = SPHKV_SLOTS;
constexpr int VALUE_BITS = SPHKV_VALUE_BITS;
constexpr int POSITIONS = SPHKV_POSITIONS;  // 0: one base, 1: one per 16 states, 2: one per state
constexpr int RATIOS = SPHKV_RATIOS;        // clipping ratios tried for a value
constexpr int REFINEMENTS = SPHKV_REFINEMENTS;

constexpr int THREADS = 256;
constexpr int PAGE = 128;
constexpr int PLANES = HEAD_DIM / 2;
constexpr int LEVELS = 16;
constexpr int GRID = 32;        // cells of a search grid along each axis

constexpr int KEY_OFFSET = 64;
constexpr int RADIUS_OFFSET = KEY_OFFSET + SLOTS * PAGE / 2;
constexpr int SCALE_OFFSET = RADIUS_OFFSET + PAGE;
constexpr int VALUE_OFFSET = SCALE_OFFSET + PAGE;
constexpr int POSITION_OFFSET = VALUE_OFFSET + PAGE * HEAD_DIM * VALUE_BITS / 8;
constexpr int POSITION_WORDS = POSITIONS == 0 ? 0 : POSITIONS == 1 ? PAGE / 16 : PAGE;
constexpr int PAYLOAD_END = POSITION_OFFSET + 4 * POSITION_WORDS;
constexpr int PAGE_BYTES = (PAYLOAD_END + 63) / 64 * 64;

constexpr float LEAST_COSINE = 0.2f;  // below it the radius only keeps the norm
constexpr float TINY = 1.17549435e-38f;
constexpr float RADIANS = 1.46291808e-9f;  // 2 pi / 2^32

struct EncodeParams {
  const uint16_t* keys;          // [rows][PAGE][HEAD_DIM] bfloat16 after rotary embedding
  const uint16_t* values;        // the same
  const long long* positions;    // [rows][PAGE]
  const long long* counts;       // [rows]
  const long long* heads;        // [rows]
  const uint8_t* flags;          // [rows][PAGE]
  uint8_t* pages;                // [rows][PAGE_BYTES]
  const int* kinds;              // [heads][5] planes of 12, 8, 4 bits, pair slots, bare planes
  const int* planes;             // [heads][PLANES][3] number and channels, by falling bits
  const float* roots;            // [heads][PLANES][4]
  const float2* seen;            // [heads][SLOTS][2][LEVELS] points as queries see them
  const float2* points;          // the same as stored
  const float2* constants;       // [heads][PLANES]
  const uint64_t* turns;         // [PLANES] turns per position in units of 2^-64
  const uint4* grid;             // [heads][most_joint][GRID * GRID] candidates, nearest first
  const float4* boxes;           // [heads][most_joint] low ends and cells per unit
  uint32_t header[16];
  int most_joint;
  float first_ratio, last_ratio, read_gain;
};

struct Memory {
  uint16_t key[HEAD_DIM][PAGE];
  float2 seen[SLOTS][2][LEVELS];
  uint8_t code[SLOTS][PAGE];
  float sum[2][3][PAGE];  // by half: square, cosine, length
  float scalar[PAGE];     // radius, then value step
  float edge[2][4];       // extremes by warp
};
constexpr int VALUE_ROW = HEAD_DIM + 4;  // value codes of a state, padded against bank conflicts
static_assert(PAGE * VALUE_ROW <= HEAD_DIM * PAGE * 2, "value codes take the place of the keys");

INLINE float bfloat(uint32_t bits) { return __uint_as_float(bits << 16); }

struct Affine {
  float low, step, inverse;

  // Over the live states of the page; the first 128 threads hold one each, all threads call it.
  INLINE Affine(Memory& m, float x, bool is_live, int tid) {
    float least = is_live ? x : __int_as_float(0x7f800000), most = is_live ? x : MINUS_INFINITY;
#pragma unroll
    for (int k = 1; k < 32; k *= 2) {
      least = fminf(least, __shfl_xor_sync(ALL_LANES, least, k));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, k));
    }
    __syncthreads();
    if (tid < PAGE && tid % 32 == 0) m.edge[0][tid / 32] = least, m.edge[1][tid / 32] = most;
    __syncthreads();
    low = fminf(fminf(m.edge[0][0], m.edge[0][1]), fminf(m.edge[0][2], m.edge[0][3]));
    const float high = fmaxf(fmaxf(m.edge[1][0], m.edge[1][1]), fmaxf(m.edge[1][2], m.edge[1][3]));
    step = (float)(((double)high - (double)low) / 255.0);
    inverse = step > 0.f ? 1.f / step : 0.f;
  }

  INLINE float code(float x) const {
    return fminf(fmaxf(floorf((x - low) * inverse + 0.5f), 0.f), 255.f);
  }
};
