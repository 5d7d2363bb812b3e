// The demo's two corpora: seeded texts from template grammars.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace rowan::app {

/// A source of text whose entropy is known exactly, so that a language model's loss on it has a floor to be compared
/// with.
///
/// A sentence is one weighted template whose slots are filled, each on its own, from weighted word lists, and a
/// newline. A text is a row of independent sentences. The constructor refuses a grammar in which two derivations give
/// one string; hence a text's probability is the product of the choices that made it, and its entropy the sum of
/// theirs.
class TemplateGrammar {
 public:
  struct Template {
    std::string text;  // "The {animal} sleeps."
    int weight = 1;
  };
  /// Slot name -> words parted by blanks, each with an optional weight: "cat dog*3 owl".
  using WordLists = std::map<std::string, std::string, std::less<>>;

  /// Throws Error{kInvalidArgument} on a grammar without templates, an unknown or empty slot, a weight that is not
  /// positive, a newline in a template, or two derivations of one sentence.
  TemplateGrammar(const std::vector<Template>& templates, const WordLists& word_lists);

  /// Plain statements: "Clara carried the dusty lamp." The style of the demo's pre-training.
  static TemplateGrammar plain();
  /// A pirate's log: "Arr! 54 barrels an' 3 nets in th' red jungle!" The style of the demo's fine-tuning. It shares
  /// words with plain(), and every byte of it occurs there, since LoRA leaves the embedding as it was.
  static TemplateGrammar pirate();

  /// Whole sentences, at least `min_bytes` of them; the same seed gives the same text on every platform.
  std::string sample(std::uint64_t seed, std::size_t min_bytes) const;

  /// Entropy of the source in nats per byte: the entropy of a sentence over its expected length.
  double entropy_per_byte() const;

  /// Minus the log probability of `text` as a row of whole sentences; infinite when the grammar cannot write it.
  double nats(std::string_view text) const;

 private:
  struct Word {
    std::string text;
    int weight;
  };
  using Slot = std::vector<Word>;  // literal text is a slot with one word
  struct Sentence {
    std::vector<Slot> slots;
    int weight;
  };
  struct Overlap;

  static Slot parse_words(std::string_view name, std::string_view list);
  static std::vector<Slot> parse_template(const std::string& text, const WordLists& word_lists);
  static double sentence_nats(const std::vector<Slot>& slots, std::size_t first, std::string_view text);
  void check_unambiguous() const;

  std::vector<Sentence> sentences_;
};

}  // namespace rowan::app
