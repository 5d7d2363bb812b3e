#pragma once

#include <ostream>

namespace rowan::app {

/// What the library was built with, and the devices it can use.
void print_info(std::ostream& out);

}  // namespace rowan::app
