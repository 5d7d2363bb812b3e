#include "byte_text.h"

#include <algorithm>
#include <cmath>

#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"

namespace rowan::app {

namespace {

std::int32_t byte_at(std::string_view text, std::int64_t i) {
  return static_cast<unsigned char>(text[static_cast<std::size_t>(i)]);
}

}  // namespace

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
