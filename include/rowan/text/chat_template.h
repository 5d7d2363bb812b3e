// Chat messages as the text that a model was trained on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rowan {

struct ChatMessage {
  std::string role;  ///< "system" (first alone), "user" or "assistant"
  std::string content;
};

/// A stretch of a text, and whether its tokens count for the loss where prompts are masked.
struct TextSegment {
  std::string text;
  bool train = true;

  friend bool operator==(const TextSegment&, const TextSegment&) = default;
};

/// One of a few forms:
///   chatml   <|im_start|>ROLE\nCONTENT<|im_end|>\n  (Qwen2, Qwen2.5, and many fine-tuned models)
///   qwen3    chatml, where the last answer begins with a <think> block and those before the last question have none
///   llama3   <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>  (contents stripped of white space)
///   mistral  [INST] CONTENT[/INST] CONTENT</s>  (the system message in front of a user's)
/// Texts equal what Transformers makes of the model's own chat_template, without tools; but where that writes the
/// system message in the last message if it is a user's (Mistral-7B-Instruct-v0.3 and later), it comes in the last user
/// message, also before an answer.
class ChatTemplate {
 public:
  /// The form that the model's own template has: DIRECTORY/chat_template.jinja, or chat_template in
  /// DIRECTORY/tokenizer_config.json (of several, the one named "default"). White space outside of strings, the kind of
  /// quotes and `message.role` or `message['role']` aside, the template must hold the very expression that writes a
  /// message in one of these forms; a default system message, the dates of Llama 3.1, and the spaces around [INST] are
  /// read off it. A template that asks for the date of today takes the date that it has for programs without a clock,
  /// so that a run can be repeated. Throws Unsupported, with what to do instead, for a template of no such form and for
  /// a model without one; Format for malformed files.
  static ChatTemplate of_model(const std::filesystem::path& directory);
  /// A form by its name, with the tokens bos_token and eos_token of DIRECTORY/tokenizer_config.json: chatml and qwen3
  /// without a default system message, llama3 without dates, mistral as in Mistral-7B-Instruct-v0.3. Throws
  /// InvalidArgument for another name.
  static ChatTemplate named(std::string_view name, const std::filesystem::path& directory);

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  std::string_view name() const noexcept;
  /// The whole conversation. What the model says is marked: the content of every assistant message with the token that
  /// ends it. Special tokens are in the text: none are added when it is encoded. Throws InvalidArgument for a role or
  /// an order of roles that the form has no place for.
  std::vector<TextSegment> render(std::span<const ChatMessage> messages) const;
  /// The conversation so far, up to where the next assistant message begins.
  std::string prompt(std::span<const ChatMessage> messages) const;

 private:
  struct Form;
  explicit ChatTemplate(std::unique_ptr<const Form> form);
  std::unique_ptr<const Form> form_;
};

}  // namespace rowan
