#include "columns.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <set>

namespace rayrec {
namespace {

constexpr int64_t kExact = int64_t{1} << 53;  // integers up to this one have an exact double
constexpr const char* kOneType = "use values of one type";

[[noreturn]] void mixed(const std::string& name, size_t row, const std::string& why) {
  throw RequestError(Problem{static_cast<int64_t>(row), name, "the values have no common type: " + why, kOneType, {}});
}

const char* kind_of(const Value& value) {
  switch (value.kind) {
    case Value::Kind::Bool: return "a boolean";
    case Value::Kind::Int:
    case Value::Kind::Big: return "an integer";
    case Value::Kind::Real: return "a number";
    case Value::Kind::Text: return "a string";
    case Value::Kind::List: return "a list";
    case Value::Kind::Object: return "an object";
    default: return "null";
  }
}

// Appends values and widens their type: integers become doubles if there is a double.
class LeafBuilder {
 public:
  LeafBuilder(Leaf& leaf, const std::string& name) : leaf_(leaf), name_(name) {}

  void add(const Value* value, size_t row) {
    if (value == nullptr || value->null()) return leaf_.push_null();
    switch (value->kind) {
      case Value::Kind::Bool: return require(Type::Bool, *value, row), leaf_.push(value->whole);
      case Value::Kind::Text: return require(Type::Text, *value, row), leaf_.push(value->text());
      case Value::Kind::Big: mixed(name_, row, "an integer is too large for 64 bits");
      case Value::Kind::Int:
        if (leaf_.type == Type::Double) return leaf_.push(exact(value->whole, row));
        return require(Type::Int, *value, row), leaf_.push(value->whole);
      case Value::Kind::Real:
        if (leaf_.type == Type::Int) to_doubles(row);
        return require(Type::Double, *value, row), leaf_.push(value->real);
      default: mixed(name_, row, "expected a value, got " + std::string(kind_of(*value)));
    }
  }

 private:
  void require(Type type, const Value& value, size_t row) {
    if (leaf_.type == Type::Null) leaf_.set_type(type);
    if (leaf_.type != type) mixed(name_, row, std::string(kind_of(value)) + " among values of type " + name_of(leaf_.type));
  }
  double exact(int64_t value, size_t row) {
    if (value > kExact || value < -kExact)
      mixed(name_, row, "integer " + std::to_string(value) + " has no exact double, and other values are fractions");
    return static_cast<double>(value);
  }
  void to_doubles(size_t row) {
    leaf_.real.reserve(leaf_.whole.size());
    for (int64_t value : leaf_.whole) leaf_.real.push_back(exact(value, row));
    leaf_.whole.clear();
    leaf_.type = Type::Double;
  }

  Leaf& leaf_;
  const std::string& name_;
};

// Rows as a list of objects, or as an object of columns.
Table table_of(const Value& rows, const std::vector<std::string>& names) {
  Table table;
  std::vector<const Value*> values;
  if (rows.kind == Value::Kind::List) {
    table.rows = rows.size;
    check_rows(table.rows);
    for (const std::string& name : names) {
      values.clear();
      bool present = false;
      for (uint32_t row = 0; row < rows.size; ++row) {
        values.push_back(rows.items[row].find(name));
        present |= values.back() != nullptr;
      }
      if (present) table.columns.emplace(name, column_of(values, name));
    }
    return table;
  }
  for (uint32_t i = 0; i < rows.size; ++i) table.rows = std::max<size_t>(table.rows, rows.members[i].value.size);
  check_rows(table.rows);
  for (const std::string& name : names) {
    const Value* column = rows.find(name);
    if (column == nullptr) continue;
    if (column->size != table.rows) {
      const std::string lengths = std::to_string(column->size) + " values, another column " + std::to_string(table.rows);
      throw RequestError(Problem{-1, name, "columns have unequal lengths: this one has " + lengths,
                            "give every column one value per row", {}});
    }
    values.clear();
    for (uint32_t row = 0; row < column->size; ++row) values.push_back(&column->items[row]);
    table.columns.emplace(name, column_of(values, name));
  }
  return table;
}

bool rows_or_columns(const Value& rows) {
  if (rows.kind == Value::Kind::List) {
    for (uint32_t i = 0; i < rows.size; ++i)
      if (rows.items[i].kind != Value::Kind::Object) return false;
    return true;
  }
  if (rows.kind != Value::Kind::Object) return false;
  for (uint32_t i = 0; i < rows.size; ++i)
    if (rows.members[i].value.kind != Value::Kind::List) return false;
  return true;
}

}  // namespace

const char* name_of(Type type) {
  constexpr const char* names[] = {"null", "bool", "int64", "uint64", "float", "double", "string"};
  return names[static_cast<size_t>(type)];
}

double Leaf::number(size_t at) const {
  if (null(at)) return std::numeric_limits<double>::quiet_NaN();
  if (is_real(type)) return real[at];
  return type == Type::Unsigned ? static_cast<double>(static_cast<uint64_t>(whole[at])) : static_cast<double>(whole[at]);
}

std::string Leaf::shown(size_t at) const {
  if (null(at)) return "None";
  if (type == Type::Bool) return whole[at] ? "True" : "False";
  if (type == Type::Text) return std::string(texts[at].substr(0, 200));
  if (type == Type::Unsigned) return std::to_string(static_cast<uint64_t>(whole[at]));
  if (type == Type::Int) return std::to_string(whole[at]);
  char digits[40];
  const auto end = type == Type::Float ? std::to_chars(digits, digits + sizeof digits, static_cast<float>(real[at])).ptr
                                       : std::to_chars(digits, digits + sizeof digits, real[at]).ptr;
  std::string text(digits, end);
  return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

void Leaf::set_type(Type new_type) {
  type = new_type;
  if (is_real(type)) real.resize(size);
  else if (type == Type::Text) texts.resize(size);
  else whole.resize(size);
}

void Leaf::push_null() {
  if (nulls.empty()) nulls.resize(size);
  nulls.push_back(1);
  ++size;
  if (is_real(type)) real.push_back(0);
  else if (type == Type::Text) texts.emplace_back();
  else if (type != Type::Null) whole.push_back(0);
}

std::string Column::type() const {
  std::string inner = name_of(leaf.type);
  if (weights) inner = "struct<id: " + inner + ", weight: " + name_of(weights->type) + ">";
  if (nested) inner = "list<item: " + inner + ">";
  return list ? "list<item: " + inner + ">" : inner;
}

Column column_of(std::span<const Value* const> values, const std::string& name) {
  Column made;
  made.rows = values.size();
  auto present = [](const Value* value) { return value != nullptr && !value->null(); };
  for (const Value* value : values) made.list |= present(value) && value->kind == Value::Kind::List;
  LeafBuilder leaf(made.leaf, name);
  if (!made.list) {
    for (size_t row = 0; row < values.size(); ++row) leaf.add(values[row], row);
    return made;
  }
  made.offsets.push_back(0);
  bool pairs = false, plain = false;
  Leaf weights;
  LeafBuilder weight(weights, name);
  for (size_t row = 0; row < values.size(); ++row) {
    const Value* value = values[row];
    made.null_rows.push_back(!present(value));
    if (present(value)) {
      if (value->kind != Value::Kind::List) mixed(name, row, std::string(kind_of(*value)) + " among lists");
      for (uint32_t i = 0; i < value->size; ++i) {
        const Value& item = value->items[i];
        if (item.kind == Value::Kind::List) throw RequestError(Problem{static_cast<int64_t>(row), name, "a list of lists", "flatten the lists to one level", {}});
        const bool pair = item.kind == Value::Kind::Object;
        pairs |= pair, plain |= !pair && !item.null();
        if (pairs && plain) mixed(name, row, "objects among plain values");
        if (!pair) {
          leaf.add(&item, row), weights.push_null(), made.null_pairs.push_back(item.null());
          continue;
        }
        const Value *id = item.find("id"), *weight_value = item.find("weight");
        for (uint32_t member = 0; member < item.size; ++member)
          if (item.members[member].name != "id" && item.members[member].name != "weight")
            throw RequestError(Problem{static_cast<int64_t>(row), name, "an object has members other than id and weight",
                                  "give {\"id\": …, \"weight\": …}", {}});
        leaf.add(id, row), weight.add(weight_value, row), made.null_pairs.push_back(0);
      }
    }
    made.offsets.push_back(static_cast<int64_t>(made.leaf.size));
  }
  if (pairs) made.weights = std::move(weights);
  return made;
}

void check_rows(size_t count) {
  if (count == 0) throw RequestError("there are no rows; send at least one");
}

Request read_rows(std::shared_ptr<const Document> document, const std::vector<std::string>& names) {
  const Value& root = document->root();
  const Value *rows = root.find("rows"), *candidates = root.find("candidates"), *context = root.find("context");
  std::set<std::string_view> unknown;
  if (root.kind == Value::Kind::Object)
    for (uint32_t i = 0; i < root.size; ++i) unknown.insert(root.members[i].name);
  unknown.erase("rows"), unknown.erase("context"), unknown.erase("candidates");
  if (!unknown.empty() || (rows == nullptr) == (candidates == nullptr))
    throw RequestError("a request must be {\"rows\": […]}, or {\"context\": {…}, \"candidates\": […]}");
  if (context != nullptr && (context->kind != Value::Kind::Object || (context->size != 0 && rows != nullptr)))
    throw RequestError("context must be an object of columns, beside candidates");
  const Value& value = rows != nullptr ? *rows : *candidates;
  if (!rows_or_columns(value))
    throw RequestError("rows (or candidates) must be a list of objects, or an object of columns, each a list");
  Request request;
  request.rows = table_of(value, names);
  request.memory = document;
  if (context == nullptr) return request;
  request.context.rows = 1;
  for (const std::string& name : names) {
    const Value* member = context->find(name);
    if (member == nullptr) continue;
    if (request.rows.has(name)) throw RequestError(Problem{-1, name, "the column is in the context and in the candidates", "send it once", {}});
    request.context.columns.emplace(name, column_of({&member, 1}, name));
  }
  return request;
}

}  // namespace rayrec
