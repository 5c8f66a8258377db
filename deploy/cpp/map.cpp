// rayrec_map EXPORT: maps request bodies, a line each, as the server does, and prints what the model would read, a line of
// JSON each: to compare mappings, and to see what becomes of a row. Needs no torch.
#include <charconv>
#include <iostream>

#include "mapping.h"

namespace {

using nlohmann::json;

// The shortest texts that give the float32 back.
json exact(const std::vector<float>& numbers) {
  json made = json::array();
  for (float number : numbers) {
    char room[32];
    made.push_back(std::string(room, std::to_chars(room, room + sizeof room, number).ptr));
  }
  return made;
}

json mapped(const rayrec::Mapping& mapping, const std::string& line) {
  rayrec::Body body = rayrec::read_rows(line, mapping.columns(), {});
  const rayrec::Mapped found = mapping.map(body);
  json made{{"dense", json::object()}, {"sparse", json::object()}};
  for (size_t i = 0; i < found.dense.size(); ++i) made["dense"][mapping.dense()[i].name] = exact(found.dense[i].values);
  for (size_t i = 0; i < found.sparse.size(); ++i) {
    const rayrec::Bags& bags = found.sparse[i];
    made["sparse"][mapping.sparse()[i].name] = {{"ids", bags.ids}, {"offsets", bags.offsets}, {"weights", exact(bags.weights)}};
  }
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "rayrec_map EXPORT < bodies" << std::endl;
    return 2;
  }
  try {
    const rayrec::Mapping mapping(arguments[1]);
    for (std::string line; std::getline(std::cin, line);) {
      json made;
      try {
        made = mapped(mapping, line);
      } catch (const rayrec::Refused& error) {
        made = {{"error", error.what()}, {"status", error.status}, {"errors", json::array()}};
        for (const rayrec::Problem& one : error.problems)
          made["errors"].push_back({{"row", one.row}, {"column", one.column}, {"problem", one.problem}, {"value", one.value}});
      }
      std::cout << made.dump() << '\n';
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
