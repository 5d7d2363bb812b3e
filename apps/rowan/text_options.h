// Options about texts, which rows of token ids do not have.
#pragma once

#include <string>
#include <vector>

namespace rowan::app {

/// Throws InvalidArgument for --chat-template or --mask-prompts where no file's rows have what they are about. The
/// files have been read without an error; empty paths are passed over.
void require_texts_for(const std::string& chat_template, bool mask_prompts, const std::vector<std::string>& files);

}  // namespace rowan::app
