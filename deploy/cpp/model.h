// An export (`rayrec export … --target aoti`) that scores mapped rows. Needs no Python.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "mapping.h"

namespace rayrec {

// Sets the number of cores that the calling thread computes on.
void set_threads(int count);

class Model {
 public:
  // Loads an export and maps its tables into memory. Checks the versions of torch and processor, the size and the checksum of
  // every file, that the parity is within its limits, and that a row of zeros has a finite score. Throws ExportError.
  //
  // runners: calls of `score` that may run at the same time; further calls wait.
  explicit Model(const std::string& folder, size_t runners = 1);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Probabilities [rows, labels] of the rows that `mapping().map()` returns; of a retriever's export, queries
  // [rows, query_dim()]. Several threads may call it.
  std::vector<float> score(const Mapped& mapped) const;

  const std::string& version() const;
  const Mapping& mapping() const;
  // Empty for a retriever.
  const std::vector<std::string>& labels() const;
  // Width of a retriever's queries; 0: the model scores rows.
  size_t query_dim() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rayrec
