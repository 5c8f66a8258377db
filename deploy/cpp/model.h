// An exported model (`rayrec export … --target aoti`), loaded to score mapped rows. No Python anywhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace rayrec {

// A folder that is no whole export, or does not fit this machine; the text names the file.
struct ExportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Rows that cannot be scored; the text names feature and row.
struct BadRows : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Mapped rows: B examples, F features, n ids. Nothing is copied.
struct Rows {
  int64_t size = 0;                  // B
  std::span<const float> dense;      // [B, N]
  std::span<const int64_t> offsets;  // [F * B + 1], feature after feature
  std::span<const int64_t> ids;      // [n]
  std::span<const float> weights;    // [n], where the model's ids have weights
};

class Model {
 public:
  // Checks torch and processor, the size of every file and the checksum of all (`checksums`), maps the tables, loads
  // the compiled graph. `runners`: calls that may run at the same time.
  explicit Model(const std::string& folder, size_t runners = 1, bool checksums = true);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Logits [B * labels]. Threads may call it at the same time. Throws BadRows before the kernel sees a wrong id.
  std::vector<float> score(const Rows& rows) const;

  const std::string& version() const;
  int64_t num_features() const;
  int64_t num_dense() const;
  int64_t num_labels() const;
  bool weighted() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A model as a service takes it: its parity is within limits, and a row of zeros gives a number. Throws ExportError.
std::shared_ptr<const Model> load_to_serve(const std::string& folder, size_t runners);

// The version that a folder holds, without loading it.
std::string version_of(const std::string& folder);

// The version that answers now: `take` keeps it for one request, `put` lets another take over.
class Current {
 public:
  std::shared_ptr<const Model> take() const { return model_.load(); }
  void put(std::shared_ptr<const Model> model) { model_.store(std::move(model)); }

 private:
  std::atomic<std::shared_ptr<const Model>> model_;
};

}  // namespace rayrec
