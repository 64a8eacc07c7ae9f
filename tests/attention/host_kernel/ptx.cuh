// SPDX-License-Identifier: Apache-2.0
// The functions of the kernels' own ptx.cuh, for a CPU. What memory and barriers do is done at once;
// rounding is that of the instructions.
#pragma once
#include "threads.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)
#define INLINE inline
#define CONSTANT_FUNCTION constexpr
#define MINUS_INFINITY (-INFINITY)
#define threadIdx (host::Index{(uint32_t)host::block.current, 0, 0})
#define blockIdx (host::block.index)
#define gridDim (host::block.grid)

namespace host {
template <class To, class From>
To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
// By bits: tensor cores convert every element of their operands.
inline float half_to_float(uint16_t h) {
  const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023, sign = (uint32_t)(h >> 15) << 31;
  if (exponent == 0) return std::copysign((float)mantissa * 0x1p-24f, cast<float>(sign));
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return cast<float>(sign | wide << 23 | mantissa << 13);
}
inline uint16_t float_to_half(float x) {
  const uint32_t bits = cast<uint32_t>(x), size = bits & 0x7fffffff;
  const uint16_t sign = bits >> 16 & 0x8000;
  if (std::isnan(x)) return 0x7fff;
  if (size >= cast<uint32_t>(65520.f)) return sign | 0x7c00;
  // ties to even; a carry moves on to the exponent by itself
  if (size < cast<uint32_t>(0x1p-14f)) return sign | (uint16_t)std::nearbyint(cast<float>(size) * 0x1p24f);
  return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1) >> 13) - (112 << 10));
}
inline float bfloat_to_float(uint16_t h) { return cast<float>((uint32_t)h << 16); }
inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = cast<uint32_t>(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }
}  // namespace host

using std::max;
using std::min;
struct uint2 {
  uint32_t x, y;
};
struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
constexpr uint32_t ALL_LANES = 0xffffffffu;

// ---- what the compiler provides ----

template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
INLINE float __uint_as_float(uint32_t x) { return host::cast<float>(x); }
INLINE uint32_t __float_as_uint(float x) { return host::cast<uint32_t>(x); }
INLINE float __int_as_float(int x) { return host::cast<float>(x); }
INLINE int __float_as_int(float x) { return host::cast<int>(x); }
INLINE float __saturatef(float x) { return std::fmin(std::fmax(x, 0.f), 1.f); }
INLINE uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
INLINE int __ffs(int x) { return __builtin_ffs(x); }
INLINE float __fmaf_rd(float a, float b, float c) {
  // the product and the sum are exact in 80 bits or more; what is lost is rounded down
  const double exact = (double)a * b + c;
  const float near = (float)exact;
  return near > exact ? std::nextafter(near, -INFINITY) : near;
}
INLINE float __fdividef(float a, float b) { return a / b; }
INLINE float rsqrtf(float x) { return 1.f / std::sqrt(x); }
INLINE int __popc(uint32_t x) { return __builtin_popcount(x); }
INLINE void __trap() { throw std::logic_error("the kernel trapped"); }
INLINE uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | (uint64_t)b << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= (bytes >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return out;
}
INLINE void __syncthreads() { host::join(0, host::block.size); }
INLINE void __syncwarp() {
  const uint32_t nothing[1] = {0};
  host::exchange(nothing);
}
INLINE uint32_t __ballot_sync(uint32_t, bool is_set) {
  const uint32_t mine[1] = {is_set};
  const auto all = host::exchange(mine);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
  return bits;
}
INLINE bool __any_sync(uint32_t mask, bool is_set) { return __ballot_sync(mask, is_set) != 0; }
INLINE bool __all_sync(uint32_t mask, bool is_set) { return __ballot_sync(mask, is_set) == ALL_LANES; }
template <class T>
T __reduce_min_sync(uint32_t, T x) {
  const uint32_t mine[1] = {host::cast<uint32_t>(x)};
  const auto all = host::exchange(mine);
  for (int lane = 0; lane < 32; lane++) x = std::min(x, host::cast<T>(all[lane][0]));
  return x;
}
INLINE int __reduce_max_sync(uint32_t mask, int x) { return -__reduce_min_sync(mask, -x); }
INLINE int __reduce_add_sync(uint32_t, int x) {
  const uint32_t mine[1] = {(uint32_t)x};
  const auto all = host::exchange(mine);
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; lane++) sum += all[lane][0];
  return (int)sum;
}
template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
  const uint32_t mine[1] = {host::cast<uint32_t>(x)};
  return host::cast<T>(host::exchange(mine)[lane][0]);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int k) {
  return __shfl_sync(mask, x, host::block.current % 32 ^ k);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int k) {
  const int lane = host::block.current % 32;
  return __shfl_sync(mask, x, lane < k ? lane : lane - k);
}

// ---- shared memory ----

INLINE uint32_t load_shared(uint32_t address) { return host::shared<uint32_t>(address); }
template <int OFFSET>
INLINE uint32_t load_shared_at(uint32_t address) { return load_shared(address + OFFSET); }
INLINE uint2 load_shared2(uint32_t at) {
  if (at % 8) throw std::out_of_range("a pair of words is misaligned");
  return {load_shared(at), load_shared(at + 4)};
}
INLINE uint4 load_shared4(uint32_t at) {
  if (at % 16) throw std::out_of_range("four words are misaligned");
  return {load_shared(at), load_shared(at + 4), load_shared(at + 8), load_shared(at + 12)};
}
INLINE void store_shared(uint32_t address, uint32_t v) { host::shared<uint32_t>(address) = v; }
INLINE void store_shared2(uint32_t at, uint32_t a, uint32_t b) {
  if (at % 8) throw std::out_of_range("a pair of words is misaligned");
  store_shared(at, a), store_shared(at + 4, b);
}
INLINE float load_shared_float(uint32_t address) { return host::shared<float>(address); }
INLINE void store_shared_float(uint32_t address, float v) { host::shared<float>(address) = v; }
INLINE void add_shared(uint32_t address, uint32_t v) { host::shared<uint32_t>(address) += v; }
INLINE uint32_t shared_address(const void* at) { return (const uint8_t*)at - host::block.shared; }

// ---- device memory ----

constexpr uint32_t EMPTY = 0xffffffffu;

// Blocks run one after another: what is not there now never will be.
INLINE void fill_from_device(uint32_t& v, const uint32_t* at) {
  if (v == EMPTY) v = *at;
  if (v == EMPTY) throw std::logic_error("a block waits for what nobody wrote");
}
INLINE void fill_from_device2(uint2& v, const uint32_t* at) {
  if ((uint64_t)at % 8) throw std::out_of_range("a pair of words is misaligned");
  if (std::max(v.x, v.y) == EMPTY) v = {*at, at[1]};
  if (std::max(v.x, v.y) == EMPTY) throw std::logic_error("a block waits for what nobody wrote");
}
INLINE void pause() {}
INLINE void store_device(uint32_t* at, uint32_t v) { *at = v; }
INLINE void store_device2(uint32_t* at, uint32_t a, uint32_t b) {
  if ((uint64_t)at % 8) throw std::out_of_range("a pair of words is misaligned");
  at[0] = a, at[1] = b;
}

// ---- barriers and copies ----

INLINE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  host::block.barriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
INLINE void barrier_expect(uint32_t barrier, uint32_t bytes) { host::arrive(barrier, 1, (int)bytes); }
INLINE void barrier_arrive(uint32_t barrier) { host::arrive(barrier, 1, 0); }
INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
  host::wait_while(host::block.barriers.at(barrier).phase, parity);
}
INLINE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || (uint64_t)from % 16 || bytes % 16)
    throw std::out_of_range("a bulk copy is misaligned");
  host::shared<uint8_t>(to + bytes - 1) = 0;
  std::memcpy(&host::shared<uint8_t>(to), from, bytes);
  host::arrive(barrier, 0, -(int)bytes);
}
template <int BYTES>
INLINE void copy_small(uint32_t to, const void* from) {
  if (to % BYTES || (uint64_t)from % BYTES) throw std::out_of_range("a copy is misaligned");
  host::shared<uint8_t>(to + BYTES - 1) = 0;
  std::memcpy(&host::shared<uint8_t>(to), from, BYTES);
}
INLINE void track_copies(uint32_t barrier) { host::arrive(barrier, 1, 0); }
INLINE void publish_barriers() {}
template <int COUNT>
INLINE void sync_some(int barrier) { host::join(barrier, COUNT); }
template <int COUNT>
INLINE void shrink_registers() {}
template <int COUNT>
INLINE void grow_registers() {}
INLINE void start_dependents() {}
INLINE void wait_for_previous() {}

// ---- arithmetic ----

INLINE float exp2_fast(float x) { return std::exp2(x); }
INLINE float log2_fast(float x) { return std::log2(x); }
INLINE float reciprocal_fast(float x) { return 1.f / x; }
INLINE float sin_fast(float x) { return std::sin(x); }
INLINE float cos_fast(float x) { return std::cos(x); }
INLINE float low_half(uint32_t pair) { return host::half_to_float((uint16_t)pair); }
INLINE float high_half(uint32_t pair) { return low_half(pair >> 16); }
INLINE uint32_t pack_half2(float low, float high) {
  return host::pack(host::float_to_half(low), host::float_to_half(high));
}
INLINE uint32_t pack_bfloat2(float low, float high) {
  return host::pack(host::float_to_bfloat(low), host::float_to_bfloat(high));
}
INLINE int and_or(int a, int b, int c) { return (a & b) | c; }
INLINE int unknown(int x) { return x; }
INLINE uint32_t multiply_add(uint32_t a, int b, uint32_t c) { return a * (uint32_t)b + c; }
INLINE float rounded_half(float x) { return host::half_to_float(host::float_to_half(x)); }
INLINE uint32_t combine_half2(uint32_t point, uint32_t u, uint32_t v) {
  const float x = low_half(point), y = high_half(point);
  return pack_half2(y * low_half(v) + rounded_half(x * low_half(u)),
                    y * high_half(v) + rounded_half(x * high_half(u)));
}
INLINE float warp_max(float x) {
  for (int k = 1; k < 32; k *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, k));
  return x;
}
INLINE float warp_sum(float x) {
  for (int k = 1; k < 32; k *= 2) x += __shfl_xor_sync(ALL_LANES, x, k);
  return x;
}

// ---- tensor cores: lane (g, t) holds rows g and g + 8, or column g, of an operand ----

namespace host {
using Words = const uint32_t (*)[MAX_WORDS];
inline uint16_t half_of(uint32_t word, int k) { return (uint16_t)(word >> 16 * (k & 1)); }
// Element of A [16][16 or 8] in words 0 ... 3, and of B [16 or 8][8] from word `first` on.
inline uint16_t a_at(Words w, int row, int k) {
  return half_of(w[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k);
}
inline uint16_t b_at(Words w, int first, int k, int column) {
  return half_of(w[column * 4 + k % 8 / 2][first + k / 8], k);
}
template <class Convert>
void multiply(float (&c)[4], const uint32_t (&mine)[6], Convert convert) {
  const Words w = exchange(mine);
  const int g = block.current % 32 / 4, t = block.current % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++)
      c[i] += convert(a_at(w, g + i / 2 * 8, k)) * convert(b_at(w, 4, k, 2 * t + i % 2));
}
}  // namespace host

INLINE void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1) {
  host::multiply(c, {a0, a1, a2, a3, b0, b1}, host::half_to_float);
}
INLINE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  host::multiply(c, {a0, a1, a2, a3, b0, b1}, host::bfloat_to_float);
}
INLINE uint2 mma_half(uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t mine[3] = {a0, a1, b};
  const host::Words w = host::exchange(mine);
  const int g = host::block.current % 32 / 4, t = host::block.current % 4;
  float d[4] = {};
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 8; k++)
      d[i] += host::half_to_float(host::half_of(w[g * 4 + k / 2][i / 2], k)) *
              host::half_to_float(host::b_at(w, 2, k, 2 * t + i % 2));
  return {pack_half2(d[0], d[1]), pack_half2(d[2], d[3])};
}
INLINE uint32_t transpose_8x8(uint32_t a) {
  const uint32_t mine[1] = {a};
  const host::Words w = host::exchange(mine);
  const int g = host::block.current % 32 / 4, t = host::block.current % 4;
  return host::pack(host::half_of(w[8 * t + g / 2][0], g), host::half_of(w[8 * t + 4 + g / 2][0], g));
}
INLINE void mma_bytes(int (&c)[4], uint4 a, uint2 b) {
  const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
  const host::Words w = host::exchange(mine);
  const int g = host::block.current % 32 / 4, t = host::block.current % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 32; k++)
      c[i] += (w[g * 4 + k % 16 / 4][k / 16 * 2 + i / 2] >> 8 * (k % 4) & 255) *
              (w[(2 * t + i % 2) * 4 + k % 16 / 4][4 + k / 16] >> 8 * (k % 4) & 255);
}
INLINE void store_transposed(uint32_t address, uint4 v) {
  const uint32_t mine[1] = {address}, word[4] = {v.x, v.y, v.z, v.w};
  const host::Words w = host::exchange(mine);
  const int g = host::block.current % 32 / 4, t = host::block.current % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 2; k++)
      host::shared<uint16_t>(w[8 * i + 2 * t + k][0] + 2 * g) = host::half_of(word[i], k);
  __syncwarp();
}
