// Newton-Schulz out of matrix products (ops/gemm.h), one code for both devices: what the paths `standard`, and on CUDA
// `gram` and `gram_fp32`, run.
#pragma once

#include "ops/newton_schulz_backend.h"
#include "rowan/core/tensor.h"

namespace rowan::detail {

/// How the iteration on Gram matrices keeps its operands.
struct GramStorage {
  DType dtype = DType::kFloat16;
  int steps_a_restart = 3;     ///< after so many steps Q is applied and the Gram matrix taken anew; 0: never
  bool scaled = true;          ///< times powers of two that keep float16 clear of its subnormal numbers
  std::int64_t tf32_from = 0;  ///< float32 products of p x p matrices may run in TF32 from this p on; 0: never
};

/// `inverse`: float64 [batches], from inverse_norms. u and out as in rowan/ops/newton_schulz.h.
void newton_schulz_standard(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                            const NewtonSchulzSteps& steps, StreamRef stream);
void newton_schulz_gram(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                        const NewtonSchulzSteps& steps, const GramStorage& storage, StreamRef stream);

}  // namespace rowan::detail
