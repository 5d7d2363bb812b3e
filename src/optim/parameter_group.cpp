#include "rowan/optim/parameter_group.h"

#include "core/check.h"

namespace rowan {

const char* to_string(Algorithm algorithm) noexcept {
  switch (algorithm) {
    case Algorithm::kMuown:
      return "muown";
    case Algorithm::kMuon:
      return "muon";
    case Algorithm::kAdamW:
      return "adamw";
  }
  return "unknown";
}

Algorithm parse_algorithm(const std::string& text) {
  for (const Algorithm algorithm : {Algorithm::kMuown, Algorithm::kMuon, Algorithm::kAdamW}) {
    if (text == to_string(algorithm)) return algorithm;
  }
  detail::fail(ErrorKind::kInvalidArgument, "optimizer: expected muown, muon or adamw, got \"{}\"", text);
}

const char* to_string(Parameter::Role role) noexcept {
  switch (role) {
    case Parameter::Role::kMatrix:
      return "matrix";
    case Parameter::Role::kLoraA:
      return "lora_a";
    case Parameter::Role::kLoraB:
      return "lora_b";
    case Parameter::Role::kEmbedding:
      return "embedding";
    case Parameter::Role::kNorm:
      return "norm";
    case Parameter::Role::kBias:
      return "bias";
    case Parameter::Role::kHead:
      return "head";
  }
  return "unknown";
}

std::vector<ParameterGroup> default_groups(Algorithm algorithm, double weight_decay) {
  using Role = Parameter::Role;
  ParameterGroup matrices;
  matrices.roles = {Role::kMatrix};
  matrices.algorithm = algorithm;
  matrices.weight_decay = weight_decay;
  matrices.cold_rows = ColdRows::kFloor;
  ParameterGroup factors = matrices;
  factors.roles = {Role::kLoraA, Role::kLoraB};
  factors.cold_rows = ColdRows::kWarm;
  ParameterGroup tables;
  tables.roles = {Role::kEmbedding, Role::kHead};
  tables.weight_decay = weight_decay;
  ParameterGroup vectors;
  vectors.roles = {Role::kNorm, Role::kBias};
  return {matrices, factors, tables, vectors};
}

}  // namespace rowan
