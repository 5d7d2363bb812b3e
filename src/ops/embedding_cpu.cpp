#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/cpu_rows.h"
#include "ops/embedding_backend.h"
#include "rowan/core/error.h"

namespace rowan::cpu {

namespace {

using namespace detail;

std::vector<std::int64_t> checked_ids(const char* op, const EmbeddingArguments& a) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(a.tokens));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = a.id_dtype == DType::kInt32 ? static_cast<const std::int32_t*>(a.ids)[i]
                                         : static_cast<const std::int64_t*>(a.ids)[i];
    if (ids[i] < 0 || ids[i] >= a.vocabulary) {
      throw Error(ErrorKind::kInvalidArgument, std::string(op) + ": expected ids in [0, " +
                                                   std::to_string(a.vocabulary) + "), got " + std::to_string(ids[i]) +
                                                   " at index " + std::to_string(i));
    }
  }
  return ids;
}

template <class T>
void accumulate(const EmbeddingArguments& a, const std::vector<std::int64_t>& ids) {
  using Sum = StatisticType<T>;
  // Token indices grouped by id, ascending within each group.
  std::vector<std::int64_t> order(ids.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t i, std::int64_t j) {
    return ids[static_cast<std::size_t>(i)] < ids[static_cast<std::size_t>(j)];
  });
  const auto id_at = [&](std::int64_t position) {
    return ids[static_cast<std::size_t>(order[static_cast<std::size_t>(position)])];
  };
  std::vector<std::int64_t> group_begin;
  for (std::int64_t i = 0; i < a.tokens; ++i) {
    if (i == 0 || id_at(i) != id_at(i - 1)) group_begin.push_back(i);
  }
  const auto groups = static_cast<std::int64_t>(group_begin.size());
  group_begin.push_back(a.tokens);

  parallel_for(groups, 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> sum(static_cast<std::size_t>(a.width));
    for (std::int64_t group = begin; group < end; ++group) {
      std::fill(sum.begin(), sum.end(), 0.0);
      const std::int64_t first = group_begin[static_cast<std::size_t>(group)],
                         last = group_begin[static_cast<std::size_t>(group) + 1];
      for (std::int64_t i = first; i < last; ++i) {
        const T* const row = static_cast<const T*>(a.rows) + order[static_cast<std::size_t>(i)] * a.rows_stride;
        for (std::int64_t c = 0; c < a.width; ++c) sum[static_cast<std::size_t>(c)] += convert<double>(row[c]);
      }
      Sum* const target = static_cast<Sum*>(a.table) + id_at(first) * a.table_stride;
      for (std::int64_t c = 0; c < a.width; ++c)
        target[c] = convert<Sum>(convert<double>(target[c]) + sum[static_cast<std::size_t>(c)]);
    }
  });
}

}  // namespace

void embedding_forward(const EmbeddingArguments& a) {
  const std::vector<std::int64_t> ids = checked_ids("embedding_forward", a);
  const auto size = static_cast<std::int64_t>(size_of(a.dtype));
  parallel_for(a.tokens, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::byte* const row =
          static_cast<const std::byte*>(a.table) + ids[static_cast<std::size_t>(i)] * a.table_stride * size;
      std::memcpy(static_cast<std::byte*>(a.rows) + i * a.rows_stride * size, row,
                  static_cast<std::size_t>(a.width * size));
    }
  });
}

void embedding_backward(const EmbeddingArguments& a) {
  const std::vector<std::int64_t> ids = checked_ids("embedding_backward", a);
  dispatch_floating(a.dtype, [&](auto tag) { accumulate<typename decltype(tag)::type>(a, ids); });
}

}  // namespace rowan::cpu
