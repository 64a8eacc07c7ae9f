// SPDX-License-Identifier: Apache-2.0
#define SPHKV_VECTOR_BYTES 16
#include "variant_begin.h"

namespace sphkv {
namespace exact {
constexpr bool kIsExact = true;
#include "softmax.h"
#include "phases.h"
#include "dense.h"
#include "driver.h"
#include "exact.h"
#include "states.h"
#include "rebuild.h"
#include "search.h"
#include "recode_impl.h"
#include "fit_impl.h"
#include "drop_impl.h"
#include "engine_impl.h"
}  // namespace exact

std::unique_ptr<Engine> make_exact_engine() {
  return std::make_unique<exact::KernelEngine<exact::ExactKernel>>("float32", 2);
}

std::unique_ptr<Engine> make_exact_rebuild_engine() {
  return std::make_unique<exact::KernelEngine<exact::RebuildKernel>>("rebuild", 4);
}

RecodePage plain_recoder() { return &exact::recode_page; }

const PromptRows* plain_prompt_rows() { return &exact::kPromptRows; }

}  // namespace sphkv
