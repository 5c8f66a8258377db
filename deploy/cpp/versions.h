// Which export answers, and the watch for newer ones, which take over between two requests or not at all.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "model.h"

namespace rayrec {

// The export that a path stands for: itself; or, of a folder of exports, the one that a file `current` names, else the
// last by name, whose numbers count as numbers: v10 is after v9. Throws ExportError.
std::string newest(const std::string& path);

class Versions {
 public:
  // Loads the newest. Throws ExportError.
  Versions(std::string path, size_t runners, int cores, std::chrono::milliseconds pause);

  // The version that answers now, kept for one request.
  std::shared_ptr<const Model> take() const { return model_.load(); }

  // Looks for newer versions until `stop`: each is loaded beside the old one, its checksums and parity are checked, it
  // scores a row, then it takes over; one that fails is not read again before one of its files changes,
  // or after a wait, twice as long each time.
  void watch(const std::atomic<bool>& stop, const std::function<void(bool)>& changed);

  // Why the newest version does not answer; empty where it does.
  std::string refused() const;

 private:
  const std::string path_;
  const size_t runners_;
  const int cores_;
  const std::chrono::milliseconds pause_;
  std::atomic<std::shared_ptr<const Model>> model_;
  std::atomic<std::shared_ptr<const std::string>> refused_;
};

}  // namespace rayrec
