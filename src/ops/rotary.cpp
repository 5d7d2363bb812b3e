#include "rowan/ops/rotary.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "ops/operands.h"
#include "ops/rotary_backend.h"

namespace rowan {

namespace {

using namespace detail;

/// Llama 3.1: wavelengths up to original / high_freq_factor stay, those beyond original / low_freq_factor are stretched
/// by `factor`, and between the two the frequency is a blend (_compute_llama3_parameters in Transformers).
double llama3_frequency(double frequency, const RotaryConfig& config) {
  const auto original = static_cast<double>(config.original_max_position);
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < original / config.high_freq_factor) return frequency;
  if (wavelength > original / config.low_freq_factor) return frequency / config.factor;
  const double smooth =
      (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor);
  return (1 - smooth) * frequency / config.factor + smooth * frequency;
}

bool positive(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

std::vector<double> rotary_frequencies(const RotaryConfig& config) {
  const char* const op = "rotary";
  require(config.head_dim > 0 && config.head_dim % 2 == 0, "{}: expected an even head_dim >= 2, got {}", op,
          config.head_dim);
  require(positive(config.theta), "{}: expected a finite theta > 0, got {}", op, config.theta);
  if (config.type == RotaryType::kLlama3) {
    require(positive(config.factor), "{}: expected a finite factor > 0, got {}", op, config.factor);
    require(positive(config.low_freq_factor) && positive(config.high_freq_factor) &&
                config.low_freq_factor < config.high_freq_factor,
            "{}: expected 0 < low_freq_factor < high_freq_factor, got {} and {}", op, config.low_freq_factor,
            config.high_freq_factor);
    require(config.original_max_position > 0, "{}: expected original_max_position > 0, got {}", op,
            config.original_max_position);
  }
  std::vector<double> frequencies;
  for (std::int64_t j = 0; j < config.head_dim; j += 2) {
    const double frequency =
        1.0 / std::pow(config.theta, static_cast<double>(j) / static_cast<double>(config.head_dim));
    require(std::isfinite(frequency), "{}: expected a theta with finite frequencies, got {}", op, config.theta);
    frequencies.push_back(config.type == RotaryType::kLlama3 ? llama3_frequency(frequency, config) : frequency);
  }
  return frequencies;
}

Tensor rotary_table(const RotaryConfig& config, std::int64_t max_positions, StreamRef stream) {
  const std::vector<double> frequencies = rotary_frequencies(config);
  require(max_positions >= 0 && max_positions <= std::numeric_limits<std::int32_t>::max(),
          "rotary_table: expected max_positions in [0, 2^31), got {}", max_positions);
  std::vector<float> table;
  table.reserve(static_cast<std::size_t>(max_positions) * frequencies.size() * 2);
  for (std::int64_t position = 0; position < max_positions; ++position) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return Tensor::from_host({max_positions, config.head_dim / 2, 2}, table, stream);
}

void rotary_apply(Tensor& x, const Tensor& positions, const Tensor& table, StreamRef stream, bool inverse) {
  const char* const op = "rotary_apply";
  require_rank(op, "x", x, 3);
  require_compute(op, "x", x, stream);
  require(x.size(2) > 0 && x.size(2) % 2 == 0, "{}: expected x with an even head_dim >= 2, got shape {}", op,
          x.shape());
  require_packed(op, "positions", positions, DType::kInt32, {x.size(0)}, stream);
  require_rank(op, "table", table, 3);
  require_packed(op, "table", table, DType::kFloat32, {table.size(0), x.size(2) / 2, 2}, stream);
  if (x.elements() == 0) return;

  RotaryArguments arguments;
  arguments.tokens = x.size(0);
  arguments.heads = x.size(1);
  arguments.head_dim = x.size(2);
  arguments.dtype = x.dtype();
  arguments.x = head_view(x);
  arguments.positions = positions.data<std::int32_t>();
  arguments.table = table.data<float>();
  arguments.table_positions = table.size(0);
  arguments.inverse = inverse;
  if (stream.device().is_cpu()) {
    cpu::rotary_apply(arguments);
  } else {
    cuda::rotary_apply(arguments, stream);
    record_uses(stream, {&x, &positions, &table});
  }
}

}  // namespace rowan
