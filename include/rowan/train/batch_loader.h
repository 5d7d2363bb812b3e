// Batches of a data set, epoch after epoch: shuffling, packing, and a state small enough for any checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "rowan/io/token_rows.h"
#include "rowan/nn/llama.h"

namespace rowan {

struct BatchLoaderOptions {
  std::int64_t batch_size = 1;  ///< rows of a batch; with packing, a batch is at most batch_size * max_length tokens
  std::int64_t max_length = 0;  ///< longer rows are cut to their first max_length tokens; 0: none is cut
  bool packing = false;         ///< as many rows to a batch as fit; needs max_length
  bool shuffle = false;         ///< another order every epoch, a function of (seed, epoch)
  std::uint64_t seed = 0;
  std::int64_t rank = 0;  ///< this process among `world`: ranks take the batches of an epoch in turn
  std::int64_t world = 1;
};

/// Where a loader stands: all that a checkpoint keeps of it, the same on every rank.
struct BatchLoaderState {
  std::uint64_t epoch = 0;
  std::int64_t position = 0;      ///< batches of this epoch that all ranks together have taken
  std::uint64_t fingerprint = 0;  ///< of rows and options, so that a state is not applied to other data

  friend bool operator==(const BatchLoaderState&, const BatchLoaderState&) = default;
};

/// Gives every row once an epoch, whole, as a sequence of its own: attention does not cross rows, positions start at 0
/// in each, and there is no padding. With packing rows are placed by best fit decreasing (each row, longest first, into
/// the fullest batch that still holds it), as TRL does; rows of equal length are taken in shuffled order and the
/// batches are shuffled, so a batch mixes other rows every epoch as far as lengths allow, and every epoch has the same
/// number of batches. The last batch may be smaller. With several ranks up to world - 1 batches at the end of an epoch
/// are left out, so that all ranks make the same number of steps.
class BatchLoader {
 public:
  /// Rows of which no label counts (after cutting; the label of a row's first token never does) are left out and
  /// counted. Throws InvalidArgument for options out of range, labels that do not match their ids, and where no row or
  /// fewer than `world` batches are left.
  BatchLoader(std::vector<TokenRow> rows, const BatchLoaderOptions& options);

  /// This rank's next batch, labels moved to the token before (see append_row). Nothing once at the end of each epoch;
  /// the call after that gives the first batch of the next epoch.
  std::optional<HostBatch> next();

  /// Batches of this rank in one epoch; at least 1.
  std::int64_t batches_per_epoch() const noexcept { return batches_ / options_.world; }
  std::int64_t rows() const noexcept { return static_cast<std::int64_t>(rows_.size()); }  ///< those in use
  std::int64_t tokens() const noexcept { return tokens_; }                                ///< of the rows in use
  /// Tokens of the largest batch that any epoch can have.
  std::int64_t most_tokens() const;
  std::int64_t cut_rows() const noexcept { return cut_rows_; }                            ///< longer than max_length
  std::int64_t left_out_rows() const noexcept { return left_out_rows_; }  ///< without a label that counts

  /// A loader of the same rows and options that is given this state goes on with the same batches, bit for bit, also
  /// from between the end of an epoch and the next. With another `world` it goes on at the same place of the epoch.
  BatchLoaderState state() const noexcept { return state_; }
  /// Throws InvalidArgument, and stays where it is, for a state of other rows or options, or outside the epoch.
  void restore(const BatchLoaderState& state);

 private:
  void plan_epoch();

  std::vector<TokenRow> rows_;
  BatchLoaderOptions options_;
  std::int64_t tokens_ = 0, cut_rows_ = 0, left_out_rows_ = 0;
  std::int64_t batches_ = 0;
  BatchLoaderState state_;
  // Of the epoch of state_: batch b is rows order_[starts_[b]] to order_[starts_[b + 1]].
  std::vector<std::size_t> order_;
  std::vector<std::size_t> starts_;
};

}  // namespace rowan
