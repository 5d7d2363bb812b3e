#include "byte_text.h"

#include <algorithm>
#include <cmath>

#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"

namespace rowan::app {

namespace {

/// Appends the window of `length` tokens at `begin`; the first `ignored` labels do not count.
void append_window(HostBatch& batch, std::string_view text, std::int64_t begin, std::int64_t length, std::int64_t ignored) {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> labels;
  for (std::int64_t i = begin; i < begin + length; ++i) {
    ids.push_back(static_cast<unsigned char>(text[static_cast<std::size_t>(i)]));
    const std::int64_t next = static_cast<unsigned char>(text[static_cast<std::size_t>(i + 1)]);
    labels.push_back(i - begin < ignored ? kIgnoredLabel : next);
  }
  batch.append(ids, labels);
}

}  // namespace

std::vector<HostBatch> training_batches(std::string_view text, std::int64_t length, std::int64_t batch_size) {
  std::vector<HostBatch> batches;
  const auto bytes = static_cast<std::int64_t>(text.size());
  for (std::int64_t begin = 0; begin + length * batch_size + 1 <= bytes; begin += length * batch_size) {
    HostBatch batch;
    for (std::int64_t s = 0; s < batch_size; ++s) append_window(batch, text, begin + s * length, length, 0);
    batches.push_back(std::move(batch));
  }
  return batches;
}

std::vector<HostBatch> held_out_batches(std::string_view text, std::int64_t length, std::int64_t context, std::int64_t batch_size) {
  std::vector<HostBatch> batches;
  const auto bytes = static_cast<std::int64_t>(text.size());
  for (std::int64_t begin = 0; begin + length + 1 <= bytes; begin += length - context) {
    if (batches.empty() || batches.back().tokens() == length * batch_size) batches.emplace_back();
    append_window(batches.back(), text, begin, length, context);
  }
  return batches;
}

std::string continue_text(LlamaModel& model, const std::string& prompt, std::int64_t count, double temperature, std::int64_t window,
                          std::uint64_t seed, StreamRef stream) {
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
