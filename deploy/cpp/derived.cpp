// Derived columns, like in rayrec/data/mapping/derived.
#include <algorithm>
#include <cmath>

#include "hashing.h"
#include "mapping.h"

namespace rayrec {
namespace {

[[noreturn]] void unfit(const Derived& spec, const Column& column, const std::string& why) {
  throw RequestError(Problem{-1, spec.columns[0], "derived column '" + spec.name + "' cannot be derived from " + column.type() + ": " + why,
                        "send columns of the types that training had", {}});
}

// The lists or rows of a column, with other values.
Column with_leaf(const Column& column, Leaf leaf) {
  Column made;
  made.rows = column.rows, made.list = column.list;
  made.offsets = column.offsets, made.null_rows = column.null_rows;
  made.leaf = std::move(leaf);
  return made;
}

Column buckets(const Derived& spec, const Column& column, std::vector<Problem>& problems) {
  if (column.weights || (column.leaf.type != Type::Null && !is_number(column.leaf.type))) unfit(spec, column, "numbers are needed");
  Leaf found;
  found.set_type(Type::Int);
  for (size_t row = 0; row < column.rows; ++row)
    for (size_t at = column.first(row); at < column.last(row); ++at) {
      const double number = column.leaf.number(at);
      if (std::isnan(number)) {
        if (!column.leaf.null(at))
          problems.push_back({static_cast<int64_t>(row), spec.columns[0], "derived column '" + spec.name + "': NaN is in no bucket",
                              "clean the column: a null is taken as the feature says", "nan"});
        found.push_null();
      } else {
        found.push(static_cast<int64_t>(std::upper_bound(spec.edges.begin(), spec.edges.end(), number) - spec.edges.begin()));
      }
    }
  return with_leaf(column, std::move(found));
}

Column missing(const Column& column) {
  Column made;
  made.rows = column.rows;
  made.leaf.set_type(Type::Int);
  for (size_t row = 0; row < column.rows; ++row) {
    const bool nan = !column.list && is_real(column.leaf.type) && std::isnan(column.leaf.number(row));
    made.leaf.push(static_cast<int64_t>(column.null_row(row) || nan));
  }
  return made;
}

// Hashes of a column's ids, seeded with its position in the cross.
std::vector<uint64_t> hashes(const Derived& spec, const Column& column, uint64_t place) {
  const Leaf& leaf = column.leaf;
  if (column.weights || is_real(leaf.type)) unfit(spec, column, "ids are integers or strings; use `buckets` for numbers first");
  std::vector<uint64_t> found;
  found.reserve(leaf.size);
  const uint64_t seed = seed_of({7, place});
  for (size_t at = 0; at < leaf.size; ++at) {
    uint64_t hash = leaf.type == Type::Text ? hash_text(leaf.null(at) ? "" : leaf.texts[at])
                                            : mix64(leaf.null(at) ? 0 : static_cast<uint64_t>(leaf.whole[at]));
    found.push_back(mix64(hash + seed));
  }
  return found;
}

// Pairs each value of a row with each value of the other columns. Rows with a null have no pairs.
Column cross(const Derived& spec, const Table& table) {
  Column state;
  std::vector<uint64_t> values;
  for (size_t place = 0; place < spec.columns.size(); ++place) {
    const Column& other = table[spec.columns[place]];
    std::vector<uint64_t> theirs = hashes(spec, other, place), both;
    if (place == 0) {
      state = with_leaf(other, other.leaf), values = std::move(theirs);
      continue;
    }
    Column made;
    made.rows = table.rows, made.list = state.list || other.list;
    if (made.list) made.offsets.push_back(0);
    made.leaf.set_type(Type::Int);
    for (size_t row = 0; row < table.rows; ++row) {
      const bool null = state.null_row(row) || other.null_row(row);
      if (made.list) made.null_rows.push_back(null);
      for (size_t i = state.first(row); i < state.last(row) && !(made.list && null); ++i)
        for (size_t j = other.first(row); j < other.last(row); ++j) {
          both.push_back(values[i] ^ theirs[j]);
          if (state.leaf.null(i) || other.leaf.null(j)) made.leaf.push_null();
          else made.leaf.push(int64_t{0});
        }
      if (made.list) made.offsets.push_back(static_cast<int64_t>(both.size()));
    }
    state = std::move(made), values = std::move(both);
  }
  Leaf found;
  found.set_type(Type::Int);
  for (size_t at = 0; at < values.size(); ++at) {
    if (state.leaf.null(at)) found.push_null();
    else found.push(static_cast<int64_t>(values[at]));
  }
  return with_leaf(state, std::move(found));
}

}  // namespace

void derive(const Derived& spec, Table& table, std::vector<Problem>& problems) {
  for (const std::string& name : spec.columns)
    if (table[name].nested) unfit(spec, table[name], "lists of lists");
  const Column& first = table[spec.columns[0]];
  Column made = spec.kind == Derived::Kind::Buckets   ? buckets(spec, first, problems)
                : spec.kind == Derived::Kind::Missing ? missing(first)
                                                      : cross(spec, table);
  table.columns.insert_or_assign(spec.name, std::move(made));
}

}  // namespace rayrec
