#include "rowan/ops/attention_cached.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "ops/op_test.h"
#include "rowan/ops/attention.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan {
namespace {

struct Case {
  std::int64_t queries, keys, heads, key_heads, head_dim;
};
const Case kCases[] = {{1, 1, 1, 1, 2},     {1, 9, 4, 2, 8},   {3, 3, 2, 1, 16},   {5, 37, 6, 3, 64},
                       {1, 300, 2, 1, 128}, {2, 70, 8, 2, 80}, {4, 33, 3, 3, 256}, {1, 5, 2, 2, 30}};

/// Rows of a wider buffer: strides that are not those of a contiguous tensor.
Tensor strided(const Shape& shape, DType dtype, std::uint64_t seed, StreamRef stream, double scale = 1.0) {
  return test::random_normal({shape[0], shape[1] + 1, shape[2] + 2}, dtype, seed, stream, scale)
      .slice(1, 0, shape[1])
      .slice(2, 0, shape[2]);
}

/// The definition in float64, and sum of weights times |v|, which rounding errors are relative to.
struct Oracle {
  std::vector<double> out, magnitude;
};
Oracle oracle(const Case& c, const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v,
              double scale) {
  Oracle result;
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::int64_t i = 0; i < c.queries; ++i) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t g = h / (c.heads / c.key_heads), visible = c.keys - c.queries + i + 1;
      std::vector<double> weights;
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::int64_t j = 0; j < visible; ++j) {
        double score = 0;
        for (std::int64_t d = 0; d < c.head_dim; ++d)
          score += q[at((i * c.heads + h) * c.head_dim + d)] * k[at((j * c.key_heads + g) * c.head_dim + d)];
        weights.push_back(score * scale);
        largest = std::max(largest, score * scale);
      }
      for (double& w : weights) sum += w = std::exp(w - largest);
      for (std::int64_t d = 0; d < c.head_dim; ++d) {
        double out = 0, magnitude = 0;
        for (std::int64_t j = 0; j < visible; ++j) {
          const double term = weights[at(j)] / sum * v[at((j * c.key_heads + g) * c.head_dim + d)];
          out += term;
          magnitude += std::abs(term);
        }
        result.out.push_back(out);
        result.magnitude.push_back(magnitude);
      }
    }
  }
  return result;
}

void check_cached(const Case& c, DType dtype, StreamRef stream, double size = 1.0) {
  CAPTURE(c.queries, c.keys, c.heads, c.key_heads, c.head_dim, to_string(dtype), size);
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  const Tensor q = strided({c.queries, c.heads, c.head_dim}, dtype, 1, stream, size);
  const Tensor k = strided({c.keys, c.key_heads, c.head_dim}, dtype, 2, stream, size);
  const Tensor v = strided({c.keys, c.key_heads, c.head_dim}, dtype, 3, stream);
  Tensor out = strided({c.queries, c.heads, c.head_dim}, dtype, 4, stream);
  attention_cached(q, k, v, scale, out, stream);
  const Oracle expected = oracle(c, test::values(q, stream), test::values(k, stream), test::values(v, stream), scale);
  // A score is off by its d products' rounding, relative to |q| |k|; a weight by that much again. One rounding at the
  // end.
  const double epsilon = dtype == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
  const double score = static_cast<double>(c.head_dim) * size * size * 8;
  std::vector<double> bound;
  for (std::size_t i = 0; i < expected.out.size(); ++i) {
    const double arithmetic = epsilon * (score + static_cast<double>(c.keys) + 16) * expected.magnitude[i];
    bound.push_back(arithmetic + test::ulp(dtype, std::abs(expected.out[i]) + arithmetic));
  }
  std::string message;
  const bool fits = test::within(test::values(out, stream), expected.out, bound, &message);
  INFO(message);
  CHECK(fits);
}

template <class F>
void check_refused(ErrorKind kind, const std::string& text, const F& f) {
  try {
    f();
    FAIL("nothing was thrown; expected " + text);
  } catch (const Error& error) {
    CAPTURE(std::string(error.what()));
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(text) != std::string::npos);
  }
}

/// The last rows of attention_forward over the whole sequence.
void check_against_forward(StreamRef stream) {
  const Shape query{70, 4, 64}, key{70, 2, 64};
  const Tensor q = test::random_normal(query, DType::kFloat32, 1, stream),
               k = test::random_normal(key, DType::kFloat32, 2, stream),
               v = test::random_normal(key, DType::kFloat32, 3, stream);
  Tensor all = Tensor::empty(query, DType::kFloat32, stream), lse = Tensor::empty({4, 70}, DType::kFloat32, stream);
  SequenceBatch batch{Tensor::from_host({2}, std::vector<std::int32_t>{0, 70}, stream), 70};
  attention_forward(q, k, v, batch, 0.125, all, lse, stream);
  Tensor last = Tensor::empty({3, 4, 64}, DType::kFloat32, stream);
  attention_cached(q.slice(0, 67, 70), k, v, 0.125, last, stream);
  CHECK(test::difference(test::values(last, stream), test::values(all.slice(0, 67, 70), stream)).max_absolute < 2e-6);
}

}  // namespace

TEST_CASE("Attention to cached keys matches its definition") {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Case& c : kCases) check_cached(c, dtype, StreamRef());
    check_cached({2, 40, 2, 1, 32}, dtype, StreamRef(), 6.0);
  }
}

TEST_CASE("Attention to cached keys equals the last rows of attention over all") { check_against_forward(StreamRef()); }

TEST_CASE("Attention to cached keys refuses what does not fit, and takes no queries") {
  const StreamRef cpu;
  const auto tensor = [&](std::int64_t n, std::int64_t heads, std::int64_t d, DType dtype = DType::kFloat32) {
    return test::random_normal({n, heads, d}, dtype, 1, cpu);
  };
  const auto refuse = [&](ErrorKind kind, const std::string& text, const Tensor& q, const Tensor& k, const Tensor& v,
                          Tensor out, double scale = 1) {
    check_refused(kind, text, [&] { attention_cached(q, k, v, scale, out, cpu); });
  };
  using enum ErrorKind;
  refuse(kUnsupported, "expected an even head_dim", tensor(1, 2, 7), tensor(3, 2, 7), tensor(3, 2, 7), tensor(1, 2, 7));
  refuse(kInvalidArgument, "multiple of the key heads", tensor(1, 3, 8), tensor(3, 2, 8), tensor(3, 2, 8),
         tensor(1, 3, 8));
  refuse(kInvalidArgument, "at least as many keys", tensor(4, 2, 8), tensor(3, 2, 8), tensor(3, 2, 8), tensor(4, 2, 8));
  refuse(kInvalidArgument, "expected v of shape [3, 2, 8]", tensor(1, 2, 8), tensor(3, 2, 8), tensor(4, 2, 8),
         tensor(1, 2, 8));
  refuse(kInvalidArgument, "expected k of dtype float32", tensor(1, 2, 8), tensor(3, 2, 8, DType::kBFloat16),
         tensor(3, 2, 8), tensor(1, 2, 8));
  refuse(kInvalidArgument, "finite scale", tensor(1, 2, 8), tensor(3, 2, 8), tensor(3, 2, 8), tensor(1, 2, 8), NAN);
  const Tensor q = tensor(1, 2, 8);
  refuse(kInvalidArgument, "not to overlap", q, tensor(3, 2, 8), tensor(3, 2, 8), q);
  Tensor none = tensor(0, 2, 8);
  attention_cached(tensor(0, 2, 8), tensor(3, 2, 8), tensor(3, 2, 8), 1, none, cpu);
}

TEST_CASE("Attention to cached keys matches its definition on the GPU, with the same bits every time",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Case& c : kCases) check_cached(c, dtype, gpu);
    check_cached({2, 40, 2, 1, 32}, dtype, gpu, 6.0);
  }
  check_against_forward(gpu);
  const Tensor q = test::random_normal({2, 4, 64}, DType::kBFloat16, 1, gpu),
               k = test::random_normal({500, 2, 64}, DType::kBFloat16, 2, gpu);
  Tensor a = Tensor::empty({2, 4, 64}, DType::kBFloat16, gpu), b = Tensor::empty({2, 4, 64}, DType::kBFloat16, gpu);
  attention_cached(q, k, k, 0.125, a, gpu);
  attention_cached(q, k, k, 0.125, b, gpu);
  CHECK(test::values(a, gpu) == test::values(b, gpu));
}

}  // namespace rowan
