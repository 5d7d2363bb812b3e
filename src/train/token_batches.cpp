#include "rowan/train/token_batches.h"

#include "rowan/ops/cross_entropy.h"

namespace rowan {

void append_row(HostBatch& batch, const TokenRow& row) {
  if (row.input_ids.empty()) return;
  std::vector<std::int64_t> targets(row.labels.begin() + 1, row.labels.end());
  targets.push_back(kIgnoredLabel);
  batch.append(row.input_ids, targets);
}

std::vector<HostBatch> batches_of(std::span<const TokenRow> rows, std::int64_t max_tokens) {
  std::vector<HostBatch> batches;
  for (const TokenRow& row : rows) {
    const auto length = static_cast<std::int64_t>(row.input_ids.size());
    if (batches.empty() || batches.back().tokens() + length > max_tokens) batches.emplace_back();
    append_row(batches.back(), row);
  }
  return batches;
}

HostBatch sequences_of_rank(const HostBatch& batch, int rank, int ranks) {
  const auto sequences = static_cast<std::int64_t>(batch.starts.size()) - 1;
  HostBatch own;
  for (std::int64_t s = sequences * rank / ranks; s < sequences * (rank + 1) / ranks; ++s) {
    const auto begin = batch.starts[static_cast<std::size_t>(s)], end = batch.starts[static_cast<std::size_t>(s) + 1];
    std::vector<std::int64_t> labels;
    if (!batch.labels.empty()) labels.assign(batch.labels.begin() + begin, batch.labels.begin() + end);
    own.append({batch.ids.begin() + begin, batch.ids.begin() + end}, labels);
  }
  return own;
}

}  // namespace rowan
