// An exported model (`rayrec export … --target aoti`), loaded to score mapped rows. No Python anywhere.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "errors.h"
#include "mapping.h"

namespace rayrec {

// Milliseconds of a call of the graph, and of each of its rows.
struct Pace {
  double call_ms = 0, row_ms = 0.05;
};

// How many cores the calling thread computes on.
void use_cores(int count);

class Model {
 public:
  // Checks torch and processor, the size of every file and the checksum of all (`checksums`), reads the mapping, maps the
  // tables, loads the compiled graph. `runners`: calls that may run at the same time. Throws ExportError.
  explicit Model(const std::string& folder, size_t runners = 1, bool checksums = true);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Probabilities [B, labels] of the rows of one request, or of several. Threads may call it at the same time.
  std::vector<float> score(std::span<const Mapped* const> parts) const;

  const std::string& version() const;
  const Mapping& mapping() const;
  const std::vector<std::string>& labels() const;

  Pace pace;  // as measured before it serves

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A model as a service takes it: its parity is within limits, and a row of zeros gives a number;
// its pace on so many cores is measured. Throws ExportError.
std::shared_ptr<const Model> load_to_serve(const std::string& folder, size_t runners, int cores);

// The version that a folder holds, without loading it. Throws ExportError.
std::string version_of(const std::string& folder);

}  // namespace rayrec
