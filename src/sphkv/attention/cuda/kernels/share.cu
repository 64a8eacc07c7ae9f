// SPDX-License-Identifier: Apache-2.0
// What the thread blocks of several launches have, found when their lists change. A warp finds one block's.
#include "block_share.cuh"

constexpr int WARPS = 4;

struct Launch {
  Sharing sharing;
  int* shares;  // [ctas] of 12 words, see BlockShare
};

struct ShareParams {
  const Launch* launches;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    sphkv_share(const __grid_constant__ ShareParams p) {
  const Launch launch = p.launches[blockIdx.y];
  const int block = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (block >= launch.sharing.ctas) return;
  const BlockShare share(launch.sharing, block, lane);
  if (lane == 0) share.store(launch.shares, block);
}
