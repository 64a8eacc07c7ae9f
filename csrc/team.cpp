// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

namespace sphkv {

namespace {

// Helpers stay awake this long for the next step, the caller for a helper's last task.
constexpr auto kAwake = std::chrono::microseconds(20);

inline void relax() {
#if defined(__aarch64__)
  asm volatile("yield");
#elif defined(__x86_64__)
  asm volatile("pause");
#endif
}

// Polls for a short while, then gives the processor away between polls.
template <class Condition>
void wait_until(const Condition& is_met) {
  const auto start = std::chrono::steady_clock::now();
  while (!is_met()) {
    for (int i = 0; i < 32 && !is_met(); ++i) relax();
    if (std::chrono::steady_clock::now() - start > kAwake) std::this_thread::yield();
  }
}

class Job {
 public:
  explicit Job(const std::vector<Phase>& phases)
      : phases_(phases), progress_(new Progress[phases.size()]) {}

  void work() {
    for (size_t p = 0; p < phases_.size(); ++p) {
      const int count = phases_[p].count;
      Progress& progress = progress_[p];
      for (int i = progress.next.fetch_add(1); i < count; i = progress.next.fetch_add(1)) {
        phases_[p].task(i);
        progress.done.fetch_add(1, std::memory_order_release);
      }
      wait_until([&] { return progress.done.load(std::memory_order_acquire) >= count; });
    }
  }

 private:
  struct Progress {
    std::atomic<int> next{0}, done{0};
  };
  const std::vector<Phase>& phases_;
  std::unique_ptr<Progress[]> progress_;
};

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#if defined(__linux__)
// Takes the runtime that is loaded already, whatever the wheel has named it; loads nothing.
int visit_library(dl_phdr_info* info, size_t, void* found) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(name, "libgomp", 7) != 0 && std::strncmp(name, "libomp", 6) != 0) return 0;
  void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  void* entry = dlsym(library, "GOMP_parallel");
  *static_cast<void**>(found) = entry;
  return entry != nullptr;
}

GompParallel find_openmp() {
  void* found = nullptr;
  dl_iterate_phdr(visit_library, &found);
  return reinterpret_cast<GompParallel>(found);
}
#else
GompParallel find_openmp() { return nullptr; }
#endif

GompParallel openmp() {
  static const GompParallel entry = find_openmp();
  return entry;
}

// Threads that sleep between steps. Leaked on purpose: joining at exit can deadlock an
// interpreter that is shutting down.
class Pool {
 public:
  void run(int num_threads, Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; size_ < num_threads - 1; ++size_) {
        std::thread([this, id = size_] { loop(id); }).detach();
      }
      job_ = &job;
      num_helpers_ = num_threads - 1;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // who has not begun by now never will
    }
    wait_until([&] { return num_inside_.load(std::memory_order_acquire) == 0; });
  }

 private:
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  Job* job_ = nullptr;
  int num_helpers_ = 0, size_ = 0;
  std::atomic<int> num_inside_{0};
  std::atomic<uint64_t> epoch_{0};

  void loop(int id) {
    uint64_t seen = 0;
    for (;;) {
      await_epoch(seen);
      Job* job = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = epoch_.load(std::memory_order_relaxed);
        if (job_ == nullptr || id >= num_helpers_) continue;
        job = job_;
        num_inside_.fetch_add(1, std::memory_order_relaxed);
      }
      job->work();
      num_inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  void await_epoch(uint64_t seen) {
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < kAwake) {
      for (int i = 0; i < 32; ++i) {
        if (epoch_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_relaxed) != seen; });
  }
};

Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

void run_phases(int num_threads, const std::vector<Phase>& phases) {
  Job job(phases);
  if (num_threads <= 1) {
    job.work();
  } else if (openmp() != nullptr) {
    openmp()([](void* data) { static_cast<Job*>(data)->work(); }, &job,
             static_cast<unsigned>(num_threads), 0);
  } else {
    pool().run(num_threads, job);
  }
}

const char* team_name() { return openmp() != nullptr ? "openmp" : "pool"; }

}  // namespace sphkv
