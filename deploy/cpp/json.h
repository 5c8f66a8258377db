// A JSON text as a tree of small values in one arena. nlohmann/json parses it.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

namespace rayrec {

struct Member;

// `Big` is an integer that does not fit int64.
struct Value {
  enum class Kind : uint8_t { Null, Bool, Int, Big, Real, Text, List, Object };
  Kind kind = Kind::Null;
  uint32_t size = 0;  // of a text, list or object
  union {
    int64_t whole = 0;  // Int, Bool
    double real;
    const char* bytes;
    const Value* items;
    const Member* members;
  };

  bool null() const { return kind == Kind::Null; }
  std::string_view text() const { return {bytes, size}; }
  // The last member of this name; nullptr if there is none, or this is not an object.
  const Value* find(std::string_view name) const;
};

struct Member {
  std::string_view name;
  Value value;
};

// Owns the memory of its values.
class Document {
 public:
  // Throws RequestError if the text is not valid JSON or is nested deeper than `max_depth`.
  Document(std::string_view text, size_t max_depth);
  const Value& root() const { return root_; }

 private:
  friend class Builder;
  std::pmr::monotonic_buffer_resource arena_{16384};
  Value root_;
};

}  // namespace rayrec
