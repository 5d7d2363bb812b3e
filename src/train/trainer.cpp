#include "rowan/train/trainer.h"

#include <chrono>
#include <limits>
#include <utility>

#include "core/check.h"

namespace rowan {

namespace {

double total(const Tensor& sums, StreamRef stream) {
  double sum = 0;
  for (const double part : sums.to_vector<double>(stream)) sum += part;
  return sum;
}

/// Each number's sum over all ranks.
template <class T>
std::vector<T> sum_over_ranks(std::vector<T> own, Communicator& communicator, StreamRef stream) {
  if (communicator.size() == 1) return own;
  Tensor sums = Tensor::from_host(Shape{static_cast<std::int64_t>(own.size())}, own, stream);
  communicator.all_reduce(sums, ReduceOp::kSum, stream);
  communicator.synchronize(stream);
  return sums.to_vector<T>(stream);
}

/// The sum of losses over batches, and the tokens that count in them.
std::pair<double, std::int64_t> loss_sum(LlamaModel& model, std::span<const HostBatch> batches, std::size_t first,
                                         std::size_t step, StreamRef stream) {
  const Tensor sums = Tensor::zeros({static_cast<std::int64_t>(batches.size())}, DType::kFloat64, stream);
  std::int64_t counted = 0;
  for (std::size_t i = first; i < batches.size(); i += step) {
    const auto index = static_cast<std::int64_t>(i);
    Tensor sum = sums.slice(0, index, index + 1);
    model.evaluate(batches[i].to(model.config().vocab_size, stream), sum, stream);
    counted += batches[i].counted_tokens();
  }
  return {total(sums, stream), counted};
}

double mean(double sum, std::int64_t counted) {
  return counted == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / static_cast<double>(counted);
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
  detail::require(
      communicator.size() == 1 || optimizer.sums_gradients(),
      "Trainer: expected an optimizer for {} ranks (make_data_parallel_optimizer), got one for a single rank",
      communicator.size());
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
  const std::vector<std::int64_t> counts =
      sum_over_ranks<std::int64_t>({result.tokens, result.counted_tokens}, communicator_, stream_);
  result.tokens = counts[0];
  result.counted_tokens = counts[1];
  ++step_;
  if (result.counted_tokens == 0) {
    optimizer_.skip_step(stream_);
    result.skipped = true;
    return result;
  }

  const double scale = 1.0 / static_cast<double>(result.counted_tokens);
  const Tensor sums = Tensor::empty({static_cast<std::int64_t>(batches.size())}, DType::kFloat64, stream_);
  const auto ranks = static_cast<std::uint64_t>(communicator_.size()),
             rank = static_cast<std::uint64_t>(communicator_.rank());
  model_.zero_grad(stream_);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    Tensor sum = sums.slice(0, index, index + 1);
    model_.forward_backward(batches[i], scale, sum, stream_, micro_step_++ * ranks + rank);
  }
  optimizer_.step(parameters_, {.learning_rate = result.learning_rate}, stream_, communicator_);
  communicator_.synchronize(stream_);  // what is read from here on waits for collectives, which may never end
  const StepReport report = optimizer_.report(stream_);
  result.gradient_norm = report.gradient_norm;
  result.skipped = report.skipped;
  result.loss = sum_over_ranks<double>({total(sums, stream_)}, communicator_, stream_)[0] * scale;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

double Trainer::evaluate(std::span<const HostBatch> batches) {
  return rowan::evaluate(model_, batches, communicator_, stream_);
}

double evaluate(LlamaModel& model, std::span<const HostBatch> batches, Communicator& communicator, StreamRef stream) {
  const auto [sum, counted] = loss_sum(model, batches, static_cast<std::size_t>(communicator.rank()),
                                       static_cast<std::size_t>(communicator.size()), stream);
  return mean(sum_over_ranks<double>({sum}, communicator, stream)[0],
              sum_over_ranks<std::int64_t>({counted}, communicator, stream)[0]);
}

double evaluate(LlamaModel& model, std::span<const HostBatch> batches, StreamRef stream) {
  SingleCommunicator single;
  return evaluate(model, batches, single, stream);
}

}  // namespace rowan
