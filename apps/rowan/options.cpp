#include "options.h"

#include <fmt/format.h>

#include <vector>

#include "rowan/core/error.h"

namespace rowan::app {

DType parse_dtype(const std::string& name, std::initializer_list<DType> taken) {
  std::vector<const char*> names;
  for (const DType dtype : taken) {
    if (name == to_string(dtype)) return dtype;
    names.push_back(to_string(dtype));
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("dtype: expected one of {}, got '{}'", fmt::join(names, ", "), name));
}

}  // namespace rowan::app
