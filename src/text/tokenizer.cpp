#include "rowan/text/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "io/json.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pre_tokenizer.h"
#include "text/utf8.h"

namespace rowan {

namespace {

using namespace detail;

constexpr std::int64_t kMaxTokenizerBytes = std::int64_t{128} << 20;
constexpr std::int64_t kMaxTokenizerConfigBytes = std::int64_t{16} << 20;

/// tokenizer.json with its two large members apart, since members of ordered_json are looked up one by one.
struct TokenizerJson {
  explicit TokenizerJson(const std::filesystem::path& path) {
    auto root = read_json_object<nlohmann::json>(path, kMaxTokenizerBytes);
    if (const auto model = root.find("model"); model != root.end() && model->is_object()) {
      for (auto& [name, value] : {std::pair<const char*, nlohmann::json&>{"vocab", vocab}, {"merges", merges}}) {
        if (const auto member = model->find(name); member != model->end()) {
          value = std::move(*member);
          model->erase(member);
        }
      }
    }
    rest = root;
  }
  nlohmann::json vocab, merges;
  nlohmann::ordered_json rest;
};

/// The text of a token in tokenizer_config.json: a string, or an object that holds it.
std::optional<std::string> named_token(const JsonObject& json, const char* name) {
  const auto* value = json.find(name);
  if (value == nullptr) return std::nullopt;
  return value->is_object() ? json.object(name).string("content") : json.string(name);
}

}  // namespace

struct Tokenizer::Parts {
  Parts(const JsonObject& json, const TokenizerJson& file);

  void add_tokens(const JsonObject& json);
  std::optional<std::int32_t> find(std::string_view token) const;
  /// Text between added tokens that are found in the raw text.
  void encode_text(std::string_view text, bool at_start, std::vector<std::int32_t>& ids) const;

  Bpe model;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  std::vector<AddedToken> added;
  AddedTokenFinder raw_finder, normalized_finder;
  TokenIds added_ids;
  std::unordered_map<std::int32_t, std::string> tokens;  // every id's text
  std::unordered_set<std::int32_t> special;
  SpecialAffixes affixes;
  std::int64_t vocab_size = 0;
  std::optional<std::int32_t> bos, eos;
};

Tokenizer::Parts::Parts(const JsonObject& json, const TokenizerJson& file)
    : model(json.object("model"), file.vocab, file.merges) {
  json.allow_only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                   "decoder", "model"});
  if (json.has("normalizer")) normalizer = make_normalizer(json.object("normalizer"));
  if (json.has("pre_tokenizer")) pre_tokenizer = make_pre_tokenizer(json.object("pre_tokenizer"));
  if (json.has("decoder")) decoder = make_decoder(json.object("decoder"));
  if (json.has("post_processor")) affixes = read_post_processor(json.object("post_processor"));
  for (const auto& [token, id] : model.vocab()) tokens.emplace(id, token);
  add_tokens(json);
  for (const auto& [id, token] : tokens) vocab_size = std::max<std::int64_t>(vocab_size, std::int64_t{id} + 1);
  for (const auto* const ids : {&affixes.before, &affixes.after}) {
    for (const std::int32_t id : *ids) {
      if (!tokens.contains(id)) json.fail("post_processor", fmt::format("id {} is not in the vocabulary", id));
    }
  }
}

void Tokenizer::Parts::add_tokens(const JsonObject& json) {
  added = read_added_tokens(json);
  for (const AddedToken& token : added) {
    const auto known = model.vocab().find(token.content);
    if (known != model.vocab().end() && known->second != token.id) {
      json.fail("added_tokens",
                fmt::format("{} has id {} here and {} in model.vocab", quote(token.content), token.id, known->second));
    }
    const auto [place, is_new] = tokens.emplace(token.id, token.content);
    if (!is_new && place->second != token.content)
      json.fail("added_tokens",
                fmt::format("{} and {} share id {}", quote(place->second), quote(token.content), token.id));
    if (!added_ids.emplace(token.content, token.id).second)
      json.fail("added_tokens", fmt::format("{} stands twice", quote(token.content)));
    if (token.special) special.insert(token.id);
    if (token.normalized) {
      normalized_finder.add(token, normalizer ? normalizer(token.content) : token.content);
    } else {
      raw_finder.add(token, token.content);
    }
  }
}

std::optional<std::int32_t> Tokenizer::Parts::find(std::string_view token) const {
  if (const auto found = added_ids.find(token); found != added_ids.end()) return found->second;
  const auto found = model.vocab().find(token);
  return found == model.vocab().end() ? std::nullopt : std::optional(found->second);
}

void Tokenizer::Parts::encode_text(std::string_view text, bool at_start, std::vector<std::int32_t>& ids) const {
  const std::string normal = normalizer ? normalizer(std::string(text)) : std::string(text);
  for (const auto& section : normalized_finder.find(normal)) {
    if (section.token != nullptr) {
      ids.push_back(section.token->id);
      continue;
    }
    std::vector<Piece> pieces{
        {normal.substr(section.begin, section.end - section.begin), at_start && section.begin == 0}};
    if (pre_tokenizer) pre_tokenizer(pieces);
    for (const Piece& piece : pieces) model.encode(piece.text, ids);
  }
}

Tokenizer::Tokenizer(const std::filesystem::path& directory) {
  const auto path = directory / "tokenizer.json";
  const TokenizerJson file(path);
  auto parts = std::make_unique<Parts>(JsonObject(path, file.rest), file);
  const auto config_path = directory / "tokenizer_config.json";
  if (std::filesystem::exists(config_path)) {
    const auto config = read_json_object<nlohmann::ordered_json>(config_path, kMaxTokenizerConfigBytes);
    const JsonObject json(config_path, config);
    for (const auto& [name, id] :
         {std::pair<const char*, std::optional<std::int32_t>&>{"bos_token", parts->bos}, {"eos_token", parts->eos}}) {
      const auto token = named_token(json, name);
      if (!token || token->empty()) continue;
      id = parts->find(*token);
      if (!id) json.fail(name, quote(*token) + " is not in tokenizer.json");
    }
  }
  parts_ = std::move(parts);
}

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  const std::string part(text);
  return encode_parts(std::span(&part, 1), add_special_tokens).ids;
}

EncodedParts Tokenizer::encode_parts(std::span<const std::string> texts, bool add_special_tokens) const {
  std::string text;
  std::vector<std::size_t> text_ends;  // bytes
  for (const std::string& part : texts) text_ends.push_back((text += part).size());
  require(is_utf8(text), "Tokenizer::encode: expected UTF-8, got other bytes");

  EncodedParts encoded;
  std::vector<std::int32_t>& ids = encoded.ids;
  if (add_special_tokens) ids = parts_->affixes.before;
  for (const auto& section : parts_->raw_finder.find(text)) {
    const std::size_t before = ids.size();
    if (section.token != nullptr) {
      ids.push_back(section.token->id);
    } else {
      parts_->encode_text(std::string_view(text).substr(section.begin, section.end - section.begin), section.begin == 0,
                          ids);
    }
    // Parts that end within this section own the tokens that the section up to their end has in common with all of it.
    while (encoded.ends.size() < text_ends.size() && text_ends[encoded.ends.size()] < section.end) {
      const std::size_t end = text_ends[encoded.ends.size()];
      std::vector<std::int32_t> head;
      if (section.token == nullptr && end > section.begin)
        parts_->encode_text(std::string_view(text).substr(section.begin, end - section.begin), section.begin == 0,
                            head);
      const auto common =
          std::mismatch(head.begin(), head.end(), ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end());
      encoded.ends.push_back(before + static_cast<std::size_t>(common.first - head.begin()));
    }
  }
  encoded.ends.resize(text_ends.size(), ids.size());
  if (!add_special_tokens || texts.empty()) return encoded;
  const auto& after = parts_->affixes.after;
  ids.insert(ids.end(), after.begin(), after.end());
  encoded.ends.back() = ids.size();
  return encoded;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  for (const std::int32_t id : ids) {
    if (skip_special_tokens && parts_->special.contains(id)) continue;
    if (const auto token = parts_->tokens.find(id); token != parts_->tokens.end()) tokens.push_back(token->second);
  }
  if (!parts_->decoder) return fmt::format("{}", fmt::join(tokens, " "));
  return fmt::format("{}", fmt::join(parts_->decoder(std::move(tokens)), ""));
}

std::int64_t Tokenizer::vocab_size() const noexcept { return parts_->vocab_size; }
std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view token) const { return parts_->find(token); }

std::optional<std::string> Tokenizer::id_to_token(std::int32_t id) const {
  const auto found = parts_->tokens.find(id);
  return found == parts_->tokens.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::int32_t> Tokenizer::bos_id() const noexcept { return parts_->bos; }
std::optional<std::int32_t> Tokenizer::eos_id() const noexcept { return parts_->eos; }

// StreamDecoder

std::string StreamDecoder::push(std::int32_t id) {
  ids_.push_back(id);
  return emit(true);
}

std::string StreamDecoder::finish() {
  std::string text = emit(false);
  ids_.clear();
  given_ = 0;
  return text;
}

std::string StreamDecoder::emit(bool hold_incomplete) {
  const std::span<const std::int32_t> ids(ids_);
  // The tokens given last are decoded too: some decoders treat the first token of a text in another way.
  const std::string before = tokenizer_.decode(ids.first(given_), skip_special_tokens_);
  const std::string all = tokenizer_.decode(ids, skip_special_tokens_);
  if (hold_incomplete && (all.size() <= before.size() || all.ends_with(kReplacementCharacter))) return "";
  std::size_t at = std::min(before.size(), all.size());
  while (at < all.size() && utf8_length(all, at) == 0) ++at;  // invalid bytes behind valid ones may change those
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(given_));
  given_ = ids_.size();
  return all.substr(at);
}

}  // namespace rowan
