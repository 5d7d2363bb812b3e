#include "rowan/io/model_files.h"

#include <nlohmann/json.hpp>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/files.h"

namespace rowan {

using test::data_path;
using test::ScratchDirectory;

namespace {

Tensor numbers(double first) {
  return Tensor::from_host({2}, std::vector<float>{static_cast<float>(first), static_cast<float>(first + 1)},
                           StreamRef());
}

/// Two shards that hold a, b and c.
void write_shards(const ScratchDirectory& scratch, const nlohmann::json& weight_map) {
  write_safetensors(scratch / "one.safetensors", std::vector<NamedTensor>{{"a", numbers(1)}, {"c", numbers(3)}}, {},
                    StreamRef());
  write_safetensors(scratch / "two.safetensors", std::vector<NamedTensor>{{"b", numbers(2)}}, {}, StreamRef());
  test::write_file(scratch / "model.safetensors.index.json",
                   nlohmann::json{{"metadata", {{"total_size", 24}}}, {"weight_map", weight_map}}.dump());
}

const nlohmann::json kGoodMap = {{"a", "one.safetensors"}, {"b", "two.safetensors"}, {"c", "one.safetensors"}};

std::string why_refused(const ScratchDirectory& scratch) {
  try {
    ModelFiles files(scratch.path());
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("a model directory with one safetensors file lists and loads its tensors", "[io]") {
  const ModelFiles files(data_path("models/llama"));
  CHECK(files.names().size() == 21);
  CHECK(files.at("model.embed_tokens.weight").shape == std::vector<std::int64_t>{320, 64});
  CHECK(files.load("model.norm.weight", DType::kBFloat16, StreamRef()).dtype() == DType::kBFloat16);
  CHECK(files.find("absent") == nullptr);
  REQUIRE_THROWS_AS(files.at("absent"), Error);
}

TEST_CASE("sharded weights are found through the index", "[io]") {
  ScratchDirectory scratch;
  write_shards(scratch, kGoodMap);
  const ModelFiles files(scratch.path());
  CHECK(files.names() == std::vector<std::string>{"a", "b", "c"});
  CHECK(files.files().size() == 2);
  CHECK(test::values(files.load("a", StreamRef()), StreamRef()) == std::vector<double>{1, 2});
  CHECK(test::values(files.load("b", StreamRef()), StreamRef()) == std::vector<double>{2, 3});
  const Tensor c = Tensor::zeros({2}, DType::kFloat64, StreamRef());
  files.load_into("c", c, StreamRef());
  CHECK(test::values(c, StreamRef()) == std::vector<double>{3, 4});
}

TEST_CASE("a shard index that points outside the directory is refused", "[io]") {
  const std::string shard = GENERATE(as<std::string>{}, "../one.safetensors", "/etc/passwd", "sub/one.safetensors",
                                     "..", ".", "", "a\\b", std::string("one.safetensors\0x", 17));
  ScratchDirectory scratch;
  auto map = kGoodMap;
  map["a"] = shard;
  write_shards(scratch, map);
  CAPTURE(shard);
  CHECK(contains(why_refused(scratch), "plain file name"));
}

TEST_CASE("an index that does not fit its shards is refused naming the tensor", "[io]") {
  ScratchDirectory scratch;
  auto map = kGoodMap;
  map["d"] = "one.safetensors";
  write_shards(scratch, map);
  CHECK(contains(why_refused(scratch), "\"d\""));
  map = kGoodMap;
  map["a"] = "two.safetensors";
  write_shards(scratch, map);
  CHECK(contains(why_refused(scratch), "\"a\""));
  map = kGoodMap;
  map.erase("c");
  write_shards(scratch, map);
  CHECK(contains(why_refused(scratch), "\"c\""));
  map = kGoodMap;
  map["b"] = "absent.safetensors";
  write_shards(scratch, map);
  CHECK(contains(why_refused(scratch), "absent.safetensors"));
  map["b"] = 3;
  write_shards(scratch, map);
  CHECK(contains(why_refused(scratch), "\"b\""));
  test::write_file(scratch / "model.safetensors.index.json",
                   R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})");
  CHECK(contains(why_refused(scratch), "duplicate key"));
  test::write_file(scratch / "model.safetensors.index.json", "{}");
  CHECK(contains(why_refused(scratch), "weight_map"));
}

TEST_CASE("a directory without safetensors weights is an error", "[io]") {
  ScratchDirectory scratch;
  CHECK(contains(why_refused(scratch), "model.safetensors"));
  test::write_file(scratch / "pytorch_model.bin", "");
  CHECK(contains(why_refused(scratch), "pytorch_model.bin is not read"));
}

TEST_CASE("a saved model directory reads back", "[io]") {
  const ModelFiles original(data_path("models/llama"));
  const ModelConfig config = read_model_config(data_path("models/llama"));
  std::vector<NamedTensor> tensors;
  for (const std::string& name : original.names()) tensors.push_back({name, original.load(name, StreamRef())});
  ScratchDirectory scratch;
  save_model_directory(scratch / "new/model", config, tensors, StreamRef());
  CHECK(test::read_file(scratch / "new/model/model.safetensors") ==
        test::read_file(data_path("models/llama/model.safetensors")));
  CHECK(read_model_config(scratch / "new/model").hidden_size == config.hidden_size);
}

}  // namespace rowan
