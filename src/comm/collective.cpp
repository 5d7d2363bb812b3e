#include "comm/collective.h"

#include <algorithm>
#include <type_traits>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/parallel.h"

namespace rowan::detail {

namespace {

const char* name_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
    default:
      return "nothing";
  }
}

template <class T>
void reduce(ReduceOp op, std::span<const std::byte* const> inputs, std::int64_t begin, std::int64_t end,
            std::byte* out) {
  using Sum = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
  using Wide = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;
  const auto value = [&](std::size_t rank, std::int64_t i) {
    return convert<Wide>(reinterpret_cast<const T*>(inputs[rank])[i]);
  };
  for (std::int64_t i = begin; i < end; ++i) {
    Wide result = value(0, i);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const Wide next = value(r, i);
      if (op == ReduceOp::kSum) {
        result = static_cast<Wide>(static_cast<Sum>(result) + static_cast<Sum>(next));
      } else {
        result = std::max(result, next);
      }
    }
    reinterpret_cast<T*>(out)[i] = convert<T>(result);
  }
}

}  // namespace

std::string to_string(const Collective& c) {
  std::string text = name_of(c.kind);
  if (c.kind == CollectiveKind::kAllReduce || c.kind == CollectiveKind::kReduceScatter)
    text += fmt::format("({})", to_string(c.op));
  if (c.kind == CollectiveKind::kBroadcast) text += fmt::format(" from rank {}", c.root);
  if (c.kind == CollectiveKind::kAllToAll) text += fmt::format(" of {}", c.dtype);
  if (c.kind != CollectiveKind::kNone && c.kind != CollectiveKind::kBarrier && c.kind != CollectiveKind::kAllToAll)
    text += fmt::format(" of {} {}", c.count, c.dtype);
  return c.kind == CollectiveKind::kNone ? text : text + fmt::format(" as operation {}", c.sequence);
}

std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string difference(std::span<const Collective> ranks) {
  const auto votes = [&](const Collective& c) { return std::count(ranks.begin(), ranks.end(), c); };
  const Collective* usual = &ranks[0];
  for (const Collective& c : ranks) {
    if (votes(c) > votes(*usual)) usual = &c;
  }
  std::vector<int> others;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r] != *usual) others.push_back(static_cast<int>(r));
  }
  if (others.empty()) return "";
  return fmt::format("{} called {}, where rank {} called {}", rank_list(others),
                     to_string(ranks[static_cast<std::size_t>(others[0])]), usual - ranks.data(), to_string(*usual));
}

void reduce_in_order(DType dtype, ReduceOp op, std::span<const std::byte* const> inputs, std::int64_t count,
                     std::byte* out) {
  constexpr std::int64_t kGrain = 16384;
  parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    if (dtype == DType::kInt64) {
      reduce<std::int64_t>(op, inputs, begin, end, out);
    } else if (dtype == DType::kInt32) {
      reduce<std::int32_t>(op, inputs, begin, end, out);
    } else {
      dispatch_floating(dtype, [&](auto tag) { reduce<typename decltype(tag)::type>(op, inputs, begin, end, out); });
    }
  });
}

}  // namespace rowan::detail
