#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

// libgomp's entry points, called by name: what g++ emits for `#pragma omp parallel`. OpenBLAS's openmp variant brings
// libgomp along, so g++ and clang builds share its one runtime, and OpenBLAS sees that it runs inside a parallel
// region.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_in_parallel(void);
}

namespace rowan::detail {

namespace {

struct Work {
  Work(const std::function<void(std::int64_t, std::int64_t)>& body, std::int64_t count, std::int64_t block)
      : f(body), n(count), grain(block) {}

  const std::function<void(std::int64_t, std::int64_t)>& f;
  const std::int64_t n;
  const std::int64_t grain;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;

  void run() {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::int64_t begin = next.fetch_add(grain);
      if (begin >= n) return;
      try {
        f(begin, std::min(n, begin + grain));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    }
  }
};

}  // namespace

void parallel_for(std::int64_t n, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& f) {
  if (n <= 0) return;
  Work work(f, n, std::max<std::int64_t>(grain, 1));
  if (omp_in_parallel() != 0) {
    work.run();
  } else {
    // A team of at least the full size even for one block: inside it OpenBLAS stays single-threaded, so bits do not
    // depend on cores.
    GOMP_parallel([](void* data) { static_cast<Work*>(data)->run(); }, &work, 0, 0);
  }
  if (work.error) std::rethrow_exception(work.error);
}

}  // namespace rowan::detail
