// SPDX-License-Identifier: Apache-2.0
// Threads for one decode step.
//
// PyTorch's OpenMP team spins for a while after each operation. A pool of our own would fight it
// for the cores, so the team is borrowed through its stable entry point where the process has
// one; otherwise a small pool of our own serves.
#pragma once

#include <functional>

namespace sphkv {

// Calls task(i) for every i below count, on up to `num_threads` threads; returns when all are done.
void parallel_for(int num_threads, int count, const std::function<void(int)>& task);

// "openmp", "pool" or "none": what parallel_for uses for more than one thread.
const char* team_name();

}  // namespace sphkv
