// Rows over CPU threads.
#pragma once

#include <cstdint>
#include <functional>

namespace rowan::detail {

/// Calls f(begin, end) for fixed blocks of `grain` indices that cover [0, n), on the OpenMP threads. Blocks do not
/// depend on the number of threads, so neither do results of code whose blocks are independent. BLAS called inside runs
/// single-threaded. The first exception thrown by f is rethrown when all threads are done. Nested calls run on the
/// calling thread.
void parallel_for(std::int64_t n, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& f);

}  // namespace rowan::detail
