#include "mapping.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>

#include "dynamic_ids.h"
#include "hashing.h"
#include "vocabulary.h"

namespace rayrec {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& what) {
  throw ExportError("the C++ library does not support " + what + ": score this export in Python (rayrec serve, rayrec predict)");
}

[[noreturn]] void wrong_type(const std::string& what, const std::string& wanted, const Column& column, const std::string& name,
                             const std::string& fix = "convert the column") {
  throw RequestError(Problem{-1, name, what + " must be " + wanted + "; the column's type is " + column.type(), fix, {}});
}

std::optional<double> number_in(const json& raw, const char* name) {
  const auto found = raw.find(name);
  return found == raw.end() || found->is_null() ? std::nullopt : std::optional(found->get<double>());
}

std::string text_in(const json& raw, const char* name, const std::string& otherwise) {
  const auto found = raw.find(name);
  return found == raw.end() || found->is_null() ? otherwise : found->get<std::string>();
}

bool has(const json& raw, const char* name) { return raw.contains(name) && !raw[name].is_null() && !raw[name].empty(); }

DenseFeature dense_of(const json& raw) {
  DenseFeature made;
  made.name = raw.at("name"), made.column = text_in(raw, "column", made.name);
  made.width = raw.value("width", size_t{1});
  made.fill = number_in(raw, "default");
  for (const json& step : raw.value("transforms", json::array())) {
    Transform one{};
    const std::string kind = text_in(step, "kind", "log1p");
    one.lowest = number_in(step, "lowest"), one.highest = number_in(step, "highest");
    if (kind == "log1p") one.kind = Transform::Kind::Log1p;
    else if (kind == "clip") one.kind = Transform::Kind::Clip;
    else if (kind == "standardize") {
      one.kind = Transform::Kind::Standardize;
      one.mean = step.at("mean").get<double>(), one.std = step.at("std").get<double>();
    } else if (kind == "min_max") {
      one.kind = Transform::Kind::MinMax;
      if (!one.lowest || !one.highest) throw ExportError("dense feature " + made.name + " has no fitted ends");
    } else if (kind == "quantile") {
      one.kind = Transform::Kind::Quantile;
      one.boundaries = step.at("boundaries").get<std::vector<double>>();
    } else {
      refuse("dense feature '" + made.name + "' (transform " + kind + ")");
    }
    made.transforms.push_back(std::move(one));
  }
  return made;
}

SparseFeature sparse_of(const json& raw, const std::map<std::string, uint64_t>& rows_of, const std::string& folder) {
  SparseFeature made;
  made.name = raw.at("name"), made.column = text_in(raw, "column", made.name);
  made.weight_column = text_in(raw, "weight_column", ""), made.id_type = text_in(raw, "id_type", "");
  const std::string kind = text_in(raw, "kind", "id");
  made.kind = kind == "id"                 ? SparseFeature::Kind::Id
              : kind == "id_list"          ? SparseFeature::Kind::List
              : kind == "weighted_id_list" ? SparseFeature::Kind::Weighted
                                           : (refuse("feature '" + made.name + "' (kind " + kind + ")"), SparseFeature::Kind::Id);
  const auto table = rows_of.find(made.name);
  if (table == rows_of.end()) throw ExportError("feature '" + made.name + "' is in no table: export the run again");
  made.rows = table->second;
  const auto fill = raw.find("default");
  if (fill != raw.end() && !fill->is_null()) {
    if (fill->is_string()) made.fill = fill->get<std::string>();
    else made.fill = fill->get<int64_t>();
  }
  const std::string on_null = text_in(raw, "on_null", made.fill.index() ? "default" : "error");
  made.on_null = on_null == "empty" ? OnNull::Empty : on_null == "default" ? OnNull::Default : OnNull::Error;
  if (raw.contains("max_length") && !raw["max_length"].is_null()) made.max_length = raw["max_length"].get<size_t>();
  if (raw.contains("keep") && !raw["keep"].is_string()) throw ExportError("feature '" + made.name + "': export the run again");
  made.keep_first = text_in(raw, "keep", "last") == "first";
  const json mapping = raw.value("mapping", json::object());
  const std::string law = text_in(mapping, "kind", "identity");
  if (law == "hash") {
    made.law = SparseFeature::Law::Hash;
    const auto seed = mapping.value("seed", json(0));
    made.seed = seed_of({seed.is_number_unsigned() ? seed.get<uint64_t>() : static_cast<uint64_t>(seed.get<int64_t>())});
    const auto text_law = mapping.find("text_law");  // none: an export of an earlier release
    if (text_law != mapping.end() && !text_law->is_null()) made.text_law = text_law->get<int>();
    if (made.text_law != 1 && made.text_law != 2) refuse("feature '" + made.name + "' (text_law " + text_law->dump() + ")");
  } else if (law == "vocabulary") {
    made.law = SparseFeature::Law::Vocabulary;
    made.oov_rows = mapping.value("oov_rows", uint64_t{1});
    made.vocabulary = std::make_shared<Vocabulary>(folder + "/" + mapping.at("path").get<std::string>() + ".index");
    if (made.rows < made.oov_rows + made.vocabulary->size())
      throw ExportError("feature '" + made.name + "': its table has too few rows for its vocabulary");
    const auto spread = mapping.find("spread_over");  // none: an export of an earlier release
    const uint64_t over = spread == mapping.end() || spread->is_null() ? 0 : spread->get<uint64_t>();
    if (over > made.rows || over > uint64_t{1} << 32) refuse("feature '" + made.name + "' (spread_over " + spread->dump() + ")");
    made.spread = Spread(over > made.oov_rows ? over - made.oov_rows : 0);
  } else if (law == "dynamic") {
    made.law = SparseFeature::Law::Dynamic;
    made.dynamic = std::make_shared<DynamicIds>(folder + "/" + mapping.at("path").get<std::string>());
    if (made.rows < made.dynamic->rows()) throw ExportError("feature '" + made.name + "': its table has too few rows for its ids");
    const std::string unseen = text_in(mapping, "unseen", "hashed");
    if (unseen != "hashed" && unseen != "zero") refuse("feature '" + made.name + "' (unseen " + unseen + ")");
    made.unseen_shares = unseen == "hashed";
    made.bounds = SparseFeature::Bounds::Drop;
  } else if (law == "identity") {
    const std::string bounds = text_in(mapping, "bounds", "error");
    made.bounds = bounds == "clip" ? SparseFeature::Bounds::Clip : bounds == "drop" ? SparseFeature::Bounds::Drop : SparseFeature::Bounds::Error;
  } else {
    refuse("feature '" + made.name + "' (mapping " + law + ")");
  }
  return made;
}

std::optional<Derived> derived_of(const json& raw, const std::set<std::string>& needed) {
  const std::string name = raw.at("name"), kind = raw.at("kind");
  if (!needed.contains(name)) return std::nullopt;
  Derived made{Derived::Kind::Missing, name, {}, {}};
  if (kind == "buckets") {
    made.kind = Derived::Kind::Buckets;
    if (has(raw, "boundaries")) {
      made.edges = raw["boundaries"].get<std::vector<double>>();
    } else if (has(raw, "log_base") || number_in(raw, "log_base")) {
      for (int k = 0; k < raw.value("buckets", 32) - 1; ++k) made.edges.push_back(std::pow(*number_in(raw, "log_base"), k));
    } else {
      throw ExportError("derived column '" + name + "' has no fitted boundaries");
    }
  } else if (kind == "cross") {
    made.kind = Derived::Kind::Cross;
    made.columns = raw.at("columns").get<std::vector<std::string>>();
    return made;
  } else if (kind != "missing") {
    refuse("derived column '" + name + "' (" + kind + ")");
  }
  made.columns = {raw.at("column").get<std::string>()};
  return made;
}

// In double whatever the type of the column, so that a number does not depend on the type of the numbers beside it.
double transformed(double value, const std::vector<Transform>& steps) {
  auto clip = [](double x, std::optional<double> low, std::optional<double> high) {
    if (low && x < *low) x = *low;
    if (high && x > *high) x = *high;
    return x;
  };
  for (const Transform& step : steps) switch (step.kind) {
      case Transform::Kind::Log1p:
        value = value > -1 ? std::log1p(value) : std::numeric_limits<double>::quiet_NaN();
        break;
      case Transform::Kind::Clip: value = clip(value, step.lowest, step.highest); break;
      case Transform::Kind::Standardize: value = (value - step.mean) / step.std; break;
      case Transform::Kind::MinMax: value = clip((value - *step.lowest) / (*step.highest - *step.lowest), 0.0, 1.0); break;
      case Transform::Kind::Quantile: {  // numpy.interp of the boundaries and as many numbers from 0 to 1
        const std::vector<double>& edges = step.boundaries;
        const double x = value, each = 1.0 / static_cast<double>(edges.size() - 1);
        auto at = [&](size_t place) { return place + 1 == edges.size() ? 1.0 : static_cast<double>(place) * each; };
        if (std::isnan(x)) break;
        const size_t above = static_cast<size_t>(std::upper_bound(edges.begin(), edges.end(), x) - edges.begin());
        if (above == 0) value = 0;
        else if (above == edges.size()) value = 1;
        else if (edges[above - 1] == x) value = at(above - 1);
        else {
          const double slope = (at(above) - at(above - 1)) / (edges[above] - edges[above - 1]);
          value = slope * (x - edges[above - 1]) + at(above - 1);
        }
      }
    }
  return value;
}

// Whether all values are null, or all lists are empty: the column fits any type.
bool empty_leaf(const Column& column) { return column.leaf.type == Type::Null; }

Numbers map_dense(const DenseFeature& feature, const Table& table, std::vector<Problem>& problems) {
  const Column& column = table[feature.column];
  const std::string what = "dense feature '" + feature.name + "'";
  const bool nothing = !column.list && empty_leaf(column);
  if (column.weights || column.nested || (!empty_leaf(column) && !is_number(column.leaf.type)) ||
      (!nothing && column.list != (feature.width > 1)))
    wrong_type(what, feature.width == 1 ? "a number" : "a list of " + std::to_string(feature.width) + " numbers", column, feature.column);
  std::vector<Problem> null, length, infinite;
  Numbers made;
  made.values.reserve(table.rows * feature.width);
  for (size_t row = 0; row < table.rows; ++row) {
    const auto at_row = static_cast<int64_t>(row);
    const bool absent = feature.width > 1 && (nothing || column.null_row(row));
    if (feature.width > 1 && !(absent && feature.fill) && (absent || column.length(row) != feature.width)) {
      length.push_back({at_row, feature.column, what + " must be a list of " + std::to_string(feature.width) + " numbers",
                        "write lists of equal length, or correct the feature's width",
                        "a list of " + std::to_string(absent ? 0 : column.length(row))});
      made.values.resize(made.values.size() + feature.width);
      continue;
    }
    bool finite = true;
    std::string shown;
    for (size_t i = 0; i < feature.width; ++i) {
      const size_t at = absent || nothing ? 0 : column.first(row) + i;
      const bool missing = absent || nothing || column.leaf.null(at);
      if (missing && !feature.fill) null.push_back({at_row, feature.column, what + " is null", "fill the nulls, or set `default: <number>` for feature '" + feature.name + "'", {}});
      const double raw = missing ? feature.fill.value_or(0.0) : column.leaf.number(at);
      const float value = static_cast<float>(transformed(raw, feature.transforms));
      if (!std::isfinite(value) && finite) finite = false, shown = missing ? "None" : column.leaf.shown(at);
      made.values.push_back(value);
    }
    if (!finite)
      infinite.push_back({at_row, feature.column, what + " is not a finite float32",
                          "clean the column; set a `default` for nulls, or limit the range by a `clip` transform", shown});
  }
  for (auto* found : {&length, &null, &infinite}) problems.insert(problems.end(), found->begin(), found->end());
  return made;
}

float weight_of(const Leaf& weights, size_t at, bool& finite) {
  const auto weight = static_cast<float>(weights.number(at));
  if (!std::isfinite(weight)) finite = false;
  return finite ? weight : 0.0f;
}

// The ids as integers or texts; whole floats become integers, in `converted`.
const Leaf& ids_of(const SparseFeature& feature, const Column& column, Leaf& converted) {
  const Leaf& leaf = column.leaf;
  if (!is_real(leaf.type) || column.weights) return leaf;
  converted.set_type(Type::Int);
  const double inexact = leaf.type == Type::Float ? 0x1p24 : 0x1p53;  // from here on, not every integer has a float
  for (size_t at = 0; at < leaf.size; ++at) {
    const double id = leaf.number(at);
    if (leaf.null(at) || (std::isnan(id) && !column.list)) {
      converted.push_null();
      continue;
    }
    if (!(id >= -9223372036854775808.0 && id < 9223372036854775808.0) || id != std::trunc(id))
      throw RequestError(Problem{-1, feature.column, "feature '" + feature.name + "': an id must be a whole number, not " + leaf.shown(at),
                            "send integers or strings", {}});
    if (std::abs(id) >= inexact)
      throw RequestError(Problem{-1, feature.column,
                            "feature '" + feature.name + "': the id is a float too large to hold every integer, so it may be another id, rounded",
                            "send integers or strings", std::to_string(static_cast<int64_t>(id))});
    converted.push(static_cast<int64_t>(id));
  }
  return converted;
}

void check_sparse(const SparseFeature& feature, const Column& column, const Leaf& leaf) {
  const std::string what = "feature '" + feature.name + "'";
  const bool list = feature.kind != SparseFeature::Kind::Id;
  const bool pairs = feature.kind == SparseFeature::Kind::Weighted && feature.weight_column.empty();
  if (column.nested || (list != column.list && !(list && empty_leaf(column))))
    wrong_type(what, list ? pairs ? "list<struct<id, weight>>" : "a list of ids" : "an id", column, feature.column);
  if (column.weights ? !pairs : pairs && !empty_leaf(column))
    wrong_type(what, pairs ? "list<struct<id, weight>>" : "integers or strings", column, feature.column);
  if (column.weights && column.weights->type != Type::Null && !is_number(column.weights->type))
    wrong_type(what, "a number as weight", column, feature.column);
  if (empty_leaf(column)) return;
  const bool text = leaf.type == Type::Text;
  if (!text && !is_integer(leaf.type)) wrong_type(what, "an integer or a string", column, feature.column);
  if (text && feature.law == SparseFeature::Law::Identity) wrong_type(what, "an integer", column, feature.column);
  if (!feature.id_type.empty() && text != (feature.id_type == "text"))
    throw RequestError(Problem{-1, feature.column,
                          what + " was trained on " + (text ? "integer" : "string") + " ids (id_type: " + feature.id_type + "); the column's type is " + column.type(),
                          std::string("cast the column to ") + (text ? "int64" : "string"), {}});
  if (feature.vocabulary && feature.vocabulary->text() != text)
    wrong_type(what + " has a vocabulary of " + (text ? "integers" : "strings") + "; it", text ? "an integer" : "a string", column, feature.column,
               "use a vocabulary of the column's type, or cast the column");
  if (feature.fill.index() && (feature.fill.index() == 2) != text)
    throw RequestError(Problem{-1, feature.column, what + ": its default must be " + (text ? "a string" : "an integer") + ", like the column's ids", "set a default of the column's type", {}});
}

// Weights from a second column, whose lists must be as long as those of the ids.
std::vector<float> weights_beside(const SparseFeature& feature, const Table& table, const Column& ids, std::vector<Problem>& problems) {
  const Column& column = table[feature.weight_column];
  const std::string what = "feature '" + feature.name + "'";
  if (column.nested || column.weights || (!column.list && !empty_leaf(column)) || (!empty_leaf(column) && !is_number(column.leaf.type)))
    wrong_type(what, "a list of weights", column, feature.weight_column);
  std::vector<float> made;
  std::vector<Problem> infinite;
  for (size_t row = 0; row < table.rows; ++row) {
    const size_t wanted = ids.list ? ids.length(row) : 0, found = column.list ? column.length(row) : 0;
    if (wanted != found) {
      problems.push_back({static_cast<int64_t>(row), feature.weight_column, what + ": weights and ids have different lengths",
                          "write lists of equal lengths", std::to_string(found) + " weights, " + std::to_string(wanted) + " ids"});
      made.resize(made.size() + wanted, 1.0f);
      continue;
    }
    for (size_t i = 0; i < wanted; ++i) {
      bool finite = true;
      made.push_back(weight_of(column.leaf, column.first(row) + i, finite));
      if (!finite)
        infinite.push_back({static_cast<int64_t>(row), feature.weight_column, what + " has a weight that is not a finite float32",
                            "write finite weights", column.leaf.shown(column.first(row) + i)});
    }
  }
  problems.insert(problems.end(), infinite.begin(), infinite.end());
  return made;
}

std::vector<float> weights_of_pairs(const SparseFeature& feature, const Column& column, std::vector<Problem>& problems) {
  std::vector<float> made;
  for (size_t row = 0; row < column.rows && column.list; ++row)
    for (size_t at = column.first(row); at < column.last(row); ++at) {
      bool finite = true;
      const bool null = !column.weights || column.null_pairs[at];
      made.push_back(null ? 1.0f : weight_of(*column.weights, at, finite));
      if (!finite)
        problems.push_back({static_cast<int64_t>(row), feature.column, "feature '" + feature.name + "' has a weight that is not a finite float32",
                            "write finite weights", column.weights->shown(at)});
    }
  return made;
}

Bags map_sparse(const SparseFeature& feature, const Table& table, std::vector<Problem>& problems) {
  const Column& column = table[feature.column];
  Leaf converted;
  const Leaf& leaf = ids_of(feature, column, converted);
  check_sparse(feature, column, leaf);
  const bool list = feature.kind != SparseFeature::Kind::Id, weighted = feature.kind == SparseFeature::Kind::Weighted;
  std::vector<float> weights;
  if (weighted)
    weights = feature.weight_column.empty() ? weights_of_pairs(feature, column, problems) : weights_beside(feature, table, column, problems);
  Bags made;
  made.offsets.reserve(table.rows + 1);
  made.offsets.push_back(0);
  const std::string what = "feature '" + feature.name + "'", fill_fix = "fill the nulls, or set `on_null: empty` or `default: <id>` for " + what;
  const int64_t fill = feature.on_null != OnNull::Default ? 0
                       : feature.fill.index() == 2       ? feature.row_of_text(std::get<std::string>(feature.fill))
                                                         : feature.row_of_integer(std::get<int64_t>(feature.fill));
  std::vector<Problem> null, outside, null_lists;
  const bool no_fill = feature.law == SparseFeature::Law::Dynamic && fill < 0;  // a default without a row is left out
  auto push = [&](int64_t id, float weight) {
    made.ids.push_back(id);
    if (weighted) made.weights.push_back(weight);
  };
  for (size_t row = 0; row < table.rows; ++row) {
    const auto at_row = static_cast<int64_t>(row);
    if (list && (!column.list || column.null_row(row))) {
      if (feature.on_null == OnNull::Error) null_lists.push_back({at_row, feature.column, what + " has a null list", fill_fix, "null"});
      if (feature.on_null == OnNull::Default && !no_fill) push(fill, 1.0f);
      made.offsets.push_back(static_cast<int64_t>(made.ids.size()));
      continue;
    }
    size_t first = column.first(row), last = column.last(row);
    if (feature.max_length && last - first > feature.max_length) {
      if (feature.keep_first) last = first + feature.max_length;
      else first = last - feature.max_length;
    }
    for (size_t at = first; at < last; ++at) {
      const float weight = weighted ? weights[at] : 1.0f;
      if (leaf.null(at)) {
        if (feature.on_null == OnNull::Error) null.push_back({at_row, feature.column, what + " has a null id", fill_fix, "null"});
        if (feature.on_null == OnNull::Default && no_fill) continue;
        if (feature.on_null != OnNull::Empty) push(feature.on_null == OnNull::Default ? fill : 0, weight);
        continue;
      }
      int64_t id = feature.row_of(leaf, at);
      if (id < 0) {
        if (feature.bounds == SparseFeature::Bounds::Drop) continue;
        if (feature.bounds == SparseFeature::Bounds::Clip) {
          id = leaf.type == Type::Int && leaf.whole[at] < 0 ? 0 : static_cast<int64_t>(feature.rows) - 1;
        } else {
          const bool known = feature.vocabulary == nullptr;
          outside.push_back({at_row, feature.column,
                             what + ": " + (known ? "the id is outside its table's rows [0, " + std::to_string(feature.rows) + ")" : "the id is not in its vocabulary"),
                             known ? "raise the rows of the table of '" + feature.name + "' above the largest id, or set mapping: {kind: hash}"
                                   : "build the vocabulary from this data, or set oov_rows to at least 1",
                             leaf.shown(at)});
          id = 0;
        }
      }
      push(id, weight);
    }
    made.offsets.push_back(static_cast<int64_t>(made.ids.size()));
  }
  for (auto* found : {&null, &outside, &null_lists}) problems.insert(problems.end(), found->begin(), found->end());
  return made;
}

size_t length_in(const Table& table, const std::string& column, size_t row) { return table[column].list ? table[column].length(row) : 0; }

void check_lengths(const Sequence& sequence, const std::vector<SparseFeature>& sparse, const std::vector<Bags>& bags, const Table& table,
                   std::vector<Problem>& problems) {
  const std::string first = sparse[sequence.ids[0]].column, problem = "sequence '" + sequence.name + "': the lists have different lengths";
  auto compare = [&](const std::string& column, auto found, auto wanted, const std::string& of) {
    for (size_t row = 0; row < table.rows; ++row)
      if (found(row) != wanted(row))
        problems.push_back({static_cast<int64_t>(row), column, problem,
                            "give every list of the sequence a value at each position; replace null ids by a `default` instead of dropping them",
                            std::to_string(found(row)) + " in " + column + ", " + std::to_string(wanted(row)) + " in " + of});
  };
  auto wanted = [&](size_t row) { return length_in(table, first, row); };
  auto kept = [&](size_t row) { return sequence.length ? std::min(sequence.length, wanted(row)) : wanted(row); };
  for (size_t i = 1; i < sequence.ids.size(); ++i) {
    const std::string& column = sparse[sequence.ids[i]].column;
    compare(column, [&](size_t row) { return length_in(table, column, row); }, wanted, first);
  }
  for (const SequenceValue& one : sequence.values) compare(one.column, [&](size_t row) { return length_in(table, one.column, row); }, wanted, first);
  for (size_t place : sequence.ids) {
    const std::vector<int64_t>& offsets = bags[place].offsets;
    compare(sparse[place].column, [&](size_t row) { return static_cast<size_t>(offsets[row + 1] - offsets[row]); }, kept, first + ", as read");
  }
}

// The graph does not read lists of times and numbers. They are validated like in Python, then ignored.
void check_values(const Sequence& sequence, const Table& table, std::vector<Problem>& problems) {
  for (const SequenceValue& one : sequence.values) {
    const Column& column = table[one.column];
    const Type type = column.leaf.type;
    const bool fits = type == Type::Null || is_integer(type) || (!one.time && is_real(type));
    if (column.weights || column.nested || !fits || (!column.list && type != Type::Null))
      wrong_type("'" + one.name + "' of sequence '" + sequence.name + "'", one.time ? "a list of integers" : "a list of numbers", column, one.column);
    std::vector<Problem> null;
    for (size_t row = 0; row < table.rows && column.list; ++row)
      for (size_t at = column.first(row); at < column.last(row); ++at) {
        const auto at_row = static_cast<int64_t>(row);
        if (column.leaf.null(at))
          null.push_back({at_row, one.column, "sequence '" + sequence.name + "' contains a null", "fill the nulls, or remove the event from all lists of the sequence", {}});
        else if (one.time && !one.possible(column.leaf, at))
          problems.push_back({at_row, one.column, "sequence '" + sequence.name + "': the times of '" + one.name + "' must be between 1970 and 2200 in " + one.unit,
                              "correct the column, or the `unit` of '" + one.name + "' (now " + one.unit + ")", column.leaf.shown(at)});
        else if (!one.time && !std::isfinite(static_cast<float>(column.leaf.number(at))))
          problems.push_back({at_row, one.column, "list '" + one.name + "' contains a number that is not a finite float32", "write finite numbers", column.leaf.shown(at)});
      }
    problems.insert(problems.end(), null.begin(), null.end());
  }
}

void reverse(Bags& bags) {
  for (size_t row = 0; row + 1 < bags.offsets.size(); ++row)
    std::reverse(bags.ids.begin() + bags.offsets[row], bags.ids.begin() + bags.offsets[row + 1]);
}

// The nearest number with 11 binary digits and the exponents of float16, which C++20 does not have.
double to_half(double number) {
  if (number == 0 || !std::isfinite(number)) return number;
  int exponent = 0;
  std::frexp(number, &exponent);
  const int last_digit = std::max(exponent, -13) - 11;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(number, -last_digit)), last_digit);
  return std::abs(rounded) > 65504 ? std::copysign(std::numeric_limits<double>::infinity(), number) : rounded;
}

// Converts a column that others are derived from to the type that it had in training: 0.99 is 0.9900000095 in a float32
// column, and would fall into another bucket.
void as_trained(Column& column, const std::string& name, const std::string& plain) {
  const bool list = plain.starts_with("list<");
  const std::string width = list ? plain.substr(5, plain.size() - 6) : plain;
  const bool narrow = width == "float32" || width == "float16";
  const std::string inner = narrow || width == "decimal" ? "number" : width;
  Leaf& leaf = column.leaf;
  const bool nothing = leaf.type == Type::Null;
  const bool fits = nothing || (inner == "text" && leaf.type == Type::Text) || (inner == "boolean" && leaf.type == Type::Bool) ||
                    (inner == "integer" && is_integer(leaf.type)) || (inner == "number" && (is_real(leaf.type) || leaf.type == Type::Int));
  if (!fits || column.nested || column.weights || (list != column.list && !(nothing && !column.list)))
    wrong_type("column '" + name + "'", plain, column, name, "send values of the type that training had (schema.column_types)");
  if (nothing) leaf.set_type(inner == "text" ? Type::Text : inner == "number" ? Type::Double : inner == "boolean" ? Type::Bool : Type::Int);
  if (list && !column.list) {  // nothing but nulls
    column.list = true;
    column.offsets.assign(column.rows + 1, 0), column.null_rows.assign(column.rows, 1);
    column.leaf = Leaf{};
    column.leaf.set_type(inner == "text" ? Type::Text : inner == "number" ? Type::Double : Type::Int);
  }
  if (inner == "number" && leaf.type == Type::Int) {
    for (int64_t value : leaf.whole) {
      if (value > int64_t{1} << 53 || value < -(int64_t{1} << 53))
        throw RequestError(Problem{-1, name, "cannot convert the values to number: integer " + std::to_string(value) + " has more digits than a double", "use values as in training", {}});
      leaf.real.push_back(static_cast<double>(value));
    }
    leaf.whole.clear(), leaf.type = Type::Double;
  }
  if (narrow)
    for (double& number : leaf.real) number = width == "float32" ? static_cast<double>(static_cast<float>(number)) : to_half(number);
}

void refuse_rows(std::vector<Problem> problems, size_t rows, const std::string& where) {
  std::stable_sort(problems.begin(), problems.end(), [](const Problem& a, const Problem& b) { return a.row < b.row; });
  const auto same = [](const Problem& a, const Problem& b) { return a.row == b.row; };
  problems.erase(std::unique(problems.begin(), problems.end(), same), problems.end());
  const std::string text = std::to_string(problems.size()) + " of " + std::to_string(rows) + where + " cannot be scored; " + problems[0].text();
  constexpr size_t most = 20;
  if (problems.size() > most) problems.resize(most);
  throw RequestError(text, std::move(problems));
}

}  // namespace

bool SequenceValue::possible(const Leaf& times, size_t at) const {
  constexpr int64_t latest_s = 7'258'118'400;  // 2200-01-01
  const int64_t per_second = unit == "s" ? 1 : unit == "ms" ? 1'000 : unit == "us" ? 1'000'000 : 1'000'000'000;
  return times.whole[at] >= 0 && times.whole[at] < latest_s * per_second;  // the bits of 2^63 and more are negative
}

bool SparseFeature::wants_text() const {
  return !id_type.empty() ? id_type == "text" : vocabulary ? vocabulary->text() : fill.index() == 2;
}

int64_t SparseFeature::row_of(const Leaf& leaf, size_t at) const {
  return leaf.type == Type::Text ? row_of_text(leaf.texts[at]) : row_of_integer(leaf.whole[at]);
}

int64_t SparseFeature::row_of_integer(int64_t id) const {
  const auto bits = static_cast<uint64_t>(id);
  if (law == Law::Hash) return hash_row(bits, seed, rows);
  if (law == Law::Identity) return bits < rows ? id : -1;
  if (law == Law::Dynamic) return dynamic->find(id, unseen_shares);
  const int64_t place = vocabulary->find(mix64(bits));
  if (place >= 0) return static_cast<int64_t>(spread(static_cast<uint64_t>(place)) + oov_rows);
  return oov_rows == 0 ? -1 : oov_rows == 1 ? 0 : hash_row(bits, seed_of({0}), oov_rows);
}

int64_t SparseFeature::row_of_text(std::string_view text) const {
  if (law == Law::Hash) return text_row(text, seed, rows, text_law);
  if (law == Law::Dynamic) return dynamic->find(static_cast<int64_t>(hash_text(text)), unseen_shares);
  const int64_t place = vocabulary ? vocabulary->find(hash_text(text)) : -1;
  if (place >= 0) return static_cast<int64_t>(spread(static_cast<uint64_t>(place)) + oov_rows);
  return oov_rows == 0 ? -1 : oov_rows == 1 ? 0 : hash_row(hash_string(text, 0), seed_of({0}), oov_rows);
}

Mapping::Mapping(const std::string& folder) try {
  std::ifstream file(folder + "/mapping.json");
  if (!file) throw ExportError(folder + "/mapping.json cannot be read: the export is incomplete; export the run again");
  const json raw = json::parse(file);
  schema_ = raw.at("schema");
  if (raw.contains("inputs")) inputs_ = raw["inputs"];
  std::map<std::string, uint64_t> rows_of;
  for (const json& table : raw.at("tables"))
    for (const std::string name : table.at("features")) {
      const uint64_t rows = table.at("rows").get<uint64_t>();
      rows_of[name] = rows_of.contains(name) ? std::min(rows_of[name], rows) : rows;
    }
  for (const json& one : schema_.value("dense", json::array())) dense_.push_back(dense_of(one));
  for (const json& one : schema_.value("sparse", json::array())) {
    sparse_.push_back(sparse_of(one, rows_of, folder));
    const SparseFeature& made = sparse_.back();
    const auto* fill = std::get_if<int64_t>(&made.fill);
    if (fill && made.law == SparseFeature::Law::Identity && made.row_of_integer(*fill) < 0)
      throw ExportError("feature '" + made.name + "': its default is outside its table");
  }
  for (const json& one : schema_.value("sequences", json::array())) {
    Sequence made{one.at("name"), {}, {}, 0, text_in(one, "order", "oldest_first") == "newest_first"};
    if (one.contains("length") && !one["length"].is_null()) made.length = one["length"].get<size_t>();
    for (const std::string name : one.at("ids"))
      for (size_t place = 0; place < sparse_.size(); ++place)
        if (sparse_[place].name == name) made.ids.push_back(place);
    for (const json& value : one.value("values", json::array()))
      made.values.push_back({value.at("name"), text_in(value, "column", value.at("name")), text_in(value, "kind", "number") == "time", text_in(value, "unit", "s")});
    sequences_.push_back(std::move(made));
  }
  std::set<std::string> needed;
  std::vector<std::string> read;
  for (const DenseFeature& one : dense_) read.push_back(one.column);
  for (const SparseFeature& one : sparse_) {
    read.push_back(one.column);
    if (!one.weight_column.empty()) read.push_back(one.weight_column);
  }
  for (const Sequence& one : sequences_)
    for (const SequenceValue& value : one.values) read.push_back(value.column);
  needed.insert(read.begin(), read.end());
  const json specs = schema_.value("derived", json::array());
  std::set<std::string> names;
  for (auto spec = specs.rbegin(); spec != specs.rend(); ++spec) {
    const std::optional<Derived> made = derived_of(*spec, needed);
    if (!made) continue;
    needed.insert(made->columns.begin(), made->columns.end());
    names.insert(made->name);
    read.insert(read.end(), made->columns.begin(), made->columns.end());
    derived_.insert(derived_.begin(), *made);
  }
  for (const std::string& name : read)
    if (!names.contains(name) && std::find(columns_.begin(), columns_.end(), name) == columns_.end()) columns_.push_back(name);
  const json types = schema_.value("column_types", json::object());
  for (const auto& [name, plain] : types.items()) {
    if (std::find(columns_.begin(), columns_.end(), name) == columns_.end()) continue;
    static const std::set<std::string> known{"text", "integer", "number", "float32", "float16", "decimal", "boolean"};
    const std::string kind = plain.get<std::string>();
    if (!known.contains(kind.starts_with("list<") ? kind.substr(5, kind.size() - 6) : kind)) refuse("column '" + name + "' (" + plain.get<std::string>() + ")");
    types_[name] = plain;
  }
} catch (const json::exception& error) {
  throw ExportError(folder + "/mapping.json: " + error.what() + "; export the run again");
}

bool Mapping::weighted() const {
  return std::any_of(sparse_.begin(), sparse_.end(), [](const SparseFeature& one) { return one.kind == SparseFeature::Kind::Weighted; });
}

int64_t Mapping::num_dense() const {
  int64_t count = 0;
  for (const DenseFeature& one : dense_) count += static_cast<int64_t>(one.width);
  return count;
}

Mapped Mapping::map(Request& request) const {
  Table &rows = request.rows, &context = request.context;
  for (const std::string& name : columns_) {
    if (!rows.has(name) && !context.has(name))
      throw RequestError(Problem{-1, name, "column '" + name + "' is missing", "send it in every row, or in the context", {}});
    if (const auto plain = types_.find(name); plain != types_.end())
      as_trained((rows.has(name) ? rows : context).columns.find(name)->second, name, plain->second);
  }
  auto part_of = [&](const std::vector<std::string>& names) -> Table& {
    Table& found = context.has(names[0]) ? context : rows;
    for (const std::string& name : names)
      if (!found.has(name))
        throw RequestError(Problem{-1, name, "columns '" + names[0] + "' and '" + name + "' belong together", "send all in the context, or none", {}});
    return found;
  };
  std::vector<Problem> of_rows, of_context;
  auto problems = [&](const Table& part) -> std::vector<Problem>& { return &part == &context ? of_context : of_rows; };
  for (const Derived& spec : derived_) {
    Table& part = part_of(spec.columns);
    derive(spec, part, problems(part));
  }
  Mapped made;
  made.rows = static_cast<int64_t>(rows.rows);
  for (const DenseFeature& feature : dense_) {
    const Table& part = part_of({feature.column});
    made.dense.push_back(map_dense(feature, part, problems(part)));
    made.dense.back().shared = &part == &context;
  }
  for (const SparseFeature& feature : sparse_) {
    std::vector<std::string> names{feature.column};
    if (!feature.weight_column.empty()) names.push_back(feature.weight_column);
    const Table& part = part_of(names);
    made.sparse.push_back(map_sparse(feature, part, problems(part)));
    made.sparse.back().shared = &part == &context;
  }
  for (const Sequence& sequence : sequences_) {
    std::vector<std::string> names;
    for (size_t place : sequence.ids) names.push_back(sparse_[place].column);
    for (const SequenceValue& one : sequence.values) names.push_back(one.column);
    const Table& part = part_of(names);
    check_lengths(sequence, sparse_, made.sparse, part, problems(part));
    check_values(sequence, part, problems(part));
    for (size_t place : sequence.ids)
      if (sequence.newest_first) reverse(made.sparse[place]);
  }
  if (!of_context.empty()) refuse_rows(std::move(of_context), 1, " contexts");
  if (!of_rows.empty()) refuse_rows(std::move(of_rows), rows.rows, " rows");
  return made;
}

}  // namespace rayrec
