// Requests as JSON lines.
#pragma once

#include <istream>
#include <optional>

#include <nlohmann/json.hpp>

#include "columns.h"
#include "errors.h"
#include "mapping.h"

namespace rayrec {

// Reads the next request; none at the end of the stream. A line is a JSON object in one of three forms:
//
//   {"rows": [{…}, …]}                         or {"rows": {"column": […], …}}
//   {"context": {…}, "candidates": [{…}, …]}   the context belongs to every candidate
//   {"inputs": [{"name", "datatype", "shape", "data"}, …]}   tensors of the open inference protocol (tensors.h); those
//                                              with `binary_data_size` follow the line as raw bytes
//
// Throws RequestError.
std::optional<Request> read_request(std::istream& in, const Mapping& mapping);

// {"error": text, "errors": [{"row", "column", "value", "problem", "fix"}, …]}
nlohmann::json to_json(const RequestError& error);

}  // namespace rayrec
