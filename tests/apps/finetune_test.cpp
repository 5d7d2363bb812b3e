// rowan finetune as a user meets it: files, exit status, going on after any end.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/io/checkpoint.h"
#include "rowan/io/token_rows.h"
#include "rowan/train/metrics.h"
#include "support/device.h"
#include "support/files.h"
#include "support/program.h"

namespace rowan {

namespace fs = std::filesystem;
using nlohmann::json;
using test::last_line;
using test::Outcome;
using test::read_file;

namespace {

/// A model of the test data, rows of a rule that can be learned, and a place for runs.
class Bench {
 public:
  explicit Bench(const std::string& family = "llama", const std::string& device = "cpu")
      : model_(test::data_path("models/" + family)), device_(device) {
    REQUIRE(test::program_is_built());
    write_token_rows(path("train.jsonl"), rows(24, 0));
    write_token_rows(path("eval.jsonl"), rows(6, 3));
  }

  static std::vector<TokenRow> rows(int count, int first) {
    std::vector<TokenRow> all;
    for (std::int32_t r = first; r < first + count; ++r) {
      TokenRow row;
      std::int32_t token = (11 * r) % 64;
      for (std::int32_t i = 0; i < 6 + (7 * r) % 11; ++i, token = (5 * token + 3) % 64) {
        row.input_ids.push_back(token);
        row.labels.push_back(i < 2 ? -100 : token);
      }
      all.push_back(row);
    }
    return all;
  }

  fs::path path(const std::string& name) const { return scratch_ / name; }
  std::string quoted(const std::string& name) const { return "'" + path(name).string() + "'"; }
  std::string model() const { return "'" + model_.string() + "'"; }

  /// The command line of a run in directory `out`.
  std::string command(const std::string& out, const std::string& options) const {
    return test::program() + " finetune --json --device " + device_ + " --model " + model() + " --data " +
           quoted("train.jsonl") + " --out " + quoted(out) + " " + options;
  }
  Outcome run(const std::string& out, const std::string& options) const {
    return test::run_command(scratch_, command(out, options));
  }
  Outcome shell(const std::string& text) const { return test::run_command(scratch_, text); }
  /// The last line of a run that must succeed.
  json done(const std::string& out, const std::string& options) const {
    const Outcome outcome = run(out, options);
    CAPTURE(options, outcome.out, outcome.err);
    REQUIRE(outcome.status == 0);
    CHECK(outcome.err.empty());
    return json::parse(last_line(outcome.out));
  }
  double eval(const std::string& data, const std::string& options) const {
    const Outcome outcome =
        test::run_program(scratch_, "eval --json --device " + device_ + " --data " + quoted(data) + " " + options);
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return json::parse(last_line(outcome.out)).at("loss").get<double>();
  }
  fs::path checkpoint(const std::string& out, int step) const {
    return path(out) / "checkpoints" / ("checkpoint-" + std::to_string(step));
  }
  std::vector<double> losses(const std::string& out) const {
    std::vector<double> found;
    for (const MetricRecord& record : read_metrics(path(out) / "metrics.jsonl")) {
      for (const auto& [name, value] : record) {
        if (name == "loss") found.push_back(std::get<double>(value));
      }
    }
    return found;
  }

 private:
  test::ScratchDirectory scratch_;
  fs::path model_;
  std::string device_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Options under which everything that a checkpoint keeps matters.
const char* const kEverything =
    "--max-steps 8 --save-steps 2 --packing --batch-size 2 --max-length 20 --grad-accum 2 "
    "--lora-dropout 0.2 --lr-scheduler cosine --warmup-steps 2 --learning-rate 0.01";

void check_same_run(const Bench& bench, const std::string& a, const std::string& b, int step,
                    const std::string& result) {
  CHECK(bench.losses(a) == bench.losses(b));
  CHECK(read_file(bench.checkpoint(a, step) / "manifest.json") ==
        read_file(bench.checkpoint(b, step) / "manifest.json"));
  CHECK(read_file(bench.path(a) / result) == read_file(bench.path(b) / result));
  CHECK_FALSE(read_file(bench.path(a) / result).empty());
}

/// A run to the end, and one whose process goes on from the checkpoint of half of its steps.
void check_two_halves(const Bench& bench, const std::string& options, const std::string& result) {
  bench.done("straight", options);
  fs::create_directories(bench.path("halves") / "checkpoints");
  fs::copy(bench.checkpoint("straight", 4), bench.checkpoint("halves", 4));
  std::string metrics;  // of the killed run: some steps beyond its checkpoint
  for (int line = 0; line < 6; ++line) metrics += "{\"step\":" + std::to_string(line + 1) + ",\"loss\":0.5}\n";
  test::write_file(bench.path("halves") / "metrics.jsonl", metrics);
  bench.done("halves", options + " --resume latest");
  std::vector<double> losses = bench.losses("straight");
  std::fill(losses.begin(), losses.begin() + 4, 0.5);
  CHECK(bench.losses("halves") == losses);
  CHECK(read_file(bench.checkpoint("straight", 8) / "manifest.json") ==
        read_file(bench.checkpoint("halves", 8) / "manifest.json"));
  CHECK(read_file(bench.path("straight") / result) == read_file(bench.path("halves") / result));
}

}  // namespace

TEST_CASE("rowan finetune trains an adapter, keeps the best one, and leaves a run directory", "[finetune]") {
  const Bench bench;
  const json result = bench.done(
      "run", "--eval-data " + bench.quoted("eval.jsonl") +
                 " --epochs 5 --batch-size 4 --learning-rate 0.02 --save-steps 10 --eval-steps 6 --save-total-limit 1");
  CHECK(result.at("end") == "done");
  CHECK(result.at("steps") == 30);
  for (const char* file : {"config.json", "metrics.jsonl", "loss.svg", "adapter/adapter_config.json",
                           "best-adapter/adapter_model.safetensors", "checkpoints/checkpoint-30/manifest.json"}) {
    CAPTURE(file);
    CHECK(fs::exists(bench.path("run") / file));
  }
  CHECK_FALSE(fs::is_empty(bench.path("run") / "tensorboard"));
  CHECK(list_checkpoints(bench.path("run") / "checkpoints").size() <= 2);
  const std::string base = "--model " + bench.model(), adapter = base + " --adapter " + bench.quoted("run/adapter");
  CHECK(bench.eval("train.jsonl", adapter) < bench.eval("train.jsonl", base) - 0.5);
  CHECK(std::abs(bench.eval("eval.jsonl", adapter) - result.at("eval_loss").get<double>()) < 1e-6);
  CHECK(std::abs(bench.eval("eval.jsonl", base + " --adapter " + bench.quoted("run/best-adapter")) -
                 result.at("best_eval_loss").get<double>()) < 1e-6);
  // A checkpoint is itself an adapter.
  CHECK(std::abs(bench.eval("eval.jsonl", base + " --adapter " + bench.quoted("run/checkpoints/checkpoint-30")) -
                 result.at("eval_loss").get<double>()) < 1e-6);
}

TEST_CASE("two halves of a run in two processes equal the run, bit for bit, in every family", "[finetune]") {
  for (const char* family : {"llama", "mistral", "qwen2", "qwen3"}) {
    CAPTURE(family);
    check_two_halves(Bench(family), kEverything, "adapter/adapter_model.safetensors");
  }
  check_two_halves(Bench("qwen3"),
                   "--method full --dtype bfloat16 --max-steps 8 --save-steps 4 --batch-size 3 --learning-rate 0.01",
                   "model/model.safetensors");
}

TEST_CASE("two halves of a run in two processes equal the run, bit for bit, on CUDA", "[finetune][gpu]") {
  if (!test::have_gpu()) return;
  check_two_halves(Bench("llama", "cuda"), std::string(kEverything) + " --dtype bfloat16",
                   "adapter/adapter_model.safetensors");
  check_two_halves(Bench("qwen3", "cuda"),
                   "--method full --dtype bfloat16 --max-steps 8 --save-steps 4 --batch-size 3 --learning-rate 0.01",
                   "model/model.safetensors");
}

TEST_CASE("a run that a signal ends saves, says so by its status, and goes on bit for bit", "[finetune]") {
  const Bench bench;
  const std::string options =
      "--max-steps 150 --save-steps 1000 --lora-dropout 0.2 --batch-size 2 --learning-rate 0.01";
  bench.done("straight", options);
  for (const auto& [signal, status] : {std::pair("INT", 130), std::pair("TERM", 143)}) {
    CAPTURE(signal);
    const std::string out = signal;
    const std::string lines = bench.path(out).string() + "/metrics.jsonl";
    const Outcome outcome = bench.shell("{ " + bench.command(out, options) + " & pid=$!; until [ -s '" + lines +
                                        "' ]; do sleep 0.01; done; kill -" + signal + " $pid; wait $pid; }");
    CAPTURE(outcome.out, outcome.err);
    REQUIRE(outcome.status == status);
    CHECK(json::parse(last_line(outcome.out)).at("end") == "interrupted");
    CHECK(outcome.err.empty());
    bench.done(out, options + " --resume latest");
    check_same_run(bench, "straight", out, 150, "adapter/adapter_model.safetensors");
  }
}

TEST_CASE("a run that is killed while it saves goes on from a sound checkpoint, bit for bit", "[finetune]") {
  const Bench bench;
  const std::string options = "--max-steps 26 --save-steps 1 --save-total-limit 2 --lora-dropout 0.2 --batch-size 2";
  bench.done("straight", options);
  for (int kill = 0; kill < 3; ++kill) {
    bench.shell("{ " + bench.command("killed", options + (kill == 0 ? "" : " --resume latest")) +
                " & pid=$!; until [ -d '" + bench.checkpoint("killed", 3 + 7 * kill).string() +
                "' ] || ! kill -0 $pid; do sleep 0.01; done; kill -9 $pid; wait $pid; }");
    CHECK_NOTHROW(open_newest_checkpoint(bench.path("killed") / "checkpoints"));
  }
  bench.done("killed", options + " --resume latest");
  check_same_run(bench, "straight", "killed", 26, "adapter/adapter_model.safetensors");
}

TEST_CASE("rowan finetune on several ranks learns what one rank does from the same batches", "[finetune][dist]") {
  const Bench bench;
  const std::string evaluated = "--eval-data " + bench.quoted("eval.jsonl") + " --eval-steps 3 ";
  for (const std::string method : {"--method lora --learning-rate 0.01", "--method full --learning-rate 0.002"}) {
    CAPTURE(method);
    const std::string full = method.find("full") == std::string::npos ? "" : "full-";
    const std::string options = evaluated + method + " --batch-size 2 --max-steps 8 ";
    const json one = bench.done(full + "one", options + "--grad-accum 6");
    for (const int ranks : {2, 3}) {
      CAPTURE(ranks);
      const std::string out = full + std::to_string(ranks);
      const json several =
          bench.done(out, options + "--grad-accum " + std::to_string(6 / ranks) + " --ranks " + std::to_string(ranks));
      CHECK(several.at("ranks") == ranks);
      CHECK(several.at("tokens") == one.at("tokens"));
      const std::vector<double> expected = bench.losses(full + "one"), got = bench.losses(out);
      REQUIRE(got.size() == 8);
      for (std::size_t i = 0; i < 8; ++i) CHECK(std::abs(got[i] - expected[i]) < 1e-4 * expected[i]);
      CHECK(std::abs(several.at("eval_loss").get<double>() - one.at("eval_loss").get<double>()) < 1e-3);
      const std::string trained =
          "--model " + (full.empty() ? bench.model() + " --adapter " + bench.quoted(out + "/adapter")
                                     : bench.quoted(out + "/model"));
      CHECK(std::abs(bench.eval("eval.jsonl", trained) - several.at("eval_loss").get<double>()) < 1e-6);
      CHECK(std::abs(bench.eval("eval.jsonl", trained + " --ranks " + std::to_string(ranks)) -
                     several.at("eval_loss").get<double>()) < 1e-6);
    }
  }
}

TEST_CASE("a checkpoint of several ranks tells how their state was split", "[finetune][dist]") {
  const Bench bench;
  bench.done("run", "--ranks 3 --max-steps 1 --batch-size 4");
  const Checkpoint checkpoint = open_newest_checkpoint(bench.path("run") / "checkpoints");
  REQUIRE_FALSE(checkpoint.info.shards.empty());
  for (const CheckpointShard& shard : checkpoint.info.shards) {
    CAPTURE(shard.parameter);
    CHECK(shard.global_rows > 0);
    REQUIRE(shard.first_rows.size() == 3);
    CHECK(shard.first_rows[0] == 0);
    CHECK(std::is_sorted(shard.first_rows.begin(), shard.first_rows.end()));
    CHECK(shard.first_rows[2] <= shard.global_rows);
  }
}

TEST_CASE("a run on two ranks goes on bit for bit, on another number of ranks only where that is allowed",
          "[finetune][dist]") {
  const Bench bench;
  const std::string options = std::string(kEverything) + " --grad-accum 1";
  check_two_halves(bench, options + " --ranks 2", "adapter/adapter_model.safetensors");
  fs::remove_all(bench.checkpoint("halves", 8));
  fs::remove_all(bench.checkpoint("halves", 6));
  const Outcome refused = bench.run("halves", options + " --resume latest");
  CHECK(refused.status == 2);
  CHECK(contains(refused.err, "world_size has changed: it was 2, and is now 1 (--allow-world-size"));
  for (const std::string ranks : {"", " --ranks 3"}) {
    CAPTURE(ranks);
    fs::remove_all(bench.checkpoint("halves", 8));
    fs::remove_all(bench.checkpoint("halves", 6));
    const json result = bench.done("halves", options + ranks + " --resume latest --allow-world-size");
    CHECK(result.at("end") == "done");
    CHECK(result.at("steps") == 8);
    CHECK(bench.losses("halves").size() == 8);
  }
}

TEST_CASE("what is wrong on all ranks alike is told once", "[finetune][dist]") {
  const Bench bench;
  test::write_file(bench.path("bad.jsonl"), "{\"input_ids\": [1, 2], \"labels\": [1, 2]}\n{\"input_ids\": [1,}\n");
  const auto check_once = [&](const std::string& command, int status, const std::string& cause) {
    const Outcome outcome = bench.shell(command);
    CAPTURE(command, outcome.err);
    CHECK(outcome.status == status);
    CHECK(contains(outcome.err, cause));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  };
  const std::string ranks = " --ranks 3";
  check_once(bench.command("run", ranks + " --data " + bench.quoted("bad.jsonl")), 3, "bad.jsonl:2: malformed JSON");
  check_once(bench.command("run", ranks + " --batch-size 12"), 3, "expected a batch for each of 3 ranks, got 2");
  check_once(bench.command("run", ranks + " --lora-alpha nan"), 2, "--lora-alpha: expected a finite number");
  check_once(bench.command("run", ranks + " --optimizer adamw --learning-rate 1e30 --max-steps 40"), 1, "not finite");
  check_once(test::program() + " eval --device cpu --ranks 3 --model " + bench.model() + " --data " +
                 bench.quoted("bad.jsonl"),
             3, "bad.jsonl:2: malformed JSON");
  bench.done("held", "--max-steps 1");
  for (int i = 0; i < 5; ++i)  // only rank 0 fails by itself
    check_once(
        "flock " + bench.quoted("held/.lock") + " " + bench.command("held", ranks + " --max-steps 2 --resume latest"),
        2, "another run writes to");
  check_once(test::program() + " eval --device cpu --ranks 2 --model /no/such --data " + bench.quoted("train.jsonl"), 3,
             "/no/such/config.json");
}

TEST_CASE("a signal to the launcher ends a run on two ranks after saving, and it goes on bit for bit",
          "[finetune][dist]") {
  const Bench bench;
  const std::string options = "--ranks 2 --max-steps 60 --save-steps 1000 --batch-size 2 --learning-rate 0.01";
  bench.done("straight", options);
  const std::string lines = bench.path("ended").string() + "/metrics.jsonl";
  const Outcome outcome = bench.shell("{ " + bench.command("ended", options) + " & pid=$!; until [ -s '" + lines +
                                      "' ]; do sleep 0.01; done; kill -TERM $pid; wait $pid; }");
  CAPTURE(outcome.out, outcome.err);
  REQUIRE(outcome.status == 143);
  CHECK(json::parse(last_line(outcome.out)).at("end") == "interrupted");
  bench.done("ended", options + " --resume latest");
  check_same_run(bench, "straight", "ended", 60, "adapter/adapter_model.safetensors");
}

TEST_CASE("a signal to one rank ends all with its status", "[finetune][dist]") {
  const Bench bench;
  const std::string options = "--ranks 2 --max-steps 4000 --save-steps 100000 --batch-size 2";
  const std::string lines = bench.path("run").string() + "/metrics.jsonl";
  for (const char* child : {"$1", "$2"}) {
    fs::remove_all(bench.path("run"));
    const Outcome outcome =
        bench.shell("{ " + bench.command("run", options) + " & pid=$!; until [ -s '" + lines +
                    "' ]; do sleep 0.01; done; set -- $(cat /proc/$pid/task/$pid/children); kill -TERM " + child +
                    "; wait $pid; }");
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.status == 143);
  }
}

TEST_CASE("damaged checkpoints are passed over, or refused with status 3", "[finetune]") {
  const Bench bench;
  bench.done("run", kEverything);
  const auto damage = [&](int step) {
    const fs::path file = bench.checkpoint("run", step) / "optimizer.safetensors";
    std::string content = read_file(file);
    content[content.size() / 2] = static_cast<char>(content[content.size() / 2] ^ 1);
    test::write_file(file, content);
  };
  damage(8);
  const std::string loud = bench.command("run", std::string(kEverything) + " --resume latest");
  const Outcome passed = bench.shell("{ " + loud + "; }");
  CHECK(passed.status == 0);
  CHECK_NOTHROW(open_checkpoint(bench.checkpoint("run", 8)));  // made again
  damage(6);
  const Outcome named =
      bench.run("run", std::string(kEverything) + " --resume " + bench.quoted("run/checkpoints/checkpoint-6"));
  CHECK(named.status == 3);
  CHECK(contains(named.err, "checkpoint-6/optimizer.safetensors"));
  for (const int step : {2, 4, 8}) damage(step);
  const Outcome none = bench.run("run", std::string(kEverything) + " --resume latest");
  CHECK(none.status == 3);
  CHECK(contains(none.err, "none of its checkpoints is sound"));
  CHECK(bench.run("empty", "--resume latest").status == 3);
}

TEST_CASE("a resumed run with another model, data or configuration is refused by name", "[finetune]") {
  const Bench bench;
  bench.done("run", "--max-steps 2 --batch-size 2");
  const auto refused = [&](const std::string& options, int status, const std::string& text) {
    CAPTURE(options);
    const Outcome outcome = bench.run("run", "--max-steps 2 --batch-size 2 --resume latest " + options);
    CHECK(outcome.status == status);
    CHECK(contains(outcome.err, text));
  };
  refused("--learning-rate 1", 2, "learning_rate has changed: it was 0.0003, and is now 1.0 (--allow-config-change");
  refused("--lora-r 4 --allow-config-change", 2, "lora_r has changed");
  refused("--optimizer adamw", 2, "optimizer has changed");
  refused("--data " + bench.quoted("eval.jsonl"), 3, "data has changed");
  fs::copy(test::data_path("models/llama"), bench.path("model"), fs::copy_options::recursive);
  std::string weights = read_file(bench.path("model") / "model.safetensors");
  weights.back() = static_cast<char>(weights.back() ^ 1);
  test::write_file(bench.path("model") / "model.safetensors", weights);
  refused("--allow-config-change --allow-data-change --model " + bench.quoted("model"), 3, "base_model has changed");
  refused("--method full", 2, "has changed");
  // What is allowed goes on.
  CHECK(bench.done("run", "--max-steps 4 --batch-size 2 --resume latest --allow-config-change").at("steps") == 4);
  CHECK(bench
            .done("run", "--max-steps 4 --batch-size 2 --resume latest --allow-data-change --data " +
                             bench.quoted("eval.jsonl"))
            .at("steps") == 4);
  const Outcome again = bench.run("run", "--max-steps 2");
  CHECK(again.status == 2);
  CHECK(contains(again.err, "checkpoints of another run"));
}

TEST_CASE("options that would do nothing, or that no run can have, end with status 2", "[finetune]") {
  const Bench bench;
  const auto refused = [&](const std::string& options, const std::string& named) {
    CAPTURE(options);
    const Outcome outcome = bench.run("run", options);
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(contains(outcome.err, named));
    CHECK_FALSE(fs::exists(bench.path("run") / "checkpoints"));
  };
  for (const char* option :
       {"--lora-r 4", "--lora-alpha 4", "--lora-dropout 0.1", "--use-rslora", "--target-modules q_proj"})
    refused(std::string("--method full ") + option, "with --method full");
  refused("--eval-steps 3", "--eval-data");
  refused("--early-stopping-patience 3", "--eval-data");
  refused("--allow-config-change", "--resume");
  refused("--adapter x --lora-r 4", "--lora-r");
  refused("--chat-template chatml", "--chat-template");
  refused("--mask-prompts", "--mask-prompts");
  refused("--max-length 100000", "--max-length");
  refused("--target-modules q_proj,nothing", "nothing");
  refused("--warmup-steps 1000", "warmup");
  refused("--lr-scheduler step", "step");
  refused("--optimizer sgd", "sgd");
  refused("--optimizer-groups '[{\"roles\": [\"head\"]}]'", "takes no trainable parameter");
  refused("--optimizer-groups '[{\"rolls\": []}]'", "rolls");
  refused("--optimizer-groups '[{\"beta1\": 2}]'", "beta1");
  refused("--config " + bench.quoted("none.json"), "none.json");
  refused("--batch-size 0", "batch-size: expected a whole number from 1");
  refused("--epochs 9223372036854775807", "epochs: expected a whole number");
  refused("--learning-rate nan", "learning-rate: expected a number");
  refused("--lora-alpha 0", "lora-alpha");
  refused("--comm-timeout nan", "comm-timeout");
  refused("--max-steps 0", "max-steps");
}

TEST_CASE("a run never takes the place of its inputs, of something foreign, or of another run", "[finetune]") {
  const Bench bench;
  fs::copy(test::data_path("models/llama"), bench.path("model"), fs::copy_options::recursive);
  const std::string config = read_file(bench.path("model") / "config.json");
  const auto refused = [&](const std::string& out, const std::string& options, const std::string& named) {
    CAPTURE(out, options);
    const Outcome outcome = bench.run(out, options);
    CAPTURE(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(contains(outcome.err, named));
  };
  refused("model", "--model " + bench.quoted("model"), "holds --model");
  refused("model", "", "holds a model or an adapter");
  refused("", "--model " + bench.quoted("model"), "holds --model");
  CHECK(read_file(bench.path("model") / "config.json") == config);
  fs::create_directories(bench.path("foreign"));
  test::write_file(bench.path("foreign/config.json"), "{\"name\": 1}");
  refused("foreign", "", "config.json that is not a run's");

  bench.done("run", "--max-steps 1");
  refused("run", "--adapter " + bench.quoted("run/adapter"), "holds --adapter");
  const Outcome beside =
      bench.shell("flock " + bench.quoted("run/.lock") + " " + bench.command("run", "--max-steps 2 --resume latest"));
  CAPTURE(beside.err);
  CHECK(beside.status == 2);
  CHECK(contains(beside.err, "another run writes to"));
  refused("fresh", "--resume " + bench.quoted("run/checkpoints/checkpoint-1") + " --max-steps 1 --lora-r 4",
          "lora_r has changed");
  CHECK_FALSE(fs::exists(bench.path("fresh")));
  CHECK(bench.run("none", "--resume latest").status == 3);
  CHECK_FALSE(fs::exists(bench.path("none")));
}

TEST_CASE("a run says which rows it cut or left out", "[finetune]") {
  const Bench bench;
  test::write_file(bench.path("mixed.jsonl"),
                   "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, 3]}\n"
                   "{\"input_ids\": [1, 2], \"labels\": [-100, -100]}\n");
  const json line = bench.done("run", "--max-steps 1 --max-length 4 --data " + bench.quoted("mixed.jsonl"));
  CHECK(line.at("cut_rows") == 1);
  CHECK(line.at("left_out_rows") == 1);
  const Outcome none = bench.run("none", "--max-length 1");
  CHECK(none.status == 3);
  CHECK(contains(none.err, "expected a row with a label that counts"));
}

TEST_CASE("bad data and models end with status 3, and an unwritable place or a full disk with status 1", "[finetune]") {
  const Bench bench;
  test::write_file(bench.path("bad.jsonl"), "{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, \"x\"]}\n");
  const Outcome bad = bench.run("run", "--data " + bench.quoted("bad.jsonl"));
  CHECK(bad.status == 3);
  CHECK(contains(bad.err, "bad.jsonl:2"));
  test::write_file(bench.path("large.jsonl"), "{\"input_ids\": [1, 2, 100000]}\n");
  CHECK(contains(bench.run("run", "--data " + bench.quoted("large.jsonl")).err, "vocab_size"));
  test::write_file(bench.path("ignored.jsonl"), "{\"input_ids\": [1, 2], \"labels\": [-100, -100]}\n");
  CHECK(bench.run("run", "--data " + bench.quoted("ignored.jsonl")).status == 3);
  CHECK(bench.run("run", "--model " + bench.quoted("none")).status == 3);
  CHECK(bench.run("run", "--adapter " + bench.quoted("none")).status == 3);
  CHECK(bench.run("train.jsonl/run", "").status == 1);
  // The second checkpoint meets the limit; the first stays.
  bench.done("run", "--max-steps 1");
  const Outcome full =
      bench.shell("ulimit -f 8; " + bench.command("run", "--max-steps 3 --resume latest --allow-config-change"));
  CHECK(full.status == 1);
  CHECK(contains(full.err, "checkpoint-3"));
  CHECK(open_newest_checkpoint(bench.path("run") / "checkpoints").info.step == 1);
}

TEST_CASE("a loss that is not finite ends a run with status 1 and leaves the checkpoint before", "[finetune]") {
  const Bench bench;
  const Outcome outcome =
      bench.run("run", "--max-steps 50 --save-steps 1 --learning-rate 1e30 --optimizer adamw --lr-scheduler constant");
  CHECK(outcome.status == 1);
  CHECK(contains(outcome.err, "not finite"));
  CHECK(contains(outcome.err, list_checkpoints(bench.path("run") / "checkpoints").back().string()));
  for (const fs::path& checkpoint : list_checkpoints(bench.path("run") / "checkpoints"))
    CHECK_NOTHROW(open_checkpoint(checkpoint));
}

TEST_CASE("a dry run states parameters and memory and writes nothing; the run then uses that much", "[finetune]") {
  const Bench bench;
  for (const std::string options :
       {"--batch-size 8", "--batch-size 4 --recompute --lora-r 3", "--method full --dtype bfloat16"}) {
    CAPTURE(options);
    const json plan = bench.done("run", options + " --dry-run");
    CHECK_FALSE(fs::exists(bench.path("run")));
    const json run = bench.done("run", options + " --max-steps 2");
    CHECK(plan.at("trainable_parameters") == run.at("trainable_parameters"));
    const auto estimate = plan.at("memory_estimate_bytes").get<double>(),
               used = run.at("memory_peak_bytes").get<double>();
    CAPTURE(estimate, used);
    CHECK(std::abs(estimate / used - 1) < 0.1);
    fs::remove_all(bench.path("run"));
  }
}

TEST_CASE("a configuration file gives options, flags beside it win, and the run's own file repeats the run",
          "[finetune]") {
  const Bench bench;
  test::write_file(bench.path("config.json"),
                   "{\"lora_r\": 2, \"target_modules\": [\"q_proj\", \"v_proj\"], \"max-steps\": 3, \"packing\": true, "
                   "\"batch_size\": 2, \"max_length\": 20, \"optimizer_groups\": [{\"roles\": [\"lora_b\"], "
                   "\"learning_rate_scale\": 4}]}");
  bench.done("a", "--config " + bench.quoted("config.json") + " --max-steps 2");
  const json resolved = json::parse(read_file(bench.path("a") / "config.json"));
  CHECK(resolved.at("max_steps") == 2);
  CHECK(resolved.at("lora_r") == 2);
  CHECK(resolved.at("packing") == true);
  const json adapter = json::parse(read_file(bench.path("a") / "adapter" / "adapter_config.json"));
  CHECK(adapter.at("r") == 2);
  CHECK(adapter.at("target_modules") == json::array({"q_proj", "v_proj"}));
  bench.done("b", "--config " + bench.quoted("a/config.json") + " --out " + bench.quoted("b"));
  check_same_run(bench, "a", "b", 2, "adapter/adapter_model.safetensors");
  test::write_file(bench.path("config.json"), "{\"lora_rank\": 2}");
  const Outcome unknown = bench.run("c", "--config " + bench.quoted("config.json"));
  CHECK(unknown.status == 2);
  CHECK(contains(unknown.err, "lora-rank"));
}

TEST_CASE("an adapter goes on from where it was trained to", "[finetune]") {
  const Bench bench;
  bench.done("first", "--max-steps 20 --batch-size 4 --learning-rate 0.02 --use-rslora --lora-r 4");
  const double before = bench.losses("first").back();
  const json second = bench.done(
      "second", "--max-steps 1 --batch-size 24 --learning-rate 0 --adapter " + bench.quoted("first/adapter"));
  CHECK(std::abs(second.at("loss").get<double>() - before) < 0.5);
  CHECK(second.at("loss").get<double>() < bench.losses("first").front() - 0.5);
  CHECK(read_file(bench.path("second") / "adapter" / "adapter_model.safetensors") ==
        read_file(bench.path("first") / "adapter" / "adapter_model.safetensors"));
  CHECK(json::parse(read_file(bench.path("second") / "adapter" / "adapter_config.json")).at("use_rslora") == true);
}

TEST_CASE("texts are tokenized with the model's tokenizer, prompts masked when asked", "[finetune]") {
  const Bench bench;
  fs::copy(test::data_path("models/llama"), bench.path("model"), fs::copy_options::recursive);
  // A byte-level tokenizer of 256 tokens and an end.
  json vocabulary;
  for (int byte = 0, other = 256; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int point = printable ? byte : other++;
    const std::string letter =
        point < 128 ? std::string(1, static_cast<char>(point))
                    : std::string{static_cast<char>(0xc0 | (point >> 6)), static_cast<char>(0x80 | (point & 63))};
    vocabulary[letter] = byte;
  }
  const json end = {{"id", 256},       {"content", "<end>"},  {"single_word", false}, {"lstrip", false},
                    {"rstrip", false}, {"normalized", false}, {"special", true}};
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  vocabulary["<end>"] = 256;
  const json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", {end}},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", byte_level},
                          {"post_processor", nullptr},
                          {"decoder", byte_level},
                          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}}};
  test::write_file(bench.path("model") / "tokenizer.json", tokenizer.dump());
  test::write_file(bench.path("model") / "tokenizer_config.json", "{\"eos_token\": \"<end>\"}");
  test::write_file(bench.path("train.jsonl"), "{\"prompt\": \"two and two\", \"completion\": \" is four\"}\n");
  const std::string options = "--max-steps 1 --method full --model " + bench.quoted("model");
  CHECK(bench.done("whole", options).at("tokens") == 20);
  CHECK(bench.losses("whole") != (bench.done("masked", options + " --mask-prompts"), bench.losses("masked")));
  CHECK(read_file(bench.path("whole") / "model" / "tokenizer.json") == tokenizer.dump());
}

TEST_CASE("all weights are trained into a model that rowan eval reads", "[finetune]") {
  const Bench bench;
  bench.done("run", "--method full --epochs 8 --batch-size 4 --learning-rate 0.005 --optimizer adamw");
  CHECK(bench.eval("train.jsonl", "--model " + bench.quoted("run/model")) <
        bench.eval("train.jsonl", "--model " + bench.model()) - 0.5);
}

TEST_CASE("ten steps of AdamW have the same losses however a step is split", "[finetune]") {
  const Bench bench;
  const std::string options = "--optimizer adamw --max-steps 10 --learning-rate 0.003 ";
  bench.done("whole", options + "--batch-size 4");
  bench.done("split", options + "--batch-size 2 --grad-accum 2");
  bench.done("recomputed", options + "--batch-size 1 --grad-accum 4 --recompute");
  const std::vector<double> expected = bench.losses("whole");
  REQUIRE(expected.size() == 10);
  for (const char* other : {"split", "recomputed"}) {
    const std::vector<double> losses = bench.losses(other);
    REQUIRE(losses.size() == 10);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      CAPTURE(other, i);
      CHECK(std::abs(losses[i] - expected[i]) < 1e-4 * expected[i]);
    }
  }
}

TEST_CASE("a run stops early where its evaluations stop improving", "[finetune]") {
  const Bench bench;
  write_token_rows(bench.path("noise.jsonl"),
                   std::vector<TokenRow>{{{9, 60, 1, 33, 2, 2, 47}, {9, 60, 1, 33, 2, 2, 47}}});
  const json result =
      bench.done("run", "--max-steps 200 --eval-steps 2 --early-stopping-patience 2 --learning-rate 0.05 --eval-data " +
                            bench.quoted("noise.jsonl"));
  CHECK(result.at("end") == "stopped early");
  CHECK(result.at("steps") < 200);
  CHECK(result.at("best_eval_loss") < result.at("eval_loss"));
}

}  // namespace rowan
