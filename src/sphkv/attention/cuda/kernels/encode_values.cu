// SPDX-License-Identifier: Apache-2.0
// Dense values to their part of pages in fragment order. A block encodes a page of one
// head. See docs/gpu-transformers.md, section 3.
#include "encode_values.cuh"

static_assert(sizeof(ValueMemory) == SPHKV_SHARED_BYTES, "encode.py asks for it");

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    sphkv_encode_values(const __grid_constant__ EncodeParams p) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  const long long row = blockIdx.x;
  const int tid = threadIdx.x;
  uint8_t* page = p.pages + row * PAGE_BYTES;
  ValueMemory& m = *(ValueMemory*)shared_memory;
  const Affine scale = encode_values(p, m, page, row, tid);
  if (tid == 0) ((float*)page)[SCALE_LOW_OFFSET / 4] = scale.low * p.read_gain;
  if (tid == 1) ((float*)page)[SCALE_STEP_OFFSET / 4] = scale.step * p.read_gain;
  // whoever waits for this kernel means the keys too
  wait_for_previous();
}
