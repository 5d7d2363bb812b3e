// Checkpoints of a training run: directories that appear whole or not at all, and that no flipped byte goes unnoticed
// in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace rowan {

/// How a parameter's optimizer state was split over the ranks that wrote the checkpoint, which holds it whole.
struct CheckpointShard {
  std::string parameter;
  std::int64_t global_rows = 0;
  std::vector<std::int64_t> first_rows;  ///< of each rank, in rank order

  friend bool operator==(const CheckpointShard&, const CheckpointShard&) = default;
};

/// What a checkpoint says beside its files.
struct CheckpointInfo {
  std::int64_t step = 0;            ///< optimizer steps done
  std::optional<double> eval_loss;  ///< of an evaluation at this very step; finite
  std::int64_t world_size = 1;      ///< ranks of the run
  std::vector<CheckpointShard> shards;
  /// What the run is made from and with: names and values ("base_model", "data", "lora_r"). A run that goes on must be
  /// the same in all of them; see changed_identity.
  std::map<std::string, std::string> identity;
  /// Where the run stands: counts ("dropout_step", "epoch") and finite numbers ("best_eval_loss").
  std::map<std::string, std::uint64_t> counters;
  std::map<std::string, double> numbers;
};

/// Writes ROOT/checkpoint-STEP and returns its path. `write_files` is called with a hidden directory beside it and puts
/// files there with AtomicFile, no directories (a PEFT adapter, an optimizer's state); a manifest with the size and
/// XXH64 of each is written last, everything is synced to disk, and a rename makes the checkpoint appear, in the place
/// of one of the same step. An error or a kill at any moment leaves the checkpoints that were there; at worst a hidden
/// directory stays, which the next save removes. One process saves to one ROOT at a time. Throws Io, also where the
/// disk is full, and whatever `write_files` throws; InvalidArgument for a negative step or a number that is not finite.
std::filesystem::path save_checkpoint(const std::filesystem::path& root, const CheckpointInfo& info,
                                      const std::function<void(const std::filesystem::path& directory)>& write_files);

/// A checkpoint on disk, checked.
struct Checkpoint {
  std::filesystem::path directory;
  CheckpointInfo info;
};

/// Reads a checkpoint's manifest and every byte of its files. Throws Io where one cannot be read; Format naming the
/// file that is missing, of another size or another hash, and a manifest that is malformed, changed or of
/// another version. No path from the manifest leads out of the directory.
Checkpoint open_checkpoint(const std::filesystem::path& directory);

/// The checkpoints below ROOT by their names, oldest step first; none where there is no ROOT. Nothing is opened.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& root);

/// The newest sound checkpoint below ROOT; `damaged` is told about each newer one that is not (the error's text).
/// Throws Format where there is none.
Checkpoint open_newest_checkpoint(const std::filesystem::path& root,
                                  const std::function<void(const std::string&)>& damaged = {});

/// Removes the oldest checkpoints but the newest `keep` (at least 1) and the one of the lowest eval_loss. Throws Io.
void prune_checkpoints(const std::filesystem::path& root, std::int64_t keep);

/// The first name, in alphabetical order, whose value is not the same in both (or is in one alone), passing over those
/// for which `allowed` is true; empty where there is none.
std::string changed_identity(const std::map<std::string, std::string>& saved,
                             const std::map<std::string, std::string>& current,
                             const std::function<bool(const std::string& name)>& allowed = {});

/// XXH64 of a file's bytes, and of several files' names and bytes one after the other, as 16 hexadecimal digits: what
/// tells base models and data files apart. Throws Io.
std::string fingerprint_of_file(const std::filesystem::path& path);
std::string fingerprint_of_files(const std::vector<std::filesystem::path>& paths);

}  // namespace rowan
