// Columns of raw values, with the types that Arrow would infer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "errors.h"
#include "json.h"

namespace rayrec {

enum class Type : uint8_t { Null, Bool, Int, Unsigned, Float, Double, Text };

const char* name_of(Type type);
inline bool is_integer(Type type) { return type == Type::Int || type == Type::Unsigned; }
inline bool is_real(Type type) { return type == Type::Float || type == Type::Double; }
inline bool is_number(Type type) { return is_integer(type) || is_real(type) || type == Type::Bool; }

// Values of one type; some may be null.
struct Leaf {
  Type type = Type::Null;
  size_t size = 0;
  std::vector<uint8_t> nulls;           // empty: no nulls
  std::vector<int64_t> whole;           // Bool, Int, and the bits of Unsigned values
  std::vector<double> real;             // Float, Double
  std::vector<std::string_view> texts;  // Text

  bool null(size_t at) const { return type == Type::Null || (!nulls.empty() && nulls[at]); }
  // NaN for a null.
  double number(size_t at) const;
  // Printed like in Python, for messages.
  std::string shown(size_t at) const;
  void push_null();
  void push(int64_t value) { whole.push_back(value), pushed(); }
  void push(double value) { real.push_back(value), pushed(); }
  void push(std::string_view value) { texts.push_back(value), pushed(); }
  // Sets the type; the values so far become nulls of it.
  void set_type(Type type);

 private:
  void pushed() {
    ++size;
    if (!nulls.empty()) nulls.push_back(0);
  }
};

// A value, or a list of values, per row.
struct Column {
  size_t rows = 0;
  bool list = false, nested = false;  // nested: lists of lists, which no feature accepts
  std::vector<int64_t> offsets;       // of lists, [rows + 1]
  std::vector<uint8_t> null_rows;     // of lists, [rows]
  Leaf leaf;
  std::optional<Leaf> weights;     // for pairs of id and weight; `leaf` has the ids
  std::vector<uint8_t> null_pairs;  // pairs that are null as a whole

  size_t first(size_t row) const { return list ? static_cast<size_t>(offsets[row]) : row; }
  size_t last(size_t row) const { return list ? static_cast<size_t>(offsets[row + 1]) : row + 1; }
  size_t length(size_t row) const { return last(row) - first(row); }
  bool null_row(size_t row) const { return list ? null_rows[row] != 0 : leaf.null(row); }
  std::string type() const;
};

// A column of JSON values, one per row; nullptr is a null. Throws RequestError if they have no common type.
Column column_of(std::span<const Value* const> values, const std::string& name);

// Columns by name, all with the same number of rows.
struct Table {
  size_t rows = 0;
  std::map<std::string, Column, std::less<>> columns;

  bool has(std::string_view name) const { return columns.find(name) != columns.end(); }
  const Column& operator[](std::string_view name) const { return columns.find(name)->second; }
};

// A request: rows, and a context that belongs to all of them.
struct Request {
  Table rows, context;
  std::shared_ptr<const void> memory;  // owns the strings of the columns
};

// Reads {"rows": …} or {"context": …, "candidates": …}; ignores columns that are not in `names`. Throws RequestError.
Request read_rows(std::shared_ptr<const Document> document, const std::vector<std::string>& names);

// Throws RequestError if there are no rows.
void check_rows(size_t count);

}  // namespace rayrec
