// SPDX-License-Identifier: Apache-2.0
// Dense states to the bytes of coded pages, token-transposed as store/layout.py has them. One block
// encodes one page of 128 states of one head. See docs/gpu-transformers.md, section 3.
#include "encode_keys.cuh"
#include "encode_values.cuh"

INLINE void write_header(const EncodeParams& p, uint8_t* page, long long row, int count,
                         const Affine& radius, const Affine& scale, int tid) {
  const long long* positions = p.positions + row * PAGE;
  uint32_t* words = (uint32_t*)page;
  if (tid < PAGE) {
    const bool is_flagged = p.flags[row * PAGE + tid] && tid < count;
    const uint32_t bits = __ballot_sync(ALL_LANES, is_flagged);
    if (tid % 32 == 0) words[12 + tid / 32] = bits;
  }
  if (tid < 12) {
    uint32_t word = p.header[tid];
    if (tid == 1) word |= (uint32_t)count;
    if (tid == 2) word = count > 0 ? (uint32_t)positions[0] : 0u;
    if (tid == 3) word = __float_as_uint(radius.low);
    if (tid == 4) word = __float_as_uint(radius.step);
    if (tid == 5) word = __float_as_uint(scale.low * p.read_gain);
    if (tid == 6) word = __float_as_uint(scale.step * p.read_gain);
    words[tid] = word;
  }
  constexpr int SPACING = POSITIONS == 1 ? 16 : 1;
  uint32_t* to = (uint32_t*)(page + POSITION_OFFSET);
  for (int w = tid; w < (PAGE_BYTES - POSITION_OFFSET) / 4; w += THREADS) {
    const int state = w * SPACING;
    to[w] = w < POSITION_WORDS && state < count ? (uint32_t)positions[state] : 0u;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sphkv_encode(const __grid_constant__ EncodeParams p) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Memory& m = *(Memory*)shared_memory;
  const int tid = threadIdx.x, count = (int)p.counts[blockIdx.x], head = (int)p.heads[blockIdx.x];
  const long long row = blockIdx.x;
  uint8_t* page = p.pages + row * PAGE_BYTES;
  const Affine radius = encode_keys(p, m, page, row, head, count, tid);
  __syncthreads();
  const Affine scale = encode_values(p, m, page, row, count, tid);
  write_header(p, page, row, count, radius, scale, tid);
}
