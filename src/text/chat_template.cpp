#include "rowan/text/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/check.h"
#include "io/json.h"
#include "rowan/io/atomic_file.h"
#include "text/jinja.h"

namespace rowan {

namespace {

using detail::fail;
using detail::JsonObject;
using detail::quote;
using detail::require;

constexpr std::int64_t kMaxTemplateBytes = std::int64_t{16} << 20;
constexpr std::string_view kAdvice =
    "name one of chatml, qwen3, llama3 and mistral, or give rows of {\"segments\": [{\"text\": …, \"train\": …}]}";

enum class Kind { kChatml, kQwen3, kLlama3, kMistral };
constexpr std::array<std::pair<std::string_view, Kind>, 4> kNames = {
    {{"chatml", Kind::kChatml}, {"qwen3", Kind::kQwen3}, {"llama3", Kind::kLlama3}, {"mistral", Kind::kMistral}}};

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// What stands between two texts, at the first place where both are found.
std::optional<std::string> between(std::string_view text, std::string_view left, std::string_view right) {
  const std::size_t begin = text.find(left);
  if (begin == text.npos) return std::nullopt;
  const std::size_t end = text.find(right, begin + left.size());
  if (end == text.npos) return std::nullopt;
  return std::string(text.substr(begin + left.size(), end - begin - left.size()));
}

std::string_view strip(std::string_view text, std::string_view characters) {
  const std::size_t begin = text.find_first_not_of(characters);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(characters) + 1 - begin);
}

/// str.strip() of Python, for ASCII.
std::string trim(std::string_view text) { return std::string(strip(text, " \t\n\v\f\r\x1c\x1d\x1e\x1f")); }

}  // namespace

struct ChatTemplate::Form {
  Kind kind = Kind::kChatml;
  std::string bos, eos;
  std::string default_system;  // chatml: where there is no system message; empty: none
  std::string date;            // llama3: of the lines that Llama 3.1 puts in every system message; empty: none
  // mistral
  std::string open = "[INST] ", close = "[/INST]", answer = " ", behind_answer;
  bool trims_answer = false;
  enum class System { kNone, kFirst, kLast } system = System::kLast;  // the user message that takes it in
};

namespace {

/// The segments of a text as they are written; what is marked alike becomes one.
class Writer {
 public:
  void write(std::string_view text, bool train = false) {
    if (text.empty()) return;
    if (segments_.empty() || segments_.back().train != train) segments_.push_back({"", train});
    segments_.back().text += text;
  }
  std::vector<TextSegment> take() { return std::move(segments_); }

 private:
  std::vector<TextSegment> segments_;
};

void check_roles(std::span<const ChatMessage> messages, bool alternate) {
  require(!messages.empty(), "chat template: expected messages, got none");
  const std::size_t first = messages[0].role == "system" ? 1 : 0;
  for (std::size_t i = first; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    require(role == "user" || role == "assistant",
            "chat template: expected the role user or assistant (system for the first message alone), got {}",
            quote(role));
    require(!alternate || (role == "user") == ((i - first) % 2 == 0),
            "chat template: expected user and assistant in turn, got {} for message {}", quote(role), i + 1);
  }
}

}  // namespace

// Recognition: each function fills the form when the template has it.

namespace {

bool recognize_chatml(const std::string& jinja, auto& form) {
  const auto writes = [&](std::string_view content) {
    return contains(jinja, fmt::format("'<|im_start|>'+message['role']+'\n'+{}+'<|im_end|>\n'", content));
  };
  if (!writes("message['content']") && !writes("content")) return false;
  if (contains(jinja, "<think>")) {
    if (!contains(jinja, "loop.index0>ns.last_query_index") || contains(jinja, "'<|im_start|>assistant\n<think>"))
      return false;
    form.kind = Kind::kQwen3;
  } else {
    form.kind = Kind::kChatml;
  }
  // A model that always has a system message writes it in one string: '<|im_start|>system\nYou are …<|im_end|>\n'.
  constexpr std::string_view kSystem = "'<|im_start|>system\n";
  for (std::size_t at = 0; form.default_system.empty() && (at = jinja.find(kSystem, at)) != jinja.npos; ++at) {
    const auto text = between(std::string_view(jinja).substr(at), kSystem, "<|im_end|>\n'");
    if (text && !contains(*text, "'")) form.default_system = *text;
  }
  if (!contains(jinja, "bos_token")) form.bos.clear();
  return true;
}

bool recognize_llama3(const std::string& jinja, auto& form) {
  if (!contains(jinja,
                "'<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'+message['content']|trim+'<|eot_id|>'"))
    return false;
  form.kind = Kind::kLlama3;
  if (!contains(jinja, "bos_token")) form.bos.clear();
  if (!contains(jinja, "Cutting Knowledge Date")) return true;
  if (!contains(jinja, "'Cutting Knowledge Date: December 2023\n'") ||
      !contains(jinja, "'Today Date: '+date_string+'\n\n'"))
    return false;
  const auto date = between(jinja, "setdate_string='", "'");
  form.date = date.value_or("");
  return date.has_value();
}

bool recognize_mistral(const std::string& jinja, auto& form) {
  if (!contains(jinja, "bos_token")) return false;
  const auto writes = [&](std::string_view open, std::string_view content, std::string_view close) {
    return contains(jinja, fmt::format("'{}'+{}+'{}'", open, content, close));
  };
  bool found = false;
  for (const char* const open : {"[INST] ", " [INST] ", "[INST]"}) {
    for (const char* const close : {"[/INST]", " [/INST]"}) {
      if (!writes(open, "message['content']", close)) continue;
      found = true;
      form.open = open;
      form.close = close;
      using System = decltype(form.system);
      const bool system = writes(open, "system_message+'\n\n'+message['content']", close);
      form.system = !system                                                   ? System::kNone
                    : contains(jinja, "loop.lastandsystem_messageisdefined")  ? System::kLast
                    : contains(jinja, "loop.firstandsystem_messageisdefined") ? System::kFirst
                                                                              : System::kNone;
    }
  }
  form.kind = Kind::kMistral;
  form.trims_answer = contains(jinja, "message['content']|trim+eos_token");
  const std::string answer = form.trims_answer ? "message['content']|trim+eos_token" : "message['content']+eos_token";
  form.answer = contains(jinja, "' '+" + answer) ? " " : "";
  form.behind_answer = contains(jinja, answer + "+' '") ? " " : "";
  return found && contains(jinja, answer);
}

/// The text of the model's own template, and the file it is from.
std::optional<std::string> own_template(const std::filesystem::path& directory) {
  const auto path = directory / "chat_template.jinja";
  if (std::filesystem::exists(path)) return read_text_file(path, kMaxTemplateBytes);
  const auto config_path = directory / "tokenizer_config.json";
  if (!std::filesystem::exists(config_path)) return std::nullopt;
  const auto config = detail::read_json_object<nlohmann::ordered_json>(config_path, kMaxTemplateBytes);
  const JsonObject json(config_path, config);
  if (!json.has("chat_template")) return std::nullopt;
  if (!json.at("chat_template").is_array()) return json.string("chat_template");
  for (const JsonObject& entry : json.objects("chat_template")) {
    if (entry.string("name") == "default") return entry.string("template");
  }
  return std::nullopt;
}

/// The texts of bos_token and eos_token.
std::pair<std::string, std::string> end_tokens(const std::filesystem::path& directory) {
  const auto path = directory / "tokenizer_config.json";
  if (!std::filesystem::exists(path)) return {};
  const auto config = detail::read_json_object<nlohmann::ordered_json>(path, kMaxTemplateBytes);
  const JsonObject json(path, config);
  const auto text = [&json](const char* name) -> std::string {
    const auto* value = json.find(name);
    if (value == nullptr) return "";
    return value->is_object() ? json.object(name).string("content") : json.string(name);
  };
  return {text("bos_token"), text("eos_token")};
}

}  // namespace

ChatTemplate::ChatTemplate(std::unique_ptr<const Form> form) : form_(std::move(form)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

ChatTemplate ChatTemplate::of_model(const std::filesystem::path& directory) {
  const auto text = own_template(directory);
  if (!text) fail(ErrorKind::kUnsupported, "{}: the model has no chat_template: {}", directory.string(), kAdvice);
  const std::string jinja = detail::normalize_jinja(*text);
  auto form = std::make_unique<Form>();
  std::tie(form->bos, form->eos) = end_tokens(directory);
  if (!recognize_chatml(jinja, *form) && !recognize_llama3(jinja, *form) && !recognize_mistral(jinja, *form)) {
    fail(ErrorKind::kUnsupported, "{}: the model's chat_template is none of chatml, qwen3, llama3 and mistral: {}",
         directory.string(), kAdvice);
  }
  return ChatTemplate(std::move(form));
}

ChatTemplate ChatTemplate::named(std::string_view name, const std::filesystem::path& directory) {
  const auto found = std::find_if(kNames.begin(), kNames.end(), [&](const auto& entry) { return entry.first == name; });
  require(found != kNames.end(), "chat template: expected chatml, qwen3, llama3 or mistral, got {}", quote(name));
  auto form = std::make_unique<Form>();
  form->kind = found->second;
  std::tie(form->bos, form->eos) = end_tokens(directory);
  if (form->kind == Kind::kChatml || form->kind == Kind::kQwen3) form->bos.clear();
  form->trims_answer = true;
  return ChatTemplate(std::move(form));
}

std::string_view ChatTemplate::name() const noexcept {
  return std::find_if(kNames.begin(), kNames.end(), [&](const auto& entry) { return entry.second == form_->kind; })
      ->first;
}

// Rendering.

namespace {

void write_chatml(Writer& out, std::string_view role, std::string_view content) {
  const bool train = role == "assistant";
  out.write(fmt::format("<|im_start|>{}\n", role));
  out.write(fmt::format("{}<|im_end|>", content), train);
  out.write("\n");
}

/// The content of an assistant message: its <think> block apart, written where the form wants one.
std::string qwen3_answer(const std::string& content, bool behind_last_query, bool last) {
  constexpr std::string_view kBegin = "<think>", kEnd = "</think>";
  std::string thought, answer = content;
  const std::size_t end = content.find(kEnd);
  if (end != content.npos) {
    std::string_view before = std::string_view(content).substr(0, end);
    if (const std::size_t begin = before.rfind(kBegin); begin != before.npos)
      before.remove_prefix(begin + kBegin.size());
    thought = strip(before, "\n");
    answer = content.substr(content.rfind(kEnd) + kEnd.size());
    answer.erase(0, answer.find_first_not_of('\n'));
  }
  if (!behind_last_query || (!last && thought.empty())) return answer;
  answer.erase(0, answer.find_first_not_of('\n'));
  return fmt::format("<think>\n{}\n</think>\n\n{}", thought, answer);
}

void render_chatml(Writer& out, std::span<const ChatMessage> messages, const auto& form) {
  check_roles(messages, false);
  out.write(form.bos);
  if (!form.default_system.empty() && messages[0].role != "system") write_chatml(out, "system", form.default_system);
  std::size_t last_query = messages.size();  // where nobody asks, nothing is behind it
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role == "user") last_query = i;
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    const bool thinks = form.kind == Kind::kQwen3 && role == "assistant";
    write_chatml(out, role, thinks ? qwen3_answer(content, i > last_query, i + 1 == messages.size()) : content);
  }
}

void render_llama3(Writer& out, std::span<const ChatMessage> messages, const auto& form) {
  check_roles(messages, false);
  const auto write = [&out](std::string_view role, std::string_view content) {
    out.write(fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", role));
    out.write(fmt::format("{}<|eot_id|>", content), role == "assistant");
  };
  out.write(form.bos);
  if (!form.date.empty()) {
    std::string system;
    if (messages[0].role == "system") {
      system = trim(messages[0].content);
      messages = messages.subspan(1);
    }
    write("system", fmt::format("Cutting Knowledge Date: December 2023\nToday Date: {}\n\n{}", form.date, system));
  }
  for (const auto& [role, content] : messages) write(role, trim(content));
}

void render_mistral(Writer& out, std::span<const ChatMessage> messages, const auto& form) {
  check_roles(messages, true);
  using System = std::remove_cvref_t<decltype(form.system)>;
  std::string system;
  if (messages[0].role == "system") {
    require(form.system != System::kNone, "chat template: the model's mistral template takes no system message");
    system = messages[0].content + "\n\n";
    messages = messages.subspan(1);
  }
  out.write(form.bos);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    if (messages[i].role == "user") {
      const bool takes_system = form.system == System::kFirst ? i == 0 : i + 2 >= messages.size();
      out.write(form.open + (takes_system ? system : "") + content + form.close);
    } else {
      out.write(form.answer + (form.trims_answer ? trim(content) : content) + form.eos, true);
      out.write(form.behind_answer);
    }
  }
}

}  // namespace

std::vector<TextSegment> ChatTemplate::render(std::span<const ChatMessage> messages) const {
  Writer out;
  switch (form_->kind) {
    case Kind::kChatml:
    case Kind::kQwen3:
      render_chatml(out, messages, *form_);
      break;
    case Kind::kLlama3:
      render_llama3(out, messages, *form_);
      break;
    case Kind::kMistral:
      render_mistral(out, messages, *form_);
      break;
  }
  return out.take();
}

std::string ChatTemplate::prompt(std::span<const ChatMessage> messages) const {
  std::string text;
  for (const TextSegment& segment : render(messages)) text += segment.text;
  switch (form_->kind) {
    case Kind::kChatml:
    case Kind::kQwen3:
      return text + "<|im_start|>assistant\n";
    case Kind::kLlama3:
      return text + "<|start_header_id|>assistant<|end_header_id|>\n\n";
    case Kind::kMistral:
      return text;
  }
  return text;
}

}  // namespace rowan
