// SPDX-License-Identifier: Apache-2.0
// x86-64 with AVX2 and FMA; compiled with -mavx2 -mfma.
#include "variant_begin.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#define SPHKV_VECTOR_BYTES 32
#define SPHKV_HAS_VNNI 0

namespace sphkv {
namespace avx2 {
constexpr bool kIsExact = false;
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "driver.h"
#include "simd_x86.h"
#include "query_table.h"
#include "lookup.h"
#include "values.h"
#include "states.h"
#include "rebuild.h"
#include "search.h"
#include "recode_impl.h"
#include "fit_impl.h"
#include "drop_impl.h"
#include "engine_impl.h"
}  // namespace avx2

namespace {
bool is_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace

std::unique_ptr<Engine> make_avx2_engine() {
  if (!is_supported()) return nullptr;
  return std::make_unique<avx2::KernelEngine<avx2::LookupKernel>>("avx2", avx2::kValueDims);
}

std::unique_ptr<Engine> make_avx2_rebuild_engine() {
  if (!is_supported()) return nullptr;
  return std::make_unique<avx2::KernelEngine<avx2::RebuildKernel>>("rebuild", 4);
}

RecodePage avx2_recoder() {
  if (!is_supported()) return nullptr;
  return &avx2::recode_page;
}

const PromptRows* avx2_prompt_rows() { return is_supported() ? &avx2::kPromptRows : nullptr; }

}  // namespace sphkv

#else

namespace sphkv {
std::unique_ptr<Engine> make_avx2_engine() { return nullptr; }
std::unique_ptr<Engine> make_avx2_rebuild_engine() { return nullptr; }
RecodePage avx2_recoder() { return nullptr; }
const PromptRows* avx2_prompt_rows() { return nullptr; }
}  // namespace sphkv

#endif
