// Text as byte tokens: training windows, held-out windows, and continuations.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rowan/io/token_rows.h"
#include "rowan/nn/llama.h"

namespace rowan::app {

inline constexpr std::int64_t kByteVocabulary = 256;

/// Cuts `text` into consecutive windows of `length` tokens, each labelled with the bytes that follow, and lays
/// `batch_size` of them end to end in a batch. Bytes that do not fill a whole batch are left out.
std::vector<HostBatch> training_batches(std::string_view text, std::int64_t length, std::int64_t batch_size);

/// Windows of `length` bytes that overlap by `context` bytes whose labels do not count, so that every counted byte has
/// at least that much text before it and the mean is a loss per byte of running text.
std::vector<TokenRow> held_out_rows(std::string_view text, std::int64_t length, std::int64_t context);

/// tokenizer.json of a model whose tokens are bytes: byte-level BPE without merges, the id of a byte its value.
std::string byte_tokenizer();

/// `count` bytes drawn after `prompt` from softmax(logits / temperature), seeing at most the last `window` bytes.
std::string continue_text(LlamaModel& model, const std::string& prompt, std::int64_t count, double temperature,
                          std::int64_t window, std::uint64_t seed, StreamRef stream);

}  // namespace rowan::app
