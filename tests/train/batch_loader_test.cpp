#include "rowan/train/batch_loader.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"

namespace rowan {
namespace {

/// Rows whose every token is the row's number.
std::vector<TokenRow> numbered_rows(const std::vector<std::size_t>& lengths) {
  std::vector<TokenRow> rows;
  for (const std::size_t length : lengths) {
    const auto number = static_cast<std::int32_t>(rows.size());
    rows.push_back({std::vector<std::int32_t>(length, number), std::vector<std::int64_t>(length, number)});
  }
  return rows;
}

std::vector<std::size_t> random_lengths(std::size_t count, std::uint64_t longest, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::size_t> lengths(count);
  for (std::size_t& length : lengths) length = 2 + rng.below(longest - 1);
  return lengths;
}

/// The numbers of a batch's rows.
std::vector<std::int32_t> numbers(const HostBatch& batch) {
  std::vector<std::int32_t> rows;
  for (std::size_t s = 0; s + 1 < batch.starts.size(); ++s)
    rows.push_back(batch.ids[static_cast<std::size_t>(batch.starts[s])]);
  return rows;
}

std::vector<std::vector<std::int32_t>> epoch(BatchLoader& loader) {
  std::vector<std::vector<std::int32_t>> batches;
  while (const auto batch = loader.next()) batches.push_back(numbers(*batch));
  return batches;
}

std::vector<std::int32_t> flat(const std::vector<std::vector<std::int32_t>>& batches) {
  std::vector<std::int32_t> rows;
  for (const auto& batch : batches) rows.insert(rows.end(), batch.begin(), batch.end());
  return rows;
}

bool equal(const HostBatch& a, const HostBatch& b) {
  return a.ids == b.ids && a.positions == b.positions && a.labels == b.labels && a.starts == b.starts &&
         a.max_length == b.max_length;
}

}  // namespace

TEST_CASE("A loader without options gives the rows in order, epoch after epoch") {
  BatchLoader loader(numbered_rows({3, 2, 5}), {.batch_size = 2});
  const std::vector<std::vector<std::int32_t>> expected{{0, 1}, {2}};
  CHECK(loader.batches_per_epoch() == 2);
  CHECK(loader.tokens() == 10);
  for (int i = 0; i < 2; ++i) CHECK(epoch(loader) == expected);
}

TEST_CASE("Every packed sequence keeps its own positions and boundaries, and the target of a token is the next label") {
  BatchLoader loader({{{5, 6, 7}, {-100, 6, 7}}, {{8, 9}, {8, 9}}}, {.max_length = 5, .packing = true});
  const auto batch = loader.next();
  REQUIRE(batch);
  CHECK(batch->ids == std::vector<std::int32_t>{5, 6, 7, 8, 9});
  CHECK(batch->positions == std::vector<std::int32_t>{0, 1, 2, 0, 1});
  CHECK(batch->labels == std::vector<std::int64_t>{6, 7, kIgnoredLabel, 9, kIgnoredLabel});
  CHECK(batch->starts == std::vector<std::int32_t>{0, 3, 5});
  CHECK(batch->max_length == 3);
  CHECK_FALSE(loader.next());
}

TEST_CASE("Shuffled epochs hold every row once, in an order of seed and epoch alone") {
  const auto rows = numbered_rows(random_lengths(101, 9, 1));
  BatchLoader loader(rows, {.batch_size = 4, .shuffle = true, .seed = 7}), again = loader;
  BatchLoader other(rows, {.batch_size = 4, .shuffle = true, .seed = 8});
  const auto first = epoch(loader), second = epoch(loader);
  CHECK(first != second);
  CHECK(epoch(again) == first);
  CHECK(epoch(other) != first);
  for (const auto& batches : {first, second}) {
    auto all = flat(batches);
    std::sort(all.begin(), all.end());
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(all.at(i) == static_cast<std::int32_t>(i));
  }
}

TEST_CASE("Shuffling favours no place") {
  std::map<std::int32_t, int> first;
  BatchLoader loader(numbered_rows({2, 2, 2, 2}), {.shuffle = true});
  for (int i = 0; i < 4000; ++i) ++first[flat(epoch(loader)).front()];
  for (const auto& [row, count] : first) CHECK(std::abs(count - 1000) < 140);  // 5 standard deviations
  CHECK(first.size() == 4);
}

TEST_CASE("Packing cuts no row, never exceeds its tokens, fills them, and every epoch has the same number of batches") {
  const auto lengths = random_lengths(500, 64, 2);
  const auto rows = numbered_rows(lengths);
  BatchLoader loader(rows, {.batch_size = 2, .max_length = 64, .packing = true, .shuffle = true});
  std::set<std::vector<std::vector<std::int32_t>>> orders;
  for (int e = 0; e < 3; ++e) {
    std::int64_t tokens = 0, batches = 0;
    std::vector<std::vector<std::int32_t>> order;
    while (const auto batch = loader.next()) {
      CHECK(batch->tokens() <= 128);
      for (std::size_t s = 0; s + 1 < batch->starts.size(); ++s) {
        const auto begin = static_cast<std::size_t>(batch->starts[s]);
        const auto length = static_cast<std::size_t>(batch->starts[s + 1]) - begin;
        CHECK(length == lengths[static_cast<std::size_t>(batch->ids[begin])]);
      }
      tokens += batch->tokens();
      ++batches;
      order.push_back(numbers(*batch));
    }
    CHECK(tokens == loader.tokens());
    CHECK(batches == loader.batches_per_epoch());
    CHECK(static_cast<double>(tokens) > 0.98 * 128 * static_cast<double>(batches));
    orders.insert(order);
  }
  CHECK(orders.size() == 3);
}

TEST_CASE("A restored loader goes on with the same batches, from any place and across epochs") {
  const auto rows = numbered_rows(random_lengths(40, 16, 3));
  for (const bool packing : {false, true}) {
    const BatchLoaderOptions options{.batch_size = 3, .max_length = 16, .packing = packing, .shuffle = true, .seed = 5};
    BatchLoader straight(rows, options);
    const std::int64_t calls = 2 * (straight.batches_per_epoch() + 1) + 3;
    for (std::int64_t i = 0; i < calls; ++i) {
      BatchLoader resumed(rows, options);
      resumed.restore(straight.state());
      for (int j = 0; j < 4; ++j) {
        BatchLoader copy = straight;
        for (int k = 0; k < j; ++k) copy.next();
        const auto a = copy.next(), b = resumed.next();
        REQUIRE(a.has_value() == b.has_value());
        if (a) CHECK(equal(*a, *b));
      }
      straight.next();
    }
  }
}

TEST_CASE("A state of other rows, options or outside the epoch is refused and changes nothing") {
  const auto rows = numbered_rows({4, 3, 6, 2});
  const BatchLoaderOptions options{.max_length = 8, .shuffle = true, .seed = 5};
  BatchLoader loader(rows, options);
  loader.next();
  const BatchLoaderState state = loader.state();
  auto other_rows = rows;
  other_rows[2].labels[3] = kIgnoredLabel;
  BatchLoaderOptions other_options = options;
  other_options.seed = 6;
  CHECK_THROWS_AS(BatchLoader(other_rows, options).restore(state), Error);
  CHECK_THROWS_AS(BatchLoader(rows, other_options).restore(state), Error);
  BatchLoaderState outside = state;
  outside.position = 5;
  CHECK_THROWS_AS(loader.restore(outside), Error);
  outside.position = -1;
  CHECK_THROWS_AS(loader.restore(outside), Error);
  CHECK(loader.state() == state);
}

TEST_CASE("Ranks share an epoch: the same number of batches each, no row twice") {
  const auto rows = numbered_rows(random_lengths(47, 12, 4));
  BatchLoader whole(rows, {.batch_size = 2, .shuffle = true});
  const auto all = epoch(whole);
  std::vector<std::vector<std::int32_t>> joined(all.size() / 3 * 3);
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    BatchLoader loader(rows, {.batch_size = 2, .shuffle = true, .rank = rank, .world = 3});
    const auto mine = epoch(loader);
    CHECK(static_cast<std::int64_t>(mine.size()) == loader.batches_per_epoch());
    REQUIRE(mine.size() == all.size() / 3);
    for (std::size_t i = 0; i < mine.size(); ++i) joined[3 * i + static_cast<std::size_t>(rank)] = mine[i];
  }
  CHECK(std::equal(joined.begin(), joined.end(), all.begin()));

  // Another number of ranks goes on at the same place.
  BatchLoader two(rows, {.batch_size = 2, .shuffle = true, .rank = 1, .world = 2});
  two.next();
  BatchLoader one(rows, {.batch_size = 2, .shuffle = true});
  one.restore(two.state());
  CHECK(numbers(one.next().value()) == all[2]);
}

TEST_CASE("Long rows are cut, and rows without a label that counts are left out; both are counted") {
  std::vector<TokenRow> rows = numbered_rows({9, 4});
  rows.push_back({{1, 2, 3}, {1, -100, -100}});  // only the first token's label, which nothing predicts
  rows.push_back({{1, 2, 3, 4, 5}, {-100, -100, -100, -100, 5}});  // its label is cut off
  rows.push_back({});
  rows.push_back({{1}, {1}});
  BatchLoader loader(rows, {.batch_size = 8, .max_length = 4});
  CHECK(loader.cut_rows() == 2);
  CHECK(loader.left_out_rows() == 4);
  CHECK(loader.rows() == 2);
  const auto batch = loader.next().value();
  CHECK(batch.starts == std::vector<std::int32_t>{0, 4, 8});
}

TEST_CASE("A loader knows the largest batch that any epoch can have") {
  CHECK(BatchLoader(numbered_rows({9, 4, 7, 2}), {.batch_size = 2, .shuffle = true}).most_tokens() == 16);
  CHECK(BatchLoader(numbered_rows({9, 4, 7, 2}), {.batch_size = 2, .max_length = 5}).most_tokens() == 10);
  CHECK(BatchLoader(numbered_rows({9, 4, 7, 2}), {.batch_size = 8}).most_tokens() == 22);
  CHECK(BatchLoader(numbered_rows({5, 4, 3}), {.batch_size = 2, .max_length = 5, .packing = true}).most_tokens() == 10);
}

TEST_CASE("Loader options out of range, and data without a batch for every rank, are refused") {
  const auto rows = numbered_rows({4, 3});
  CHECK_THROWS_AS(BatchLoader(rows, {.batch_size = 0}), Error);
  CHECK_THROWS_AS(BatchLoader(rows, {.max_length = -1}), Error);
  CHECK_THROWS_AS(BatchLoader(rows, {.packing = true}), Error);
  CHECK_THROWS_AS(BatchLoader(rows, {.batch_size = 1 << 20, .max_length = 1 << 20, .packing = true}), Error);
  CHECK_THROWS_AS(BatchLoader(rows, {.rank = 1, .world = 1}), Error);
  CHECK_THROWS_AS(BatchLoader(rows, {.world = 3}), Error);
  CHECK_THROWS_AS(BatchLoader({}, {}), Error);
  CHECK_THROWS_AS(BatchLoader({{{1, 2}, {1}}}, {}), Error);
}

}  // namespace rowan
