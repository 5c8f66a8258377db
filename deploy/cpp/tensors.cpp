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

constexpr size_t kMostNested = 8;

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  Leaf leaf;
};

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

[[noreturn]] void malformed(const std::string& what) {
  throw Refused(400, "the body is no inference request of the open inference protocol: " + what);
}

[[noreturn]] void wrong(const std::string& name, const std::string& what) { throw Refused(422, "input '" + name + "' " + what); }

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
    wrong(name, "holds bytes that are no UTF-8");
  }
}

Leaf from_bytes(const std::string& name, const Datatype& kind, std::string_view data) {
  Leaf leaf;
  leaf.begin(kind.type);
  if (kind.type == Type::Text) {
    while (!data.empty()) {
      const size_t size = data.size() < 4 ? data.size() : read<uint32_t>(data.data());
      if (data.size() < 4 || size > data.size() - 4) wrong(name, "holds a string that is longer than its bytes");
      check_utf8(name, data.substr(4, size));
      leaf.push(data.substr(4, size));
      data.remove_prefix(4 + size);
    }
    return leaf;
  }
  if (data.size() % kind.bytes) wrong(name, "has bytes that are no whole " + std::string(kind.name));
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
  wrong(name, "has data that are no " + std::string(kind.name));
}

Leaf from_json(const std::string& name, const Datatype& kind, const Value& data) {
  if (data.kind != Value::Kind::List) throw Refused(400, "data must be a list");
  Leaf leaf;
  leaf.begin(kind.type);
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
  if (found == nullptr || found->kind != kind) malformed(std::string("'") + name + "' is missing, or of another kind");
  return *found;
}

const Value* parameter(const Value& object, const char* name) {
  const Value* parameters = object.find("parameters");
  return parameters == nullptr ? nullptr : parameters->find(name);
}

Tensor tensor_of(const Value& raw, std::string_view& rest) {
  Tensor made;
  made.name = member(raw, "name", Value::Kind::Text).text().substr(0, 200);
  const std::string datatype(member(raw, "datatype", Value::Kind::Text).text().substr(0, 20));
  const Datatype* kind = nullptr;
  for (const Datatype& one : kDatatypes)
    if (datatype == one.name) kind = &one;
  if (kind == nullptr) wrong(made.name, "has no datatype of the protocol");
  const Value& shape = member(raw, "shape", Value::Kind::List);
  if (shape.size < 1 || shape.size > 2) wrong(made.name, "must have the shape [rows] or [rows, numbers]");
  uint64_t count = 1;
  for (uint32_t i = 0; i < shape.size; ++i) {
    const Value& size = shape.items[i];
    if (size.kind != Value::Kind::Int || size.whole < 0 || size.whole > int64_t{1} << 31) wrong(made.name, "has no shape of whole numbers");
    made.shape.push_back(size.whole);
    count *= static_cast<uint64_t>(size.whole);
  }
  if (const Value* size = parameter(raw, "binary_data_size"); size != nullptr) {
    if (size->kind != Value::Kind::Int || size->whole < 0 || static_cast<uint64_t>(size->whole) > rest.size())
      throw Refused(400, "input '" + made.name + "': binary_data_size is more than the body holds");
    made.leaf = from_bytes(made.name, *kind, rest.substr(0, static_cast<size_t>(size->whole)));
    rest.remove_prefix(static_cast<size_t>(size->whole));
  } else {
    made.leaf = from_json(made.name, *kind, member(raw, "data", Value::Kind::List));
  }
  if (made.leaf.size != count)
    wrong(made.name, "needs " + std::to_string(count) + " values by its shape, not " + std::to_string(made.leaf.size));
  return made;
}

Column column_of(const Tensor& tensor, const Tensor* lengths, bool listed, const Limits& limits) {
  Column made;
  made.leaf = tensor.leaf;
  if (lengths == nullptr && (tensor.shape.size() == 1 || (tensor.shape[1] == 1 && !listed))) {
    made.rows = tensor.leaf.size;
    return made;
  }
  made.list = true;
  made.offsets.push_back(0);
  if (lengths == nullptr) {
    made.rows = static_cast<size_t>(tensor.shape[0]);
    limits.check_rows(made.rows);
    for (size_t row = 1; row <= made.rows; ++row) made.offsets.push_back(static_cast<int64_t>(row) * tensor.shape[1]);
  } else {
    made.rows = lengths->leaf.size;
    limits.check_rows(made.rows);
    if (lengths->shape.size() != 1 || !is_integer(lengths->leaf.type)) wrong(lengths->name, "must be integers [rows]: how many values each row has");
    const auto count = static_cast<int64_t>(tensor.leaf.size);
    for (int64_t length : lengths->leaf.whole) {
      if (length < 0 || length > count - made.offsets.back()) break;
      made.offsets.push_back(made.offsets.back() + length);
    }
    if (made.offsets.size() != made.rows + 1 || made.offsets.back() != count)
      wrong(lengths->name, "must hold lengths of 0 or more that add up to the " + std::to_string(count) + " of '" + tensor.name + "'");
  }
  made.null_rows.assign(made.rows, 0);
  return made;
}

}  // namespace

json inputs_of(const Mapping& mapping) {
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

InferRequest read_tensors(const std::string& body, std::string_view json_bytes, const Mapping& mapping, const Limits& limits) {
  size_t end = body.size();
  if (!json_bytes.empty()) {
    const auto [stop, error] = std::from_chars(json_bytes.data(), json_bytes.data() + json_bytes.size(), end);
    if (error != std::errc() || stop != json_bytes.data() + json_bytes.size() || end > body.size())
      throw Refused(400, "Inference-Header-Content-Length must be a number of bytes of the body");
  }
  const auto document = std::make_shared<const Document>(std::string_view(body).substr(0, end), kMostNested);
  std::string_view rest = std::string_view(body).substr(end);
  const Value& raw = document->root();
  InferRequest made;
  made.body.documents.push_back(document);
  if (const Value* id = raw.find("id"); id != nullptr && id->kind == Value::Kind::Text) made.id = id->text();
  if (const Value* binary = parameter(raw, "binary_data_output"); binary != nullptr) made.binary = binary->kind == Value::Kind::Bool && binary->whole;
  std::map<std::string, Tensor> given;
  const Value& inputs = member(raw, "inputs", Value::Kind::List);
  for (uint32_t i = 0; i < inputs.size; ++i) {
    Tensor tensor = tensor_of(inputs.items[i], rest);
    const std::string name = tensor.name;
    if (!given.emplace(name, std::move(tensor)).second) throw Refused(422, "input '" + name + "' is there twice; give it once");
  }
  if (!rest.empty()) throw Refused(400, std::to_string(rest.size()) + " bytes of the body belong to no input");
  if (const Value* outputs = raw.find("outputs"); outputs != nullptr && outputs->kind == Value::Kind::List)
    for (uint32_t i = 0; i < outputs->size; ++i) {
      const Value* binary = parameter(outputs->items[i], "binary_data");
      made.outputs.emplace_back(member(outputs->items[i], "name", Value::Kind::Text).text(), binary == nullptr ? made.binary : binary->kind == Value::Kind::Bool && binary->whole);
    }
  std::map<std::string, std::vector<int>> known;
  for (const json& one : inputs_of(mapping)) known[one["name"]] = one["shape"].get<std::vector<int>>();
  for (const auto& [name, tensor] : given)
    if (!known.contains(name)) throw Refused(422, "the model has no input '" + name + "'; GET /v2/models/NAME lists them");
  std::map<std::string, Column> columns;
  for (const std::string& name : mapping.columns()) {
    const auto find = [&](const std::string& which) { const auto at = given.find(which); return at == given.end() ? nullptr : &at->second; };
    const Tensor *plain = find(name), *lengths = find(name + ".lengths"), *ids = find(name + ".id"), *weights = find(name + ".weight");
    const bool listed = known.contains(name + ".lengths") || (known.contains(name) && known[name].size() > 1);
    if (ids != nullptr && weights != nullptr && known.contains(name + ".id")) {
      Column made_of = column_of(*ids, lengths, true, limits);
      const Column theirs = column_of(*weights, lengths, true, limits);
      if (!made_of.list || made_of.offsets != theirs.offsets) wrong(name + ".weight", "has not as many values as '" + name + ".id'");
      made_of.weights = theirs.leaf;
      made_of.null_pairs.assign(made_of.leaf.size, 0);
      columns.emplace(name, std::move(made_of));
    } else if (plain != nullptr) {
      columns.emplace(name, column_of(*plain, lengths, listed, limits));
    }
  }
  size_t rows = 0;
  for (const auto& [name, column] : columns) rows = std::max(rows, column.rows);
  limits.check_rows(rows);
  made.body.rows.rows = rows, made.body.context.rows = 1;
  for (auto& [name, column] : columns) {
    if (column.rows != rows && column.rows != 1)
      wrong(name, "has " + std::to_string(column.rows) + " rows, others have " + std::to_string(rows));
    (column.rows == rows ? made.body.rows : made.body.context).columns.emplace(name, std::move(column));
  }
  return made;
}

}  // namespace rayrec
