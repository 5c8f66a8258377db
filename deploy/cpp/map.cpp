// rayrec_map EXPORT: maps requests and prints the inputs of the model, a line of JSON per request. Shows what becomes of a
// row, and compares mappings. With --inputs, it prints the inputs of the open inference protocol. Needs no torch.
#include <charconv>
#include <iostream>
#include <string_view>

#include "mapping.h"
#include "requests.h"
#include "tensors.h"

namespace {

using nlohmann::json;

// The shortest texts from which the float32 values can be read back.
json exact(const std::vector<float>& numbers) {
  json texts = json::array();
  for (float number : numbers) {
    char digits[32];
    texts.push_back(std::string(digits, std::to_chars(digits, digits + sizeof digits, number).ptr));
  }
  return texts;
}

json to_json(const rayrec::Mapping& mapping, const rayrec::Mapped& mapped) {
  json made{{"dense", json::object()}, {"sparse", json::object()}};
  for (size_t i = 0; i < mapped.dense.size(); ++i) made["dense"][mapping.dense()[i].name] = exact(mapped.dense[i].values);
  for (size_t i = 0; i < mapped.sparse.size(); ++i) {
    const rayrec::Bags& bags = mapped.sparse[i];
    made["sparse"][mapping.sparse()[i].name] = {{"ids", bags.ids}, {"offsets", bags.offsets}, {"weights", exact(bags.weights)}};
  }
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  const bool describes = count == 3 && std::string_view(arguments[2]) == "--inputs";
  if (count != 2 && !describes) {
    std::cerr << "usage: rayrec_map EXPORT [--inputs] < requests.jsonl" << std::endl;
    return 2;
  }
  try {
    const rayrec::Mapping mapping(arguments[1]);
    if (describes) {
      std::cout << rayrec::inputs_of(mapping).dump() << '\n';
      return 0;
    }
    for (;;) {
      json line;
      try {
        std::optional<rayrec::Request> request = rayrec::read_request(std::cin, mapping);
        if (!request) return 0;
        line = to_json(mapping, mapping.map(*request));
      } catch (const rayrec::RequestError& error) {
        line = rayrec::to_json(error);
      }
      std::cout << line.dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
