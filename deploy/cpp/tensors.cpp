#include "tensors.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "hashing.h"

namespace rayrec {
namespace {

using nlohmann::json;

struct Datatype {
  const char* name;
  Type type;
  size_t bytes;
  bool is_signed;
};
constexpr Datatype kDatatypes[] = {
    {"BOOL", Type::Bool, 1, false},  {"UINT8", Type::Int, 1, false},  {"UINT16", Type::Int, 2, false},
    {"UINT32", Type::Int, 4, false}, {"UINT64", Type::Unsigned, 8, false}, {"INT8", Type::Int, 1, true},
    {"INT16", Type::Int, 2, true},   {"INT32", Type::Int, 4, true},   {"INT64", Type::Int, 8, true},
    {"FP16", Type::Float, 2, true},  {"FP32", Type::Float, 4, true},  {"FP64", Type::Double, 8, true},
    {"BYTES", Type::Text, 0, false},
};

constexpr int64_t kMaxBinary = int64_t{1} << 31;  // bytes of a tensor

[[noreturn]] void malformed(const std::string& what) {
  throw RequestError("not a request of the open inference protocol: " + what);
}

[[noreturn]] void wrong(const std::string& name, const std::string& what) { throw RequestError("input '" + name + "' " + what); }

double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                     : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -size : size;
}

template <class T>
T read(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

int64_t integer(const char* from, const Datatype& kind) {
  switch (kind.bytes) {
    case 1: return kind.is_signed ? read<int8_t>(from) : read<uint8_t>(from);
    case 2: return kind.is_signed ? read<int16_t>(from) : read<uint16_t>(from);
    case 4: return kind.is_signed ? int64_t{read<int32_t>(from)} : int64_t{read<uint32_t>(from)};
    default: return read<int64_t>(from);
  }
}

void check_utf8(const std::string& name, std::string_view text) {
  try {
    (void)json(text).dump();
  } catch (const json::exception&) {
    wrong(name, "has strings that are not UTF-8");
  }
}

Leaf from_bytes(const std::string& name, const Datatype& kind, std::string_view data) {
  Leaf leaf;
  leaf.set_type(kind.type);
  if (kind.type == Type::Text) {
    while (!data.empty()) {
      const size_t size = data.size() < 4 ? data.size() : read<uint32_t>(data.data());
      if (data.size() < 4 || size > data.size() - 4) wrong(name, "has a string that is longer than its bytes");
      check_utf8(name, data.substr(4, size));
      leaf.push(data.substr(4, size));
      data.remove_prefix(4 + size);
    }
    return leaf;
  }
  if (data.size() % kind.bytes) wrong(name, "has bytes that are not a multiple of " + std::string(kind.name));
  for (const char *at = data.data(), *end = at + data.size(); at != end; at += kind.bytes) {
    if (kind.type == Type::Double) leaf.push(read<double>(at));
    else if (kind.type == Type::Float) leaf.push(kind.bytes == 2 ? half(read<uint16_t>(at)) : static_cast<double>(read<float>(at)));
    else leaf.push(kind.type == Type::Bool ? int64_t{*at != 0} : integer(at, kind));
  }
  return leaf;
}

void add_values(const std::string& name, const Datatype& kind, const Value& value, Leaf& leaf) {
  using Kind = Value::Kind;
  const bool whole = value.kind == Kind::Int, real = value.kind == Kind::Real;
  if (kind.type == Type::Text && value.kind == Kind::Text) return leaf.push(value.text());
  if (kind.type == Type::Bool && value.kind == Kind::Bool) return leaf.push(value.whole);
  if (is_real(kind.type) && (whole || real)) {
    const double number = whole ? static_cast<double>(value.whole) : value.real;
    return leaf.push(kind.type == Type::Float ? static_cast<double>(static_cast<float>(number)) : number);
  }
  if (is_integer(kind.type) && whole) {
    const int bits = static_cast<int>(kind.bytes * 8) - kind.is_signed;
    const bool fits = kind.is_signed ? bits == 63 || (value.whole < int64_t{1} << bits && value.whole >= -(int64_t{1} << bits))
                                     : value.whole >= 0 && (bits == 64 || value.whole < int64_t{1} << bits);
    if (fits) return leaf.push(value.whole);
  }
  wrong(name, "has data that is not " + std::string(kind.name));
}

Leaf from_json(const std::string& name, const Datatype& kind, const Value& data) {
  if (data.kind != Value::Kind::List) throw RequestError("data must be a list");
  Leaf leaf;
  leaf.set_type(kind.type);
  for (uint32_t i = 0; i < data.size; ++i) {
    const Value& item = data.items[i];
    if (item.kind != Value::Kind::List) add_values(name, kind, item, leaf);
    else
      for (uint32_t j = 0; j < item.size; ++j) add_values(name, kind, item.items[j], leaf);
  }
  return leaf;
}

const Value& member(const Value& object, const char* name, Value::Kind kind) {
  const Value* found = object.find(name);
  if (found == nullptr || found->kind != kind) malformed(std::string("'") + name + "' is missing or has the wrong type");
  return *found;
}

const Value* parameter(const Value& object, const char* name) {
  const Value* parameters = object.find("parameters");
  return parameters == nullptr ? nullptr : parameters->find(name);
}

const Datatype& datatype_of(const std::string& name, std::string_view datatype) {
  for (const Datatype& known : kDatatypes)
    if (datatype == known.name) return known;
  wrong(name, "has a datatype that the protocol does not have");
}

void check_shape(const Tensor& tensor) {
  if (tensor.shape.empty() || tensor.shape.size() > 2) wrong(tensor.name, "must have the shape [rows] or [rows, numbers]");
  uint64_t count = 1;
  for (int64_t size : tensor.shape) {
    if (size < 0 || size > int64_t{1} << 31) wrong(tensor.name, "has a negative or too large size in its shape");
    count *= static_cast<uint64_t>(size);
  }
  if (tensor.leaf.size != count)
    wrong(tensor.name, "needs " + std::to_string(count) + " values by its shape, got " + std::to_string(tensor.leaf.size));
}

Tensor read_tensor(const Value& raw, std::istream& binary, std::deque<std::string>& storage) {
  Tensor tensor;
  tensor.name = member(raw, "name", Value::Kind::Text).text().substr(0, 200);
  const Datatype& datatype = datatype_of(tensor.name, member(raw, "datatype", Value::Kind::Text).text());
  const Value& shape = member(raw, "shape", Value::Kind::List);
  for (uint32_t i = 0; i < shape.size; ++i) {
    if (shape.items[i].kind != Value::Kind::Int) wrong(tensor.name, "has a shape that is not a list of integers");
    tensor.shape.push_back(shape.items[i].whole);
  }
  if (const Value* size = parameter(raw, "binary_data_size"); size != nullptr) {
    if (size->kind != Value::Kind::Int || size->whole < 0 || size->whole > kMaxBinary) wrong(tensor.name, "has a wrong binary_data_size");
    std::string& bytes = storage.emplace_back(static_cast<size_t>(size->whole), '\0');
    if (!binary.read(bytes.data(), size->whole)) wrong(tensor.name, "has a binary_data_size beyond the end of the input");
    tensor.leaf = from_bytes(tensor.name, datatype, bytes);
  } else {
    tensor.leaf = from_json(tensor.name, datatype, member(raw, "data", Value::Kind::List));
  }
  check_shape(tensor);
  return tensor;
}

Column column_of(const Tensor& tensor, const Tensor* lengths, bool is_list) {
  Column made;
  made.leaf = tensor.leaf;
  if (lengths == nullptr && (tensor.shape.size() == 1 || (tensor.shape[1] == 1 && !is_list))) {
    made.rows = tensor.leaf.size;
    return made;
  }
  made.list = true;
  made.offsets.push_back(0);
  if (lengths == nullptr) {
    made.rows = static_cast<size_t>(tensor.shape[0]);
    check_rows(made.rows);
    for (size_t row = 1; row <= made.rows; ++row) made.offsets.push_back(static_cast<int64_t>(row) * tensor.shape[1]);
  } else {
    made.rows = lengths->leaf.size;
    check_rows(made.rows);
    if (lengths->shape.size() != 1 || !is_integer(lengths->leaf.type)) wrong(lengths->name, "must be integers [rows]: the number of values of each row");
    const auto count = static_cast<int64_t>(tensor.leaf.size);
    for (int64_t length : lengths->leaf.whole) {
      if (length < 0 || length > count - made.offsets.back()) break;
      made.offsets.push_back(made.offsets.back() + length);
    }
    if (made.offsets.size() != made.rows + 1 || made.offsets.back() != count)
      wrong(lengths->name, "must be lengths of 0 or more that add up to the " + std::to_string(count) + " of '" + tensor.name + "'");
  }
  made.null_rows.assign(made.rows, 0);
  return made;
}

}  // namespace

json inputs_of(const Mapping& mapping) {
  if (!mapping.inputs().is_null()) return mapping.inputs();
  json found = json::array();
  std::set<std::string> names;
  auto add = [&](const std::string& name, const char* kind, std::vector<int> shape) {
    if (names.insert(name).second) found.push_back({{"name", name}, {"datatype", kind}, {"shape", shape}});
  };
  const std::vector<std::string>& columns = mapping.columns();
  const std::set<std::string> read(columns.begin(), columns.end());
  const json types = mapping.schema().value("column_types", json::object());
  for (const auto& [name, plain] : types.items()) {
    if (!read.contains(name)) continue;
    const std::string kind = plain.get<std::string>();
    auto within = [&](const char* word) { return kind.find(word) != std::string::npos; };
    add(name, within("text") ? "BYTES" : within("integer") ? "INT64" : within("boolean") ? "BOOL" : "FP64", {-1});
    if (within("list")) add(name + ".lengths", "INT64", {-1});
  }
  for (const DenseFeature& one : mapping.dense())
    if (read.contains(one.column)) add(one.column, "FP64", one.width == 1 ? std::vector<int>{-1} : std::vector<int>{-1, static_cast<int>(one.width)});
  for (const SparseFeature& one : mapping.sparse()) {
    if (!read.contains(one.column)) continue;
    const char* kind = one.wants_text() ? "BYTES" : "INT64";
    const bool pairs = one.kind == SparseFeature::Kind::Weighted && one.weight_column.empty();
    add(one.column + (pairs ? ".id" : ""), kind, {-1});
    if (one.kind == SparseFeature::Kind::Id) continue;
    add(one.column + ".lengths", "INT64", {-1});
    if (pairs) add(one.column + ".weight", "FP32", {-1});
    else if (!one.weight_column.empty()) add(one.weight_column, "FP32", {-1}), add(one.weight_column + ".lengths", "INT64", {-1});
  }
  for (const std::string& name : columns)  // lists of sequences
    if (!names.contains(name) && !names.contains(name + ".id")) add(name, "FP64", {-1}), add(name + ".lengths", "INT64", {-1});
  return found;
}

Tensor tensor_of(std::string name, std::string_view datatype, std::vector<int64_t> shape, std::string_view bytes) {
  Leaf leaf = from_bytes(name, datatype_of(name, datatype), bytes);
  Tensor tensor{std::move(name), std::move(shape), std::move(leaf)};
  check_shape(tensor);
  return tensor;
}

std::vector<Tensor> read_tensors(const Value& request, std::istream& binary, std::deque<std::string>& storage) {
  std::vector<Tensor> tensors;
  const Value& inputs = member(request, "inputs", Value::Kind::List);
  for (uint32_t i = 0; i < inputs.size; ++i) tensors.push_back(read_tensor(inputs.items[i], binary, storage));
  return tensors;
}

Request request_of(std::vector<Tensor> tensors, const Mapping& mapping) {
  std::map<std::string, std::vector<int>> shapes;
  for (const json& input : inputs_of(mapping)) shapes[input["name"]] = input["shape"].get<std::vector<int>>();
  std::map<std::string, Tensor> by_name;
  for (Tensor& tensor : tensors) {
    const std::string name = tensor.name;
    if (!shapes.contains(name)) throw RequestError("the model has no input '" + name + "'");
    if (!by_name.emplace(name, std::move(tensor)).second) throw RequestError("input '" + name + "' appears twice");
  }
  std::map<std::string, Column> columns;
  for (const std::string& name : mapping.columns()) {
    const auto find = [&](const std::string& input) { const auto at = by_name.find(input); return at == by_name.end() ? nullptr : &at->second; };
    const Tensor *values = find(name), *lengths = find(name + ".lengths"), *ids = find(name + ".id"), *weights = find(name + ".weight");
    const bool is_list = shapes.contains(name + ".lengths") || (shapes.contains(name) && shapes[name].size() > 1);
    if (ids != nullptr && weights != nullptr) {
      Column pairs = column_of(*ids, lengths, true);
      const Column weight_column = column_of(*weights, lengths, true);
      if (!pairs.list || pairs.offsets != weight_column.offsets) wrong(name + ".weight", "must have as many values as '" + name + ".id'");
      pairs.weights = weight_column.leaf;
      pairs.null_pairs.assign(pairs.leaf.size, 0);
      columns.emplace(name, std::move(pairs));
    } else if (values != nullptr) {
      columns.emplace(name, column_of(*values, lengths, is_list));
    }
  }
  Request request;
  for (const auto& [name, column] : columns) request.rows.rows = std::max(request.rows.rows, column.rows);
  const size_t rows = request.rows.rows;
  check_rows(rows);
  request.context.rows = 1;
  for (auto& [name, column] : columns) {
    if (column.rows != rows && column.rows != 1)
      wrong(name, "has " + std::to_string(column.rows) + " rows, others have " + std::to_string(rows));
    (column.rows == rows ? request.rows : request.context).columns.emplace(name, std::move(column));
  }
  return request;
}

}  // namespace rayrec
