// What the Newton-Schulz of matrices that are split over ranks by output neurons costs, and which way is cheaper.
#pragma once

#include <cstdint>

namespace rowan {

enum class ShardScheme {
  kGram,   ///< one sum of Gram matrices over all ranks, and every rank applies one polynomial to its own rows
  kOwner,  ///< every matrix is gathered by one rank, orthogonalised there, and its rows sent back
};

/// "gram", "owner".
const char* to_string(ShardScheme scheme) noexcept;

/// Matrices of one shape that are stepped together.
struct SplitMatrices {
  std::int64_t rows = 0;  ///< output neurons of a whole matrix
  std::int64_t columns = 0;
  std::int64_t count = 1;
  double update_bytes = 2;  ///< of an element that is gathered and sent back
};

/// What a rank has. The defaults are round numbers for planning, of the order of one H200 among others in one machine.
struct RankSpeed {
  double bandwidth = 200e9;      ///< bytes a second, sent and received at once
  double latency = 10e-6;        ///< seconds a message takes
  double flops_float32 = 40e12;  ///< of products with sides up to 256
  double flops_tf32 = 300e12;    ///< of larger ones
};

/// Of the busiest rank.
struct SchemeCost {
  double bytes = 0;     ///< that it sends
  double messages = 0;  ///< that it waits for one after the other
  double flops = 0;     ///< additions and multiplications
  double seconds = 0;   ///< bytes / bandwidth + messages latency + flops / speed; nothing overlaps
};

/// With N rows, K columns, p and q the shorter and the longer of them, P ranks and n matrices, both by the path
/// gram_fp32 (Gram matrix, 34 p^3 for the polynomial of five steps, one product):
///
///           bytes                     messages           flops
///   gram    n 8 K^2 (P-1)/P           4 ceil(log2 P)     n (4 N K^2 / P + 34 K^3)
///   owner   n 2 b N K (P-1)/P^2       2 (P-1)            ceil(n/P) (4 p^2 q + 34 p^3)
///
/// where b is update_bytes. Gram: two all-reduces, of a number a matrix and of the Gram matrices. Owner: an all-to-all
/// there and one back. Throws InvalidArgument for sizes or speeds that are not positive.
SchemeCost scheme_cost(ShardScheme scheme, const SplitMatrices& matrices, std::int64_t ranks,
                       const RankSpeed& speed = {});

/// The one that takes fewer seconds; the Gram scheme where both take the same. A function of its arguments alone, so
/// that all ranks choose alike.
ShardScheme cheaper_scheme(const SplitMatrices& matrices, std::int64_t ranks, const RankSpeed& speed = {});

}  // namespace rowan
