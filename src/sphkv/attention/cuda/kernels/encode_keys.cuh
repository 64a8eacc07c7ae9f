// SPDX-License-Identifier: Apache-2.0
// Keys to slot codes and radius codes: norm, un-rotate, snap, pack. The arithmetic is that of
// codec/keys.py.
#pragma once
#include "encode_layout.cuh"

// What one thread knows of its key.
struct Key {
  int token;
  uint32_t position;
  float inverse;  // of the norm
  float cosine, length;
};

// Smaller of two distances whose lowest bits hold their codes.
INLINE int nearer(int best, float du, float dv, int mask, int code) {
  return min(best, (__float_as_int(du * du + dv * dv) & mask) | code);
}

struct Plane {
  float x, y;  // of the unit key before rotation
  float u, v;  // as queries see them

  INLINE Plane(const EncodeParams& p, const Memory& m, const Key& key, int head, int at) {
    const int* plane = p.planes + (head * PLANES + at) * 3;
    const uint64_t turn = __ldg(p.turns + __ldg(plane));
    const float a = bfloat(m.key[__ldg(plane + 1)][key.token]);
    const float b = bfloat(m.key[__ldg(plane + 2)][key.token]);
    // the product wraps as the angle does
    const uint32_t phase =
        (uint32_t)(turn >> 32) * key.position + __umulhi((uint32_t)turn, key.position);
    const float angle = (float)(int)phase * RADIANS;
    const float c = cos_fast(angle), s = sin_fast(angle);
    x = (a * c + b * s) * key.inverse;
    y = (b * c - a * s) * key.inverse;
    const float4 root = __ldg((const float4*)p.roots + head * PLANES + at);
    u = root.x * x + root.y * y;
    v = root.z * x + root.w * y;
  }
};

// Nearest of LEVELS points of a slot, STRIDE apart.
template <int COUNT, int STRIDE>
INLINE int nearest(const float2* seen, float u, float v) {
  int best = 0x7fffffff;
#pragma unroll
  for (int level = 0; level < COUNT; level++) {
    const float2 s = seen[level * STRIDE];
    best = nearer(best, u - s.x, v - s.y, -COUNT, level);
  }
  return best & (COUNT - 1);
}

// Nearest sum of a point of each of two slots, among the candidates of the grid cell.
INLINE int nearest_sum(const EncodeParams& p, const Memory& m, int head, int at, int slot, float u,
                       float v) {
  const float4 box = __ldg(p.boxes + head * p.most_joint + at);
  const float cu = fminf(fmaxf((u - box.x) * box.z, 0.f), GRID - 1.f);
  const float cv = fminf(fmaxf((v - box.y) * box.w, 0.f), GRID - 1.f);
  const uint64_t cell = ((uint64_t)head * p.most_joint + at) * (GRID * GRID) + (int)cu * GRID + (int)cv;
  const uint4 list = __ldg(p.grid + cell);
  const uint32_t word[4] = {list.x, list.y, list.z, list.w};
  // places without a candidate repeat the first one
  const uint32_t none = __byte_perm(list.x, 0, 0x0000);
  int best = 0x7fffffff;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (w > 0 && __all_sync(ALL_LANES, word[w] == none)) break;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int code = word[w] >> (8 * k) & 255;
      const float2 one = m.seen[slot][0][code >> 4], two = m.seen[slot + 1][0][code & 15];
      best = nearer(best, u - one.x - two.x, v - one.y - two.y, -256, code);
    }
  }
  return best & 255;
}

INLINE void count_in(Key& key, const Plane& plane, float x, float y) {
  key.cosine += plane.x * x + plane.y * y;
  key.length += x * x + y * y;
}

INLINE float2 stored_point(const EncodeParams& p, int head, int slot, int second, int code) {
  return __ldg(p.points + ((head * SLOTS + slot) * 2 + second) * LEVELS + code);
}

// A plane of 8 or 12 bits: two or three slots whose points add.
INLINE void encode_joint(const EncodeParams& p, Memory& m, Key& key, int head, int at, int num_12,
                         bool is_live) {
  const int slot = at < num_12 ? 3 * at : 2 * at + num_12;
  const Plane plane(p, m, key, head, at);
  const int joint = nearest_sum(p, m, head, at, slot, plane.u, plane.v);
  const int one = joint >> 4, two = joint & 15;
  const float2 a = stored_point(p, head, slot, 0, one), b = stored_point(p, head, slot + 1, 0, two);
  float x = a.x + b.x, y = a.y + b.y;
  m.code[slot][key.token] = is_live ? one : 0;
  m.code[slot + 1][key.token] = is_live ? two : 0;
  if (at < num_12) {
    const float2 s = m.seen[slot][0][one], t = m.seen[slot + 1][0][two];
    const int three =
        nearest<LEVELS, 1>(m.seen[slot + 2][0], plane.u - s.x - t.x, plane.v - s.y - t.y);
    const float2 c = stored_point(p, head, slot + 2, 0, three);
    x += c.x, y += c.y;
    m.code[slot + 2][key.token] = is_live ? three : 0;
  }
  count_in(key, plane, x, y);
}

// All slots of a key; two threads share its planes.
INLINE void encode_slots(const EncodeParams& p, Memory& m, Key& key, int head, int half,
                         bool is_live) {
  const int* kinds = p.kinds + head * 5;
  const int num_12 = __ldg(kinds), joint = num_12 + __ldg(kinds + 1), num_4 = __ldg(kinds + 2);
  const int pairs = __ldg(kinds + 3), bare = __ldg(kinds + 4);
  for (int at = half; at < joint; at += 2) encode_joint(p, m, key, head, at, num_12, is_live);
  const int first_4 = 2 * joint + num_12;
  for (int k = half; k < num_4; k += 2) {
    const Plane plane(p, m, key, head, joint + k);
    const int code = nearest<LEVELS, 1>(m.seen[first_4 + k][0], plane.u, plane.v);
    const float2 point = stored_point(p, head, first_4 + k, 0, code);
    m.code[first_4 + k][key.token] = is_live ? code : 0;
    count_in(key, plane, point.x, point.y);
  }
  const int first_pair = first_4 + num_4;
  for (int k = half; k < pairs; k += 2) {
    const int slot = first_pair + k, at = joint + num_4 + 2 * k;
    const Plane one(p, m, key, head, at), two(p, m, key, head, at + 1);
    const int low = nearest<4, 1>(m.seen[slot][0], one.u, one.v);
    const int high = nearest<4, 4>(m.seen[slot][1], two.u, two.v);
    const float2 a = stored_point(p, head, slot, 0, low), b = stored_point(p, head, slot, 1, 4 * high);
    count_in(key, one, a.x, a.y);
    count_in(key, two, b.x, b.y);
    m.code[slot][key.token] = is_live ? low + 4 * high : 0;
  }
  const int first_bare = joint + num_4 + 2 * pairs;
  for (int at = first_bare + half; at < first_bare + bare; at += 2) {
    const float2 point = __ldg(p.constants + head * PLANES + at);
    count_in(key, Plane(p, m, key, head, at), point.x, point.y);
  }
}

// Transposed keys and the points of their head to shared memory; returns half a key's square.
INLINE float load_keys(const EncodeParams& p, Memory& m, long long row, int head, int token, int half,
                       int tid) {
  const uint4* key = (const uint4*)(p.keys + (row * PAGE + token) * HEAD_DIM);
  float square = 0.f;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++) {
    const int at = half * (HEAD_DIM / 16) + c;
    const uint4 v = key[at];
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float a = bfloat(word[w] & 0xffff), b = bfloat(word[w] >> 16);
      m.key[8 * at + 2 * w][token] = (uint16_t)word[w];
      m.key[8 * at + 2 * w + 1][token] = (uint16_t)(word[w] >> 16);
      square += a * a + b * b;
    }
  }
  constexpr int WORDS = SLOTS * 2 * LEVELS / 2;  // of 16 bytes
  const uint4* seen = (const uint4*)(p.seen + head * SLOTS * 2 * LEVELS);
  for (int x = tid; x < WORDS; x += THREADS) ((uint4*)m.seen)[x] = __ldg(seen + x);
  return square;
}

// Codes, radius codes; returns the range of the radii.
INLINE Affine encode_keys(const EncodeParams& p, Memory& m, uint8_t* page, long long row, int head,
                          int count, int tid) {
  const int token = tid % PAGE, half = tid / PAGE;
  m.sum[half][0][token] = load_keys(p, m, row, head, token, half, tid);
  __syncthreads();
  const float radius = sqrtf(m.sum[0][0][token] + m.sum[1][0][token]);
  Key key = {token, (uint32_t)p.positions[row * PAGE + token], 1.f / fmaxf(radius, TINY), 0.f, 0.f};
  const bool is_live = token < count;
  encode_slots(p, m, key, head, half, is_live);
  m.sum[half][1][token] = key.cosine;
  m.sum[half][2][token] = key.length;
  __syncthreads();
  const float cosine = m.sum[0][1][token] + m.sum[1][1][token];
  const float length = sqrtf(m.sum[0][2][token] + m.sum[1][2][token]);
  const float x = radius / (cosine > LEAST_COSINE * length ? cosine : fmaxf(length, 1e-6f));
  const Affine affine(m, x, is_live, tid);
  if (tid < PAGE) page[RADIUS_OFFSET + token] = is_live ? (uint8_t)affine.code(x) : 0;
  // two states half a page apart share a byte
  for (int w = tid; w < SLOTS * PAGE / 8; w += THREADS) {
    const uint32_t* code = (const uint32_t*)m.code[w / (PAGE / 8)];
    const int at = w % (PAGE / 8);
    ((uint32_t*)(page + KEY_OFFSET))[w] = code[at] | code[at + PAGE / 8] << 4;
  }
  return affine;
}
