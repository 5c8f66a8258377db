#include "values.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "errors.h"

namespace rayrec {

const Value* Value::find(std::string_view name) const {
  if (kind != Kind::Object) return nullptr;
  for (const Member* one = members + size; one != members; --one)
    if (one[-1].name == name) return &one[-1].value;
  return nullptr;
}

// What nlohmann's parser calls with each part of the text.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(Document& document, size_t most_nested) : document_(document), most_nested_(most_nested) {}

  bool null() override { return add({}); }
  bool boolean(bool value) override { return add(whole(Value::Kind::Bool, value)); }
  bool number_integer(int64_t value) override { return add(whole(Value::Kind::Int, value)); }
  bool number_unsigned(uint64_t value) override {
    const bool fits = value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return add(fits ? whole(Value::Kind::Int, static_cast<int64_t>(value)) : whole(Value::Kind::Big, 0));
  }
  bool number_float(double value, const std::string& text) override {
    Value made;
    made.kind = text.find_first_of(".eE") == std::string::npos ? Value::Kind::Big : Value::Kind::Real;
    made.real = value;
    return add(made);
  }
  bool string(std::string& value) override {
    Value made;
    made.kind = Value::Kind::Text;
    made.size = static_cast<uint32_t>(value.size());
    made.bytes = kept(value).data();
    return add(made);
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return start(); }
  bool start_array(size_t) override { return start(); }
  bool key(std::string& name) override {
    names_.push_back(kept(name));
    return true;
  }
  bool end_array() override {
    Value made;
    made.kind = Value::Kind::List;
    made.size = static_cast<uint32_t>(open_.size() - starts_.back());
    auto* items = static_cast<Value*>(document_.arena_.allocate(made.size * sizeof(Value) + 1, alignof(Value)));
    std::copy(open_.begin() + static_cast<std::ptrdiff_t>(starts_.back()), open_.end(), items);
    made.items = items;
    return end(made);
  }
  bool end_object() override {
    Value made;
    made.kind = Value::Kind::Object;
    made.size = static_cast<uint32_t>(open_.size() - starts_.back());
    auto* members = static_cast<Member*>(document_.arena_.allocate(made.size * sizeof(Member) + 1, alignof(Member)));
    const size_t first_name = names_.size() - made.size;
    for (size_t i = 0; i < made.size; ++i) members[i] = {names_[first_name + i], open_[starts_.back() + i]};
    names_.resize(first_name);
    made.members = members;
    return end(made);
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string text = error.what();
    text = text.substr(text.find("] ") == std::string::npos ? 0 : text.find("] ") + 2, 300);
    for (char& letter : text)  // it quotes the body, of which any byte may be wrong
      if (letter < ' ' || letter > '~') letter = '?';
    throw Refused(400, "the body is no JSON: " + text);
  }

 private:
  static Value whole(Value::Kind kind, int64_t value) {
    Value made;
    made.kind = kind, made.whole = value;
    return made;
  }
  std::string_view kept(const std::string& text) {
    if (text.size() > std::numeric_limits<uint32_t>::max()) throw Refused(413, "a text of the body is too long");
    char* room = static_cast<char*>(document_.arena_.allocate(text.size() + 1, 1));
    std::memcpy(room, text.data(), text.size());
    return {room, text.size()};
  }
  bool add(const Value& value) {
    if (starts_.empty()) document_.root_ = value;
    else open_.push_back(value);
    return true;
  }
  bool start() {
    if (starts_.size() >= most_nested_)
      throw Refused(400, "the body is nested too deeply: a value is a number, a string, or a list of them");
    starts_.push_back(open_.size());
    return true;
  }
  bool end(const Value& made) {
    open_.resize(starts_.back());
    starts_.pop_back();
    return add(made);
  }

  Document& document_;
  const size_t most_nested_;
  std::vector<Value> open_;                // values of lists and objects that are not yet closed
  std::vector<std::string_view> names_;    // of the open objects' members
  std::vector<size_t> starts_;             // where each open list or object begins in `open_`
};

Document::Document(std::string_view text, size_t most_nested) {
  Builder builder(*this, most_nested);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
}

}  // namespace rayrec
