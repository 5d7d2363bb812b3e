#include "text_options.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "rowan/core/error.h"

namespace rowan::app {

namespace {

/// Whether the first row of a file holds one of the members.
bool has_member(const std::string& path, std::initializer_list<const char*> names) {
  std::ifstream file(path);
  std::string line;
  while (line.find_first_not_of(" \t\r") == std::string::npos && std::getline(file, line)) {
  }
  const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
  return std::any_of(names.begin(), names.end(), [&row](const char* name) { return row.contains(name); });
}

}  // namespace

void require_texts_for(const std::string& chat_template, bool mask_prompts, const std::vector<std::string>& files) {
  const auto some = [&](std::initializer_list<const char*> names) {
    return std::any_of(files.begin(), files.end(),
                       [&](const std::string& file) { return !file.empty() && has_member(file, names); });
  };
  if (!chat_template.empty() && !some({"messages"}))
    throw Error(ErrorKind::kInvalidArgument, "--chat-template has no effect on rows without messages");
  if (mask_prompts && !some({"messages", "prompt"}))
    throw Error(ErrorKind::kInvalidArgument, "--mask-prompts has no effect on rows without prompts or messages");
}

}  // namespace rowan::app
