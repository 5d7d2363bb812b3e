// Walks a range of elements of a tensor whose rows may lie apart, one run of adjacent elements at a time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rowan::detail {

/// Calls f(i, row, col, count) for the runs that make up elements [begin, end) of a row-major count: elements i .. i +
/// count lie in `row` from `col` on.
template <class F>
void for_each_run(std::int64_t begin, std::int64_t end, std::int64_t cols, F&& f) {
  while (begin < end) {
    const std::int64_t row = begin / cols;
    const std::int64_t col = begin - row * cols;
    const std::int64_t count = std::min(end - begin, cols - col);
    f(begin, row, col, count);
    begin += count;
  }
}

}  // namespace rowan::detail
