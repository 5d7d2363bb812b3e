#include "info.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "rowan/core/build_info.h"
#include "rowan/core/device.h"
#include "rowan/core/error.h"
#include "rowan/optim/shard_cost.h"

namespace rowan::app {

namespace {

/// "8..4096" or "14336,4096": whole numbers of at least 1, parted by `separator`.
std::vector<std::int64_t> numbers(const char* option, const std::string& text, const std::string& separator) {
  std::vector<std::int64_t> found;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool digits = !word.empty() && word.size() <= 9 && word.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stoll(word) < 1)
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{}: expected whole numbers from 1 to 10^9 - 1, got \"{}\"", option, text));
    found.push_back(std::stoll(word));
    begin = end + separator.size();
  }
  return found;
}

}  // namespace

void print_info(std::ostream& out) {
  const BuildInfo& info = build_info();
  const auto or_none = [](const std::string& text) { return text.empty() ? std::string("none") : text; };
  out << fmt::format("rowan {}\ncompiler  {}\nBLAS      {}\nCUDA      {}\nNCCL      {}\n", info.version, info.compiler,
                     info.blas.empty() ? "none (plain loops)" : info.blas,
                     info.cuda.empty() ? "none" : fmt::format("{}, code for {}", info.cuda, info.architectures),
                     or_none(info.nccl));
  const int devices = cuda_device_count();
  if (devices == 0) out << "devices   cpu\n";
  for (int i = 0; i < devices; ++i) {
    const DeviceInfo d = device_info(Device::cuda(i));
    out << fmt::format(
        "devices   cuda:{} {} (compute capability {}.{}, {} multiprocessors, {:.1f} GiB, driver for CUDA {}.{})\n", i,
        d.name, d.major, d.minor, d.multiprocessors, static_cast<double>(d.memory_bytes) / (1 << 30), d.driver / 1000,
        d.driver % 1000 / 10);
  }
}

void print_plan(const InfoOptions& options, std::ostream& out) {
  std::vector<std::int64_t> sizes = numbers("--plan", options.plan, ",");
  std::vector<std::int64_t> range =
      options.ranks.empty() ? std::vector<std::int64_t>{} : numbers("--ranks", options.ranks, "..");
  if (sizes.size() == 3 && range.empty()) range = {sizes[2], sizes[2]};
  if (range.size() == 1) range.push_back(range[0]);
  if (sizes.size() != (options.ranks.empty() ? 3u : 2u) || range.size() != 2 || range[0] > range[1])
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--plan: expected ROWS,COLUMNS,RANKS, or ROWS,COLUMNS with --ranks A..B, got {} and \"{}\"",
                            options.plan, options.ranks));
  const SplitMatrices matrices{sizes[0], sizes[1], options.count, 2};
  RankSpeed speed;
  speed.bandwidth = options.bandwidth * 1e9;
  speed.latency = options.latency * 1e-6;
  out << fmt::format(
      "{} weights of {} x {}, split by output neurons; {} GB/s and {} us a rank, {} and {} TFLOP/s in float32 and "
      "TF32\n"
      "A model, not a measurement; of the busiest rank, a step.\n\n"
      "{:>6}  {:>12} {:>9} {:>10} {:>10}   {:>12} {:>9} {:>10} {:>10}   {}\n",
      options.count, sizes[0], sizes[1], options.bandwidth, options.latency, speed.flops_float32 / 1e12,
      speed.flops_tf32 / 1e12, "ranks", "gram: MB", "messages", "GFLOP", "ms", "owner: MB", "messages", "GFLOP", "ms",
      "chosen");
  for (std::int64_t ranks = range[0];; ranks = std::min(2 * ranks, range[1])) {
    const SchemeCost gram = scheme_cost(ShardScheme::kGram, matrices, ranks, speed),
                     owner = scheme_cost(ShardScheme::kOwner, matrices, ranks, speed);
    out << fmt::format("{:>6}  {:>12.4f} {:>9} {:>10.4g} {:>10.4f}   {:>12.4f} {:>9} {:>10.4g} {:>10.4f}   {}\n", ranks,
                       gram.bytes / 1e6, gram.messages, gram.flops / 1e9, gram.seconds * 1e3, owner.bytes / 1e6,
                       owner.messages, owner.flops / 1e9, owner.seconds * 1e3,
                       to_string(cheaper_scheme(matrices, ranks, speed)));
    if (ranks == range[1]) break;
  }
}

}  // namespace rowan::app
