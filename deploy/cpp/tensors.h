// KServe's open inference protocol, version 2, over HTTP: tensors of JSON or of bytes, as rayrec/serve/v2.py reads them.
// The ids of a list are one tensor [N], and NAME.lengths [rows] says how many each row has; an input of one row, while
// others have more, belongs to every row.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "columns.h"
#include "mapping.h"

namespace rayrec {

struct InferRequest {
  std::string id;
  Body body;
  std::vector<std::pair<std::string, bool>> outputs;  // that are wanted, and whether as bytes; none: all
  bool binary = false;
};

// Throws Refused. What is read points into `body`. `json_bytes`: where the binary tensors begin; empty: there are none.
InferRequest read_tensors(const std::string& body, std::string_view json_bytes, const Mapping& mapping, const Limits& limits);

// Name, datatype and shape of each input; -1 is any number.
nlohmann::json inputs_of(const Mapping& mapping);

}  // namespace rayrec
