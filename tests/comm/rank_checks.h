// The checks that run on every communicator (tests/comm/rank_main_test.cpp names them).
#pragma once

#include "support/ranks.h"

namespace rowan::test {

/// Every operation, dtype and shape against what all ranks' inputs give.
void check_collectives(Communicator& communicator, StreamRef stream, Faults& faults);

/// Muown and Muon on rows that are split over the ranks against whole matrices.
void check_sharded_muown(Communicator& communicator, StreamRef stream, Faults& faults);

/// Data parallel training against training on one rank.
void check_data_parallel(Communicator& communicator, StreamRef stream, Faults& faults);

/// A layer split by output neurons against the whole one.
void check_column_parallel(Communicator& communicator, StreamRef stream, Faults& faults);

}  // namespace rowan::test
