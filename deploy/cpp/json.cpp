#include "json.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "errors.h"

namespace rayrec {

const Value* Value::find(std::string_view name) const {
  if (kind != Kind::Object) return nullptr;
  for (const Member* member = members + size; member != members; --member)
    if (member[-1].name == name) return &member[-1].value;
  return nullptr;
}

// Receives the events of nlohmann's parser.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(Document& document, size_t max_depth) : document_(document), max_depth_(max_depth) {}

  bool null() override { return add({}); }
  bool boolean(bool value) override { return add(whole(Value::Kind::Bool, value)); }
  bool number_integer(int64_t value) override { return add(whole(Value::Kind::Int, value)); }
  bool number_unsigned(uint64_t value) override {
    const bool fits = value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return add(fits ? whole(Value::Kind::Int, static_cast<int64_t>(value)) : whole(Value::Kind::Big, 0));
  }
  bool number_float(double value, const std::string& text) override {
    Value node;
    node.kind = text.find_first_of(".eE") == std::string::npos ? Value::Kind::Big : Value::Kind::Real;
    node.real = value;
    return add(node);
  }
  bool string(std::string& value) override {
    Value node;
    node.kind = Value::Kind::Text;
    node.size = static_cast<uint32_t>(value.size());
    node.bytes = copied(value).data();
    return add(node);
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return start(); }
  bool start_array(size_t) override { return start(); }
  bool key(std::string& name) override {
    names_.push_back(copied(name));
    return true;
  }
  bool end_array() override {
    Value node;
    node.kind = Value::Kind::List;
    node.size = static_cast<uint32_t>(open_.size() - starts_.back());
    auto* items = static_cast<Value*>(document_.arena_.allocate(node.size * sizeof(Value) + 1, alignof(Value)));
    std::copy(open_.begin() + static_cast<std::ptrdiff_t>(starts_.back()), open_.end(), items);
    node.items = items;
    return end(node);
  }
  bool end_object() override {
    Value node;
    node.kind = Value::Kind::Object;
    node.size = static_cast<uint32_t>(open_.size() - starts_.back());
    auto* members = static_cast<Member*>(document_.arena_.allocate(node.size * sizeof(Member) + 1, alignof(Member)));
    const size_t first_name = names_.size() - node.size;
    for (size_t i = 0; i < node.size; ++i) members[i] = {names_[first_name + i], open_[starts_.back() + i]};
    names_.resize(first_name);
    node.members = members;
    return end(node);
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string text = error.what();
    text = text.substr(text.find("] ") == std::string::npos ? 0 : text.find("] ") + 2, 300);
    for (char& letter : text)  // the message quotes the text, which may contain any bytes
      if (letter < ' ' || letter > '~') letter = '?';
    throw RequestError("not valid JSON: " + text);
  }

 private:
  static Value whole(Value::Kind kind, int64_t value) {
    Value node;
    node.kind = kind, node.whole = value;
    return node;
  }
  std::string_view copied(const std::string& text) {
    if (text.size() > std::numeric_limits<uint32_t>::max()) throw RequestError("a string is longer than 4 GiB");
    char* copy = static_cast<char*>(document_.arena_.allocate(text.size() + 1, 1));
    std::memcpy(copy, text.data(), text.size());
    return {copy, text.size()};
  }
  bool add(const Value& value) {
    if (starts_.empty()) document_.root_ = value;
    else open_.push_back(value);
    return true;
  }
  bool start() {
    if (starts_.size() >= max_depth_)
      throw RequestError("nested too deeply: a value is a number, a string, or a list of them");
    starts_.push_back(open_.size());
    return true;
  }
  bool end(const Value& node) {
    open_.resize(starts_.back());
    starts_.pop_back();
    return add(node);
  }

  Document& document_;
  const size_t max_depth_;
  std::vector<Value> open_;                // values of the lists and objects that are still open
  std::vector<std::string_view> names_;    // names of the open objects' members
  std::vector<size_t> starts_;             // start of each open list or object in `open_`
};

Document::Document(std::string_view text, size_t max_depth) {
  Builder builder(*this, max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
}

}  // namespace rayrec
