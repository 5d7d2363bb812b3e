// The program's main job in one command.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "launch.h"

namespace rowan::app {

struct DemoOptions {
  std::string out = "rowan-demo";
  std::uint64_t seed = 1;
  std::string optimizer = "muown";  ///< muown, muon or adamw
  RankOptions ranks;
  int pretrain_steps = 150;
  int tune_steps = 100;
  std::optional<double>
      pretrain_learning_rate;  ///< of the optimizer's matrices and the rest alike; default by optimizer
  std::optional<double> tune_learning_rate;
  bool json = false;
};

/// Makes two corpora from template grammars, pre-trains a byte-level Llama of about one million parameters on the
/// first, saves it as a Hugging Face directory, fine-tunes LoRA on the second, saves a PEFT adapter, and prints losses
/// beside the grammars' entropies. Several ranks share the sequences of each batch; the first writes and prints. Throws
/// Error; nothing half-written stays under a final name.
void run_demo(const DemoOptions& options);

}  // namespace rowan::app
