// SPDX-License-Identifier: Apache-2.0
// A launch of a kernel on the CPU, one block after another.
#include SOURCE

static char message[256];

// Null, or what went wrong.
extern "C" const char* launch(const void* params, int x, int y, int z, int threads) {
  host::kernel = [](const void* p) { ENTRY(*(const PARAMS*)p); };
  host::kernel_params = params;
  host::block.grid = {(uint32_t)x, (uint32_t)y, (uint32_t)z};
  host::failure.clear();
  try {
    for (uint32_t i = 0; i < (uint32_t)(x * y * z); i++)
      host::run_block({i % x, i / x % y, i / x / y}, threads);
  } catch (const std::exception& error) {
    const host::Index at = host::block.index;
    snprintf(message, sizeof message, "block %u, %u, %u: %s", at.x, at.y, at.z, error.what());
    return message;
  }
  return nullptr;
}
