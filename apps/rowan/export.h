// An adapter in the form of another program.
#pragma once

#include <string>

namespace rowan::app {

struct ExportOptions {
  bool gguf = false;
  std::string model;  ///< only its config.json is read
  std::string adapter;
  std::string out;
  std::string dtype = "float32";
};

/// Writes the adapter as one GGUF file.
void run_export(const ExportOptions& options);

}  // namespace rowan::app
