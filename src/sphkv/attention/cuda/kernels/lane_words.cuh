// SPDX-License-Identifier: Apache-2.0
// A stream of COUNT words per lane and tile. Chunks of 4, then 2, then 1 words of a lane are
// adjacent, so that a tile is read with the widest loads and no bank conflict.
#pragma once
#include "ptx.cuh"

template <int COUNT>
struct LaneWords {
  static constexpr int FULL = COUNT / 4 * 4;

  // Words CHUNK * 4 ... of the stream at `tile`; entries past COUNT are not written.
  template <int CHUNK>
  static INLINE void load_chunk(uint32_t (&x)[4], uint32_t tile, int lane) {
    constexpr int FIRST = 4 * CHUNK;
    constexpr int LEFT = COUNT - FIRST;
    if constexpr (LEFT >= 4) {
      const uint4 v = load_shared4(tile + FIRST * 128 + lane * 16);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      if constexpr (LEFT >= 2) {
        const uint2 v = load_shared2(tile + FIRST * 128 + lane * 8);
        x[0] = v.x, x[1] = v.y;
      }
      if constexpr (LEFT % 2 == 1)
        x[LEFT - 1] = load_shared(tile + (COUNT - 1) * 128 + lane * 4);
    }
  }

  static constexpr int CHUNKS = (COUNT + 3) / 4;

  // Byte of a tile where a word of a lane lies.
  static INLINE int offset(int word, int lane) {
    if (word < FULL) return word / 4 * 512 + lane * 16 + word % 4 * 4;
    if (COUNT - FULL >= 2 && word < FULL + 2) return FULL * 128 + lane * 8 + word % 2 * 4;
    return (COUNT - 1) * 128 + lane * 4;
  }

  static INLINE void store(const uint32_t (&x)[COUNT], uint8_t* tile, int lane) {
    constexpr int LEFT = COUNT - FULL;
#pragma unroll
    for (int w = 0; w < FULL; w += 4)
      *(uint4*)(tile + offset(w, lane)) = {x[w], x[w + 1], x[w + 2], x[w + 3]};
    if constexpr (LEFT >= 2) *(uint2*)(tile + offset(FULL, lane)) = {x[FULL], x[FULL + 1]};
    if constexpr (LEFT % 2 == 1) *(uint32_t*)(tile + offset(COUNT - 1, lane)) = x[COUNT - 1];
  }
};
