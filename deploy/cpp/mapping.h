// Maps raw columns to the inputs of a model, by an export's mapping.json: rayrec/data/mapping in C++, bit by bit
// (tests/inference/test_cpp_mapping.py).
//
// Supported: ids by identity, hash or vocabulary, and dynamic ids; lists and weighted lists of ids; numbers with all transforms; sequences;
// derived columns `buckets`, `missing` and `cross`. Loading an export with anything else (other derived columns, times,
// maps, number labels) fails and names the feature.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "columns.h"
#include "spread.h"

namespace rayrec {

// The ids of a feature as rows of its table, bag after bag.
struct Bags {
  bool shared = false;  // a single bag, which belongs to every row
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights;  // one per id; empty for features without weights
};

struct Numbers {
  bool shared = false;
  std::vector<float> values;  // [rows, width]
};

// Mapped rows, feature by feature.
struct Mapped {
  int64_t rows = 0;
  std::vector<Numbers> dense;
  std::vector<Bags> sparse;
};

class DynamicIds;
class Vocabulary;

enum class OnNull { Error, Empty, Default };

struct Transform {
  enum class Kind { Log1p, Clip, Standardize, MinMax, Quantile } kind;
  std::optional<double> lowest, highest;  // Clip, MinMax
  double mean = 0, std = 1;
  std::vector<double> boundaries;
};

struct DenseFeature {
  std::string name, column;
  size_t width = 1;
  std::optional<double> fill;  // replaces nulls
  std::vector<Transform> transforms;
};

struct SparseFeature {
  enum class Kind { Id, List, Weighted } kind = Kind::Id;
  enum class Law { Identity, Hash, Vocabulary, Dynamic } law = Law::Identity;
  enum class Bounds { Error, Clip, Drop } bounds = Bounds::Error;
  std::string name, column, weight_column, id_type;
  OnNull on_null = OnNull::Error;
  std::variant<std::monostate, int64_t, std::string> fill;  // replaces nulls
  size_t max_length = 0;                                    // 0: unlimited
  bool keep_first = false;
  uint64_t seed = 0, rows = 0, oov_rows = 1;
  Spread spread{0};  // of the ids of a vocabulary over rows
  int text_law = 1;  // version of the hash of strings
  std::shared_ptr<const Vocabulary> vocabulary;
  std::shared_ptr<const DynamicIds> dynamic;
  bool unseen_shares = true;  // whether a dynamic id without a row has a shared one; if not, it is left out

  // The table row of an id; negative if the id is unknown or outside the table.
  int64_t row_of(const Leaf& leaf, size_t at) const;
  int64_t row_of_integer(int64_t id) const;
  int64_t row_of_text(std::string_view text) const;
  bool wants_text() const;
};

struct SequenceValue {
  std::string name, column;
  bool time = false;
  std::string unit;  // of times: "s", "ms", "us" or "ns"

  // Whether an integer that is not null is a time from 1970 to 2200.
  bool possible(const Leaf& times, size_t at) const;
};

struct Sequence {
  std::string name;
  std::vector<size_t> ids;  // indices of sparse features
  std::vector<SequenceValue> values;
  size_t length = 0;
  bool newest_first = false;
};

struct Derived {
  enum class Kind { Buckets, Missing, Cross } kind;
  std::string name;
  std::vector<std::string> columns;
  std::vector<double> edges;
};

class Mapping {
 public:
  // Reads the mapping of an export. Throws ExportError.
  explicit Mapping(const std::string& folder);

  // The columns of a row, without repetition.
  const std::vector<std::string>& columns() const { return columns_; }
  const std::vector<DenseFeature>& dense() const { return dense_; }
  const std::vector<SparseFeature>& sparse() const { return sparse_; }
  const nlohmann::json& schema() const { return schema_; }
  // The inputs of the open inference protocol; null in exports of earlier releases.
  const nlohmann::json& inputs() const { return inputs_; }
  bool weighted() const;
  int64_t num_dense() const;

  // Throws RequestError with all wrong rows.
  Mapped map(Request& request) const;

 private:
  nlohmann::json schema_, inputs_;
  std::vector<std::string> columns_;
  std::vector<DenseFeature> dense_;
  std::vector<SparseFeature> sparse_;
  std::vector<Sequence> sequences_;
  std::vector<Derived> derived_;  // those that features read, in order
  std::map<std::string, std::string> types_;
};

// Adds a derived column to the table and wrong rows to `problems`. Throws RequestError for a wrong column.
void derive(const Derived& spec, Table& table, std::vector<Problem>& problems);

}  // namespace rayrec
