#include "rowan/ops/embedding.h"

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

struct Ids {
  std::vector<std::int64_t> host;
  Tensor tensor;
};

Ids random_ids(std::int64_t tokens, std::int64_t vocabulary, bool wide, StreamRef stream) {
  Rng rng(static_cast<std::uint64_t>(tokens * 31 + vocabulary));
  Ids ids;
  std::vector<std::int32_t> narrow;
  for (std::int64_t i = 0; i < tokens; ++i) {
    ids.host.push_back(static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(vocabulary))));
    narrow.push_back(static_cast<std::int32_t>(ids.host.back()));
  }
  ids.tensor = wide ? ids64(ids.host, stream) : ids32(narrow, stream);
  return ids;
}

void check_forward(std::int64_t tokens, std::int64_t vocabulary, std::int64_t width, DType dtype, StreamRef stream) {
  for (const bool wide : {false, true}) {
    for (const bool gaps : {false, true}) {
      CAPTURE(tokens, vocabulary, width, dtype, wide, gaps);
      const Ids ids = random_ids(tokens, vocabulary, wide, stream);
      Tensor table = random_normal({vocabulary, width}, dtype, 1, stream);
      Tensor y = random_normal({tokens, width}, dtype, 9, stream);
      if (gaps) table = apart(table, stream), y = apart(y, stream);
      embedding_forward(ids.tensor, table, y, stream);
      const Matrix rows = host(table, stream), out = host(y, stream);
      bool equal = true;
      for (std::int64_t i = 0; i < tokens; ++i) {
        for (std::int64_t j = 0; j < width; ++j) equal = equal && out.at(i, j) == rows.at(ids.host[at(i)], j);
      }
      CHECK(equal);
    }
  }
}

void check_backward(std::int64_t tokens, std::int64_t vocabulary, std::int64_t width, DType dtype, StreamRef stream) {
  CAPTURE(tokens, vocabulary, width, dtype);
  const DType sum_dtype = accumulator(dtype);
  for (const bool wide : {false, true}) {
    const Ids ids = random_ids(tokens, vocabulary, wide, stream);
    const Tensor dy = apart(random_normal({tokens, width}, dtype, 2, stream), stream);
    Tensor dtable = apart(random_normal({vocabulary, width}, sum_dtype, 3, stream), stream);
    const Matrix before = host(dtable, stream), grad = host(dy, stream);
    embedding_backward(ids.tensor, dy, dtable, stream);
    Matrix expected = before, magnitude = absolute(before), bound = before;
    std::vector<std::int64_t> count(at(vocabulary));
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t id = ids.host[at(i)];
      ++count[at(id)];
      for (std::int64_t j = 0; j < width; ++j) {
        expected.at(id, j) += grad.at(i, j);
        magnitude.at(id, j) += std::abs(grad.at(i, j));
      }
    }
    for (std::int64_t id = 0; id < vocabulary; ++id) {
      for (std::int64_t j = 0; j < width; ++j) {  // a row without ids keeps its bits
        bound.at(id, j) = count[at(id)] == 0 ? 0 : sum_error(sum_dtype, count[at(id)], magnitude.at(id, j));
      }
    }
    check_within(host(dtable, stream).v, expected.v, bound.v);
  }
}

std::vector<double> backward_of_many(DType dtype, StreamRef stream) {
  const Ids ids = random_ids(3000, 11, false, stream);
  Tensor dtable = Tensor::zeros({11, 33}, DType::kFloat32, stream);
  embedding_backward(ids.tensor, random_normal({3000, 33}, dtype, 5, stream), dtable, stream);
  return values(dtable, stream);
}

void check_empty(StreamRef stream) {
  const Tensor table = random_normal({5, 3}, DType::kFloat32, 1, stream);
  Tensor y = Tensor::empty({0, 3}, DType::kFloat32, stream);
  embedding_forward(ids32({}, stream), table, y, stream);
  Tensor dtable = table.clone(stream);
  embedding_backward(ids32({}, stream), y, dtable, stream);
  CHECK(same_values(dtable, table, stream));
}

}  // namespace

TEST_CASE("An embedding copies the rows of its ids", "[ops][embedding]") {
  for (const DType dtype : kCpuDtypes) {
    check_forward(37, 11, 24, dtype, StreamRef());
    check_forward(1, 1, 1, dtype, StreamRef());
    check_forward(70000, 300, 3, dtype, StreamRef());
  }
}

TEST_CASE("An embedding writes nothing beside its rows", "[ops][embedding]") {
  const PoisonedMemory memory(Device::cpu());
  {
    const Tensor wide = Tensor::empty({3, 8}, DType::kFloat32, StreamRef());
    Tensor y = wide.slice(1, 2, 5);
    embedding_forward(ids32({1, 0, 1}, StreamRef()), random_normal({2, 3}, DType::kFloat32, 1, StreamRef()), y,
                      StreamRef());
    const Matrix all = host(wide, StreamRef());
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t j = 0; j < 8; ++j) CHECK(std::isnan(all.at(i, j)) == (j < 2 || j >= 5));
    }
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("An embedding's gradient adds up the rows of each id", "[ops][embedding]") {
  for (const DType dtype : kCpuDtypes) {
    check_backward(37, 11, 24, dtype, StreamRef());
    check_backward(1000, 7, 33, dtype, StreamRef());
    check_backward(1, 50, 1, dtype, StreamRef());
    check_backward(70000, 5, 3, dtype, StreamRef());
  }
}

TEST_CASE("An embedding's gradient does not depend on threads", "[ops][embedding]") {
  CHECK(same_with_any_threads([] { return backward_of_many(DType::kBFloat16, StreamRef()); }));
}

TEST_CASE("An embedding's gradient agrees with finite differences", "[ops][embedding]") {
  const Tensor ids = ids32({2, 0, 2, 3}, StreamRef());
  const Tensor table = random_normal({4, 5}, DType::kFloat64, 1, StreamRef());
  const Tensor dy = random_normal({4, 5}, DType::kFloat64, 2, StreamRef());
  const std::vector<double> weights = values(dy, StreamRef());
  Tensor dtable = Tensor::zeros({4, 5}, DType::kFloat64, StreamRef());
  embedding_backward(ids, dy, dtable, StreamRef());
  check_gradient(
      [&] {
        Tensor y = Tensor::empty({4, 5}, DType::kFloat64, StreamRef());
        embedding_forward(ids, table, y, StreamRef());
        return dot(values(y, StreamRef()), weights);
      },
      table, values(dtable, StreamRef()));
}

TEST_CASE("An embedding of no tokens changes nothing", "[ops][embedding]") { check_empty(StreamRef()); }

TEST_CASE("An embedding refuses ids outside the table and leaves its output alone", "[ops][embedding]") {
  const StreamRef cpu;
  const Tensor table = random_normal({4, 3}, DType::kFloat32, 1, cpu),
               before = random_normal({2, 3}, DType::kFloat32, 2, cpu);
  for (const std::int32_t bad : {-1, 4, 2000000000}) {
    const Tensor ids = ids32({1, bad}, cpu);
    Tensor y = before.clone(cpu), dtable = table.clone(cpu);
    check_throws(ErrorKind::kInvalidArgument, "embedding_forward: expected ids in [0, 4), got " + std::to_string(bad),
                 [&] { embedding_forward(ids, table, y, cpu); });
    check_throws(ErrorKind::kInvalidArgument, "embedding_backward: expected ids in [0, 4), got " + std::to_string(bad),
                 [&] { embedding_backward(ids, before, dtable, cpu); });
    CHECK(same_values(y, before, cpu));
    CHECK(same_values(dtable, table, cpu));
  }
}

TEST_CASE("An embedding names the operand that does not fit", "[ops][embedding]") {
  const StreamRef cpu;
  const Tensor table = random_normal({4, 3}, DType::kFloat32, 1, cpu), ids = ids32({0, 1}, cpu);
  Tensor short_y = random_normal({1, 3}, DType::kFloat32, 2, cpu), y = random_normal({2, 3}, DType::kFloat32, 2, cpu);
  Tensor other_dtype = random_normal({2, 3}, DType::kBFloat16, 2, cpu),
         wide_table = random_normal({4, 4}, DType::kFloat32, 1, cpu);
  const Tensor float_ids = random_normal({2}, DType::kFloat32, 1, cpu);
  const auto forward = [&](const Tensor& i, const Tensor& t, Tensor& out) {
    return [&] { embedding_forward(i, t, out, cpu); };
  };
  check_throws(ErrorKind::kInvalidArgument, "expected y with 2 rows", forward(ids, table, short_y));
  check_throws(ErrorKind::kInvalidArgument, "expected table of dtype bfloat16, got float32",
               forward(ids, table, other_dtype));
  check_throws(ErrorKind::kInvalidArgument, "expected table of shape [4, 3], got [4, 4]", forward(ids, wide_table, y));
  check_throws(ErrorKind::kInvalidArgument, "expected ids of dtype int32 or int64, got float32",
               forward(float_ids, table, y));
  check_throws(ErrorKind::kInvalidArgument, "expected ids to be a tensor", forward(Tensor(), table, y));
  Tensor half_gradient = random_normal({4, 3}, DType::kBFloat16, 1, cpu);
  check_throws(ErrorKind::kInvalidArgument, "expected dtable of dtype float32, got bfloat16",
               [&] { embedding_backward(ids, other_dtype, half_gradient, cpu); });
}

TEST_CASE("An embedding copies the rows of its ids on the GPU", "[ops][embedding][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    check_forward(37, 11, 24, dtype, gpu);
    check_forward(1, 1, 1, dtype, gpu);
    check_forward(65, 40, 1000, dtype, gpu);
  }
  check_empty(gpu);
}

TEST_CASE("An embedding copies more rows than a grid has in one dimension on the GPU", "[ops][embedding][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) check_forward(70000, 300, 3, dtype, gpu);
}

TEST_CASE("An embedding's gradient adds up the rows of each id on the GPU", "[ops][embedding][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    check_backward(37, 11, 24, dtype, gpu);
    check_backward(1000, 7, 33, dtype, gpu);
    check_backward(1, 50, 1, dtype, gpu);
    check_backward(70000, 5, 3, dtype, gpu);
    check_backward(300, 70000, 129, dtype, gpu);
  }
}

TEST_CASE("An embedding's gradient has the same bits in every run on the GPU", "[ops][embedding][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  CHECK(backward_of_many(DType::kBFloat16, gpu) == backward_of_many(DType::kBFloat16, gpu));
}

TEST_CASE("On the GPU an id outside the table gives NaN and no gradient", "[ops][embedding][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const Tensor table = random_normal({4, 8}, DType::kFloat32, 1, gpu);
  const Tensor ids = ids32({3, -1, 4, 2000000000, 0}, gpu);
  Tensor y = Tensor::empty({5, 8}, DType::kFloat32, gpu);
  embedding_forward(ids, table, y, gpu);
  const Matrix out = host(y, gpu), rows = host(table, gpu);
  for (std::int64_t j = 0; j < 8; ++j) {
    CHECK(out.at(0, j) == rows.at(3, j));
    for (const std::int64_t bad : {1, 2, 3}) CHECK(std::isnan(out.at(bad, j)));
    CHECK(out.at(4, j) == rows.at(0, j));
  }
  Tensor dtable = Tensor::zeros({4, 8}, DType::kFloat32, gpu);
  const Tensor dy = random_normal({5, 8}, DType::kFloat32, 2, gpu);
  embedding_backward(ids, dy, dtable, gpu);
  const Matrix sums = host(dtable, gpu), grad = host(dy, gpu);
  for (std::int64_t j = 0; j < 8; ++j) {
    CHECK(sums.at(3, j) == grad.at(0, j));
    CHECK(sums.at(0, j) == grad.at(4, j));
    CHECK(sums.at(1, j) == 0);
  }
}
