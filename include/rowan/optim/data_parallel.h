// An optimizer for data parallel training: every rank holds the whole model and its own part of each batch.
#pragma once

#include <memory>
#include <span>

#include "rowan/comm/communicator.h"
#include "rowan/optim/optimizer.h"

namespace rowan {

/// Makes an optimizer whose state is split over the communicator's ranks (as ZeRO's first stage, arXiv 1910.02054): a
/// step sums the gradients of all ranks, each rank receiving those of its own rows alone (reduce-scatter), steps these
/// rows with the whole matrices' Newton-Schulz (rowan/optim/shard_cost.h), and gathers masters, or values without one,
/// on all ranks again. All ranks hold the same bits after it. Rows are split evenly; each LoRA A, whose Gram matrix
/// would be large, lies whole on one rank, and ranks get about as many elements of them. With one rank it is
/// make_optimizer's.
///
/// Gradients that a step is given are the rank's own, to be summed over ranks, and preserved; has_grad is equal on all
/// ranks. state() gives the whole state, as the optimizer of one rank has it: it is a collective of all ranks, and its
/// tensors are copies. load_state() takes such a state, from any number of ranks. The communicator outlives the
/// optimizer, and is the one that steps are given.
std::unique_ptr<Optimizer> make_data_parallel_optimizer(const OptimizerOptions& options,
                                                        std::span<const Parameter> parameters,
                                                        Communicator& communicator, StreamRef stream);

}  // namespace rowan
