// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine.h"
#include "plan.h"

namespace sphkv {

// Attention of all query heads over pages and tail. Output [heads * rows, head_dim] in the
// original basis, lse [heads * rows]. The result does not depend on the number of threads.
void attend(Engine& engine, const Plan& plan, const Tail& tail, const Queries& queries,
            const Options& options, float* output, float* lse);

}  // namespace sphkv
