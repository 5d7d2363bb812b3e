#include "finetune_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "option_checks.h"
#include "rank_options.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan::app {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxConfigBytes = std::int64_t{1} << 20;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, "finetune: " + message);
}

void add_inputs(CLI::App& command, FinetuneOptions& o) {
  command.add_option("--model", o.model, "Hugging Face directory: config.json and safetensors weights")->required();
  command
      .add_option("--data", o.data,
                  "Training rows, JSON Lines of one form: {\"text\"}, {\"prompt\", \"completion\"}, {\"messages\"}, "
                  "{\"segments\": [{\"text\", \"train\"}]}, or {\"input_ids\", \"labels\"} aligned as in "
                  "Transformers, where -100 does not count")
      ->required();
  command
      .add_option("--out", o.out,
                  "Directory of the run: config.json, metrics.jsonl, tensorboard, loss.svg, checkpoints, the trained "
                  "adapter or model and the best one")
      ->required()
      ->check(check_not_empty);
  command.add_option("--adapter", o.adapter, "PEFT directory of a LoRA adapter to go on from");
  command.add_option("--eval-data", o.eval_data, "Held-out rows, in the form of --data");
  command.add_option("--chat-template", o.chat_template,
                     "Form of messages: chatml, qwen3, llama3 or mistral; default: the model's own, which must be one "
                     "of them");
  command.add_flag("--mask-prompts", o.mask_prompts,
                   "Only completions and what assistants say count for the loss; texts count whole");
  command.add_option("--config", "JSON file with options by their names (lora_r or lora-r); options beside it win")
      ->type_name("FILE");
}

void add_method(CLI::App& command, FinetuneOptions& o) {
  command.add_option("--method", o.method, "lora: factors on frozen weights; full: all weights")
      ->check(CLI::IsMember({"lora", "full"}))
      ->capture_default_str();
  command.add_option("--lora-r", o.lora_r, "Rank of the factors")->check(CLI::Range(1, 8192))->capture_default_str();
  command.add_option("--lora-alpha", o.lora_alpha, "The factors act with alpha / r")->capture_default_str();
  command.add_option("--lora-dropout", o.lora_dropout, "Probability that an input of the factors is dropped")
      ->check(check_number(0, 1))
      ->capture_default_str();
  command.add_flag("--use-rslora", o.use_rslora, "The factors act with alpha / sqrt(r)");
  command
      .add_option("--target-modules", o.target_modules,
                  "all-linear, names separated by commas (q_proj,v_proj), or a regular expression for whole paths")
      ->capture_default_str();
  command
      .add_option("--dtype", o.dtype,
                  "float32, bfloat16 or float16, of weights and activations; default: that of the model")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  command.add_flag("--recompute", o.recompute,
                   "Keep only each block's input and run it again in backward: less memory, a third more work");
}

void add_optimization(CLI::App& command, FinetuneOptions& o) {
  command.add_option("--optimizer", o.optimizer, "Optimizer of matrices and LoRA factors; the rest takes AdamW")
      ->check(CLI::IsMember({"muown", "muon", "adamw"}))
      ->capture_default_str();
  command.add_option("--optimizer-groups", o.optimizer_groups,
                     "JSON array of groups before the default ones, for example [{\"roles\": [\"lora_b\"], "
                     "\"learning_rate_scale\": 4}]; members: roles, name_pattern, algorithm, learning_rate_scale, "
                     "weight_decay, beta1, beta2, epsilon, momentum, nesterov, update_scale, magnitude_lr, "
                     "newton_schulz");
  command.add_option("--learning-rate", o.learning_rate, "Peak learning rate")
      ->check(check_number(0, 1e30))
      ->capture_default_str();
  command.add_option("--lr-scheduler", o.lr_scheduler, "constant, linear, cosine or wsd")->capture_default_str();
  command.add_option("--warmup-steps", o.warmup_steps, "Steps in which the learning rate rises")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{INT32_MAX}))
      ->capture_default_str();
  command.add_option("--weight-decay", o.weight_decay, "Decoupled; spares norms and biases")
      ->check(check_number(0, 1e30))
      ->capture_default_str();
  command.add_option("--max-grad-norm", o.max_grad_norm, "Gradients are scaled down to this norm; 0: not")
      ->check(check_number(0, 1e30))
      ->capture_default_str();
  command.add_option("--seed", o.seed, "Seed of new factors, dropout and the order of rows")
      ->check(check_seed)
      ->capture_default_str();
}

void add_length(CLI::App& command, FinetuneOptions& o) {
  command.add_option("--epochs", o.epochs, "Passes over the data; 3 unless --max-steps is given")->check(check_count);
  command.add_option("--max-steps", o.max_steps, "Optimizer steps; with --epochs too, what is reached first")
      ->check(check_count);
  command
      .add_option("--batch-size", o.batch_size,
                  "Rows of a rank's micro-batch; with --packing its tokens, over --max-length")
      ->check(check_count)
      ->capture_default_str();
  command.add_option("--grad-accum", o.grad_accum, "Micro-batches of a rank in an optimizer step")
      ->check(check_count)
      ->capture_default_str();
  command
      .add_option("--max-length", o.max_length,
                  "Tokens at which a row is cut; 1024 or what the model can take where that is less")
      ->check(check_count);
  command.add_flag("--packing", o.packing,
                   "Fill micro-batches up to batch-size x max-length tokens with whole rows; none sees another");
}

void add_watching(CLI::App& command, FinetuneOptions& o) {
  command.add_option("--eval-steps", o.eval_steps, "Steps between evaluations; default: once an epoch")
      ->check(check_count);
  command
      .add_option("--early-stopping-patience", o.early_stopping_patience,
                  "Stop after this many evaluations without a new lowest loss")
      ->check(check_count);
  command.add_option("--save-steps", o.save_steps, "Steps between checkpoints; there is one at the end too")
      ->check(check_count)
      ->capture_default_str();
  command
      .add_option("--save-total-limit", o.save_total_limit,
                  "Checkpoints kept beside the one of the lowest evaluation loss; default: all")
      ->check(check_count);
  command.add_option("--resume", o.resume,
                     "latest, or the directory of a checkpoint: go on from there, in --out, bit for bit");
  command.add_flag("--allow-config-change", o.allow_config_change,
                   "With --resume: options may differ that do not change what is trained");
  command.add_flag("--allow-data-change", o.allow_data_change,
                   "With --resume: --data may have changed; its epoch begins anew");
  command.add_flag("--allow-world-size", o.allow_world_size,
                   "With --resume: another number of ranks; the run then does not go on bit for bit");
  add_ranks(command, o.ranks);
  command.add_flag("--dry-run", o.dry_run,
                   "Say how many parameters are trained and what memory that takes (were it on one rank), and stop");
  command.add_flag("--json", o.json, "End with one line of JSON on stdout, and keep quiet otherwise");
}

/// A member of a configuration file as an option.
std::string as_option(const std::string& file, std::string name, const Json& value) {
  std::replace(name.begin(), name.end(), '_', '-');
  if (name == "config" || name.empty()) refuse(fmt::format("{}: unexpected member \"{}\"", file, name));
  const bool list = name == "target-modules" && value.is_array();
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (list) {
    text.clear();
    for (const Json& module : value) {
      if (!module.is_string()) refuse(fmt::format("{}: target_modules: expected names", file));
      text += (text.empty() ? "" : ",") + module.get<std::string>();
    }
  }
  return fmt::format("--{}={}", name, text);
}

std::vector<std::string> options_of_file(const std::string& file) {
  Json json;
  try {
    json = Json::parse(read_text_file(file, kMaxConfigBytes));
  } catch (const std::exception& error) {
    refuse(fmt::format("--config {}: {}", file, error.what()));
  }
  if (!json.is_object()) refuse(fmt::format("--config {}: expected a JSON object", file));
  std::vector<std::string> options;
  for (const auto& [name, value] : json.items()) {
    if (!value.is_null()) options.push_back(as_option(file, name, value));
  }
  return options;
}

}  // namespace

void add_finetune(CLI::App& program, FinetuneOptions& options) {
  CLI::App* command = program.add_subcommand(
      "finetune", "Fine-tune a Hugging Face model: LoRA factors, written as a PEFT adapter, or all weights");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_inputs(*command, options);
  add_method(*command, options);
  add_optimization(*command, options);
  add_length(*command, options);
  add_watching(*command, options);
  command->callback([command, &options] {
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() > 0) options.given.insert(option->get_lnames().front());
    }
    if (options.dry_run) {
      run_finetune(options);
    } else {
      run_on_ranks(options.ranks, [&options] { run_finetune(options); });
    }
  });
}

std::vector<std::string> with_config_file(const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "finetune") return arguments;
  std::vector<std::string> all{arguments[0]};
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    std::string file;
    if (arguments[i] == "--config" && i + 1 < arguments.size()) file = arguments[i + 1];
    if (arguments[i].starts_with("--config=")) file = arguments[i].substr(9);
    if (file.empty()) continue;
    const auto options = options_of_file(file);
    all.insert(all.end(), options.begin(), options.end());
  }
  all.insert(all.end(), arguments.begin() + 1, arguments.end());
  return all;
}

void check_finetune_options(const FinetuneOptions& o) {
  const auto given = [&](const char* name) { return o.given.contains(name); };
  const auto needs = [&](const char* name, bool condition, const char* what) {
    if (given(name) && !condition) refuse(fmt::format("--{} has no effect {}", name, what));
  };
  if (!std::isfinite(o.lora_alpha) || o.lora_alpha == 0)
    refuse(fmt::format("--lora-alpha: expected a finite number other than 0, got {}", o.lora_alpha));
  const bool lora = o.method == "lora";
  for (const char* name : {"lora-r", "lora-alpha", "lora-dropout", "use-rslora", "target-modules", "adapter"})
    needs(name, lora, "with --method full");
  for (const char* name : {"lora-r", "lora-alpha", "use-rslora", "target-modules"})
    needs(name, o.adapter.empty(), "with --adapter, which has its own");
  needs("eval-steps", !o.eval_data.empty(), "without --eval-data");
  needs("early-stopping-patience", !o.eval_data.empty(), "without --eval-data");
  for (const char* name : {"allow-config-change", "allow-data-change", "allow-world-size"})
    needs(name, !o.resume.empty(), "without --resume");
  needs("resume", !o.dry_run, "with --dry-run");
  const bool decays = o.lr_scheduler != "constant" || o.warmup_steps > 0;
  if (o.learning_rate == 0 && given("lr-scheduler") && decays) refuse("--lr-scheduler has no effect at a rate of 0");
}

std::string resolved_config(const FinetuneOptions& o) {
  const bool lora = o.method == "lora";
  Json json = {{"model", o.model}, {"data", o.data}, {"out", o.out}, {"method", o.method}};
  const auto add_text = [&](const char* name, const std::string& value) {
    if (!value.empty()) json[name] = value;
  };
  const auto add_count = [&](const char* name, std::int64_t value) {
    if (value > 0) json[name] = value;
  };
  add_text("adapter", o.adapter);
  if (lora && o.adapter.empty()) {
    json["lora_r"] = o.lora_r;
    json["lora_alpha"] = o.lora_alpha;
    json["use_rslora"] = o.use_rslora;
    json["target_modules"] = o.target_modules;
  }
  if (lora) json["lora_dropout"] = o.lora_dropout;
  json["dtype"] = o.dtype;
  json["recompute"] = o.recompute;
  json["optimizer"] = o.optimizer;
  if (!o.optimizer_groups.empty()) json["optimizer_groups"] = Json::parse(o.optimizer_groups);
  json["learning_rate"] = o.learning_rate;
  json["lr_scheduler"] = o.lr_scheduler;
  json["warmup_steps"] = o.warmup_steps;
  json["weight_decay"] = o.weight_decay;
  json["max_grad_norm"] = o.max_grad_norm;
  add_count("max_steps", o.max_steps);
  add_count("epochs", o.epochs);
  json["batch_size"] = o.batch_size;
  json["grad_accum"] = o.grad_accum;
  json["max_length"] = o.max_length;
  json["packing"] = o.packing;
  add_text("chat_template", o.chat_template);
  json["mask_prompts"] = o.mask_prompts;
  add_text("eval_data", o.eval_data);
  if (!o.eval_data.empty()) add_count("eval_steps", o.eval_steps);
  add_count("early_stopping_patience", o.early_stopping_patience);
  json["save_steps"] = o.save_steps;
  add_count("save_total_limit", o.save_total_limit);
  json["seed"] = o.seed;
  add_count("ranks", o.ranks.ranks);
  json["device"] = o.ranks.device;
  json["comm_timeout"] = o.ranks.comm_timeout;
  return json.dump(2) + "\n";
}

}  // namespace rowan::app
