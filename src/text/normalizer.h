// The "normalizer" of tokenizer.json.
#pragma once

#include <functional>
#include <string>

#include "io/json.h"

namespace rowan::detail {

/// Rewrites a text before it is cut into pieces; empty: as it is.
using Normalizer = std::function<std::string(std::string)>;

/// Throws Unsupported naming a component that is not among those of Tokenizer's constructor.
Normalizer make_normalizer(const JsonObject& json);

/// A "Replace" component, which normalizers and decoders share.
Normalizer make_replace(const JsonObject& json);

}  // namespace rowan::detail
