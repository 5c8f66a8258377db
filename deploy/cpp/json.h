// JSON values as an exported folder's index holds them: read whole, never written. Numbers are doubles.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace rayrec {

class Json {
 public:
  enum class Kind { Null, Bool, Number, String, Array, Object };

  // Throws std::runtime_error where the text is not JSON.
  static Json parse(const std::string& text) {
    Parser parser{text.c_str(), text.c_str() + text.size()};
    Json value = parser.value(0);
    parser.space();
    if (parser.at != parser.end) throw std::runtime_error("text after the end of the JSON value");
    return value;
  }

  bool null() const { return kind_ == Kind::Null; }
  bool boolean() const { return want(Kind::Bool), number_ != 0; }
  double number() const { return want(Kind::Number), number_; }
  const std::string& string() const { return want(Kind::String), string_; }
  const std::vector<Json>& array() const { return want(Kind::Array), items_; }

  const std::map<std::string, Json>& members() const { return want(Kind::Object), members_; }

  // A member of an object; throws where there is none.
  const Json& operator[](const std::string& key) const {
    want(Kind::Object);
    auto found = members_.find(key);
    if (found == members_.end()) throw std::runtime_error("no member \"" + key + "\"");
    return found->second;
  }

 private:
  struct Parser {
    const char* at;
    const char* end;

    void space() {
      while (at != end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    }
    void expect(char wanted) {
      space();
      if (at == end || *at != wanted) throw std::runtime_error(std::string("expected '") + wanted + "'");
      ++at;
    }
    bool word(const char* wanted) {
      std::string text(wanted);
      if (static_cast<size_t>(end - at) < text.size() || text != std::string(at, text.size())) return false;
      at += text.size();
      return true;
    }
    bool next_of_list(char closing) {
      space();
      if (at != end && *at == ',') return ++at, true;
      expect(closing);
      return false;
    }
    std::string text() {
      expect('"');
      std::string out;
      while (at != end && *at != '"') {
        if (*at != '\\') {
          out += *at++;
          continue;
        }
        if (++at == end) break;
        char escaped = *at++;
        switch (escaped) {
          case 'n': out += '\n'; break;
          case 't': out += '\t'; break;
          case 'r': out += '\r'; break;
          case 'b': out += '\b'; break;
          case 'f': out += '\f'; break;
          case 'u': out += '?'; at += end - at < 4 ? end - at : 4; break;  // names of files and features have none
          default: out += escaped;
        }
      }
      expect('"');
      return out;
    }
    Json value(int depth) {
      if (depth > 64) throw std::runtime_error("nested too deeply");
      space();
      Json out;
      if (at == end) throw std::runtime_error("the text ends too early");
      if (*at == '"') {
        out.kind_ = Kind::String;
        out.string_ = text();
      } else if (*at == '{') {
        ++at;
        out.kind_ = Kind::Object;
        space();
        if (at != end && *at == '}') return ++at, out;
        do {
          space();
          std::string key = text();
          expect(':');
          out.members_[key] = value(depth + 1);
        } while (next_of_list('}'));
      } else if (*at == '[') {
        ++at;
        out.kind_ = Kind::Array;
        space();
        if (at != end && *at == ']') return ++at, out;
        do out.items_.push_back(value(depth + 1));
        while (next_of_list(']'));
      } else if (word("true")) {
        out.kind_ = Kind::Bool;
        out.number_ = 1;
      } else if (word("false")) {
        out.kind_ = Kind::Bool;
      } else if (!word("null")) {
        char* stop = nullptr;
        out.kind_ = Kind::Number;
        out.number_ = std::strtod(at, &stop);
        if (stop == at) throw std::runtime_error("not a JSON value");
        at = stop;
      }
      return out;
    }
  };

  void want(Kind kind) const {
    if (kind_ != kind) throw std::runtime_error("a JSON value of another kind was expected");
  }

  Kind kind_ = Kind::Null;
  double number_ = 0;
  std::string string_;
  std::vector<Json> items_;
  std::map<std::string, Json> members_;
};

}  // namespace rayrec
