// Muown and Muon. They differ in what surrounds Newton-Schulz; matrices of one shape and group share its call.
#include <algorithm>
#include <map>

#include "core/check.h"
#include "optim/matrix_settings.h"
#include "optim/updater.h"
#include "rowan/ops/muon.h"

namespace rowan::detail {

namespace {

/// Elements of U that one Newton-Schulz call takes at most, unless a single matrix is larger: bounds the workspace of a
/// large model.
constexpr std::int64_t kMostStackedElements = std::int64_t{1} << 26;

struct Member {
  OptimizedParameter parameter;
  MuownState state;    // Muon: momentum alone
  MuownUpdate update;  // views into the bucket's; Muon: update alone
};

/// Matrices of one shape, layout, dtype and group.
struct Bucket {
  const ParameterGroup* group = nullptr;
  MuownOptions options;
  std::vector<RowBlock> blocks;  // never empty
  DType update_dtype = DType::kBFloat16;
  std::vector<Member> members;
  Tensor updates;          // U [members, shape]
  Tensor orthogonal;       // O likewise
  Tensor row_square_sums;  // [members, .., N], Muown
};

bool is_muown(const Bucket& bucket) { return bucket.group->algorithm == Algorithm::kMuown; }

Bucket make_bucket(const OptimizedParameter& p) {
  const ParameterGroup& group = *p.group;
  const std::string op = fmt::format("{} of \"{}\"", to_string(group.algorithm), p.name);
  require(p.master.rank() == 2 || p.master.rank() == 3, "{}: expected a matrix, got shape {}", op, p.master.shape());
  Bucket bucket;
  bucket.group = &group;
  bucket.update_dtype = dtype_of_update(group, p.master.dtype());
  const std::int64_t rows = output_neurons(p.master, p.layout);
  std::int64_t blocks_rows = 0;
  for (const std::int64_t block : group.row_blocks) {
    bucket.blocks.push_back({block, block});
    blocks_rows += block;
  }
  if (bucket.blocks.empty()) {
    bucket.blocks.push_back({rows, rows});
    blocks_rows = rows;
  }
  require(blocks_rows == rows, "{}: expected row_blocks that add up to {} output neurons, got {}", op, rows,
          blocks_rows);
  bucket.options = muown_options(group, p.layout, bucket.blocks);
  if (group.algorithm == Algorithm::kMuown) {
    const MuownSupport support = muown_supported(p.master, bucket.options);
    require(support.supported, "{}: {}", op, support.reason);
  }
  return bucket;
}

bool fits(const Bucket& bucket, const OptimizedParameter& p) {
  const OptimizedParameter& first = bucket.members.front().parameter;
  const auto count = static_cast<std::int64_t>(bucket.members.size());
  return bucket.group == p.group && first.master.shape() == p.master.shape() &&
         first.master.dtype() == p.master.dtype() && first.layout == p.layout &&
         (count + 1) * p.master.elements() <= kMostStackedElements;
}

Shape stacked(std::int64_t count, const Shape& shape) {
  std::vector<std::int64_t> extents{count};
  extents.insert(extents.end(), shape.extents().begin(), shape.extents().end());
  return Shape(std::span<const std::int64_t>(extents));
}

class MatrixUpdater final : public Updater {
 public:
  MatrixUpdater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
    for (OptimizedParameter& p : parameters) {
      auto bucket = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) { return fits(b, p); });
      if (bucket == buckets_.end()) bucket = buckets_.insert(buckets_.end(), make_bucket(p));
      bucket->members.push_back({std::move(p), {}, {}});
    }
    make_workspace(stream);
    for (Bucket& bucket : buckets_) make_state(bucket, stream);
  }

  void apply(std::span<const Tensor> gradients, bool, StreamRef stream, Communicator&) override {
    for (Bucket& bucket : buckets_) {
      const auto has_gradient = [&](const Member& m) { return gradients[m.parameter.index].defined(); };
      if (std::none_of(bucket.members.begin(), bucket.members.end(), has_gradient)) continue;
      // A member without a gradient leaves what was in its part of U; its O is not used.
      for (Member& member : bucket.members) {
        if (has_gradient(member)) prepare(bucket, member, gradients[member.parameter.index], stream);
      }
      orthogonalise(bucket, stream);
      for (std::size_t i = 0; i < bucket.members.size(); ++i) {
        Member& member = bucket.members[i];
        if (!has_gradient(member)) continue;
        const Tensor orthogonal = bucket.orthogonal.select(0, static_cast<std::int64_t>(i));
        finish(bucket, member, gradients[member.parameter.index], orthogonal, stream);
      }
    }
  }

  void append_state(std::vector<NamedTensor>& state) const override {
    for (const Bucket& bucket : buckets_) {
      for (const Member& m : bucket.members) {
        const std::string& name = m.parameter.name;
        state.push_back({"momentum." + name, m.state.momentum});
        if (!is_muown(bucket)) continue;
        state.push_back({"magnitude." + name, m.state.magnitude});
        state.push_back({"norm." + name, m.state.norm});
        state.push_back({"first_moment." + name, m.state.first_moment});
        state.push_back({"second_moment." + name, m.state.second_moment});
      }
    }
  }

 private:
  /// Buckets take turns with one U and one O of each dtype.
  void make_workspace(StreamRef stream) {
    std::map<DType, std::int64_t> elements;
    for (const Bucket& bucket : buckets_) {
      const auto count = static_cast<std::int64_t>(bucket.members.size());
      std::int64_t& most = elements[bucket.update_dtype];
      most = std::max(most, count * bucket.members.front().parameter.master.elements());
    }
    for (const auto& [dtype, most] : elements) {
      const Tensor updates = Tensor::zeros({most}, dtype, stream);
      const Tensor orthogonal = Tensor::zeros({most}, dtype, stream);
      for (Bucket& bucket : buckets_) {
        if (bucket.update_dtype != dtype) continue;
        const Shape shape =
            stacked(static_cast<std::int64_t>(bucket.members.size()), bucket.members.front().parameter.master.shape());
        bucket.updates = updates.slice(0, 0, shape.elements()).reshape(shape);
        bucket.orthogonal = orthogonal.slice(0, 0, shape.elements()).reshape(shape);
      }
    }
  }

  static void make_state(Bucket& bucket, StreamRef stream) {
    const Tensor& first = bucket.members.front().parameter.master;
    const auto count = static_cast<std::int64_t>(bucket.members.size());
    Tensor magnitude_grads, row_maxima;
    if (is_muown(bucket)) {
      const std::int64_t rows = output_neurons(first, bucket.options.layout);
      const Shape shape = stacked(count, first.rank() == 3 ? Shape{first.size(0), rows} : Shape{rows});
      magnitude_grads = Tensor::zeros(shape, first.dtype(), stream);
      row_maxima = Tensor::zeros(shape, first.dtype(), stream);
      bucket.row_square_sums = Tensor::zeros(shape, DType::kFloat64, stream);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      Member& member = bucket.members[static_cast<std::size_t>(i)];
      member.update.update = bucket.updates.select(0, i);
      if (!is_muown(bucket)) {
        member.state.momentum = Tensor::zeros(first.shape(), first.dtype(), stream);
        continue;
      }
      member.update.magnitude_grad = magnitude_grads.select(0, i);
      member.update.row_max = row_maxima.select(0, i);
      member.update.row_square_sum = bucket.row_square_sums.select(0, i);
      member.state = muown_init(member.parameter.master, bucket.options, stream);
    }
  }

  static void prepare(const Bucket& bucket, Member& member, const Tensor& gradient, StreamRef stream) {
    const OptimizedParameter& p = member.parameter;
    if (is_muown(bucket)) {
      muown_prepare(p.master, gradient, member.state, bucket.options, p.control, member.update, stream);
    } else {
      muon_prepare(gradient, member.state.momentum, bucket.group->momentum, bucket.group->nesterov, p.control,
                   member.update.update, stream);
    }
  }

  static void orthogonalise(const Bucket& bucket, StreamRef stream) {
    const MatrixLayout layout = bucket.options.layout;
    std::int64_t begin = 0;
    for (const RowBlock& block : bucket.blocks) {
      Tensor out = rows_of(bucket.orthogonal, layout, begin, block.rows);
      Tensor square_sums;
      if (is_muown(bucket)) square_sums = bucket.row_square_sums.slice(-1, begin, begin + block.rows);
      newton_schulz(rows_of(bucket.updates, layout, begin, block.rows), out, bucket.group->newton_schulz, stream,
                    square_sums.defined() ? &square_sums : nullptr);
      begin += block.rows;
    }
  }

  static void finish(const Bucket& bucket, Member& member, const Tensor& gradient, const Tensor& orthogonal,
                     StreamRef stream) {
    OptimizedParameter& p = member.parameter;
    if (is_muown(bucket)) {
      muown_finish(p.master, gradient, member.state, orthogonal, member.update.magnitude_grad, bucket.options,
                   {p.rates, p.step, p.control}, p.copy.defined() ? &p.copy : nullptr, stream);
      return;
    }
    const MatrixLayout layout = bucket.options.layout;
    std::int64_t begin = 0;
    for (const RowBlock& block : bucket.blocks) {
      Tensor weight = rows_of(p.master, layout, begin, block.rows);
      Tensor copy;
      if (p.copy.defined()) copy = rows_of(p.copy, layout, begin, block.rows);
      const double scale = muown_scale(block.global_rows, columns(p.master, layout), bucket.group->update_scale);
      muon_finish(weight, rows_of(orthogonal, layout, begin, block.rows), scale, p.rates, p.control,
                  copy.defined() ? &copy : nullptr, stream);
      begin += block.rows;
    }
  }

  std::vector<Bucket> buckets_;
};

}  // namespace

std::unique_ptr<Updater> make_matrix_updater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
  return std::make_unique<MatrixUpdater>(std::move(parameters), stream);
}

}  // namespace rowan::detail
