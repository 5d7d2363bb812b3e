#include "rowan/ops/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/parallel.h"
#include "ops/alias.h"
#include "ops/matrix_view.h"
#include "ops/newton_schulz_backend.h"
#include "ops/newton_schulz_products.h"

namespace rowan {

namespace {

using detail::require;

constexpr const char* kOp = "newton_schulz";
constexpr std::int64_t kSkinnySide = 64;

struct PathName {
  NewtonSchulzPath path;
  const char* name;
};
constexpr PathName kPathNames[] = {
    {NewtonSchulzPath::kAuto, "auto"},          {NewtonSchulzPath::kStandard, "standard"},
    {NewtonSchulzPath::kGram, "gram"},          {NewtonSchulzPath::kSkinny, "skinny"},
    {NewtonSchulzPath::kGramFp32, "gram_fp32"}, {NewtonSchulzPath::kSvd, "svd"}};

NewtonSchulzMatrix check_matrix(const char* name, const Tensor& t, NewtonSchulzPath path, StreamRef stream) {
  const detail::MatrixView view = detail::matrix_view(kOp, name, t);
  require(t.dtype() == DType::kBFloat16 || t.dtype() == DType::kFloat32 ||
              (t.dtype() == DType::kFloat64 && path == NewtonSchulzPath::kSvd),
          "{}: expected {} of dtype bfloat16 or float32 (float64 for svd), got {}", kOp, name, t.dtype());
  detail::require_on(kOp, name, t, stream);
  return {t.raw(), t.dtype(), view.batches, view.rows, view.cols, view.batch_stride, view.row_stride};
}

void set_square_sums(const Tensor& sums, const Tensor& u, InverseNormArguments& norms, StreamRef stream) {
  detail::require_dtype(kOp, "row_square_sum", sums, DType::kFloat64);
  detail::require_on(kOp, "row_square_sum", sums, stream);
  require(sums.rank() == u.rank() - 1, "{}: expected row_square_sum of rank {}, got shape {}", kOp, u.rank() - 1,
          sums.shape());
  for (int d = 0; d < sums.rank() - 1; ++d) {
    require(sums.size(d) == u.size(d), "{}: expected row_square_sum with the leading dimensions of {}, got shape {}",
            kOp, u.shape(), sums.shape());
  }
  detail::require_unit_columns(kOp, "row_square_sum", sums);
  // The leading dimensions of [.., n] are those of [.., n, 1].
  const bool two = sums.rank() == 3 && sums.size(0) > 1 && sums.size(1) > 1;
  require(!two || sums.stride(0) == sums.stride(1) * sums.size(1),
          "{}: expected row_square_sum with leading dimensions that one stride walks, got shape {}", kOp, sums.shape());
  norms.square_sums = sums.data<double>();
  norms.square_sum_count = sums.size(-1);
  if (sums.rank() == 2) norms.square_sum_stride = sums.stride(0);
  if (sums.rank() == 3) norms.square_sum_stride = sums.size(1) > 1 ? sums.stride(1) : sums.stride(0);
}

/// float64 [batches].
Tensor inverse_norms(InverseNormArguments& norms, StreamRef stream) {
  Tensor inverse = Tensor::empty({norms.u.batches}, DType::kFloat64, stream);
  norms.inverse = inverse.data<double>();
  if (stream.device().is_cuda()) {
    const Tensor workspace = Tensor::empty({cuda::inverse_norms_workspace(norms)}, DType::kFloat64, stream);
    cuda::inverse_norms(norms, workspace.data<double>(), stream);
  } else {
    cpu::inverse_norms(norms);
  }
  return inverse;
}

/// Matrix `batch` of a batch alone.
NewtonSchulzMatrix single(NewtonSchulzMatrix m, std::int64_t batch) {
  m.data = static_cast<std::byte*>(m.data) + batch * m.batch_stride * static_cast<std::int64_t>(size_of(m.dtype));
  m.batches = 1;
  return m;
}

/// On the CPU the matrices of a batch are treated one by one, so that bits do not depend on how many there are.
void standard(const GramFloatArguments& a, const Tensor& inverse, StreamRef stream) {
  if (stream.device().is_cuda() || a.u.batches == 1) {
    detail::newton_schulz_standard(a.u, a.out, inverse, a.steps, stream);
    return;
  }
  detail::parallel_for(a.u.batches, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      detail::newton_schulz_standard(single(a.u, b), single(a.out, b), inverse.slice(0, b, b + 1), a.steps, stream);
    }
  });
}

/// Applying Q to X and taking the Gram matrix anew costs a whole and a symmetric product of p x p with p x q a step,
/// carrying R and Q on three symmetric ones of p x p with p x p. Where X is nearly square every step restarts, which
/// also rounds least.
int steps_a_restart(const NewtonSchulzMatrix& u) { return 2 * u.long_side() <= 3 * u.short_side() ? 1 : 3; }

/// CPU: every path but standard and svd in float32, without rounding operands to float16 as CUDA's gram does: faster
/// there and nearer to the exact polynomial.
void run(NewtonSchulzPath path, const GramFloatArguments& a, const Tensor& inverse, StreamRef stream) {
  if (path == NewtonSchulzPath::kStandard) {
    standard(a, inverse, stream);
  } else if (stream.device().is_cpu()) {
    cpu::newton_schulz_gram_float(a);
  } else if (path == NewtonSchulzPath::kSkinny) {
    const Tensor workspace = Tensor::empty({cuda::newton_schulz_skinny_workspace(a.u)}, DType::kFloat32, stream);
    cuda::newton_schulz_skinny(a, workspace.data<float>(), stream);
  } else if (path == NewtonSchulzPath::kGram) {
    detail::newton_schulz_gram(a.u, a.out, inverse, a.steps, steps_a_restart(a.u), stream);
  } else {
    detail::newton_schulz_gram_fp32(a.u, a.out, inverse, a.steps, stream);
  }
}

/// Stacks of one launch, with their tables and scratch memory on the device.
class SkinnyLaunch {
 public:
  void add(const NewtonSchulzMatrix& u, const InverseNormArguments& norms) {
    SkinnyStack stack;
    stack.u = stack.out = u;
    stack.square_sums = norms.square_sums;
    stack.square_sum_count = norms.square_sum_count;
    stack.square_sum_stride = norms.square_sum_stride;
    stack.first_matrix = count(of_matrix_);
    stack.first_gram_block = count(of_gram_block_);
    stack.first_apply_block = count(of_apply_block_);
    extend(of_matrix_, u.batches);
    extend(of_gram_block_, cuda::skinny_gram_blocks(u));
    extend(of_apply_block_, cuda::skinny_apply_blocks(u));
    stacks_.push_back(stack);
  }

  void to_device(StreamRef stream) {
    static_assert(sizeof(SkinnyStack) % sizeof(std::int64_t) == 0);
    const std::size_t bytes = stacks_.size() * sizeof(SkinnyStack);
    const auto keep = [&](Tensor tensor) { return kept_.emplace_back(std::move(tensor)).raw(); };
    const auto index = [&](const std::vector<std::int32_t>& of) {
      return static_cast<const std::int32_t*>(keep(Tensor::from_host({count(of)}, of, stream)));
    };
    table_.stacks = static_cast<const SkinnyStack*>(keep(Tensor::from_host_bytes(
        {static_cast<std::int64_t>(bytes / sizeof(std::int64_t))}, DType::kInt64, stacks_.data(), bytes, stream)));
    table_.stack_of_matrix = index(of_matrix_);
    table_.stack_of_gram_block = index(of_gram_block_);
    table_.stack_of_apply_block = index(of_apply_block_);
    table_.matrices = count(of_matrix_);
    table_.gram_blocks = count(of_gram_block_);
    table_.apply_blocks = count(of_apply_block_);
    const std::int64_t side = cuda::skinny_side(stacks_.front().u);
    const auto scratch = [&](const Shape& shape, DType dtype) { return keep(Tensor::empty(shape, dtype, stream)); };
    table_.inverse = static_cast<double*>(scratch({table_.matrices}, DType::kFloat64));
    table_.partials = static_cast<float*>(scratch({table_.gram_blocks, side, side}, DType::kFloat32));
    table_.polynomials = static_cast<float*>(scratch({table_.matrices, side, side}, DType::kFloat32));
  }

  void run(double norm_factor, double epsilon, const NewtonSchulzSteps& steps, StreamRef stream) const {
    const NewtonSchulzMatrix& like = stacks_.front().u;
    cuda::newton_schulz_skinny(table_, like, like, norm_factor, epsilon, steps, stream);
    for (const Tensor& tensor : kept_) tensor.record_use(stream);
  }

 private:
  static std::int64_t count(const std::vector<std::int32_t>& of) { return static_cast<std::int64_t>(of.size()); }
  void extend(std::vector<std::int32_t>& of, std::int64_t blocks) {
    of.insert(of.end(), static_cast<std::size_t>(blocks), static_cast<std::int32_t>(stacks_.size()));
  }

  std::vector<SkinnyStack> stacks_;
  std::vector<std::int32_t> of_matrix_, of_gram_block_, of_apply_block_;
  std::vector<Tensor> kept_;
  SkinnyTable table_;
};

}  // namespace

NewtonSchulzSteps detail::newton_schulz_steps(const NewtonSchulzOptions& options) {
  detail::require(options.steps >= 1 && options.steps <= NewtonSchulzSteps::kMost, "{}: expected 1 to {} steps, got {}",
                  kOp, static_cast<int>(NewtonSchulzSteps::kMost), options.steps);
  detail::require(options.epsilon >= 0 && std::isfinite(options.epsilon),
                  "{}: expected an epsilon of 0 or more, got {}", kOp, options.epsilon);
  const auto& [coefficients, factor] = options.schedule;
  detail::require(factor > 0 && std::isfinite(factor), "{}: expected a norm_factor above 0, got {}", kOp, factor);
  detail::require(!coefficients.empty(), "{}: expected coefficients, got an empty schedule", kOp);
  NewtonSchulzSteps steps;
  for (; steps.count < options.steps; ++steps.count) {
    const NewtonSchulzCoefficients& step =
        coefficients[std::min(static_cast<std::size_t>(steps.count), coefficients.size() - 1)];
    detail::require(std::isfinite(step.a) && std::isfinite(step.b) && std::isfinite(step.c),
                    "{}: expected finite coefficients, got {}, {}, {}", kOp, step.a, step.b, step.c);
    steps.step[steps.count] = step;
  }
  return steps;
}

const char* to_string(NewtonSchulzPath path) noexcept {
  for (const auto& [value, name] : kPathNames) {
    if (value == path) return name;
  }
  return "?";
}

NewtonSchulzPath parse_newton_schulz_path(const std::string& text) {
  for (const auto& [value, name] : kPathNames) {
    if (text == name) return value;
  }
  detail::fail(ErrorKind::kInvalidArgument, "{}: expected auto, standard, gram, skinny, gram_fp32 or svd, got {}", kOp,
               text);
}

NewtonSchulzSchedule newton_schulz_schedule(const std::string& name) {
  if (name == "jordan") return {{{3.4445, -4.7750, 2.0315}}, 1.0};
  if (name == "quintic") {
    return {{{4.0848, -6.8946, 2.9270},
             {3.9505, -6.3029, 2.6377},
             {3.7418, -5.5913, 2.3037},
             {2.8769, -3.1427, 1.2046},
             {2.8366, -3.0525, 1.2012}},
            1.0};
  }
  if (name == "polar_express") {
    return {{{8.1566, -22.4833, 15.8788},
             {4.0429, -2.8089, 0.5000},
             {3.8917, -2.7725, 0.5061},
             {3.2858, -2.3681, 0.4645},
             {2.3465, -1.7098, 0.4232}},
            1.02};
  }
  detail::fail(ErrorKind::kInvalidArgument, "{}: expected coefficients jordan, quintic or polar_express, got {}", kOp,
               name);
}

NewtonSchulzPath resolve_newton_schulz_path(NewtonSchulzPath path, std::int64_t rows, std::int64_t columns) noexcept {
  if (path != NewtonSchulzPath::kAuto) return path;
  return std::min(rows, columns) <= kSkinnySide ? NewtonSchulzPath::kSkinny : NewtonSchulzPath::kGram;
}

void newton_schulz(const Tensor& u, Tensor& out, const NewtonSchulzOptions& options, StreamRef stream,
                   const Tensor* row_square_sum) {
  GramFloatArguments a;
  a.u = check_matrix("u", u, options.path, stream);
  detail::require_shape(kOp, "out", out, u.shape());
  a.out = check_matrix("out", out, options.path, stream);
  a.steps = detail::newton_schulz_steps(options);
  const NewtonSchulzPath path = resolve_newton_schulz_path(options.path, a.u.rows, a.u.cols);
  require(path != NewtonSchulzPath::kSkinny || a.u.short_side() <= kSkinnySide,
          "{}: expected a shorter side of at most {} for skinny, got shape {}", kOp, kSkinnySide, u.shape());
  if (path == NewtonSchulzPath::kSvd && stream.device().is_cuda()) {
    detail::fail(ErrorKind::kUnsupported, "{}: expected svd on the CPU, got {}", kOp, stream.device());
  }
  detail::require_apart(kOp, "out", out, "u", u);
  InverseNormArguments norms;
  norms.u = a.u;
  if (row_square_sum) set_square_sums(*row_square_sum, u, norms, stream);
  if (u.elements() == 0) return;

  if (path == NewtonSchulzPath::kSvd) {
    cpu::polar_factor(a.u, a.out);
    return;
  }
  norms.factor = options.schedule.norm_factor;
  norms.epsilon = options.epsilon;
  norms.round_to_bfloat16 = path == NewtonSchulzPath::kStandard;
  const Tensor inverse = inverse_norms(norms, stream);
  a.inverse = inverse.data<double>();
  run(path, a, inverse, stream);
  u.record_use(stream);
  out.record_use(stream);
  if (row_square_sum) row_square_sum->record_use(stream);
}

struct SkinnyBatch::Table {
  std::vector<SkinnyItem> items;
  NewtonSchulzOptions options;
  NewtonSchulzSteps steps;
  std::vector<std::pair<NewtonSchulzMatrix, InverseNormArguments>> matrices;  // CPU
  std::map<std::pair<DType, int>, SkinnyLaunch> launches;                     // CUDA, by dtype and padded side
};

SkinnyBatch::SkinnyBatch(std::span<const SkinnyItem> items, const NewtonSchulzOptions& options, StreamRef stream) {
  auto table = std::make_shared<Table>();
  table->items.assign(items.begin(), items.end());
  table->options = options;
  table->steps = detail::newton_schulz_steps(options);
  for (const SkinnyItem& item : table->items) {
    const NewtonSchulzMatrix u = check_matrix("u", item.matrices, NewtonSchulzPath::kSkinny, stream);
    require(u.short_side() <= kSkinnySide, "{}: expected a shorter side of at most {} for skinny, got shape {}", kOp,
            kSkinnySide, item.matrices.shape());
    InverseNormArguments norms;
    norms.u = u;
    norms.factor = options.schedule.norm_factor;
    norms.epsilon = options.epsilon;
    detail::require_defined(kOp, "row_square_sum", item.row_square_sum);
    set_square_sums(item.row_square_sum, item.matrices, norms, stream);
    if (item.matrices.elements() == 0) continue;
    if (stream.device().is_cuda()) {
      table->launches[{u.dtype, cuda::skinny_side(u)}].add(u, norms);
    } else {
      table->matrices.emplace_back(u, norms);
    }
  }
  for (auto& [key, launch] : table->launches) launch.to_device(stream);
  table_ = std::move(table);
}

void SkinnyBatch::run(StreamRef stream) const {
  require(table_ != nullptr, "{}: expected a list of matrices, got a default-constructed one", kOp);
  const double factor = table_->options.schedule.norm_factor, epsilon = table_->options.epsilon;
  for (const auto& [key, launch] : table_->launches) launch.run(factor, epsilon, table_->steps, stream);
  const auto count = static_cast<std::int64_t>(table_->matrices.size());
  detail::parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      auto [u, norms] = table_->matrices[static_cast<std::size_t>(i)];
      const Tensor inverse = inverse_norms(norms, stream);
      cpu::newton_schulz_gram_float({u, u, inverse.data<double>(), table_->steps});
    }
  });
  for (const SkinnyItem& item : table_->items) {
    item.matrices.record_use(stream);
    item.row_square_sum.record_use(stream);
  }
}

}  // namespace rowan
