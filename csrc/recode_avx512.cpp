// SPDX-License-Identifier: Apache-2.0
// What writes pages and reads prompts with 512-bit vectors; compiled with -mavx2 -mfma -mavx512f -mavx512bw -mavx512dq
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
#include "fit_impl.h"
#include "drop_impl.h"
}  // namespace recode512

namespace {
bool is_supported() {
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace

RecodePage avx512_recoder() { return is_supported() ? &recode512::recode_page : nullptr; }

const PromptRows* avx512_prompt_rows() {
  return is_supported() ? &recode512::kPromptRows : nullptr;
}

}  // namespace sphkv

#else

namespace sphkv {
RecodePage avx512_recoder() { return nullptr; }
const PromptRows* avx512_prompt_rows() { return nullptr; }
}  // namespace sphkv

#endif
