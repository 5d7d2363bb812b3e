// From rows of a data set to batches of a model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rowan/io/token_rows.h"
#include "rowan/nn/llama.h"

namespace rowan {

/// Appends a row as one sequence, its labels moved to the token before them: the target of a token is the label of the
/// next.
void append_row(HostBatch& batch, const TokenRow& row);

/// All rows in order, as many to a batch as fit in `max_tokens`; a longer row is a batch of its own. Rows are neither
/// cut nor joined.
std::vector<HostBatch> batches_of(std::span<const TokenRow> rows, std::int64_t max_tokens);

/// The sequences of a batch that rank `rank` of `ranks` trains on: about equally many, and each on one rank.
HostBatch sequences_of_rank(const HostBatch& batch, int rank, int ranks);

}  // namespace rowan
