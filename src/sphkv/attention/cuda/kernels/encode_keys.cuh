// SPDX-License-Identifier: Apache-2.0
// Keys to slot codes and radius codes: norm, un-rotate, snap, pack. The arithmetic is that of
// codec/keys.py. A lane has four neighbouring keys, in a page of 64 half of them
// none; the warps share the planes.
#pragma once
#include "encode_layout.cuh"
#include "lane_words.cuh"

constexpr int OWN = 4;              // keys of a lane
constexpr int ROOM = 32 * OWN;      // keys of a block; those past the page count as zero
constexpr int GRID = 48;            // cells of a search grid along each axis
constexpr float LEAST_COSINE = 0.2f;  // below it the radius only keeps the norm
constexpr float TINY = 1.17549435e-38f;
constexpr float RADIANS = 1.46291808e-9f;  // 2 pi / 2^32

struct KeyMemory {
  union {
    Slots slot;
    float part[2][WARPS][ROOM];  // when the keys are done: cosines, squared lengths by warp
  };
  Plane plane[PLANES];
  // Channels in the order `load_keys` leaves them in; pieces of 16 bytes change places within a row
  // against bank conflicts. A plane that is done leaves its codes here, at their `place`.
  uint16_t key[HEAD_DIM][ROOM];
  uint16_t place[SLOTS];
  float square[ROOM];
  float edge[2][WARPS];
  uint64_t tables_arrived;
};

// What a lane knows of its keys.
struct Keys {
  uint32_t position[OWN];
  float inverse[OWN];  // of the norm
  float cosine[OWN], length[OWN];
  uint32_t live;  // a byte of ones for each live key
  int lane;
};

// A plane of a lane's keys.
struct Directions {
  float x[OWN], y[OWN];  // of the unit keys before rotation
  float u[OWN], v[OWN];  // as queries see them

  INLINE Directions(const KeyMemory& m, const Keys& keys, const Plane& plane) {
    const uint8_t* key = (const uint8_t*)m.key;
    const uint2 a = *(const uint2*)(key + (plane.row[0] ^ 2 * OWN * keys.lane));
    const uint2 b = *(const uint2*)(key + (plane.row[1] ^ 2 * OWN * keys.lane));
    const float first[OWN] = {bfloat_low(a.x), bfloat_high(a.x), bfloat_low(a.y), bfloat_high(a.y)};
    const float second[OWN] = {bfloat_low(b.x), bfloat_high(b.x), bfloat_low(b.y), bfloat_high(b.y)};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      // the product wraps as the angle does
      const uint32_t phase =
          plane.turn_high * keys.position[i] + __umulhi(plane.turn_low, keys.position[i]);
      const float angle = (float)(int)phase * RADIANS;
      const float c = cos_fast(angle) * keys.inverse[i], s = sin_fast(angle) * keys.inverse[i];
      x[i] = first[i] * c + second[i] * s;
      y[i] = second[i] * c - first[i] * s;
    }
  }

  INLINE void see(const Plane& plane) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      u[i] = fmaf(plane.root.x, x[i], plane.root.y * y[i]);
      v[i] = fmaf(plane.root.z, x[i], plane.root.w * y[i]);
    }
  }

  INLINE void count_in(Keys& keys, int i, float2 point) const {
    keys.cosine[i] = fmaf(x[i], point.x, fmaf(y[i], point.y, keys.cosine[i]));
    keys.length[i] = fmaf(point.x, point.x, fmaf(point.y, point.y, keys.length[i]));
  }
};

// Codes of four keys in shared memory.
INLINE uint32_t& codes_at(KeyMemory& m, int slot, int four) {
  return *(uint32_t*)((uint8_t*)m.key + (m.place[slot] ^ 4 * four));
}

INLINE void store_codes(KeyMemory& m, const Keys& keys, int slot, const int (&code)[OWN]) {
  const uint32_t word = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
  __syncwarp();  // all lanes have read their keys
  codes_at(m, slot, keys.lane) = word & keys.live;
}

// Bits of a number, the lowest of them replaced.
INLINE int with_level(float x, int mask, int level) {
  return and_or(__float_as_int(x), mask, level);
}

// Nearest of COUNT points. Of |w - s|^2 only s.w - |s|^2 / 2 depends on s; a bias makes the largest
// of these positive, so that its bits compare as an integer. The lowest bits hold the level.
template <int COUNT>
INLINE void nearest(const float* table, const float* biases, const float (&u)[OWN],
                    const float (&v)[OWN], int mask, int (&code)[OWN]) {
  int best[OWN] = {-0x7fffffff, -0x7fffffff, -0x7fffffff, -0x7fffffff};
#pragma unroll
  for (int first = 0; first < COUNT; first += 4) {
    const float4 x = *(const float4*)(table + first), y = *(const float4*)(table + COUNT + first);
    const float4 bias = *(const float4*)(biases + first);
    const float sx[4] = {x.x, x.y, x.z, x.w}, sy[4] = {y.x, y.y, y.z, y.w};
    const float h[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float score = fmaf(v[i], sy[k], fmaf(u[i], sx[k], h[k]));
        best[i] = max(best[i], with_level(score, mask, COUNT - 1 - first - k));
      }
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) code[i] = COUNT - 1 - (best[i] & (COUNT - 1));
}

// Squared distance from the sum of a point of each of two slots.
INLINE float distance(uint32_t one, uint32_t two, uint32_t shifted_code, float u, float v) {
  const uint2 a = load_shared2(one | (shifted_code >> 1 & 0x78));
  const uint2 b = load_shared2(two | (shifted_code << 3 & 0x78));
  const float du = u - __uint_as_float(a.x) - __uint_as_float(b.x);
  const float dv = v - __uint_as_float(a.y) - __uint_as_float(b.y);
  return du * du + dv * dv;
}

// Nearest of all sums of a slot and COUNT points of another to the point of one lane, by all lanes.
template <int COUNT>
INLINE int nearest_of_all(uint32_t one, uint32_t two, float u, float v, int lane) {
  int best = 0x7fffffff;
#pragma unroll
  for (int at = lane; at < LEVELS * COUNT; at += 32) {
    const int code = at / COUNT * LEVELS | at % COUNT;
    best = min(best, (__float_as_int(distance(one, two, code, u, v)) & -256) | code);
  }
  return __reduce_min_sync(ALL_LANES, best) & 255;
}

// Nearest sum of a point of a slot and one of COUNT, among the candidates of a grid cell: up to eight,
// unused places repeat the first. A list whose second place alone repeats it stands for all sums.
template <int COUNT>
INLINE int nearest_sum(uint32_t one, uint32_t two, uint2 list, int mask, float u, float v, int lane) {
  constexpr int USUAL = 6;
  int best = 0x7fffffff;
#pragma unroll
  for (int k = 0; k < USUAL; k++) {
    const uint32_t word = k < 4 ? list.x : list.y;
    best = min(best, with_level(distance(one, two, word >> (8 * (k % 4)), u, v), mask, k));
  }
  const uint64_t both = (uint64_t)list.y << 32 | list.x;
  const bool is_last_used = list.y >> 24 != (list.x & 255);
  bool is_long = false;
  if (__any_sync(ALL_LANES, is_last_used || (list.y >> 16 & 255) != (list.x & 255))) {
#pragma unroll
    for (int k = USUAL; k < 8; k++)
      best = min(best, with_level(distance(one, two, list.y >> (8 * (k % 4)), u, v), mask, k));
    is_long = is_last_used && (list.x & 255) == (list.x >> 8 & 255);
  }
  int code = (int)(both >> (8 * (best & 7))) & 255;
  for (uint32_t left = __ballot_sync(ALL_LANES, is_long); left; left &= left - 1) {
    const int at = __ffs(left) - 1;
    const float his_u = __shfl_sync(ALL_LANES, u, at), his_v = __shfl_sync(ALL_LANES, v, at);
    const int found = nearest_of_all<COUNT>(one, two, his_u, his_v, lane);
    if (lane == at) code = found;
  }
  return code;
}

// Codes of the first two stages of a plane: a slot, and COUNT points at `second`.
template <int COUNT>
INLINE void search_sums(const EncodeParams& p, const KeyMemory& m, const Keys& keys, int head,
                        const Plane& plane, const Directions& w, uint32_t second, int mask,
                        int (&one)[OWN], int (&two)[OWN]) {
  const uint2* grid = p.grid + ((uint64_t)head * p.most_joint + plane.grid) * (GRID * GRID);
  const uint32_t first = shared_address(m.slot.table[plane.slot]);
  uint2 list[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float cu = fminf(fmaxf((w.u[i] - plane.place.x) * plane.place.z, 0.f), GRID - 1.f);
    const float cv = fminf(fmaxf((w.v[i] - plane.place.y) * plane.place.w, 0.f), GRID - 1.f);
    list[i] = __ldg(grid + (int)cu * GRID + (int)cv);
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int code =
        nearest_sum<COUNT>(first, second, list[i], mask | 8, w.u[i], w.v[i], keys.lane);
    one[i] = code >> 4, two[i] = code & 15;
  }
}

// Two slots of a plane whose points add: their codes and points. `w` keeps what they leave over,
// counted from the centre of the points that follow.
INLINE void encode_two(const EncodeParams& p, KeyMemory& m, Keys& keys, int head, const Plane& plane,
                       Directions& w, int mask, float2 (&point)[OWN]) {
  const int slot = plane.slot;
  int one[OWN], two[OWN];
  search_sums<LEVELS>(p, m, keys, head, plane, w, shared_address(m.slot.table[slot + 1]), mask, one,
                      two);
  store_codes(m, keys, slot, one);
  store_codes(m, keys, slot + 1, two);
  const float* centre = m.slot.bias[slot];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float2 a = m.slot.point[slot][one[i]], b = m.slot.point[slot + 1][two[i]];
    point[i] = {a.x + b.x, a.y + b.y};
    const float2 c = ((const float2*)m.slot.table[slot])[one[i]];
    const float2 d = ((const float2*)m.slot.table[slot + 1])[two[i]];
    w.u[i] -= c.x + d.x + centre[0], w.v[i] -= c.y + d.y + centre[1];
  }
}

INLINE void add_points(const float2* point, const int (&code)[OWN], float2 (&sum)[OWN]) {
#pragma unroll
  for (int i = 0; i < OWN; i++) sum[i].x += point[code[i]].x, sum[i].y += point[code[i]].y;
}

// A plane of 8 or 12 bits: two or three slots whose points add.
INLINE void encode_joint(const EncodeParams& p, KeyMemory& m, Keys& keys, int head, int at, int mask) {
  const Plane& plane = m.plane[at];
  Directions w(m, keys, plane);
  w.see(plane);
  float2 point[OWN];
  encode_two(p, m, keys, head, plane, w, mask, point);
  if (plane.singles == 3) {
    const int slot = plane.slot + 2;
    int three[OWN];
    nearest<LEVELS>(m.slot.table[slot], m.slot.bias[slot], w.u, w.v, mask, three);
    store_codes(m, keys, slot, three);
    add_points(m.slot.point[slot], three, point);
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) w.count_in(keys, i, point[i]);
}

// A plane of one slot, whose table knows what queries make of the plane.
INLINE void encode_single(KeyMemory& m, Keys& keys, int at, int mask) {
  const Plane& plane = m.plane[at];
  const Directions w(m, keys, plane);
  int code[OWN];
  nearest<LEVELS>(m.slot.table[plane.slot], m.slot.bias[plane.slot], w.x, w.y, mask, code);
  store_codes(m, keys, plane.slot, code);
#pragma unroll
  for (int i = 0; i < OWN; i++) w.count_in(keys, i, m.slot.point[plane.slot][code[i]]);
}

// One of two planes that share a slot, behind none, one or two slots of its own. `table` and
// `four` are its half of the shared slot.
INLINE void encode_half(const EncodeParams& p, KeyMemory& m, Keys& keys, int head, const Plane& plane,
                        const float* table, const float2* four, int mask, int (&code)[OWN]) {
  Directions w(m, keys, plane);
  float2 point[OWN] = {};
  if (plane.singles == 0) {
    nearest<4>(table, table + 8, w.x, w.y, mask | 12, code);
  } else {
    w.see(plane);
    if (plane.singles == 1) {
      int one[OWN];
      search_sums<4>(p, m, keys, head, plane, w, shared_address(table), mask, one, code);
      store_codes(m, keys, plane.slot, one);
      add_points(m.slot.point[plane.slot], one, point);
    } else {
      encode_two(p, m, keys, head, plane, w, mask, point);
      nearest<4>(table, table + 8, w.u, w.v, mask | 12, code);
    }
  }
  add_points(four, code, point);
#pragma unroll
  for (int i = 0; i < OWN; i++) w.count_in(keys, i, point[i]);
}

// Two planes that share a slot.
INLINE void encode_pair(const EncodeParams& p, KeyMemory& m, Keys& keys, int head, int at, int slot,
                        int mask) {
  int both[OWN] = {};
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    int code[OWN];
    encode_half(p, m, keys, head, m.plane[at + half], m.slot.table[slot] + LEVELS * half,
                m.slot.point[slot] + 4 * half, mask, code);
#pragma unroll
    for (int i = 0; i < OWN; i++) both[i] |= code[i] << (2 * half);
  }
  store_codes(m, keys, slot, both);
}

// Planes of all kinds, in turn by the warps; the costly ones come first.
INLINE void encode_slots(const EncodeParams& p, KeyMemory& m, Keys& keys, const int (&kinds)[5],
                         int head, int warp) {
  const int joint = kinds[0] + kinds[1], whole = joint + kinds[2], pairs = kinds[3];
  // the compiler would need two instructions for a mask and a level it knows
  const int mask = unknown(-LEVELS);
  for (int item = warp; item < whole + pairs + kinds[4]; item += WARPS) {
    if (item < joint) {
      encode_joint(p, m, keys, head, item, mask);
    } else if (item < whole) {
      encode_single(m, keys, item, mask);
    } else if (item < whole + pairs) {
      const int k = item - whole;
      encode_pair(p, m, keys, head, item + k, SLOTS - pairs + k, mask);
    } else {
      const Plane& plane = m.plane[item + pairs];
      const Directions w(m, keys, plane);
#pragma unroll
      for (int i = 0; i < OWN; i++) w.count_in(keys, i, {plane.place.x, plane.place.y});
    }
  }
}

// Keys of a tile, transposed, to shared memory, and their squares: the diagonals of products of
// the keys with themselves. A lane loads keys g and g + 8. Channel 32 chunk + 8 t + 2 word + half
// goes to row 32 chunk + 8 word + 2 t + half.
INLINE void load_keys(const EncodeParams& p, KeyMemory& m, long long row, int count, int warp,
                      int lane) {
  const int g = lane / 4, t = lane % 4, first = warp * TILE;
  const uint4* key = (const uint4*)(p.keys + (row * PAGE + first + g) * HEAD_DIM) + t;
  float low[4] = {}, high[4] = {};
  const uint32_t row_address = shared_address(m.key[lane]);
  const uint32_t to = row_address + ((2 * first) ^ (lane % 8 * 16));
  const uint32_t other = row_address + ((2 * first + 16) ^ (lane % 8 * 16));
  uint4 word[2][HEAD_DIM / 32] = {};
  if (PAGE == ROOM || first < PAGE)
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM / 32; chunk++)
      word[0][chunk] = key[4 * chunk], word[1][chunk] = key[HEAD_DIM + 4 * chunk];
  if (count < PAGE)
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM / 32; chunk++) {
      if (first + g >= count) word[0][chunk] = {0, 0, 0, 0};
      if (first + g + 8 >= count) word[1][chunk] = {0, 0, 0, 0};
    }
#pragma unroll
  for (int chunk = 0; chunk < HEAD_DIM / 32; chunk++) {
    const uint4 a = word[0][chunk], b = word[1][chunk];
    mma_bf16(low, a.x, b.x, a.y, b.y, a.x, a.y);
    mma_bf16(low, a.z, b.z, a.w, b.w, a.z, a.w);
    mma_bf16(high, a.x, b.x, a.y, b.y, b.x, b.y);
    mma_bf16(high, a.z, b.z, a.w, b.w, b.z, b.w);
    store_transposed(to + chunk * 32 * ROOM * 2, a);
    store_transposed(other + chunk * 32 * ROOM * 2, b);
  }
  if (g / 2 == t) {
    m.square[first + g] = g % 2 ? low[1] : low[0];
    m.square[first + g + 8] = g % 2 ? high[3] : high[2];
  }
}

// Slot codes in fragment order: a lane of the reader holds key g in the low nibble and g + 8 in the
// high one of each byte. A thread makes words of four lanes at a time.
INLINE void write_codes(KeyMemory& m, uint8_t* page, int tid) {
  constexpr int WORDS = SLOTS / 16;
  for (int at = tid; at < PAGE / 16 * 8 * WORDS; at += THREADS) {
    const int tile = at / (8 * WORDS), word = at / 8 % WORDS, quad = at % 2, t = at / 2 % 4;
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int slot = 16 * word + 4 * i + t, four = 4 * tile + quad;
      x[i] = codes_at(m, slot, four) | codes_at(m, slot, four + 2) << 4;
    }
    transpose_bytes(x);
    uint8_t* to = page + KEY_OFFSET + tile * WORDS * 128;
#pragma unroll
    for (int i = 0; i < 4; i++)
      *(uint32_t*)(to + LaneWords<WORDS>::offset(word, 16 * quad + 4 * i + t)) = x[i];
  }
}

// Starts a copy of the head's tables to shared memory.
INLINE void fetch_tables(const EncodeParams& p, KeyMemory& m, int head) {
  const uint32_t barrier = shared_address(&m.tables_arrived);
  barrier_init(barrier, 1);
  publish_barriers();
  barrier_expect(barrier, sizeof(m.slot) + sizeof(m.plane) + sizeof(m.place));
  copy_bulk(shared_address(&m.slot), p.slots + head, sizeof(m.slot), barrier);
  copy_bulk(shared_address(m.place), p.places + head * SLOTS, sizeof(m.place), barrier);
  copy_bulk(shared_address(m.plane), p.planes + head * PLANES, sizeof(m.plane), barrier);
}

// The norm that gives a coded key its own length along the key.
INLINE float radius_of(const KeyMemory& m, int key) {
  float cosine = 0.f, length = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) cosine += m.part[0][w][key], length += m.part[1][w][key];
  length = sqrtf(length);
  const float gain = cosine > LEAST_COSINE * length ? cosine : fmaxf(length, 1e-6f);
  return sqrtf(m.square[key]) / gain;
}

// Codes, radius codes; returns the range of the radii.
INLINE Affine encode_keys(const EncodeParams& p, KeyMemory& m, uint8_t* page, long long row, int head,
                          int count, int tid) {
  const int warp = tid / 32, lane = tid % 32;
  if (tid == 0) fetch_tables(p, m, head);
  // asked for early: nothing below waits for them until the keys are there
  Keys keys;
  int kinds[5];
#pragma unroll
  for (int i = 0; i < 5; i++) kinds[i] = p.kinds[head * 5 + i];
#pragma unroll
  for (int i = 0; i < OWN; i++)
    keys.position[i] = (uint32_t)p.positions[row * PAGE + min(OWN * lane, PAGE - OWN) + i];
  load_keys(p, m, row, count, warp, lane);
  __syncthreads();
  keys.lane = lane, keys.live = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int key = OWN * lane + i;
    keys.inverse[i] = rsqrtf(fmaxf(m.square[key], TINY));
    keys.cosine[i] = keys.length[i] = 0.f;
    if (key < count) keys.live |= 255u << (8 * i);
  }
  barrier_wait(shared_address(&m.tables_arrived), 0);
  encode_slots(p, m, keys, kinds, head, warp);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    m.part[0][warp][OWN * lane + i] = keys.cosine[i];
    m.part[1][warp][OWN * lane + i] = keys.length[i];
  }
  __syncthreads();
  const bool is_live = tid < min(count, PAGE);
  float x = 0.f;
  if (tid < PAGE) x = radius_of(m, tid);
  const Affine affine(m.edge, is_live ? x : INFINITE, is_live ? x : MINUS_INFINITY, tid);
  if (tid < PAGE) page[gain_offset(tid, 0)] = is_live ? (uint8_t)affine.code(x) : 0;
  write_codes(m, page, tid);
  return affine;
}
