// The options of `rowan finetune` on the command line and in files.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "finetune.h"

namespace rowan::app {

/// Adds the command. The options outlive the program.
void add_finetune(CLI::App& program, FinetuneOptions& options);

/// A command line in which `--config FILE` is preceded by the members of FILE's JSON object as options
/// ({"lora_r": 16} as --lora-r=16), so that options beside it win. Throws InvalidArgument where FILE cannot be read.
std::vector<std::string> with_config_file(const std::vector<std::string>& arguments);

/// The options that have an effect, as an object that --config takes.
std::string resolved_config(const FinetuneOptions& options);

}  // namespace rowan::app
