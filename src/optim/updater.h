// What the optimizer is made of: one updater an algorithm family.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rowan/optim/optimizer.h"

namespace rowan::detail {

/// A trainable parameter as the optimizer holds it.
struct OptimizedParameter {
  std::size_t index = 0;  ///< among the trainable ones
  std::string name;
  Tensor master;
  Tensor copy;  ///< the 16-bit value to refresh; undefined where master is the value
  MatrixLayout layout = MatrixLayout::kOutIn;
  Parameter::Shard shard;
  const ParameterGroup* group = nullptr;
  Tensor rates;    ///< float64 [2]
  Tensor step;     ///< int64 [1]
  Tensor control;  ///< float64 [4], skipping where the parameter has no gradient
};

class Updater {
 public:
  virtual ~Updater() = default;
  /// Called before every step, and before anything is written: the first time, to agree with the other ranks. Throws
  /// InvalidArgument on all of them where they do not fit together.
  virtual void agree(Communicator&, StreamRef) {}
  /// Steps its parameters. gradients are those of all trainable parameters, checked; undefined: none in this step.
  /// `moved` says that some lie elsewhere than at the call before.
  virtual void apply(std::span<const Tensor> gradients, bool moved, StreamRef stream, Communicator& communicator) = 0;
  virtual void append_state(std::vector<NamedTensor>& state) const = 0;
};

std::unique_ptr<Updater> make_adamw_updater(std::vector<OptimizedParameter> parameters, StreamRef stream);

/// Muown and Muon, of parameters that are whole on every rank. Throws InvalidArgument naming one that they cannot step.
std::unique_ptr<Updater> make_matrix_updater(std::vector<OptimizedParameter> parameters, StreamRef stream);

/// Muown and Muon, of parameters whose output neurons are split over ranks. Throws likewise.
std::unique_ptr<Updater> make_sharded_updater(std::vector<OptimizedParameter> parameters, StreamRef stream);

}  // namespace rowan::detail
