// The options of commands that run on several ranks.
#pragma once

#include <CLI/CLI.hpp>

#include "launch.h"

namespace rowan::app {

/// Adds --ranks, --comm-timeout, --check-collectives, --device and --tune-file.
void add_ranks(CLI::App& command, RankOptions& options);

/// Adds --tune-file, which acts where it is parsed.
void add_tune_file(CLI::App& command);

/// Runs a command here, or on ranks that this process starts.
template <class F>
void run_on_ranks(const RankOptions& options, const F& run) {
  if (starts_ranks(options)) {
    start_ranks(options);
  } else {
    run();
  }
}

}  // namespace rowan::app
