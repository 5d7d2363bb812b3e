// Variants of the small models in tests/data: other dtypes, shards, edited tensors.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "rowan/io/safetensors.h"
#include "support/files.h"

namespace rowan::test {

/// All tensors of a file, floating ones in another dtype.
std::vector<NamedTensor> load_all(const std::filesystem::path& file, DType dtype);

/// Writes the weights into `shards` files model-0000i-of-0000n.safetensors with an index, or into model.safetensors
/// where that is 1, and copies the config.json of tests/data/models/FAMILY.
void write_model(const std::filesystem::path& directory, const std::string& family,
                 const std::vector<NamedTensor>& tensors, int shards = 1);

/// An adapter directory with one file each; `json` is the text of adapter_config.json.
void write_adapter_files(const std::filesystem::path& directory, const std::string& json,
                         const std::vector<NamedTensor>& tensors);

}  // namespace rowan::test
