// Options that several commands take.
#pragma once

#include <initializer_list>
#include <string>

#include "rowan/core/dtype.h"

namespace rowan::app {

/// A dtype by the name that Transformers gives it. Throws InvalidArgument naming those that are taken.
DType parse_dtype(const std::string& name, std::initializer_list<DType> taken);

}  // namespace rowan::app
