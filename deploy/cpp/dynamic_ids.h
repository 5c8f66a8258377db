// The ids of a table whose ids come and go: which id has which row.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "hashing.h"
#include "mapped_file.h"

namespace rayrec {

// File format: rayrec/dynamic_ids/exported.py. The file is read in place.
class DynamicIds {
 public:
  explicit DynamicIds(const std::string& path) : file_(path) {
    const auto* words = static_cast<const int64_t*>(file_.data());
    if (file_.size() < 64 || std::memcmp(words, "rayrec.dynamic\0\0", 16) != 0)
      throw ExportError(path + " is not an exported map of dynamic ids: export the model again");
    if (words[2] != 1) throw ExportError(path + " has version " + std::to_string(words[2]) + "; this library reads version 1: export the model again");
    buckets_ = static_cast<uint64_t>(words[3]), bucket_rows_ = static_cast<uint64_t>(words[4]), own_rows_ = static_cast<uint64_t>(words[5]);
    if (buckets_ == 0 || buckets_ >> 32 || bucket_rows_ >> 16 || own_rows_ >= bucket_rows_ || file_.size() != 64 + 8 * rows())
      throw ExportError(path + " is damaged: copy it again");
    ids_ = words + 8;
  }

  uint64_t rows() const { return buckets_ * bucket_rows_; }

  // The row of an id; for one without a row its shared row, or -1 if `shared` is false.
  int64_t find(int64_t id, bool shared) const {
    const uint64_t hash = mixed(static_cast<uint64_t>(id)), first = ((hash >> 32) * buckets_ >> 32) * bucket_rows_;
    for (uint64_t slot = 0; slot < own_rows_; ++slot)
      if (ids_[first + slot] == id) return static_cast<int64_t>(first + slot);
    if (!shared) return -1;
    return static_cast<int64_t>(first + own_rows_ + ((hash & 0xFFFFFFFFu) * (bucket_rows_ - own_rows_) >> 32));
  }

 private:
  // MurmurHash3's 64-bit finalizer.
  static constexpr uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD;
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53;
    return value ^ (value >> 33);
  }

  MappedFile file_;
  uint64_t buckets_ = 0, bucket_rows_ = 0, own_rows_ = 0;
  const int64_t* ids_ = nullptr;
};

}  // namespace rayrec
