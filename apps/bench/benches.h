// The benchmarks, one a command.
#pragma once

#include "setup.h"

namespace rowan::bench {

/// LoRA layers against the frozen linear, and the stand-alone operations against their bytes.
void bench_lora(Setup& setup, Report& report);
/// Muown's row kernels against their bytes, Newton-Schulz, and whole optimizer steps.
void bench_muown(Setup& setup, Report& report);
/// A fine-tuning step of a Llama of a billion parameters: tokens a second.
void bench_step(Setup& setup, Report& report);

/// Which optimizer, routing and learning rate learn the demo's two tasks best, and whether the Newton-Schulz paths give
/// one loss curve: tables and pictures.
void bench_study(Setup& setup, Report& report);

/// Runs peers.py (PyTorch, PEFT) with a request and gives its answer; null, with a line on stderr that says why, where
/// python3 lacks something.
nlohmann::ordered_json run_peers(const nlohmann::ordered_json& request);

}  // namespace rowan::bench
