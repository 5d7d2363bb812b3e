// Data sets of texts and conversations: JSON Lines to token rows.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "rowan/io/token_rows.h"

namespace rowan {

struct DatasetOptions {
  std::filesystem::path model;  ///< directory with tokenizer.json; not read for rows of token ids
  std::string chat_template;    ///< a name that ChatTemplate::named takes; empty: the model's own
  bool mask_prompts = false;    ///< prompts, and all that is not an assistant's, count for nothing
};

/// Reads a file whose rows all have one of these forms, told by their members:
///   {"text": T}                              T with the tokenizer's special tokens (usually BOS) and EOS
///   {"prompt": P, "completion": C}           P and C joined as they are, with the same; C and EOS count
///   {"messages": [{"role", "content"}, …]}   as the chat template writes them; every assistant turn counts, with the
///                                            token that ends it
///   {"segments": [{"text", "train"}, …]}     texts joined as they are, no token added; those with "train" (the
///                                            default) count, masked or not
///   {"input_ids": […], "labels": […]}        as read_token_rows
/// EOS is eos_token of tokenizer_config.json, added where the text does not end with it. Without mask_prompts every
/// token of the first three counts. Texts are tokenized as a whole: a token that spans a boundary belongs to the later
/// part. Other members of a row are passed over, except beside token ids. Rows are neither cut nor dropped.
/// Throws Io when the file cannot be read; Format naming file and line for malformed JSON, a missing or duplicate
/// member, a wrong type, an empty text, or a row of another form than the first, and for a file without rows; what
/// Tokenizer and ChatTemplate throw.
std::vector<TokenRow> read_dataset(const std::filesystem::path& path, const DatasetOptions& options);

}  // namespace rowan
