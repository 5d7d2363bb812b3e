#include "rowan/train/trainer.h"

#include <chrono>
#include <limits>

#include "core/check.h"

namespace rowan {

namespace {

double total(const Tensor& sums, StreamRef stream) {
  double sum = 0;
  for (const double part : sums.to_vector<double>(stream)) sum += part;
  return sum;
}

}  // namespace

Trainer::Trainer(LlamaModel& model, Optimizer& optimizer, Communicator& communicator, const TrainerOptions& options,
                 StreamRef stream)
    : model_(model),
      optimizer_(optimizer),
      communicator_(communicator),
      options_(options),
      stream_(stream),
      parameters_(model.trainable_parameters()) {
  check_schedule(options.schedule);
  detail::require(communicator.size() == 1, "Trainer: expected one rank, got {}", communicator.size());
  detail::require(!parameters_.empty(), "Trainer: expected a model with trainable parameters, got none");
}

TrainStep Trainer::step(std::span<const HostBatch> micro_batches) {
  const auto begin = std::chrono::steady_clock::now();
  TrainStep result;
  result.step = step_;
  result.learning_rate = options_.learning_rate * schedule_ratio(options_.schedule, step_);
  std::vector<TokenBatch> batches;
  for (const HostBatch& batch : micro_batches) {
    result.tokens += batch.tokens();
    result.counted_tokens += batch.counted_tokens();
    batches.push_back(batch.to(model_.config().vocab_size, stream_));
  }
  ++step_;
  if (result.counted_tokens == 0) {
    optimizer_.skip_step(stream_);
    result.skipped = true;
    return result;
  }

  const double scale = 1.0 / static_cast<double>(result.counted_tokens);
  const Tensor sums = Tensor::empty({static_cast<std::int64_t>(batches.size())}, DType::kFloat64, stream_);
  model_.zero_grad(stream_);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    Tensor sum = sums.slice(0, index, index + 1);
    model_.forward_backward(batches[i], scale, sum, stream_, micro_step_++);
  }
  optimizer_.step(parameters_, {.learning_rate = result.learning_rate}, stream_, communicator_);
  const StepReport report = optimizer_.report(stream_);
  result.gradient_norm = report.gradient_norm;
  result.skipped = report.skipped;
  result.loss = total(sums, stream_) * scale;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

double Trainer::evaluate(std::span<const HostBatch> batches) { return rowan::evaluate(model_, batches, stream_); }

double evaluate(LlamaModel& model, std::span<const HostBatch> batches, StreamRef stream) {
  const Tensor sums = Tensor::zeros({static_cast<std::int64_t>(batches.size())}, DType::kFloat64, stream);
  std::int64_t counted = 0;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    Tensor sum = sums.slice(0, index, index + 1);
    model.evaluate(batches[i].to(model.config().vocab_size, stream), sum, stream);
    counted += batches[i].counted_tokens();
  }
  return counted == 0 ? std::numeric_limits<double>::quiet_NaN() : total(sums, stream) / static_cast<double>(counted);
}

}  // namespace rowan
