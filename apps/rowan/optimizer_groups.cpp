#include "optimizer_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "rowan/core/error.h"

namespace rowan::app {

namespace {

using Json = nlohmann::json;
using Role = Parameter::Role;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, "--optimizer-groups: " + what);
}

Role parse_role(const std::string& text) {
  for (const Role role :
       {Role::kMatrix, Role::kLoraA, Role::kLoraB, Role::kEmbedding, Role::kNorm, Role::kBias, Role::kHead}) {
    if (text == to_string(role)) return role;
  }
  refuse(fmt::format("expected a role matrix, lora_a, lora_b, embedding, norm, bias or head, got \"{}\"", text));
}

void set_member(ParameterGroup& group, const std::string& name, const Json& value) {
  static const std::map<std::string, double ParameterGroup::*> numbers = {
      {"learning_rate_scale", &ParameterGroup::learning_rate_scale},
      {"weight_decay", &ParameterGroup::weight_decay},
      {"beta1", &ParameterGroup::beta1},
      {"beta2", &ParameterGroup::beta2},
      {"epsilon", &ParameterGroup::epsilon},
      {"momentum", &ParameterGroup::momentum},
      {"update_scale", &ParameterGroup::update_scale},
      {"magnitude_lr", &ParameterGroup::magnitude_lr}};
  if (const auto number = numbers.find(name); number != numbers.end()) {
    group.*number->second = value.get<double>();
  } else if (name == "roles") {
    for (const Json& role : value) group.roles.push_back(parse_role(role.get<std::string>()));
  } else if (name == "name_pattern") {
    group.name_pattern = value.get<std::string>();
  } else if (name == "algorithm") {
    group.algorithm = parse_algorithm(value.get<std::string>());
  } else if (name == "nesterov") {
    group.nesterov = value.get<bool>();
  } else if (name == "newton_schulz") {
    group.newton_schulz.path = parse_newton_schulz_path(value.get<std::string>());
  } else {
    refuse(fmt::format("unknown member \"{}\"", name));
  }
}

ParameterGroup parse_group(const Json& json, Algorithm algorithm, double weight_decay) {
  if (!json.is_object()) refuse("expected objects");
  ParameterGroup group;
  group.algorithm = algorithm;
  group.weight_decay = weight_decay;
  for (const auto& [name, value] : json.items()) {
    try {
      set_member(group, name, value);
    } catch (const Json::exception&) {
      refuse(fmt::format("{}: unexpected value {}", name, value.dump()));
    }
  }
  return group;
}

}  // namespace

std::vector<ParameterGroup> optimizer_groups(const std::string& text, Algorithm algorithm, double weight_decay) {
  std::vector<ParameterGroup> groups;
  if (!text.empty()) {
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_array()) refuse("expected a JSON array, got " + text);
    for (const Json& group : json) groups.push_back(parse_group(group, algorithm, weight_decay));
  }
  for (const ParameterGroup& group : default_groups(algorithm, weight_decay)) groups.push_back(group);
  return groups;
}

void require_groups_used(const OptimizerOptions& options, std::span<const Parameter> trainable) {
  const std::size_t own = options.groups.size() - default_groups(Algorithm::kAdamW).size();
  std::vector<int> taken(options.groups.size(), 0);
  for (const Parameter& p : trainable) {
    for (std::size_t g = 0; g < options.groups.size(); ++g) {
      const ParameterGroup& group = options.groups[g];
      const bool role = group.roles.empty() || std::count(group.roles.begin(), group.roles.end(), p.role) > 0;
      if (!role || !std::regex_search(p.name, std::regex(group.name_pattern))) continue;
      ++taken[g];
      break;
    }
  }
  for (std::size_t g = 0; g < own; ++g) {
    if (taken[g] == 0) refuse(fmt::format("group {} takes no trainable parameter", g));
  }
}

}  // namespace rowan::app
