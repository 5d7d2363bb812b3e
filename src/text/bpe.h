// The model "BPE" of tokenizer.json: byte pair encoding (Sennrich et al., arXiv 1508.07909).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/json.h"

namespace rowan::detail {

struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
};
using TokenIds = std::unordered_map<std::string, std::int32_t, StringHash, std::equal_to<>>;

class Bpe {
 public:
  /// `json` is the object without its vocab and merges, which come apart because they are large.
  Bpe(const JsonObject& json, const nlohmann::json& vocab, const nlohmann::json& merges);

  /// Appends the tokens of one piece. The piece is taken apart into characters, and the pair that was learned first is
  /// joined first, the leftmost of equals: O(n log n) in its length. Safe to call from several threads.
  void encode(const std::string& piece, std::vector<std::int32_t>& ids) const;

  const TokenIds& vocab() const noexcept { return vocab_; }

 private:
  struct Merge {
    std::int32_t rank = 0;
    std::int32_t id = 0;
  };
  void read_vocab(const JsonObject& json, const nlohmann::json& vocab);
  void read_merges(const JsonObject& json, const nlohmann::json& merges);
  std::int32_t id_of(const JsonObject& json, const std::string& token) const;
  std::vector<std::int32_t> characters(std::string_view piece) const;
  void merge(std::vector<std::int32_t>& symbols) const;
  const Merge* find_merge(std::int32_t left, std::int32_t right) const;

  TokenIds vocab_;
  std::unordered_map<std::uint64_t, Merge> merges_;  // by the two ids
  std::optional<std::int32_t> unknown_;
  std::optional<std::array<std::int32_t, 256>> byte_ids_;  // byte fallback; -1: the byte has no token
  bool fuse_unknown_ = false, ignore_merges_ = false;

  mutable std::shared_mutex cache_mutex_;
  mutable std::unordered_map<std::string, std::vector<std::int32_t>> cache_;  // of short pieces, up to a fixed number
};

}  // namespace rowan::detail
