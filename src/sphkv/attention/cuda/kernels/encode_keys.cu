// SPDX-License-Identifier: Apache-2.0
// Dense keys to their part of pages in fragment order, and the header. A block encodes a page
// of one head. See docs/gpu-transformers.md, section 3.
#include "encode_keys.cuh"

// All but the range of the steps, which is known to the other kernel.
INLINE void write_header(const EncodeParams& p, uint8_t* page, long long row, int count,
                         const Affine& radius, int tid) {
  const long long* positions = p.positions + row * PAGE;
  uint32_t* words = (uint32_t*)page;
  if (tid < ROOM) {
    const bool is_flagged = tid < min(count, PAGE) && p.flags[row * PAGE + tid];
    const uint32_t bits = __ballot_sync(ALL_LANES, is_flagged);
    if (tid % 32 == 0) words[FLAGS_OFFSET / 4 + tid / 32] = bits;
  }
  if (tid < FLAGS_OFFSET / 4 && tid != SCALE_LOW_OFFSET / 4 && tid != SCALE_STEP_OFFSET / 4) {
    uint32_t word = p.header[tid];
    if (tid == COUNT_OFFSET / 4) word |= (uint32_t)count;
    if (tid == POSITION_BASE_OFFSET / 4) word = count > 0 ? (uint32_t)positions[0] : 0u;
    if (tid == RADIUS_LOW_OFFSET / 4) word = __float_as_uint(radius.low);
    if (tid == RADIUS_STEP_OFFSET / 4) word = __float_as_uint(radius.step);
    words[tid] = word;
  }
  constexpr int SPACING = POSITIONS == 1 ? 16 : 1;
  uint32_t* to = (uint32_t*)(page + POSITION_OFFSET);
  for (int w = tid; w < (PAGE_BYTES - POSITION_OFFSET) / 4; w += THREADS) {
    const int state = w * SPACING;
    to[w] = w < POSITION_WORDS && state < count ? (uint32_t)positions[state] : 0u;
  }
}

static_assert(sizeof(KeyMemory) == SPHKV_SHARED_BYTES, "encode.py asks for it");

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    sphkv_encode_keys(const __grid_constant__ EncodeParams p) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  start_dependents();
  const long long row = blockIdx.x;
  const int tid = threadIdx.x, count = (int)p.counts[row];
  uint8_t* page = p.pages + row * PAGE_BYTES;
  KeyMemory& m = *(KeyMemory*)shared_memory;
  const Affine radius = encode_keys(p, m, page, row, (int)p.heads[row], count, tid);
  write_header(p, page, row, count, radius, tid);
}
