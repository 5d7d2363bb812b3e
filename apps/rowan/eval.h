// Loss of a saved model on a data set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "launch.h"

namespace rowan::app {

struct EvalOptions {
  std::string model;
  std::string adapter;  ///< empty: the base alone
  std::string data;
  std::string chat_template;  ///< empty: the model's own
  bool mask_prompts = false;
  std::int64_t max_length = 0;  ///< tokens at which a row is cut; 0: none is
  RankOptions ranks;
  std::string dtype;  ///< empty: that of the model's configuration
  bool json = false;
};

/// Prints the mean loss over all counted tokens of the file, its perplexity and the count.
void run_eval(const EvalOptions& options);

}  // namespace rowan::app
