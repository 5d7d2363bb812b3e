#include "rowan/train/batch_loader.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "core/check.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"
#include "rowan/train/token_batches.h"

namespace rowan {

namespace {

using detail::require;

void check(const BatchLoaderOptions& o) {
  require(o.batch_size >= 1, "BatchLoader: expected batch_size >= 1, got {}", o.batch_size);
  require(o.max_length >= 0, "BatchLoader: expected max_length >= 0, got {}", o.max_length);
  require(!o.packing || o.max_length > 0, "BatchLoader: expected a max_length with packing, got none");
  require(!o.packing || o.batch_size <= INT32_MAX / o.max_length,
          "BatchLoader: expected batch_size * max_length below 2^31, got {} * {}", o.batch_size, o.max_length);
  require(o.world >= 1 && 0 <= o.rank && o.rank < o.world, "BatchLoader: expected a rank below world, got {} of {}",
          o.rank, o.world);
}

bool counts(const TokenRow& row) {
  return std::any_of(row.labels.begin() + 1, row.labels.end(),
                     [](std::int64_t label) { return label != kIgnoredLabel; });
}

/// FNV-1a, a word at a time.
class Fingerprint {
 public:
  void add(std::uint64_t word) {
    hash_ = (hash_ ^ word) * 0x100000001B3u;
    hash_ ^= hash_ >> 29;  // the product alone never moves high bits down
  }
  std::uint64_t value() const noexcept { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325u;
};

std::uint64_t fingerprint_of(const std::vector<TokenRow>& rows, const BatchLoaderOptions& o) {
  Fingerprint print;
  for (const auto option : {o.batch_size, o.max_length, std::int64_t{o.packing}, std::int64_t{o.shuffle}})
    print.add(static_cast<std::uint64_t>(option));
  print.add(o.seed);
  for (const TokenRow& row : rows) {
    print.add(row.input_ids.size());
    for (std::size_t i = 0; i < row.input_ids.size(); ++i) {
      print.add(static_cast<std::uint64_t>(row.input_ids[i]));
      print.add(static_cast<std::uint64_t>(row.labels[i]));
    }
  }
  return print.value();
}

template <class T>
void shuffle(std::vector<T>& values, Rng& rng) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
}

using Packs = std::vector<std::vector<std::size_t>>;

/// Rows in the given order, longest first, each into the fullest pack that still holds it.
Packs best_fit_decreasing(std::vector<std::size_t> order, const std::vector<TokenRow>& rows, std::size_t capacity) {
  const auto length = [&rows](std::size_t row) { return rows[row].input_ids.size(); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return length(a) > length(b); });
  Packs packs;
  std::set<std::pair<std::size_t, std::size_t>> open;  // (tokens left, pack)
  for (const std::size_t row : order) {
    const auto fullest = open.lower_bound({length(row), 0});
    const bool found = fullest != open.end();
    const std::size_t pack = found ? fullest->second : packs.size();
    const std::size_t left = (found ? fullest->first : capacity) - length(row);
    if (found) {
      open.erase(fullest);
    } else {
      packs.emplace_back();
    }
    packs[pack].push_back(row);
    if (left > 0) open.emplace(left, pack);
  }
  return packs;
}

}  // namespace

BatchLoader::BatchLoader(std::vector<TokenRow> rows, const BatchLoaderOptions& options)
    : rows_(std::move(rows)), options_(options) {
  check(options_);
  const auto limit = static_cast<std::size_t>(options_.max_length);
  for (TokenRow& row : rows_) {
    require(row.input_ids.size() == row.labels.size(), "BatchLoader: expected one label a token ({}), got {}",
            row.input_ids.size(), row.labels.size());
    if (limit == 0 || row.input_ids.size() <= limit) continue;
    row.input_ids.resize(limit);
    row.labels.resize(limit);
    ++cut_rows_;
  }
  left_out_rows_ = static_cast<std::int64_t>(
      std::erase_if(rows_, [](const TokenRow& row) { return row.labels.empty() || !counts(row); }));
  for (const TokenRow& row : rows_) tokens_ += static_cast<std::int64_t>(row.input_ids.size());
  state_.fingerprint = fingerprint_of(rows_, options_);
  plan_epoch();
  batches_ = static_cast<std::int64_t>(starts_.size()) - 1;
  require(!rows_.empty(), "BatchLoader: expected a row with a label that counts, got {} rows without and {} cut to {}",
          left_out_rows_, cut_rows_, options_.max_length);
  require(batches_ >= options_.world, "BatchLoader: expected a batch for each of {} ranks, got {} batches of {} rows",
          options_.world, batches_, rows_.size());
}

std::int64_t BatchLoader::most_tokens() const {
  std::vector<std::int64_t> lengths;
  for (const TokenRow& row : rows_) lengths.push_back(static_cast<std::int64_t>(row.input_ids.size()));
  if (options_.packing) return std::min(tokens_, options_.batch_size * options_.max_length);
  const auto rows = std::min(static_cast<std::size_t>(options_.batch_size), lengths.size());
  std::partial_sort(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(rows), lengths.end(),
                    std::greater<>());
  return std::accumulate(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(rows), std::int64_t{0});
}

void BatchLoader::plan_epoch() {
  // Not the sequences that weights are initialised from.
  constexpr std::uint64_t kShuffles = std::uint64_t{1} << 63;
  Rng rng(options_.seed, kShuffles | state_.epoch);
  order_.resize(rows_.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  if (options_.shuffle) shuffle(order_, rng);
  starts_.assign(1, 0);
  if (!options_.packing) {
    const auto size = static_cast<std::size_t>(options_.batch_size);
    while (starts_.back() < order_.size())
      starts_.push_back(std::min(order_.size() - starts_.back(), size) + starts_.back());
    return;
  }
  Packs packs = best_fit_decreasing(std::move(order_), rows_,
                                    static_cast<std::size_t>(options_.batch_size * options_.max_length));
  if (options_.shuffle) shuffle(packs, rng);
  order_.clear();
  for (const auto& pack : packs) {
    order_.insert(order_.end(), pack.begin(), pack.end());
    starts_.push_back(order_.size());
  }
}

std::optional<HostBatch> BatchLoader::next() {
  if (state_.position + options_.world > batches_) {
    ++state_.epoch;
    state_.position = 0;
    plan_epoch();
    return std::nullopt;
  }
  const auto batch = static_cast<std::size_t>(state_.position + options_.rank);
  HostBatch rows;
  for (std::size_t i = starts_[batch]; i < starts_[batch + 1]; ++i) append_row(rows, rows_[order_[i]]);
  state_.position += options_.world;
  return rows;
}

void BatchLoader::restore(const BatchLoaderState& state) {
  require(state.fingerprint == state_.fingerprint,
          "BatchLoader::restore: expected a state of the same rows and options, got one of others");
  require(0 <= state.position && state.position <= batches_,
          "BatchLoader::restore: expected a position in [0, {}], got {}", batches_, state.position);
  require(state.epoch <= INT64_MAX, "BatchLoader::restore: expected an epoch below 2^63, got {}", state.epoch);
  state_ = state;
  plan_epoch();
}

}  // namespace rowan
