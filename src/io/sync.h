// What has been written, on disk.
#pragma once

#include <filesystem>

namespace rowan::detail {

/// Waits until a file's bytes or a directory's entries are on disk: a rename is only when its directory is. Throws Io.
void sync_to_disk(const std::filesystem::path& path);

}  // namespace rowan::detail
