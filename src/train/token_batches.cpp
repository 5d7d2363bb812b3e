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

}  // namespace rowan
