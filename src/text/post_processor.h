// The "post_processor" of tokenizer.json.
#pragma once

#include <cstdint>
#include <vector>

#include "io/json.h"

namespace rowan::detail {

/// Special tokens around the tokens of one text.
struct SpecialAffixes {
  std::vector<std::int32_t> before, after;
};

/// Throws Unsupported naming a component that is not among those of Tokenizer's constructor.
SpecialAffixes read_post_processor(const JsonObject& json);

}  // namespace rowan::detail
