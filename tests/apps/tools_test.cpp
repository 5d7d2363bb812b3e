// eval, merge, export, inspect and plot as a user meets them.
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "catch.h"
#include "rowan/io/token_rows.h"
#include "rowan/nn/llama_files.h"
#include "rowan/text/dataset.h"
#include "support/gguf_reader.h"
#include "support/goldens.h"
#include "support/model_directory.h"
#include "support/program.h"

namespace rowan {
namespace {

using test::data_path;
using test::last_line;
using test::Outcome;
using test::run_program;
using test::ScratchDirectory;
namespace fs = std::filesystem;

std::string quoted(const fs::path& path) { return "'" + path.string() + "'"; }
bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

/// Rows of input_ids and labels as the references were computed on.
std::vector<TokenRow> golden_rows(const test::Golden& expected) {
  const Tensor ids = expected.tensor("input_ids"), labels = expected.tensor("labels");
  std::vector<TokenRow> rows;
  for (std::int64_t i = 0; i < ids.size(0); ++i) {
    TokenRow row;
    for (const std::int64_t id : ids.select(0, i).to_vector<std::int64_t>(StreamRef()))
      row.input_ids.push_back(static_cast<std::int32_t>(id));
    row.labels = labels.select(0, i).to_vector<std::int64_t>(StreamRef());
    rows.push_back(row);
  }
  return rows;
}

double loss_of(const ScratchDirectory& scratch, const std::string& arguments) {
  const Outcome outcome = run_program(scratch, "eval --json --device cpu " + arguments);
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.err.empty());
  const auto json = nlohmann::json::parse(last_line(outcome.out));
  CHECK(json.size() == 3);
  CHECK(json.at("perplexity").get<double>() == std::exp(json.at("loss").get<double>()));
  return json.at("loss").get<double>();
}

/// One command that must fail with the status and name the cause, in one line of stderr and nothing on stdout.
void check_refused(const ScratchDirectory& scratch, const std::string& arguments, int status,
                   const std::string& named) {
  const Outcome outcome = run_program(scratch, arguments);
  CAPTURE(arguments, outcome.err);
  CHECK(outcome.status == status);
  CHECK(contains(outcome.err, named));
  CHECK(outcome.out.empty());
  CHECK(outcome.err.size() < 2000);
}

}  // namespace

TEST_CASE("rowan eval gives the loss of Transformers and PEFT, with the adapter beside the model and merged into it") {
  REQUIRE(test::program_is_built());
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  CAPTURE(family);
  const ScratchDirectory scratch;
  const fs::path model = data_path("models") / family;
  const test::Golden expected(model / "expected.safetensors");
  write_token_rows(scratch / "rows.jsonl", golden_rows(expected));
  const std::string data = " --data " + quoted(scratch / "rows.jsonl"),
                    adapter = " --adapter " + quoted(model / "adapter");
  const double loss = expected.values("loss")[0];
  CHECK(std::abs(loss_of(scratch, "--model " + quoted(model) + adapter + data) - loss) < 1e-5);
  CHECK(std::abs(loss_of(scratch, "--model " + quoted(model) + data) - loss) > 1e-4);
  const Outcome merge =
      run_program(scratch, "merge --model " + quoted(model) + adapter + " --out " + quoted(scratch / "merged"));
  CAPTURE(merge.err);
  REQUIRE(merge.status == 0);
  CHECK(std::abs(loss_of(scratch, "--model " + quoted(scratch / "merged") + data) - loss) < 1e-5);
}

TEST_CASE("rowan eval shifts labels inside and counts those that are not -100, the first of a row never") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  test::write_file(scratch / "rows.jsonl",
                   "{\"input_ids\": [5, 6, 7, 8], \"labels\": [5, -100, 7, 8]}\n\n{\"input_ids\": [9]}\n"
                   "{\"input_ids\": [1, 2]}\n{\"input_ids\": [], \"labels\": []}\n");
  const Outcome outcome = run_program(scratch, "eval --json --device cpu --model " + quoted(data_path("models/llama")) +
                                                   " --data " + quoted(scratch / "rows.jsonl"));
  REQUIRE(outcome.status == 0);
  CHECK(nlohmann::json::parse(last_line(outcome.out)).at("tokens") == 3);
}

TEST_CASE("rowan eval takes rows of texts, and masks prompts") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  ModelConfig config = read_model_config(data_path("models/llama"));
  config.vocab_size = 4096;
  LlamaModel model(config, {}, StreamRef());
  model.init_base(1, 0.02, StreamRef());
  save_base(scratch / "model", model, StreamRef());
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"})
    fs::copy_file(data_path("tokenizers/qwen") / file, scratch / "model" / file);
  test::write_file(scratch / "texts.jsonl",
                   "{\"prompt\": \"Who is there?\", \"completion\": \" A friend.\"}\n"
                   "{\"prompt\": \"And?\", \"completion\": \" Nobody.\"}\n");
  const std::string base = "--model " + quoted(scratch / "model") + " --data ";
  for (const bool mask : {false, true}) {
    write_token_rows(
        scratch / "rows.jsonl",
        read_dataset(scratch / "texts.jsonl", {.model = scratch / "model", .chat_template = "", .mask_prompts = mask}));
    CHECK(loss_of(scratch, base + quoted(scratch / "texts.jsonl") + (mask ? " --mask-prompts" : "")) ==
          loss_of(scratch, base + quoted(scratch / "rows.jsonl")));
  }
  fs::remove(scratch / "model/tokenizer.json");
  check_refused(scratch, "eval --device cpu " + base + quoted(scratch / "texts.jsonl"), 3, "tokenizer.json");
}

TEST_CASE("rowan eval refuses models that it cannot compute, and a loss that is not finite") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  test::write_file(scratch / "rows.jsonl", "{\"input_ids\": [5, 6, 7, 8]}\n");
  const auto weights = test::load_all(data_path("models/llama/model.safetensors"), DType::kFloat32);
  const auto eval = [&](const fs::path& model) {
    return "eval --device cpu --json --model " + quoted(model) + " --data " + quoted(scratch / "rows.jsonl");
  };
  const auto with_config = [&](const std::string& from, const std::string& to) {
    test::write_model(scratch / "model", "llama", weights);
    std::string config = test::read_file(scratch / "model/config.json");
    config.replace(config.find(from), from.size(), to);
    test::write_file(scratch / "model/config.json", config);
  };
  with_config("LlamaForCausalLM", "GemmaForCausalLM");
  check_refused(scratch, eval(scratch / "model"), 3, "GemmaForCausalLM");
  with_config("\"silu\"", "\"gelu\"");
  check_refused(scratch, eval(scratch / "model"), 3, "hidden_act");
  with_config("\"vocab_size\": 320", "\"vocab_size\": 16000000");  // would be 4 GiB
  check_refused(scratch, eval(scratch / "model"), 3, "model.embed_tokens.weight of shape [16000000, 64]");

  test::write_file(
      scratch / "long.jsonl", "{\"input_ids\": [" + [] {
        std::string ids = "1";
        for (int i = 0; i < 200; ++i) ids += ",1";
        return ids;
      }() + "]}\n");
  check_refused(
      scratch,
      "eval --device cpu --model " + quoted(data_path("models/llama")) + " --data " + quoted(scratch / "long.jsonl"), 3,
      "row 1: 201 tokens are more than the 128");

  auto broken = weights;
  broken[3].tensor = broken[3].tensor.clone(StreamRef());
  for (std::int64_t i = 0; i < broken[3].tensor.elements(); ++i) broken[3].tensor.data<float>()[i] = NAN;
  test::write_model(scratch / "model", "llama", broken);
  check_refused(scratch, eval(scratch / "model"), 1, "not finite");
}

TEST_CASE("rowan inspect gives every case file the verdict of its table") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  std::istringstream table(test::read_file(data_path("safetensors_cases/verdicts.tsv")));
  std::string line;
  std::getline(table, line);  // the heading
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string name, expected;
    fields >> name >> expected;
    const Outcome outcome = run_program(scratch, "inspect --json " + quoted(data_path("safetensors_cases") / name));
    CAPTURE(name, expected, outcome.err);
    CHECK(outcome.status == (expected == "ACCEPT" ? 0 : 3));
    CHECK((outcome.status == 0 || contains(outcome.err, name)));
    if (outcome.status == 0) CHECK(nlohmann::json::parse(last_line(outcome.out)).at("kind") == "file");
  }
}

TEST_CASE("rowan inspect lists tensors, shapes, dtypes and sizes of files, models and adapters") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  const auto json_of = [&](const fs::path& path) {
    const Outcome outcome = run_program(scratch, "inspect --json " + quoted(path));
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return nlohmann::json::parse(last_line(outcome.out));
  };
  test::write_model(scratch / "model", "qwen3",
                    test::load_all(data_path("models/qwen3/model.safetensors"), DType::kBFloat16), 2);
  const auto model = json_of(scratch / "model");
  CHECK(model.at("kind") == "model");
  CHECK(model.at("architecture") == "Qwen3ForCausalLM");
  CHECK(model.at("files").size() == 2);
  CHECK(model.at("tensors").size() == 25);
  CHECK(model.at("bytes") == 2 * model.at("parameters").get<std::int64_t>());
  const auto file = json_of(data_path("models/llama/model.safetensors"));
  const auto& first = file.at("tensors").at(0);
  CHECK(first.at("name") == "lm_head.weight");
  CHECK(first.at("dtype") == "F32");
  CHECK(first.at("shape") == std::vector<int>{320, 64});
  CHECK(first.at("bytes") == 320 * 64 * 4);
  const auto adapter = json_of(data_path("models/llama/adapter"));
  CHECK(adapter.at("kind") == "adapter");
  CHECK(adapter.at("modules") == 14);
  const Outcome table = run_program(scratch, "inspect " + quoted(data_path("models/llama")));
  CHECK(contains(table.out, "model.layers.1.self_attn.q_proj.weight"));
  CHECK(contains(table.out, "21 tensors, 133440 parameters, 521.2 KiB"));
}

TEST_CASE("rowan inspect ends with status 3 for directories that do not hold together") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  const auto refused = [&](const fs::path& path, const std::string& named) {
    check_refused(scratch, "inspect " + quoted(path), 3, named);
  };
  refused(scratch / "absent", "absent");
  fs::create_directories(scratch / "empty");
  refused(scratch / "empty", "model.safetensors");
  fs::create_symlink("loop", scratch / "loop");
  refused(scratch / "loop", "loop");
  refused("/dev/null", "regular file");

  const auto weights = test::load_all(data_path("models/llama/model.safetensors"), DType::kFloat32);
  test::write_model(scratch / "model", "mistral", weights);  // the config of another model
  refused(scratch / "model", "model.embed_tokens.weight of shape");
  test::write_model(scratch / "shards", "llama", weights, 3);
  fs::remove(scratch / "shards/model-00002-of-00003.safetensors");
  refused(scratch / "shards", "model-00002-of-00003");

  const std::string json = test::read_file(data_path("models/llama/adapter/adapter_config.json"));
  auto factors = test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32);
  factors.erase(factors.begin() + 4);
  test::write_adapter_files(scratch / "adapter", json, factors);
  refused(scratch / "adapter", "up_proj.lora_A.weight\" is missing");
}

TEST_CASE("names from a file reach the terminal escaped") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  write_safetensors(scratch / "x.safetensors",
                    std::vector<NamedTensor>{{"a\x1b[2Jb", Tensor::zeros({1}, DType::kFloat32, StreamRef())}},
                    {{"k\n", "v\x07"}}, StreamRef());
  const Outcome outcome = run_program(scratch, "inspect " + quoted(scratch / "x.safetensors"));
  CHECK(outcome.status == 0);
  CHECK(contains(outcome.out, R"("a\u001b[2Jb")"));
  CHECK(outcome.out.find('\x1b') == std::string::npos);
  CHECK(outcome.out.find('\x07') == std::string::npos);
}

TEST_CASE("rowan merge and export refuse what is missing, damaged or in the way, and leave nothing behind") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  const fs::path model = data_path("models/llama"), adapter = model / "adapter";
  const auto merge = [&](const fs::path& m, const fs::path& a, const fs::path& out) {
    return "merge --model " + quoted(m) + " --adapter " + quoted(a) + " --out " + quoted(out);
  };
  const auto gguf = [&](const fs::path& m, const fs::path& a, const fs::path& out) {
    return "export --gguf --model " + quoted(m) + " --adapter " + quoted(a) + " --out " + quoted(out);
  };
  for (const auto& command : {std::function(merge), std::function(gguf)}) {
    check_refused(scratch, command(scratch / "absent", adapter, scratch / "new"), 3, "absent");
    check_refused(scratch, command(model, scratch / "absent", scratch / "new"), 3, "absent");
    check_refused(scratch, command(data_path("models/qwen2"), adapter, scratch / "new"), 3, "expected shape");
    test::write_file(scratch / "file", "1");
    check_refused(scratch, command(model, adapter, scratch / "file/new"), 1, "file");
    CHECK_FALSE(fs::exists(scratch / "new"));
  }
  check_refused(scratch, merge(model, adapter, scratch.path()), 2, "new or an empty directory");
  fs::copy(model, scratch / "copy", fs::copy_options::recursive);
  const std::string before = test::read_file(scratch / "copy/config.json");
  check_refused(scratch, gguf(scratch / "copy", adapter, scratch / "copy/config.json"), 2, "--model");
  CHECK(test::read_file(scratch / "copy/config.json") == before);
  check_refused(scratch, gguf(model, adapter, scratch.path()), 1, "directory");
  check_refused(scratch, gguf(model, adapter, "/dev/full"), 1, "/dev/full");
  check_refused(scratch, gguf(model, adapter, scratch / "new") + " --dtype bfloat16", 2, "float16");
  check_refused(scratch, "export --model x --adapter y --out z", 2, "--gguf");

  const std::string whole = test::read_file(adapter / "adapter_model.safetensors");
  fs::create_directories(scratch / "torn");
  fs::copy_file(adapter / "adapter_config.json", scratch / "torn/adapter_config.json");
  test::write_file(scratch / "torn/adapter_model.safetensors", whole.substr(0, whole.size() - 1));
  check_refused(scratch, merge(model, scratch / "torn", scratch / "new"), 3, "truncated");
  CHECK_FALSE(fs::exists(scratch / "new"));
}

TEST_CASE("rowan export writes an adapter that llama.cpp's layout describes") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  const Outcome outcome = run_program(
      scratch, "export --gguf --dtype float16 --model " + quoted(data_path("models/llama")) + " --adapter " +
                   quoted(data_path("models/llama/adapter")) + " --out " + quoted(scratch / "x.gguf"));
  CAPTURE(outcome.err);
  REQUIRE(outcome.status == 0);
  const test::GgufFile file(scratch / "x.gguf");
  CHECK(file.tensors.size() == 28);
  CHECK(file.tensors.at("blk.1.ffn_down.weight.lora_a").extents == std::vector<std::uint64_t>{176, 8});
  CHECK(file.tensors.at("blk.1.ffn_down.weight.lora_b").extents == std::vector<std::uint64_t>{8, 64});
}

TEST_CASE("rowan plot puts runs, metrics and stages into one picture") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  fs::create_directories(scratch / "one");
  test::write_file(
      scratch / "one/metrics.jsonl",
      "{\"step\":1,\"loss\":4.0,\"learning_rate\":0.1,\"tokens\":10}\n{\"step\":2,\"loss\":null,\"tokens\":10}\n"
      "{\"step\":3,\"loss\":2,\"tokens\":10}\n{\"step\":3,\"eval_loss\":2.5}\n"
      "{\"step\":2,\"loss\":3,\"tokens\":10}\n{\"step\":4,\"lo");  // resumed from step 1, and killed
  test::write_file(scratch / "two.jsonl",
                   "{\"stage\":\"a\",\"step\":0,\"loss\":1}\n{\"stage\":\"b\",\"step\":0,\"loss\":2}\n");
  const std::string runs = quoted(scratch / "one/") + " " + quoted(scratch / "two.jsonl"),
                    out = " --out " + quoted(scratch / "x.svg");
  const Outcome both = run_program(scratch, "plot " + runs + out);
  CAPTURE(both.err);
  REQUIRE(both.status == 0);
  CHECK(contains(both.out, "loss: one, 2 points"));
  CHECK(contains(both.out, "loss: two.jsonl a, 1 points"));
  CHECK(contains(both.out, "loss: two.jsonl b, 1 points"));
  const std::string svg = test::read_file(scratch / "x.svg");
  CHECK(contains(svg, "<svg"));
  CHECK(contains(svg, ">two.jsonl b</text>"));

  const Outcome more = run_program(scratch, "plot " + runs + out +
                                                " --metric loss,eval_loss --metric learning_rate --label A --label B "
                                                "--smoothing 0.9 --log-y --x tokens --title Runs");
  CAPTURE(more.err);
  REQUIRE(more.status == 0);
  CHECK(contains(more.out, "loss,eval_loss, smoothed 0.9: A eval_loss, 1 points"));
  CHECK(contains(test::read_file(scratch / "x.svg"), "translate(0 480)"));
  CHECK(contains(test::read_file(scratch / "x.svg"), "tokens so far"));
}

TEST_CASE("rowan plot says what is wrong with a run, a metric or an option") {
  REQUIRE(test::program_is_built());
  const ScratchDirectory scratch;
  test::write_file(scratch / "run.jsonl", "{\"step\":1,\"loss\":4.0}\n");
  test::write_file(scratch / "bad.jsonl", "{\"step\":1,\"loss\":4.0}\n{\"step\":[1]}\n");
  fs::create_directories(scratch / "empty");
  const std::string run = "plot " + quoted(scratch / "run.jsonl") + " --out " + quoted(scratch / "x.svg");
  check_refused(scratch, "plot " + quoted(scratch / "absent"), 3, "absent");
  check_refused(scratch, "plot " + quoted(scratch / "empty"), 3, "metrics.jsonl");
  check_refused(scratch, "plot " + quoted(scratch / "bad.jsonl"), 3, "bad.jsonl:2");
  check_refused(scratch, "plot " + quoted(scratch / "run.jsonl") + " --out " + quoted(scratch / "run.jsonl"), 2,
                "the runs");
  check_refused(scratch, run + " --metric los", 2, "no run has a metric 'los'; there are loss");
  check_refused(scratch, run + " --metric ,", 2, "metric");
  check_refused(scratch, run + " --label a --label b", 2, "label");
  CHECK(run_program(scratch, run + " --smoothing 1").status == 2);
  CHECK(run_program(scratch, "plot").status == 2);
  check_refused(scratch, "plot " + quoted(scratch / "run.jsonl") + " --out /dev/full", 1, "/dev/full");
  CHECK_FALSE(fs::exists(scratch / "x.svg"));
}

}  // namespace rowan
