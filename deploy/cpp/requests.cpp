#include "requests.h"

#include <deque>
#include <memory>
#include <string>

#include "json.h"
#include "tensors.h"

namespace rayrec {
namespace {

constexpr size_t kMaxDepth = 8;

// Owns what the columns of a request point to.
struct Memory {
  std::shared_ptr<const Document> document;
  std::deque<std::string> tensors;
};

}  // namespace

std::optional<Request> read_request(std::istream& in, const Mapping& mapping) {
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  auto document = std::make_shared<const Document>(line, kMaxDepth);
  if (document->root().find("inputs") == nullptr) return read_rows(document, mapping.columns());
  auto memory = std::make_shared<Memory>(Memory{document, {}});
  Request request = request_of(read_tensors(document->root(), in, memory->tensors), mapping);
  request.memory = memory;
  return request;
}

nlohmann::json to_json(const RequestError& error) {
  nlohmann::json made{{"error", error.what()}, {"errors", nlohmann::json::array()}};
  for (const Problem& problem : error.problems)
    made["errors"].push_back({{"row", problem.row < 0 ? nlohmann::json() : nlohmann::json(problem.row)},
                              {"column", problem.column},
                              {"value", problem.value},
                              {"problem", problem.problem},
                              {"fix", problem.fix}});
  return made;
}

}  // namespace rayrec
