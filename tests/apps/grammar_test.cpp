#include "grammar.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"

using rowan::app::TemplateGrammar;

namespace {

// A grammar in the open: every template is a row of slots, every slot a list of words with weights.
struct OpenGrammar {
  using Slot = std::vector<std::pair<std::string, int>>;
  std::vector<std::pair<std::vector<Slot>, int>> templates;

  TemplateGrammar build() const {
    std::vector<TemplateGrammar::Template> texts;
    TemplateGrammar::WordLists lists;
    for (const auto& [slots, weight] : templates) {
      texts.push_back({"", weight});
      for (const Slot& slot : slots) {
        const std::string name = "slot" + std::to_string(lists.size());
        texts.back().text += "{" + name + "}";
        for (const auto& [word, word_weight] : slot) lists[name] += word + "*" + std::to_string(word_weight) + " ";
      }
    }
    return {texts, lists};
  }

  // Every derivation's sentence and probability.
  std::vector<std::pair<std::string, double>> derivations() const {
    std::vector<std::pair<std::string, double>> all;
    double total = 0;
    for (const auto& [slots, weight] : templates) total += weight;
    for (const auto& [slots, weight] : templates) {
      std::vector<std::pair<std::string, double>> partial = {{"", weight / total}};
      for (const Slot& slot : slots) {
        double slot_total = 0;
        for (const auto& [word, word_weight] : slot) slot_total += word_weight;
        std::vector<std::pair<std::string, double>> longer;
        for (const auto& [text, p] : partial) {
          for (const auto& [word, word_weight] : slot) longer.emplace_back(text + word, p * word_weight / slot_total);
        }
        partial = longer;
      }
      for (const auto& [text, p] : partial) all.emplace_back(text + "\n", p);
    }
    return all;
  }

  bool ambiguous() const {
    std::set<std::string> distinct;
    for (const auto& [text, p] : derivations()) distinct.insert(text);
    return distinct.size() < derivations().size();
  }
};

// "cat" and "cathedral" overlap, but every sentence has one derivation.
const OpenGrammar kSmall = {{{{{{"the-", 1}}, {{"cat", 3}, {"dog", 1}, {"ox", 2}}, {{"-eats", 1}, {"-sleeps", 4}}}, 2},
                             {{{{"is-it-a-", 1}}, {{"cat", 1}, {"cathedral", 2}}, {{"?", 1}}}, 1}}};

bool refused(const std::vector<TemplateGrammar::Template>& templates, const TemplateGrammar::WordLists& lists = {}) {
  try {
    TemplateGrammar(templates, lists);
    return false;
  } catch (const rowan::Error& error) {
    return error.kind() == rowan::ErrorKind::kInvalidArgument;
  }
}

std::string bytes_of(const std::string& text) {
  const std::set<char> bytes(text.begin(), text.end());
  return {bytes.begin(), bytes.end()};
}

}  // namespace

TEST_CASE("a grammar's entropy per byte is that of its enumerated sentences") {
  double nats = 0, bytes = 0;
  for (const auto& [text, p] : kSmall.derivations()) {
    nats -= p * std::log(p);
    bytes += p * static_cast<double>(text.size());
  }
  CHECK(std::abs(kSmall.build().entropy_per_byte() - nats / bytes) < 1e-14);
}

TEST_CASE("a grammar gives every one of its sentences its probability") {
  const TemplateGrammar grammar = kSmall.build();
  for (const auto& [text, p] : kSmall.derivations()) {
    CAPTURE(text);
    CHECK(std::abs(grammar.nats(text) + std::log(p)) < 1e-14);
    CHECK(std::abs(grammar.nats(text + "the-ox-eats\n") - grammar.nats(text) - grammar.nats("the-ox-eats\n")) < 1e-14);
  }
  for (const char* foreign : {"the-cow-eats\n", "the-ox-eats", "the-ox-eats \n", "\n", "the-ox-eats\nthe-ox\n"}) {
    CHECK(std::isinf(grammar.nats(foreign)));
  }
  CHECK(grammar.nats("") == 0);
}

TEST_CASE("sentences are drawn with their probabilities") {
  constexpr double kDraws = 40000;
  const TemplateGrammar grammar = kSmall.build();
  const std::string text = grammar.sample(5, 1 << 20);
  std::map<std::string, double> count;
  std::size_t at = 0;
  for (int i = 0; i < kDraws; ++i) {
    const std::size_t end = text.find('\n', at) + 1;
    count[text.substr(at, end - at)] += 1;
    at = end;
  }
  const auto derivations = kSmall.derivations();
  CHECK(count.size() == derivations.size());
  for (const auto& [sentence, p] : derivations) {
    CAPTURE(sentence);
    CHECK(std::abs(count[sentence] - kDraws * p) < 5 * std::sqrt(kDraws * p * (1 - p)));
  }
}

TEST_CASE("a grammar with two derivations of one sentence is refused, and no other") {
  rowan::Rng rng(3);
  const auto up_to = [&](std::uint64_t bound) { return static_cast<int>(rng.below(bound)) + 1; };
  int ambiguous = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    OpenGrammar open;
    for (int templates = up_to(2); templates > 0; --templates) {
      open.templates.push_back({{}, up_to(3)});
      for (int slots = up_to(3); slots > 0; --slots) {
        open.templates.back().first.emplace_back();
        for (int words = up_to(3); words > 0; --words) {
          std::string word;
          for (int letters = up_to(4); letters > 0; --letters) word += rng.below(2) == 0 ? 'a' : 'b';
          open.templates.back().first.back().emplace_back(word, up_to(3));
        }
      }
    }
    CAPTURE(trial);
    if (open.ambiguous()) {
      ++ambiguous;
      CHECK_THROWS_AS(open.build(), rowan::Error);
    } else {
      CHECK_NOTHROW(open.build());
    }
  }
  CHECK(ambiguous > 500);
  CHECK(ambiguous < 3500);
}

TEST_CASE("a malformed grammar is refused") {
  CHECK(refused({}));
  CHECK(refused({{"{animal} sleeps"}}, {{"plant", "oak"}}));
  CHECK(refused({{"{animal sleeps"}}, {{"animal", "cat"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", " \t"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", "cat*0"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", "cat*2x"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", "cat*"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", "*2"}}));
  CHECK(refused({{"{animal}"}}, {{"animal", "cat*99999999999999"}}));
  CHECK(refused({{"it sleeps", 0}}));
  CHECK(refused({{"it\nsleeps"}}));
  CHECK(!refused({{"{animal} sleeps"}}, {{"animal", "cat dog*2"}}));
}

TEST_CASE("a sample holds whole sentences and depends on the seed alone") {
  const TemplateGrammar grammar = TemplateGrammar::plain();
  const std::string text = grammar.sample(7, 5000);
  CHECK(text.size() >= 5000);
  CHECK(text.size() < 5100);
  CHECK(text.back() == '\n');
  CHECK(std::isfinite(grammar.nats(text)));
  CHECK(text == grammar.sample(7, 5000));
  CHECK(text != grammar.sample(8, 5000));
  CHECK(grammar.sample(7, 1) == text.substr(0, text.find('\n') + 1));
  CHECK(grammar.sample(7, 0).empty());
}

TEST_CASE("the demo's samples take as many nats per byte as their grammars' entropy") {
  for (const TemplateGrammar& grammar : {TemplateGrammar::plain(), TemplateGrammar::pirate()}) {
    const std::string text = grammar.sample(11, 400000);
    // Measured spread of a sentence's nats: 2.5 around 14; ten thousand sentences leave 0.2 %.
    const double per_byte = grammar.nats(text) / static_cast<double>(text.size());
    CHECK(std::abs(per_byte / grammar.entropy_per_byte() - 1) < 0.01);
  }
}

TEST_CASE("the demo's two styles share their alphabet but no sentence") {
  const std::string plain = TemplateGrammar::plain().sample(1, 100000);
  const std::string pirate = TemplateGrammar::pirate().sample(1, 100000);
  const std::string known = bytes_of(plain), used = bytes_of(pirate);
  CHECK(std::includes(known.begin(), known.end(), used.begin(), used.end()));
  for (std::size_t at = 0; at < 2000; at = pirate.find('\n', at) + 1) {
    CHECK(std::isinf(TemplateGrammar::plain().nats(pirate.substr(at, pirate.find('\n', at) + 1 - at))));
  }
  for (const TemplateGrammar& grammar : {TemplateGrammar::plain(), TemplateGrammar::pirate()}) {
    CHECK(grammar.entropy_per_byte() > 0.3);
    CHECK(grammar.entropy_per_byte() < 0.7);
  }
}

TEST_CASE("a seed's text is the same on every platform") {
  CHECK(TemplateGrammar::plain().sample(1, 80) ==
        "At 4:41, Julia opened the glove.\n"
        "Felix sold the fancy table.\n"
        "It's windy; Lena and Karl ran to the park.\n");
  CHECK(TemplateGrammar::pirate().sample(1, 80) ==
        "Did ye see th' owl Anna kept?\n"
        "Arr! 54 barrels an' 3 nets in th' red jungle!\n"
        "Did ye see th' snake Ivan carried?\n");
}
