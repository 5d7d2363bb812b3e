// The "added_tokens" of tokenizer.json: texts that are one token wherever they stand, and never pieces of others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/json.h"

namespace rowan::detail {

struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool special = false;      ///< left out of decoded text where asked
  bool single_word = false;  ///< not within a word
  bool lstrip = false;       ///< takes white space before it
  bool rstrip = false;       ///< takes white space behind it
  bool normalized = false;   ///< looked for in the normalized text, in its normalized form
};

std::vector<AddedToken> read_added_tokens(const JsonObject& json);

/// Finds added tokens in a text: from left to right, the longest of those that begin at one place.
class AddedTokenFinder {
 public:
  /// A stretch of the text: a token, or (null) text between tokens.
  struct Section {
    std::size_t begin = 0, end = 0;
    const AddedToken* token = nullptr;
  };

  /// `text` is what the token looks like in the texts to come. The token must outlive the finder.
  void add(const AddedToken& token, std::string_view text);
  /// Sections in order; they cover the text.
  std::vector<Section> find(std::string_view text) const;

 private:
  struct Node {
    std::unordered_map<char, std::size_t> children;
    const AddedToken* token = nullptr;
  };
  /// The longest token at `at`, and where it ends.
  Section match(std::string_view text, std::size_t at) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
};

}  // namespace rowan::detail
