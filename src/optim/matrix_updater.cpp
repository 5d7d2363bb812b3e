// Muown and Muon. They differ in what surrounds Newton-Schulz; matrices of one shape and group share its call, and all
// matrices of a group with a short side of at most 64 under Muown (the factors of LoRA) are stepped together.
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
  bool is_skinny = false;  // Muown, and every block takes the path skinny
  Tensor updates;          // U [members, shape]
  Tensor orthogonal;       // O likewise; skinny: the same memory
  Tensor row_square_sums;  // [members, .., N], Muown
};

/// Buckets that are stepped together.
struct Turn {
  std::vector<Bucket*> buckets;  // one unless they are skinny
  bool has_gradient = false;
  MuownBatch rows;  // Muown: of the members that have a gradient
  SkinnyBatch skinny;
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
  require(group.direction != MuownDirection::kAngular || group.weight_decay == 0,
          "{}: expected no weight decay with the angular direction, got {}", op, group.weight_decay);
  if (group.algorithm == Algorithm::kMuown) {
    const MuownSupport support = muown_supported(p.master, bucket.options);
    require(support.supported, "{}: {}", op, support.reason);
    bucket.is_skinny = std::all_of(bucket.blocks.begin(), bucket.blocks.end(), [&](const RowBlock& block) {
      return resolve_newton_schulz_path(group.newton_schulz.path, block.rows, columns(p.master, p.layout)) ==
             NewtonSchulzPath::kSkinny;
    });
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
    for (Bucket& bucket : buckets_) turn_of(bucket).buckets.push_back(&bucket);
  }

  void apply(std::span<const Tensor> gradients, bool moved, StreamRef stream, Communicator&) override {
    for (Turn& turn : turns_) {
      if (moved) list_members(turn, gradients, stream);
      if (!turn.has_gradient) continue;
      Bucket& bucket = *turn.buckets.front();
      if (!is_muown(bucket)) {
        step_muon(bucket, gradients, stream);
        continue;
      }
      turn.rows.prepare(stream);
      if (bucket.is_skinny) {
        turn.skinny.run(stream);
      } else {
        orthogonalise(bucket, stream);
      }
      turn.rows.finish(stream);
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
  static Shape stacked_shape(const Bucket& bucket) {
    return stacked(static_cast<std::int64_t>(bucket.members.size()), bucket.members.front().parameter.master.shape());
  }

  /// Skinny buckets of one group and dtype share a turn.
  Turn& turn_of(const Bucket& bucket) {
    const auto same = [&](const Turn& turn) {
      const Bucket& first = *turn.buckets.front();
      return bucket.is_skinny && first.is_skinny && first.group == bucket.group &&
             first.update_dtype == bucket.update_dtype;
    };
    const auto found = std::find_if(turns_.begin(), turns_.end(), same);
    return found != turns_.end() ? *found : turns_.emplace_back();
  }

  /// Buckets take turns with one U and one O of each dtype; skinny ones have their own.
  void make_workspace(StreamRef stream) {
    for (Bucket& bucket : buckets_) {
      if (bucket.is_skinny)
        bucket.updates = bucket.orthogonal = Tensor::zeros(stacked_shape(bucket), bucket.update_dtype, stream);
    }
    std::map<DType, std::int64_t> elements;
    for (const Bucket& bucket : buckets_) {
      if (bucket.is_skinny) continue;
      const auto count = static_cast<std::int64_t>(bucket.members.size());
      std::int64_t& most = elements[bucket.update_dtype];
      most = std::max(most, count * bucket.members.front().parameter.master.elements());
    }
    for (const auto& [dtype, most] : elements) {
      const Tensor updates = Tensor::zeros({most}, dtype, stream);
      const Tensor orthogonal = Tensor::zeros({most}, dtype, stream);
      for (Bucket& bucket : buckets_) {
        if (bucket.is_skinny || bucket.update_dtype != dtype) continue;
        const Shape shape = stacked_shape(bucket);
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

  /// A member without a gradient is left out. (In a stack it leaves what was in its part of U; its O is not used.)
  static void list_members(Turn& turn, std::span<const Tensor> gradients, StreamRef stream) {
    std::vector<MuownItem> rows;
    std::vector<SkinnyItem> skinny;
    turn.has_gradient = false;
    for (const Bucket* bucket : turn.buckets) {
      for (std::size_t i = 0; i < bucket->members.size(); ++i) {
        const Member& member = bucket->members[i];
        const OptimizedParameter& p = member.parameter;
        const Tensor& gradient = gradients[p.index];
        if (!gradient.defined()) continue;
        turn.has_gradient = true;
        if (!is_muown(*bucket)) continue;
        rows.push_back({p.master,
                        gradient,
                        member.state,
                        bucket->options,
                        member.update,
                        bucket->orthogonal.select(0, static_cast<std::int64_t>(i)),
                        p.copy,
                        {p.rates, p.step, p.control}});
        std::int64_t begin = 0;
        for (const RowBlock& block : bucket->blocks) {
          if (bucket->is_skinny) {
            skinny.push_back({rows_of(member.update.update, p.layout, begin, block.rows),
                              member.update.row_square_sum.slice(-1, begin, begin + block.rows)});
          }
          begin += block.rows;
        }
      }
    }
    const Bucket& first = *turn.buckets.front();
    if (is_muown(first)) turn.rows = MuownBatch(rows, stream);
    if (first.is_skinny) turn.skinny = SkinnyBatch(skinny, first.group->newton_schulz, stream);
  }

  static void step_muon(Bucket& bucket, std::span<const Tensor> gradients, StreamRef stream) {
    const ParameterGroup& group = *bucket.group;
    for (Member& m : bucket.members) {
      const Tensor& gradient = gradients[m.parameter.index];
      if (gradient.defined())
        muon_prepare(gradient, m.state.momentum, group.momentum, group.nesterov, m.parameter.control, m.update.update,
                     stream);
    }
    orthogonalise(bucket, stream);
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      Member& member = bucket.members[i];
      if (gradients[member.parameter.index].defined())
        finish_muon(bucket, member.parameter, bucket.orthogonal.select(0, static_cast<std::int64_t>(i)), stream);
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

  static void finish_muon(const Bucket& bucket, const OptimizedParameter& p, const Tensor& orthogonal,
                          StreamRef stream) {
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

  std::vector<Bucket> buckets_;  // complete before turns_ point into it
  std::vector<Turn> turns_;
};

}  // namespace

std::unique_ptr<Updater> make_matrix_updater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
  return std::make_unique<MatrixUpdater>(std::move(parameters), stream);
}

}  // namespace rowan::detail
