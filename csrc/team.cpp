// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

namespace sphkv {

namespace {

struct Job {
  const std::function<void(int)>* task;
  int count;
  std::atomic<int> next{0};

  void work() {
    for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) (*task)(i);
  }
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

// Threads that sleep between jobs. Leaked on purpose: joining at exit can deadlock an
// interpreter that is shutting down.
class Pool {
 public:
  void run(int num_threads, Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    grow(num_threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      helpers_ = num_threads - 1;
      busy_ = helpers_;
      ++epoch_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int helpers_ = 0, busy_ = 0, size_ = 0;
  uint64_t epoch_ = 0;

  void grow(int wanted) {
    for (; size_ < wanted; ++size_) {
      std::thread([this, id = size_, seen = epoch_] { loop(id, seen); }).detach();
    }
  }

  void loop(int id, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return epoch_ != seen; });
      seen = epoch_;
      if (id >= helpers_) continue;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }
};

Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

void parallel_for(int num_threads, int count, const std::function<void(int)>& task) {
  Job job{&task, count};
  num_threads = num_threads < count ? num_threads : count;
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
