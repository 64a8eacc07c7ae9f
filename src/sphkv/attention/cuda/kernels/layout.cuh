// SPDX-License-Identifier: Apache-2.0
// Shapes and offsets. docs/gpu.md draws them; geometry.py computes the same numbers.
#pragma once
#include "ptx.cuh"

// What a build is for.
constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int NIBBLES = SPHKV_NIBBLES;                // stored 4-bit slots per key
constexpr int DOUBLE_STEPS = SPHKV_DOUBLE_STEPS;      // the last 8 * this slots are looked up twice
constexpr int CONSTANT_STEPS = SPHKV_CONSTANT_STEPS;  // 8 planes without bits each
constexpr int VALUE_BITS = SPHKV_VALUE_BITS;
constexpr int COLUMNS = SPHKV_COLUMNS;  // query columns per key tile: 4 or 8
constexpr int TEAMS = SPHKV_TEAMS;
constexpr bool SPREAD = SPHKV_SPREAD != 0;  // high nibbles stay where they are, see high_slot

CONSTANT_FUNCTION int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
CONSTANT_FUNCTION int smaller(int a, int b) { return a < b ? a : b; }
CONSTANT_FUNCTION int larger(int a, int b) { return a > b ? a : b; }

// A team of four warps works on one page; a warp on two tiles of 16 keys.
constexpr int TEAM_WARPS = 4;
constexpr int WARPS = TEAMS * TEAM_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int PAGE_TOKENS = 128;
constexpr int TILE_KEYS = 16;
constexpr int PAGE_TILES = PAGE_TOKENS / TILE_KEYS;
constexpr int WARP_KEYS = 2 * TILE_KEYS;

// With at most four queries both tiles share the eight columns of one product: columns 0-3 hold
// the queries turned for the first tile, columns 4-7 those for the second.
constexpr bool SHARED_COLUMNS = COLUMNS == 4;
constexpr int TILE_SETS = SHARED_COLUMNS ? 1 : 2;

// One step of the product takes 8 entries of 2 components.
constexpr int PLANES = HEAD_DIM / 2;
constexpr int CODE_STEPS = NIBBLES / 8;
constexpr int LOOKUP_STEPS = CODE_STEPS + DOUBLE_STEPS;
constexpr int STEPS = LOOKUP_STEPS + CONSTANT_STEPS;
constexpr int STEP_PAIRS = (STEPS + 1) / 2;  // a lane reads the turns of two steps at once
constexpr int ENTRIES = 16 * STEP_PAIRS;
static_assert(NIBBLES % 16 == 0, "slots are handled 16 at a time");

// Page: header, slots, radius and scale codes, value codes, bases of runs.
constexpr bool HAS_SCALES = VALUE_BITS != 16;
constexpr int KEY_OFFSET = 64;
constexpr int KEY_TILE_BYTES = TILE_KEYS * NIBBLES / 2;
constexpr int GAIN_OFFSET = KEY_OFFSET + PAGE_TILES * KEY_TILE_BYTES;
constexpr int GAIN_TILE_BYTES = TILE_KEYS * (HAS_SCALES ? 2 : 1);
constexpr int VALUE_OFFSET = GAIN_OFFSET + PAGE_TILES * GAIN_TILE_BYTES;
constexpr int VALUE_TILE_BYTES = TILE_KEYS * HEAD_DIM * VALUE_BITS / 8;
constexpr int PAGE_CAPACITY =
    round_up(VALUE_OFFSET + PAGE_TILES * VALUE_TILE_BYTES + 4 * PAGE_TILES, 64);
constexpr int TURN_ROW_BYTES = 4 * PLANES;

// Shared memory: table | ring of stages | scratch | results | barriers.
constexpr int SLOT_BYTES = 128;  // one word per lane
constexpr int LEVELS = 16;
constexpr int HALF_SLOTS = 2 * LOOKUP_STEPS;  // low nibbles; as many high ones
constexpr int SPREAD_STRIDE = 4096;
constexpr int HIGH_BYTES = SPREAD ? LEVELS * SPREAD_STRIDE : HALF_SLOTS * SLOT_BYTES * LEVELS;
constexpr int LOW_BYTES = HALF_SLOTS * SLOT_BYTES * LEVELS;
constexpr int CONSTANT_OFFSET = HIGH_BYTES + LOW_BYTES;
constexpr int MAP_OFFSET = CONSTANT_OFFSET + CONSTANT_STEPS * 4 * SLOT_BYTES;
constexpr int TABLE_BYTES = round_up(MAP_OFFSET + 4 * ENTRIES, 128);
static_assert(!SPREAD || HALF_SLOTS * SLOT_BYTES <= SPREAD_STRIDE, "too many high slots");

constexpr int STAGE_BYTES = PAGE_CAPACITY + PAGE_TILES * TURN_ROW_BYTES;
constexpr int TURN_BYTES = 2 * 4 * ENTRIES;  // of one warp: two tiles in entry order
constexpr int PASS_DIMS = 32;
constexpr int PASSES = HEAD_DIM / PASS_DIMS;
constexpr int SCRATCH_BYTES = WARPS * larger(TURN_BYTES, COLUMNS * PASS_DIMS * 4);
constexpr int STAT_BYTES = WARPS * COLUMNS * 4;
constexpr int RESULT_BYTES = COLUMNS * HEAD_DIM * 4 + 4 * STAT_BYTES;
// Queries of the first pairs of steps stay in registers, the others in shared memory.
constexpr int REGISTER_PAIRS = smaller(STEP_PAIRS, SPHKV_REGISTER_PAIRS);
constexpr int QUERY_SIDE_BYTES = COLUMNS * 64;  // one pair of steps: all columns, four t, 16 bytes
constexpr int QUERY_BYTES = (STEP_PAIRS - REGISTER_PAIRS) * 2 * QUERY_SIDE_BYTES;
constexpr int MAX_STAGES = 3 * TEAMS;
constexpr int BARRIER_BYTES = 16 * MAX_STAGES + 16;
constexpr int SHARED_LIMIT = 232448;
constexpr int FITTING_STAGES =
    (SHARED_LIMIT - TABLE_BYTES - SCRATCH_BYTES - RESULT_BYTES - QUERY_BYTES - BARRIER_BYTES) /
    STAGE_BYTES;
// A stage always serves the same team: barriers tell two generations of a stage apart, not three.
constexpr int STAGES = smaller(MAX_STAGES, FITTING_STAGES / TEAMS * TEAMS);
static_assert(FITTING_STAGES >= TEAMS, "shared memory holds fewer pages than teams");

constexpr int RING_OFFSET = TABLE_BYTES;
constexpr int SCRATCH_OFFSET = RING_OFFSET + STAGES * STAGE_BYTES;
constexpr int RESULT_OFFSET = SCRATCH_OFFSET + SCRATCH_BYTES;
constexpr int QUERY_OFFSET = RESULT_OFFSET + RESULT_BYTES;
constexpr int BARRIER_OFFSET = QUERY_OFFSET + QUERY_BYTES;
constexpr int ARRIVED_OFFSET = BARRIER_OFFSET + 16 * MAX_STAGES + 8;
constexpr int SHARED_BYTES = BARRIER_OFFSET + BARRIER_BYTES;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "shared memory");

// Dynamic shared memory begins here on sm_90 when a kernel has no static one; checked at start.
constexpr int SHARED_BASE = 1024;

struct Params {
  const uint8_t* pages;         // [pages][page_bytes]
  const int* page_ids;          // head by head, sequence by sequence
  const int* row_start;         // [kv_heads * batch + 1] into page_ids
  const uint8_t* tables;        // [kv_heads][TABLE_BYTES]
  const uint8_t* turns;         // [16 >> turn_shift][turn_rows][PLANES] (cos, sin) half2
  const void* query;            // [batch][query_heads][HEAD_DIM] float or bfloat16
  const int* query_positions;   // [batch], read if window > 0
  const float* sinks;           // [query_heads] or null
  float* out;                   // [batch][query_heads][HEAD_DIM]
  float* lse;                   // [batch][query_heads]
  float* part_out;              // [kv_heads * blocks][batch + ctas][COLUMNS][HEAD_DIM]
  float* part_lse;              // the same without HEAD_DIM
  uint32_t* arrivals;           // [kv_heads * blocks][batch], zero between launches
  int batch;
  int kv_heads;
  int group;            // query heads per KV head
  int blocks;           // passes over the columns: ceil(group / COLUMNS)
  int ctas;             // per head and block
  int page_bytes;
  int position_offset;  // of the first base inside a page
  int position_stride;  // bytes between bases of tiles: 0 (contiguous) or 4 (runs)
  int tile_step;        // positions between tiles: 16 (contiguous) or 0 (runs)
  int turn_rows;        // positions 16 apart
  int turn_shift;       // log2 of the positions between phases
  int window;           // 0 for none
  int query_is_bf16;
  int unrotate;         // apply the Hadamard rotation to the output
  float logit_scale;    // times log2(e)
  float softcap;        // times log2(e); 0 for none
};
