#include "byte_text.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"

namespace rowan::app {

namespace {

std::int32_t byte_at(std::string_view text, std::int64_t i) {
  return static_cast<unsigned char>(text[static_cast<std::size_t>(i)]);
}

/// The character that stands for a byte in byte-level BPE (GPT-2): itself where it can be seen, else one of those from
/// U+0100 on, in order.
std::string visible_byte(int byte, int& hidden) {
  const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
  const int code = visible ? byte : 0x100 + hidden++;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

}  // namespace

std::string byte_tokenizer() {
  using Json = nlohmann::ordered_json;
  Json vocabulary;
  int hidden = 0;
  for (int byte = 0; byte < kByteVocabulary; ++byte) vocabulary[visible_byte(byte, hidden)] = byte;
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const Json model = {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"vocab", vocabulary},
                      {"merges", Json::array()}};
  const Json tokenizer = {
      {"version", "1.0"},      {"truncation", nullptr},  {"padding", nullptr},        {"added_tokens", Json::array()},
      {"normalizer", nullptr}, {"pre_tokenizer", bytes}, {"post_processor", nullptr}, {"decoder", bytes},
      {"model", model}};
  return tokenizer.dump(2) + "\n";
}

std::vector<HostBatch> training_batches(std::string_view text, std::int64_t length, std::int64_t batch_size) {
  std::vector<HostBatch> batches;
  const auto bytes = static_cast<std::int64_t>(text.size());
  for (std::int64_t begin = 0; begin + length * batch_size + 1 <= bytes; begin += length * batch_size) {
    HostBatch batch;
    for (std::int64_t s = 0; s < batch_size; ++s) {
      std::vector<std::int32_t> ids;
      std::vector<std::int64_t> labels;
      for (std::int64_t i = begin + s * length; i < begin + (s + 1) * length; ++i) {
        ids.push_back(byte_at(text, i));
        labels.push_back(byte_at(text, i + 1));
      }
      batch.append(ids, labels);
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

std::vector<TokenRow> held_out_rows(std::string_view text, std::int64_t length, std::int64_t context) {
  std::vector<TokenRow> rows;
  const auto bytes = static_cast<std::int64_t>(text.size());
  for (std::int64_t begin = 0; begin + length <= bytes; begin += length - context) {
    TokenRow row;
    for (std::int64_t i = 0; i < length; ++i) {
      row.input_ids.push_back(byte_at(text, begin + i));
      row.labels.push_back(i < context ? kIgnoredLabel : byte_at(text, begin + i));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string continue_text(LlamaModel& model, const std::string& prompt, std::int64_t count, double temperature,
                          std::int64_t window, std::uint64_t seed, StreamRef stream) {
  if (prompt.empty()) throw Error(ErrorKind::kInvalidArgument, "continue_text: expected a prompt, got an empty one");
  Rng rng(seed);
  std::string text = prompt;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::size_t begin = text.size() - std::min(text.size(), static_cast<std::size_t>(window));
    std::vector<std::int32_t> ids;
    for (const char c : text.substr(begin)) ids.push_back(static_cast<unsigned char>(c));
    HostBatch batch;
    batch.append(ids);
    const std::vector<float> logits = model.last_logits(batch, stream).to_vector<float>(stream);
    const float highest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weights;
    double total = 0;
    for (const float logit : logits) {
      weights.push_back(std::exp(static_cast<double>(logit - highest) / temperature));
      total += weights.back();
    }
    double left = rng.uniform() * total;
    std::size_t byte = 0;
    while (byte + 1 < weights.size() && (left -= weights[byte]) >= 0) ++byte;
    text.push_back(static_cast<char>(byte));
  }
  return text.substr(prompt.size());
}

}  // namespace rowan::app
