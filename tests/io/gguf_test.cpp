#include "rowan/io/gguf.h"

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/files.h"
#include "support/gguf_reader.h"

namespace rowan {
namespace {

using test::ScratchDirectory;
using Metadata = std::vector<std::pair<std::string, GgufValue>>;

GgufTensor announced(const std::string& name, const Tensor& tensor) {
  return {name, tensor.shape(), tensor.dtype(), [tensor] { return tensor; }};
}

Tensor sample(const Shape& shape, DType dtype) { return test::random_normal(shape, dtype, 1, StreamRef()); }

}  // namespace

TEST_CASE("a GGUF file holds its metadata and tensors, aligned, extents from the fastest", "[io]") {
  const ScratchDirectory scratch;
  const Tensor a = sample({3, 5}, DType::kFloat32), b = sample({7}, DType::kFloat16),
               c = sample({2, 1, 3, 4}, DType::kFloat32);
  write_gguf(scratch / "x.gguf", Metadata{{"a.text", std::string("lora")}, {"a.number", 7u}, {"a.real", 0.5f}},
             std::vector{announced("a", a), announced("b", b), announced("c", c)});
  const test::GgufFile file(scratch / "x.gguf");
  CHECK(file.version == 3);
  CHECK(file.texts.at("a.text") == "lora");
  CHECK(file.numbers.at("a.number") == 7);
  CHECK(file.reals.at("a.real") == 0.5f);
  CHECK(file.tensors.at("a").extents == std::vector<std::uint64_t>{5, 3});
  CHECK(file.tensors.at("c").extents == std::vector<std::uint64_t>{4, 3, 1, 2});
  CHECK(file.tensors.at("b").type == 1);
  CHECK(file.tensors.at("a").values == test::values(a, StreamRef()));
  CHECK(file.tensors.at("b").values == test::values(b, StreamRef()));
  CHECK(file.tensors.at("c").values == test::values(c, StreamRef()));
  CHECK(test::read_file(scratch / "x.gguf").size() % 32 == 0);
}

TEST_CASE("what GGUF readers would not take is refused, and the old file stays", "[io]") {
  const ScratchDirectory scratch;
  test::write_file(scratch / "x.gguf", "old");
  const Tensor t = sample({2, 2}, DType::kFloat32);
  const auto refused = [&](const std::vector<GgufTensor>& tensors, const Metadata& metadata = {}) {
    CHECK_THROWS_AS(write_gguf(scratch / "x.gguf", metadata, tensors), Error);
    CHECK(test::read_file(scratch / "x.gguf") == "old");
  };
  refused({announced("a", t), announced("a", t)});
  refused({announced("", t)});
  refused({announced(std::string(64, 'n'), t)});
  refused({announced("a", sample({2}, DType::kBFloat16))});
  refused({announced("a", sample({1, 1, 1, 1, 1}, DType::kFloat32))});
  refused({}, {{"k", 1u}, {"k", 2u}});
  GgufTensor other = announced("a", t);
  other.shape = Shape{4};
  refused({other});
}

}  // namespace rowan
