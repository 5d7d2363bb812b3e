// The command `rowan generate` on a small model with random weights.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/nn/llama_files.h"
#include "rowan/text/tokenizer.h"
#include "support/compare.h"
#include "support/files.h"
#include "support/program.h"

namespace rowan {
namespace {

using Json = nlohmann::json;

/// A directory with a model, and the tokenizer of a style of tests/data/tokenizers.
struct Model {
  explicit Model(const std::string& style, const std::string& chat_template = "") {
    std::filesystem::create_directories(path());
    for (const char* const name : {"tokenizer.json", "tokenizer_config.json"})
      std::filesystem::copy_file(test::data_path("tokenizers") / style / name, path() / name);
    if (!chat_template.empty()) {
      const Json file = Json::parse(test::read_file(test::data_path("chat_templates") / (chat_template + ".json")));
      test::write_file(path() / "chat_template.jinja", file["chat_template"].get<std::string>());
    }
    config.vocab_size = 768;
    config.hidden_size = 32;
    config.intermediate_size = 48;
    config.num_hidden_layers = 2;
    config.num_attention_heads = 4;
    config.num_key_value_heads = 2;
    config.head_dim = 8;
    config.max_position_embeddings = 64;
    LlamaModel model(config, {}, StreamRef());
    model.init_base(5, 0.4, StreamRef());
    save_base(path(), model, StreamRef());
  }
  std::filesystem::path path() const { return scratch / "model"; }
  test::Outcome run(const std::string& arguments) const {
    return test::run_program(scratch, "generate --device cpu --model '" + path().string() + "' " + arguments);
  }
  Json json(const std::string& arguments) const {
    const test::Outcome outcome = run(arguments + " --json");
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return Json::parse(outcome.out);
  }

  test::ScratchDirectory scratch;
  ModelConfig config;
};

/// The most likely tokens behind a prompt, each from logits of the whole sequence.
std::vector<std::int32_t> greedy(const Model& files, std::vector<std::int32_t> ids, std::size_t count) {
  LlamaModel model(files.config, {}, StreamRef());
  load_base(model, ModelFiles(files.path()), StreamRef());
  std::vector<std::int32_t> made;
  while (made.size() < count) {
    HostBatch batch;
    batch.append(ids);
    const auto logits = test::values(model.last_logits(batch, StreamRef()), StreamRef());
    made.push_back(static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    ids.push_back(made.back());
  }
  return made;
}

}  // namespace

TEST_CASE("rowan generate picks the tokens that the model finds most likely, and prints their text") {
  REQUIRE(test::program_is_built());
  const Model model("llama3");
  const Tokenizer tokenizer(model.path());
  const std::vector<std::int32_t> prompt = tokenizer.encode("The quick");
  const Json result = model.json("--prompt 'The quick' --max-new-tokens 12");
  CHECK(result["prompt_ids"] == prompt);
  CHECK(result["ended"] == false);
  const std::vector<std::int32_t> ids = result["ids"];
  CHECK(ids == greedy(model, prompt, 12));
  CHECK(result["text"] == tokenizer.decode(ids));
  const test::Outcome shown = model.run("--prompt 'The quick' --max-new-tokens 12");
  CHECK(shown.status == 0);
  CHECK(shown.out == tokenizer.decode(ids) + "\n");
}

TEST_CASE("rowan generate samples by its seed, and ends where the model's context does") {
  REQUIRE(test::program_is_built());
  const Model model("llama3");
  const std::string sampled = "--prompt a --max-new-tokens 20 --temperature 1.5 --top-k 50 --top-p 0.95 --seed ";
  const Json first = model.json(sampled + "1");
  CHECK(model.json(sampled + "1") == first);
  CHECK(model.json(sampled + "2") != first);
  const Json all = model.json("--prompt a --max-new-tokens 1000");
  CHECK((all["ended"] == true || all["ids"].size() + all["prompt_ids"].size() == 64));
}

TEST_CASE("rowan generate stops at a token that ends the text") {
  REQUIRE(test::program_is_built());
  const Model model("llama3");
  const std::vector<std::int32_t> ids = model.json("--prompt 'The dog' --max-new-tokens 8")["ids"];
  const std::int32_t stop = ids[5];
  test::write_file(model.path() / "generation_config.json", Json{{"eos_token_id", {stop, 3}}}.dump());
  const Json result = model.json("--prompt 'The dog' --max-new-tokens 8");
  const auto expected = std::find(ids.begin(), ids.end(), stop);
  CHECK(result["ended"] == true);
  CHECK(result["ids"] == std::vector<std::int32_t>(ids.begin(), expected + 1));
}

TEST_CASE("rowan generate answers a conversation through the model's chat template") {
  REQUIRE(test::program_is_built());
  const Model model("qwen", "chatml");
  const Tokenizer tokenizer(model.path());
  test::write_file(model.scratch / "chat.json", R"({"messages": [{"role": "user", "content": "Hi"}]})");
  const Json result = model.json("--messages '" + (model.scratch / "chat.json").string() + "' --max-new-tokens 3");
  CHECK(result["prompt_ids"] == tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", false));
}

TEST_CASE("rowan generate tells what is wrong, and with which status") {
  REQUIRE(test::program_is_built());
  const Model model("llama3");
  const auto check = [&](const std::string& arguments, int status, const std::string& message) {
    CAPTURE(arguments);
    const test::Outcome outcome = model.run(arguments);
    CAPTURE(outcome.err);
    CHECK(outcome.status == status);
    CHECK(outcome.err.find(message) != std::string::npos);
  };
  check("", 2, "");
  check("--prompt a --messages b", 2, "");
  check("--prompt a --temperature -1", 2, "temperature");
  check("--prompt a --temperature 1 --top-p 0", 2, "top_p");
  check("--prompt a --seed 7", 2, "no effect at --temperature 0");
  check("--prompt a --chat-template chatml", 2, "no effect with --prompt");
  check("--prompt '" + std::string(300, '1') + "'", 2, "the model takes 64");
  test::write_file(model.scratch / "chat.json", R"([{"role": "user"}])");
  const std::string chat = "--messages '" + (model.scratch / "chat.json").string() + "'";
  check(chat, 3, "expected messages");
  test::write_file(model.scratch / "chat.json", R"([{"role": "user", "content": "Hi"}])");
  check(chat, 3, "the model has no chat_template");
  check(chat + " --chat-template vicuna", 2, "vicuna");
  check("--messages no-such-file", 3, "no-such-file");
  std::filesystem::remove(model.path() / "tokenizer.json");
  check("--prompt a", 3, "tokenizer.json");
}

}  // namespace rowan
