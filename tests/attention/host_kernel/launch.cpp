// SPDX-License-Identifier: Apache-2.0
// A launch of a kernel on the CPU, one block after another.
#include SOURCE

static char message[256];

// Null, or what went wrong.
extern "C" const char* launch(const void* params, int blocks, int threads) {
  host::kernel = [](const void* p) { ENTRY(*(const PARAMS*)p); };
  host::kernel_params = params;
  host::block.grid = blocks;
  host::failure.clear();
  try {
    for (int index = 0; index < blocks; index++) host::run_block(index, threads);
  } catch (const std::exception& error) {
    snprintf(message, sizeof message, "block %d: %s", host::block.index, error.what());
    return message;
  }
  return nullptr;
}
