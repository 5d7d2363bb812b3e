// Tokenizers of Hugging Face's tokenizer.json: byte-level BPE (GPT-2, Llama 3, Qwen) and BPE on characters with byte
// fallback, as converted from SentencePiece (Llama 2, Mistral). Ids and texts are those of Hugging Face's tokenizers
// library.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rowan {

/// Tokens of texts that were encoded as one.
struct EncodedParts {
  std::vector<std::int32_t> ids;
  /// ends[i]: how many ids belong to parts 0 to i. A token that spans several parts belongs to the last of them.
  std::vector<std::size_t> ends;
};

/// Immutable; its member functions may be called from several threads at once.
class Tokenizer {
 public:
  /// Reads DIRECTORY/tokenizer.json and, where there is one, bos_token and eos_token of
  /// DIRECTORY/tokenizer_config.json. Of components it takes: the model BPE; the normalizers NFC, NFD, NFKC, NFKD,
  /// Prepend, Replace; the pre-tokenizers Split, ByteLevel, Metaspace; the post-processors TemplateProcessing,
  /// ByteLevel; the decoders ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip; Sequences of each. Throws
  /// Unsupported naming any other component, option or pattern; Format naming what is malformed; Io when a file cannot
  /// be read.
  explicit Tokenizer(const std::filesystem::path& directory);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  /// Token ids of a text. Added tokens ("<|im_end|>") are recognised wherever their text stands. With
  /// `add_special_tokens` the post-processor adds its own, usually the token that begins a text. Throws InvalidArgument
  /// when the text is not UTF-8, Unsupported when a pattern of the pre-tokenizer gives up on it.
  std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens = true) const;
  /// encode() of the parts joined to one text, and which tokens belong to which part. What the post-processor adds in
  /// front belongs to the first part, what it adds at the end to the last.
  EncodedParts encode_parts(std::span<const std::string> parts, bool add_special_tokens = true) const;

  /// The text of tokens, always valid UTF-8: bytes that form no character become U+FFFD. Ids outside the vocabulary
  /// give nothing.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special_tokens = true) const;

  /// One above the largest id.
  std::int64_t vocab_size() const noexcept;
  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  /// The token as the file has it; nullopt outside the vocabulary.
  std::optional<std::string> id_to_token(std::int32_t id) const;
  /// The tokens that begin and end a text, where tokenizer_config.json names them.
  std::optional<std::int32_t> bos_id() const noexcept;
  std::optional<std::int32_t> eos_id() const noexcept;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;
};

/// Decodes tokens one at a time, as generation makes them. The pieces joined are decode() of all tokens, and each is
/// valid UTF-8: a token that ends within a character gives nothing until the character is complete. The tokenizer
/// outlives it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  /// The text that this token adds.
  std::string push(std::int32_t id);
  /// What was held back: an incomplete character at the end, as U+FFFD.
  std::string finish();

 private:
  std::string emit(bool hold_incomplete);

  const Tokenizer& tokenizer_;
  bool skip_special_tokens_;
  std::vector<std::int32_t> ids_;  // since the last text that was given, and the tokens of that text before them
  std::size_t given_ = 0;          // of ids_
};

}  // namespace rowan
