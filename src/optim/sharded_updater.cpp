// Muown and Muon of parameters whose output neurons are split over ranks. Rows are stepped where they lie; what a rank
// needs of the others is Newton-Schulz alone (rowan/optim/shard_cost.h, ops/gram_sum.h).
//
// A step goes through buckets of parameters in three stages, each of which ends in a collective on a stream of its own:
//
//     stage                  kGram                        kOwner
//     1  row kernels, then   largest magnitudes (max)     rows to their owners (all-to-all)
//     2                      Gram matrices (sum)          orthogonalised rows back (all-to-all)
//     3                      polynomial, product          -                                     then row kernels
//
// While a bucket waits for its collective, the kernels of the two beside it run.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "core/check.h"
#include "ops/gram_sum.h"
#include "optim/matrix_settings.h"
#include "optim/updater.h"
#include "rowan/ops/muon.h"
#include "rowan/optim/shard_cost.h"

namespace rowan::detail {

namespace {

/// Elements of U, the ranks' largest parts taken together, that a bucket holds unless a single matrix has more.
constexpr std::int64_t kMostBucketElements = std::int64_t{1} << 26;
constexpr std::size_t kStages = 3;

struct Member {
  OptimizedParameter parameter;
  MuownOptions options;
  MuownState state;    // Muon: momentum alone
  MuownUpdate update;  // views into its stack's; Muon: update alone
  Tensor orthogonal;
};

bool is_muown(const Member& member) { return member.parameter.group->algorithm == Algorithm::kMuown; }

/// Rows [first, first + rows) of a whole matrix.
struct RowRange {
  std::int64_t first = 0, rows = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

RowRange overlap(const RowRange& a, const RowRange& b) {
  const std::int64_t begin = std::max(a.first, b.first), end = std::min(a.first + a.rows, b.first + b.rows);
  return {begin, std::max<std::int64_t>(end - begin, 0)};
}

/// The parts of a parameter that are orthogonalised alone, in rows of the whole.
std::vector<RowRange> blocks_of(const OptimizedParameter& p) {
  std::vector<RowRange> blocks;
  std::int64_t end = 0;
  for (const std::int64_t rows : p.group->row_blocks) {
    blocks.push_back({end, rows});
    end += rows;
  }
  if (blocks.empty()) blocks.push_back({0, end = p.shard.global_rows});
  require(end == p.shard.global_rows, "{} of \"{}\": expected row_blocks that add up to {} output neurons, got {}",
          to_string(p.group->algorithm), p.name, p.shard.global_rows, end);
  return blocks;
}

RowRange own_rows(const OptimizedParameter& p) { return {p.shard.first_row, output_neurons(p.master, p.layout)}; }

enum class Scheme { kLocal, kGram, kOwner };  // kLocal: all rows lie on one rank

/// One row block of a stack of matrices that all ranks cut alike.
struct Slab {
  const ParameterGroup* group = nullptr;
  MatrixLayout layout = MatrixLayout::kOutIn;
  std::int64_t rows = 0, columns = 0;  // of a whole block
  std::vector<std::int64_t> rows_by_rank;
  Scheme scheme = Scheme::kLocal;
  std::vector<int> owners;         // kOwner: one a matrix
  Tensor u, o;                     // [matrices, n, K], or [matrices, K, n]: this rank's
  Tensor row_max, row_square_sum;  // [matrices, n], Muown

  // During a step. kGram:
  Tensor x, largest, gram;  // the last two in the bucket's
  // kOwner:
  Tensor gathered, square_sums, orthogonal;  // [owned, N, K] and [owned, N]

  std::int64_t matrices() const { return u.size(0); }
};

/// Matrices of one family have one polynomial kernel.
using Family = std::pair<const ParameterGroup*, std::int64_t>;
Family family_of(const Slab& slab) { return {slab.group, slab.columns}; }

struct Bucket {
  explicit Bucket(Device device) : ready(device), reduced(device) {}

  DType update_dtype = DType::kBFloat16;
  std::vector<std::size_t> members;
  std::vector<Slab> slabs;
  Event ready, reduced;  // compute to collectives, and back

  // During a step.
  Tensor largest, gram;
  std::vector<Tensor> send, receive, send_sums, receive_sums;  // by rank

  bool has(Scheme scheme) const {
    return std::any_of(slabs.begin(), slabs.end(), [scheme](const Slab& s) { return s.scheme == scheme; });
  }
};

/// [.., n, K] of a matrix in either layout.
Tensor neurons_first(const Tensor& matrix, MatrixLayout layout) {
  return layout == MatrixLayout::kOutIn ? matrix : matrix.transpose(-2, -1);
}

/// Goes through one-dimensional tensors, one a rank, piece by piece.
class Pieces {
 public:
  explicit Pieces(const std::vector<Tensor>& tensors) : tensors_(tensors), taken_(tensors.size()) {}
  Tensor next(std::size_t rank, const Shape& shape) {
    const std::int64_t begin = taken_[rank];
    taken_[rank] += shape.elements();
    return tensors_[rank].slice(0, begin, taken_[rank]).reshape(shape);
  }

 private:
  const std::vector<Tensor>& tensors_;
  std::vector<std::int64_t> taken_;
};

std::vector<Tensor> empty_by_rank(const std::vector<std::int64_t>& elements, DType dtype, StreamRef stream) {
  std::vector<Tensor> tensors;
  for (const std::int64_t n : elements) tensors.push_back(Tensor::empty({n}, dtype, stream));
  return tensors;
}

std::int64_t hash(const std::string& text) {
  std::uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<std::int64_t>(h);
}

class ShardedUpdater final : public Updater {
 public:
  ShardedUpdater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
    for (OptimizedParameter& p : parameters) members_.push_back(make_member(std::move(p), stream));
  }

  void agree(Communicator& communicator, StreamRef stream) override {
    if (!collectives_) plan(communicator, stream);
  }

  void apply(std::span<const Tensor> gradients, bool, StreamRef stream, Communicator& communicator) override {
    const auto has_gradient = [&](std::size_t m) { return gradients[members_[m].parameter.index].defined(); };
    std::vector<bool> active;
    for (const Bucket& bucket : buckets_)
      active.push_back(std::any_of(bucket.members.begin(), bucket.members.end(), has_gradient));
    // Buckets without a gradient keep their places: those whose numbers are kStages apart share memory.
    const auto is_active = [&](std::size_t t, std::size_t stage) {
      return t >= stage && t - stage < buckets_.size() && active[t - stage];
    };
    for (std::size_t t = 0; t < buckets_.size() + kStages - 1; ++t) {
      if (is_active(t, 0)) begin_stage(buckets_[t], gradients, stream, communicator);
      if (is_active(t, 1)) middle_stage(buckets_[t - 1], stream, communicator);
      if (is_active(t, 2)) end_stage(buckets_[t - 2], gradients, stream);
    }
  }

  void append_state(std::vector<NamedTensor>& state) const override {
    for (const Member& m : members_) {
      const std::string& name = m.parameter.name;
      state.push_back({"momentum." + name, m.state.momentum});
      if (!is_muown(m)) continue;
      state.push_back({"magnitude." + name, m.state.magnitude});
      state.push_back({"norm." + name, m.state.norm});
      state.push_back({"first_moment." + name, m.state.first_moment});
      state.push_back({"second_moment." + name, m.state.second_moment});
    }
  }

 private:
  static Member make_member(OptimizedParameter parameter, StreamRef stream) {
    Member member;
    member.parameter = std::move(parameter);
    const OptimizedParameter& p = member.parameter;
    const std::string op = fmt::format("{} of \"{}\"", to_string(p.group->algorithm), p.name);
    require(p.master.rank() == 2 || p.master.rank() == 3, "{}: expected a matrix, got shape {}", op, p.master.shape());
    std::vector<RowBlock> blocks;
    for (const RowRange& block : blocks_of(p)) {
      blocks.push_back({overlap(own_rows(p), block).rows, block.rows});
      require(p.group->shard_scheme != ShardScheme::kGram ||
                  can_sum(p.group->newton_schulz.path, block.rows, columns(p.master, p.layout)),
              "{}: expected a path skinny or gram_fp32 with shard_scheme gram, got {}", op,
              to_string(p.group->newton_schulz.path));
    }
    member.options = muown_options(*p.group, p.layout, std::move(blocks));
    if (!is_muown(member)) {
      member.state.momentum = Tensor::zeros(p.master.shape(), p.master.dtype(), stream);
      return member;
    }
    const MuownSupport support = muown_supported(p.master, member.options);
    require(support.supported, "{}: {}", op, support.reason);
    member.state = muown_init(p.master, member.options, stream);
    return member;
  }

  // Planning, when the first step brings the communicator

  void plan(Communicator& communicator, StreamRef stream) {
    const std::vector<std::vector<RowRange>> ranges = exchange_ranges(communicator, stream);
    // Stacks: members that agree in all that matters, on every rank.
    std::vector<std::vector<std::size_t>> stacks;
    const auto fits = [&](std::size_t a, std::size_t b) {
      const OptimizedParameter &p = members_[a].parameter, &q = members_[b].parameter;
      return p.group == q.group && p.master.shape() == q.master.shape() && p.master.dtype() == q.master.dtype() &&
             p.layout == q.layout && ranges[a] == ranges[b];
    };
    const auto elements = [&](std::size_t m) {
      const Tensor& master = members_[m].parameter.master;
      std::int64_t most = 0;
      for (const RowRange& range : ranges[m]) most = std::max(most, range.rows);
      return most * columns(master, members_[m].parameter.layout) * (master.rank() == 3 ? master.size(0) : 1);
    };
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const auto stack = std::find_if(stacks.begin(), stacks.end(), [&](const std::vector<std::size_t>& s) {
        return fits(s.front(), m) && (static_cast<std::int64_t>(s.size()) + 1) * elements(m) <= kMostBucketElements;
      });
      if (stack == stacks.end()) {
        stacks.push_back({m});
      } else {
        stack->push_back(m);
      }
    }
    std::vector<std::vector<std::size_t>> buckets;  // of stacks
    std::int64_t filled = 0;
    std::optional<DType> dtype;
    for (std::size_t s = 0; s < stacks.size(); ++s) {
      const std::int64_t size = static_cast<std::int64_t>(stacks[s].size()) * elements(stacks[s].front());
      const DType own = update_dtype(stacks[s].front());
      if (buckets.empty() || dtype != own || filled + size > kMostBucketElements) {
        buckets.emplace_back();
        filled = 0;
      }
      buckets.back().push_back(s);
      filled += size;
      dtype = own;
    }
    make_buckets(stacks, buckets, ranges, communicator, stream);
    rank_ = static_cast<std::size_t>(communicator.rank());
    ranks_ = static_cast<std::size_t>(communicator.size());
    collectives_.emplace(stream.device());
  }

  DType update_dtype(std::size_t member) const {
    const OptimizedParameter& p = members_[member].parameter;
    return dtype_of_update(*p.group, p.master.dtype());
  }

  /// Rows by member and rank. Every rank sees the same, and throws alike.
  std::vector<std::vector<RowRange>> exchange_ranges(Communicator& communicator, StreamRef stream) const {
    constexpr std::size_t kFields = 6;
    std::vector<std::int64_t> own;
    for (const Member& m : members_) {
      const OptimizedParameter& p = m.parameter;
      const RowRange range = own_rows(p);
      own.insert(own.end(), {hash(p.name), p.shard.global_rows, columns(p.master, p.layout),
                             p.master.rank() == 3 ? p.master.size(0) : 1, range.first, range.rows});
    }
    const auto ranks = static_cast<std::size_t>(communicator.size());
    communicator.synchronize(stream);
    const Tensor part = Tensor::from_host({static_cast<std::int64_t>(own.size())}, own, stream);
    Tensor whole = Tensor::empty({static_cast<std::int64_t>(own.size() * ranks)}, DType::kInt64, stream);
    communicator.all_gather(part, whole, stream);
    communicator.synchronize(stream);
    const std::vector<std::int64_t> all = whole.to_vector<std::int64_t>(stream);
    std::vector<std::vector<RowRange>> ranges(members_.size());
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const OptimizedParameter& p = members_[m].parameter;
      std::int64_t end = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        const std::int64_t* const fields = all.data() + r * own.size() + m * kFields;
        require(std::equal(fields, fields + 4, all.data() + m * kFields),
                "optimizer: expected the same split parameters on all ranks, got another than \"{}\" on rank 0 or {}",
                p.name, r);
        require(fields[4] == end, "optimizer: expected the rows of \"{}\" on rank {} to begin at {}, got {}", p.name, r,
                end, fields[4]);
        end += fields[5];
        ranges[m].push_back({fields[4], fields[5]});
      }
      require(end == p.shard.global_rows, "optimizer: expected ranks that hold {} rows of \"{}\" together, got {}",
              p.shard.global_rows, p.name, end);
    }
    return ranges;
  }

  void make_buckets(const std::vector<std::vector<std::size_t>>& stacks,
                    const std::vector<std::vector<std::size_t>>& buckets,
                    const std::vector<std::vector<RowRange>>& ranges, const Communicator& communicator,
                    StreamRef stream) {
    // U and O of as many buckets as are under way at once; others take turns with them.
    std::map<std::pair<std::size_t, DType>, std::int64_t> sizes;
    const auto local = [&](std::size_t s) {
      return static_cast<std::int64_t>(stacks[s].size()) * members_[stacks[s].front()].parameter.master.elements();
    };
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      std::int64_t size = 0;
      for (const std::size_t s : buckets[b]) size += local(s);
      std::int64_t& most = sizes[{b % kStages, update_dtype(stacks[buckets[b].front()].front())}];
      most = std::max(most, size);
    }
    std::map<std::pair<std::size_t, DType>, Tensor> memory;
    for (const auto& [key, size] : sizes) memory[key] = Tensor::zeros({2 * size}, key.second, stream);

    for (std::size_t b = 0; b < buckets.size(); ++b) {
      Bucket bucket(stream.device());
      bucket.update_dtype = update_dtype(stacks[buckets[b].front()].front());
      std::int64_t taken = 0;
      const auto take = [&](const Shape& shape) {
        const std::int64_t begin = taken;
        taken += shape.elements();
        return memory[{b % kStages, bucket.update_dtype}].slice(0, begin, taken).reshape(shape);
      };
      for (const std::size_t s : buckets[b])
        add_stack(bucket, stacks[s], ranges[stacks[s].front()], take, communicator, stream);
      // Slabs of one family side by side: their Gram matrices are one tensor.
      std::stable_sort(bucket.slabs.begin(), bucket.slabs.end(), [](const Slab& x, const Slab& y) {
        return x.group == y.group ? x.columns < y.columns : std::less<>()(x.group, y.group);
      });
      choose_owners(bucket, communicator.size());
      buckets_.push_back(std::move(bucket));
    }
  }

  template <class Take>
  void add_stack(Bucket& bucket, const std::vector<std::size_t>& stack, const std::vector<RowRange>& ranges,
                 const Take& take, const Communicator& communicator, StreamRef stream) {
    const Member& first = members_[stack.front()];
    const OptimizedParameter& p = first.parameter;
    const auto count = static_cast<std::int64_t>(stack.size());
    const std::int64_t neurons = output_neurons(p.master, p.layout);
    const std::int64_t batches = p.master.rank() == 3 ? p.master.size(0) : 1;
    const std::int64_t n_first = p.master.size(-2), n_last = p.master.size(-1);
    const Shape all{count, batches, n_first, n_last}, all_rows{count, batches, neurons};
    const Tensor u = take(all), o = take(all);
    Tensor magnitude_grads, row_max, square_sums;
    if (is_muown(first)) {
      magnitude_grads = Tensor::zeros(all_rows, p.master.dtype(), stream);
      row_max = Tensor::zeros(all_rows, p.master.dtype(), stream);
      square_sums = Tensor::zeros(all_rows, DType::kFloat64, stream);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      Member& member = members_[stack[static_cast<std::size_t>(i)]];
      const auto own = [&](const Tensor& t) {
        return p.master.rank() == 3 ? t.select(0, i) : t.select(0, i).select(0, 0);
      };
      member.update.update = own(u);
      member.orthogonal = own(o);
      bucket.members.push_back(stack[static_cast<std::size_t>(i)]);
      if (!is_muown(member)) continue;
      member.update.magnitude_grad = own(magnitude_grads);
      member.update.row_max = own(row_max);
      member.update.row_square_sum = own(square_sums);
    }
    const Shape flat{count * batches, n_first, n_last}, flat_rows{count * batches, neurons};
    const RowRange here = ranges[static_cast<std::size_t>(communicator.rank())];
    for (const RowRange& block : blocks_of(p)) {
      if (block.rows == 0) continue;
      const RowRange own = overlap(here, block);
      const std::int64_t begin = own.rows == 0 ? 0 : own.first - here.first;
      Slab slab;
      slab.group = p.group;
      slab.layout = p.layout;
      slab.rows = block.rows;
      slab.columns = columns(p.master, p.layout);
      for (const RowRange& range : ranges) slab.rows_by_rank.push_back(overlap(range, block).rows);
      slab.u = rows_of(u.reshape(flat), p.layout, begin, own.rows);
      slab.o = rows_of(o.reshape(flat), p.layout, begin, own.rows);
      if (is_muown(first)) {
        slab.row_max = row_max.reshape(flat_rows).slice(1, begin, begin + own.rows);
        slab.row_square_sum = square_sums.reshape(flat_rows).slice(1, begin, begin + own.rows);
      }
      if (slab.columns == 0 || slab.matrices() == 0) continue;
      slab.scheme = scheme_for(slab);
      bucket.slabs.push_back(std::move(slab));
    }
  }

  /// The sum of Gram matrices is a way to compute the paths that take float32 Gram matrices anyway: the path never
  /// depends on the number of ranks.
  static bool can_sum(NewtonSchulzPath path, std::int64_t rows, std::int64_t columns) {
    path = resolve_newton_schulz_path(path, rows, columns);
    return path == NewtonSchulzPath::kSkinny || path == NewtonSchulzPath::kGramFp32;
  }

  static Scheme scheme_for(const Slab& slab) {
    if (std::count_if(slab.rows_by_rank.begin(), slab.rows_by_rank.end(), [](std::int64_t n) { return n > 0; }) == 1)
      return Scheme::kLocal;
    const std::optional<ShardScheme>& wanted = slab.group->shard_scheme;
    if (!can_sum(slab.group->newton_schulz.path, slab.rows, slab.columns)) return Scheme::kOwner;
    if (wanted) return *wanted == ShardScheme::kGram ? Scheme::kGram : Scheme::kOwner;
    const SplitMatrices matrices{slab.rows, slab.columns, slab.matrices(),
                                 static_cast<double>(size_of(slab.u.dtype()))};
    const auto ranks = static_cast<std::int64_t>(slab.rows_by_rank.size());
    return cheaper_scheme(matrices, ranks) == ShardScheme::kGram ? Scheme::kGram : Scheme::kOwner;
  }

  /// Each matrix goes to the rank that has least to do so far.
  static void choose_owners(Bucket& bucket, int ranks) {
    std::vector<double> loads(static_cast<std::size_t>(ranks));
    for (Slab& slab : bucket.slabs) {
      const auto work = static_cast<double>(slab.rows) * static_cast<double>(slab.columns) *
                        static_cast<double>(std::min(slab.rows, slab.columns));
      if (slab.scheme == Scheme::kLocal) {
        const auto holder = std::max_element(slab.rows_by_rank.begin(), slab.rows_by_rank.end());
        loads[static_cast<std::size_t>(holder - slab.rows_by_rank.begin())] +=
            work * static_cast<double>(slab.matrices());
      }
      if (slab.scheme != Scheme::kOwner) continue;
      for (std::int64_t i = 0; i < slab.matrices(); ++i) {
        const auto least = std::min_element(loads.begin(), loads.end());
        *least += work;
        slab.owners.push_back(static_cast<int>(least - loads.begin()));
      }
    }
  }

  // The stages

  /// Orders the collectives that f starts behind the work on `stream` so far; the bucket's next stage waits for them.
  template <class F>
  void in_collectives(Bucket& bucket, StreamRef stream, const F& f) {
    bucket.ready.record(stream);
    collectives_->ref().wait(bucket.ready);
    f(collectives_->ref());
    bucket.reduced.record(*collectives_);
  }

  void begin_stage(Bucket& bucket, std::span<const Tensor> gradients, StreamRef stream, Communicator& communicator) {
    // A member without a gradient leaves what was in its part of U; its O is not used.
    for (const std::size_t m : bucket.members) {
      Member& member = members_[m];
      const Tensor& gradient = gradients[member.parameter.index];
      if (!gradient.defined() || gradient.elements() == 0) continue;
      const OptimizedParameter& p = member.parameter;
      if (is_muown(member)) {
        muown_prepare(p.master, gradient, member.state, member.options, p.control, member.update, stream);
      } else {
        muon_prepare(gradient, member.state.momentum, p.group->momentum, p.group->nesterov, p.control,
                     member.update.update, stream);
      }
    }
    const bool sums = bucket.has(Scheme::kGram), moves = bucket.has(Scheme::kOwner);
    if (sums) find_largest(bucket, stream);
    if (moves) pack_rows(bucket, stream);
    in_collectives(bucket, stream, [&](StreamRef queue) {
      if (sums) communicator.all_reduce(bucket.largest, ReduceOp::kMax, queue);
      if (!moves) return;
      communicator.all_to_all(bucket.send, bucket.receive, queue);
      communicator.all_to_all(bucket.send_sums, bucket.receive_sums, queue);
    });
  }

  void middle_stage(Bucket& bucket, StreamRef stream, Communicator& communicator) {
    stream.wait(bucket.reduced);
    const bool sums = bucket.has(Scheme::kGram), moves = bucket.has(Scheme::kOwner);
    for (Slab& slab : bucket.slabs) {
      if (slab.scheme == Scheme::kGram) {
        slab.x = Tensor::empty(slab.u.shape(), DType::kFloat32, stream);
        gram_partial(slab.u, slab.layout, slab.largest, slab.x, slab.gram, stream);
      } else if (slab.scheme == Scheme::kLocal && slab.u.elements() > 0) {
        newton_schulz(slab.u, slab.o, slab.group->newton_schulz, stream,
                      slab.row_square_sum.defined() ? &slab.row_square_sum : nullptr);
      }
    }
    if (moves) orthogonalise_owned(bucket, stream);
    in_collectives(bucket, stream, [&](StreamRef queue) {
      if (sums) communicator.all_reduce(bucket.gram, ReduceOp::kSum, queue);
      if (moves) communicator.all_to_all(bucket.send, bucket.receive, queue);
    });
  }

  void end_stage(Bucket& bucket, std::span<const Tensor> gradients, StreamRef stream) {
    stream.wait(bucket.reduced);
    if (bucket.has(Scheme::kGram)) apply_polynomials(bucket, stream);
    if (bucket.has(Scheme::kOwner)) unpack_rows(bucket, stream);
    for (const std::size_t m : bucket.members) {
      const Tensor& gradient = gradients[members_[m].parameter.index];
      if (gradient.defined() && gradient.elements() > 0) finish(members_[m], gradient, stream);
    }
    bucket.largest = bucket.gram = Tensor();
    bucket.send.clear();
    bucket.receive.clear();
    for (Slab& slab : bucket.slabs) slab.x = slab.largest = slab.gram = Tensor();
  }

  static void finish(Member& member, const Tensor& gradient, StreamRef stream) {
    OptimizedParameter& p = member.parameter;
    if (is_muown(member)) {
      muown_finish(p.master, gradient, member.state, member.orthogonal, member.update.magnitude_grad, member.options,
                   {p.rates, p.step, p.control}, p.copy.defined() ? &p.copy : nullptr, stream);
      return;
    }
    std::int64_t begin = 0;
    for (const RowBlock& block : member.options.row_blocks) {
      Tensor weight = rows_of(p.master, p.layout, begin, block.rows), copy;
      if (p.copy.defined()) copy = rows_of(p.copy, p.layout, begin, block.rows);
      const double scale = muown_scale(block.global_rows, columns(p.master, p.layout), p.group->update_scale);
      muon_finish(weight, rows_of(member.orthogonal, p.layout, begin, block.rows), scale, p.rates, p.control,
                  copy.defined() ? &copy : nullptr, stream);
      begin += block.rows;
    }
  }

  // kGram

  static void find_largest(Bucket& bucket, StreamRef stream) {
    std::int64_t matrices = 0, elements = 0;
    for (const Slab& slab : bucket.slabs) {
      if (slab.scheme != Scheme::kGram) continue;
      matrices += slab.matrices();
      elements += slab.matrices() * slab.columns * slab.columns;
    }
    bucket.largest = Tensor::empty({matrices}, DType::kFloat32, stream);
    bucket.gram = Tensor::empty({elements}, DType::kFloat32, stream);
    matrices = elements = 0;
    for (Slab& slab : bucket.slabs) {
      if (slab.scheme != Scheme::kGram) continue;
      const std::int64_t count = slab.matrices(), size = count * slab.columns * slab.columns;
      slab.largest = bucket.largest.slice(0, matrices, matrices + count);
      slab.gram = bucket.gram.slice(0, elements, elements + size).reshape({count, slab.columns, slab.columns});
      matrices += count;
      elements += size;
      const bool has_maxima = slab.row_max.defined();
      const Tensor rows = has_maxima ? slab.row_max : slab.u;
      // Row maxima [matrices, n] as matrices of one row.
      gram_largest(has_maxima && rows.elements() > 0 ? unsqueeze(rows) : rows, slab.largest, stream);
    }
  }

  /// [m, n] as [m, 1, n].
  static Tensor unsqueeze(const Tensor& rows) { return rows.reshape({rows.size(0), 1, rows.size(1)}); }

  /// One polynomial for all slabs of a family, whose Gram matrices lie side by side.
  static void apply_polynomials(Bucket& bucket, StreamRef stream) {
    std::int64_t matrix = 0, element = 0;
    const auto is_summed = [](const Slab& slab) { return slab.scheme == Scheme::kGram; };
    for (auto slab = bucket.slabs.begin(); slab != bucket.slabs.end();) {
      const Family family = family_of(*slab);
      std::int64_t count = 0;
      auto end = slab;
      for (; end != bucket.slabs.end() && family_of(*end) == family; ++end) {
        if (is_summed(*end)) count += end->matrices();
      }
      const std::int64_t k = slab->columns, size = count * k * k;
      if (count > 0) {
        Tensor gram = bucket.gram.slice(0, element, element + size).reshape({count, k, k});
        gram_polynomial(gram, bucket.largest.slice(0, matrix, matrix + count), family.first->newton_schulz, stream);
      }
      for (; slab != end; ++slab) {
        if (is_summed(*slab)) gram_apply(slab->x, slab->layout, slab->gram, slab->o, stream);
      }
      matrix += count;
      element += size;
    }
  }

  // kOwner

  /// Calls f(slab, matrix, owner) for every matrix that has one.
  template <class F>
  static void for_each_owned(Bucket& bucket, const F& f) {
    for (Slab& slab : bucket.slabs) {
      for (std::size_t i = 0; i < slab.owners.size(); ++i)
        f(slab, static_cast<std::int64_t>(i), static_cast<std::size_t>(slab.owners[i]));
    }
  }

  /// This rank's rows go to the matrices' owners, with their sums of squares.
  void pack_rows(Bucket& bucket, StreamRef stream) const {
    const std::size_t ranks = ranks_, rank = rank_;
    std::vector<std::int64_t> sent(ranks), received(ranks), sent_rows(ranks), received_rows(ranks);
    for_each_owned(bucket, [&](const Slab& slab, std::int64_t, std::size_t owner) {
      const bool has_sums = slab.row_square_sum.defined();
      sent[owner] += slab.rows_by_rank[rank] * slab.columns;
      if (has_sums) sent_rows[owner] += slab.rows_by_rank[rank];
      if (owner != rank) return;
      for (std::size_t q = 0; q < ranks; ++q) {
        received[q] += slab.rows_by_rank[q] * slab.columns;
        if (has_sums) received_rows[q] += slab.rows_by_rank[q];
      }
    });
    bucket.send = empty_by_rank(sent, bucket.update_dtype, stream);
    bucket.receive = empty_by_rank(received, bucket.update_dtype, stream);
    bucket.send_sums = empty_by_rank(sent_rows, DType::kFloat64, stream);
    bucket.receive_sums = empty_by_rank(received_rows, DType::kFloat64, stream);
    Pieces rows(bucket.send), sums(bucket.send_sums);
    for_each_owned(bucket, [&](const Slab& slab, std::int64_t i, std::size_t owner) {
      const std::int64_t n = slab.rows_by_rank[rank];
      rows.next(owner, {n, slab.columns}).copy_from(neurons_first(slab.u.select(0, i), slab.layout), stream);
      if (slab.row_square_sum.defined()) sums.next(owner, {n}).copy_from(slab.row_square_sum.select(0, i), stream);
    });
  }

  /// Whole matrices out of all ranks' rows, Newton-Schulz on them as on one rank, and their rows back.
  void orthogonalise_owned(Bucket& bucket, StreamRef stream) const {
    const std::size_t ranks = ranks_;
    const auto rank = static_cast<int>(rank_);
    Pieces rows(bucket.receive), sums(bucket.receive_sums);
    for (Slab& slab : bucket.slabs) {
      const auto owned = static_cast<std::int64_t>(std::count(slab.owners.begin(), slab.owners.end(), rank));
      if (owned == 0) continue;
      const bool out_in = slab.layout == MatrixLayout::kOutIn;
      const Shape shape{owned, out_in ? slab.rows : slab.columns, out_in ? slab.columns : slab.rows};
      const Tensor whole = Tensor::empty(shape, bucket.update_dtype, stream);
      Tensor square_sums;
      if (slab.row_square_sum.defined()) square_sums = Tensor::empty({owned, slab.rows}, DType::kFloat64, stream);
      for (std::int64_t i = 0; i < owned; ++i) {
        std::int64_t begin = 0;
        for (std::size_t q = 0; q < ranks; ++q) {
          const std::int64_t n = slab.rows_by_rank[q];
          rows_of_whole(whole, slab, i, begin, n).copy_from(rows.next(q, {n, slab.columns}), stream);
          if (square_sums.defined())
            square_sums.select(0, i).slice(0, begin, begin + n).copy_from(sums.next(q, {n}), stream);
          begin += n;
        }
      }
      slab.orthogonal = Tensor::empty(shape, bucket.update_dtype, stream);
      newton_schulz(whole, slab.orthogonal, slab.group->newton_schulz, stream,
                    square_sums.defined() ? &square_sums : nullptr);
    }
    // Each way's messages are as long as the other's were.
    std::swap(bucket.send, bucket.receive);
    std::vector<Tensor> back;
    for (const Tensor& t : bucket.send) back.push_back(Tensor::empty(t.shape(), t.dtype(), stream));
    bucket.send = std::move(back);
    Pieces out(bucket.send);
    for (Slab& slab : bucket.slabs) {
      if (!slab.orthogonal.defined()) continue;
      for (std::int64_t i = 0; i < slab.orthogonal.size(0); ++i) {
        std::int64_t begin = 0;
        for (std::size_t q = 0; q < ranks; ++q) {
          const std::int64_t n = slab.rows_by_rank[q];
          out.next(q, {n, slab.columns}).copy_from(rows_of_whole(slab.orthogonal, slab, i, begin, n), stream);
          begin += n;
        }
      }
      slab.orthogonal = Tensor();
    }
  }

  static Tensor rows_of_whole(const Tensor& whole, const Slab& slab, std::int64_t i, std::int64_t begin,
                              std::int64_t n) {
    return neurons_first(whole.select(0, i), slab.layout).slice(0, begin, begin + n);
  }

  void unpack_rows(Bucket& bucket, StreamRef stream) const {
    Pieces rows(bucket.receive);
    for_each_owned(bucket, [&](const Slab& slab, std::int64_t i, std::size_t owner) {
      const std::int64_t n = slab.rows_by_rank[rank_];
      neurons_first(slab.o.select(0, i), slab.layout).copy_from(rows.next(owner, {n, slab.columns}), stream);
    });
  }

  std::vector<Member> members_;
  std::vector<Bucket> buckets_;
  std::optional<Stream> collectives_;  // once planned
  std::size_t rank_ = 0, ranks_ = 1;
};

}  // namespace

std::unique_ptr<Updater> make_sharded_updater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
  return std::make_unique<ShardedUpdater>(std::move(parameters), stream);
}

}  // namespace rowan::detail
