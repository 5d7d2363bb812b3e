// Directories on disk.
#pragma once

#include <filesystem>

namespace rowan::detail {

/// A file's new name is on disk only when its directory is. Throws Io.
void sync_directory(const std::filesystem::path& directory);

}  // namespace rowan::detail
