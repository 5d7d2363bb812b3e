#include "eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "exit_code.h"
#include "rowan/core/error.h"
#include "rowan/text/dataset.h"
#include "rowan/train/token_batches.h"
#include "rowan/train/trainer.h"
#include "saved_model.h"
#include "text_options.h"

namespace rowan::app {

namespace {

constexpr std::int64_t kTokensPerBatch = 8192;

/// Tokens of the longest row that a model takes.
std::int64_t longest_row(const ModelConfig& config) {
  return config.sliding_window > 0 ? std::min(config.sliding_window, config.max_position_embeddings)
                                   : config.max_position_embeddings;
}

/// Cuts rows to max_length (0: none) and throws Format for rows that the model cannot take, by their number among the
/// file's rows.
void fit_rows(std::vector<TokenRow>& rows, std::int64_t max_length, const ModelConfig& config,
              const std::string& data) {
  for (std::size_t r = 0; r < rows.size(); ++r) {
    TokenRow& row = rows[r];
    const auto refuse = [&](const std::string& cause) {
      throw Error(ErrorKind::kFormat, fmt::format("{}: row {}: {}", data, r + 1, cause));
    };
    for (std::size_t i = 0; i < row.input_ids.size(); ++i) {
      const std::int64_t id = std::max<std::int64_t>(row.input_ids[i], row.labels[i]);
      if (id >= config.vocab_size)
        refuse(fmt::format("token id {} is not below the model's vocab_size {}", id, config.vocab_size));
    }
    if (max_length > 0 && row.input_ids.size() > static_cast<std::size_t>(max_length)) {
      row.input_ids.resize(static_cast<std::size_t>(max_length));
      row.labels.resize(static_cast<std::size_t>(max_length));
    }
    const auto length = static_cast<std::int64_t>(row.input_ids.size());
    if (length > longest_row(config))
      refuse(fmt::format("{} tokens are more than the {} that the model takes; --max-length cuts rows", length,
                         longest_row(config)));
  }
}

}  // namespace

void run_eval(const EvalOptions& options) {
  const RankPlace place = join_ranks(options.ranks);
  const Stream stream(place.device);
  std::optional<SavedModel> saved;
  std::vector<HostBatch> batches;
  std::int64_t tokens = 0;
  run_alike(place, [&] {  // everything is checked before the model takes memory
    saved.emplace(options.model, options.adapter, options.dtype);
    const DatasetOptions dataset{
        .model = options.model, .chat_template = options.chat_template, .mask_prompts = options.mask_prompts};
    std::vector<TokenRow> rows = reading_input([&] { return read_dataset(options.data, dataset); });
    require_texts_for(options.chat_template, options.mask_prompts, {options.data});
    fit_rows(rows, options.max_length, saved->config(), options.data);
    batches = batches_of(rows, kTokensPerBatch);
    for (const HostBatch& batch : batches) tokens += batch.counted_tokens();
    if (tokens == 0) throw Error(ErrorKind::kFormat, fmt::format("{}: no token counts for a loss", options.data));
  });

  std::optional<LlamaModel> loaded;
  run_alike(place, [&] { loaded.emplace(saved->load(stream)); });
  const double loss = evaluate(*loaded, batches, *place.communicator, stream);
  run_alike(place, [&] {
    if (!std::isfinite(loss)) throw std::runtime_error("eval: the loss is not finite");
  });
  if (!place.is_first()) return;
  if (options.json) {
    std::cout << nlohmann::ordered_json{{"loss", loss}, {"tokens", tokens}, {"perplexity", std::exp(loss)}}.dump()
              << '\n';
  } else {
    std::cout << fmt::format("loss {:.6f} nats a token, perplexity {:.4f}, {} counted tokens\n", loss, std::exp(loss),
                             tokens);
  }
}

}  // namespace rowan::app
