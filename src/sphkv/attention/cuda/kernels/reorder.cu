// SPDX-License-Identifier: Apache-2.0
// Token-transposed pages to fragment order, one block per page. docs/gpu.md, section 3, draws both.
#include "page_format.cuh"
#include "ptx.cuh"

constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int SLOTS = SPHKV_SLOTS;
constexpr int BITS = SPHKV_VALUE_BITS;

constexpr int THREADS = 256;
constexpr int PAGE = SPHKV_PAGE_TOKENS;
constexpr int TILE = 16;
constexpr int LANES = 32;

using Streams = PageStreams<PAGE, HEAD_DIM, SLOTS, BITS, 0>;
constexpr int KEY_OFFSET = Streams::KEYS;
constexpr int GAIN_OFFSET = Streams::RADII;
constexpr int VALUE_OFFSET = Streams::VALUES;
constexpr int VALUE_END = Streams::PLACES;

struct ReorderParams {
  const uint8_t* from;  // [pages][page_bytes]
  uint8_t* to;
  int page_bytes;
};

// A word of a stream of COUNT words per lane and tile: which word of which lane it is. Chunks of 4,
// then 2, then 1 words of a lane are adjacent.
template <int COUNT>
struct LanePlace {
  int word, lane;

  INLINE explicit LanePlace(int at) {
    constexpr int FULL = COUNT / 4 * 4, LEFT = COUNT - FULL;
    const int rest = at - FULL * LANES;
    if (rest < 0) {
      lane = at % 128 / 4, word = at / 128 * 4 + at % 4;
    } else if (LEFT >= 2 && rest < 2 * LANES) {
      lane = rest / 2, word = FULL + rest % 2;
    } else {
      lane = rest % LANES, word = COUNT - 1;
    }
  }
};

INLINE uint32_t slot_code(const uint8_t* page, int slot, int token) {
  return page[KEY_OFFSET + slot * (PAGE / 2) + token % (PAGE / 2)] >> (token < PAGE / 2 ? 0 : 4) & 15;
}

INLINE uint32_t key_word(const uint8_t* page, int tile, int word, int lane) {
  const int token = tile * TILE + lane / 4;
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int slot = 16 * word + 4 * i + lane % 4;
    out |= (slot_code(page, slot, token) | slot_code(page, slot, token + 8) << 4) << (8 * i);
  }
  return out;
}

// Code in a stream of WIDTH bits that starts at byte `start`.
template <int WIDTH>
INLINE uint32_t stream_code(const uint8_t* page, int start, int token, int dim) {
  constexpr int BLOCK = 32 / WIDTH;
  const int at = start + (token / BLOCK * HEAD_DIM + dim) * 4 + token % 4;
  return page[at] >> (token % BLOCK / 4 * WIDTH) & ((1 << WIDTH) - 1);
}

INLINE uint32_t value_code(const uint8_t* page, int token, int dim) {
  if constexpr (BITS == 3)
    return stream_code<2>(page, VALUE_OFFSET, token, dim) |
           stream_code<1>(page, VALUE_OFFSET + PAGE * HEAD_DIM / 4, token, dim) << 2;
  else
    return stream_code<BITS>(page, VALUE_OFFSET, token, dim);
}

// Code of a lane's feature: dimension 8 * feature + g of key 8 * upper + 2 * t + odd.
INLINE uint32_t feature_code(const uint8_t* page, int tile, int lane, int feature, int upper, int odd) {
  return value_code(page, tile * TILE + 8 * upper + 2 * (lane % 4) + odd, 8 * feature + lane / 4);
}

// Three bits: both codes of two features and one code of a third in 15 bits of a half; the 16th
// bits of three words make up one more.
INLINE uint32_t three_bit_half(const uint8_t* page, int tile, int word, int lane, int odd) {
  constexpr int WORDS = HEAD_DIM * 3 / 64;
  uint32_t half = 0;
#pragma unroll
  for (int upper = 0; upper < 2; upper++) {
    half |= feature_code(page, tile, lane, word, upper, odd) << (9 * upper);
    half |= feature_code(page, tile, lane, WORDS + word, upper, odd) << (3 + 9 * upper);
  }
  const int last = WORDS + word / 3;
  half |= feature_code(page, tile, lane, 2 * WORDS + word / 2, word % 2, odd) << 6;
  const uint32_t spread = feature_code(page, tile, lane, 2 * WORDS + last / 2, last % 2, odd);
  return half | (spread >> word % 3 & 1) << 15;
}

INLINE uint32_t value_word(const uint8_t* page, int tile, int word, int lane) {
  uint32_t out = 0;
  if constexpr (BITS == 3) {
    out = three_bit_half(page, tile, word, lane, 0) | three_bit_half(page, tile, word, lane, 1) << 16;
  } else {
    constexpr int PER_BYTE = 8 / BITS;
#pragma unroll
    for (int byte = 0; byte < 4; byte++)
#pragma unroll
      for (int k = 0; k < PER_BYTE; k++)
        out |= feature_code(page, tile, lane, word * PER_BYTE + k, byte % 2, byte / 2)
               << (8 * byte + k * BITS);
  }
  return out;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sphkv_reorder(const __grid_constant__ ReorderParams p) {
  extern __shared__ __align__(16) uint8_t page[];
  const uint8_t* from = p.from + (uint64_t)blockIdx.x * p.page_bytes;
  uint8_t* to = p.to + (uint64_t)blockIdx.x * p.page_bytes;
  for (int x = threadIdx.x; x < p.page_bytes / 16; x += THREADS)
    ((uint4*)page)[x] = __ldg((const uint4*)from + x);
  __syncthreads();
  constexpr int KEY_WORDS = SLOTS / 16, VALUE_WORDS = HEAD_DIM * BITS / 64;
  for (int x = threadIdx.x; x < p.page_bytes / 4; x += THREADS) {
    const int at = 4 * x;
    uint32_t word = ((const uint32_t*)page)[x];  // header and positions stay as they are
    if (at >= KEY_OFFSET && at < GAIN_OFFSET) {
      const int in_stream = x - KEY_OFFSET / 4;
      const LanePlace<KEY_WORDS> place(in_stream % (KEY_WORDS * LANES));
      word = key_word(page, in_stream / (KEY_WORDS * LANES), place.word, place.lane);
    } else if (at >= GAIN_OFFSET && at < VALUE_OFFSET) {
      const uint8_t* radius = page + GAIN_OFFSET + (x - GAIN_OFFSET / 4) / 8 * TILE;
      const int g = (x - GAIN_OFFSET / 4) % 8;
      word = radius[g] | radius[g + 8] << 8 | radius[PAGE + g] << 16 |
             (uint32_t)radius[PAGE + g + 8] << 24;
    } else if (at >= VALUE_OFFSET && at < VALUE_END) {
      const int in_stream = x - VALUE_OFFSET / 4;
      const LanePlace<VALUE_WORDS> place(in_stream % (VALUE_WORDS * LANES));
      word = value_word(page, in_stream / (VALUE_WORDS * LANES), place.word, place.lane);
    }
    ((uint32_t*)to)[x] = word;
  }
}
