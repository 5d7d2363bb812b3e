// A LoRA adapter merged into the weights of its model, from files to files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "rowan/io/model_files.h"
#include "rowan/io/peft_adapter.h"

namespace rowan {

/// What a merge did.
struct MergeReport {
  std::vector<std::string> merged;  ///< modules whose weight changed, in the model's order
  std::vector<std::string> copied;  ///< other files of the model's directory that were copied, sorted
  /// Entries of the model's directory that were not: weights in other formats, which the adapter is not in; adapters,
  /// which would be applied once more; directories.
  std::vector<std::string> left_out;
};

/// Writes a model directory whose weights are W' = W + s B A, for each module of the adapter in float64 with one
/// rounding to the dtype that W is stored in; every other tensor is copied bit for bit, and so are the split into
/// files, their headers, and the directory's other files. Works on the CPU, in memory for one module's factors and a
/// few rows of its weight.
///
/// `out` is a new or an empty directory, which appears whole or not at all: the files are made in a hidden directory
/// beside it that is renamed at the end. A killed process leaves that one behind.
///
/// Throws InvalidArgument when `out` is something else than that; Format and Unsupported as check_base and
/// AdapterFiles::match, before anything is written; Format naming the module whose factors or merged weight are not
/// finite; Io when reading or writing fails. Nothing stays behind then.
MergeReport merge_adapter(const ModelConfig& config, const ModelFiles& model, const AdapterFiles& adapter,
                          const std::filesystem::path& out);

}  // namespace rowan
