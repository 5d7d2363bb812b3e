// Fine-tuning a model of the user's.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "launch.h"

namespace rowan::app {

/// The options of `rowan finetune` under their names there; see its help.
struct FinetuneOptions {
  std::string model, adapter, data, eval_data, out;
  std::string chat_template;
  bool mask_prompts = false;
  std::string method = "lora";

  std::int64_t lora_r = 8;
  double lora_alpha = 16;
  double lora_dropout = 0;
  bool use_rslora = false;
  std::string target_modules = "all-linear";

  std::string optimizer = "muown";
  std::string optimizer_groups;  ///< JSON
  double learning_rate = 3e-4;
  double weight_decay = 0;
  double max_grad_norm = 1;
  std::string lr_scheduler = "linear";
  std::int64_t warmup_steps = 0;

  std::int64_t max_steps = 0;  ///< 0: by epochs alone
  std::int64_t epochs = 0;     ///< 0: 3, or by max_steps alone
  std::int64_t batch_size = 8;
  std::int64_t grad_accum = 1;
  std::int64_t max_length = 0;  ///< 0: 1024 or what the model can take
  bool packing = false;
  bool recompute = false;

  std::int64_t eval_steps = 0;  ///< 0: once an epoch
  std::int64_t early_stopping_patience = 0;
  std::int64_t save_steps = 500;
  std::int64_t save_total_limit = 0;

  std::string dtype;
  RankOptions ranks;
  std::uint64_t seed = 42;

  std::string resume;
  bool allow_config_change = false;
  bool allow_data_change = false;
  bool allow_world_size = false;

  bool dry_run = false;
  bool json = false;

  /// Names of the options that were given, on the command line or in a configuration file: "lora-r".
  std::set<std::string> given;
};

/// Throws InvalidArgument naming an option that would have no effect beside the others, or a value out of range.
void check_finetune_options(const FinetuneOptions& options);

/// Trains and writes the run directory. Throws Error, and Interrupted after saving. With dry_run it only says what the
/// run would take, and writes nothing.
void run_finetune(const FinetuneOptions& options);

}  // namespace rowan::app
