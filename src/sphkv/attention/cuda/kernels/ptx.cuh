// SPDX-License-Identifier: Apache-2.0
// One function per machine instruction the kernel needs. No CUDA header is included, so that the
// run-time compiler needs nothing but these files.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

#define INLINE __device__ __forceinline__
#define CONSTANT_FUNCTION __host__ __device__ constexpr

constexpr uint32_t ALL_LANES = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)

// ---- shared memory; addresses are 32-bit offsets of the shared window ----

INLINE uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// The offset is part of the instruction: it costs nothing.
template <int OFFSET>
INLINE uint32_t load_shared_at(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1+%2];" : "=r"(v) : "r"(address), "n"(OFFSET));
  return v;
}

INLINE uint2 load_shared2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

INLINE uint4 load_shared4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

INLINE void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

INLINE void add_shared(uint32_t address, uint32_t v) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

INLINE void store_shared2(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// Four 8x8 matrices of 16-bit words, one row per four lanes, each stored as its transpose. Lane
// 8 i + r names where row r of the transposed matrix i begins.
INLINE void store_transposed(uint32_t address, uint4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

INLINE float load_shared_float(uint32_t address) { return __uint_as_float(load_shared(address)); }

INLINE void store_shared_float(uint32_t address, float v) {
  store_shared(address, __float_as_uint(v));
}

INLINE uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// ---- device memory that other blocks write and read meanwhile ----

constexpr uint32_t EMPTY = 0xffffffffu;

// Reads a word that is EMPTY so far.
INLINE void fill_from_device(uint32_t& v, const uint32_t* at) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %0, %2;\n@p ld.relaxed.gpu.global.b32 %0, [%1];\n}"
      : "+r"(v)
      : "l"(at), "n"(EMPTY)
      : "memory");
}

// Reads two words of which one is EMPTY so far.
INLINE void fill_from_device2(uint2& v, const uint32_t* at) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 t;\nmax.u32 t, %0, %1;\nsetp.eq.u32 p, t, %3;\n"
      "@p ld.relaxed.gpu.global.v2.b32 {%0,%1}, [%2];\n}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(at), "n"(EMPTY)
      : "memory");
}

// Lets others use the memory while a word is waited for.
INLINE void pause() { asm volatile("nanosleep.u32 200;"); }

INLINE void store_device(uint32_t* at, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

INLINE void store_device2(uint32_t* at, uint32_t a, uint32_t b) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1,%2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}

// ---- barriers in shared memory and bulk copies that complete on them ----

INLINE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

INLINE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

INLINE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The hint (nanoseconds) lets the hardware put a waiting warp to sleep; spinning would take issue
// slots from the warps that have work.
INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
      "r"(parity), "r"(1000000)
      : "memory");
}

INLINE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// 4 or 8 bytes by this lane; `track_copies` lets a barrier wait for all copies of the lane so far.
template <int BYTES>
INLINE void copy_small(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
               : "memory");
}

INLINE void track_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

INLINE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- warps with different work ----

// Joins COUNT threads of a block; those that meet at other times have other barriers, 1 to 15.
template <int COUNT>
INLINE void sync_some(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

// A group of four warps gives registers up, or waits until it gets more.
template <int COUNT>
INLINE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
INLINE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- launches that overlap ----

// Lets a kernel that was launched to overlap with this one begin.
INLINE void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before this one is done and its results can be read.
INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- arithmetic ----

// C[16x8] += A[16x16] * B[16x8], half in, float out.
INLINE void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

INLINE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// C[16x8] += A[16x32] * B[32x8], bytes in, integers out.
INLINE void mma_bytes(int (&c)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// D[16x8] = A[16x8] * B[8x8], all half. D is laid out as the B operand of the product above: rows
// g in the first word, g + 8 in the second.
INLINE uint2 mma_half(uint32_t a0, uint32_t a1, uint32_t b) {
  uint2 d;
  asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%5,%5};"
      : "=r"(d.x), "=r"(d.y)
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
  return d;
}

// An 8x8 matrix of 16-bit words, one row per four lanes, turned into its transpose.
INLINE uint32_t transpose_8x8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE uint32_t pack_half2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

INLINE uint32_t pack_bfloat2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

INLINE float sin_fast(float x) {
  float y;
  asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE float cos_fast(float x) {
  float y;
  asm("cos.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE float low_half(uint32_t pair) {
  float y;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(y) : "r"(pair));
  return y;
}

INLINE float high_half(uint32_t pair) { return low_half(pair >> 16); }

INLINE int and_or(int a, int b, int c) {
  int d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A number that the compiler does not know.
INLINE int unknown(int x) {
  int y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

INLINE uint32_t multiply_add(uint32_t a, int b, uint32_t c) {
  uint32_t d;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// point.x * u + point.y * v, all half2; the broadcasts are free in the instruction.
INLINE uint32_t combine_half2(uint32_t point, uint32_t u, uint32_t v) {
  uint32_t d;
  asm("{\n.reg .b16 x, y;\n.reg .b32 xx, yy, t;\n"
      "mov.b32 {x, y}, %1;\nmov.b32 xx, {x, x};\nmov.b32 yy, {y, y};\n"
      "mul.rn.f16x2 t, xx, %2;\nfma.rn.f16x2 %0, yy, %3, t;\n}"
      : "=r"(d)
      : "r"(point), "r"(u), "r"(v));
  return d;
}

// ---- all lanes of a warp ----

INLINE float warp_max(float x) {
#pragma unroll
  for (int k = 1; k < 32; k *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, k));
  return x;
}

INLINE float warp_sum(float x) {
#pragma unroll
  for (int k = 1; k < 32; k *= 2) x += __shfl_xor_sync(ALL_LANES, x, k);
  return x;
}
