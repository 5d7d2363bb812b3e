// Newton-Schulz out of matrix products (ops/gemm.h), one code for both devices: what the paths `standard`, and on CUDA
// `gram` and `gram_fp32`, run.
#pragma once

#include "ops/newton_schulz_backend.h"
#include "rowan/core/tensor.h"

namespace rowan::detail {

/// Throws InvalidArgument when steps, coefficients, factor or epsilon do not fit.
NewtonSchulzSteps newton_schulz_steps(const NewtonSchulzOptions& options);

/// `inverse`: float64 [batches], from inverse_norms. u and out as in rowan/ops/newton_schulz.h.
void newton_schulz_standard(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                            const NewtonSchulzSteps& steps, StreamRef stream);
/// In float16, times powers of two that keep clear of its subnormal numbers. After every `steps_a_restart` steps Q is
/// applied and the Gram matrix taken anew.
void newton_schulz_gram(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                        const NewtonSchulzSteps& steps, int steps_a_restart, StreamRef stream);
/// In float32 without a restart.
void newton_schulz_gram_fp32(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                             const NewtonSchulzSteps& steps, StreamRef stream);
/// The polynomial Q of all steps of a float32 Gram matrix r [batches, p, p], which is used up. Only Q carries the
/// identity: TF32 would round small eigenvalues of R away in R (a I + Z), not in a R + R Z.
Tensor gram_fp32_polynomial(Tensor& r, const NewtonSchulzSteps& steps, StreamRef stream);

}  // namespace rowan::detail
