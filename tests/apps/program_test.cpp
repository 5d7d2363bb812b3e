// The program as a user meets it: output, files, exit status.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "catch.h"
#include "rowan/core/device.h"
#include "support/files.h"
#include "support/program.h"

namespace rowan {

using test::last_line;
using test::Outcome;
using test::program_is_built;
using test::run_program;

TEST_CASE("rowan demo writes its files, ends with one line of JSON, and repeats its bits") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const std::string options = "demo --json --device cpu --pretrain-steps 3 --tune-steps 2 --seed 7 --out '";
  const Outcome first = run_program(scratch, options + (scratch / "a").string() + "'");
  CAPTURE(first.err);
  REQUIRE(first.status == 0);
  CHECK(first.err.empty());
  const auto line = nlohmann::json::parse(last_line(first.out));
  for (const char* key : {"base_loss", "tuned_loss", "entropy", "seconds"}) {
    CAPTURE(key);
    CHECK(line.at(key).get<double>() > 0);
  }
  CHECK(line.at("optimizer") == "muown");
  CHECK(line.at("device") == "cpu");
  for (const char* file : {"config.json", "metrics.jsonl", "loss.svg", "base/config.json", "base/model.safetensors",
                           "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}) {
    CAPTURE(file);
    CHECK(test::read_file(scratch / "a" / file).size() > 50);
  }
  const std::string metrics = test::read_file(scratch / "a" / "metrics.jsonl");
  CHECK(std::count(metrics.begin(), metrics.end(), '\n') == 5);
  const Outcome second = run_program(scratch, options + (scratch / "b").string() + "'");
  REQUIRE(second.status == 0);
  for (const char* file : {"base/model.safetensors", "adapter/adapter_model.safetensors"}) {
    CAPTURE(file);
    CHECK(test::read_file(scratch / "a" / file) == test::read_file(scratch / "b" / file));
  }
}

TEST_CASE("rowan demo shows losses beside entropies, and its optimizer option does something") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const std::string out = " --out '" + (scratch / "run").string() + "'";
  const Outcome run =
      run_program(scratch, "demo --device cpu --pretrain-steps 2 --tune-steps 1 --optimizer adamw" + out);
  REQUIRE(run.status == 0);
  CHECK(run.out.find("entropy of the grammar") != std::string::npos);
  CHECK(run.out.find("with adamw") != std::string::npos);
  CHECK(run.err.find("pretrain") != std::string::npos);
  CHECK(test::read_file(scratch / "run" / "config.json").find("\"optimizer\": \"adamw\"") != std::string::npos);
}

TEST_CASE("rowan eval gives the losses that the demo printed") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const std::string run = (scratch / "run").string();
  const Outcome demo =
      run_program(scratch, "demo --json --device cpu --pretrain-steps 3 --tune-steps 2 --out '" + run + "'");
  REQUIRE(demo.status == 0);
  const auto expected = nlohmann::json::parse(last_line(demo.out));
  const std::string eval = "eval --json --device cpu --model '" + run + "/base' --data '" + run + "/held-out-";
  const auto loss = [&](const std::string& arguments) {
    const Outcome outcome = run_program(scratch, arguments);
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return nlohmann::json::parse(last_line(outcome.out)).at("loss").get<double>();
  };
  CHECK(std::abs(loss(eval + "1.jsonl'") - expected.at("base_loss_style1").get<double>()) < 1e-6);
  CHECK(std::abs(loss(eval + "2.jsonl'") - expected.at("base_loss").get<double>()) < 1e-6);
  CHECK(std::abs(loss(eval + "2.jsonl' --adapter '" + run + "/adapter'") - expected.at("tuned_loss").get<double>()) <
        1e-6);

  // Its tokens are bytes, of any text.
  const Outcome continued = run_program(scratch, "generate --json --device cpu --max-new-tokens 4 --model '" + run +
                                                     "/base' --adapter '" + run + "/adapter' --prompt 'A \u00e9\n'");
  CAPTURE(continued.err);
  REQUIRE(continued.status == 0);
  const auto line = nlohmann::json::parse(last_line(continued.out));
  CHECK((line.at("prompt_ids").get<std::vector<int>>() == std::vector<int>{'A', ' ', 0xC3, 0xA9, '\n'}));
}

TEST_CASE("rowan eval refuses bad data and models with status 3, naming file and line") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const std::string model = test::data_path("models/llama").string();
  const auto refused = [&](const std::string& rows, const std::string& named) {
    CAPTURE(rows);
    test::write_file(scratch / "rows.jsonl", rows);
    const Outcome outcome = run_program(
        scratch, "eval --device cpu --model '" + model + "' --data '" + (scratch / "rows.jsonl").string() + "'");
    CHECK(outcome.status == 3);
    CHECK(outcome.err.find(named) != std::string::npos);
  };
  refused("{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, -2]}\n", "rows.jsonl:2");
  refused("{\"input_ids\": [1, 2], \"labels\": [1]}\n", "labels");
  refused("{\"input_ids\": [1, 2.5]}\n", "2.5");
  refused("{\"ids\": [1, 2]}\n", "ids");
  refused("{\"input_ids\": [1, 2]\n", "rows.jsonl:1");
  refused("{\"input_ids\": [1, 320]}\n", "320");
  refused("", "expected rows, got none");
  refused("{\"input_ids\": [1]}\n", "no token");
  const Outcome missing =
      run_program(scratch, "eval --device cpu --model '" + (scratch / "none").string() + "' --data x");
  CHECK(missing.status == 3);
  CHECK(missing.err.find("none") != std::string::npos);
}

TEST_CASE("rowan eval refuses files that do not fit their configuration, and rows beyond its window, with status 3") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const auto copy = [&](const std::string& from, const std::string& to) {
    std::filesystem::copy(test::data_path("models/" + from), scratch / to);
    return scratch / to;
  };
  const auto replace = [](const std::filesystem::path& file, const std::string& from, const std::string& to) {
    std::string text = test::read_file(file);
    REQUIRE(text.find(from) != std::string::npos);
    test::write_file(file, text.replace(text.find(from), from.size(), to));
  };
  const auto refused = [&](const std::string& model, const std::string& more, const std::string& named) {
    test::write_file(scratch / "rows.jsonl", "{\"input_ids\": [1, 2, 3]}\n");
    const Outcome outcome = run_program(scratch, "eval --device cpu --model '" + model + "' --data '" +
                                                     (scratch / "rows.jsonl").string() + "' " + more);
    CAPTURE(outcome.err);
    CHECK(outcome.status == 3);
    CHECK(outcome.err.find(named) != std::string::npos);
  };
  const std::string llama = test::data_path("models/llama").string();
  const auto adapter = copy("llama/adapter", "adapter");
  replace(adapter / "adapter_config.json", "\"r\": 8", "\"r\": 9");
  refused(llama, "--adapter '" + adapter.string() + "'", "lora_A");
  replace(adapter / "adapter_config.json", "layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj");
  refused(llama, "--adapter '" + adapter.string() + "'", "layers.7");
  const auto huge = copy("llama", "huge");  // 2^44 elements by its configuration
  replace(huge / "config.json", "\"hidden_size\": 64", "\"hidden_size\": 1048576");
  replace(huge / "config.json", "\"vocab_size\": 320", "\"vocab_size\": 16777216");
  refused(huge.string(), "", "embed_tokens");
  const auto mistral = copy("mistral", "mistral");
  replace(mistral / "config.json", "\"sliding_window\": null", "\"sliding_window\": 2");
  refused(mistral.string(), "", "row 1: 3 tokens are more than the 2");
  CHECK(run_program(scratch, "eval --device cpu --max-length 2 --model '" + mistral.string() + "' --data '" +
                                 (scratch / "rows.jsonl").string() + "'")
            .status == 0);
}

TEST_CASE("wrong options end with status 2 and name what was wrong") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  CHECK(run_program(scratch, "").status == 2);
  CHECK(run_program(scratch, "unknown").status == 2);
  const Outcome optimizer = run_program(scratch, "demo --optimizer sgd");
  CHECK(optimizer.status == 2);
  CHECK(optimizer.err.find("sgd") != std::string::npos);
  const Outcome device = run_program(scratch, "demo --device gpu");
  CHECK(device.status == 2);
  CHECK(device.err.find("gpu") != std::string::npos);
  CHECK(run_program(scratch, "demo --pretrain-steps 0").status == 2);
  for (const char* seed : {"x", "-1", "18446744073709551616", "1.5"}) {
    CAPTURE(seed);
    CHECK(run_program(scratch, std::string("demo --seed ") + seed).status == 2);
  }
  CHECK(run_program(scratch, "demo --out ''").status == 2);
  if (cuda_device_count() == 0) {
    const Outcome cuda = run_program(scratch, "demo --device cuda");
    CHECK(cuda.status == 2);
    CHECK(cuda.err.find("CUDA") != std::string::npos);
  }
}

TEST_CASE("a place that cannot be written to ends with status 1 and names it") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  test::write_file(scratch / "file", "not a directory");
  const Outcome run = run_program(scratch, "demo --device cpu --pretrain-steps 1 --tune-steps 1 --out '" +
                                               (scratch / "file" / "run").string() + "'");
  CHECK(run.status == 1);
  CHECK(run.err.find("file") != std::string::npos);
}

TEST_CASE("help, version and info end with status 0") {
  REQUIRE(program_is_built());
  const test::ScratchDirectory scratch;
  const Outcome help = run_program(scratch, "demo --help");
  CHECK(help.status == 0);
  CHECK(help.out.find("--optimizer") != std::string::npos);
  CHECK(run_program(scratch, "--version").status == 0);
  const Outcome info = run_program(scratch, "info");
  CHECK(info.status == 0);
  CHECK(info.out.find("compiler") != std::string::npos);
}

}  // namespace rowan
