#include "optim/updater.h"
#include "rowan/ops/adamw.h"

namespace rowan::detail {

namespace {

class AdamwUpdater final : public Updater {
 public:
  AdamwUpdater(std::vector<OptimizedParameter> parameters, StreamRef stream) : parameters_(std::move(parameters)) {
    for (const OptimizedParameter& p : parameters_) {
      AdamwArguments a;
      a.master = p.master;
      a.first_moment = Tensor::zeros(p.master.shape(), p.master.dtype(), stream);
      a.second_moment = Tensor::zeros(p.master.shape(), p.master.dtype(), stream);
      a.value = p.copy;
      a.rates = p.rates;
      a.step = p.step;
      a.control = p.control;
      a.beta1 = p.group->beta1;
      a.beta2 = p.group->beta2;
      a.epsilon = p.group->epsilon;
      arguments_.push_back(a);
    }
  }

  void apply(std::span<const Tensor> gradients, bool moved, StreamRef stream, Communicator&) override {
    if (moved) {
      std::vector<AdamwArguments> present;
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        arguments_[i].gradient = gradients[parameters_[i].index];
        if (arguments_[i].gradient.defined()) present.push_back(arguments_[i]);
      }
      batch_ = AdamwBatch(present, stream);
    }
    batch_.run(stream);
  }

  void append_state(std::vector<NamedTensor>& state) const override {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      state.push_back({"first_moment." + parameters_[i].name, arguments_[i].first_moment});
      state.push_back({"second_moment." + parameters_[i].name, arguments_[i].second_moment});
    }
  }

 private:
  std::vector<OptimizedParameter> parameters_;
  std::vector<AdamwArguments> arguments_;  // one a parameter
  AdamwBatch batch_;                       // of those that have a gradient
};

}  // namespace

std::unique_ptr<Updater> make_adamw_updater(std::vector<OptimizedParameter> parameters, StreamRef stream) {
  return std::make_unique<AdamwUpdater>(std::move(parameters), stream);
}

}  // namespace rowan::detail
