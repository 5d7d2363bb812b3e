#include "rowan/nn/kv_cache.h"

#include <numeric>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/nn/llama.h"
#include "rowan/nn/llama_files.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/files.h"

namespace rowan {
namespace {

std::vector<std::int32_t> random_ids(std::size_t count, std::int64_t vocab) {
  Rng rng(3);
  std::vector<std::int32_t> ids(count);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(vocab)));
  return ids;
}

/// A model of tests/data with its adapter.
LlamaModel load(const std::string& family, DType dtype, StreamRef stream) {
  const auto directory = test::data_path("models") / family;
  const ModelConfig config = read_model_config(directory);
  const AdapterFiles adapter(directory / "adapter");
  LlamaOptions options;
  options.dtype = dtype;
  options.lora = lora_for(adapter.config(), config);
  LlamaModel model(config, options, stream);
  load_base(model, ModelFiles(directory), stream);
  load_adapter(model, adapter, stream);
  return model;
}

/// Logits behind every prefix, in pieces of these lengths, against those without a cache.
void check_decoding(const std::string& family, DType dtype, StreamRef stream, double tolerance) {
  CAPTURE(family, to_string(dtype));
  LlamaModel model = load(family, dtype, stream);
  const std::vector<std::size_t> pieces{5, 1, 1, 3, 1, 2};
  const auto ids = random_ids(std::accumulate(pieces.begin(), pieces.end(), std::size_t{0}), model.config().vocab_size);
  HostBatch whole;
  whole.append(ids);
  const Tensor expected = model.logits(whole.to(model.config().vocab_size, stream), stream);
  KvCache cache(model.config(), dtype, static_cast<std::int64_t>(ids.size()), stream);
  std::size_t done = 0;
  for (const std::size_t piece : pieces) {
    CAPTURE(done, piece);
    const Tensor logits = model.decode(std::span(ids).subspan(done, piece), cache, stream);
    done += piece;
    CHECK(cache.length() == static_cast<std::int64_t>(done));
    const auto row = test::values(expected.select(0, static_cast<std::int64_t>(done) - 1), stream);
    CHECK(test::difference(test::values(logits, stream), row).relative_frobenius < tolerance);
  }
  // Tokens that were forgotten leave nothing behind.
  cache.truncate(5);
  const Tensor again = model.decode(std::span(ids).subspan(5, 1), cache, stream);
  CHECK(test::difference(test::values(again, stream), test::values(expected.select(0, 5), stream)).relative_frobenius <
        tolerance);
}

}  // namespace

TEST_CASE("Logits with cached keys and values are those without, in every family") {
  for (const char* const family : {"llama", "mistral", "qwen2", "qwen3"}) {
    check_decoding(family, DType::kFloat64, StreamRef(), 1e-12);
    check_decoding(family, DType::kFloat32, StreamRef(), 1e-5);
    check_decoding(family, DType::kBFloat16, StreamRef(), 3e-2);
  }
}

TEST_CASE("Logits with cached keys and values are those without on the GPU", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const char* const family : {"llama", "qwen3"}) {
    check_decoding(family, DType::kFloat32, gpu, 1e-4);
    check_decoding(family, DType::kBFloat16, gpu, 3e-2);
  }
}

TEST_CASE("A refused decode leaves the cache as it was") {
  const StreamRef cpu;
  LlamaModel model = load("llama", DType::kFloat32, cpu);
  const ModelConfig& config = model.config();
  KvCache cache(config, DType::kFloat32, 4, cpu);
  const std::vector<std::int32_t> ids{1, 2, 3};
  model.decode(ids, cache, cpu);
  const std::vector<std::int32_t> outside{static_cast<std::int32_t>(config.vocab_size)};
  CHECK_THROWS_AS(model.decode(ids, cache, cpu), Error);
  CHECK_THROWS_AS(model.decode({}, cache, cpu), Error);
  CHECK_THROWS_AS(model.decode(outside, cache, cpu), Error);
  CHECK(cache.length() == 3);
  KvCache other_dtype(config, DType::kBFloat16, 4, cpu);
  CHECK_THROWS_AS(model.decode(ids, other_dtype, cpu), Error);
  ModelConfig other = config;
  other.head_dim += 2;
  KvCache other_shape(other, DType::kFloat32, 4, cpu);
  CHECK_THROWS_AS(model.decode(ids, other_shape, cpu), Error);
  CHECK_THROWS_AS(cache.truncate(4), Error);
  CHECK_THROWS_AS(cache.truncate(-1), Error);
  CHECK_THROWS_AS(KvCache(config, DType::kFloat32, -1, cpu), Error);
}

}  // namespace rowan
