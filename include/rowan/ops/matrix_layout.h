// How a weight matrix is stored.
#pragma once

namespace rowan {

/// Which way round a weight matrix lies in memory. A row of the Muown arithmetic is always one output neuron.
enum class MatrixLayout {
  kOutIn,  ///< [.., out, in]: an output neuron is one row in memory
  kInOut,  ///< [.., in, out]: an output neuron is one column in memory
};

}  // namespace rowan
