#include "rowan/ops/attention.h"

#include <numeric>

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

using Lengths = std::vector<std::int64_t>;

struct Heads {
  std::int64_t query, key, dim;
};

SequenceBatch batch_of(const Lengths& lengths, StreamRef stream) {
  std::vector<std::int32_t> starts = {0};
  for (const std::int64_t length : lengths) starts.push_back(starts.back() + static_cast<std::int32_t>(length));
  return {ids32(starts, stream), lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end())};
}

std::int64_t total(const Lengths& lengths) { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }

/// A tensor [M, heads, d] on the host.
struct Rows {
  std::int64_t heads = 0, d = 0;
  std::vector<double> v;

  Rows(std::int64_t tokens, std::int64_t h, std::int64_t dim) : heads(h), d(dim), v(at(tokens * h * dim)) {}
  Rows(const Tensor& t, StreamRef stream) : heads(t.size(1)), d(t.size(2)), v(values(t, stream)) {}
  double* row(std::int64_t i, std::int64_t h) { return v.data() + (i * heads + h) * d; }
  const double* row(std::int64_t i, std::int64_t h) const { return v.data() + (i * heads + h) * d; }
};

/// Attention by its definition, softmax matrix and all, with what each result may be off by in `dtype`.
///
/// A score carries the error of a sum over d; a weight relatively those of its score, of the row's maximum and sum, and
/// of its own rounding to a 16-bit dtype, where small ones also lose up to half the smallest subnormal. From there on
/// errors go through sums with the magnitudes of their terms.
struct Oracle {
  Rows out, out_bound, dq, dq_bound, dk, dk_bound, dv, dv_bound;
  std::vector<double> lse, lse_bound;

  Oracle(const Rows& q, const Rows& k, const Rows& v, const Rows& dout, const Lengths& lengths, double scale,
         DType dtype)
      : out(total(lengths), q.heads, q.d),
        out_bound(out),
        dq(out),
        dq_bound(out),
        dk(total(lengths), k.heads, q.d),
        dk_bound(dk),
        dv(dk),
        dv_bound(dk),
        lse(at(q.heads * total(lengths))),
        lse_bound(lse) {
    const DType acc = accumulator(dtype);
    const std::int64_t group = q.heads / k.heads, d = q.d, tokens = total(lengths);
    const bool narrow = size_of(dtype) == 2;
    const double u = unit_roundoff(acc), weight_u = narrow ? unit_roundoff(dtype) : 0,
                 weight_floor = narrow ? ulp(dtype, 0) / 2 : 0;
    const auto inner = [d](const double* a, const double* b) {
      double sum = 0;
      for (std::int64_t c = 0; c < d; ++c) sum += a[c] * b[c];
      return sum;
    };
    const auto inner_magnitude = [d](const double* a, const double* b) {
      double sum = 0;
      for (std::int64_t c = 0; c < d; ++c) sum += std::abs(a[c] * b[c]);
      return sum;
    };
    Rows dk_terms = dk, dv_terms = dk;
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
      for (std::int64_t h = 0; h < q.heads; ++h) {
        for (std::int64_t i = begin; i < begin + length; ++i) {
          std::vector<double> weight;
          double largest = -kInfinity, score_error = 0, score_magnitude = 0;
          for (std::int64_t j = begin; j <= i; ++j) {
            const double score = scale * inner(q.row(i, h), k.row(j, h / group));
            weight.push_back(score);
            largest = std::max(largest, score);
            score_magnitude = std::max(score_magnitude, std::abs(score));
            score_error = std::max(
                score_error, sum_error(acc, d, std::abs(scale) * inner_magnitude(q.row(i, h), k.row(j, h / group))));
          }
          double sum = 0;
          for (double& w : weight) sum += (w = std::exp(w - largest));
          for (double& w : weight) w /= sum;
          const auto n = static_cast<std::int64_t>(weight.size());
          const double row_lse = largest + std::log(sum);
          const double row_error =
              score_error + sum_error(acc, n, 1) + 8 * u * (1 + score_magnitude + std::abs(row_lse));
          lse[at(h * tokens + i)] = row_lse;
          lse_bound[at(h * tokens + i)] = 2 * row_error;
          const double relative = 2 * row_error + weight_u;

          double delta = 0, delta_error = 0;
          for (std::int64_t c = 0; c < d; ++c) {
            double value = 0, magnitude = 0, error = 0;
            for (std::int64_t j = 0; j < n; ++j) {
              const double x = v.row(begin + j, h / group)[c], w = weight[at(j)];
              value += w * x;
              magnitude += std::abs(w * x);
              error += (relative * w + weight_floor) * std::abs(x);
            }
            out.row(i, h)[c] = value;
            out_bound.row(i, h)[c] = rounded_error(dtype, value, error + sum_error(acc, n, magnitude));
            delta += value * dout.row(i, h)[c];
            delta_error += std::abs(dout.row(i, h)[c]) * (out_bound.row(i, h)[c] + sum_error(acc, d, std::abs(value)));
          }
          std::vector<double> dq_terms(at(d));
          for (std::int64_t j = 0; j < n; ++j) {
            const double* const key = k.row(begin + j, h / group);
            const double* const value = v.row(begin + j, h / group);
            const double w = weight[at(j)], dweight = inner(dout.row(i, h), value);
            const double dweight_error = sum_error(acc, d, inner_magnitude(dout.row(i, h), value));
            const double dscore = w * (dweight - delta);
            double error = 2 * row_error * std::abs(dscore) +
                           w * (dweight_error + delta_error + 2 * u * (std::abs(dweight) + std::abs(delta)));
            error += weight_u * (std::abs(dscore) + error) + weight_floor;
            for (std::int64_t c = 0; c < d; ++c) {
              dq.row(i, h)[c] += scale * dscore * key[c];
              dq_terms[at(c)] += std::abs(scale * dscore * key[c]);
              dq_bound.row(i, h)[c] += std::abs(scale * key[c]) * error;
              const double query = q.row(i, h)[c], gradient = dout.row(i, h)[c];
              dk.row(begin + j, h / group)[c] += scale * dscore * query;
              dk_terms.row(begin + j, h / group)[c] += std::abs(scale * dscore * query);
              dk_bound.row(begin + j, h / group)[c] += std::abs(scale * query) * error;
              dv.row(begin + j, h / group)[c] += w * gradient;
              dv_terms.row(begin + j, h / group)[c] += std::abs(w * gradient);
              dv_bound.row(begin + j, h / group)[c] += (relative * w + weight_floor) * std::abs(gradient);
            }
          }
          for (std::int64_t c = 0; c < d; ++c) {
            double& bound = dq_bound.row(i, h)[c];
            bound = rounded_error(dtype, dq.row(i, h)[c], bound + sum_error(acc, n, dq_terms[at(c)]));
          }
        }
      }
      for (std::int64_t j = begin; j < begin + length; ++j) {
        for (std::int64_t h = 0; h < k.heads; ++h) {
          for (std::int64_t c = 0; c < d; ++c) {
            double& key_bound = dk_bound.row(j, h)[c];
            double& value_bound = dv_bound.row(j, h)[c];
            const std::int64_t n = group * length;
            key_bound = rounded_error(dtype, dk.row(j, h)[c], key_bound + sum_error(acc, n, dk_terms.row(j, h)[c]));
            value_bound = rounded_error(dtype, dv.row(j, h)[c], value_bound + sum_error(acc, n, dv_terms.row(j, h)[c]));
          }
        }
      }
      begin += length;
    }
  }
};

/// q, k and v (or their gradients) as views of one buffer, with columns behind them.
struct Fused {
  Tensor buffer, q, k, v;

  Fused(std::int64_t tokens, const Heads& heads, std::int64_t slack, std::int64_t first, DType dtype,
        StreamRef stream) {
    const std::int64_t a = heads.query * heads.dim, b = heads.key * heads.dim;
    buffer = Tensor::empty({tokens, first + a + 2 * b + slack}, dtype, stream);
    q = buffer.slice(1, first, first + a).reshape({tokens, heads.query, heads.dim});
    k = buffer.slice(1, first + a, first + a + b).reshape({tokens, heads.key, heads.dim});
    v = buffer.slice(1, first + a + b, first + a + 2 * b).reshape({tokens, heads.key, heads.dim});
  }
  void fill(std::uint64_t seed, double scale, StreamRef stream) {
    for (Tensor* t : {&q, &k, &v}) t->copy_from(random_normal(t->shape(), t->dtype(), seed++, stream, scale), stream);
  }
};

/// Every column of a fused buffer outside [first, buffer columns - slack) is still NaN.
bool rest_is_poison(const Tensor& buffer, std::int64_t first, std::int64_t slack, StreamRef stream) {
  const Matrix all = host(buffer, stream);
  for (std::int64_t i = 0; i < all.rows; ++i) {
    for (std::int64_t j = 0; j < all.cols; ++j) {
      if ((j < first || j >= all.cols - slack) && !std::isnan(all.at(i, j))) return false;
    }
  }
  return true;
}

/// Memory must be poisoned by the caller.
void check_attention(const Heads& heads, const Lengths& lengths, DType dtype, StreamRef stream, double magnitude = 1.0,
                     std::int64_t first = 0, std::int64_t slack = 8, std::int64_t spare_length = 0) {
  CAPTURE(heads.query, heads.key, heads.dim, dtype, lengths.size(), magnitude, first, slack);
  const std::int64_t tokens = total(lengths);
  const double scale = 1 / std::sqrt(static_cast<double>(heads.dim));
  SequenceBatch batch = batch_of(lengths, stream);
  batch.max_length += spare_length;
  Fused in(tokens, heads, slack, first, dtype, stream), gradient(tokens, heads, slack, first, dtype, stream);
  in.fill(1, magnitude, stream);
  Tensor dout = random_normal(in.q.shape(), dtype, 4, stream);
  if (first != 0) dout = apart(dout, stream);
  Tensor out = Tensor::empty(in.q.shape(), dtype, stream);
  Tensor lse = Tensor::empty({heads.query, tokens}, accumulator(dtype), stream);
  attention_forward(in.q, in.k, in.v, batch, scale, out, lse, stream);
  attention_backward(dout, in.q, in.k, in.v, out, lse, batch, scale, gradient.q, gradient.k, gradient.v, stream);

  const Oracle expected(Rows(in.q, stream), Rows(in.k, stream), Rows(in.v, stream), Rows(dout, stream), lengths, scale,
                        dtype);
  check_within(values(out, stream), expected.out.v, expected.out_bound.v);
  check_within(values(lse, stream), expected.lse, expected.lse_bound);
  check_within(values(gradient.q, stream), expected.dq.v, expected.dq_bound.v);
  check_within(values(gradient.k, stream), expected.dk.v, expected.dk_bound.v);
  check_within(values(gradient.v, stream), expected.dv.v, expected.dv_bound.v);
  CHECK(rest_is_poison(gradient.buffer, first, slack, stream));
}

const std::vector<Heads> kHeads = {{4, 4, 32}, {4, 2, 16},  {6, 2, 64}, {2, 1, 128},
                                   {8, 1, 8},  {2, 1, 256}, {2, 1, 40}, {2, 2, 96}};
const std::vector<Heads> kUnevenHeads = {{3, 3, 6}, {2, 1, 10}, {1, 1, 2}, {2, 1, 64}, {2, 1, 66}, {1, 1, 130}};
const Lengths kLengths = {0, 1, 33, 127, 0, 129, 2, 64, 0};
const Lengths kFewLengths = {5, 0, 67};

struct Run {
  Tensor q, k, v, dout, out, lse, dq, dk, dv;
  SequenceBatch batch;

  Run(const Heads& heads, const Lengths& lengths, DType dtype, StreamRef stream) : batch(batch_of(lengths, stream)) {
    const Shape query = {total(lengths), heads.query, heads.dim}, key = {total(lengths), heads.key, heads.dim};
    q = random_normal(query, dtype, 1, stream), k = random_normal(key, dtype, 2, stream),
    v = random_normal(key, dtype, 3, stream);
    dout = random_normal(query, dtype, 4, stream);
    out = Tensor::empty(query, dtype, stream), dq = Tensor::empty(query, dtype, stream);
    dk = Tensor::empty(key, dtype, stream), dv = Tensor::empty(key, dtype, stream);
    lse = Tensor::empty({heads.query, total(lengths)}, accumulator(dtype), stream);
  }
  void forward(StreamRef stream) { attention_forward(q, k, v, batch, 0.3, out, lse, stream); }
  void backward(StreamRef stream) { attention_backward(dout, q, k, v, out, lse, batch, 0.3, dq, dk, dv, stream); }
  std::vector<double> results(StreamRef stream) {
    forward(stream);
    backward(stream);
    std::vector<double> all;
    for (const Tensor* t : {&out, &lse, &dq, &dk, &dv}) {
      const std::vector<double> more = values(*t, stream);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
};

/// A NaN in the middle sequence leaves the results of both neighbours as they were.
void check_sequences_are_apart(std::int64_t head_dim, DType dtype, StreamRef stream) {
  CAPTURE(head_dim, dtype);
  const Lengths lengths = {40, 30, 50};
  Run run({2, 1, head_dim}, lengths, dtype, stream);
  const auto outside = [&] {
    run.forward(stream);
    run.backward(stream);
    std::vector<double> all;
    for (const Tensor* t : {&run.out, &run.dq, &run.dk, &run.dv}) {
      for (const Tensor& part : {t->slice(0, 0, 40), t->slice(0, 70, 120)}) {
        const std::vector<double> more = values(part, stream);
        all.insert(all.end(), more.begin(), more.end());
      }
    }
    return all;
  };
  const std::vector<double> before = outside();
  for (const Tensor* t : {&run.q, &run.k, &run.v, &run.dout}) {
    const Shape shape = {30, t->size(1), t->size(2)};
    const std::vector<double> poison(at(shape.elements()), kNan);
    t->slice(0, 40, 70).copy_from(convert(Tensor::from_host(shape, poison, StreamRef()), dtype, StreamRef(), stream),
                                  stream);
  }
  CHECK(outside() == before);
  CHECK(std::isnan(values(run.out.slice(0, 69, 70), stream)[0]));
}

/// Later tokens change nothing in earlier rows.
void check_causal(std::int64_t head_dim, DType dtype, StreamRef stream) {
  CAPTURE(head_dim, dtype);
  Run run({2, 2, head_dim}, {100}, dtype, stream);
  run.forward(stream);
  const std::vector<double> before = values(run.out.slice(0, 0, 71), stream);
  for (const Tensor* t : {&run.q, &run.k, &run.v}) {
    t->slice(0, 71, 100).copy_from(random_normal({29, 2, head_dim}, dtype, 9, stream, 5.0), stream);
  }
  run.forward(stream);
  CHECK(values(run.out.slice(0, 0, 71), stream) == before);
}

void check_empty(StreamRef stream) {
  Run none({2, 1, 8}, {}, DType::kFloat32, stream);
  CHECK(none.results(stream).empty());
  Run zeros({2, 1, 8}, {0, 0}, DType::kFloat32, stream);
  CHECK(zeros.results(stream).empty());
}

}  // namespace

TEST_CASE("Attention and its gradients match their definition", "[ops][attention]") {
  const PoisonedMemory memory(Device::cpu());
  for (const DType dtype : kCpuDtypes) {
    for (const Heads& heads : kHeads) check_attention(heads, kFewLengths, dtype, StreamRef());
    for (const Heads& heads : kUnevenHeads) check_attention(heads, kFewLengths, dtype, StreamRef(), 1.0, 3, 5);
    check_attention({4, 2, 32}, kLengths, dtype, StreamRef());
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("Attention takes scores far from zero", "[ops][attention]") {
  const PoisonedMemory memory(Device::cpu());
  for (const DType dtype : kCpuDtypes) check_attention({2, 1, 32}, {70}, dtype, StreamRef(), 8.0);
}

TEST_CASE("Attention takes more than 65535 tokens", "[ops][attention]") {
  const PoisonedMemory memory(Device::cpu());
  check_attention({1, 1, 4}, Lengths(23334, 3), DType::kFloat32, StreamRef());
}

TEST_CASE("Attention's gradients agree with finite differences", "[ops][attention]") {
  const StreamRef cpu;
  Run run({4, 2, 6}, {3, 0, 1, 7}, DType::kFloat64, cpu);
  const std::vector<double> weights = values(run.dout, cpu);
  run.forward(cpu);
  run.backward(cpu);
  const auto loss = [&] {
    run.forward(cpu);
    return dot(values(run.out, cpu), weights);
  };
  check_gradient(loss, run.q, values(run.dq, cpu));
  check_gradient(loss, run.k, values(run.dk, cpu));
  check_gradient(loss, run.v, values(run.dv, cpu));
}

TEST_CASE("Attention never crosses sequences", "[ops][attention]") {
  for (const DType dtype : kCpuDtypes) check_sequences_are_apart(32, dtype, StreamRef());
}

TEST_CASE("Attention never looks ahead", "[ops][attention]") {
  for (const DType dtype : kCpuDtypes) check_causal(16, dtype, StreamRef());
}

TEST_CASE("Attention's results do not depend on threads", "[ops][attention]") {
  for (const DType dtype : kCpuDtypes) {
    CHECK(same_with_any_threads([&] { return Run({4, 2, 32}, kLengths, dtype, StreamRef()).results(StreamRef()); }));
  }
}

TEST_CASE("Attention over no tokens does nothing", "[ops][attention]") { check_empty(StreamRef()); }

TEST_CASE("Attention refuses head sizes that it cannot do", "[ops][attention]") {
  const StreamRef cpu;
  for (const std::int64_t dim : {7, 258}) {
    Run run({2, 1, dim}, {3}, DType::kFloat32, cpu);
    check_throws(ErrorKind::kUnsupported,
                 "attention_forward: expected an even head_dim in [2, 256], got " + std::to_string(dim),
                 [&] { run.forward(cpu); });
    check_throws(ErrorKind::kUnsupported, "attention_backward: expected an even head_dim", [&] { run.backward(cpu); });
  }
}

TEST_CASE("Attention names what does not fit and writes nothing", "[ops][attention]") {
  const StreamRef cpu;
  const Run good({4, 2, 8}, {2, 3}, DType::kFloat32, cpu);
  const auto refuse = [&](const std::string& part, const std::function<void(Run&)>& spoil) {
    Run run({4, 2, 8}, {2, 3}, DType::kFloat32, cpu);
    for (const Tensor* t : {&run.out, &run.lse, &run.dq, &run.dk, &run.dv}) t->zero(cpu);
    spoil(run);
    check_throws(ErrorKind::kInvalidArgument, "attention_forward: " + part, [&] { run.forward(cpu); });
    check_throws(ErrorKind::kInvalidArgument, "attention_backward: " + part, [&] { run.backward(cpu); });
    for (const Tensor* t : {&run.out, &run.lse, &run.dq, &run.dk, &run.dv}) {
      CHECK(values(*t, cpu) == constant(at(t->elements()), 0));
    }
  };
  refuse("expected k of shape [5, 2, 8], got [5, 2, 10]", [&](Run& r) {
    r.k = random_normal({5, 2, 10}, DType::kFloat32, 1, cpu);
  });
  refuse("expected the number of query heads to be a multiple", [&](Run& r) {
    r.k = random_normal({5, 3, 8}, DType::kFloat32, 1, cpu);
  });
  refuse("expected v of dtype float32, got bfloat16", [&](Run& r) {
    r.v = random_normal({5, 2, 8}, DType::kBFloat16, 1, cpu);
  });
  refuse("expected sequence starts of dtype int32, got int64", [&](Run& r) { r.batch.starts = ids64({0, 5}, cpu); });
  refuse("expected sequence starts to begin with 0, got 1", [&](Run& r) { r.batch.starts = ids32({1, 5}, cpu); });
  refuse("expected sequence starts to end with 5", [&](Run& r) { r.batch.starts = ids32({0, 3}, cpu); });
  refuse("expected sequence lengths in [0, 3] (max_length), got -1 at index 1", [&](Run& r) {
    r.batch.starts = ids32({0, 3, 2, 5}, cpu);
  });
  refuse("expected sequence lengths in [0, 2] (max_length), got 3 at index 1", [&](Run& r) { r.batch.max_length = 2; });
  Run run({4, 2, 8}, {2, 3}, DType::kFloat32, cpu);
  check_throws(ErrorKind::kInvalidArgument, "expected a finite scale",
               [&] { attention_forward(run.q, run.k, run.v, run.batch, kNan, run.out, run.lse, cpu); });
  run.dv = random_normal({5, 4, 8}, DType::kFloat32, 1, cpu);
  check_throws(ErrorKind::kInvalidArgument, "expected dv of shape [5, 2, 8], got [5, 4, 8]",
               [&] { run.backward(cpu); });
}

TEST_CASE("Attention and its gradients match their definition on the GPU in float32",
          "[ops][attention][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const Heads& heads : kHeads) check_attention(heads, kFewLengths, DType::kFloat32, gpu);
  for (const Heads& heads : kUnevenHeads) check_attention(heads, kFewLengths, DType::kFloat32, gpu, 1.0, 3, 5);
  CHECK(memory.violations() == 0);
}

TEST_CASE("Attention and its gradients match their definition on the GPU in 16 bits",
          "[ops][attention][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Heads& heads : kHeads) check_attention(heads, kFewLengths, dtype, gpu);
    for (const Heads& heads : kUnevenHeads) check_attention(heads, kFewLengths, dtype, gpu, 1.0, 3, 5);
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("Attention takes sequences of any length on the GPU", "[ops][attention][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const DType dtype : kGpuDtypes) {
    for (const Heads& heads : kHeads) check_attention(heads, kLengths, dtype, gpu, 1.0, 0, 8, 100);
    check_attention({2, 1, 32}, {70}, dtype, gpu, 8.0);
    for (const std::int64_t head_dim : {64, 128}) check_attention({2, 1, head_dim}, {70, 500}, dtype, gpu, 4.0);
    check_attention({1, 1, 4}, Lengths(23334, 3), dtype, gpu);
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("Attention never crosses sequences or looks ahead on the GPU", "[ops][attention][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    for (const std::int64_t head_dim : {16, 32, 64, 128}) {
      check_sequences_are_apart(head_dim, dtype, gpu);
      check_causal(head_dim, dtype, gpu);
    }
  }
  check_empty(gpu);
}

TEST_CASE("Attention has the same bits in every run on the GPU", "[ops][attention][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    Run run({4, 2, 64}, kLengths, dtype, gpu);
    CHECK(run.results(gpu) == run.results(gpu));
  }
}

TEST_CASE("On the GPU sequence starts beyond the tokens are cut off", "[ops][attention][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const auto& [dtype, head_dim] :
       {std::pair{DType::kFloat32, 32}, {DType::kBFloat16, 32}, {DType::kBFloat16, 64}}) {
    CAPTURE(dtype, head_dim);
    Run run({2, 1, head_dim}, {64}, dtype, gpu);
    const std::vector<double> right = run.results(gpu);
    run.batch.starts = ids32({0, 2000}, gpu);
    CHECK(run.results(gpu) == right);
    run.batch.starts = ids32({-70, 64, 3}, gpu);
    run.batch.max_length = 500;
    for (const double v : run.results(gpu)) CHECK(std::isfinite(v));
  }
}
