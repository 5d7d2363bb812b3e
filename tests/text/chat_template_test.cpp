#include "rowan/text/chat_template.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/files.h"
#include "text/jinja.h"

namespace rowan {
namespace {

using Json = nlohmann::json;

/// A model directory with this tokenizer_config.json, and a template.
struct ModelDirectory {
  explicit ModelDirectory(const Json& config) { test::write_file(scratch / "tokenizer_config.json", config.dump()); }
  ChatTemplate own() const { return ChatTemplate::of_model(scratch.path()); }
  test::ScratchDirectory scratch;
};

std::string joined(const std::vector<TextSegment>& segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

std::string trained(const std::vector<TextSegment>& segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.train ? "[" + segment.text + "]" : "";
  return text;
}

std::vector<ChatMessage> messages_of(const Json& json) {
  std::vector<ChatMessage> messages;
  for (const Json& message : json) messages.push_back({message["role"], message["content"]});
  return messages;
}

Json load(const std::string& name) {
  return Json::parse(test::read_file(test::data_path("chat_templates") / (name + ".json")));
}

const std::vector<ChatMessage> kTurns = {{"user", "Hi"}, {"assistant", "Yes"}, {"user", "So?"}, {"assistant", "No"}};

}  // namespace

TEST_CASE("Conversations are written as the model's own chat template does") {
  const std::pair<const char*, const char*> forms[] = {
      {"qwen2", "chatml"},       {"qwen2_5", "chatml"},      {"chatml", "chatml"},      {"qwen3", "qwen3"},
      {"llama3", "llama3"},      {"llama3_2", "llama3"},     {"mistral_v1", "mistral"}, {"mistral_v2", "mistral"},
      {"mistral_v3", "mistral"}, {"mistral_nemo", "mistral"}};
  for (const auto& [name, form] : forms) {
    CAPTURE(name);
    const Json file = load(name);
    const ModelDirectory model(file);
    const ChatTemplate chat = model.own();
    CHECK(chat.name() == form);
    for (const Json& expected : file["cases"]) {
      const auto messages = messages_of(expected["messages"]);
      CAPTURE(expected.dump());
      // Newer Mistral templates forget the system message where an answer comes last.
      const bool forgets =
          file["chat_template"].get<std::string>().find("loop.last and system_message") != std::string::npos &&
          messages[0].role == "system" && messages.back().role == "assistant";
      if (expected["text"].is_null()) {
        CHECK_THROWS_AS(chat.render(messages), Error);
      } else if (!forgets) {
        CHECK(joined(chat.render(messages)) == expected["text"].get<std::string>());
        CHECK(chat.prompt(messages) == expected["prompt"].get<std::string>());
      } else {
        CHECK(joined(chat.render(messages)) != expected["text"].get<std::string>());
        CHECK(joined(chat.render(messages)).find(messages[0].content + "\n\n") != std::string::npos);
      }
    }
  }
}

TEST_CASE("Every assistant turn is marked, with the token that ends it, and nothing else") {
  const auto marks = [](const char* name) { return trained(ModelDirectory(load(name)).own().render(kTurns)); };
  CHECK(marks("chatml") == "[Yes<|im_end|>][No<|im_end|>]");
  CHECK(marks("qwen3") == "[Yes<|im_end|>][<think>\n\n</think>\n\nNo<|im_end|>]");
  CHECK(marks("llama3_2") == "[Yes<|eot_id|>][No<|eot_id|>]");
  CHECK(marks("mistral_v1") == "[Yes</s>][No</s>]");
  CHECK(marks("mistral_v3") == "[ Yes</s>][ No</s>]");
}

TEST_CASE("A template can be named, where the model has none") {
  const ModelDirectory model({{"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}});
  const auto text = [&](const char* name) {
    const ChatTemplate chat = ChatTemplate::named(name, model.scratch.path());
    CHECK(chat.name() == name);
    return joined(chat.render(std::vector<ChatMessage>{{"system", "S"}, {"user", " Hi "}, {"assistant", "Yes"}}));
  };
  CHECK(text("chatml") ==
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n");
  CHECK(text("llama3") ==
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|"
        "eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>");
  CHECK(text("mistral") == "<s>[INST] S\n\n Hi [/INST] Yes</s>");
  CHECK_THROWS_AS(ChatTemplate::named("vicuna", model.scratch.path()), Error);
}

TEST_CASE("A template of another form, or none, is refused with advice") {
  const auto refusal = [](const Json& config) -> std::string {
    try {
      ModelDirectory(config).own();
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUnsupported);
      return error.what();
    }
    return "";
  };
  CHECK(refusal(Json::object()).find("the model has no chat_template: name one of chatml") != std::string::npos);
  CHECK(refusal({{"chat_template", "{{ messages }}"}}).find("{\"segments\": [{\"text\"") != std::string::npos);
  // Near misses: another end of turn, a thinking model that starts its answer for it, [INST] without its content.
  Json file = load("chatml");
  file["chat_template"] = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_sep|>' }}";
  CHECK_FALSE(refusal(file).empty());
  file = load("qwen3");
  file["chat_template"] = file["chat_template"].get<std::string>() + "{{ '<|im_start|>assistant\\n<think>\\n' }}";
  CHECK_FALSE(refusal(file).empty());
  file = load("mistral_v1");
  file["chat_template"] = "{{ bos_token }}{{ '[INST] ' + text + ' [/INST]' }}{{ message['content'] + eos_token }}";
  CHECK_FALSE(refusal(file).empty());
}

TEST_CASE("chat_template.jinja comes before tokenizer_config.json, and of several templates the default counts") {
  Json config = load("mistral_v1");
  const std::string text = config["chat_template"];
  config["chat_template"] = {{{"name", "tool_use"}, {"template", "x"}}, {{"name", "default"}, {"template", text}}};
  const ModelDirectory model(config);
  CHECK(model.own().name() == "mistral");
  test::write_file(model.scratch / "chat_template.jinja", load("llama3")["chat_template"].get<std::string>());
  CHECK(model.own().name() == "llama3");
}

TEST_CASE("Roles without a place are refused") {
  const auto refused = [](const char* name, const std::vector<ChatMessage>& messages) {
    CHECK_THROWS_AS(ModelDirectory(load(name)).own().render(messages), Error);
  };
  refused("chatml", {});
  refused("chatml", {{"tool", "x"}});
  refused("llama3", {{"user", "x"}, {"system", "y"}});
  refused("mistral_v2", {{"user", "x"}, {"user", "y"}});
  refused("mistral_v2", {{"assistant", "x"}});
  refused("mistral_v1", {{"system", "x"}, {"user", "y"}});
}

TEST_CASE("Spellings of one Jinja template compare equal") {
  CHECK(detail::normalize_jinja("{{- \"a \" + m.role +\n '\\n' }}\n{# note #} {%- endfor -%}") ==
        detail::normalize_jinja("{{'a '+m['role']+\"\n\"}}{% endfor %}"));
  CHECK(detail::normalize_jinja("x{y} {{ 'it\\'s' }") != "");
  CHECK(detail::normalize_jinja("{{") == "{{}}");
  CHECK(detail::normalize_jinja("{") == "{");
  CHECK(detail::normalize_jinja("") == "");
}

}  // namespace rowan
