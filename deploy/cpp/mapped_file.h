// The bytes of a file, mapped read-only into memory; processes that map the same file share them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "errors.h"

namespace rayrec {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (file < 0 || ::fstat(file, &found) != 0) {
      if (file >= 0) ::close(file);
      throw ExportError(path + " is missing from the export, or the export is from an older rayrec: run `rayrec export` again");
    }
    size_ = static_cast<size_t>(found.st_size);
    data_ = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
    ::close(file);
    if (data_ == MAP_FAILED) throw ExportError(path + " cannot be mapped");
  }
  ~MappedFile() {
    if (data_ != nullptr && data_ != MAP_FAILED) ::munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace rayrec
