#include "rowan/nn/merge.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/nn/llama_files.h"
#include "support/compare.h"
#include "support/matrix.h"
#include "support/model_directory.h"

namespace rowan {
namespace {

using test::data_path;
using test::ScratchDirectory;
namespace fs = std::filesystem;

MergeReport merge(const fs::path& model, const fs::path& adapter, const fs::path& out) {
  return merge_adapter(read_model_config(model), ModelFiles(model), AdapterFiles(adapter), out);
}

std::string why_refused(const fs::path& model, const fs::path& adapter, const fs::path& out) {
  try {
    merge(model, adapter, out);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

test::Matrix matrix(const SafetensorsFile& file, const std::string& name) {
  return test::host(file.load(name, DType::kFloat64, StreamRef()), StreamRef());
}

/// W, s B A and |s| |B| |A| of one module, in float64.
struct Parts {
  test::Matrix weight, delta, magnitude;
};
Parts parts_of(const ModelFiles& model, const AdapterFiles& adapter, const AdapterTarget& target) {
  const auto keys = AdapterFiles::keys_of(target.module);
  const test::Matrix a = matrix(adapter.file(), keys.lora_a), b = matrix(adapter.file(), keys.lora_b);
  return {test::host(model.load(target.module + ".weight", DType::kFloat64, StreamRef()), StreamRef()),
          test::scaled(test::times(b, a), target.scale),
          test::scaled(test::times(test::absolute(b), test::absolute(a)), std::abs(target.scale))};
}

/// Every file of a directory under its name.
std::vector<std::string> listing(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("a merged weight is W + s B A rounded once to the stored dtype, in every family", "[merge]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  const DType dtype = GENERATE(DType::kFloat32, DType::kBFloat16, DType::kFloat16);
  CAPTURE(family, to_string(dtype));
  const ScratchDirectory scratch;
  test::write_model(scratch / "model", family,
                    test::load_all(data_path("models") / family / "model.safetensors", dtype));
  const fs::path adapter_path = data_path("models") / family / "adapter";
  const MergeReport report = merge(scratch / "model", adapter_path, scratch / "out");

  const ModelConfig config = read_model_config(scratch / "out");
  const ModelFiles model(scratch / "model"), merged(scratch / "out");
  check_base(merged, config);
  const AdapterFiles adapter(adapter_path);
  const auto targets = adapter.match(linear_shapes(config));
  CHECK(report.merged.size() == targets.size());
  for (const AdapterTarget& target : targets) {
    CAPTURE(target.module);
    CHECK(merged.at(target.module + ".weight").tensor_dtype() == dtype);
    const Parts parts = parts_of(model, adapter, target);
    const std::vector<double> got = test::values(merged.load(target.module + ".weight", StreamRef()), StreamRef());
    std::vector<double> exact = parts.weight.v, bound = exact;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      exact[i] += parts.delta.v[i];
      // Half an ulp, and what float64 sums may be off by.
      bound[i] = test::ulp(dtype, exact[i]) / 2 + 1e-14 * (std::abs(parts.weight.v[i]) + parts.magnitude.v[i]);
    }
    std::string message;
    CHECK(test::within(got, exact, bound, &message));
    CAPTURE(message);
  }
  for (const std::string& name : model.names()) {
    CAPTURE(name);
    const bool changed =
        std::ranges::count(report.merged, name.substr(0, name.rfind('.'))) > 0 && !name.ends_with("bias");
    const auto before = test::values(model.load(name, StreamRef()), StreamRef()),
               after = test::values(merged.load(name, StreamRef()), StreamRef());
    CHECK((before != after) == changed);
  }
}

TEST_CASE("merging gives PEFT's merged weights", "[merge]") {
  const char* goldens = std::getenv("ROWAN_GOLDENS");
  if (goldens == nullptr) return;  // too large to be kept here
  for (const char* family : {"llama", "mistral", "qwen2", "qwen3"}) {
    const fs::path directory = fs::path(goldens) / "models" / family;
    const ScratchDirectory scratch;
    merge(directory, directory / "adapter", scratch / "out");
    const SafetensorsFile expected(directory / "merged.safetensors");
    const ModelFiles merged(scratch / "out"), model(directory);
    const AdapterFiles adapter(directory / "adapter");
    for (const TensorInfo& info : expected.tensors()) {
      if (merged.find(info.name) == nullptr) continue;  // a tied lm_head
      CAPTURE(family, info.name);
      const auto want = test::values(expected.load(info.name, StreamRef()), StreamRef()),
                 got = test::values(merged.load(info.name, StreamRef()), StreamRef());
      std::vector<double> bound(want.size(), 0.0);
      for (const AdapterTarget& target : adapter.match(linear_shapes(read_model_config(directory)))) {
        if (target.module + ".weight" != info.name) continue;
        const Parts parts = parts_of(model, adapter, target);
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] = 0x1p-21 * (std::abs(parts.weight.v[i]) + parts.magnitude.v[i]);
      }
      std::string message;
      CHECK(test::within(got, want, bound, &message));
    }
  }
}

TEST_CASE("a merged model keeps its shards, their headers and its other files", "[merge]") {
  const ScratchDirectory scratch;
  const fs::path model = scratch / "model", out = scratch / "out";
  test::write_model(model, "llama", test::load_all(data_path("models/llama/model.safetensors"), DType::kBFloat16), 3);
  test::write_file(scratch / "blob", "tokens");
  fs::create_symlink("../blob", model / "tokenizer.json");  // as in a Hugging Face cache
  fs::create_symlink("loop", model / "loop");
  test::write_file(model / "generation_config.json", "{}");
  for (const char* stale : {"pytorch_model.bin", "consolidated.safetensors", "pytorch_model.bin.index.json",
                            "adapter_config.json", "model.gguf"})
    test::write_file(model / stale, "of the model before");
  fs::create_directories(model / "original");

  const MergeReport report = merge(model, data_path("models/llama/adapter"), out);
  CHECK(listing(out) == std::vector<std::string>{"config.json", "generation_config.json",
                                                 "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                                 "model-00003-of-00003.safetensors", "model.safetensors.index.json",
                                                 "tokenizer.json"});
  CHECK(report.copied == std::vector<std::string>{"config.json", "generation_config.json", "tokenizer.json"});
  CHECK(report.left_out.size() == 7);
  CHECK(test::read_file(out / "tokenizer.json") == "tokens");
  CHECK_FALSE(fs::is_symlink(out / "tokenizer.json"));
  CHECK(test::read_file(out / "model.safetensors.index.json") ==
        test::read_file(model / "model.safetensors.index.json"));
  const ModelFiles before(model), after(out);
  for (std::size_t i = 0; i < before.files().size(); ++i) {
    const auto header = static_cast<std::size_t>(before.files()[i].tensors()[0].offset);
    CHECK(test::read_file(before.files()[i].path()).substr(0, header) ==
          test::read_file(after.files()[i].path()).substr(0, header));
  }
  CHECK(listing(scratch.path()) == std::vector<std::string>{"blob", "model", "out"});
}

TEST_CASE("merging goes only into a new or an empty directory", "[merge]") {
  const ScratchDirectory scratch;
  const fs::path model = data_path("models/llama"), adapter = data_path("models/llama/adapter");
  fs::create_directories(scratch / "empty");
  fs::create_directories(scratch / "full");
  test::write_file(scratch / "full/precious", "1");
  test::write_file(scratch / "file", "1");
  CHECK(why_refused(model, adapter, scratch / "empty/").empty());
  CHECK(why_refused(model, adapter, scratch / "new/below").empty());
  CHECK(contains(why_refused(model, adapter, scratch / "full"), "full: expected a new or an empty directory"));
  CHECK(contains(why_refused(model, adapter, scratch / "file"), "empty directory"));
  CHECK(contains(why_refused(model, adapter, scratch / "file/below"), "file"));
  CHECK(listing(scratch / "full") == std::vector<std::string>{"precious"});
}

TEST_CASE("factors and results that are not finite are refused by name, and nothing stays behind", "[merge]") {
  const ScratchDirectory scratch;
  const std::string json = test::read_file(data_path("models/llama/adapter/adapter_config.json"));
  const auto with = [&](std::size_t factor, float value) {
    auto factors = test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32);
    factors[factor].tensor.data<float>()[3] = value;
    test::write_adapter_files(scratch / "adapter", json, factors);
    return why_refused(data_path("models/llama"), scratch / "adapter", scratch / "out");
  };
  CHECK(contains(with(4, std::numeric_limits<float>::quiet_NaN()), "layers.0.mlp.up_proj"));
  CHECK(contains(with(27, std::numeric_limits<float>::infinity()), "layers.1.self_attn.v_proj"));
  test::write_model(scratch / "model", "llama",
                    test::load_all(data_path("models/llama/model.safetensors"), DType::kFloat16));
  CHECK(with(1, 1e30f).empty());  // not finite in float16, but in float32
  fs::remove_all(scratch / "out");
  CHECK(contains(why_refused(scratch / "model", scratch / "adapter", scratch / "out"), "not finite in float16"));
  CHECK(listing(scratch.path()) == std::vector<std::string>{"adapter", "model"});
}

TEST_CASE("an adapter of rank-stabilised LoRA merges with alpha over the square root of the rank", "[merge]") {
  const ScratchDirectory scratch;
  std::string json = test::read_file(data_path("models/llama/adapter/adapter_config.json"));
  json.replace(json.find("\"use_rslora\": false"), 19, "\"use_rslora\": true ");
  test::write_adapter_files(
      scratch / "adapter", json,
      test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32));
  merge(data_path("models/llama"), scratch / "adapter", scratch / "out");
  const std::string module = "model.layers.1.self_attn.k_proj";
  const AdapterFiles adapter(scratch / "adapter");
  const Parts parts = parts_of(ModelFiles(data_path("models/llama")), adapter, {module, 8, 16, 16 / std::sqrt(8.0)});
  const auto got = test::values(ModelFiles(scratch / "out").load(module + ".weight", StreamRef()), StreamRef());
  for (std::size_t i = 0; i < got.size(); ++i)
    CHECK(std::abs(got[i] - parts.weight.v[i] - parts.delta.v[i]) <= 1e-7 * (1 + std::abs(got[i])));
}

}  // namespace rowan
