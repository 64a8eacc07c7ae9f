// SPDX-License-Identifier: Apache-2.0
// Sizes, parameters and tables of the encoder, and bytes that are affine over a page.
#pragma once
#include "page_format.cuh"
#include "ptx.cuh"

constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int SLOTS = SPHKV_SLOTS;
constexpr int VALUE_BITS = SPHKV_VALUE_BITS;
constexpr int POSITIONS = SPHKV_POSITIONS;  // 0: one base, 1: one per 16 states, 2: one per state

constexpr int WARPS = SPHKV_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int PAGE = SPHKV_PAGE_TOKENS;  // 64 or 128
constexpr int TILE = 16;                 // states of a warp, as long as there are any
constexpr int PLANES = HEAD_DIM / 2;
constexpr int LEVELS = 16;

using Streams = PageStreams<PAGE, HEAD_DIM, SLOTS, VALUE_BITS, POSITIONS>;
constexpr int KEY_OFFSET = Streams::KEYS;
constexpr int GAIN_OFFSET = Streams::RADII;
constexpr int VALUE_OFFSET = Streams::VALUES;
constexpr int POSITION_OFFSET = Streams::PLACES;
constexpr int POSITION_WORDS = Streams::NUM_PLACES;
constexpr int PAYLOAD_END = Streams::END;
constexpr int PAGE_BYTES = Streams::BYTES;

#define INFINITE __int_as_float(0x7f800000)

struct Plane {
  uint16_t row[2];               // where its channels begin in shared memory, see search_tables.py
  uint16_t slot;                 // its first single slot
  uint8_t singles, grid;         // how many it has; its search grid, if points are added
  uint32_t turn_low, turn_high;  // turns per position in units of 2^-64
  float4 root;                   // what queries make of the plane
  float4 place;                  // of a grid: low ends and cells per unit; without bits: the constant
};

struct Slots {
  // One slot of a plane: x and y of every level, for `nearest`; points that are added: as queries
  // see them, x and y side by side; a pair of planes: a half for each, x, y and bias of four levels,
  // or four points behind one slot. 128 bytes each, so that offsets of points can be OR-ed to an
  // address.
  float table[SLOTS][2 * LEVELS];
  float bias[SLOTS][LEVELS];    // of one slot; in the first of two the centre of what follows them
  float2 point[SLOTS][LEVELS];  // as stored; a pair: four levels of each plane
};
static_assert(sizeof(Slots) == 320 * SLOTS && sizeof(Plane) == 48, "search_tables.py knows them");

struct EncodeParams {
  const uint16_t* keys;        // [rows][PAGE][HEAD_DIM] bfloat16 after rotary embedding
  const uint16_t* values;      // the same
  const long long* positions;  // [rows][PAGE]
  const long long* counts;     // [rows]
  const long long* heads;      // [rows]
  const uint8_t* flags;        // [rows][PAGE]
  uint8_t* pages;              // [rows][PAGE_BYTES]
  const int* kinds;            // [heads][5] planes of 12, 8, 4 bits, pair slots, bare planes
  const Plane* planes;         // [heads][PLANES] in this order
  const Slots* slots;          // [heads]
  const uint16_t* places;      // [heads][SLOTS] where codes go in shared memory
  const uint2* grid;           // [heads][most_joint][GRID * GRID] candidates
  const uint4* weights;        // [CELLS / 32][3][32] of clipping ratios, as lanes need them
  uint32_t header[12];
  int most_joint;
  float read_gain;
};

INLINE float bfloat_low(uint32_t pair) { return __uint_as_float(pair << 16); }
INLINE float bfloat_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Where a byte of a state's radius (0) or scale (1) lies.
INLINE int gain_offset(int state, int kind) {
  return GAIN_OFFSET + (state / 16 * 8 + state % 8) * 4 + 2 * kind + state % 16 / 8;
}

// Four words of four bytes, transposed.
INLINE void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410), x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410), x[3] = __byte_perm(c, d, 0x7632);
}

struct Affine {
  float low, step, inverse;

  // Over what all threads of a block give; `edge` is scratch that nobody else reads.
  INLINE Affine(float (&edge)[2][WARPS], float least, float most, int tid) {
    least = -warp_max(-least), most = warp_max(most);
    if (tid % 32 == 0) edge[0][tid / 32] = least, edge[1][tid / 32] = most;
    __syncthreads();
    low = edge[0][0];
    float high = edge[1][0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) low = fminf(low, edge[0][w]), high = fmaxf(high, edge[1][w]);
    step = (float)(((double)high - (double)low) / 255.0);
    inverse = step > 0.f ? 1.f / step : 0.f;
  }

  INLINE float value(float code) const { return low + step * code; }

  INLINE float code(float x) const {
    return fminf(fmaxf(floorf((x - low) * inverse + 0.5f), 0.f), 255.f);
  }
};
