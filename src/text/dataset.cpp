#include "rowan/text/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "core/parallel.h"
#include "io/input_file.h"
#include "io/json.h"
#include "io/token_rows.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "rowan/text/chat_template.h"
#include "rowan/text/tokenizer.h"

namespace rowan {

namespace {

using detail::fail_format;
using detail::JsonObject;

constexpr std::int64_t kIgnored = -100;

enum class RowForm { kText, kPrompt, kMessages, kSegments, kTokens };
/// The member that tells a form.
constexpr std::array<std::pair<const char*, RowForm>, 5> kForms = {{{"text", RowForm::kText},
                                                                    {"prompt", RowForm::kPrompt},
                                                                    {"messages", RowForm::kMessages},
                                                                    {"segments", RowForm::kSegments},
                                                                    {"input_ids", RowForm::kTokens}}};

std::string_view name_of(RowForm form) {
  return std::find_if(kForms.begin(), kForms.end(), [&](const auto& f) { return f.second == form; })->first;
}

RowForm form_of(const std::string& where, const nlohmann::ordered_json& json) {
  std::optional<RowForm> form;
  for (const auto& [member, candidate] : kForms) {
    if (!json.contains(member)) continue;
    if (form) fail_format(where, fmt::format("expected one form of row, got {} and {}", name_of(*form), member));
    form = candidate;
  }
  if (!form) fail_format(where, "expected a member text, prompt, messages, segments or input_ids, got none of them");
  return *form;
}

/// A text that is not empty.
const std::string& text_of(const JsonObject& json, const std::string& name) {
  const std::string& text = json.string(name);
  if (text.empty()) json.fail(name, "expected a text, got an empty one");
  return text;
}

std::vector<ChatMessage> messages_of(const JsonObject& json) {
  std::vector<ChatMessage> messages;
  for (const JsonObject& message : json.objects("messages")) {
    message.allow_only({"role", "content"});
    messages.push_back({message.string("role"), message.string("content")});
  }
  if (messages.empty()) json.fail("messages", "expected messages, got none");
  return messages;
}

std::vector<TextSegment> segments_of(const JsonObject& json) {
  std::vector<TextSegment> segments;
  for (const JsonObject& segment : json.objects("segments")) {
    segment.allow_only({"text", "train"});
    segments.push_back({segment.string("text"), segment.boolean("train", true)});
  }
  if (std::all_of(segments.begin(), segments.end(), [](const TextSegment& s) { return s.text.empty(); }))
    json.fail("segments", "expected a text, got none");
  return segments;
}

/// Turns rows of one form into tokens; safe to call from several threads.
class RowReader {
 public:
  RowReader(RowForm form, const DatasetOptions& options) : form_(form), mask_prompts_(options.mask_prompts) {
    if (form == RowForm::kTokens) return;
    tokenizer_.emplace(options.model);
    if (form == RowForm::kMessages) {
      chat_template_.emplace(options.chat_template.empty() ? ChatTemplate::of_model(options.model)
                                                           : ChatTemplate::named(options.chat_template, options.model));
    }
  }

  TokenRow read(const std::string& where, const nlohmann::ordered_json& line) const {
    const JsonObject json(where, line);
    switch (form_) {
      case RowForm::kText:
        return tokens({{text_of(json, "text"), true}}, true);
      case RowForm::kPrompt:
        return tokens({{json.string("prompt"), !mask_prompts_}, {text_of(json, "completion"), true}}, true);
      case RowForm::kMessages:
        return tokens(conversation(where, messages_of(json)), false);
      case RowForm::kSegments:
        return tokens(segments_of(json), false);
      case RowForm::kTokens:
        break;
    }
    return detail::parse_token_row(where, line);
  }

 private:
  std::vector<TextSegment> conversation(const std::string& where, const std::vector<ChatMessage>& messages) const {
    try {
      auto segments = chat_template_->render(messages);
      for (TextSegment& segment : segments) segment.train = segment.train || !mask_prompts_;
      return segments;
    } catch (const Error& error) {
      fail_format(where, error.what());
    }
  }

  /// `whole`: the segments are a text from its beginning to its end, which special tokens mark.
  TokenRow tokens(const std::vector<TextSegment>& segments, bool whole) const {
    std::vector<std::string> texts;
    for (const TextSegment& segment : segments) texts.push_back(segment.text);
    EncodedParts encoded = tokenizer_->encode_parts(texts, whole);
    if (const auto eos = tokenizer_->eos_id(); whole && eos && (encoded.ids.empty() || encoded.ids.back() != *eos)) {
      encoded.ids.push_back(*eos);
      encoded.ends.back() = encoded.ids.size();
    }
    TokenRow row;
    row.labels.reserve(encoded.ids.size());
    for (std::size_t part = 0; part < segments.size(); ++part) {
      while (row.labels.size() < encoded.ends[part])
        row.labels.push_back(segments[part].train ? encoded.ids[row.labels.size()] : kIgnored);
    }
    row.input_ids = std::move(encoded.ids);
    return row;
  }

  RowForm form_;
  bool mask_prompts_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> chat_template_;
};

struct Line {
  std::string_view text;
  std::int64_t number = 0;
};

/// Keeps the failure of the first line that has one, whichever thread came to it first.
class FirstFailure {
 public:
  void keep(std::int64_t line) {
    const std::lock_guard lock(mutex_);
    if (failure_ && line_ < line) return;
    line_ = line;
    failure_ = std::current_exception();
  }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::int64_t line_ = 0;
  std::exception_ptr failure_;
};

}  // namespace

std::vector<TokenRow> read_dataset(const std::filesystem::path& path, const DatasetOptions& options) {
  const std::string text = read_text_file(path, detail::kMaxDatasetBytes);
  std::vector<Line> lines;
  detail::for_lines(text, [&](std::string_view line, std::int64_t number) { lines.push_back({line, number}); });
  if (lines.empty()) fail_format(path, "expected rows, got none");
  const auto where = [&](const Line& line) { return fmt::format("{}:{}", path.string(), line.number); };

  const RowForm form = form_of(where(lines[0]), detail::parse_line(where(lines[0]), lines[0].text));
  const RowReader reader(form, options);
  std::vector<TokenRow> rows(lines.size());
  FirstFailure failure;
  detail::parallel_for(static_cast<std::int64_t>(lines.size()), 16, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const Line& line = lines[i];
      try {
        const auto json = detail::parse_line(where(line), line.text);
        if (const RowForm other = form_of(where(line), json); other != form) {
          fail_format(where(line),
                      fmt::format("expected a row of {} like the first, got one of {}", name_of(form), name_of(other)));
        }
        rows[i] = reader.read(where(line), json);
      } catch (...) {
        failure.keep(line.number);
      }
    }
  });
  failure.rethrow();
  return rows;
}

}  // namespace rowan
