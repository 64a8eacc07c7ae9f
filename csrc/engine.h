// SPDX-License-Identifier: Apache-2.0
// One decode step in three phases, each spread over threads: prepare query tables, attend to
// chunks of pages, merge the chunks of each head.
#pragma once

#include <memory>
#include <vector>

#include "plan.h"

namespace sphkv {

// Pages [begin, end) of a head, or tokens [begin, end) of its tail.
struct Chunk {
  int head;
  bool is_tail;
  int64_t begin, end;
};

struct Step {
  const Plan* plan;
  const Tail* tail;
  const Queries* queries;
  const Options* options;
};

// Kernels of one instruction set, with the query tables of the step they work on.
class Engine {
 public:
  virtual ~Engine();
  virtual const char* name() const = 0;
  // Whether the kernels can read pages of this head dimension.
  virtual bool fits(int head_dim) const = 0;
  virtual void begin(const Step& step) = 0;
  virtual void prepare(int head, int kind) = 0;
  virtual void run(const Chunk& chunk, Partial& out) = 0;
};

// Null where the compiler or the processor lacks the instruction set.
std::unique_ptr<Engine> make_neon_engine();
std::unique_ptr<Engine> make_avx512_engine();
std::unique_ptr<Engine> make_avx2_engine();
std::unique_ptr<Engine> make_exact_engine();

// The same with kernels that rebuild dense states; for comparison.
std::unique_ptr<Engine> make_neon_rebuild_engine();
std::unique_ptr<Engine> make_avx512_rebuild_engine();
std::unique_ptr<Engine> make_avx2_rebuild_engine();
std::unique_ptr<Engine> make_exact_rebuild_engine();

}  // namespace sphkv
