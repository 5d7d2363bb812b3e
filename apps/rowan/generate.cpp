#include "generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <vector>

#include "exit_code.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "rowan/nn/kv_cache.h"
#include "rowan/text/chat_template.h"
#include "rowan/text/tokenizer.h"
#include "saved_model.h"

namespace rowan::app {

namespace {

constexpr std::int64_t kMaxJsonBytes = std::int64_t{16} << 20;

[[noreturn]] void fail_format(const std::string& path, const std::string& cause) {
  throw Error(ErrorKind::kFormat, fmt::format("{}: {}", path, cause));
}

nlohmann::json read_json(const std::filesystem::path& path) {
  auto json = nlohmann::json::parse(read_text_file(path, kMaxJsonBytes), nullptr, false);
  if (json.is_discarded()) fail_format(path.string(), "malformed JSON");
  return json;
}

/// A file of {"messages": [{"role", "content"}, …]} or of the array alone.
std::vector<ChatMessage> read_messages(const std::string& path) {
  const nlohmann::json file = read_json(path);
  const nlohmann::json array = file.is_object() && file.contains("messages") ? file["messages"] : file;
  if (!array.is_array()) fail_format(path, "expected an array of messages");
  std::vector<ChatMessage> messages;
  for (const auto& message : array) {
    const bool sound = message.is_object() && message.size() == 2 && message.contains("role") &&
                       message["role"].is_string() && message.contains("content") && message["content"].is_string();
    if (!sound) fail_format(path, "expected messages {\"role\": …, \"content\": …} of two texts");
    messages.push_back({message["role"], message["content"]});
  }
  return messages;
}

/// The tokens that end a text: those of config.json, generation_config.json and tokenizer_config.json.
std::set<std::int64_t> end_tokens(const std::string& model, const ModelConfig& config, const Tokenizer& tokenizer) {
  std::set<std::int64_t> ends(config.eos_token_ids.begin(), config.eos_token_ids.end());
  if (const auto eos = tokenizer.eos_id()) ends.insert(*eos);
  const auto path = std::filesystem::path(model) / "generation_config.json";
  if (!std::filesystem::exists(path)) return ends;
  const nlohmann::json file = read_json(path);
  const nlohmann::json ids = file.is_object() ? file.value("eos_token_id", nlohmann::json()) : nlohmann::json();
  for (const auto& id : ids.is_array() ? ids : nlohmann::json::array({ids})) {
    if (id.is_number_integer()) ends.insert(id.get<std::int64_t>());
  }
  return ends;
}

std::vector<std::int32_t> prompt_ids(const GenerateOptions& options, const Tokenizer& tokenizer) {
  if (options.prompt) return tokenizer.encode(*options.prompt);
  const std::vector<ChatMessage> messages = read_messages(options.messages);
  const ChatTemplate chat = options.chat_template.empty() ? ChatTemplate::of_model(options.model)
                                                          : ChatTemplate::named(options.chat_template, options.model);
  return tokenizer.encode(chat.prompt(messages), false);
}

/// Room for a prompt and what follows it, as far as the model goes.
std::int64_t capacity_for(const GenerateOptions& options, const ModelConfig& config, std::int64_t prompt) {
  const std::int64_t longest = config.sliding_window > 0
                                   ? std::min(config.sliding_window, config.max_position_embeddings)
                                   : config.max_position_embeddings;
  if (prompt == 0) throw Error(ErrorKind::kInvalidArgument, "generate: expected a prompt, got no token");
  if (prompt > longest) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("generate: the prompt has {} tokens, the model takes {}", prompt, longest));
  }
  return std::min(longest, prompt + options.max_new_tokens);
}

}  // namespace

void run_generate(const GenerateOptions& options) {
  if (options.prompt && !options.chat_template.empty())
    throw Error(ErrorKind::kInvalidArgument, "--chat-template has no effect with --prompt");
  if (options.sampling.temperature == 0 && options.samples)
    throw Error(ErrorKind::kInvalidArgument, "--top-k, --top-p and --seed have no effect at --temperature 0");
  Sampler sampler(options.sampling);
  const Stream stream(parse_device(options.device));
  const SavedModel saved(options.model, options.adapter, options.dtype);
  const ModelConfig& config = saved.config();
  const Tokenizer tokenizer = reading_input([&] { return Tokenizer(options.model); });
  std::vector<std::int32_t> ids = reading_input([&] { return prompt_ids(options, tokenizer); });
  const std::set<std::int64_t> ends = reading_input([&] { return end_tokens(options.model, config, tokenizer); });
  const auto prompt = static_cast<std::int64_t>(ids.size());
  const std::int64_t capacity = capacity_for(options, config, prompt);

  LlamaModel model = saved.load(stream);
  KvCache cache(config, saved.dtype(), capacity, stream);
  StreamDecoder decoder(tokenizer);
  std::string text;
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (!options.json) std::cout << piece << std::flush;
  };
  std::vector<std::int32_t> made;
  bool ended = false;
  std::span<const std::int32_t> next = ids;
  while (!ended && prompt + static_cast<std::int64_t>(made.size()) < capacity) {
    const std::int32_t token = sampler.pick(model.decode(next, cache, stream), stream);
    made.push_back(token);
    next = std::span(made).last(1);
    ended = ends.contains(token);
    if (!ended) show(decoder.push(token));
  }
  show(decoder.finish());
  if (options.json) {
    std::cout << nlohmann::ordered_json{{"text", text}, {"prompt_ids", ids}, {"ids", made}, {"ended", ended}}.dump()
              << '\n';
  } else {
    std::cout << '\n';
  }
}

}  // namespace rowan::app
