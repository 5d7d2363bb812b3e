// Text from a model, with or without an adapter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rowan/nn/sampler.h"

namespace rowan::app {

struct GenerateOptions {
  std::string model;
  std::string adapter;  ///< empty: the base alone
  std::optional<std::string> prompt;
  std::string messages;       ///< a file; this or prompt
  std::string chat_template;  ///< empty: the model's own
  std::int64_t max_new_tokens = 256;
  SamplingOptions sampling;
  bool samples = false;  ///< options of sampling were given
  std::string device = "auto";
  std::string dtype;  ///< empty: that of the model's configuration
  bool json = false;
};

/// Prints the text that follows the prompt as it is made, up to the token that ends it or max_new_tokens.
void run_generate(const GenerateOptions& options);

}  // namespace rowan::app
