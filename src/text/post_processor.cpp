#include "text/post_processor.h"

#include <limits>

namespace rowan::detail {

namespace {

/// Ids of a special token of a template.
std::vector<std::int32_t> special_ids(const JsonObject& json, const std::string& name) {
  if (!json.has("special_tokens")) json.fail("special_tokens", "it is missing");
  const JsonObject token = json.object("special_tokens").object(name);
  const auto& ids = token.at("ids");
  std::vector<std::int32_t> values;
  if (!ids.is_array()) token.fail("ids", "expected an array, got " + describe(ids));
  for (const auto& id : ids) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= std::numeric_limits<std::int32_t>::max())
      token.fail("ids", "expected token ids, got " + describe(id));
    values.push_back(id.get<std::int32_t>());
  }
  return values;
}

SpecialAffixes read_template(const JsonObject& json) {
  json.allow_only({"type", "single", "pair", "special_tokens"});
  SpecialAffixes affixes;
  bool behind = false;
  for (const JsonObject& item : json.objects("single")) {
    item.allow_only({"SpecialToken", "Sequence"});
    if (item.has("SpecialToken")) {
      const auto ids = special_ids(json, item.object("SpecialToken").string("id"));
      auto& side = behind ? affixes.after : affixes.before;
      side.insert(side.end(), ids.begin(), ids.end());
    } else {
      if (behind || item.object("Sequence").string("id") != "A")
        json.refuse("single", "only a template of one sequence A is supported");
      behind = true;
    }
  }
  if (!behind) json.refuse("single", "only a template of one sequence A is supported");
  return affixes;
}

}  // namespace

SpecialAffixes read_post_processor(const JsonObject& json) {
  const std::string& type = json.string("type");
  if (type == "TemplateProcessing") return read_template(json);
  if (type == "ByteLevel") return {};  // changes offsets alone
  if (type != "Sequence") json.refuse("type", "the post-processor " + quote(type) + " is not supported");
  json.allow_only({"type", "processors"});
  SpecialAffixes all;
  for (const JsonObject& step : json.objects("processors")) {
    const SpecialAffixes affixes = read_post_processor(step);
    all.before.insert(all.before.begin(), affixes.before.begin(), affixes.before.end());
    all.after.insert(all.after.end(), affixes.after.begin(), affixes.after.end());
  }
  return all;
}

}  // namespace rowan::detail
