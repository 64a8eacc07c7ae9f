// SPDX-License-Identifier: Apache-2.0
// aarch64 with dot products; compiled with -march=armv8.2-a+dotprod.
#define SPHKV_VECTOR_BYTES 16
#include "variant_begin.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace sphkv {
namespace neon {
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "driver.h"
#include "simd_neon.h"
#include "lookup.h"
#include "values.h"
#include "engine_impl.h"

bool is_supported() {
#if defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProduct) != 0;
#else
  return true;  // every Apple processor this can be built for has it
#endif
}
}  // namespace neon

std::unique_ptr<Engine> make_neon_engine() {
  if (!neon::is_supported()) return nullptr;
  return std::make_unique<neon::KernelEngine<neon::LookupKernel>>("neon", neon::kValueDims);
}

}  // namespace sphkv

#else

namespace sphkv {
std::unique_ptr<Engine> make_neon_engine() { return nullptr; }
}  // namespace sphkv

#endif
