#include "rowan/io/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "core/check.h"
#include "io/input_file.h"
#include "io/json.h"
#include "io/sync_directory.h"
#include "io/xxh64.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

namespace fs = std::filesystem;
using detail::JsonObject;
using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "rowan checkpoint";
constexpr std::int64_t kVersion = 1;
constexpr const char* kManifest = "manifest.json";
constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::int64_t kMaxManifestBytes = std::int64_t{64} << 20;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

void add_bytes(detail::Xxh64& hash, const fs::path& path) {
  const detail::InputFile file(path);
  std::vector<char> buffer(std::size_t{1} << 20);
  for (std::int64_t at = 0; at < file.size();) {
    const std::int64_t bytes = std::min<std::int64_t>(file.size() - at, static_cast<std::int64_t>(buffer.size()));
    file.read_at(at, buffer.data(), bytes);
    hash.update(buffer.data(), static_cast<std::size_t>(bytes));
    at += bytes;
  }
}

std::string hex(const detail::Xxh64& hash) { return fmt::format("{:016x}", hash.digest()); }

std::string hash_of_text(const std::string& text) {
  detail::Xxh64 hash;
  hash.update(text.data(), text.size());
  return hex(hash);
}

// The manifest

/// A file of a checkpoint as its manifest lists it.
struct ListedFile {
  std::string name;
  std::int64_t bytes = 0;
  std::string hash;
};

struct Manifest {
  CheckpointInfo info;
  std::vector<ListedFile> files;
};

std::string text_of(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n'; }

std::string manifest_text(const CheckpointInfo& info, const std::vector<ListedFile>& files) {
  Json json = {{"format", kFormat}, {"version", kVersion}, {"step", info.step}, {"world_size", info.world_size}};
  if (info.eval_loss) json["eval_loss"] = *info.eval_loss;
  json["identity"] = info.identity;
  json["counters"] = info.counters;
  json["numbers"] = info.numbers;
  json["shards"] = Json::array();
  for (const CheckpointShard& shard : info.shards) {
    json["shards"].push_back(
        {{"parameter", shard.parameter}, {"global_rows", shard.global_rows}, {"first_rows", shard.first_rows}});
  }
  json["files"] = Json::array();
  for (const ListedFile& file : files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh64", file.hash}});
  json["xxh64"] = hash_of_text(text_of(json));
  return text_of(json);
}

/// The manifest's own hash is that of its text without the hash; and the text must be the one that is written for its
/// values, so that no byte can differ.
void check_manifest_hash(const fs::path& path, const std::string& text, const Json& json) {
  Json rest = json;
  rest.erase("xxh64");
  if (JsonObject(path, json).string("xxh64") != hash_of_text(text_of(rest)) || text != text_of(json))
    detail::fail_format(path, "its content does not match its hash");
}

template <class F>
void for_each_object(const fs::path& path, const JsonObject& json, const std::string& name, const F& f) {
  const Json& list = json.at(name);
  if (!list.is_array()) json.fail(name, "expected an array, got " + detail::describe(list));
  for (const Json& entry : list) {
    if (!entry.is_object()) json.fail(name, "expected objects, got " + detail::describe(entry));
    f(JsonObject(path, entry, name + "."));
  }
}

CheckpointShard read_shard(const JsonObject& json) {
  CheckpointShard shard;
  shard.parameter = json.string("parameter");
  shard.global_rows = json.integer("global_rows", 0, kMost);
  const Json& rows = json.at("first_rows");
  if (!rows.is_array()) json.fail("first_rows", "expected an array, got " + detail::describe(rows));
  for (const Json& row : rows) {
    if (!row.is_number_unsigned()) json.fail("first_rows", "expected row numbers, got " + detail::describe(row));
    shard.first_rows.push_back(row.get<std::int64_t>());
  }
  return shard;
}

ListedFile read_listed_file(const JsonObject& json) {
  ListedFile file{json.string("name"), json.integer("bytes", 0, kMost), json.string("xxh64")};
  const bool plain = !file.name.empty() && file.name != "." && file.name != ".." &&
                     file.name.find('/') == std::string::npos && file.name.find('\0') == std::string::npos;
  if (!plain) json.fail("name", "expected a plain file name, got " + detail::quote(file.name));
  return file;
}

Manifest read_manifest(const fs::path& directory) {
  const fs::path path = directory / kManifest;
  const std::string text = read_text_file(path, kMaxManifestBytes);
  detail::JsonScanner(path).scan(text);
  const Json values = Json::parse(text);
  if (!values.is_object()) detail::fail_format(path, "expected an object, got " + detail::describe(values));
  const JsonObject json(path, values);
  if (json.string("format") != kFormat) json.fail("format", fmt::format("expected \"{}\"", kFormat));
  if (const std::int64_t version = json.integer("version", 0, kMost); version != kVersion)
    json.fail("version", fmt::format("expected {}, got {}", kVersion, version));
  check_manifest_hash(path, text, values);

  Manifest manifest;
  CheckpointInfo& info = manifest.info;
  info.step = json.integer("step", 0, kMost);
  info.world_size = json.integer("world_size", 1, kMost);
  constexpr double kLargest = std::numeric_limits<double>::max();
  if (json.has("eval_loss")) info.eval_loss = json.number("eval_loss", -kLargest, kLargest);
  const JsonObject identity = json.object("identity"), counters = json.object("counters"),
                   numbers = json.object("numbers");
  for (const auto& [name, value] : identity.members().items()) info.identity[name] = identity.string(name);
  for (const auto& [name, value] : numbers.members().items())
    info.numbers[name] = numbers.number(name, -kLargest, kLargest);
  for (const auto& [name, value] : counters.members().items()) {
    if (!value.is_number_unsigned()) counters.fail(name, "expected a count, got " + detail::describe(value));
    info.counters[name] = value.get<std::uint64_t>();
  }
  for_each_object(path, json, "shards", [&](const JsonObject& shard) { info.shards.push_back(read_shard(shard)); });
  for_each_object(path, json, "files",
                  [&](const JsonObject& file) { manifest.files.push_back(read_listed_file(file)); });
  return manifest;
}

// Directories

fs::path name_of(std::int64_t step) { return fmt::format("{}{}", kPrefix, step); }

/// The step in the name of a checkpoint; -1 for another name.
std::int64_t step_of(const std::string& name) {
  const std::string_view digits = std::string_view(name).substr(std::min(kPrefix.size(), name.size()));
  const bool fits = name.starts_with(kPrefix) && !digits.empty() && digits.size() <= 18 &&
                    digits.find_first_not_of("0123456789") == std::string_view::npos;
  return fits ? std::stoll(std::string(digits)) : -1;
}

bool is_left_over(const std::string& name) {
  return name.starts_with(fmt::format(".{}", kPrefix)) && name.ends_with(".tmp");
}

std::vector<std::string> entries_of(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) detail::fail_system(directory, "list", error.value());
  std::sort(names.begin(), names.end());
  return names;
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) detail::fail_system(path, "remove", error.value());
}

void move_directory(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) detail::fail_system(to, "rename a directory to", errno);
}

/// A checkpoint that is half removed must not be taken for one.
void remove_checkpoint(const fs::path& directory) {
  const fs::path hidden = directory.parent_path() / fmt::format(".{}.old.tmp", directory.filename().string());
  remove_tree(hidden);
  move_directory(directory, hidden);
  remove_tree(hidden);
}

/// Puts `fresh` in the place of `target`; what was there, if anything, is then at `fresh` or gone.
void put_in_place(const fs::path& fresh, const fs::path& target) {
  std::error_code error;
  if (!fs::exists(target, error)) {
    move_directory(fresh, target);
  } else if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    remove_checkpoint(target);  // on a file system that cannot exchange
    move_directory(fresh, target);
  }
}

std::vector<ListedFile> list_files(const fs::path& directory) {
  std::vector<ListedFile> files;
  for (const std::string& name : entries_of(directory)) {
    const fs::path path = directory / name;
    files.push_back({name, detail::InputFile(path).size(), fingerprint_of_file(path)});
  }
  return files;
}

void check_info(const CheckpointInfo& info) {
  using detail::require;
  require(info.step >= 0, "save_checkpoint: expected step >= 0, got {}", info.step);
  require(info.world_size >= 1, "save_checkpoint: expected world_size >= 1, got {}", info.world_size);
  require(!info.eval_loss || std::isfinite(*info.eval_loss), "save_checkpoint: expected a finite eval_loss, got {}",
          info.eval_loss.value_or(0));
  for (const auto& [name, number] : info.numbers)
    require(std::isfinite(number), "save_checkpoint: expected a finite {}, got {}", name, number);
}

/// A directory that goes away unless it was renamed.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(fs::path path) : path_(std::move(path)) {
    remove_tree(path_);
    make_directories(path_);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const fs::path& path() const noexcept { return path_; }

 private:
  fs::path path_;
};

}  // namespace

fs::path save_checkpoint(const fs::path& root, const CheckpointInfo& info,
                         const std::function<void(const fs::path& directory)>& write_files) {
  check_info(info);
  make_directories(root);
  for (const std::string& name : entries_of(root)) {
    if (is_left_over(name)) remove_tree(root / name);
  }
  const fs::path target = root / name_of(info.step);
  const TemporaryDirectory fresh(root / fmt::format(".{}.tmp", target.filename().string()));
  write_files(fresh.path());
  write_text_file(fresh.path() / kManifest, manifest_text(info, list_files(fresh.path())));
  put_in_place(fresh.path(), target);
  detail::sync_directory(root);
  return target;
}

Checkpoint open_checkpoint(const fs::path& directory) {
  Manifest manifest = read_manifest(directory);
  for (const ListedFile& listed : manifest.files) {
    const fs::path path = directory / listed.name;
    std::error_code error;
    if (!fs::exists(path, error)) detail::fail_format(path, "the file is missing from its checkpoint");
    if (const std::int64_t bytes = detail::InputFile(path).size(); bytes != listed.bytes)
      detail::fail_format(path, fmt::format("expected {} bytes as its checkpoint lists, got {}", listed.bytes, bytes));
    if (const std::string hash = fingerprint_of_file(path); hash != listed.hash)
      detail::fail_format(path, fmt::format("expected XXH64 {} as its checkpoint lists, got {}", listed.hash, hash));
  }
  return {directory, std::move(manifest.info)};
}

std::vector<fs::path> list_checkpoints(const fs::path& root) {
  std::error_code error;
  if (!fs::exists(root, error)) return {};
  std::vector<std::int64_t> steps;
  for (const std::string& name : entries_of(root)) {
    if (const std::int64_t step = step_of(name); step >= 0 && name == name_of(step)) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  std::vector<fs::path> checkpoints;
  for (const std::int64_t step : steps) checkpoints.push_back(root / name_of(step));
  return checkpoints;
}

Checkpoint open_newest_checkpoint(const fs::path& root, const std::function<void(const std::string&)>& damaged) {
  const std::vector<fs::path> checkpoints = list_checkpoints(root);
  for (auto place = checkpoints.rbegin(); place != checkpoints.rend(); ++place) {
    try {
      return open_checkpoint(*place);
    } catch (const Error& error) {
      if (damaged) damaged(error.what());
    }
  }
  detail::fail_format(root, checkpoints.empty() ? "there is no checkpoint" : "none of its checkpoints is sound");
}

void prune_checkpoints(const fs::path& root, std::int64_t keep) {
  detail::require(keep >= 1, "prune_checkpoints: expected to keep at least 1, got {}", keep);
  const std::vector<fs::path> checkpoints = list_checkpoints(root);
  fs::path best;
  double best_loss = std::numeric_limits<double>::infinity();
  for (const fs::path& checkpoint : checkpoints) {
    try {
      const std::optional<double> loss = read_manifest(checkpoint).info.eval_loss;
      if (!loss || *loss >= best_loss) continue;
      best_loss = *loss;
      best = checkpoint;
    } catch (const Error&) {  // a damaged one is never the best
    }
  }
  const auto count = static_cast<std::int64_t>(checkpoints.size());
  for (std::int64_t i = 0; i < count - keep; ++i) {
    if (const fs::path& old = checkpoints[static_cast<std::size_t>(i)]; old != best) remove_checkpoint(old);
  }
}

std::string changed_identity(const std::map<std::string, std::string>& saved,
                             const std::map<std::string, std::string>& current,
                             const std::function<bool(const std::string& name)>& allowed) {
  std::map<std::string, std::string> all = saved;
  all.insert(current.begin(), current.end());
  for (const auto& [name, value] : all) {
    const auto a = saved.find(name), b = current.find(name);
    const bool same = a != saved.end() && b != current.end() && a->second == b->second;
    if (!same && !(allowed && allowed(name))) return name;
  }
  return {};
}

std::string fingerprint_of_file(const fs::path& path) {
  detail::Xxh64 hash;
  add_bytes(hash, path);
  return hex(hash);
}

std::string fingerprint_of_files(const std::vector<fs::path>& paths) {
  detail::Xxh64 hash;
  for (const fs::path& path : paths) {
    const std::string name = path.filename().string();
    hash.update(name.c_str(), name.size() + 1);
    add_bytes(hash, path);
  }
  return hex(hash);
}

}  // namespace rowan
