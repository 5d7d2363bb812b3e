// Single-precision matrix products for CPU backends: OpenBLAS where it is built in, plain loops elsewhere.
#pragma once

#include <cstdint>

namespace rowan::detail {

/// True when sgemm below calls OpenBLAS.
bool have_blas() noexcept;

/// C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C, all row-major with row strides lda, ldb, ldc; op transposes when
/// asked (A is then stored [k, m], B [n, k]). beta = 0 does not read C. Call it inside parallel_for: there it runs on
/// one thread, so that results do not depend on the number of cores.
void sgemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
           const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);

}  // namespace rowan::detail
