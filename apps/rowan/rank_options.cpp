#include "rank_options.h"

#include "option_checks.h"
#include "rowan/ops/tuning.h"

namespace rowan::app {

void add_ranks(CLI::App& command, RankOptions& options) {
  command
      .add_option(
          "--ranks", options.ranks,
          "Processes that share each batch, started on this machine: over NCCL on CUDA, TCP on the CPU (default: "
          "one, or as torchrun, mpirun or srun started the program)")
      ->check(CLI::Range(1, 4096));
  command
      .add_option("--comm-timeout", options.comm_timeout, "Seconds that a rank waits for another before the run fails")
      ->check(check_number(0.1, 86400))
      ->capture_default_str();
  command.add_flag("--check-collectives", options.check_collectives,
                   "Compare what ranks are about to exchange before each collective, to find one that differs");
  command
      .add_option(
          "--device", options.device,
          "cpu, cuda, cuda:N or auto (CUDA where there is a device); of several ranks each takes the device of its "
          "own number")
      ->capture_default_str();
  add_tune_file(command);
}

void add_tune_file(CLI::App& command) {
  command.add_option_function<std::string>(
      "--tune-file", [](const std::string& path) { set_tuning_file(path); },
      "Remembers which algorithms were measured to be the fastest for products on CUDA; one file, one device and one "
      "seed give the same bits; several ranks take the choices of rank 0 and measure none (default: $ROWAN_TUNE_FILE, "
      "else rowan/tuning.txt in the user's cache)");
}

}  // namespace rowan::app
