// The order of a vocabulary's ids in the rows of a table.
#pragma once

#include <cstdint>
#include <numeric>

namespace rayrec {

// Position `k` of a vocabulary has row `k * multiplier mod size` (rayrec/data/mapping/spread.py); positions from `size`
// on keep their order.
class Spread {
 public:
  // size: at most 2^32, so that the products fit 64 bits.
  explicit Spread(uint64_t size) : size_(size), multiplier_(size * 2'654'435'769 >> 32) {
    while (size_ && std::gcd(multiplier_, size_) != 1) ++multiplier_;
  }

  uint64_t operator()(uint64_t position) const { return position < size_ ? position * multiplier_ % size_ : position; }

 private:
  uint64_t size_, multiplier_;
};

}  // namespace rayrec
