#include "rowan/io/checkpoint.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <limits>

#include "catch.h"
#include "io/xxh64.h"
#include "rowan/core/error.h"
#include "support/files.h"

namespace rowan {

namespace fs = std::filesystem;
using test::read_file;
using test::ScratchDirectory;
using test::write_file;

namespace {

CheckpointInfo info_of(std::int64_t step) {
  CheckpointInfo info;
  info.step = step;
  info.world_size = 2;
  info.identity = {{"base_model", "00ff"}, {"lora_r", "8"}};
  info.counters = {{"epoch", 3}, {"fingerprint", std::numeric_limits<std::uint64_t>::max()}};
  info.numbers = {{"best_eval_loss", 0.1}, {"tiny", 5e-324}};
  info.shards = {{"lm_head.weight", 7, {0, 4}}};
  return info;
}

void write_two(const fs::path& directory) {
  write_file(directory / "a.bin", "first file");
  write_file(directory / "b.bin", std::string(100, '\0'));
}

std::vector<std::string> names_below(const fs::path& root) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

template <class F>
std::string format_error(const F& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kFormat) return error.what();
  }
  return "no Format error";
}

}  // namespace

TEST_CASE("XXH64 gives the reference library's values, in one piece and in many", "[io]") {
  const std::vector<std::pair<std::size_t, std::uint64_t>> expected = {
      {0, 0xef46db3751d8e999},  {1, 0x1f25c8d0bc1f4bb6},  {3, 0x31d2363f52e564c9},  {4, 0x9bb64b7d66ee9fda},
      {5, 0xc7608efddb7051fe},  {8, 0xdab99d95c6f90092},  {12, 0xd52e407833af5133}, {31, 0xa2aa5f33cc4a6119},
      {32, 0x23c3c17ef790fd97}, {33, 0x50a7cfc7ba588784}, {63, 0x5e3e54b431c7493c}, {64, 0x0eb64b3ef6eeb01f},
      {101, 0xbad4d3bf033bda4c}};
  std::vector<unsigned char> bytes;
  for (int i = 0; i < 101; ++i) bytes.push_back(static_cast<unsigned char>(i * 7 + 3));
  for (const auto& [count, hash] : expected) {
    for (const std::size_t piece : {count + 1, std::size_t{1}, std::size_t{7}, std::size_t{40}}) {
      CAPTURE(count, piece);
      detail::Xxh64 own;
      for (std::size_t at = 0; at < count; at += piece) own.update(bytes.data() + at, std::min(piece, count - at));
      CHECK(own.digest() == hash);
    }
  }
}

TEST_CASE("a checkpoint comes back as it was saved", "[io]") {
  const ScratchDirectory scratch;
  const fs::path root = scratch / "checkpoints";
  const fs::path saved = save_checkpoint(root, info_of(12), write_two);
  CHECK(saved == root / "checkpoint-12");
  const Checkpoint checkpoint = open_checkpoint(saved);
  const CheckpointInfo& info = checkpoint.info;
  const CheckpointInfo expected = info_of(12);
  CHECK(info.step == 12);
  CHECK(info.world_size == 2);
  CHECK_FALSE(info.eval_loss.has_value());
  CHECK(info.identity == expected.identity);
  CHECK(info.counters == expected.counters);
  CHECK(info.numbers == expected.numbers);
  CHECK(info.shards == expected.shards);
  CHECK(read_file(saved / "b.bin") == std::string(100, '\0'));
}

TEST_CASE("any changed, cut, lengthened or missing file of a checkpoint is found and named", "[io]") {
  const ScratchDirectory scratch;
  const fs::path saved = save_checkpoint(scratch.path(), info_of(1), write_two);
  for (const std::string name : {"a.bin", "b.bin", "manifest.json"}) {
    CAPTURE(name);
    const std::string content = read_file(saved / name);
    const auto refused = [&](const std::string& changed) {
      write_file(saved / name, changed);
      return format_error([&] { open_checkpoint(saved); }).find(name) != std::string::npos;
    };
    for (std::size_t i = 0; i < content.size(); ++i) {
      for (const int flip : {1, 0x20, 0x80}) {
        CAPTURE(i, flip);
        std::string changed = content;
        changed[i] = static_cast<char>(changed[i] ^ flip);
        CHECK(refused(changed));
      }
    }
    CHECK(refused(content.substr(0, content.size() - 1)));
    CHECK(refused(content + "\n"));
    CHECK(refused(""));
    write_file(saved / name, content);
  }
  CHECK_NOTHROW(open_checkpoint(saved));
  fs::remove(saved / "b.bin");
  CHECK(format_error([&] { open_checkpoint(saved); }).find("b.bin") != std::string::npos);
}

TEST_CASE("a manifest cannot name files outside its checkpoint", "[io]") {
  const ScratchDirectory scratch;
  write_file(scratch / "outside", "x");
  const fs::path saved = save_checkpoint(scratch / "root", info_of(1), write_two);
  for (const std::string name : {"../outside", "..", "", "/etc/passwd"}) {
    CAPTURE(name);
    // A manifest of this form with its own hash right.
    std::string text = read_file(saved / "manifest.json");
    text.replace(text.find("a.bin"), 5, name);
    text.erase(text.rfind(",\n  \"xxh64\": \""));
    text += "\n}\n";
    detail::Xxh64 hash;
    hash.update(text.data(), text.size());
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash.digest()));
    text.erase(text.size() - 3);
    text += std::string(",\n  \"xxh64\": \"") + digits + "\"\n}\n";
    write_file(saved / "manifest.json", text);
    CHECK(format_error([&] { open_checkpoint(saved); }).find("expected a plain file name") != std::string::npos);
    save_checkpoint(scratch / "root", info_of(1), write_two);
  }
}

TEST_CASE("a failed save leaves what was there, and the next one tidies up", "[io]") {
  const ScratchDirectory scratch;
  save_checkpoint(scratch.path(), info_of(1), write_two);
  const auto full_disk = [](const fs::path&) -> void { throw Error(ErrorKind::kIo, "disk full"); };
  CHECK_THROWS_AS(save_checkpoint(scratch.path(), info_of(1), full_disk), Error);
  CHECK_THROWS_AS(save_checkpoint(scratch.path(), info_of(2), full_disk), Error);
  CHECK(names_below(scratch.path()) == std::vector<std::string>{"checkpoint-1"});
  CHECK_NOTHROW(open_checkpoint(scratch / "checkpoint-1"));

  fs::create_directory(scratch / ".checkpoint-2.tmp");  // as a killed process leaves it
  write_file(scratch / ".checkpoint-2.tmp" / "half", "x");
  fs::create_directory(scratch / ".checkpoint-1.old.tmp");
  CHECK(list_checkpoints(scratch.path()).size() == 1);
  save_checkpoint(scratch.path(), info_of(3), write_two);
  CHECK(names_below(scratch.path()) == std::vector<std::string>{"checkpoint-1", "checkpoint-3"});
}

TEST_CASE("a file size limit is an error, and the old checkpoint of the same step stays", "[io]") {
  const ScratchDirectory scratch;
  save_checkpoint(scratch.path(), info_of(1), write_two);
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{64, 64};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      save_checkpoint(scratch.path(), info_of(1), [](const fs::path&) {});  // the manifest is longer
    } catch (const Error& error) {
      ::_exit(error.kind() == ErrorKind::kIo ? 5 : 6);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 5);
  CHECK(names_below(scratch.path()) == std::vector<std::string>{"checkpoint-1"});
  CHECK_NOTHROW(open_checkpoint(scratch / "checkpoint-1"));
}

TEST_CASE("a save that is killed at any moment leaves a sound checkpoint", "[io]") {
  const ScratchDirectory scratch;
  save_checkpoint(scratch.path(), info_of(1), write_two);
  for (int delay = 0; delay < 40; ++delay) {
    CAPTURE(delay);
    const pid_t child = ::fork();
    if (child == 0) {
      for (std::int64_t step = 1;; ++step) {
        save_checkpoint(scratch.path(), info_of(1 + step % 3), write_two);
        prune_checkpoints(scratch.path(), 1);
      }
    }
    ::usleep(static_cast<useconds_t>(137 * delay));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    const auto checkpoints = list_checkpoints(scratch.path());
    CHECK_FALSE(checkpoints.empty());
    for (const fs::path& checkpoint : checkpoints) CHECK_NOTHROW(open_checkpoint(checkpoint));
  }
}

TEST_CASE("the newest sound checkpoint is found, and damaged newer ones are reported", "[io]") {
  const ScratchDirectory scratch;
  CHECK(format_error([&] { open_newest_checkpoint(scratch.path()); }).find("no checkpoint") != std::string::npos);
  CHECK(format_error([&] { open_newest_checkpoint(scratch / "none"); }).find("no checkpoint") != std::string::npos);
  for (const std::int64_t step : {2, 10, 9}) save_checkpoint(scratch.path(), info_of(step), write_two);
  CHECK(open_newest_checkpoint(scratch.path()).info.step == 10);
  write_file(scratch / "checkpoint-10" / "a.bin", "First file");
  std::vector<std::string> damaged;
  CHECK(open_newest_checkpoint(scratch.path(), [&](const std::string& text) { damaged.push_back(text); }).info.step ==
        9);
  REQUIRE(damaged.size() == 1);
  CHECK(damaged[0].find("checkpoint-10/a.bin") != std::string::npos);
}

TEST_CASE("pruning keeps the newest checkpoints and the best one", "[io]") {
  const ScratchDirectory scratch;
  for (const std::int64_t step : {1, 2, 3, 4, 11}) {
    CheckpointInfo info = info_of(step);
    if (step < 4) info.eval_loss = step == 2 ? 0.5 : 1.5;
    save_checkpoint(scratch.path(), info, write_two);
  }
  prune_checkpoints(scratch.path(), 2);
  CHECK(names_below(scratch.path()) == std::vector<std::string>{"checkpoint-11", "checkpoint-2", "checkpoint-4"});
  prune_checkpoints(scratch.path(), 5);
  CHECK(list_checkpoints(scratch.path()).size() == 3);
  CHECK_THROWS_AS(prune_checkpoints(scratch.path(), 0), Error);
}

TEST_CASE("a changed, new or missing part of an identity is named", "[io]") {
  const std::map<std::string, std::string> saved = {{"base_model", "1"}, {"data", "2"}, {"seed", "3"}};
  std::map<std::string, std::string> now = saved;
  CHECK(changed_identity(saved, now).empty());
  now["data"] = "4";
  now["seed"] = "5";
  CHECK(changed_identity(saved, now) == "data");
  CHECK(changed_identity(saved, now, [](const std::string& name) { return name == "data"; }) == "seed");
  now = saved;
  now["alpha"] = "1";
  CHECK(changed_identity(saved, now) == "alpha");
  now = saved;
  now.erase("seed");
  CHECK(changed_identity(saved, now) == "seed");
}

TEST_CASE("a fingerprint tells contents and names of files apart", "[io]") {
  const ScratchDirectory scratch;
  write_file(scratch / "a", "12");
  write_file(scratch / "b", "34");
  write_file(scratch / "c", "12");
  CHECK(fingerprint_of_file(scratch / "a") == fingerprint_of_file(scratch / "c"));
  CHECK(fingerprint_of_file(scratch / "a") != fingerprint_of_file(scratch / "b"));
  CHECK(fingerprint_of_files({scratch / "a", scratch / "b"}) != fingerprint_of_files({scratch / "c", scratch / "b"}));
  CHECK_THROWS_AS(fingerprint_of_file(scratch / "none"), Error);
}

}  // namespace rowan
