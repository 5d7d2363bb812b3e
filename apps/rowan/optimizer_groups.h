// Parameter groups as a user writes them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "rowan/optim/optimizer.h"

namespace rowan::app {

/// The groups of a JSON array (may be empty), before default_groups(algorithm, weight_decay). A member that a group
/// leaves out is as in ParameterGroup; its algorithm and weight decay are the ones given here. Throws InvalidArgument
/// naming what is malformed or unknown.
std::vector<ParameterGroup> optimizer_groups(const std::string& json, Algorithm algorithm, double weight_decay);

/// Throws InvalidArgument naming the first of the user's groups that takes no parameter.
void require_groups_used(const OptimizerOptions& options, std::span<const Parameter> trainable);

}  // namespace rowan::app
