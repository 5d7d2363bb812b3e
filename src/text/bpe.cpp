#include "text/bpe.h"

#include <fmt/format.h>

#include <limits>
#include <mutex>
#include <queue>
#include <tuple>
#include <utility>

#include "text/utf8.h"

namespace rowan::detail {

namespace {

constexpr std::size_t kMaxCachedPieces = 1 << 16, kMaxCachedBytes = 128;

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

/// "a b" or ["a", "b"]: files of old and of new versions.
std::pair<std::string, std::string> merge_pair(const JsonObject& json, const nlohmann::json& value, std::size_t index) {
  if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string())
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos)
      return {text.substr(0, space), text.substr(space + 1)};
  }
  json.fail("merges", fmt::format("expected two tokens at index {}", index));
}

/// Throws Unsupported for a member that changes what BPE does.
void refuse_variants(const JsonObject& json) {
  if (json.has("type") && json.string("type") != "BPE")  // files of old versions do not say
    json.refuse("type", quote(json.string("type")) + " is not supported, only \"BPE\"");
  json.allow_only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                   "byte_fallback", "ignore_merges"});
  if (json.has("dropout") && json.number("dropout", 0, 1) != 0) json.refuse("dropout", "it is not supported");
  for (const char* const name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (json.has(name) && !json.string(name).empty()) json.refuse(name, "it is not supported");
  }
}

}  // namespace

Bpe::Bpe(const JsonObject& json, const nlohmann::json& vocab, const nlohmann::json& merges) {
  refuse_variants(json);
  fuse_unknown_ = json.boolean("fuse_unk", false);
  ignore_merges_ = json.boolean("ignore_merges", false);
  read_vocab(json, vocab);
  read_merges(json, merges);
  if (json.has("unk_token")) unknown_ = id_of(json, json.string("unk_token"));
  if (!json.boolean("byte_fallback", false)) return;
  byte_ids_.emplace();
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = vocab_.find(fmt::format("<0x{:02X}>", byte));
    (*byte_ids_)[static_cast<std::size_t>(byte)] = found == vocab_.end() ? -1 : found->second;
  }
}

void Bpe::read_vocab(const JsonObject& json, const nlohmann::json& vocab) {
  if (!vocab.is_object()) json.fail("vocab", "expected an object of token ids");
  vocab_.reserve(vocab.size());
  std::unordered_map<std::int32_t, const std::string*> owners;
  for (const auto& [token, value] : vocab.items()) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= std::numeric_limits<std::int32_t>::max())
      json.fail("vocab", fmt::format("expected a token id for {}, got {}", quote(token), value.dump().substr(0, 40)));
    const auto [place, added] = vocab_.emplace(token, value.get<std::int32_t>());
    const auto [owner, first] = owners.emplace(place->second, &place->first);
    if (!first)
      json.fail("vocab", fmt::format("{} and {} share id {}", quote(*owner->second), quote(token), place->second));
  }
}

void Bpe::read_merges(const JsonObject& json, const nlohmann::json& merges) {
  if (!merges.is_array()) json.fail("merges", "expected an array of token pairs");
  merges_.reserve(merges.size());
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto [left, right] = merge_pair(json, merges[i], i);
    // A pair that stands twice counts where it stands last, as in the tokenizers library.
    merges_[pair_key(id_of(json, left), id_of(json, right))] = {static_cast<std::int32_t>(i),
                                                                id_of(json, left + right)};
  }
}

std::int32_t Bpe::id_of(const JsonObject& json, const std::string& token) const {
  const auto found = vocab_.find(token);
  if (found == vocab_.end()) json.fail("vocab", quote(token) + " is missing");
  return found->second;
}

const Bpe::Merge* Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::encode(const std::string& piece, std::vector<std::int32_t>& ids) const {
  if (piece.empty()) return;
  if (ignore_merges_) {
    if (const auto whole = vocab_.find(piece); whole != vocab_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  const bool cacheable = piece.size() <= kMaxCachedBytes;
  if (cacheable) {
    const std::shared_lock lock(cache_mutex_);
    if (const auto cached = cache_.find(piece); cached != cache_.end()) {
      ids.insert(ids.end(), cached->second.begin(), cached->second.end());
      return;
    }
  }
  std::vector<std::int32_t> symbols = characters(piece);
  merge(symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (!cacheable) return;
  const std::unique_lock lock(cache_mutex_);
  if (cache_.size() < kMaxCachedPieces) cache_.emplace(piece, std::move(symbols));
}

std::vector<std::int32_t> Bpe::characters(std::string_view piece) const {
  std::vector<std::int32_t> symbols;
  symbols.reserve(piece.size());
  // One unknown token is held back, so that those which follow can be fused with it. Bytes do not release it: in the
  // tokenizers library it then comes behind them.
  bool held = false;
  for (std::size_t at = 0; at < piece.size();) {
    const std::string_view character = piece.substr(at, utf8_length(piece, at));
    at += character.size();
    if (const auto known = vocab_.find(character); known != vocab_.end()) {
      if (std::exchange(held, false)) symbols.push_back(*unknown_);
      symbols.push_back(known->second);
      continue;
    }
    if (byte_ids_) {
      const std::size_t before = symbols.size();
      bool complete = true;
      for (const char byte : character) {
        symbols.push_back((*byte_ids_)[static_cast<unsigned char>(byte)]);
        complete = complete && symbols.back() >= 0;
      }
      if (complete) continue;
      symbols.resize(before);
    }
    if (!unknown_) continue;
    if (held && !fuse_unknown_) symbols.push_back(*unknown_);
    held = true;
  }
  if (held) symbols.push_back(*unknown_);
  return symbols;
}

void Bpe::merge(std::vector<std::int32_t>& symbols) const {
  struct Link {
    std::int64_t previous, next;  // -1: none
  };
  struct Candidate {
    std::int32_t rank, id;
    std::int64_t at;
    bool operator>(const Candidate& other) const { return std::tie(rank, at) > std::tie(other.rank, other.at); }
  };
  constexpr std::int32_t kMergedAway = -1;
  const auto count = static_cast<std::int64_t>(symbols.size());
  std::vector<Link> links(symbols.size());
  std::vector<Candidate> heap;
  const auto symbol = [&symbols](std::int64_t i) -> std::int32_t& { return symbols[static_cast<std::size_t>(i)]; };
  const auto link = [&links](std::int64_t i) -> Link& { return links[static_cast<std::size_t>(i)]; };
  for (std::int64_t i = 0; i < count; ++i) {
    link(i) = {i - 1, i + 1 < count ? i + 1 : -1};
    if (i + 1 == count) break;
    if (const Merge* m = find_merge(symbol(i), symbol(i + 1))) heap.push_back({m->rank, m->id, i});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(), std::move(heap));
  const auto offer = [&](std::int64_t left, std::int64_t right) {
    if (const Merge* m = find_merge(symbol(left), symbol(right))) queue.push({m->rank, m->id, left});
  };
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const std::int64_t right = link(best.at).next;
    if (symbol(best.at) == kMergedAway || right < 0) continue;
    const Merge* const current = find_merge(symbol(best.at), symbol(right));
    if (current == nullptr || current->id != best.id) continue;  // one of the pair has changed since
    symbol(best.at) = best.id;
    symbol(right) = kMergedAway;
    const std::int64_t next = link(right).next;
    link(best.at).next = next;
    if (next >= 0) link(next).previous = best.at;
    if (link(best.at).previous >= 0) offer(link(best.at).previous, best.at);
    if (next >= 0) offer(best.at, next);
  }
  std::erase(symbols, kMergedAway);
}

}  // namespace rowan::detail
