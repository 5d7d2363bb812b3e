// Which algorithm steps which parameters, with what settings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rowan/core/dtype.h"
#include "rowan/nn/parameter.h"
#include "rowan/ops/muown.h"
#include "rowan/ops/newton_schulz.h"
#include "rowan/optim/shard_cost.h"

namespace rowan {

enum class Algorithm {
  kMuown,  ///< direction by an orthogonalised momentum, magnitude of each row by Adam (rowan/ops/muown.h)
  kMuon,   ///< orthogonalised momentum (rowan/ops/muon.h)
  kAdamW,  ///< rowan/ops/adamw.h
};

/// "muown", "muon", "adamw".
const char* to_string(Algorithm algorithm) noexcept;
/// Throws InvalidArgument naming the text when it is none of them.
Algorithm parse_algorithm(const std::string& text);

/// "matrix", "lora_a", "lora_b", "embedding", "norm", "bias", "head".
const char* to_string(Parameter::Role role) noexcept;

/// Settings of the parameters that it takes. A field that the algorithm does not use has no effect.
struct ParameterGroup {
  // Which parameters: those that meet both conditions.
  std::vector<Parameter::Role> roles;  ///< empty: every role
  std::string name_pattern;            ///< regular expression (ECMAScript) looked for in the name; empty: every name

  Algorithm algorithm = Algorithm::kAdamW;
  double learning_rate_scale = 1.0;  ///< the group's rate is StepValues::learning_rate times this
  double weight_decay = 0.0;         ///< decoupled: W loses lr weight_decay W
  double beta1 = 0.9;                ///< of Adam: on weights (AdamW) or magnitudes (Muown)
  double beta2 = 0.95;
  double epsilon = 1e-8;

  // Muown and Muon.
  double momentum = 0.95;
  bool nesterov = true;
  double update_scale = 1.0;
  double magnitude_lr = 1.0;             ///< Muown: magnitudes learn at this multiple of the group's rate
  ColdRows cold_rows = ColdRows::kWarm;  ///< Muown
  MuownDirection direction = MuownDirection::kUnnormalised;  ///< Muown; kAngular takes no weight decay
  std::int64_t angular_warmup = 0;                           ///< Muown with kAngular
  std::vector<std::int64_t> row_blocks;  ///< output neurons of each block that is orthogonalised alone; empty: one
  NewtonSchulzOptions newton_schulz;
  /// Of matrices that are split over ranks, where Newton-Schulz's path leaves a choice (skinny, gram_fp32; others have
  /// owners); empty: the cheaper one.
  std::optional<ShardScheme> shard_scheme;
  std::optional<DType> update_dtype;  ///< of U and O; empty: bfloat16, with svd and gram_fp32 the dtype of the master
};

/// `algorithm` for matrices and LoRA factors, AdamW for embeddings, norms, biases and heads. Zero rows of LoRA factors
/// start warm, those of matrices at the floor. Weight decay spares norms and biases.
std::vector<ParameterGroup> default_groups(Algorithm algorithm, double weight_decay = 0.0);

}  // namespace rowan
