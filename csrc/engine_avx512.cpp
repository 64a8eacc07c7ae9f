// SPDX-License-Identifier: Apache-2.0
// x86-64 with AVX-512 VNNI: kernels on 512-bit vectors (wide.h, simd_avx512.h). Compiled with
// -mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512vnni.
#include "variant_begin.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__FMA__)
#include <immintrin.h>

#define SPHKV_VECTOR_BYTES 64
#define SPHKV_HAS_VNNI 1
#define SPHKV_WIDE_VALUES 1

namespace sphkv {
namespace avx512 {
constexpr bool kIsExact = false;
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "driver.h"
#include "simd_x86.h"
#include "simd_avx512.h"
#include "query_table.h"
#include "lookup.h"
#include "values.h"
#include "wide.h"
#include "states.h"
#include "rebuild.h"
#include "engine_impl.h"
}  // namespace avx512

static bool has_avx512() {
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

std::unique_ptr<Engine> make_avx512_engine() {
  if (!has_avx512()) return nullptr;
  return std::make_unique<avx512::KernelEngine<avx512::WideKernel>>("avx512", avx512::kValueDims);
}

std::unique_ptr<Engine> make_avx512_rebuild_engine() {
  if (!has_avx512()) return nullptr;
  return std::make_unique<avx512::KernelEngine<avx512::RebuildKernel>>("rebuild", 4);
}

}  // namespace sphkv

#else

namespace sphkv {
std::unique_ptr<Engine> make_avx512_engine() { return nullptr; }
std::unique_ptr<Engine> make_avx512_rebuild_engine() { return nullptr; }
}  // namespace sphkv

#endif
