// The checks that run on every communicator (tests/comm/rank_main_test.cpp names them).
#pragma once

#include "support/ranks.h"

namespace rowan::test {

/// Every operation, dtype and shape against what all ranks' inputs give.
void check_collectives(Communicator& communicator, StreamRef stream, Faults& faults);

}  // namespace rowan::test
