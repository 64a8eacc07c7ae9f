// SPDX-License-Identifier: Apache-2.0
// Recoding with 512-bit vectors; compiled with -mavx2 -mfma -mavx512f -mavx512bw -mavx512dq
// -mavx512vl. Processors without VNNI, which the decode kernels want, have these as well.
#include "variant_begin.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__FMA__)
#include <immintrin.h>

#define SPHKV_VECTOR_BYTES 64

namespace sphkv {
namespace recode512 {
constexpr bool kIsExact = false;
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "states.h"
#include "search.h"
#include "recode_impl.h"
}  // namespace recode512

RecodePage avx512_recoder() {
  const bool has_all = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_all ? &recode512::recode_page : nullptr;
}

}  // namespace sphkv

#else

namespace sphkv {
RecodePage avx512_recoder() { return nullptr; }
}  // namespace sphkv

#endif
