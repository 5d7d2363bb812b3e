#include "support/goldens.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "rowan_test_paths.h"
#include "support/compare.h"

namespace rowan::test {

std::vector<double> Golden::values(const std::string& name) const { return test::values(tensor(name), StreamRef()); }

std::string Golden::text(const std::string& key, const std::string& missing) const {
  const auto found = file_.metadata().find(key);
  return found == file_.metadata().end() ? missing : found->second;
}

double Golden::number(const std::string& key, double missing) const {
  const std::string value = text(key);
  return value.empty() ? missing : std::stod(value);
}

bool Golden::flag(const std::string& key, bool missing) const {
  const std::string value = text(key);
  if (value.empty()) return missing;
  if (value != "True" && value != "False")
    throw std::runtime_error(name() + ": expected True or False for " + key + ", got " + value);
  return value == "True";
}

std::vector<std::filesystem::path> golden_files(const std::string& family) {
  std::vector<std::filesystem::path> folders{std::filesystem::path(ROWAN_TEST_DATA_DIR) / "goldens" / family};
  if (const char* more = std::getenv("ROWAN_GOLDENS"); more && *more)
    folders.push_back(std::filesystem::path(more) / family);
  std::vector<std::filesystem::path> files;
  for (const auto& folder : folders) {
    if (!std::filesystem::is_directory(folder)) continue;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file() && entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace rowan::test
