// Columns of raw values before they are mapped, with the types that Arrow would give them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "errors.h"
#include "values.h"

namespace rayrec {

enum class Type : uint8_t { Null, Bool, Int, Unsigned, Float, Double, Text };

const char* name_of(Type type);
inline bool is_integer(Type type) { return type == Type::Int || type == Type::Unsigned; }
inline bool is_real(Type type) { return type == Type::Float || type == Type::Double; }
inline bool is_number(Type type) { return is_integer(type) || is_real(type) || type == Type::Bool; }

// Values of one type, some of which may be null.
struct Leaf {
  Type type = Type::Null;
  size_t size = 0;
  std::vector<uint8_t> nulls;           // empty: none
  std::vector<int64_t> whole;           // Bool, Int, and the bits of Unsigned
  std::vector<double> real;             // Float, Double
  std::vector<std::string_view> texts;  // Text

  bool null(size_t at) const { return type == Type::Null || (!nulls.empty() && nulls[at]); }
  // NaN of a null.
  double number(size_t at) const;
  // As Python prints it, or nearly.
  std::string shown(size_t at) const;
  void push_null();
  void push(int64_t value) { whole.push_back(value), pushed(); }
  void push(double value) { real.push_back(value), pushed(); }
  void push(std::string_view value) { texts.push_back(value), pushed(); }
  // The type, once the first value has one.
  void begin(Type wanted);

 private:
  void pushed() {
    ++size;
    if (!nulls.empty()) nulls.push_back(0);
  }
};

// A value or a list of values for every row.
struct Column {
  size_t rows = 0;
  bool list = false, deeper = false;  // deeper: lists in lists, which nothing takes
  std::vector<int64_t> offsets;       // of lists, [rows + 1]
  std::vector<uint8_t> null_rows;     // of lists, [rows]
  Leaf leaf;
  std::optional<Leaf> weights;     // beside `leaf`, where the column holds pairs of id and weight
  std::vector<uint8_t> null_pairs;  // which pairs are null as a whole

  size_t first(size_t row) const { return list ? static_cast<size_t>(offsets[row]) : row; }
  size_t last(size_t row) const { return list ? static_cast<size_t>(offsets[row + 1]) : row + 1; }
  size_t length(size_t row) const { return last(row) - first(row); }
  bool null_row(size_t row) const { return list ? null_rows[row] != 0 : leaf.null(row); }
  std::string type() const;
};

// The values of one column, a row each; nullptr is a null. Throws Refused where they have no type in common.
Column column_of(std::span<const Value* const> values, const std::string& name);

// Columns by name, all of as many rows.
struct Table {
  size_t rows = 0;
  std::map<std::string, Column, std::less<>> columns;

  bool has(std::string_view name) const { return columns.find(name) != columns.end(); }
  const Column& operator[](std::string_view name) const { return columns.find(name)->second; }
};

// What a request holds: rows, and what belongs to all of them. `texts` keeps what columns point to.
struct Body {
  Table rows, context;
  std::deque<std::string> texts;
  std::vector<std::shared_ptr<const Document>> documents;
};

// Against those who send too much or never end.
struct Limits {
  size_t body_bytes = 8u << 20, rows = 10'000, ids = 2'000'000, queue = 128;
  double body_s = 10, batch_ms = 20;

  // Throws Refused where there are too many, or none.
  void check_rows(size_t count) const;
};

// Reads {"rows": …} or {"context": …, "candidates": …}; columns that are not in `wanted` are passed over.
Body read_rows(std::string_view text, const std::vector<std::string>& wanted, const Limits& limits);

}  // namespace rayrec
