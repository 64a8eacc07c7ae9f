// SPDX-License-Identifier: Apache-2.0
// Shapes and offsets. docs/gpu.md draws them; geometry.py computes the same numbers.
#pragma once
#include "page_format.cuh"
#include "ptx.cuh"

// What a build is for.
constexpr int HEAD_DIM = SPHKV_HEAD_DIM;
constexpr int NIBBLES = SPHKV_NIBBLES;                // stored 4-bit slots per key
constexpr int DOUBLE_STEPS = SPHKV_DOUBLE_STEPS;      // the last 8 * this slots are looked up twice
constexpr int CONSTANT_STEPS = SPHKV_CONSTANT_STEPS;  // 8 planes without bits each
constexpr int VALUE_BITS = SPHKV_VALUE_BITS;
constexpr int COLUMNS = SPHKV_COLUMNS;  // query columns per key tile: 4 or 8
constexpr int TEAMS = SPHKV_TEAMS;
constexpr int PAGE_TOKENS = SPHKV_PAGE_TOKENS;  // 64 or 128
constexpr bool SPREAD = SPHKV_SPREAD != 0;  // high nibbles stay where they are, see high_slot

// How a page stores positions, as in the page header: one base, one per 16 keys, one per key.
constexpr bool IS_CONTIGUOUS = SPHKV_POSITIONS == 0;
constexpr bool IS_RUNS = SPHKV_POSITIONS == 1;
constexpr bool IS_TOKENS = SPHKV_POSITIONS == 2;

CONSTANT_FUNCTION int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
CONSTANT_FUNCTION int smaller(int a, int b) { return a < b ? a : b; }
CONSTANT_FUNCTION int larger(int a, int b) { return a > b ? a : b; }

// A team of warps works on one page; a warp on two tiles of 16 keys.
constexpr int WARP_KEYS = 32;
constexpr int TEAM_WARPS = PAGE_TOKENS / WARP_KEYS;
static_assert(TEAM_WARPS == 2 || TEAM_WARPS == 4, "warps of a team take turns by masks");
constexpr int WARPS = TEAMS * TEAM_WARPS;
constexpr int THREADS = WARPS * 32;

// With narrow heads four warps more ask for pages, on registers that the teams can spare. With wide
// ones they can't, and a team's warps ask in turn; so they do where there are more teams than four.
constexpr bool HAS_SUPPLIERS = HEAD_DIM == 64 && TEAMS > 1 && TEAM_WARPS == 4;
constexpr int BLOCK_THREADS = THREADS + (HAS_SUPPLIERS ? 128 : 0);
constexpr int SUPPLY_REGISTERS = 24;
// A quarter of a multiprocessor has 512 registers per lane, and a warp of each team.
constexpr int START_REGISTERS = 512 / (TEAMS + 1) / 8 * 8;
constexpr int TEAM_REGISTERS =
    ((TEAMS + 1) * START_REGISTERS - SUPPLY_REGISTERS) / TEAMS / 8 * 8;
constexpr int TILE_KEYS = 16;
constexpr int PAGE_TILES = PAGE_TOKENS / TILE_KEYS;

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
// What a row costs a block beside its pages, in pages: queries are turned, the warps' sums merged. A
// page costs 40 steps of a product beside its own, a row 105; where every scheduler has but one warp, a
// page takes 0.72 of the time.
constexpr int PAGE_WORK = STEPS + 40;
constexpr int ROW_PAGES = ((WARPS <= 4 ? 146 : 105) * TEAMS + PAGE_WORK / 2) / PAGE_WORK;
// Short lists are spread until every block has 256 keys: teams without a page leave their share of the
// multiprocessor to the others, while every block has a table to fetch and sums to merge.
constexpr int LEAST_PAGES = 256 / PAGE_TOKENS;

// Page: header, slots, radius and scale codes, value codes, bases of runs or positions of keys.
constexpr bool HAS_SCALES = VALUE_BITS != 16;
constexpr int KEY_OFFSET = HEADER_BYTES;
constexpr int KEY_TILE_BYTES = TILE_KEYS * NIBBLES / 2;
constexpr int GAIN_OFFSET = KEY_OFFSET + PAGE_TILES * KEY_TILE_BYTES;
constexpr int GAIN_TILE_BYTES = TILE_KEYS * (HAS_SCALES ? 2 : 1);
constexpr int VALUE_OFFSET = GAIN_OFFSET + PAGE_TILES * GAIN_TILE_BYTES;
constexpr int VALUE_TILE_BYTES = TILE_KEYS * HEAD_DIM * VALUE_BITS / 8;
constexpr int POSITION_WORDS = IS_CONTIGUOUS ? 0 : IS_RUNS ? PAGE_TILES : PAGE_TOKENS;
constexpr int PAYLOAD_END = VALUE_OFFSET + PAGE_TILES * VALUE_TILE_BYTES;
constexpr int POSITION_OFFSET = IS_CONTIGUOUS ? POSITION_BASE_OFFSET : PAYLOAD_END;
constexpr int PAGE_BYTES = round_up(PAYLOAD_END + 4 * POSITION_WORDS, 64);

// Turns: (cos, -sin) and (sin, cos) of each plane in device memory, of each entry in shared memory.
// A warp's queries are turned to its 32 keys beforehand, so that a contiguous page needs one row. A
// page of runs has a row per tile; with four columns they hold what is missing to how far the queries
// are turned already, so that tiles which follow each other share a row (eight columns would take the
// room of pages). With eight columns each tile has its own turned queries: from a query set of its own
// where registers allow it, else from a row of turns of its own; the tensor cores turn them.
constexpr int QUERY_SETS = IS_CONTIGUOUS && !SHARED_COLUMNS && HEAD_DIM == 64 ? 2 : 1;
constexpr int TURN_SETS = IS_TOKENS || SHARED_COLUMNS || QUERY_SETS == 2 ? 1 : 2;
constexpr bool IS_TURNED_BEFORE = IS_CONTIGUOUS || (IS_RUNS && SHARED_COLUMNS);
constexpr int TURN_ROWS = IS_TOKENS ? 0 : IS_RUNS ? PAGE_TILES : TURN_SETS;
constexpr bool SHARES_ROWS = IS_RUNS && IS_TURNED_BEFORE;
constexpr bool TURNED_BY_PRODUCT = !SHARED_COLUMNS && !IS_TOKENS;
// A page of runs has a row per tile: with four columns they hold (sin, cos) alone, and a lane finds the
// other word itself, so that more pages fit beside the table.
constexpr bool HALF_TURNS = IS_RUNS && !TURNED_BY_PRODUCT;
// Rows of positions before the first: the queries of a page's last tile are turned that far ahead, in
// the largest pages, because all kernels share the rows.
constexpr int ROWS_BEFORE = 128 / TILE_KEYS - 1;
constexpr int TURN_PLANE_BYTES = HALF_TURNS ? 4 : 8;  // in device memory
constexpr int TURN_ROW_BYTES = TURN_PLANE_BYTES * PLANES;
constexpr int TURN_PAIR_BYTES = HALF_TURNS ? 64 : 128;  // of two steps
constexpr int TURN_BYTES = TURN_PAIR_BYTES * STEP_PAIRS;
constexpr int ZERO_BYTES = TURNED_BY_PRODUCT ? TURN_BYTES : 0;

// Table of a head: points of high nibbles, of low nibbles, constants, entry map, frequencies.
constexpr int SLOT_BYTES = 128;  // one word per lane
constexpr int LEVELS = 16;
constexpr int BLOCK_BYTES = 2 * SLOT_BYTES * LEVELS;  // two single slots, or one that is double
constexpr int SINGLE_SLOTS = 2 * (CODE_STEPS - DOUBLE_STEPS);
constexpr int SPREAD_STRIDE = 4096;
constexpr int LOW_BYTES = LOOKUP_STEPS * BLOCK_BYTES;
constexpr int HIGH_BYTES = SPREAD ? LEVELS * SPREAD_STRIDE : LOW_BYTES;
constexpr int CONSTANT_OFFSET = HIGH_BYTES + LOW_BYTES;
constexpr int MAP_OFFSET = CONSTANT_OFFSET + CONSTANT_STEPS * 4 * SLOT_BYTES;
constexpr int FREQUENCY_OFFSET = MAP_OFFSET + 4 * ENTRIES;
constexpr int TABLE_BYTES = round_up(FREQUENCY_OFFSET + 4 * ENTRIES, 128);
static_assert(!SPREAD || 2 * LOOKUP_STEPS * SLOT_BYTES <= SPREAD_STRIDE, "too many high slots");

// Shared memory: table | ring of pages with their turns | zeros | scratch | barriers.
constexpr int STAGE_BYTES = PAGE_BYTES + TURN_ROWS * TURN_BYTES;
// Scratch at a row's start: the queries as products take them, turned to every tile of a page. At its end: a pass of every warp's sums, and the results. Rows are padded so that
// lanes fall on different banks; a row has all entries of a column, words of both sets side by side.
constexpr int QUERY_ROW =
    QUERY_SETS == 2 ? 2 * ENTRIES + 4 : ENTRIES + (STEP_PAIRS % 2 ? 0 : 16);
constexpr int WARP_ROWS = SHARED_COLUMNS ? 2 : 1;  // of a column: one per warp, or one per tile
constexpr int TURNED = IS_TURNED_BEFORE ? TEAM_WARPS * WARP_ROWS : 1;
constexpr int TURNED_BYTES = COLUMNS * QUERY_ROW * 4;
constexpr int PASS_DIMS = 32;
constexpr int PASS_ROW = PASS_DIMS + 8;
constexpr int PASS_BYTES = WARPS * COLUMNS * PASS_ROW * 4;
constexpr int STAT_BYTES = WARPS * COLUMNS * 4;
constexpr int RESULT_BYTES = COLUMNS * HEAD_DIM * 4 + 4 * STAT_BYTES;
constexpr int SCRATCH_BYTES = larger(TURNED * TURNED_BYTES, PASS_BYTES + RESULT_BYTES);
// Every warp asks for one page before a block begins, so no more can be ahead than there are warps.
constexpr int MAX_STAGES = smaller(4, TEAM_WARPS + 1) * TEAMS;
constexpr int BARRIER_BYTES = 16 * MAX_STAGES + 48;
constexpr int SHARED_LIMIT = 232448;
constexpr int FITTING_STAGES =
    (SHARED_LIMIT - TABLE_BYTES - ZERO_BYTES - SCRATCH_BYTES - BARRIER_BYTES) / STAGE_BYTES;
// A stage always serves the same team, so that no warp waits for a phase two ahead of a barrier.
constexpr int STAGES = smaller(MAX_STAGES, FITTING_STAGES / TEAMS * TEAMS);
constexpr int AHEAD = STAGES - TEAMS;  // pages asked for ahead of the one a team begins
// A team's warp asks for the next page after this word of the codes. The later it does, the surer
// the stage is free, but with few stages and quick pages the next one must set out in time. What eight
// columns need of a page of runs is asked for before the first word.
constexpr int CODE_WORDS = CODE_STEPS / 2;
constexpr bool IS_SENT_LATE = !SHARED_COLUMNS || STAGES >= 3 * TEAMS;
constexpr int SEND_WORD = IS_RUNS ? (SHARED_COLUMNS ? smaller(3, CODE_WORDS - 1) : -1)
                        : IS_SENT_LATE ? CODE_WORDS - 1
                                       : (CODE_WORDS - 1) / 2;
static_assert(AHEAD > 0, "shared memory holds too few pages");
static_assert(HAS_SUPPLIERS || AHEAD <= WARPS, "pages that no warp asks for");

constexpr int RING_OFFSET = TABLE_BYTES;
constexpr int ZERO_OFFSET = RING_OFFSET + STAGES * STAGE_BYTES;  // a row of turns that is zero
constexpr int SCRATCH_OFFSET = ZERO_OFFSET + ZERO_BYTES;
constexpr int RESULT_OFFSET = SCRATCH_OFFSET + PASS_BYTES;
constexpr int BARRIER_OFFSET = SCRATCH_OFFSET + SCRATCH_BYTES;
constexpr int KEPT_OFFSET = BARRIER_OFFSET + 16 * MAX_STAGES + 8;  // behind the table's barrier
constexpr int PLACE_OFFSET = KEPT_OFFSET + 8;  // see BlockPlace
constexpr int RANK_OFFSET = PLACE_OFFSET + 20;
constexpr int SHARED_BYTES = BARRIER_OFFSET + BARRIER_BYTES;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "shared memory");

// Dynamic shared memory begins here on sm_90 when a kernel has no static one; checked at start.
constexpr int SHARED_BASE = 1024;

struct Params {
  const uint8_t* pages;         // [pages][PAGE_BYTES]
  const int2* page_list;        // number and base of pages, head by head, sequence by sequence
  const int* row_start;         // [kv_heads * batch + 1] into page_list
  const int* shares;            // [ctas] of 12 words, see BlockShare, or null: then blocks find them
  const uint8_t* tables;        // [kv_heads][TABLE_BYTES]
  const uint8_t* turns;         // [16 >> turn_shift][turn_rows][PLANES] (cos, -sin, sin, cos) or half of it
  const void* query;            // [batch][query_heads][HEAD_DIM] float or bfloat16
  const int* query_positions;   // [batch], read if window > 0
  const float* sinks;           // [query_heads] or null
  const float* other_out;       // a partial over other keys, laid out as out and lse, or null
  const float* other_lse;
  void* out;                    // [batch][query_heads][HEAD_DIM] float or bfloat16
  float* lse;                   // [batch][query_heads]
  uint32_t* part_out;           // [blocks][kv_heads * batch + ctas][COLUMNS][HEAD_DIM], see PartPlace
  uint32_t* part_lse;           // the same with HEAD_DIM / 64
  int batch;
  int kv_heads;
  int group;            // query heads per KV head
  int blocks;           // passes over the columns: ceil(group / COLUMNS)
  int ctas;             // of all heads, for each of these passes
  int uneven;           // share them by the pages of each head, else alike
  int turn_rows;        // positions 16 apart
  int turn_shift;       // log2 of the positions between phases
  int window;           // 0 for none
  int query_is_bf16;
  int out_is_bf16;
  int unrotate;         // apply the Hadamard rotation to the output
  float logit_scale;    // times log2(e)
  float softcap;        // times log2(e); 0 for none
};

// Joins the warps of all teams.
INLINE void sync_teams() { sync_some<THREADS>(1); }
