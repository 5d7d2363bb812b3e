#include "rowan/optim/data_parallel.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "optim/matrix_settings.h"
#include "rowan/ops/elementwise.h"

namespace rowan {

namespace {

using detail::require;

/// Elements, over all ranks, that one collective takes, unless a single parameter has more: bounds the copies of
/// gradients and masters that are under way.
constexpr std::int64_t kMostBucketElements = std::int64_t{1} << 25;

/// The dimension of a parameter that is split: its output neurons.
int row_dim(const Parameter& p) {
  if (p.value.rank() < 2) return 0;
  return p.layout == MatrixLayout::kOutIn ? p.value.rank() - 2 : p.value.rank() - 1;
}

/// A parameter and its rows by rank: rank r holds [begins[r], begins[r + 1]).
struct Split {
  Parameter whole;
  std::vector<std::int64_t> begins;

  Tensor rows(const Tensor& t, int dim, std::size_t rank) const { return t.slice(dim, begins[rank], begins[rank + 1]); }
  Tensor rows(const Tensor& t, std::size_t rank) const { return rows(t, row_dim(whole), rank); }
  std::int64_t elements(std::size_t rank) const { return rows(whole.value, rank).elements(); }
};

/// Parameters of one dtype that share collectives. Each rank's rows of all of them lie one after the other in a row of
/// `length` elements, the longest rank's.
struct Bucket {
  std::vector<std::size_t> splits;
  DType dtype = DType::kFloat32;
  std::int64_t length = 0;
};

class DataParallelOptimizer final : public Optimizer {
 public:
  DataParallelOptimizer(const OptimizerOptions& options, std::span<const Parameter> parameters,
                        Communicator& communicator, StreamRef stream)
      : communicator_(communicator),
        rank_(static_cast<std::size_t>(communicator.rank())),
        ranks_(static_cast<std::size_t>(communicator.size())) {
    split(parameters);
    make_buckets(stream);
    inner_ = make_optimizer(options, shards_, stream);
  }

  void stage(std::span<const Parameter> parameters, const StepValues& values, StreamRef stream) override {
    std::size_t i = 0;
    for (const Parameter& p : parameters) {
      if (!p.trainable) continue;
      require(i < splits_.size() && p.name == splits_[i].whole.name && p.value.raw() == splits_[i].whole.value.raw(),
              "optimizer: expected the parameters that it was made for, got \"{}\" as number {}", p.name, i);
      Split& own = splits_[i];
      own.whole.grad = p.grad;
      own.whole.has_grad = p.has_grad && p.grad.defined();
      shards_[i].has_grad = own.whole.has_grad;
      ++i;
    }
    require(i == splits_.size(), "optimizer: expected {} trainable parameters, got {}", splits_.size(), i);
    inner_->stage(shards_, values, stream);
  }

  std::vector<SplitRows> split_rows() const override {
    std::vector<SplitRows> all;
    for (const Split& split : splits_)
      all.push_back({split.whole.name, split.begins.back(), {split.begins.begin(), split.begins.end() - 1}});
    return all;
  }

  void apply(std::span<const Parameter>, StreamRef stream, Communicator& communicator) override {
    require(&communicator == &communicator_, "optimizer: expected the communicator that it was made for, got another");
    for (const Bucket& bucket : buckets_) reduce_gradients(bucket, stream);
    inner_->apply(shards_, stream, communicator);
    for (const Bucket& bucket : buckets_) gather(bucket, stream);
  }

  void skip_step(StreamRef stream) override { inner_->skip_step(stream); }
  StepReport report(StreamRef stream) const override { return inner_->report(stream); }
  const OptimizerOptions& options() const noexcept override { return inner_->options(); }
  bool sums_gradients() const noexcept override { return true; }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> whole;
    for (const NamedTensor& part : inner_->state()) {
      const Split* const split = split_of(part.name);
      whole.push_back({part.name, split ? gather_state(*split, part.tensor) : part.tensor});
    }
    return whole;
  }

  void load_state(std::span<const NamedTensor> state, StreamRef stream) override {
    std::vector<NamedTensor> own;
    for (const NamedTensor& saved : state) {
      const Split* const split = split_of(saved.name);
      own.push_back({saved.name, split && saved.tensor.defined() ? own_rows(*split, saved) : saved.tensor});
    }
    inner_->load_state(own, stream);
    for (const Bucket& bucket : buckets_) gather(bucket, stream);
  }

 private:
  void split(std::span<const Parameter> parameters) {
    std::vector<std::int64_t> loads(ranks_);  // elements of whole A factors
    for (const Parameter& p : parameters) {
      if (!p.trainable) continue;
      require(p.value.defined() && p.value.rank() >= 1, "optimizer: expected \"{}\" of rank 1 or more", p.name);
      require(p.shard.global_rows == 0, "optimizer: expected \"{}\" whole on every rank, got rows of {}", p.name,
              p.shard.global_rows);
      Split split{p, {}};
      const std::int64_t rows = p.value.size(row_dim(p));
      const auto owner = static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
      for (std::size_t r = 0; r <= ranks_; ++r) {
        const auto before = static_cast<std::int64_t>(r), all = static_cast<std::int64_t>(ranks_);
        split.begins.push_back(p.role == Parameter::Role::kLoraA ? (r > owner ? rows : 0) : rows * before / all);
      }
      if (p.role == Parameter::Role::kLoraA) loads[owner] += p.value.elements();
      splits_.push_back(std::move(split));
    }
  }

  static DType gradient_dtype(const Parameter& p) {
    return p.value.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  void make_buckets(StreamRef stream) {
    std::vector<std::int64_t> lengths;  // of the last bucket, by rank
    for (std::size_t i = 0; i < splits_.size(); ++i) {
      const Split& split = splits_[i];
      const DType dtype = gradient_dtype(split.whole);
      const bool fits = !buckets_.empty() && buckets_.back().dtype == dtype &&
                        buckets_.back().length * static_cast<std::int64_t>(ranks_) + split.whole.value.elements() <=
                            kMostBucketElements;
      if (!fits) {
        buckets_.push_back({{}, dtype, 0});
        lengths.assign(ranks_, 0);
      }
      Bucket& bucket = buckets_.back();
      bucket.splits.push_back(i);
      for (std::size_t r = 0; r < ranks_; ++r) {
        lengths[r] += split.elements(r);
        bucket.length = std::max(bucket.length, lengths[r]);
      }
    }
    for (Bucket& bucket : buckets_) {
      gradients_.push_back(Tensor::zeros({bucket.length}, bucket.dtype, stream));
      std::int64_t begin = 0;
      for (const std::size_t i : bucket.splits) {
        const Split& split = splits_[i];
        Parameter shard = split.whole;
        shard.value = split.rows(split.whole.value, rank_);
        if (split.whole.master.defined()) shard.master = split.rows(split.whole.master, rank_);
        const std::int64_t end = begin + split.elements(rank_);
        shard.grad = gradients_.back().slice(0, begin, end).reshape(shard.value.shape());
        shard.shard = {split.whole.value.size(row_dim(split.whole)), split.begins[rank_]};
        shards_.push_back(std::move(shard));
        begin = end;
      }
    }
  }

  /// Calls f(split, rank, rank's rows in `rows`) for what lies in a [ranks, length] tensor.
  template <class F>
  void for_each_piece(const Bucket& bucket, const Tensor& rows, const F& f) const {
    for (std::size_t r = 0; r < ranks_; ++r) {
      const Tensor row = rows.select(0, static_cast<std::int64_t>(r));
      std::int64_t begin = 0;
      for (const std::size_t i : bucket.splits) {
        const std::int64_t end = begin + splits_[i].elements(r);
        if (end > begin)
          f(splits_[i], r, row.slice(0, begin, end).reshape(splits_[i].rows(splits_[i].whole.value, r).shape()));
        begin = end;
      }
    }
  }

  Shape all_rows(const Bucket& bucket) const { return {static_cast<std::int64_t>(ranks_), bucket.length}; }

  void reduce_gradients(const Bucket& bucket, StreamRef stream) {
    if (bucket.length == 0) return;
    const Tensor whole = Tensor::zeros(all_rows(bucket), bucket.dtype, stream);
    for_each_piece(bucket, whole, [&](const Split& split, std::size_t rank, const Tensor& piece) {
      if (split.whole.has_grad) piece.copy_from(split.rows(split.whole.grad, rank), stream);
    });
    Tensor own = gradients_[static_cast<std::size_t>(&bucket - buckets_.data())].reshape({1, bucket.length});
    communicator_.reduce_scatter(whole, own, ReduceOp::kSum, stream);
  }

  /// What the ranks exchange after a step, and values are rounded copies of.
  static const Tensor& stepped(const Parameter& p) { return p.has_own_master() ? p.master : p.value; }

  void gather(const Bucket& bucket, StreamRef stream) {
    if (bucket.length == 0) return;
    // Values without a master may be of 16 bits: by dtype, one after the other.
    for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      const auto is_of = [&](const Split& s) { return stepped(s.whole).dtype() == dtype; };
      if (std::none_of(bucket.splits.begin(), bucket.splits.end(), [&](std::size_t i) { return is_of(splits_[i]); }))
        continue;
      const Tensor whole = Tensor::empty(all_rows(bucket), dtype, stream);
      for_each_piece(bucket, whole, [&](const Split& split, std::size_t rank, const Tensor& piece) {
        if (rank == rank_ && is_of(split)) piece.copy_from(split.rows(stepped(split.whole), rank), stream);
      });
      const auto begin = static_cast<std::int64_t>(rank_);
      Tensor gathered = whole;
      communicator_.all_gather(whole.slice(0, begin, begin + 1), gathered, stream);
      for_each_piece(bucket, whole, [&](const Split& split, std::size_t rank, const Tensor& piece) {
        if (rank == rank_ || !is_of(split)) return;
        split.rows(stepped(split.whole), rank).copy_from(piece, stream);
        if (!split.whole.has_own_master()) return;
        Tensor value = split.rows(split.whole.value, rank);
        cast(piece, value, stream);
      });
    }
  }

  /// The parameter that a state tensor belongs to, where its rows are split: "momentum.model.norm.weight".
  const Split* split_of(const std::string& state) const {
    const std::size_t dot = state.find('.');
    if (dot == std::string::npos || state.compare(0, dot, "step") == 0) return nullptr;
    const std::string name = state.substr(dot + 1);
    const auto found =
        std::find_if(splits_.begin(), splits_.end(), [&](const Split& s) { return s.whole.name == name; });
    return found == splits_.end() ? nullptr : &*found;
  }

  /// The dimension of a state tensor that goes with the parameter's rows: the same in a tensor of its rank, the last in
  /// one number a row.
  static int state_dim(const Split& split, const Tensor& t) {
    return t.rank() == split.whole.value.rank() ? row_dim(split.whole) : t.rank() - 1;
  }

  Tensor own_rows(const Split& split, const NamedTensor& saved) const {
    const int dim = state_dim(split, saved.tensor);
    const std::int64_t rows = split.begins.back();
    if (dim < 0 || saved.tensor.size(dim) != rows)
      detail::fail(ErrorKind::kFormat, "load_state: expected \"{}\" with {} rows, got shape {}", saved.name, rows,
                   saved.tensor.shape());
    return split.rows(saved.tensor, dim, rank_);
  }

  Tensor gather_state(const Split& split, const Tensor& own) const {
    const StreamRef stream = own.stream();
    const int dim = state_dim(split, own);
    const std::int64_t rows = split.begins.back();
    const Tensor whole = Tensor::empty(own.shape().with(dim, rows), own.dtype(), stream);
    std::int64_t most = 0;
    for (std::size_t r = 0; r < ranks_; ++r) most = std::max(most, split.rows(whole, dim, r).elements());
    Tensor all = Tensor::zeros({static_cast<std::int64_t>(ranks_), most}, own.dtype(), stream);
    const auto piece = [&](std::size_t r) {
      const Tensor part = split.rows(whole, dim, r);
      return all.select(0, static_cast<std::int64_t>(r)).slice(0, 0, part.elements()).reshape(part.shape());
    };
    piece(rank_).copy_from(own, stream);
    const auto begin = static_cast<std::int64_t>(rank_);
    communicator_.all_gather(all.slice(0, begin, begin + 1), all, stream);
    communicator_.synchronize(stream);
    for (std::size_t r = 0; r < ranks_; ++r) split.rows(whole, dim, r).copy_from(piece(r), stream);
    return whole;
  }

  Communicator& communicator_;
  std::size_t rank_, ranks_;
  std::vector<Split> splits_;      // the trainable ones
  std::vector<Parameter> shards_;  // this rank's rows of them
  std::vector<Bucket> buckets_;
  std::vector<Tensor> gradients_;  // by bucket: this rank's rows
  std::unique_ptr<Optimizer> inner_;
};

}  // namespace

std::unique_ptr<Optimizer> make_data_parallel_optimizer(const OptimizerOptions& options,
                                                        std::span<const Parameter> parameters,
                                                        Communicator& communicator, StreamRef stream) {
  if (communicator.size() == 1) return make_optimizer(options, parameters, stream);
  return std::make_unique<DataParallelOptimizer>(options, parameters, communicator, stream);
}

}  // namespace rowan
