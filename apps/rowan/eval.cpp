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

namespace rowan::app {

namespace {

constexpr std::int64_t kTokensPerBatch = 8192;

/// Throws Format for rows that the model cannot take.
void check_rows(const std::vector<TokenRow>& rows, const ModelConfig& config, const std::string& data) {
  for (const TokenRow& row : rows) {
    for (std::size_t i = 0; i < row.input_ids.size(); ++i) {
      if (row.input_ids[i] >= config.vocab_size || row.labels[i] >= config.vocab_size) {
        throw Error(ErrorKind::kFormat,
                    fmt::format("{}: token id {} is not below the model's vocab_size {}", data,
                                std::max<std::int64_t>(row.input_ids[i], row.labels[i]), config.vocab_size));
      }
    }
    const auto length = static_cast<std::int64_t>(row.input_ids.size());
    const auto refuse_beyond = [&](const char* limit, std::int64_t value) {
      if (length <= value) return;
      throw Error(ErrorKind::kFormat,
                  fmt::format("{}: a row of {} tokens is longer than the model's {} {}", data, length, limit, value));
    };
    refuse_beyond("max_position_embeddings", config.max_position_embeddings);
    if (config.sliding_window > 0) refuse_beyond("sliding_window", config.sliding_window);
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
    const std::vector<TokenRow> rows = reading_input([&] { return read_dataset(options.data, dataset); });
    check_rows(rows, saved->config(), options.data);
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
