// rowan-bench: kernels and whole steps against ceilings measured in the same run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>

#include "benches.h"
#include "rowan/core/error.h"

namespace {

using rowan::bench::Options;
using rowan::bench::Report;
using rowan::bench::Setup;

void run(const std::string& name, void (*bench)(Setup&, Report&), const Options& options) {
  Setup setup(options);
  Report report;
  const Report::Row environment = setup.environment();
  for (const auto& [key, value] : environment.items()) fmt::print("{:<16} {}\n", key, value.dump());
  bench(setup, report);
  report.write(options.results, name, environment);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("rowan-bench: kernels and whole steps against ceilings measured in the same run");
  program.require_subcommand(1);
  Options options;
  const auto add = [&](const std::string& name, const std::string& what, void (*bench)(Setup&, Report&)) {
    CLI::App* command = program.add_subcommand(name, what);
    command->add_option("--device", options.device, "cpu, cuda, cuda:N or auto")->capture_default_str();
    command->add_option("--results", options.results,
                        "Folder for NAME.json; the main figures are added to its summary.json");
    command->add_option("--repeats", options.timing.repeats, "Samples that each median is taken of")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    command->add_flag("--peers", options.peers, "Also time PyTorch (and PEFT), where python3 has them");
    if (name == "lora") command->add_flag("--all", options.all, "Every combination of rows, rank and dtype");
    command->callback([name, bench, &options] {
      options.ceilings = name != "study";  // it times nothing
      run(name, bench, options);
    });
  };
  add("lora", "LoRA layers against the frozen linear, stand-alone operations against their bytes",
      rowan::bench::bench_lora);
  add("muown", "Muown's row kernels, Newton-Schulz, whole optimizer steps", rowan::bench::bench_muown);
  add("step", "A fine-tuning step of a Llama of a billion parameters", rowan::bench::bench_step);
  add("study", "Optimizers, routings and learning rates on the demo's two tasks", rowan::bench::bench_study);
  try {
    program.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << "rowan-bench: " << error.what() << '\n';
    return 1;
  }
}
