#include "rowan/text/tokenizer.h"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/files.h"
#include "text/utf8.h"

namespace rowan {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

const char* const kStyles[] = {"llama3", "qwen", "gpt2", "llama2", "mistral", "unknown"};

std::filesystem::path style(const std::string& name) { return test::data_path("tokenizers") / name; }

std::string stream(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  StreamDecoder decoder(tokenizer, skip_special);
  std::string text;
  const auto add = [&text](const std::string& piece) {
    CHECK(detail::is_utf8(piece));
    text += piece;
  };
  for (const std::int32_t id : ids) add(decoder.push(id));
  add(decoder.finish());
  return text;
}

/// Compares with what the tokenizers library gave: DIRECTORY/expected.jsonl.
void check_directory(const std::filesystem::path& directory) {
  CAPTURE(directory.string());
  const Tokenizer tokenizer(directory);
  std::istringstream lines(test::read_file(directory / "expected.jsonl"));
  int cases = 0;
  for (std::string line; std::getline(lines, line); ++cases) {
    const Json expected = Json::parse(line);
    CAPTURE(line.substr(0, 300));
    const Ids ids = expected["ids"];
    CHECK(tokenizer.decode(ids) == expected["decoded"].get<std::string>());
    CHECK(tokenizer.decode(ids, false) == expected["decoded_with_special"].get<std::string>());
    if (!expected.contains("text")) continue;
    const std::string text = expected["text"];
    CHECK(tokenizer.encode(text) == ids);
    CHECK(tokenizer.encode(text, false) == expected["plain_ids"].get<Ids>());
    CHECK(stream(tokenizer, ids, true) == expected["decoded"].get<std::string>());
    CHECK(stream(tokenizer, ids, false) == expected["decoded_with_special"].get<std::string>());
  }
  CHECK(cases > 0);
}

/// A tokenizer of a style with its file changed.
template <class F>
void with_change(const std::string& name, const F& change, const std::string& config = "") {
  const test::ScratchDirectory scratch;
  Json json = Json::parse(test::read_file(style(name) / "tokenizer.json"));
  change(json);
  test::write_file(scratch / "tokenizer.json", json.dump());
  if (!config.empty()) test::write_file(scratch / "tokenizer_config.json", config);
  const Tokenizer tokenizer(scratch.path());
}

template <class F>
void check_refused(ErrorKind kind, const std::string& message, const std::string& name, const F& change,
                   const std::string& config = "") {
  try {
    with_change(name, change, config);
    FAIL("nothing was thrown; expected " + message);
  } catch (const Error& error) {
    CAPTURE(std::string(error.what()));
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(message) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("Tokenizers of every style give the ids and texts of the tokenizers library") {
  for (const char* const name : kStyles) check_directory(style(name));
}

TEST_CASE("Tokenizers of the directories in ROWAN_TOKENIZERS match their expected.jsonl", "[.interop]") {
  const char* const list = std::getenv("ROWAN_TOKENIZERS");
  REQUIRE(list != nullptr);
  std::istringstream directories{std::string(list)};
  for (std::string directory; std::getline(directories, directory, ':');) check_directory(directory);
}

TEST_CASE("A tokenizer names its vocabulary and special tokens") {
  const Tokenizer tokenizer(style("mistral"));
  CHECK(tokenizer.bos_id() == 1);
  CHECK(tokenizer.eos_id() == 2);
  CHECK(tokenizer.token_to_id("[INST]") == tokenizer.vocab_size() - 2);
  CHECK(tokenizer.id_to_token(1) == "<s>");
  CHECK_FALSE(tokenizer.token_to_id("no such token"));
  CHECK_FALSE(tokenizer.id_to_token(-1));
  CHECK_FALSE(tokenizer.id_to_token(static_cast<std::int32_t>(tokenizer.vocab_size())));
  CHECK_FALSE(Tokenizer(style("qwen")).bos_id());
}

TEST_CASE("Parts are encoded as one text, and each token belongs to the part it ends in") {
  for (const char* const name : kStyles) {
    CAPTURE(name);
    const Tokenizer tokenizer(style(name));
    const std::vector<std::string> parts{"The quick", " brown", "", " fo", "x<|end|>", "</s>", "\n", "\n\n dog", "é"};
    std::string whole;
    for (const std::string& part : parts) whole += part;
    const EncodedParts encoded = tokenizer.encode_parts(parts);
    CHECK(encoded.ids == tokenizer.encode(whole));
    REQUIRE(encoded.ends.size() == parts.size());
    CHECK(std::is_sorted(encoded.ends.begin(), encoded.ends.end()));
    CHECK(encoded.ends.back() == encoded.ids.size());
    // Where words end, so do tokens.
    const Ids first(encoded.ids.begin(), encoded.ids.begin() + static_cast<std::ptrdiff_t>(encoded.ends[0]));
    if (std::string(name) != "unknown") CHECK(first == tokenizer.encode("The quick"));
    CHECK(encoded.ends[2] == encoded.ends[1]);
  }
  const Tokenizer tokenizer(style("llama3"));
  CHECK(tokenizer.encode_parts({}).ids == tokenizer.encode(""));
}

TEST_CASE("Streamed text never holds half a character") {
  const Tokenizer tokenizer(style("llama3"));
  const Ids ids = tokenizer.encode("a🙂b", false);
  REQUIRE(ids.size() == 6);  // one token a byte of the emoji
  StreamDecoder decoder(tokenizer);
  CHECK(decoder.push(ids[0]) == "a");
  for (int i = 1; i < 4; ++i) CHECK(decoder.push(ids[static_cast<std::size_t>(i)]).empty());
  CHECK(decoder.push(ids[4]) == "🙂");
  CHECK(decoder.push(ids[5]) == "b");
  CHECK(decoder.push(ids[1]).empty());
  CHECK(decoder.finish() == "\xEF\xBF\xBD");
  CHECK(decoder.push(ids[0]) == "a");  // a new text

  const Tokenizer mistral(style("mistral"));
  StreamDecoder words(mistral);
  std::string text;
  for (const std::int32_t id : mistral.encode("The quick fox 🙂🙂 é", false)) text += words.push(id);
  CHECK(text == "The quick fox 🙂🙂 é");
}

TEST_CASE("Random tokens stream as valid UTF-8 in every style") {
  for (const char* const name : kStyles) {
    const Tokenizer tokenizer(style(name));
    std::uint32_t state = 1;
    for (int round = 0; round < 50; ++round) {
      Ids ids;
      for (int i = 0; i < 20; ++i) {
        state = state * 1664525u + 1013904223u;
        ids.push_back(static_cast<std::int32_t>((state >> 8) % static_cast<std::uint32_t>(tokenizer.vocab_size() + 3)));
      }
      stream(tokenizer, ids, false);
      CHECK(detail::is_utf8(tokenizer.decode(ids)));
    }
  }
}

TEST_CASE("A megabyte of one character takes no more than linear time, nearly") {
  for (const char* const name : {"llama3", "llama2", "mistral"}) {
    const Tokenizer tokenizer(style(name));
    for (const char character : {'a', ' ', '\n'}) {
      CAPTURE(name, character);
      const std::clock_t start = std::clock();
      const Ids ids = tokenizer.encode(std::string(1 << 20, character), false);
      CHECK(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC < 10);
      CHECK(ids.size() > 1000);
    }
  }
}

TEST_CASE("Long runs of combining marks are normalized in time, to their canonical order") {
  const Tokenizer tokenizer(style("qwen"));
  std::string marks = "x", low, high;
  for (int i = 0; i < 50000; ++i) {
    marks += "\u0301\u0316";
    low += "\u0316";
    high += "\u0301";
  }
  const std::clock_t start = std::clock();
  CHECK(tokenizer.encode(marks) == tokenizer.encode("x" + low + high));
  CHECK(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC < 10);
}

TEST_CASE("Threads may share a tokenizer") {
  const Tokenizer tokenizer(style("qwen"));
  const std::string text = "The quick brown fox, déjà vu, 你好世界 and 12345 more words of code: x += 1;\n";
  const Ids expected = Tokenizer(style("qwen")).encode(text);
  std::vector<int> right(4);
  std::vector<std::thread> threads;
  for (int& count : right) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) count += tokenizer.encode(text) == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == std::vector<int>(4, 100));
}

TEST_CASE("Text that is not UTF-8 is refused") {
  const Tokenizer tokenizer(style("gpt2"));
  for (const char* const text : {"\xFF", "a\xC3", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"})
    CHECK_THROWS_AS(tokenizer.encode(text), Error);
}

TEST_CASE("What a tokenizer.json asks for beyond the supported is refused by name") {
  const auto refused = [](const std::string& message, const std::string& name, const auto& change) {
    check_refused(ErrorKind::kUnsupported, message, name, change);
  };
  refused("model.type: \"WordPiece\"", "gpt2", [](Json& j) { j["model"]["type"] = "WordPiece"; });
  refused("model.dropout", "gpt2", [](Json& j) { j["model"]["dropout"] = 0.1; });
  refused("model.end_of_word_suffix", "gpt2", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; });
  refused("model.surprise", "gpt2", [](Json& j) { j["model"]["surprise"] = 1; });
  refused("surprise: it is not supported", "gpt2", [](Json& j) { j["surprise"] = true; });
  refused("normalizer.type: the normalizer \"BertNormalizer\"", "qwen", [](Json& j) {
    j["normalizer"] = {{"type", "BertNormalizer"}};
  });
  refused("pre_tokenizer.pretokenizers.1.type: the pre-tokenizer \"Digits\"", "qwen", [](Json& j) {
    j["pre_tokenizer"]["pretokenizers"][1] = {{"type", "Digits"}};
  });
  refused("post_processor.type: the post-processor \"BertProcessing\"", "qwen",
          [](Json& j) { j["post_processor"]["type"] = "BertProcessing"; });
  refused("decoder.type: the decoder \"CTC\"", "qwen", [](Json& j) { j["decoder"] = {{"type", "CTC"}}; });
  refused("pre_tokenizer.pretokenizers.0.pattern.Regex: regular expression", "qwen",
          [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(unclosed"; });
  refused("behavior: \"Odd\"", "qwen", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Odd"; });
  refused("prepend_scheme: \"odd\"", "mistral", [](Json& j) { j["pre_tokenizer"]["prepend_scheme"] = "odd"; });
  refused("only a template of one sequence A", "mistral",
          [](Json& j) { j["post_processor"]["single"].push_back(j["post_processor"]["single"][1]); });
  refused("added_tokens.0.content: more than 1024 bytes", "gpt2",
          [](Json& j) { j["added_tokens"][0]["content"] = std::string(1025, 'x'); });
}

TEST_CASE("A damaged tokenizer.json is an error that names the place") {
  const auto damaged = [](const std::string& message, const std::string& name, const auto& change) {
    check_refused(ErrorKind::kFormat, message, name, change);
  };
  damaged("model: it is missing", "gpt2", [](Json& j) { j.erase("model"); });
  damaged("model.vocab: expected an object", "gpt2", [](Json& j) { j["model"].erase("vocab"); });
  damaged("model.vocab: expected a token id for \"!\"", "gpt2", [](Json& j) { j["model"]["vocab"]["!"] = -1; });
  damaged("model.vocab: expected a token id for \"!\"", "gpt2", [](Json& j) { j["model"]["vocab"]["!"] = 1e9; });
  damaged("share id 5", "gpt2", [](Json& j) { j["model"]["vocab"]["!"] = 5; });
  damaged("model.merges: expected an array", "gpt2", [](Json& j) { j["model"]["merges"] = 3; });
  damaged("model.merges: expected two tokens at index 0", "gpt2", [](Json& j) { j["model"]["merges"][0] = "a b c"; });
  damaged("model.merges: expected two tokens at index 1", "gpt2", [](Json& j) { j["model"]["merges"][1] = {"a"}; });
  damaged("is missing", "gpt2", [](Json& j) { j["model"]["merges"][0] = {"a", "no such token"}; });
  damaged("model.vocab: \"none\" is missing", "gpt2", [](Json& j) { j["model"]["unk_token"] = "none"; });
  damaged("added_tokens: expected an array", "gpt2", [](Json& j) { j["added_tokens"] = 1; });
  damaged("added_tokens.0.id: expected an integer", "gpt2", [](Json& j) { j["added_tokens"][0]["id"] = -4; });
  damaged("share id 7", "gpt2", [](Json& j) { j["added_tokens"][0]["id"] = 7; });
  damaged("stands twice", "gpt2", [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); });
  damaged("post_processor: id 99999 is not in the vocabulary", "mistral",
          [](Json& j) { j["post_processor"]["special_tokens"]["<s>"]["ids"] = {99999}; });
  check_refused(
      ErrorKind::kFormat, "eos_token: \"<none>\" is not in tokenizer.json", "gpt2", [](Json&) {},
      R"({"eos_token": {"content": "<none>"}})");
}

TEST_CASE("A pattern that backtracks without end is given up") {
  CHECK_THROWS_AS(with_change(
                      "qwen", [](Json&) {}, "[]"),
                  Error);
  const test::ScratchDirectory scratch;
  Json json = Json::parse(test::read_file(style("qwen") / "tokenizer.json"));
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a|aa)+(?=c)";
  test::write_file(scratch / "tokenizer.json", json.dump());
  const Tokenizer tokenizer(scratch.path());
  CHECK_THROWS_AS(tokenizer.encode(std::string(200, 'a') + "b"), Error);
}

}  // namespace rowan
