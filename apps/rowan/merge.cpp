#include "merge.h"

#include <fmt/format.h>

#include <iostream>
#include <optional>

#include "exit_code.h"
#include "rowan/nn/merge.h"

namespace rowan::app {

namespace {

std::string list(const std::vector<std::string>& names) {
  return names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

void run_merge(const MergeOptions& options) {
  const ModelConfig config = reading_input([&] { return read_model_config(options.model); });
  const ModelFiles model = reading_input([&] { return ModelFiles(options.model); });
  const AdapterFiles adapter = reading_input([&] { return AdapterFiles(options.adapter); });
  const MergeReport report = merge_adapter(config, model, adapter, options.out);
  std::cout << fmt::format("merged {} modules into {}\ncopied: {}\nleft out: {}\n", report.merged.size(), options.out,
                           list(report.copied), list(report.left_out));
}

}  // namespace rowan::app
