// A JSON text as a tree of small values in one arena; parsed by nlohmann/json.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

namespace rayrec {

struct Member;

// `Big` is an integer beyond int64.
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
  // A member of an object, the last of this name; nullptr where there is none.
  const Value* find(std::string_view name) const;
};

struct Member {
  std::string_view name;
  Value value;
};

// Owns all that its values point to.
class Document {
 public:
  // Throws Refused where the text is no JSON, or is nested more than `most_nested` deep.
  Document(std::string_view text, size_t most_nested);
  const Value& root() const { return root_; }

 private:
  friend class Builder;
  std::pmr::monotonic_buffer_resource arena_{16384};
  Value root_;
};

}  // namespace rayrec
