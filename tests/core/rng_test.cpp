#include <cmath>

#include "catch.h"
#include "rowan/core/rng.h"

using rowan::philox;
using rowan::Rng;

TEST_CASE("philox gives the published vectors of Philox4x32-10") {
  const auto zeros = philox(0, 0, 0);
  CHECK(zeros.word[0] == 0x6627e8d5u);
  CHECK(zeros.word[1] == 0xe169c58du);
  CHECK(zeros.word[2] == 0xbc57ac4cu);
  CHECK(zeros.word[3] == 0x9b00dbd8u);
  const auto ones = philox(~0ull, ~0ull, ~0ull);
  CHECK(ones.word[0] == 0x408f276du);
  CHECK(ones.word[3] == 0x6d5451fdu);
  const auto pi = philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull);
  CHECK(pi.word[0] == 0xd16cfe09u);
  CHECK(pi.word[1] == 0x94fdccebu);
  CHECK(pi.word[2] == 0x5001e420u);
  CHECK(pi.word[3] == 0x24126ea1u);
}

TEST_CASE("an Rng continues from a saved position") {
  Rng a(7, 3);
  for (int i = 0; i < 13; ++i) a.next_u32();
  Rng b(7, 3);
  b.set_position(a.position());
  for (int i = 0; i < 9; ++i) CHECK(a.next_u64() == b.next_u64());
}

TEST_CASE("uniform and normal draws have the moments of their distributions") {
  Rng rng(11);
  constexpr int kDraws = 200000;
  double uniform_sum = 0, normal_sum = 0, normal_squares = 0, fourth = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double u = rng.uniform();
    REQUIRE(u >= 0);
    REQUIRE(u < 1);
    uniform_sum += u;
    const double z = rng.normal();
    normal_sum += z;
    normal_squares += z * z;
    fourth += z * z * z * z;
  }
  // Five standard errors of each mean.
  CHECK(std::abs(uniform_sum / kDraws - 0.5) < 5 * std::sqrt(1.0 / 12 / kDraws));
  CHECK(std::abs(normal_sum / kDraws) < 5 / std::sqrt(kDraws));
  CHECK(std::abs(normal_squares / kDraws - 1) < 5 * std::sqrt(2.0 / kDraws));
  CHECK(std::abs(fourth / kDraws - 3) < 5 * std::sqrt(96.0 / kDraws));
}

TEST_CASE("below covers its range evenly and never reaches the bound") {
  Rng rng(5);
  int counts[7] = {};
  for (int i = 0; i < 70000; ++i) {
    const auto drawn = rng.below(7);
    REQUIRE(drawn < 7);
    ++counts[drawn];
  }
  for (const int count : counts) CHECK(std::abs(count - 10000) < 5 * std::sqrt(10000.0 * 6 / 7));
  CHECK(rng.below(1) == 0);
}
