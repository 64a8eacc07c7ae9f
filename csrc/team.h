// SPDX-License-Identifier: Apache-2.0
// Threads for one decode step.
//
// PyTorch's OpenMP team spins for a while after each operation. A pool of our own would fight it
// for the cores, so the team is borrowed through its stable entry point where the process has
// one; otherwise a small pool of our own serves.
#pragma once

#include <functional>
#include <vector>

namespace sphkv {

// Tasks 0 .. count - 1, in any order; all are done before the next phase begins.
struct Phase {
  int count;
  std::function<void(int)> task;
};

// Runs phases on the calling thread and on up to num_threads - 1 helpers. Between phases nobody
// waits for a helper that has not begun: on a busy machine the others do its work.
void run_phases(int num_threads, const std::vector<Phase>& phases);

// "openmp" or "pool": whose threads run_phases uses.
const char* team_name();

}  // namespace sphkv
