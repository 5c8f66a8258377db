// Raw columns to what a model reads, as the export's mapping.json says: the law of rayrec/data/mapping, in C++. Equal bit
// by bit (tests/inference/test_cpp_mapping.py). What is not done here is refused when the mapping is read, by name.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "columns.h"

namespace rayrec {

// The ids of a feature, bag after bag, as rows of its table.
struct Bags {
  bool shared = false;  // one bag, which belongs to every row
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights;  // one an id, where the feature has some
};

struct Numbers {
  bool shared = false;
  std::vector<float> values;  // [rows, width]
};

// Mapped rows, a part a feature.
struct Mapped {
  int64_t rows = 0;
  std::vector<Numbers> dense;
  std::vector<Bags> sparse;
  size_t ids = 0;  // as they are looked up: those of a shared bag once a row
};

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
  std::optional<double> fill;  // for a null
  std::vector<Transform> transforms;
};

struct SparseFeature {
  enum class Kind { Id, List, Weighted } kind = Kind::Id;
  enum class Law { Identity, Hash, Vocabulary } law = Law::Identity;
  enum class Bounds { Error, Clip, Drop } bounds = Bounds::Error;
  std::string name, column, weight_column, id_type;
  OnNull on_null = OnNull::Error;
  std::variant<std::monostate, int64_t, std::string> fill;  // for a null
  size_t max_length = 0;                                    // 0: any
  bool keep_first = false;
  uint64_t seed = 0, rows = 0, oov_rows = 1;
  std::shared_ptr<const Vocabulary> vocabulary;

  // The row of one id, negative for an unknown one or one outside.
  int64_t row_of(const Leaf& leaf, size_t at) const;
  int64_t row_of_integer(int64_t id) const;
  int64_t row_of_text(std::string_view text) const;
  bool wants_text() const;
};

struct SequenceValue {
  std::string name, column;
  bool time = false;
};

struct Sequence {
  std::string name;
  std::vector<size_t> ids;  // places among the sparse features
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
  // That of an export's folder. Throws ExportError.
  explicit Mapping(const std::string& folder);

  // The columns that a row has, each once.
  const std::vector<std::string>& columns() const { return columns_; }
  const std::vector<DenseFeature>& dense() const { return dense_; }
  const std::vector<SparseFeature>& sparse() const { return sparse_; }
  const nlohmann::json& schema() const { return schema_; }
  bool weighted() const;
  int64_t num_dense() const;

  // Throws Refused with every wrong row; of a request all rows are mapped, or none.
  Mapped map(Body& body) const;

 private:
  nlohmann::json schema_;
  std::vector<std::string> columns_;
  std::vector<DenseFeature> dense_;
  std::vector<SparseFeature> sparse_;
  std::vector<Sequence> sequences_;
  std::vector<Derived> derived_;  // those that features are made of, in their order
  std::map<std::string, std::string> types_;
};

// Adds a derived column to the table. Wrong rows are noted in `problems`, wrong columns refused.
void derive(const Derived& spec, Table& table, std::vector<Problem>& problems);

}  // namespace rayrec
