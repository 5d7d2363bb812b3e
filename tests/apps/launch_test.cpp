// `rowan … --ranks N` as a user meets it: results, failures, and what is left behind.
#include <dirent.h>
#include <signal.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "support/files.h"
#include "support/ranks.h"

namespace rowan::test {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSoon{30000};

std::vector<std::string> demo(const std::filesystem::path& out, int steps, const std::vector<std::string>& more) {
  std::vector<std::string> command{
      ROWAN_TEST_PROGRAM,    "demo",         "--device", "cpu", "--out", out.string(), "--pretrain-steps",
      std::to_string(steps), "--tune-steps", "2"};
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

const Processes::Environment kOneThread = {{"OMP_NUM_THREADS", "1"}};

/// Processes whose command line holds `text`.
std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (read_file(entry.path() / "cmdline").find(text) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

/// The ranks' processes, by rank, once all have started: those of `launcher`'s command line that are not itself.
std::vector<pid_t> ranks_of(const std::string& text, pid_t launcher, std::size_t ranks) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::vector<pid_t> found(ranks, 0);
    std::size_t count = 0;
    for (const pid_t pid : processes_with(text)) {
      const std::string variables = read_file("/proc/" + std::to_string(pid) + "/environ");
      const std::size_t at = variables.find(std::string(1, '\0') + "RANK=");
      if (pid == launcher || at == std::string::npos) continue;
      const auto rank = static_cast<std::size_t>(std::stoi(variables.substr(at + 6)));
      if (rank < ranks && found[rank] == 0) {
        found[rank] = pid;
        ++count;
      }
    }
    if (count == ranks) return found;
    std::this_thread::sleep_for(milliseconds(10));
  }
  FAIL("the ranks did not start");
  return {};
}

/// Nothing of the run is left after a moment.
bool all_gone(const std::string& text) {
  for (int attempt = 0; attempt < 500; ++attempt) {
    if (processes_with(text).empty()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

nlohmann::json last_json(const std::string& output) {
  const std::size_t end = output.find_last_not_of('\n');
  const std::size_t begin = output.find_last_of('\n', end);
  return nlohmann::json::parse(output.substr(begin == std::string::npos ? 0 : begin + 1));
}

}  // namespace

TEST_CASE("rowan demo on two ranks gives the losses of one, and the same files", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const std::size_t one = processes.start(demo(scratch / "one", 3, {"--json"}), kOneThread);
  const auto alone = processes.wait(one, milliseconds(120000));
  CAPTURE(alone.output);
  REQUIRE(alone.status == 0);
  const std::size_t two = processes.start(demo(scratch / "two", 3, {"--json", "--ranks", "2"}), kOneThread);
  const auto together = processes.wait(two, milliseconds(120000));
  CAPTURE(together.output);
  REQUIRE(together.status == 0);
  const auto expected = last_json(alone.output), got = last_json(together.output);
  CHECK(got.at("ranks") == 2);
  for (const char* loss : {"base_loss", "tuned_loss", "base_loss_style1", "tuned_loss_style1"}) {
    CAPTURE(loss);
    CHECK(std::abs(got.at(loss).get<double>() - expected.at(loss).get<double>()) <
          1e-3 * expected.at(loss).get<double>());
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch / "one")) {
    const auto name = std::filesystem::relative(entry.path(), scratch / "one");
    CAPTURE(name.string());
    CHECK(std::filesystem::exists(scratch / "two" / name));
  }
}

TEST_CASE("when a rank is killed the launcher's status is its signal's, the others name it, and nothing is left",
          "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const std::string out = (scratch / "run").string();
  const std::size_t launcher = processes.start(demo(out, 600, {"--ranks", "3"}), kOneThread);
  REQUIRE(processes.says(launcher, "pretrain", kSoon));
  kill(ranks_of(out, processes.pid(launcher), 3)[1], SIGKILL);
  const auto outcome = processes.wait(launcher, kSoon);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 128 + SIGKILL);
  CHECK(outcome.output.find("rank 1 was ended by signal 9") != std::string::npos);
  CHECK(outcome.output.find("rank 1 ended, its connection is closed") != std::string::npos);
  CHECK(all_gone(out));
}

TEST_CASE("when a rank is stopped the others end at --comm-timeout, and the launcher ends it", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const std::string out = (scratch / "run").string();
  const std::size_t launcher = processes.start(demo(out, 600, {"--ranks", "2", "--comm-timeout", "3"}), kOneThread);
  REQUIRE(processes.says(launcher, "pretrain", kSoon));
  kill(ranks_of(out, processes.pid(launcher), 2)[1], SIGSTOP);
  const auto outcome = processes.wait(launcher, kSoon);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 1);
  CHECK(outcome.output.find("rank 0: communicator: rank 1 stopped") != std::string::npos);
  CHECK(all_gone(out));
}

TEST_CASE("when the launcher is killed no rank is left", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const std::string out = (scratch / "run").string();
  const std::size_t launcher = processes.start(demo(out, 600, {"--ranks", "2"}), kOneThread);
  REQUIRE(processes.says(launcher, "pretrain", kSoon));
  ranks_of(out, processes.pid(launcher), 2);
  kill(processes.pid(launcher), SIGKILL);
  processes.wait(launcher, kSoon);
  CHECK(all_gone(out));
}

TEST_CASE("the launcher passes signals on, and its status is the interrupted rank's", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const std::string out = (scratch / "run").string();
  const std::size_t launcher = processes.start(demo(out, 600, {"--ranks", "2"}), kOneThread);
  REQUIRE(processes.says(launcher, "pretrain", kSoon));
  kill(processes.pid(launcher), SIGTERM);
  const auto outcome = processes.wait(launcher, kSoon);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 128 + SIGTERM);
  CHECK(all_gone(out));
}

TEST_CASE("a rank's usage error is the launcher's status", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  auto command = demo(scratch / "run", 2, {"--ranks", "2"});
  command[3] = "cuda:99";
  const auto outcome = processes.wait(processes.start(command, kOneThread), kSoon);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 2);
  CHECK(outcome.output.find("rank 0: ") != std::string::npos);
}

TEST_CASE("rowan is a rank where torchrun or mpirun started it", "[dist]") {
  const ScratchDirectory scratch;
  const std::string port = std::to_string(free_port());
  const auto check = [&](const std::string& name, const std::function<Processes::Environment(std::string)>& of_rank) {
    Processes processes;
    std::vector<std::size_t> ranks;
    for (const char* rank : {"0", "1"}) ranks.push_back(processes.start(demo(scratch / name, 2, {}), of_rank(rank)));
    for (const std::size_t rank : ranks) {
      const auto outcome = processes.wait(rank, milliseconds(120000));
      CAPTURE(name, outcome.output);
      CHECK(outcome.status == 0);
    }
    CHECK(read_file(scratch / name / "config.json").find("\"ranks\": 2") != std::string::npos);
  };
  check("torchrun", [&](const std::string& rank) {
    return Processes::Environment{{"RANK", rank},        {"WORLD_SIZE", "2"},
                                  {"LOCAL_RANK", rank},  {"MASTER_ADDR", "localhost"},
                                  {"MASTER_PORT", port}, {"OMP_NUM_THREADS", "1"}};
  });
  check("mpirun", [&](const std::string& rank) {
    return Processes::Environment{
        {"OMPI_COMM_WORLD_RANK", rank},      {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"MASTER_PORT", port},         {"OMP_NUM_THREADS", "1"}};
  });
}

TEST_CASE("the option ranks starts ranks inside a job of one task, too", "[dist]") {
  const ScratchDirectory scratch;
  Processes processes;
  const auto outcome = processes.wait(
      processes.start(demo(scratch / "run", 2, {"--ranks", "2"}),
                      {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"OMP_NUM_THREADS", "1"}}),
      milliseconds(120000));
  CAPTURE(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(read_file(scratch / "run/config.json").find("\"ranks\": 2") != std::string::npos);
}

TEST_CASE("rowan info plans split weights for a row of rank counts") {
  Processes processes;
  const auto info = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command{ROWAN_TEST_PROGRAM, "info"};
    command.insert(command.end(), more.begin(), more.end());
    return processes.wait(processes.start(command, {}), kSoon);
  };
  const auto table = info({"--plan", "14336,16", "--count", "224", "--ranks", "8..4096"});
  CHECK(table.status == 0);
  for (const char* ranks : {"\n     8  ", "\n  4096  "}) CHECK(table.output.find(ranks) != std::string::npos);
  CHECK(table.output.find("gram\n") != std::string::npos);
  CHECK(info({"--plan", "4096,4096,8", "--count", "64"}).output.find("owner\n") != std::string::npos);
  for (const char* bad : {"4096", "4096,0,8", "4096,4096,x", "1,2,3,4", ""}) {
    CAPTURE(bad);
    CHECK(info({"--plan", bad}).status == (std::string(bad).empty() ? 0 : 2));
  }
  CHECK(info({"--ranks", "8..16"}).status == 2);
}

}  // namespace rowan::test
