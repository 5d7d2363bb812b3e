#include "rowan/text/dataset.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/text/tokenizer.h"
#include "support/files.h"

namespace rowan {
namespace {

constexpr std::int64_t kIgnored = -100;

std::vector<TokenRow> read(const std::string& lines, const std::string& style, bool mask_prompts = false,
                           const std::string& chat_template = "") {
  const test::ScratchDirectory scratch;
  test::write_file(scratch / "data.jsonl", lines);
  return read_dataset(scratch / "data.jsonl", {test::data_path("tokenizers") / style, chat_template, mask_prompts});
}

/// The text of the tokens that count.
std::string trained(const TokenRow& row, const std::string& style) {
  const Tokenizer tokenizer(test::data_path("tokenizers") / style);
  std::string text;
  for (std::size_t i = 0; i < row.labels.size(); ++i) {
    if (row.labels[i] == kIgnored) continue;
    CHECK(row.labels[i] == row.input_ids[i]);
    text += tokenizer.decode(std::vector<std::int32_t>{row.input_ids[i]}, false);
  }
  return text;
}

std::string whole(const TokenRow& row, const std::string& style) {
  return Tokenizer(test::data_path("tokenizers") / style).decode(row.input_ids, false);
}

void check_refused(const std::string& message, const std::string& lines, const std::string& style = "llama3",
                   const std::string& chat_template = "") {
  try {
    read(lines, style, false, chat_template);
    FAIL("nothing was thrown; expected " + message);
  } catch (const Error& error) {
    CAPTURE(std::string(error.what()));
    CHECK(std::string(error.what()).find(message) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("Rows of text take BOS and EOS, once") {
  const auto rows = read("{\"text\": \"The dog\"}\n\n{\"text\": \"The dog<|end|>\", \"source\": 3}\n", "llama3");
  REQUIRE(rows.size() == 2);
  CHECK(whole(rows[0], "llama3") == "<|begin|>The dog<|end|>");
  CHECK(rows[1].input_ids == rows[0].input_ids);
  CHECK(rows[0].labels == std::vector<std::int64_t>(rows[0].input_ids.begin(), rows[0].input_ids.end()));
  CHECK(whole(read("{\"text\": \"The dog\"}", "qwen")[0], "qwen") == "The dog<|im_end|>");
}

TEST_CASE("Prompts are masked when asked, completions and EOS never") {
  const std::string line = R"({"prompt": "The quick", "completion": " brown fox"})";
  CHECK(trained(read(line, "llama3", true)[0], "llama3") == " brown fox<|end|>");
  CHECK(trained(read(line, "llama3", false)[0], "llama3") == "<|begin|>The quick brown fox<|end|>");
  CHECK(whole(read(line, "mistral", true)[0], "mistral") == "<s> The quick brown fox</s>");
}

TEST_CASE("Of conversations every assistant turn counts where prompts are masked") {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"},)"
      R"( {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No"}]})";
  const TokenRow masked = read(line, "qwen", true, "chatml")[0];
  CHECK(trained(masked, "qwen") == "Yes<|im_end|>No<|im_end|>");
  const TokenRow all = read(line, "qwen", false, "chatml")[0];
  CHECK(all.input_ids == masked.input_ids);
  CHECK(trained(all, "qwen") == whole(all, "qwen"));
  CHECK(whole(all, "qwen") ==
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\nNo<|im_end|>\n");
  const TokenRow mistral = read(line, "mistral", true, "mistral")[0];
  const Tokenizer tokenizer(test::data_path("tokenizers") / "mistral");
  CHECK(mistral.input_ids == tokenizer.encode("<s>[INST] Hi[/INST] Yes</s>[INST] So?[/INST] No</s>", false));
  CHECK(trained(mistral, "mistral") == "Yes</s>No</s>");  // each token decoded alone: without its space
}

TEST_CASE("Segments are taken as they are, and their flags always count") {
  const std::string line =
      R"({"segments": [{"text": "The dog", "train": false}, {"text": " is asleep"}, {"text": "!", "train": true}]})";
  for (const bool mask : {false, true}) {
    const TokenRow row = read(line, "llama3", mask)[0];
    CHECK(whole(row, "llama3") == "The dog is asleep!");
    CHECK(trained(row, "llama3") == " is asleep!");
  }
}

TEST_CASE("Rows of token ids need no tokenizer and stay as they are") {
  const auto rows = read("{\"input_ids\": [5, 6], \"labels\": [-100, 6]}\n{\"input_ids\": [7]}", "none");
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].labels == std::vector<std::int64_t>{kIgnored, 6});
  CHECK(rows[1].input_ids == std::vector<std::int32_t>{7});
}

TEST_CASE("Order and ids of many rows do not depend on threads") {
  std::string lines;
  for (int i = 0; i < 300; ++i) lines += "{\"text\": \"number " + std::to_string(i) + "\"}\n";
  const auto rows = read(lines, "llama3");
  REQUIRE(rows.size() == 300);
  for (std::size_t i = 0; i < 300; i += 37)
    CHECK(whole(rows[i], "llama3") == "<|begin|>number " + std::to_string(i) + "<|end|>");
}

TEST_CASE("A bad row is named by file and line, the first of several") {
  const std::string good = "{\"text\": \"a\"}\n";
  std::string many;
  for (int i = 0; i < 200; ++i) many += good;
  check_refused("data.jsonl: expected rows, got none", "\n \n");
  check_refused("data.jsonl:201: malformed JSON", many + "{\"text\": \n" + many + "{\"text\": 3}");
  check_refused("data.jsonl:2: duplicate key \"text\"", good + R"({"text": "a", "text": "b"})");
  check_refused("data.jsonl:2: text: expected a string, got 3", good + "{\"text\": 3}");
  check_refused("data.jsonl:2: text: expected a text, got an empty one", good + "{\"text\": \"\"}");
  check_refused("data.jsonl:3: expected a row of text like the first, got one of prompt",
                good + "\n" + R"({"prompt": "a", "completion": "b"})");
  check_refused("data.jsonl:1: expected a member text, prompt", "{\"txt\": \"a\"}");
  check_refused("data.jsonl:1: expected one form of row, got text and messages", R"({"text": "a", "messages": []})");
  check_refused("data.jsonl:1: expected an object", "[1]");
  check_refused("data.jsonl:1: completion: it is missing", R"({"prompt": "a"})");
  check_refused("data.jsonl:1: segments: expected a text, got none", R"({"segments": [{"text": ""}]})");
  check_refused("data.jsonl:1: segments.0.train: expected true or false",
                R"({"segments": [{"text": "a", "train": 1}]})");
  check_refused("data.jsonl:1: messages: expected messages, got none", R"({"messages": []})", "qwen", "chatml");
  check_refused("data.jsonl:1: messages.0.tool_calls: it is not supported",
                R"({"messages": [{"role": "user", "content": "a", "tool_calls": []}]})", "qwen", "chatml");
  check_refused("data.jsonl:1: chat template: expected the role user or assistant",
                R"({"messages": [{"role": "robot", "content": "a"}]})", "qwen", "chatml");
  check_refused("the model has no chat_template", R"({"messages": [{"role": "user", "content": "a"}]})", "qwen");
  check_refused("tokenizer.json", good, "none");
}

}  // namespace rowan
