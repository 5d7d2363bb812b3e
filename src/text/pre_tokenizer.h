// The "pre_tokenizer" of tokenizer.json: cuts a text into the pieces that BPE merges within.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/json.h"

namespace rowan::detail {

struct Piece {
  std::string text;
  bool at_start = false;  ///< of the whole input
};

/// Replaces pieces by smaller or rewritten ones; empty: keeps them.
using PreTokenizer = std::function<void(std::vector<Piece>&)>;

/// Throws Unsupported naming a component that is not among those of Tokenizer's constructor.
PreTokenizer make_pre_tokenizer(const JsonObject& json);

/// When Metaspace writes its replacement in front, by the old and the new spelling of that option.
enum class PrependScheme { kAlways, kFirst, kNever };
PrependScheme read_prepend_scheme(const JsonObject& json);

}  // namespace rowan::detail
