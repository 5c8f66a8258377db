// rayrec_score EXPORT: scores requests, or computes their queries, a line of JSON each, without Python.
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "model.h"
#include "requests.h"
#include "tensors.h"

namespace {

using nlohmann::json;

constexpr const char* kUsage = R"(usage: rayrec_score EXPORT [--threads N] < requests.jsonl > scores.jsonl
       rayrec_score EXPORT --describe

Scores an export (rayrec export … --target aoti). Supported features: ids by identity, hash or vocabulary; lists and
weighted lists of ids; numbers with all transforms; sequences; derived columns buckets, missing and cross; labels that
are probabilities. An export with anything else (other derived columns, times, maps, number labels) is refused, and the
message names the feature.

A line of input is {"rows": […]}, {"context": {…}, "candidates": […]} or {"inputs": […]} (requests.h).
A line of output is {"scores": {"LABEL": […]}}; of a retriever, {"queries": [[…]]}; or {"error": …, "errors": […]}
with the rows at fault.

  --threads N   cores per request (default 1)
  --describe    prints version, labels, columns and input tensors of the export as JSON

Exit status: 0; 1 if the export cannot be loaded; 2 for wrong arguments; 3 if requests were refused.)";

std::string quoted(const std::string& text) { return json(text).dump(-1, ' ', false, json::error_handler_t::replace); }

// The fewest digits from which the float32 value can be read back; null for one that is not finite.
void print(std::ostream& out, float value) {
  char digits[32];
  if (std::isfinite(value)) out.write(digits, std::to_chars(digits, digits + sizeof digits, value).ptr - digits);
  else out << "null";
}

void print_queries(std::ostream& out, const std::vector<float>& queries, size_t dim) {
  out << "{\"queries\":[";
  for (size_t at = 0; at < queries.size(); ++at) {
    out << (at % dim ? "," : at ? "],[" : "[");
    print(out, queries[at]);
  }
  out << (queries.empty() ? "]}\n" : "]]}\n");
}

void print(std::ostream& out, const std::vector<std::string>& labels, const std::vector<float>& scores) {
  out << "{\"scores\":{";
  for (size_t label = 0; label < labels.size(); ++label) {
    out << (label ? "," : "") << quoted(labels[label]) << ":[";
    for (size_t at = label; at < scores.size(); at += labels.size()) {
      out << (at == label ? "" : ",");
      print(out, scores[at]);
    }
    out << ']';
  }
  out << "}}\n";
}

}  // namespace

int main(int count, char** arguments) {
  std::string folder;
  int threads = 1;
  bool describe = false;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--threads" && i + 1 < count) threads = std::atoi(arguments[++i]);
    else if (word == "--describe") describe = true;
    else if (folder.empty() && !word.starts_with("-")) folder = word;
    else folder.clear(), i = count;
  }
  if (folder.empty() || threads < 1) {
    std::cerr << kUsage << std::endl;
    return 2;
  }
  std::ios::sync_with_stdio(false);
  try {
    rayrec::set_threads(threads);
    const rayrec::Model model(folder);
    if (describe) {
      const rayrec::Mapping& mapping = model.mapping();
      std::cout << json{{"version", model.version()}, {"labels", model.labels()}, {"columns", mapping.columns()}, {"inputs", rayrec::inputs_of(mapping)}}.dump(2) << '\n';
      return 0;
    }
    bool refused = false;
    for (;;) {
      try {
        std::optional<rayrec::Request> request = rayrec::read_request(std::cin, model.mapping());
        if (!request) return refused ? 3 : 0;
        const std::vector<float> output = model.score(model.mapping().map(*request));
        if (model.query_dim()) print_queries(std::cout, output, model.query_dim());
        else print(std::cout, model.labels(), output);
      } catch (const rayrec::RequestError& error) {
        refused = true;
        std::cout << rayrec::to_json(error).dump(-1, ' ', false, json::error_handler_t::replace) << '\n';
      }
      std::cout.flush();
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
