#include "grammar.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "rowan/core/error.h"
#include "rowan/core/rng.h"

namespace rowan::app {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

[[noreturn]] void refuse(const std::string& reason) { throw Error(ErrorKind::kInvalidArgument, "grammar: " + reason); }

template <class Choices>
std::int64_t total_weight(const Choices& choices) {
  std::int64_t total = 0;
  for (const auto& choice : choices) total += choice.weight;
  return total;
}

template <class Choices>
const auto& draw(const Choices& choices, Rng& rng) {
  auto left = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(total_weight(choices))));
  auto choice = choices.begin();
  while (left >= choice->weight) left -= (choice++)->weight;
  return *choice;
}

template <class Choices, class F>
double expectation(const Choices& choices, F f) {
  double sum = 0;
  for (const auto& choice : choices) sum += choice.weight * f(choice);
  return sum / static_cast<double>(total_weight(choices));
}

template <class Choices>
double entropy(const Choices& choices) {
  const auto total = static_cast<double>(total_weight(choices));
  return expectation(choices, [&](const auto& choice) { return std::log(total / choice.weight); });
}

}  // namespace

TemplateGrammar::TemplateGrammar(const std::vector<Template>& templates, const WordLists& word_lists) {
  if (templates.empty()) refuse("expected at least one template, got none");
  for (const Template& t : templates) {
    if (t.weight <= 0) refuse(fmt::format("expected a positive weight for \"{}\", got {}", t.text, t.weight));
    sentences_.push_back({parse_template(t.text, word_lists), t.weight});
  }
  check_unambiguous();
}

TemplateGrammar::Slot TemplateGrammar::parse_words(std::string_view name, std::string_view list) {
  constexpr std::string_view kBlanks = " \t\n";
  Slot slot;
  for (;;) {
    list.remove_prefix(std::min(list.find_first_not_of(kBlanks), list.size()));
    if (list.empty()) break;
    const std::string_view item = list.substr(0, list.find_first_of(kBlanks));
    list.remove_prefix(item.size());
    const std::size_t star = item.find('*');
    int weight = 1;
    if (star != item.npos) {
      const auto [end, error] = std::from_chars(item.data() + star + 1, item.data() + item.size(), weight);
      if (error != std::errc() || end != item.data() + item.size()) weight = 0;
    }
    if (star == 0 || weight <= 0) {
      refuse(fmt::format("slot {}: expected a word or word*weight with a positive weight, got \"{}\"", name, item));
    }
    slot.push_back({std::string(item.substr(0, star)), weight});
  }
  if (slot.empty()) refuse(fmt::format("slot {}: expected at least one word, got none", name));
  return slot;
}

std::vector<TemplateGrammar::Slot> TemplateGrammar::parse_template(const std::string& text,
                                                                   const WordLists& word_lists) {
  if (text.find('\n') != text.npos) refuse(fmt::format("expected no newline in a template, got one in \"{}\"", text));
  std::vector<Slot> slots;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] != '{') {
      const std::size_t end = std::min(text.find('{', at), text.size());
      slots.push_back({{text.substr(at, end - at), 1}});
      at = end;
      continue;
    }
    const std::size_t close = text.find('}', at);
    if (close == text.npos) refuse(fmt::format("expected a closing brace, got \"{}\"", text));
    const auto list = word_lists.find(text.substr(at + 1, close - at - 1));
    if (list == word_lists.end()) refuse(fmt::format("expected only known slots, got \"{}\"", text));
    slots.push_back(parse_words(list->first, list->second));
    at = close + 1;
  }
  slots.push_back({{"\n", 1}});
  return slots;
}

// Follows two different derivations that agree so far, in the manner of Sardinas and Patterson (1953): the one that has
// written less is extended by every word that agrees with what the other has written beyond it.
struct TemplateGrammar::Overlap {
  using Slots = std::vector<Slot>;
  std::set<std::tuple<const Slots*, std::size_t, const Slots*, std::size_t, std::string>> seen;

  // `ahead` has filled `i` slots and written `lead` more than `behind`, which has filled `j`.
  bool reaches_the_end(const Slots& ahead, std::size_t i, const Slots& behind, std::size_t j, const std::string& lead) {
    if (j == behind.size()) return true;  // it wrote its newline, which ends the other one too
    if (!seen.emplace(&ahead, i, &behind, j, lead).second) return false;
    return std::any_of(behind[j].begin(), behind[j].end(), [&](const Word& word) {
      const std::string& text = word.text;
      if (lead.compare(0, text.size(), text) == 0) {
        return reaches_the_end(ahead, i, behind, j + 1, lead.substr(text.size()));
      }
      return text.compare(0, lead.size(), lead) == 0 &&
             reaches_the_end(behind, j + 1, ahead, i, text.substr(lead.size()));
    });
  }

  // Whether two fillings of one template that first differ in slot `i` can write the same sentence.
  bool within(const Slots& slots, std::size_t i) {
    for (const Word& a : slots[i]) {
      for (const Word& b : slots[i]) {
        if (&a == &b || a.text.compare(0, b.text.size(), b.text) != 0) continue;
        if (reaches_the_end(slots, i + 1, slots, i + 1, a.text.substr(b.text.size()))) return true;
      }
    }
    return false;
  }
};

void TemplateGrammar::check_unambiguous() const {
  Overlap overlap;
  for (auto a = sentences_.begin(); a != sentences_.end(); ++a) {
    for (std::size_t i = 0; i < a->slots.size(); ++i) {
      if (overlap.within(a->slots, i)) {
        refuse(fmt::format("expected one derivation a sentence, got two from template {}", a - sentences_.begin()));
      }
    }
    for (auto b = sentences_.begin(); b != a; ++b) {
      if (overlap.reaches_the_end(a->slots, 0, b->slots, 0, "")) {
        refuse(fmt::format("expected one derivation a sentence, got two from templates {} and {}",
                           b - sentences_.begin(), a - sentences_.begin()));
      }
    }
  }
}

std::string TemplateGrammar::sample(std::uint64_t seed, std::size_t min_bytes) const {
  Rng rng(seed);
  std::string text;
  while (text.size() < min_bytes) {
    for (const Slot& slot : draw(sentences_, rng).slots) text += draw(slot, rng).text;
  }
  return text;
}

double TemplateGrammar::entropy_per_byte() const {
  const auto sum_over_slots = [](auto f) {
    return [f](const Sentence& sentence) {
      double sum = 0;
      for (const Slot& slot : sentence.slots) sum += f(slot);
      return sum;
    };
  };
  const auto mean_length = [](const Slot& slot) {
    return expectation(slot, [](const Word& word) { return static_cast<double>(word.text.size()); });
  };
  const double nats = entropy(sentences_) + expectation(sentences_, sum_over_slots(entropy<Slot>));
  return nats / expectation(sentences_, sum_over_slots(mean_length));
}

double TemplateGrammar::sentence_nats(const std::vector<Slot>& slots, std::size_t first, std::string_view text) {
  if (first == slots.size()) return text.empty() ? 0 : kImpossible;
  double best = kImpossible;
  for (const Word& word : slots[first]) {
    if (text.substr(0, word.text.size()) != word.text) continue;
    const double rest = sentence_nats(slots, first + 1, text.substr(word.text.size()));
    best = std::min(best, std::log(static_cast<double>(total_weight(slots[first])) / word.weight) + rest);
  }
  return best;
}

double TemplateGrammar::nats(std::string_view text) const {
  const auto total = static_cast<double>(total_weight(sentences_));
  double sum = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n') == text.npos ? text.size() : text.find('\n') + 1);
    double best = kImpossible;
    for (const Sentence& sentence : sentences_) {
      best = std::min(best, std::log(total / sentence.weight) + sentence_nats(sentence.slots, 0, line));
    }
    sum += best;
    text.remove_prefix(line.size());
  }
  return sum;
}

namespace {

const TemplateGrammar::WordLists& words() {
  static const TemplateGrammar::WordLists kWords = {
      {"person",
       "Anna Boris Clara David Emma Felix Greta Henry Ivan Julia Karl Lena Martin Nora Oscar Petra Quentin Rosa Simon "
       "Tina "
       "Ursula Victor Wanda Yusuf"},
      {"animal",
       "ant bear cat*3 dog*3 eagle fox goat hare jackal lion mouse newt owl pig rabbit snake*2 tiger wolf yak zebra"},
      {"thing",
       "apple basket candle drum egg flag glove hammer inkpot jar kettle lamp mirror needle oar pencil quilt rope shoe "
       "table "
       "umbrella vase whistle"},
      {"place",
       "attic barn cellar dock field garden harbor island jungle kitchen lake market orchard park quarry river school "
       "tower "
       "valley well"},
      {"adjective",
       "ancient brown clean dusty empty fancy green heavy iron jolly large muddy narrow old plain quiet red small tiny "
       "ugly "
       "velvet wooden yellow"},
      {"did",
       "admired broke carried dropped examined found grabbed hid kept lifted moved noticed opened painted repaired "
       "sold took "
       "used wanted"},
      {"goods",
       "anchors barrels coins daggers emeralds feathers goblets hooks jewels kegs lanterns maps nets oars pearls "
       "rubies sails "
       "torches"},
      {"weather", "calm*2 dark foggy*2 grim hot mild*2 rainy stormy windy"},
      {"digit", "1 2 3 4 5 6 7 8 9"},
      {"tens", "1 2 3 4 5"},
  };
  return kWords;
}

}  // namespace

TemplateGrammar TemplateGrammar::plain() {
  return {{{"{person} {did} the {adjective} {thing}.", 5},
           {"{person} has {digit}{digit} {adjective} {goods}!", 2},
           {"The {adjective} {animal} met the {animal} at the {place}.", 2},
           {"At {digit}:{tens}{digit}, {person} {did} the {thing}.", 3},
           {"Is the {thing} {adjective}, {person}?", 2},
           {"It's {weather}; {person} and {person} ran to the {place}.", 2},
           {"You {did} my {adjective} {thing}...", 2}},
          words()};
}

TemplateGrammar TemplateGrammar::pirate() {
  return {{{"Arr! {digit}{digit} {goods} an' {digit} {goods} in th' {adjective} {place}!", 4},
           {"Aye, {adjective} be th' {thing} {person} {did}!", 4},
           {"Yo ho! To th' {place}, {animal}, {animal} an' {animal}!", 2},
           {"{digit} bells, {weather} seas; me {adjective} {thing} an' {adjective} {goods}...", 3},
           {"Did ye see th' {animal} {person} {did}?", 2}},
          words()};
}

}  // namespace rowan::app
