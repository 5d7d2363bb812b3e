// The command-line program: parses options, runs one command, maps errors to exit codes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "demo.h"
#include "eval.h"
#include "exit_code.h"
#include "export.h"
#include "finetune_options.h"
#include "generate.h"
#include "info.h"
#include "inspect.h"
#include "merge.h"
#include "option_checks.h"
#include "plot.h"
#include "rank_options.h"
#include "rowan/core/build_info.h"
#include "rowan/core/error.h"

namespace {

constexpr const char* kFooter =
    "Exit status: 0 done, 1 failed while running, 2 usage or configuration, 3 bad data, model or checkpoint, 4 out of "
    "memory,\n"
    "130 or 143 interrupted by SIGINT or SIGTERM; finetune then saves a checkpoint, once it trains.";

using rowan::app::add_ranks;
using rowan::app::add_tune_file;
using rowan::app::check_count;
using rowan::app::check_not_empty;
using rowan::app::check_number;
using rowan::app::check_seed;
using rowan::app::run_on_ranks;

void add_demo(CLI::App& program, rowan::app::DemoOptions& options) {
  CLI::App* demo = program.add_subcommand(
      "demo", "Pre-train a small Llama, fine-tune LoRA on it with Muown, and show what it learned");
  demo->add_option("--out", options.out,
                   "Directory of the run: configuration, metrics, curve, base model and adapter; files of an earlier "
                   "demo there are replaced")
      ->check(check_not_empty)
      ->capture_default_str();
  demo->add_option("--seed", options.seed,
                   "Seed of texts, weights and samples: one seed, device and build give the same bits")
      ->check(check_seed)
      ->capture_default_str();
  demo->add_option("--optimizer", options.optimizer, "Optimizer of matrices and LoRA factors; the rest takes AdamW")
      ->check(CLI::IsMember({"muown", "muon", "adamw"}))
      ->capture_default_str();
  add_ranks(*demo, options.ranks);
  demo->add_option("--pretrain-steps", options.pretrain_steps, "Optimizer steps of pre-training, 2048 bytes each")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  demo->add_option("--tune-steps", options.tune_steps, "Optimizer steps of LoRA fine-tuning, 2048 bytes each")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  demo->add_option("--pretrain-learning-rate", options.pretrain_learning_rate,
                   "Peak learning rate of pre-training (default by optimizer)")
      ->check(check_number(1e-30, 1e30));
  demo->add_option("--tune-learning-rate", options.tune_learning_rate,
                   "Peak learning rate of fine-tuning (default by optimizer)")
      ->check(check_number(1e-30, 1e30));
  demo->add_flag("--json", options.json, "End with one line of JSON on stdout, and keep quiet otherwise");
  demo->callback([&options] { run_on_ranks(options.ranks, [&options] { rowan::app::run_demo(options); }); });
}

void add_eval(CLI::App& program, rowan::app::EvalOptions& options) {
  CLI::App* eval = program.add_subcommand(
      "eval", "Mean loss of a model, with or without an adapter, over all counted tokens of a file");
  eval->add_option("--model", options.model, "Hugging Face directory: config.json and safetensors weights")->required();
  eval->add_option("--adapter", options.adapter, "PEFT directory of a LoRA adapter");
  eval->add_option(
          "--data", options.data,
          "JSON Lines of {\"input_ids\", \"labels\"} (aligned as in Transformers, -100 does not count; taken as they "
          "are), {\"text\"}, {\"prompt\", \"completion\"}, {\"messages\"} or {\"segments\"} (these need the model's "
          "tokenizer.json)")
      ->required();
  eval->add_option("--chat-template", options.chat_template,
                   "Form of messages: chatml, qwen3, llama3 or mistral; default: the model's own, which must be one of "
                   "these");
  eval->add_flag("--mask-prompts", options.mask_prompts,
                 "Only completions and what assistants say count for the loss; texts count whole");
  eval->add_option("--max-length", options.max_length,
                   "Tokens at which a row is cut, as finetune does; default: longer rows than the model takes are "
                   "refused")
      ->check(check_count);
  add_ranks(*eval, options.ranks);
  eval->add_option("--dtype", options.dtype,
                   "float32, bfloat16 or float16; default: the dtype of the model's configuration");
  eval->add_flag("--json", options.json, "Print one line of JSON: loss (nats a token), tokens, perplexity");
  eval->callback([&options] { run_on_ranks(options.ranks, [&options] { rowan::app::run_eval(options); }); });
}

void add_generate(CLI::App& program, rowan::app::GenerateOptions& options) {
  CLI::App* generate = program.add_subcommand("generate", "Continue a prompt or answer a conversation");
  generate
      ->add_option("--model", options.model, "Hugging Face directory: config.json, safetensors weights, tokenizer.json")
      ->required();
  generate->add_option("--adapter", options.adapter, "PEFT directory of a LoRA adapter");
  CLI::Option_group* input = generate->add_option_group("input", "One of");
  input->add_option("--prompt", options.prompt, "Text to continue");
  input->add_option(
      "--messages", options.messages,
      "JSON file of {\"messages\": [{\"role\", \"content\"}, ...]}, or of the array alone; the last should be "
      "the user's");
  input->require_option(1);
  generate
      ->add_option("--chat-template", options.chat_template,
                   "For --messages, in place of the model's own template: chatml, qwen3, llama3 or mistral")
      ->check(CLI::IsMember({"chatml", "qwen3", "llama3", "mistral"}));
  generate->add_option("--max-new-tokens", options.max_new_tokens, "Tokens at most")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  generate->add_option("--temperature", options.sampling.temperature, "0: the most likely token each time")
      ->check(check_number(0, 1e30))
      ->capture_default_str();
  generate->add_option("--top-k", options.sampling.top_k, "Sample from so many of the most likely tokens; 0: all")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  generate
      ->add_option("--top-p", options.sampling.top_p,
                   "Sample from the fewest most likely tokens whose probabilities reach this sum")
      ->check(check_number(0, 1))
      ->capture_default_str();
  generate->add_option("--seed", options.sampling.seed, "Seed of sampling")->check(check_seed)->capture_default_str();
  generate->add_option("--device", options.device, "cpu, cuda, cuda:N or auto (a CUDA device where there is one)")
      ->capture_default_str();
  add_tune_file(*generate);
  generate->add_option("--dtype", options.dtype,
                       "float32, bfloat16 or float16; default: the dtype of the model's configuration");
  generate->add_flag("--json", options.json, "Print one line of JSON at the end: text, prompt_ids, ids, ended");
  generate->callback([generate, &options] {
    for (const char* name : {"--top-k", "--top-p", "--seed"}) options.samples |= generate->count(name) > 0;
    rowan::app::run_generate(options);
  });
}

void add_merge(CLI::App& program, rowan::app::MergeOptions& options) {
  CLI::App* merge = program.add_subcommand(
      "merge",
      "Merge a LoRA adapter into its model: W + s B A with one rounding, in the dtype and shards of the model");
  merge->add_option("--model", options.model, "Hugging Face directory: config.json and safetensors weights")
      ->required();
  merge->add_option("--adapter", options.adapter, "PEFT directory of a LoRA adapter")->required();
  merge
      ->add_option("--out", options.out,
                   "New or empty directory for the merged model; it gets the model's other files too, but no weights "
                   "in other formats")
      ->check(check_not_empty)
      ->required();
  merge->callback([&options] { rowan::app::run_merge(options); });
}

void add_export(CLI::App& program, rowan::app::ExportOptions& options) {
  CLI::App* command = program.add_subcommand("export", "Write a LoRA adapter in the form of another program");
  command->add_flag("--gguf", options.gguf, "As one GGUF file, which llama.cpp loads with --lora");
  command->add_option("--model", options.model, "Hugging Face directory of the base; only its config.json is read")
      ->required();
  command->add_option("--adapter", options.adapter, "PEFT directory of the adapter")->required();
  command->add_option("--out", options.out, "The file to write")->check(check_not_empty)->required();
  command->add_option("--dtype", options.dtype, "float32 or float16")->capture_default_str();
  command->callback([&options] { rowan::app::run_export(options); });
}

void add_inspect(CLI::App& program, rowan::app::InspectOptions& options) {
  CLI::App* inspect = program.add_subcommand(
      "inspect",
      "Check a safetensors file, a model or an adapter directory, and list its tensors; status 3 when it is "
      "not sound, which a model may be that no command takes (its line \"unsupported\")");
  inspect->add_option("path", options.path, "A .safetensors file, or a directory of a model or an adapter")->required();
  inspect->add_flag("--json", options.json, "Print one line of JSON");
  inspect->callback([&options] { rowan::app::run_inspect(options); });
}

void add_plot(CLI::App& program, rowan::app::PlotOptions& options) {
  CLI::App* plot = program.add_subcommand("plot", "Compare the metrics of runs in one picture (SVG)");
  plot->add_option("run", options.runs, "Run directories (their metrics.jsonl), or files of that form")->required();
  plot->add_option("--metric", options.metrics,
                   "What to plot; given again: another plot below; names joined by commas share a plot")
      ->allow_extra_args(false)
      ->check(check_not_empty)
      ->capture_default_str();
  plot->add_option("--x", options.x, "step, or tokens or seconds counted up")
      ->check(CLI::IsMember({"step", "tokens", "seconds"}))
      ->capture_default_str();
  plot->add_option("--label", options.labels, "Name of a run in the legend; given once for each, in their order")
      ->allow_extra_args(false);
  plot->add_option("--smoothing", options.smoothing,
                   "Weight of the past in an exponential moving average, from 0 (none) to 0.999")
      ->check(check_number(0, 0.999))
      ->capture_default_str();
  plot->add_flag("--log-y", options.log_y, "Logarithmic axis; values that are not positive are left out");
  plot->add_option("--title", options.title, "Heading of the picture");
  plot->add_option("--out", options.out, "The file to write")->check(check_not_empty)->capture_default_str();
  plot->callback([&options] { rowan::app::run_plot(options); });
}

void add_info(CLI::App& program, rowan::app::InfoOptions& options) {
  CLI::App* info = program.add_subcommand(
      "info", "Show what this program was built with and the devices it sees, or plan split weights");
  CLI::Option* plan = info->add_option(
      "--plan", options.plan,
      "ROWS,COLUMNS[,RANKS]: what Muown's Newton-Schulz of weights of that size costs when their output "
      "neurons are split over ranks, by a model of the machine; nothing is run");
  info->add_option("--ranks", options.ranks, "A..B: a line for each doubling of the number of ranks")->needs(plan);
  info->add_option("--count", options.count, "Weights of that size that are stepped together")
      ->needs(plan)
      ->check(check_count)
      ->capture_default_str();
  info->add_option("--bandwidth", options.bandwidth, "GB/s that a rank sends and receives at once")
      ->needs(plan)
      ->check(check_number(1e-30, 1e30))
      ->capture_default_str();
  info->add_option("--latency", options.latency, "Microseconds that a message takes")
      ->needs(plan)
      ->check(check_number(0, 1e30))
      ->capture_default_str();
  info->callback([&options] {
    if (options.plan.empty()) {
      rowan::app::print_info(std::cout);
    } else {
      rowan::app::print_plan(options, std::cout);
    }
  });
}

/// One write, so that lines of several ranks do not mix.
void complain(const std::string& message) { std::cerr << "rowan: " + rowan::app::rank_prefix() + message + '\n'; }

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("rowan: LoRA fine-tuning with the Muown optimizer, in C++ and CUDA");
  program.footer(kFooter);
  program.require_subcommand(1);
  program.set_version_flag("--version", rowan::build_info().version);
  rowan::app::DemoOptions demo;
  add_demo(program, demo);
  rowan::app::EvalOptions eval;
  add_eval(program, eval);
  rowan::app::FinetuneOptions finetune;
  add_finetune(program, finetune);
  rowan::app::GenerateOptions generate;
  add_generate(program, generate);
  rowan::app::MergeOptions merge;
  add_merge(program, merge);
  rowan::app::ExportOptions exported;
  add_export(program, exported);
  rowan::app::InspectOptions inspect;
  add_inspect(program, inspect);
  rowan::app::PlotOptions plot;
  add_plot(program, plot);
  rowan::app::InfoOptions info;
  add_info(program, info);
  try {
    std::vector<std::string> arguments = rowan::app::with_config_file({argv + 1, argv + argc});
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    program.parse(std::move(arguments));
    std::cout.flush();
    if (!std::cout) throw rowan::Error(rowan::ErrorKind::kIo, "stdout: write failed");
    return rowan::app::kDone;
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? rowan::app::kDone : rowan::app::kUsage;
  } catch (const rowan::app::Interrupted& interrupted) {
    return 128 + interrupted.signal;
  } catch (const rowan::app::RanksFailed& failed) {
    return failed.status;
  } catch (const rowan::Error& error) {
    complain(error.what());
    return rowan::app::exit_code(error.kind());
  } catch (const std::bad_alloc&) {
    complain("out of host memory");
    return rowan::app::kOutOfMemory;
  } catch (const std::exception& error) {
    complain(error.what());
    return rowan::app::kFailed;
  }
}
