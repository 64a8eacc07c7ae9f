// SPDX-License-Identifier: Apache-2.0
// aarch64 with dot products and half precision; compiled with -march=armv8.2-a+dotprod+fp16.
#include "variant_begin.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#define SPHKV_VECTOR_BYTES 16

namespace sphkv {
namespace neon {
constexpr bool kIsExact = false;
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "driver.h"
#include "simd_neon.h"
#include "query_table.h"
#include "lookup.h"
#include "values.h"
#include "states.h"
#include "rebuild.h"
#include "engine_impl.h"

bool is_supported() {
#if defined(__linux__)
  constexpr unsigned long kWanted = 1ul << 20 | 1ul << 10;  // HWCAP_ASIMDDP, HWCAP_ASIMDHP
  return (getauxval(AT_HWCAP) & kWanted) == kWanted;
#else
  return true;  // every Apple processor this can be built for has it
#endif
}
}  // namespace neon

std::unique_ptr<Engine> make_neon_engine() {
  if (!neon::is_supported()) return nullptr;
  return std::make_unique<neon::KernelEngine<neon::LookupKernel>>("neon", neon::kValueDims);
}

std::unique_ptr<Engine> make_neon_rebuild_engine() {
  if (!neon::is_supported()) return nullptr;
  return std::make_unique<neon::KernelEngine<neon::RebuildKernel>>("rebuild", 4);
}

}  // namespace sphkv

#else

namespace sphkv {
std::unique_ptr<Engine> make_neon_engine() { return nullptr; }
std::unique_ptr<Engine> make_neon_rebuild_engine() { return nullptr; }
}  // namespace sphkv

#endif
