// SPDX-License-Identifier: Apache-2.0
#include "recode.h"

#include "team.h"

namespace sphkv {

void recode_pages(const Recoding& job, RecodePage recode, int num_threads) {
  run_phases(num_threads, {{job.rows, [&](int row) { recode(job, row); }}});
}

}  // namespace sphkv
