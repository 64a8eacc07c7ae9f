// SPDX-License-Identifier: Apache-2.0
// The dense part of a decode step: keep the newest state, attend to the open tail and to dense
// pages. Eight warps work on one row (a sequence and KV head), a block on ROWS of them. A decode
// kernel that merges the result may begin at once and waits for it only when it merges; with few rows
// only as many blocks are launched as that kernel leaves multiprocessors free. Of several decode
// kernels none waits: then this one comes behind them, and takes what they leave and what they give back.
#include "page_format.cuh"
#include "told.cuh"

constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int GROUP = SPHKV_GROUP;  // query heads per KV head
constexpr int ROWS = SPHKV_ROWS;    // rows of a block at a time
constexpr int WARPS = 8;            // of a row
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = THREADS / 2;  // states attended at a time, two threads for each
constexpr int DIM_WORDS = HEAD_DIM / 2;
constexpr int BLOCK_DIMS = HEAD_DIM / WARPS;  // dimensions of values that a warp sums
constexpr int BLOCK_LOADS = BLOCK_DIMS / 8;   // of 16 bytes
static_assert(BLOCK_LOADS >= 1, "a warp has no dimension");
constexpr float LN2 = 0.69314718f;
constexpr float NO_LOGIT = -1e30f;

struct DenseParams {
  const uint64_t* tails;      // [sequences][kv_heads][2] addresses of bfloat16 keys and values
  const long long* extents;   // [sequences][2] states of a tail with the newest, first position
  const uint64_t* pages;      // addresses of dense pages, row by row
  const int* page_start;      // [rows + 1] into pages
  const uint32_t* new_keys;   // newest states, two bfloat16 per word
  const uint32_t* new_values;
  const void* query;          // [sequences][kv_heads * GROUP][HEAD_DIM] float or bfloat16
  float* out;                 // the same shape
  float* lse;                 // [sequences][kv_heads * GROUP]
  int key_stride, key_head, value_stride, value_head;  // in words
  int page_tokens, key_offset, value_offset;           // of dense pages, positions contiguous
  int rows, kv_heads;
  int window;                 // 0 for none
  int query_is_bf16;
  float logit_scale;          // times log2(e)
  float softcap;              // times log2(e); 0 for none
};

// Two rows lie side by side, and queries are read in 16 bytes.
struct __align__(16) Memory {
  float query[GROUP][HEAD_DIM];
  float weight[GROUP][CHUNK];
  float result[GROUP][HEAD_DIM];
  float most[GROUP], mass[GROUP], shrink[GROUP];
};
static_assert(sizeof(Memory) % 16 == 0, "queries of the second row would not be aligned");

// The threads of a row meet; each row has a barrier of its own.
INLINE void sync_row() { sync_some<THREADS>(1 + (int)threadIdx.x / THREADS); }

INLINE float low_bfloat(uint32_t pair) { return __uint_as_float(pair << 16); }
INLINE float high_bfloat(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Everything dense of one row: the tail's states, the newest last, then those of dense pages.
struct DenseStates {
  const uint32_t *keys, *values;  // of the tail
  const uint32_t *new_key, *new_value;
  const uint64_t* pages;
  int count, size;
  int first, newest;  // positions of the tail's first and last state

  INLINE DenseStates(const DenseParams& p, int row) {
    const int sequence = row / p.kv_heads, head = row % p.kv_heads;
    keys = (const uint32_t*)p.tails[2 * row];
    values = (const uint32_t*)p.tails[2 * row + 1];
    count = (int)p.extents[2 * sequence];
    first = (int)p.extents[2 * sequence + 1];
    newest = first + count - 1;
    pages = p.pages + p.page_start[row];
    size = count + (p.page_start[row + 1] - p.page_start[row]) * p.page_tokens;
    new_key = p.new_keys + (uint64_t)sequence * p.key_stride + head * p.key_head;
    new_value = p.new_values + (uint64_t)sequence * p.value_stride + head * p.value_head;
  }

  // The dense page of state `at`, and its place there.
  INLINE const uint8_t* page_of(const DenseParams& p, int at, int& place) const {
    const int page = (at - count) / p.page_tokens;
    place = at - count - page * p.page_tokens;
    return (const uint8_t*)pages[page];
  }

  INLINE const uint32_t* key(const DenseParams& p, int at, bool& is_live) const {
    is_live = at < size;
    const uint32_t* key = at < count - 1 ? keys + at * DIM_WORDS : new_key;
    int position = first + at, place;
    if (is_live && at >= count) {
      const uint8_t* page = page_of(p, at, place);
      key = (const uint32_t*)(page + p.key_offset) + place * DIM_WORDS;
      is_live = place < *(const uint16_t*)(page + COUNT_OFFSET);
      position = *(const int*)(page + POSITION_BASE_OFFSET) + place;
    }
    if (p.window > 0 && position <= newest - p.window) is_live = false;
    return key;
  }

  INLINE const uint32_t* value(const DenseParams& p, int at) const {
    int place;
    if (at >= count && at < size)
      return (const uint32_t*)(page_of(p, at, place) + p.value_offset) + place * DIM_WORDS;
    return at < count - 1 ? values + at * DIM_WORDS : new_value;
  }

  // The newest state goes behind the last one.
  INLINE void keep_newest(int tid) const {
    if (tid >= 2 * DIM_WORDS) return;
    const int word = tid % DIM_WORDS;
    const uint32_t* from = tid < DIM_WORDS ? new_key : new_value;
    uint32_t* to = (uint32_t*)(tid < DIM_WORDS ? keys : values);
    to[(count - 1) * DIM_WORDS + word] = from[word];
  }
};

// What a thread loads of a chunk, all at once: half a key, and for each lane the warp's dimensions
// of every 32nd value.
struct DenseChunk {
  static constexpr int KEY_LOADS = HEAD_DIM / 16;
  static constexpr int VALUE_LOADS = CHUNK / 32;
  uint4 key[KEY_LOADS];
  uint4 value[VALUE_LOADS][BLOCK_LOADS];
  bool is_live;

  INLINE void load(const DenseParams& p, const DenseStates& states, int first, int tid) {
    const uint4* mine = (const uint4*)states.key(p, first + tid / 2, is_live);
#pragma unroll
    for (int c = 0; c < KEY_LOADS; c++) key[c] = mine[2 * c + tid % 2];
#pragma unroll
    for (int i = 0; i < VALUE_LOADS; i++) {
      const uint4* from = (const uint4*)states.value(p, first + (tid & 31) + 32 * i);
#pragma unroll
      for (int b = 0; b < BLOCK_LOADS; b++) value[i][b] = from[tid / 32 * BLOCK_LOADS + b];
    }
  }
};

INLINE void load_queries(const DenseParams& p, Memory& m, int row, int tid) {
  for (int x = tid; x < GROUP * HEAD_DIM; x += THREADS) {
    const uint64_t at = (uint64_t)row * GROUP * HEAD_DIM + x;
    const float q = p.query_is_bf16
                        ? __uint_as_float((uint32_t)((const uint16_t*)p.query)[at] << 16)
                        : ((const float*)p.query)[at];
    m.query[0][x] = q * p.logit_scale;
    m.result[0][x] = 0.f;
  }
  if (tid < GROUP) m.most[tid] = NO_LOGIT, m.mass[tid] = 0.f;
}

// Logits of one state for all queries, by two threads.
INLINE void score(const DenseParams& p, Memory& m, const DenseChunk& chunk, int tid) {
  const int place = tid / 2, part = tid % 2;
#pragma unroll 1
  for (int query = 0; query < GROUP; query++) {
    float dot[4] = {};
#pragma unroll
    for (int c = 0; c < DenseChunk::KEY_LOADS; c++) {
      const uint32_t word[4] = {chunk.key[c].x, chunk.key[c].y, chunk.key[c].z, chunk.key[c].w};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const float4 q = *(const float4*)&m.query[query][8 * (2 * c + part) + 2 * w];
        dot[0] = fmaf(q.x, low_bfloat(word[w]), dot[0]);
        dot[1] = fmaf(q.y, high_bfloat(word[w]), dot[1]);
        dot[2] = fmaf(q.z, low_bfloat(word[w + 1]), dot[2]);
        dot[3] = fmaf(q.w, high_bfloat(word[w + 1]), dot[3]);
      }
    }
    float logit = dot[0] + dot[1] + dot[2] + dot[3];
    logit += __shfl_xor_sync(ALL_LANES, logit, 1);
    if (p.softcap > 0.f) {
      const float e = exp2_fast(__fdividef(logit, p.softcap) * 2.88539008f);
      logit = p.softcap * (1.f - __fdividef(2.f, 1.f + e));
    }
    if (part == 0) m.weight[query][place] = chunk.is_live ? logit : NO_LOGIT;
  }
}

// Logits of a chunk to weights, one warp per query.
INLINE void soften(Memory& m, int tid) {
  constexpr int PER_LANE = CHUNK / 32;
  const int lane = tid & 31;
  for (int query = tid / 32; query < GROUP; query += WARPS) {
    const float before = m.most[query];
    float x[PER_LANE], top = before, mass = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) top = fmaxf(top, x[i] = m.weight[query][lane + 32 * i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float weight = x[i] > NO_LOGIT ? exp2_fast(x[i] - top) : 0.f;
      m.weight[query][lane + 32 * i] = weight;
      mass += weight;
    }
    mass = warp_sum(mass);
    if (lane == 0) {
      m.shrink[query] = exp2_fast(before - top);
      m.mass[query] = m.mass[query] * m.shrink[query] + mass;
      m.most[query] = top;
    }
  }
}

// Halve the sums of a lane and double the lanes that share them, down to one: then a lane has the
// dimension of its own number, summed over every 2 * K-th lane.
template <int K>
INLINE void fold(float (&sum)[BLOCK_DIMS], int lane) {
  if constexpr (K > 0) {
    const bool is_upper = lane & K;
#pragma unroll
    for (int i = 0; i < K; i++) {
      const float other = __shfl_xor_sync(ALL_LANES, is_upper ? sum[i] : sum[i + K], K);
      sum[i] = (is_upper ? sum[i + K] : sum[i]) + other;
    }
    fold<K / 2>(sum, lane);
  }
}

// A warp adds its dimensions of a chunk's values to the results.
INLINE void add_values(Memory& m, const DenseChunk& chunk, int tid) {
  const int lane = tid & 31, block = tid / 32;
#pragma unroll 1
  for (int query = 0; query < GROUP; query++) {
    float sum[BLOCK_DIMS] = {};
#pragma unroll
    for (int i = 0; i < DenseChunk::VALUE_LOADS; i++) {
      const float weight = m.weight[query][lane + 32 * i];
      // slack may hold any bits, and zero times NaN is no zero
      if (weight == 0.f) continue;
#pragma unroll
      for (int b = 0; b < BLOCK_LOADS; b++) {
        const uint4 v = chunk.value[i][b];
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const int at = 8 * b + 2 * w;
          sum[at] = fmaf(weight, low_bfloat(word[w]), sum[at]);
          sum[at + 1] = fmaf(weight, high_bfloat(word[w]), sum[at + 1]);
        }
      }
    }
    fold<BLOCK_DIMS / 2>(sum, lane);
#pragma unroll
    for (int k = BLOCK_DIMS; k < 32; k *= 2) sum[0] += __shfl_xor_sync(ALL_LANES, sum[0], k);
    if (lane < BLOCK_DIMS) {
      float& result = m.result[query][block * BLOCK_DIMS + lane];
      result = result * m.shrink[query] + sum[0];
    }
  }
}

INLINE void write_row(const DenseParams& p, const Memory& m, int row, int tid) {
  for (int x = tid; x < GROUP * HEAD_DIM; x += THREADS) {
    const float mass = m.mass[x / HEAD_DIM];
    tell(p.out, (uint64_t)row * GROUP * HEAD_DIM + x, mass > 0.f ? m.result[0][x] / mass : 0.f);
  }
  if (tid < GROUP)
    tell(p.lse, (uint64_t)row * GROUP + tid,
         m.mass[tid] > 0.f ? (m.most[tid] + log2_fast(m.mass[tid])) * LN2 : MINUS_INFINITY);
}

extern "C" __global__ void __launch_bounds__(ROWS * THREADS, 1)
    sphkv_dense(const __grid_constant__ DenseParams p) {
  __shared__ Memory memory[ROWS];
  start_dependents();
  const int tid = threadIdx.x % THREADS, group = threadIdx.x / THREADS;
  Memory& m = memory[group];
  for (int row = blockIdx.x * ROWS + group; row < p.rows; row += gridDim.x * ROWS) {
    const DenseStates states(p, row);
    DenseChunk chunk;
    for (int first = 0; first < states.size; first += CHUNK) {
      chunk.load(p, states, first, tid);
      if (first == 0) {
        load_queries(p, m, row, tid);
        states.keep_newest(tid);
      }
      sync_row();
      score(p, m, chunk, tid);
      sync_row();
      soften(m, tid);
      sync_row();
      add_values(m, chunk, tid);
      sync_row();
    }
    write_row(p, m, row, tid);
    sync_row();
  }
}
