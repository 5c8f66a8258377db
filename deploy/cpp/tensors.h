// Tensors to columns, by KServe's open inference protocol, version 2, like rayrec/serve/v2.py.
//
// Tensors have no rows of unequal length: the ids of a list are a tensor [N], and the tensor NAME.lengths [rows] has the
// number of ids of each row. An input with one row, if others have more, is the context of all rows.
#pragma once

#include <deque>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "columns.h"
#include "mapping.h"

namespace rayrec {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  Leaf leaf;
};

// A tensor of raw little-endian bytes, which must outlive it. Strings (BYTES) follow their length, a uint32.
// Throws RequestError.
Tensor tensor_of(std::string name, std::string_view datatype, std::vector<int64_t> shape, std::string_view bytes);

// The tensors of {"inputs": [{"name", "datatype", "shape", "data"}, …]}. Tensors with the parameter `binary_data_size`
// instead of "data" are read from `binary` into `storage`, which must outlive them. Throws RequestError.
std::vector<Tensor> read_tensors(const Value& request, std::istream& binary, std::deque<std::string>& storage);

// The columns of tensors. Throws RequestError.
Request request_of(std::vector<Tensor> tensors, const Mapping& mapping);

// Name, datatype and shape of each input; -1: any size.
nlohmann::json inputs_of(const Mapping& mapping);

}  // namespace rayrec
