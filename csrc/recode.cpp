// SPDX-License-Identifier: Apache-2.0
#include "recode.h"

#include "team.h"

namespace sphkv {

void recode_pages(const Recoding& job, int num_threads) {
  RecodePage recode = avx512_recoder();
  if (recode == nullptr) recode = avx2_recoder();
  if (recode == nullptr) recode = plain_recoder();
  run_phases(num_threads, {{job.rows, [&](int row) { recode(job, row); }}});
}

}  // namespace sphkv
