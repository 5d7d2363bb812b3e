// The "decoder" of tokenizer.json: tokens back to text.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/json.h"

namespace rowan::detail {

/// One step over the tokens of a text; the steps' results are joined at the end.
using Decoder = std::function<std::vector<std::string>(std::vector<std::string>)>;

/// Throws Unsupported naming a component that is not among those of Tokenizer's constructor.
Decoder make_decoder(const JsonObject& json);

}  // namespace rowan::detail
