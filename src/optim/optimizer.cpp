#include "rowan/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <set>

#include "core/check.h"
#include "ops/row_view.h"
#include "optim/updater.h"
#include "rowan/ops/elementwise.h"

namespace rowan {

namespace {

using detail::OptimizedParameter;
using detail::require;

void require_from_zero(const char* field, double value) {
  require(std::isfinite(value) && value >= 0, "optimizer: expected {} >= 0 and finite, got {}", field, value);
}

void require_below_one(const char* field, double value) {
  require(value >= 0 && value < 1, "optimizer: expected {} in [0, 1), got {}", field, value);
}

void check_options(const OptimizerOptions& options) {
  require_from_zero("max_gradient_norm", options.max_gradient_norm);
  for (const ParameterGroup& group : options.groups) {
    require_from_zero("learning_rate_scale", group.learning_rate_scale);
    require_from_zero("weight_decay", group.weight_decay);
    require_from_zero("update_scale", group.update_scale);
    require_from_zero("magnitude_lr", group.magnitude_lr);
    require_below_one("beta1", group.beta1);
    require_below_one("beta2", group.beta2);
    require_below_one("momentum", group.momentum);
    require_from_zero("epsilon", group.epsilon);
  }
}

/// Finds the group of each parameter.
class Router {
 public:
  explicit Router(const std::vector<ParameterGroup>& groups) : groups_(groups), taken_(groups.size(), 0) {
    for (const ParameterGroup& group : groups) {
      try {
        patterns_.emplace_back(group.name_pattern);
      } catch (const std::regex_error& error) {
        detail::fail(ErrorKind::kInvalidArgument,
                     "optimizer: expected name_pattern to be a regular expression, got \"{}\" ({})", group.name_pattern,
                     error.what());
      }
    }
  }

  std::size_t group_of(const Parameter& p) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!takes(g, p)) continue;
      ++taken_[g];
      return g;
    }
    detail::fail(ErrorKind::kInvalidArgument,
                 "optimizer: expected a group for every trainable parameter, got none for \"{}\" (role {})", p.name,
                 to_string(p.role));
  }

  void require_patterns_used() const {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      require(taken_[g] > 0 || groups_[g].name_pattern.empty(),
              "optimizer: expected name_pattern to take a trainable parameter, got \"{}\", which takes none",
              groups_[g].name_pattern);
    }
  }

 private:
  bool takes(std::size_t g, const Parameter& p) const {
    const std::vector<Parameter::Role>& roles = groups_[g].roles;
    if (!roles.empty() && std::find(roles.begin(), roles.end(), p.role) == roles.end()) return false;
    return groups_[g].name_pattern.empty() || std::regex_search(p.name, patterns_[g]);
  }

  const std::vector<ParameterGroup>& groups_;
  std::vector<std::regex> patterns_;
  std::vector<int> taken_;
};

Tensor master_of(const Parameter& p, StreamRef stream) {
  const bool is_wide = p.value.dtype() == DType::kFloat32 || p.value.dtype() == DType::kFloat64;
  if (p.master.defined()) {
    require(p.master.shape() == p.value.shape(), "optimizer: expected the master of \"{}\" in shape {}, got {}", p.name,
            p.value.shape(), p.master.shape());
    const DType expected = is_wide ? p.value.dtype() : DType::kFloat32;
    require(p.master.dtype() == expected, "optimizer: expected the master of \"{}\" in {}, got {}", p.name, expected,
            p.master.dtype());
    require(!is_wide || p.master.raw() == p.value.raw(),
            "optimizer: expected the master of \"{}\" to be its {} value, got another tensor", p.name, expected);
    return p.master;
  }
  if (is_wide) return p.value;
  Tensor master = Tensor::empty(p.value.shape(), DType::kFloat32, stream);
  cast(p.value, master, stream);
  return master;
}

class GroupedOptimizer final : public Optimizer {
 public:
  GroupedOptimizer(const OptimizerOptions& options, std::span<const Parameter> parameters, StreamRef stream)
      : options_(options) {
    const AllocationLabel label("optimizer");
    check_options(options_);
    add_parameters(parameters, stream);
    std::vector<OptimizedParameter> adamw, matrices, shards;
    for (const OptimizedParameter& p : parameters_) {
      const bool is_split = p.shard.global_rows > 0;
      (p.group->algorithm == Algorithm::kAdamW ? adamw : is_split ? shards : matrices).push_back(p);
    }
    if (!adamw.empty()) updaters_.push_back(detail::make_adamw_updater(std::move(adamw), stream));
    if (!matrices.empty()) updaters_.push_back(detail::make_matrix_updater(std::move(matrices), stream));
    if (!shards.empty()) updaters_.push_back(detail::make_sharded_updater(std::move(shards), stream));
  }

  void stage(std::span<const Parameter> parameters, const StepValues& values, StreamRef stream) override {
    require_from_zero("learning_rate", values.learning_rate);
    require_from_zero("weight_decay_scale", values.weight_decay_scale);
    std::vector<std::int32_t> active;
    for (const Parameter* p : trainable(parameters)) active.push_back(p->grad.defined() && p->has_grad ? 1 : 0);
    std::vector<double> rates;
    for (const ParameterGroup& group : options_.groups) {
      rates.push_back(values.learning_rate * group.learning_rate_scale);
      rates.push_back(values.weight_decay_scale * group.weight_decay);
    }
    write_values(rates_, std::span<const double>(rates), stream);
    if (active != staged_active_) write_values(active_, std::span<const std::int32_t>(active), stream);
    staged_active_ = std::move(active);
  }

  void apply(std::span<const Parameter> parameters, StreamRef stream, Communicator& communicator) override {
    const AllocationLabel label("optimizer");
    std::vector<Tensor> gradients = checked_gradients(parameters, stream);
    for (const auto& updater : updaters_) updater->agree(communicator, stream);
    const bool moved = !listed_ || !lie_as_before(gradients);
    listed_ = false;
    // Uploads of tables block the host, which may wait for other ranks only where a deadline ends that.
    if (moved) {
      communicator.synchronize(stream);
      list_gradients(gradients, stream);
    }
    if (has_split_) {
      split_square_sum_.run(control_, stream);
      Tensor sum = control_.slice(0, StepControl::kSquareSum, StepControl::kSquareSum + 1);
      communicator.all_reduce(sum, ReduceOp::kSum, stream);
      if (moved) communicator.synchronize(stream);
    }
    square_sum_.run(control_, stream, has_split_);
    finish_step_control(control_, options_.max_gradient_norm, stream);
    advance_steps(control_, active_, steps_, controls_, stream);
    for (const auto& updater : updaters_) updater->apply(gradients, moved, stream, communicator);
    gradients_ = std::move(gradients);
    listed_ = true;
  }

  void skip_step(StreamRef stream) override { count_skipped_step(control_, stream); }

  StepReport report(StreamRef stream) const override { return read_step_control(control_, stream); }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> state{{"step_control", control_}};
    for (const OptimizedParameter& p : parameters_) {
      state.push_back({"step." + p.name, p.step});
      if (p.copy.defined()) state.push_back({"master." + p.name, p.master});
    }
    for (const auto& updater : updaters_) updater->append_state(state);
    return state;
  }

  void load_state(std::span<const NamedTensor> saved, StreamRef stream) override {
    std::map<std::string, const Tensor*> by_name;
    for (const NamedTensor& named : saved) by_name[named.name] = &named.tensor;
    const std::vector<NamedTensor> own = state();
    for (const NamedTensor& named : own) {
      const auto found = by_name.find(named.name);
      if (found == by_name.end())
        detail::fail(ErrorKind::kFormat, "load_state: expected a tensor \"{}\", got none", named.name);
      require_same_form(named, *found->second);
    }
    if (by_name.size() != own.size()) fail_left_over(own, by_name);
    for (const NamedTensor& named : own) named.tensor.copy_from(*by_name[named.name], stream);
    for (OptimizedParameter& p : parameters_) {
      if (p.copy.defined()) cast(p.master, p.copy, stream);
    }
  }

  const OptimizerOptions& options() const noexcept override { return options_; }

 private:
  void add_parameters(std::span<const Parameter> parameters, StreamRef stream) {
    Router router(options_.groups);
    std::set<std::string> names;
    std::vector<std::size_t> groups;
    for (const Parameter& p : parameters) {
      if (!p.trainable) continue;
      require(names.insert(p.name).second, "optimizer: expected parameters of different names, got two of \"{}\"",
              p.name);
      detail::require_on("optimizer", "every parameter", p.value, stream);
      detail::require_floating("optimizer", "every parameter", p.value);
      groups.push_back(router.group_of(p));
    }
    router.require_patterns_used();
    const auto count = static_cast<std::int64_t>(groups.size());
    control_ = make_step_control(stream);
    rates_ = Tensor::zeros({static_cast<std::int64_t>(options_.groups.size()), 2}, DType::kFloat64, stream);
    active_ = Tensor::zeros({count}, DType::kInt32, stream);
    steps_ = Tensor::zeros({count}, DType::kInt64, stream);
    controls_ = Tensor::zeros({count, 4}, DType::kFloat64, stream);
    for (const Parameter& p : parameters) {
      if (!p.trainable) continue;
      OptimizedParameter own;
      own.index = parameters_.size();
      own.name = p.name;
      own.master = master_of(p, stream);
      if (own.master.raw() != p.value.raw() || own.master.dtype() != p.value.dtype()) own.copy = p.value;
      own.layout = p.layout;
      own.shard = p.shard;
      const std::size_t g = groups[own.index];
      own.group = &options_.groups[g];
      const auto i = static_cast<std::int64_t>(own.index);
      own.rates = rates_.select(0, static_cast<std::int64_t>(g));
      own.step = steps_.slice(0, i, i + 1);
      own.control = controls_.select(0, i);
      has_split_ = has_split_ || p.shard.global_rows > 0;
      parameters_.push_back(std::move(own));
    }
  }

  /// The trainable ones, which must be those of the constructor.
  std::vector<const Parameter*> trainable(std::span<const Parameter> parameters) const {
    std::vector<const Parameter*> found;
    for (const Parameter& p : parameters) {
      if (!p.trainable) continue;
      const std::size_t i = found.size();
      require(i < parameters_.size() && p.name == parameters_[i].name,
              "optimizer: expected parameter {} to be \"{}\", got \"{}\"", i,
              i < parameters_.size() ? parameters_[i].name : "none", p.name);
      const Tensor& value = parameters_[i].copy.defined() ? parameters_[i].copy : parameters_[i].master;
      require(p.value.raw() == value.raw(), "optimizer: expected the value of \"{}\" where it was, got another tensor",
              p.name);
      found.push_back(&p);
    }
    require(found.size() == parameters_.size(), "optimizer: expected {} trainable parameters, got {}",
            parameters_.size(), found.size());
    return found;
  }

  std::vector<Tensor> checked_gradients(std::span<const Parameter> parameters, StreamRef stream) const {
    std::vector<Tensor> gradients;
    for (const Parameter* p : trainable(parameters)) {
      const Tensor& master = parameters_[gradients.size()].master;
      gradients.push_back(p->grad);
      if (!p->grad.defined()) continue;
      const std::string name = "the gradient of " + p->name;
      detail::require_shape("optimizer", name.c_str(), p->grad, master.shape());
      detail::require_dtype("optimizer", name.c_str(), p->grad, master.dtype());
      detail::require_on("optimizer", name.c_str(), p->grad, stream);
      detail::require_rows("optimizer", name.c_str(), p->grad);
    }
    return gradients;
  }

  bool lie_as_before(std::span<const Tensor> gradients) const {
    const auto same = [](const Tensor& a, const Tensor& b) {
      if (!a.defined() || !b.defined()) return a.defined() == b.defined();
      return a.shares_storage(b) && a.raw() == b.raw() && (a.rank() < 2 || a.stride(0) == b.stride(0));
    };
    return gradients_.size() == gradients.size() &&
           std::equal(gradients.begin(), gradients.end(), gradients_.begin(), same);
  }

  void list_gradients(std::span<const Tensor> gradients, StreamRef stream) {
    std::vector<Tensor> whole(gradients.begin(), gradients.end());
    std::vector<Tensor> split(gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (parameters_[i].shard.global_rows > 0) std::swap(whole[i], split[i]);
    }
    square_sum_ = GradSquareSum(whole, active_, stream);
    split_square_sum_ = GradSquareSum(split, active_, stream);
  }

  static void require_same_form(const NamedTensor& own, const Tensor& saved) {
    const bool same = saved.defined() && saved.shape() == own.tensor.shape() && saved.dtype() == own.tensor.dtype();
    if (same) return;
    detail::fail(ErrorKind::kFormat, "load_state: expected \"{}\" of shape {} and dtype {}, got shape {} and dtype {}",
                 own.name, own.tensor.shape(), own.tensor.dtype(), saved.shape(), saved.dtype());
  }

  [[noreturn]] static void fail_left_over(const std::vector<NamedTensor>& own,
                                          std::map<std::string, const Tensor*> saved) {
    for (const NamedTensor& named : own) saved.erase(named.name);
    detail::fail(ErrorKind::kFormat,
                 "load_state: expected no tensor \"{}\", which belongs to no parameter or to another algorithm",
                 saved.begin()->first);
  }

  OptimizerOptions options_;
  std::vector<OptimizedParameter> parameters_;  // the trainable ones
  std::vector<std::unique_ptr<detail::Updater>> updaters_;
  Tensor control_;                           // of the whole step
  Tensor rates_;                             // float64 [groups, 2]
  Tensor active_;                            // int32 [parameters]
  Tensor steps_;                             // int64 [parameters]
  Tensor controls_;                          // float64 [parameters, 4]
  std::vector<std::int32_t> staged_active_;  // what active_ holds
  bool has_split_ = false;                   // some parameter is split over ranks
  std::vector<Tensor> gradients_;            // of the step before
  bool listed_ = false;                      // tables of addresses, here and in the updaters, are those of gradients_
  GradSquareSum square_sum_;
  GradSquareSum split_square_sum_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::span<const Parameter> parameters,
                                          StreamRef stream) {
  return std::make_unique<GroupedOptimizer>(options, parameters, stream);
}

}  // namespace rowan
