#include <algorithm>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/blas.h"
#include "ops/gemm_backend.h"

namespace rowan::cpu {

namespace {

using detail::convert;

/// One block of c: rows [i, i + rows), columns [j, j + cols) of one matrix of the batch.
struct Block {
  std::int64_t batch, i, j, rows, cols;
};

template <class T>
const T* matrix(const GemmOperand& operand, std::int64_t batch) {
  return static_cast<const T*>(operand.data) + batch * operand.batch_stride;
}

/// Copies op(source)[row0 .. row0 + rows, col0 .. col0 + cols) into a dense row-major array of another type.
template <class T, class To>
void widen(const T* source, const GemmOperand& operand, std::int64_t row0, std::int64_t rows, std::int64_t col0,
           std::int64_t cols, To* to) {
  if (operand.transposed) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const T* const from = source + (col0 + j) * operand.ld + row0;
      for (std::int64_t i = 0; i < rows; ++i) to[i * cols + j] = convert<To>(from[i]);
    }
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* const from = source + (row0 + i) * operand.ld + col0;
      for (std::int64_t j = 0; j < cols; ++j) to[i * cols + j] = convert<To>(from[j]);
    }
  }
}

/// c = alpha sum + beta addend for one block, in double, rounded once.
template <class Sum, class Out>
void store(const GemmArguments& g, const Block& block, const Sum* sums) {
  const std::int64_t first = block.batch * g.c_batch_stride;
  for (std::int64_t i = 0; i < block.rows; ++i) {
    const std::int64_t offset = first + (block.i + i) * g.ldc + block.j;
    Out* const row = static_cast<Out*>(g.c) + offset;
    const Out* const added = static_cast<const Out*>(g.addend ? g.addend : g.c) + offset;
    for (std::int64_t j = 0; j < block.cols; ++j) {
      double value = g.alpha * static_cast<double>(sums[i * block.cols + j]);
      if (g.beta != 0) value += g.beta * convert<double>(added[j]);
      row[j] = convert<Out>(value);
    }
  }
}

/// Plain loops: panels of a and b as double, sums in double, in the order of k.
template <class T, class Out>
void plain_block(const GemmArguments& g, const Block& block) {
  constexpr std::int64_t kDepth = 256;
  std::vector<double> sums(static_cast<std::size_t>(block.rows * block.cols));
  std::vector<double> a(static_cast<std::size_t>(block.rows * kDepth)),
      b(static_cast<std::size_t>(kDepth * block.cols));
  for (std::int64_t k = 0; k < g.k; k += kDepth) {
    const std::int64_t depth = std::min(kDepth, g.k - k);
    widen(matrix<T>(g.a, block.batch), g.a, block.i, block.rows, k, depth, a.data());
    widen(matrix<T>(g.b, block.batch), g.b, k, depth, block.j, block.cols, b.data());
    for (std::int64_t i = 0; i < block.rows; ++i) {
      double* const sum = sums.data() + i * block.cols;
      for (std::int64_t d = 0; d < depth; ++d) {
        const double factor = a[static_cast<std::size_t>(i * depth + d)];
        const double* const row = b.data() + d * block.cols;
        for (std::int64_t j = 0; j < block.cols; ++j) sum[j] += factor * row[j];
      }
    }
  }
  store<double, Out>(g, block, sums.data());
}

void blas_block_float(const GemmArguments& g, const Block& block) {
  const float* const a = matrix<float>(g.a, block.batch) + (g.a.transposed ? block.i : block.i * g.a.ld);
  const float* const b = matrix<float>(g.b, block.batch) + (g.b.transposed ? block.j * g.b.ld : block.j);
  const std::int64_t first = block.batch * g.c_batch_stride + block.i * g.ldc + block.j;
  float* const c = static_cast<float*>(g.c) + first;
  if (g.beta != 0 && g.addend) {
    const float* const addend = static_cast<const float*>(g.addend) + first;
    for (std::int64_t i = 0; i < block.rows; ++i) std::copy_n(addend + i * g.ldc, block.cols, c + i * g.ldc);
  }
  detail::sgemm(g.a.transposed, g.b.transposed, block.rows, block.cols, g.k, static_cast<float>(g.alpha), a, g.a.ld, b,
                g.b.ld, static_cast<float>(g.beta), c, g.ldc);
}

/// 16-bit inputs as float32 panels; the sums stay in float32 over the whole of k and are rounded once.
template <class T, class Out>
void blas_block_16(const GemmArguments& g, const Block& block) {
  constexpr std::int64_t kDepth = 2048;
  std::vector<float> sums(static_cast<std::size_t>(block.rows * block.cols));
  const std::int64_t most = std::min(kDepth, g.k);
  std::vector<float> a(static_cast<std::size_t>(block.rows * most)), b(static_cast<std::size_t>(most * block.cols));
  for (std::int64_t k = 0; k < g.k; k += kDepth) {
    const std::int64_t depth = std::min(kDepth, g.k - k);
    widen(matrix<T>(g.a, block.batch), g.a, block.i, block.rows, k, depth, a.data());
    widen(matrix<T>(g.b, block.batch), g.b, k, depth, block.j, block.cols, b.data());
    detail::sgemm(false, false, block.rows, block.cols, depth, 1.0f, a.data(), depth, b.data(), block.cols,
                  k == 0 ? 0.0f : 1.0f, sums.data(), block.cols);
  }
  store<float, Out>(g, block, sums.data());
}

template <class T, class Out>
void run_block(const GemmArguments& g, const Block& block) {
  if (std::is_same_v<T, double> || !detail::have_blas()) {
    plain_block<T, Out>(g, block);
  } else if constexpr (std::is_same_v<T, float>) {
    blas_block_float(g, block);
  } else if constexpr (!std::is_same_v<T, double>) {
    blas_block_16<T, Out>(g, block);
  }
}

/// Largest of the steps that leaves enough blocks for a few cores to share; depends on the shape alone.
struct BlockShape {
  std::int64_t rows, cols;
};
BlockShape block_shape(const GemmArguments& g) {
  constexpr std::int64_t kEnough = 16;
  const auto blocks = [&](BlockShape s) {
    return g.batch * ((g.m + s.rows - 1) / s.rows) * ((g.n + s.cols - 1) / s.cols);
  };
  BlockShape shape{256, 512};
  while (blocks(shape) < kEnough && (shape.rows > 32 || shape.cols > 64)) {
    // Halve the side that the matrix fills, the longer one first.
    const bool rows = shape.cols <= 64 || (shape.rows > 32 && std::min(shape.rows, g.m) >= std::min(shape.cols, g.n));
    (rows ? shape.rows : shape.cols) /= 2;
  }
  return shape;
}

template <class T, class Out>
void run(const GemmArguments& g) {
  const BlockShape shape = block_shape(g);
  const std::int64_t down = (g.m + shape.rows - 1) / shape.rows, across = (g.n + shape.cols - 1) / shape.cols;
  detail::parallel_for(g.batch * down * across, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      Block block{};
      block.batch = t / (down * across);
      block.i = t / across % down * shape.rows;
      block.j = t % across * shape.cols;
      block.rows = std::min(shape.rows, g.m - block.i);
      block.cols = std::min(shape.cols, g.n - block.j);
      run_block<T, Out>(g, block);
    }
  });
}

}  // namespace

void gemm(const GemmArguments& g) {
  detail::dispatch_floating(g.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
      if (g.c_dtype == DType::kFloat32) return run<T, float>(g);
    }
    run<T, T>(g);
  });
}

}  // namespace rowan::cpu
