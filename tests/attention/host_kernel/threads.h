// SPDX-License-Identifier: Apache-2.0
// A thread block on one CPU thread. Every CUDA thread is a fiber; it gives way where it must wait for
// others: at barriers and at instructions that a warp executes together. A fiber is begun as a context and
// goes on by jumps, because a switch of contexts is a call of the system each time.
#pragma once
#include "standard.h"

namespace host {

constexpr int LANES = 32;
constexpr int MAX_WORDS = 8;  // a lane's part of a joint instruction
constexpr size_t STACK_BYTES = 1 << 16;
constexpr uint32_t SHARED_START = 1024;
constexpr uint32_t SHARED_BYTES = 232448;

// What the lanes of a warp show each other. Two buffers do: a lane can be one exchange ahead at most.
struct Exchange {
  uint32_t words[2][LANES][MAX_WORDS];
  int arrived = 0;
  uint32_t generation = 0;
};

struct Arrivals {
  int count = 0, pending = 0, bytes = 0;
  uint32_t phase = 0;
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool has_begun = false;
  bool is_done = false;
  // what it waits for: that this is another number
  const uint32_t* watched = nullptr;
  uint32_t seen = 0;

  bool can_go_on() const { return !is_done && (watched == nullptr || *watched != seen); }
};

struct Index {
  uint32_t x, y, z;
};

struct Block {
  Index index = {}, grid = {};
  int size = 0, current = 0;
  long events = 0;  // everything that may let somebody go on
  std::vector<Fiber> fibers;
  std::vector<Exchange> warps;
  std::map<uint32_t, Arrivals> barriers;
  std::map<int, std::pair<int, uint32_t>> joins;  // arrived, generation of named barriers
  jmp_buf scheduler;
  alignas(1024) uint8_t shared[SHARED_START + SHARED_BYTES];
};

inline Block block;

// Out of the current fiber; back when the scheduler comes to it again, which says so in `current`.
inline void give_way() {
  if (_setjmp(block.fibers[block.current].place) == 0) _longjmp(block.scheduler, 1);
}

// Returns once a number that others change is no longer what it was.
inline void wait_while(const uint32_t& watched, uint32_t seen) {
  if (watched != seen) return;
  Fiber& fiber = block.fibers[block.current];
  fiber.watched = &watched, fiber.seen = seen;
  give_way();
  fiber.watched = nullptr;
}

// Into a fiber; back when it gives way.
inline void go_on(Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.place, 1);
  fiber.has_begun = true;
  setcontext(&fiber.context);
}

template <class T>
T& shared(uint32_t address) {
  if (address < SHARED_START || address + sizeof(T) > SHARED_START + SHARED_BYTES ||
      address % alignof(T))
    throw std::out_of_range("shared memory address " + std::to_string(address));
  return *(T*)(block.shared + address);
}

// ---- together with the other lanes ----

// All lanes' words, once all have shown theirs.
template <int COUNT>
const uint32_t (*exchange(const uint32_t (&mine)[COUNT]))[MAX_WORDS] {
  Exchange& warp = block.warps[block.current / LANES];
  const uint32_t generation = warp.generation;
  std::memcpy(warp.words[generation % 2][block.current % LANES], mine, sizeof mine);
  block.events++;
  if (++warp.arrived == LANES) {
    warp.arrived = 0;
    warp.generation++;
  }
  wait_while(warp.generation, generation);
  return warp.words[generation % 2];
}

inline void join(int barrier, int count) {
  auto& [arrived, generation] = block.joins[barrier];
  const uint32_t mine = generation;
  block.events++;
  if (++arrived == count) {
    arrived = 0;
    generation++;
  }
  wait_while(generation, mine);
}

// ---- barriers in shared memory ----

inline void settle(Arrivals& barrier) {
  if (barrier.pending > 0 || barrier.bytes > 0) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
}

inline void arrive(uint32_t address, int arrivals, int bytes) {
  Arrivals& barrier = block.barriers.at(address);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) throw std::logic_error("too many arrivals at a barrier");
  block.events++;
  settle(barrier);
}

// ---- a launch ----

using Kernel = void (*)(const void*);
inline Kernel kernel;
inline const void* kernel_params;
inline std::string failure;

// One block after another; between them a fiber waits at the end.
inline void run_fiber() {
  for (;;) {
    try {
      kernel(kernel_params);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    block.fibers[block.current].is_done = true;
    block.events++;
    give_way();
  }
}

inline void start_fiber(Fiber& fiber) {
  const bool is_waiting = fiber.has_begun && fiber.is_done;
  fiber.is_done = false;
  fiber.watched = nullptr;
  if (is_waiting) return;
  fiber.has_begun = false;
  if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_fiber, 0);
}

inline void run_block(Index index, int size) {
  block.index = index, block.size = size;
  block.fibers.resize(size);
  block.warps.assign((size + LANES - 1) / LANES, Exchange());
  block.barriers.clear();
  block.joins.clear();
  // what nobody wrote must not look like something
  std::memset(block.shared, 0xff, sizeof block.shared);
  for (Fiber& fiber : block.fibers) start_fiber(fiber);
  for (int left = size; left > 0;) {
    const long before = block.events;
    for (int i = 0; i < size; i++) {
      if (!block.fibers[i].can_go_on()) continue;
      block.current = i;
      go_on(block.fibers[i]);
      if (!failure.empty()) throw std::runtime_error(failure);
      left -= block.fibers[i].is_done;
    }
    if (left > 0 && block.events == before) throw std::runtime_error("all threads wait");
  }
}

}  // namespace host
