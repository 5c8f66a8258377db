// The index of a vocabulary: which ids have a table row of their own.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "mapped_file.h"
#include "hashing.h"

namespace rayrec {

// File format: three uint64 (number of ids, whether they are strings, number of cells); then a hash per cell (uint64),
// ascending except for empty cells, and a position per cell (uint32). A search starts at the cell that a hash selects and
// ends at the first hash that is not smaller (rayrec/data/mapping/id_index.py).
class Vocabulary {
 public:
  explicit Vocabulary(const std::string& path) : file_(path) {
    const auto* words = static_cast<const uint64_t*>(file_.data());
    if (file_.size() < 24 || file_.size() != 24 + words[2] * 12) throw ExportError(path + " is damaged: copy it again");
    size_ = words[0], text_ = words[1] != 0;
    hashes_ = {words + 3, words[2]};
    positions_ = {reinterpret_cast<const uint32_t*>(words + 3 + words[2]), words[2]};
    cells_ = std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(size_) / 0.7));
    if (hashes_.size() <= cells_ || positions_.back() != kEmpty) throw ExportError(path + " is damaged: copy it again");
  }

  uint64_t size() const { return size_; }
  bool text() const { return text_; }

  // The position of an id in the vocabulary, by its hash; -1 if it is unknown. The last cell is empty and ends every search.
  int64_t find(uint64_t hash) const {
    uint64_t at = ((hash >> 32) * cells_) >> 32;
    while (at + 1 < hashes_.size() && hashes_[at] < hash) ++at;
    return hashes_[at] == hash && positions_[at] != kEmpty ? static_cast<int64_t>(positions_[at]) : -1;
  }

 private:
  static constexpr uint32_t kEmpty = 0xFFFFFFFFu;
  MappedFile file_;
  uint64_t size_ = 0, cells_ = 1;
  bool text_ = false;
  std::span<const uint64_t> hashes_;
  std::span<const uint32_t> positions_;
};

}  // namespace rayrec
